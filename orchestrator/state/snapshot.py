"""What a sweep's journal adds up to; ``orchestrator.state.fold`` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.contract import Resources, Timings
from orchestrator.errors import FailureKind
from orchestrator.plan.graph import Job, Plan
from orchestrator.state.transitions import JobState, SweepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A live attempt: launched, and not known to have ended."""

    attempt_id: str
    job: str
    key: str
    number: int
    epoch: int
    launched_at_s: float
    resources: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a commit."""

    attempt_id: str
    kind: FailureKind
    message: str
    at_s: float
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job of the current plan, as its journal tells it."""

    name: str
    key: str
    state: JobState = JobState.PENDING
    attempt: Attempt | None = None
    """The live attempt; there is one exactly while the job is running."""
    num_attempts: int = 0
    last_attempt_id: str = ""
    failures: Mapping[FailureKind, int] = field(default_factory=dict)
    """Attempts that ended without a commit, by kind, since a client last reopened the job: what budgets count."""
    num_deaths: int = 0
    """Attempts that ended at a moment of nobody's choosing, ever; see ``reliability.DEADLY``."""
    ran_s: float = 0.0
    """Seconds that all its attempts took that have ended."""
    last_failure: Failure | None = None
    reason: str = ""
    """Why the job failed, or which job it was skipped because of."""
    queued_s: float = 0.0
    """From the moment the job was ready to its first launch."""
    launched_at_s: float | None = None
    """Launch of the latest attempt."""
    ended_at_s: float | None = None
    """End of the latest attempt, or of the job where it ended without one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Timings | None = None
    resumed_from_step: int | None = None

    @property
    def overhead_s(self) -> float | None:
        """Seconds of the attempt that succeeded in which it neither imported nor worked: launching and reporting."""
        if self.timings is None or self.launched_at_s is None or self.ended_at_s is None:
            return None
        spent_s = self.timings.import_s + self.timings.work_s
        return max(0.0, self.ended_at_s - self.launched_at_s - spent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A sweep at one point of its journal. Never changed: ``fold.apply`` returns a new one."""

    sweep: str
    state: SweepState = SweepState.SUBMITTED
    plan: Plan | None = None
    revision: int = 0
    cluster: str = ""
    epoch: int = 0
    holder: str = ""
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    """In plan order."""
    leaving: Mapping[str, Attempt] = field(default_factory=dict)
    """Live attempts, by id, at jobs that a later plan revision no longer has; their results count for nothing here."""
    handled: frozenset[str] = frozenset()
    """Ids of the clients' messages that are settled."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reasons by id of the messages that were refused."""
    accepted_at_s: float = 0.0
    """When the sweep was last (re)submitted."""
    finished_at_s: float | None = None
    num_events: int = 0

    @property
    def live_attempts(self) -> list[Attempt]:
        """All attempts that occupy resources."""
        return [*(view.attempt for view in self.jobs.values() if view.attempt), *self.leaving.values()]

    @property
    def counts(self) -> dict[JobState, int]:
        """Number of jobs in each state that occurs."""
        states = [view.state for view in self.jobs.values()]
        return {state: states.count(state) for state in JobState if state in states}

    def needs_are_done(self, job: Job) -> bool:
        """Whether all artifacts that a job reads are committed."""
        return all(self.jobs[need].state.is_done for need in job.needs)
