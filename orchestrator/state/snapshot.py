"""What a sweep's journal adds up to; ``orchestrator.state.fold`` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.events import Running
from orchestrator.state.job_table import JobTable
from orchestrator.state.job_view import Attempt, Failure, JobView
from orchestrator.state.spending import Use, added
from orchestrator.state.transitions import JobState, SweepState

__all__ = ["Attempt", "Exclusion", "Failure", "JobView", "Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A node that attempts should avoid until ``until_s`` (unix seconds)."""

    node: str
    reason: str
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A sweep at one point of its journal. Never changed: ``fold.apply`` returns a new one."""

    sweep: str
    state: SweepState = SweepState.SUBMITTED
    plan: Plan | None = None
    revision: int = 0
    documents: Mapping[str, str] = field(default_factory=dict)
    """Sha256 by object name of the plans, specs and provenances of all revisions, as far as the journal tells."""
    cluster: str = ""
    epoch: int = 0
    holder: str = ""
    jobs: JobTable = field(default_factory=JobTable)
    """In plan order; any mapping is turned into a table."""
    leaving: Mapping[str, Attempt] = field(default_factory=dict)
    """Live attempts, by id, at jobs that a later plan revision no longer has; their results count for nothing here."""
    spent_gpu_s: float = 0.0
    """GPU-seconds of ended attempts at jobs that later plan revisions no longer have: a budget does not start anew."""
    spent_cpu_s: float = 0.0
    """Core-seconds of the same."""
    spent: tuple[Use, ...] = ()
    """The same by sort of node."""
    handled: frozenset[str] = frozenset()
    """Ids of the clients' messages that are settled."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reasons by id of the messages that were refused."""
    accepted_at_s: float = 0.0
    """When the sweep was last (re)submitted."""
    finished_at_s: float | None = None
    num_events: int = 0
    priority: int | None = None
    """What a client set instead of the plan's."""
    pause: Running | None = None
    """While paused: what becomes of the running attempts."""
    tripped: str = ""
    """Why the circuit breaker stopped the sweep; empty = it did not."""
    excluded: Mapping[str, Exclusion] = field(default_factory=dict)
    """By node; those that are over are still here."""
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the nodes are on which its attempts ran, by name; see ``NodeDescribed``."""

    def __post_init__(self) -> None:
        jobs: Mapping[str, JobView] = self.jobs
        if not isinstance(jobs, JobTable):
            object.__setattr__(self, "jobs", JobTable(jobs.values()))

    @property
    def live_attempts(self) -> list[Attempt]:
        """All attempts that occupy resources; takes time by their number, not by that of the jobs."""
        running = [self.jobs[name].attempt for name in self.jobs.running]
        return [*(attempt for attempt in running if attempt), *self.leaving.values()]

    def uses(self, now: float) -> tuple[Use, ...]:
        """What all attempts used, by sort of node: those that run, and those of former revisions, included."""
        ended = (use for view in self.jobs.values() for use in view.used)
        live = (use for attempt in self.live_attempts for use in attempt.uses(now))
        return added(self.spent, (*ended, *live))

    @property
    def counts(self) -> dict[JobState, int]:
        """Number of jobs in each state that occurs."""
        return {state: self.jobs.counts[state] for state in JobState if self.jobs.counts.get(state)}

    def needs_are_done(self, job: Job) -> bool:
        """Whether all artifacts that a job reads are committed."""
        return all(self.jobs[need].state.is_done for need in job.needs)
