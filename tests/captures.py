"""Pictures of the terminal for the docs: ``python -m tests.captures [NAME ...]`` writes ``docs/captures/<NAME>.svg``.

Each capture runs a real command and records what it prints; another one is a function more in ``CAPTURES``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from rich.console import Console

from orchestrator.cli.plan import PlanOptions, show_plan
from orchestrator.cli.report import compute
from orchestrator.cli.status import open_existing_store
from orchestrator.cli.watch import Watching, view
from orchestrator.planning.fleets import StatedCluster
from orchestrator.report.render_terminal import render_terminal
from orchestrator.storage.local import LocalStore
from tests.live_sweep import SWEEP, write_live_sweep

FOLDER = Path(__file__).parents[1] / "docs" / "captures"
_WIDTH = 118
_HEIGHT = 40


def capture_plan(console: Console) -> None:
    """The plan of the quickstart on a machine with four cores, where nothing has run yet."""
    options = PlanOptions(cluster=StatedCluster(cpus=4), store="file:///project/.orchestrator/store")
    with patch("orchestrator.cli.plan.stdout_console", lambda: console):
        show_plan("quickstart", options)


def capture_watch(console: Console) -> None:
    """A sweep of a thousand transfers in the midst of its run."""
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        write_live_sweep(store, num_transfers=1_000, now=time.time(), is_served=True)
        watching = Watching(store, SWEEP)
        watching.look()
        watching.pacer.wait()
        watching.look()
        with patch.object(Console, "height", _HEIGHT):
            console.print(view(watching, console))


def capture_report(console: Console) -> None:
    """The answer of the quickstart, from this directory's store (``make demo`` fills it) or ``ORCHESTRATOR_STORE``."""
    _, report = compute(open_existing_store(""), "quickstart")
    console.print(render_terminal(report))


CAPTURES: Mapping[str, tuple[str, Callable[[Console], None]]] = {
    "watch": (f"orchestrator watch {SWEEP}", capture_watch),
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


def main() -> None:
    """Make the captures that are named, or all."""
    for name in sys.argv[1:] or CAPTURES:
        sys.stdout.write(f"{make(name)}\n")


if __name__ == "__main__":
    main()
