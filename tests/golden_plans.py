"""The plans of all shipped sweeps as text. After an intended change: ``python -m tests.golden_plans``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.sweepfile import load_sweep
from workloads.commands.simulations import check

FOLDER = Path(__file__).parent / "golden" / "plans"
SWEEPS = Path(__file__).parents[1] / "workloads" / "sweeps"
_MAX_LISTED = 200
"""Of larger plans only the first job of each kind is listed, beside a hash of all."""


def shipped() -> list[str]:
    """Names of the shipped sweeps."""
    return sorted(file.stem for file in SWEEPS.glob("*.yaml"))


def golden_text(name: str) -> str:
    """Counts by kind, then ``name key`` of the jobs; with a ``tiny`` scale at that, whose data is at hand."""
    document = yaml.safe_load((SWEEPS / f"{name}.yaml").read_text(encoding="utf-8"))
    with patch("orchestrator.sweepfile.load.check_simulations", check_simulations_here):
        sweep, _ = load_sweep(name, scale="tiny") if "tiny" in document else load_sweep(name)
    return "\n".join(_lines(build_plan(sweep, store_uri="file:///store"))) + "\n"


def check_simulations_here(asked: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What a process of its own would say, without its start."""
    return check({"simulations": asked})


def _lines(plan: Plan) -> Iterator[str]:
    counts = Counter(job.kind.value for job in plan.jobs)
    yield f"{len(plan.jobs)} jobs: " + ", ".join(f"{number} {kind}" for kind, number in counts.items())
    lines = [f"{job.name} {job.key}" for job in plan.jobs]
    if len(lines) > _MAX_LISTED:
        yield f"sha256 of all lines: {sha256(chr(10).join(lines).encode()).hexdigest()}"
        lines = list({job.kind: f"{job.name} {job.key}" for job in reversed(plan.jobs)}.values())[::-1]
    yield from lines


def main() -> None:
    """Write the golden files anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in shipped():
        (FOLDER / f"{name}.txt").write_text(golden_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
