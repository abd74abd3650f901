"""Whether Slurm would take a batch script."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.cluster.drive import argument_of
from orchestrator.cluster.kinds import ClusterFile
from orchestrator.cluster.tools import ask_tool, find_tool
from orchestrator.core.checks import Check

_LIMIT_S = 40.0


def slurm_checks(file: ClusterFile) -> Iterator[Check]:
    """That Slurm is here, and what it says of the script without queueing it."""
    yield Check(name="tools", run=lambda: f"sbatch is {find_tool('sbatch')}")
    yield Check(name="slurm", run=lambda: _test_only(file), needs=("tools",), limit_s=_LIMIT_S)


def _test_only(file: ClusterFile) -> str:
    return ask_tool(["sbatch", "--test-only", argument_of(file.path)]).strip() or "Slurm would take it"
