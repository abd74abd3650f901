"""One job of a sweep, as the sweep's journal tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.contract import Resources, Timings
from orchestrator.core.errors import FailureKind
from orchestrator.state.spending import Lot, Use, uses_of
from orchestrator.state.transitions import JobState


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
    """What it was given, which may be less than its job would like."""
    num_workers: int = 1
    """Ranks that it was given."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes it was sent to; empty = anywhere."""
    lots: tuple[Lot, ...] = ()
    """Sorts and prices of the nodes that it is on; empty = not known (yet)."""
    preempting_at_s: float | None = None
    """When it was asked to give its room back; none = it was not."""
    grace_s: float = 0.0
    """How long after that it is ended."""
    awaits_room: bool = False
    """Whether the cluster has no room for it yet: until then it costs nothing."""
    exclude: tuple[str, ...] = ()
    """Names of nodes that it keeps away from while it waits."""
    placed_at_s: float | None = None
    """When it got its room; none = with its launch, or not yet."""

    @property
    def began_at_s(self) -> float | None:
        """Since when it holds its room (unix seconds); none = it waits for it."""
        if self.awaits_room:
            return None
        return self.launched_at_s if self.placed_at_s is None else self.placed_at_s

    def ran_s(self, until_s: float) -> float:
        """Seconds for which it has held its room by then (unix seconds)."""
        began_at_s = self.began_at_s
        return 0.0 if began_at_s is None else max(0.0, until_s - began_at_s)

    def uses(self, until_s: float) -> tuple[Use, ...]:
        """What it has used by then (unix seconds), by sort of node."""
        ran_s = self.ran_s(until_s)
        return uses_of(self.lots, self.resources, self.num_workers, ran_s) if ran_s else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a commit."""

    attempt_id: str
    kind: FailureKind
    message: str
    at_s: float
    traceback: str = ""
    node: str = ""
    """Node at fault, where that is known."""
    rank: int | None = None
    """Of a gang, the rank at fault."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs."""
    step: int | None = None
    """Of a failure of numerics in training, the number of updates before the wrong one."""


KEPT_NUMERICS = 4


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
    used: tuple[Use, ...] = ()
    """What these held, by sort of node: what they cost."""
    last_failure: Failure | None = None
    numerics: tuple[Failure, ...] = ()
    """The latest failures of numerics, ``KEPT_NUMERICS`` at most: a replay from the checkpoint tells what they mean."""
    reason: str = ""
    """Why the job failed, or which job it was skipped because of."""
    queued_s: float = 0.0
    """From the moment the job was ready to its first launch."""
    launched_at_s: float | None = None
    """Launch of the latest attempt."""
    room_s: float = 0.0
    """Seconds for which the latest attempt waited for its room."""
    ended_at_s: float | None = None
    """End of the latest attempt, or of the job where it ended without one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Timings | None = None
    resumed_from_step: int | None = None
    quarantined: tuple[str, ...] = ()
    """Samples that its training could not read and did without."""

    @property
    def overhead_s(self) -> float | None:
        """Seconds of the attempt that succeeded in which it had its room and neither imported nor worked."""
        if self.timings is None or self.launched_at_s is None or self.ended_at_s is None:
            return None
        spent_s = self.timings.import_s + self.timings.work_s
        return max(0.0, self.ended_at_s - self.launched_at_s - self.room_s - spent_s)
