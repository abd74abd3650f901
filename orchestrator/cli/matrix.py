"""States of a sweep's jobs by label space and step of the study, kept up to date change by change. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from orchestrator.core.job_kinds import TRANSFER_KINDS, JobKind
from orchestrator.planning.graph.plan import Job
from orchestrator.state.snapshot import JobTable, Snapshot
from orchestrator.state.transitions import JobState

MAX_SEEDS = 4
"""Backbones have a column per seed up to so many; more share one with counts."""
_Place = tuple[str, str]


class Matrix:
    """Rows are label spaces in plan order, columns the pretraining seeds and the transfers."""

    def __init__(self) -> None:
        self._jobs = JobTable()
        self._places: dict[str, _Place] = {}
        self._cells: dict[_Place, Counter[JobState]] = {}
        self._states: dict[str, JobState] = {}
        self.rows: list[str] = []
        self.columns: list[str] = []

    def update(self, snapshot: Snapshot) -> None:
        """Take what has changed since the last call; a changed plan starts anew."""
        if snapshot.jobs.keys() != self._states.keys():
            self._lay_out(snapshot)
        for view in snapshot.jobs.changed_since(self._jobs):
            cell = self._cells.get(self._places.get(view.name, ("", "")))
            if cell is not None:
                cell[self._states[view.name]] -= 1
                cell[view.state] += 1
            self._states[view.name] = view.state
        self._jobs = snapshot.jobs

    def cell(self, row: str, column: str) -> Mapping[JobState, int]:
        """Number of jobs by state; empty where there are none."""
        counts = self._cells.get((row, column), Counter())
        return {state: counts[state] for state in JobState if counts[state]}

    def urgency(self, row: str) -> tuple[bool, bool]:
        """Sorts rows in which something failed or runs before others."""
        states = {state for column in self.columns for state in self.cell(row, column)}
        return JobState.FAILED not in states, JobState.RUNNING not in states

    def _lay_out(self, snapshot: Snapshot) -> None:
        jobs = snapshot.plan.jobs if snapshot.plan is not None else ()
        self._jobs = snapshot.jobs
        self._states = {name: view.state for name, view in snapshot.jobs.items()}
        self._places = dict(_places(jobs))
        self.rows = list(dict.fromkeys(row for row, _ in self._places.values()))
        # Backbones before transfers, each in plan order.
        columns = dict.fromkeys(column for _, column in self._places.values())
        self.columns = sorted(columns, key=lambda column: not column.startswith("pretrain"))
        self._cells = {}
        for name, place in self._places.items():
            self._cells.setdefault(place, Counter())[self._states[name]] += 1


def _places(jobs: tuple[Job, ...]) -> Iterator[tuple[str, _Place]]:
    pretrains = [job for job in jobs if job.kind is JobKind.PRETRAIN]
    has_seed_columns = len({_seed(job) for job in pretrains}) <= MAX_SEEDS
    for job in (job for job in jobs if "label_space" in job.facets):
        if job.kind is JobKind.PRETRAIN:
            seed = f" seed{_seed(job)}" if has_seed_columns else ""
            yield job.name, (_row(job), f"pretrain{seed}")
        elif job.kind in TRANSFER_KINDS:
            yield job.name, (_row(job), str(job.facets.get("transfer", job.kind.value)))


def _row(job: Job) -> str:
    block = job.facets.get("pretrain", "")
    return f"{block}: {job.facets['label_space']}" if block else str(job.facets["label_space"])


def _seed(job: Job) -> str:
    return str(job.facets.get("pretrain_seed", 0))
