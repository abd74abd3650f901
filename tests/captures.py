"""What the docs show of the terminal: ``python -m tests.captures [NAME ...]`` writes ``docs/captures/<NAME>.svg``.

Each capture runs a real command and records what it prints; another one is a function more in ``CAPTURES``.

``python -m tests.captures demo`` writes the answer of ``make demo`` into README.md and docs/quickstart.svg. It reads
the results from this directory's store (or ``ORCHESTRATOR_STORE``) and keeps them in docs/captures/quickstart.json,
from which ``python -m tests.captures readme`` does the same where nothing was trained: after a change of the report.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from orchestrator.cli.commands.plan import PlanOptions, show_plan
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed, read_committed
from orchestrator.report.render.answers import answers
from orchestrator.report.render.columns import text_table
from orchestrator.report.render.curves import draw_curve, encode_svg
from orchestrator.report.render.terminal import FittingTable, render_terminal
from orchestrator.report.results import Report
from orchestrator.services.fleets import StatedCluster
from orchestrator.services.stores import open_existing_store
from orchestrator.storage import ObjectStore
from orchestrator.sweepfile import load_sweep

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "captures"
README, CURVE, RESULTS = ROOT / "README.md", ROOT / "docs" / "quickstart.svg", FOLDER / "quickstart.json"
_DEMO = re.compile(r"(?<=ends like this:\n\n```\n).*?(?=\n```\n)", re.DOTALL)
"""What README.md shows of the quickstart's report."""
_WIDTH, _README_WIDTH = 118, 100


def capture_plan(console: Console) -> None:
    """The plan of the quickstart on a machine with four cores, where nothing has run yet."""
    options = PlanOptions(cluster=StatedCluster(cpus=4), store="file:///project/.orchestrator/store")
    with patch("orchestrator.cli.commands.plan.stdout_console", lambda: console):
        show_plan("quickstart", options)


def capture_report(console: Console) -> None:
    """The report of the quickstart, from the results that are kept."""
    console.print(render_terminal(demo_report()))


CAPTURES: Mapping[str, tuple[str, Callable[[Console], None]]] = {
    "plan": ("orchestrator plan quickstart --cpus 4", capture_plan),
    "report": ("orchestrator report quickstart", capture_report),
}
"""By file name: the command as people type it, and what records it."""


def make(name: str, folder: Path = FOLDER) -> Path:
    """Record one capture; returns its file."""
    command, record = CAPTURES[name]
    nowhere = StringIO()  # only the record counts
    console = Console(
        record=True, file=nowhere, width=_WIDTH, force_terminal=True, color_system="truecolor", highlight=False
    )
    record(console)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    path.write_text(console.export_svg(title=command, unique_id=f"capture-{name}"), encoding="utf-8")
    return path


def keep_results(store: ObjectStore) -> None:
    """Write the results of the quickstart that are in a store to ``RESULTS``, but for how long they took."""
    plan = _quickstart()
    committed, jobs = read_committed(store, plan.jobs), plan.by_name()
    kept = {jobs[name].key: {**asdict(found), "measured_s": None} for name, found in committed.items()}
    lines = (f"{json.dumps(key)}: {json.dumps(found)}" for key, found in kept.items())
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def demo_report() -> Report:
    """The report of the results that are kept; those of former recipes have other keys and are left out."""
    kept, plan = json.loads(RESULTS.read_text(encoding="utf-8")), _quickstart()
    return compute_report(plan, {job.name: Committed(**kept[job.key]) for job in plan.jobs if job.key in kept})


def demo_text(report: Report) -> str:
    """The table and the answer of fine-tuning, as README.md shows them."""
    answer = answers(report)[0]
    console = Console(record=True, file=StringIO(), width=_README_WIDTH, color_system=None, highlight=False)
    console.print(FittingTable(table=text_table(report.headlines[0])))
    console.print("...", answer.title, *(f"  {sentence}" for sentence in answer.sentences), sep="\n", soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines() if line.strip())


def show_demo() -> None:
    """Put the kept results into README.md and the curve beside it."""
    report = demo_report()
    readme = README.read_text(encoding="utf-8")
    README.write_text(_DEMO.sub(lambda _: demo_text(report), readme, count=1), encoding="utf-8")
    CURVE.write_bytes(encode_svg(draw_curve(report)))


def _quickstart() -> Plan:
    return build_plan(load_sweep("quickstart")[0], store_uri="file:///project/.orchestrator/store")


def main() -> None:
    """Make the captures that are named, or all of ``CAPTURES``."""
    for name in sys.argv[1:] or CAPTURES:
        if name == "demo":
            keep_results(open_existing_store(""))
        if name in {"demo", "readme"}:
            show_demo()
        else:
            sys.stdout.write(f"{make(name)}\n")


if __name__ == "__main__":
    main()
