"""The state of a submitted sweep as people look at it in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.api.frames import frame, html_of, job_states
from orchestrator.cli.status import failure_lines
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class StatusView:
    """What ``orchestrator status`` prints; ``snapshot`` has all of it as values."""

    snapshot: Snapshot

    @property
    def state(self) -> SweepState:
        """Of the sweep."""
        return self.snapshot.state

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs by state."""
        return {state.value: number for state, number in self.snapshot.counts.items()}

    @property
    def jobs(self) -> DataFrame:
        """One row per job: ``job``, ``kind``, ``state``, ``attempts``, ``ran_s``, ``reason``, ..."""
        return job_states(self.snapshot)

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def __str__(self) -> str:
        return "\n".join([self._title(), *failure_lines(self.snapshot)])

    def _repr_html_(self) -> str:
        states = [state.value for state in JobState if state in self.snapshot.counts]
        by_kind: dict[str, dict[str, int]] = {}
        for view in self.snapshot.jobs.values():
            counts = by_kind.setdefault(view.name.partition("/")[0], dict.fromkeys(states, 0))
            counts[view.state.value] += 1
        table = frame(({"kind": kind, **counts} for kind, counts in by_kind.items()), ("kind", *states))
        return html_of(self._title(), table, failure_lines(self.snapshot))

    def _title(self) -> str:
        counts = ", ".join(f"{number} {state}" for state, number in self.counts.items())
        return f"Sweep {self.snapshot.sweep}: {self.state.value} ({counts})"
