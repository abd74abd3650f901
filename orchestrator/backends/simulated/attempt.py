"""One attempt on a simulated cluster: its work, its end, its reports, its commit, and the bill."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.backends.protocol import PLACING, AttemptReport, AttemptStatus, Placement
from orchestrator.backends.simulated.clock import Alarm
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Outcome, Progress, Resources, Timings
from orchestrator.core.errors import FailureKind
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore

NO_ROOM_S = 240.0
"""As for a gang of the Ray backend whose chosen nodes have been taken by other jobs."""
PREEMPTED = (FailureKind.PREEMPTED, "asked to stop: wrote a checkpoint and ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """What one job needs on its planned resources."""

    work_s: float
    """Seconds of work, without start-up, checkpoints and interruptions."""
    checkpoint_every_s: float = 0.0
    """Seconds of work between two checkpoints; 0 = none, so that every interruption loses all."""
    checkpoint_stall_s: float = 0.0
    """For how long a checkpoint holds up the work."""
    cold_start_s: float = 0.0
    """From placement to the first step where a process, or a gang, must start first."""
    warm_start_s: float = 0.0
    """The same on a warm runner."""
    reads: str = ""
    """The data set that it reads; empty = none."""
    read_s: float = 0.0
    """Seconds in which one node reads all of that data set from the store."""
    epochs: int = 1
    """How often it reads that data set."""
    data_groups: int = 1
    """Parts of an epoch that different nodes of a gang can read."""
    border_speed: float = 1.0
    """Speed of a gang on several nodes by that on one."""
    stop_s: float = 0.0
    """From a stop to the end of the attempt: the step that runs, and a checkpoint."""
    steps: int = 100
    """Training steps, evenly spread over the work: the unit of reported progress."""
    num_workers: int = 0
    """The planned number of workers, with which its seconds count; 0 = that of each attempt."""

    def cold_read_s(self, num_nodes: int) -> float:
        """How many seconds longer it takes on nodes that do not hold the data set yet.

        A node reads the groups that its ranks touch, and they get other shards in each epoch: of those, it lacks the
        part that no epoch before has brought.
        """
        groups = self.data_groups
        touched = max(-(-(node + 1) * groups // num_nodes) - node * groups // num_nodes for node in range(num_nodes))
        share, epoch_s = touched / groups, self.work_s / self.epochs
        missing_s = (self.read_s * share * (1.0 - share) ** epoch for epoch in range(self.epochs))
        return sum(max(0.0, seconds - epoch_s) for seconds in missing_s)


class SimulatedEnding(StrEnum):
    """How an attempt ends if nothing happens to its nodes and nobody stops it."""

    COMMIT = "commit"
    FAIL = "fail"
    """With a failure of ``Fate.kind``."""
    HANG = "hang"
    """It makes no steps any more and does not end by itself."""
    DIE = "die"
    """Its runner is gone."""
    COMMIT_AND_DIE = "commit_and_die"
    """Its runner is gone after the commit and before the report."""
    PRETEND = "pretend"
    """It reports a success, and nothing is committed: its record was lost, or its code is wrong."""
    GHOST = "ghost"
    """It is reported lost, goes on all the same and commits: a node that the cluster has given up too early."""
    DEAF = "deaf"
    """It commits, and does not end when it is asked to."""
    NO_ROOM = "no_room"
    """It never gets its room, and is given up after ``NO_ROOM_S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How one attempt ends."""

    ending: SimulatedEnding = SimulatedEnding.COMMIT
    kind: FailureKind = FailureKind.UNKNOWN
    at_fraction: float = 1.0
    """The fraction of the remaining work, in [0, 1], at which it ends; endings that commit need all of it."""
    speed: float = 1.0
    """Speed of this attempt relative to the job's: a slow node, or another number of GPUs."""
    message: str = ""
    rank: int = -1
    """For a gang: the rank at fault, modulo the number of workers; -1 = none can be named."""
    step: int | None = None
    """For a failure of numerics: its step, independent of ``at_fraction``; None = the attempt's step."""


COMMITTING = frozenset(
    {
        SimulatedEnding.COMMIT,
        SimulatedEnding.COMMIT_AND_DIE,
        SimulatedEnding.PRETEND,
        SimulatedEnding.GHOST,
        SimulatedEnding.DEAF,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stint:
    """The working time of one attempt, from its first step on."""

    work: JobWork
    saved_s: float
    """Seconds of work that an earlier attempt's checkpoint holds."""
    start_s: float
    """When the first step begins."""
    speed: float = 1.0

    @property
    def end_s(self) -> float:
        """When all work is done; no checkpoint is written at the very end."""
        left_s = max(0.0, self.work.work_s - self.saved_s)
        return self.start_s + left_s / self.speed + self._num_checkpoints(left_s) * self.work.checkpoint_stall_s

    def time_at(self, fraction: float) -> float:
        """When a fraction of the work that is left is done."""
        return self.start_s + fraction * (self.end_s - self.start_s)

    def done_at(self, at_s: float) -> float:
        """Seconds of work done by then, those of earlier attempts included."""
        elapsed_s = min(max(0.0, at_s - self.start_s), self.end_s - self.start_s)
        every_s = self.work.checkpoint_every_s
        if not every_s:
            return min(self.work.work_s, self.saved_s + elapsed_s * self.speed)
        num_full, rest_s = divmod(elapsed_s, self._period_s)
        return min(self.work.work_s, self.saved_s + num_full * every_s + min(every_s, rest_s * self.speed))

    def saved_at(self, at_s: float) -> float:
        """Seconds of work in the newest checkpoint by then."""
        elapsed_s = min(max(0.0, at_s - self.start_s), self.end_s - self.start_s)
        if not self.work.checkpoint_every_s:
            return self.saved_s
        num_full = math.floor(elapsed_s / self._period_s + 1e-9)
        return min(self.work.work_s, self.saved_s + num_full * self.work.checkpoint_every_s)

    @property
    def _period_s(self) -> float:
        return self.work.checkpoint_every_s / self.speed + self.work.checkpoint_stall_s

    def _num_checkpoints(self, left_s: float) -> int:
        every_s = self.work.checkpoint_every_s
        return max(0, math.ceil(left_s / every_s - 1e-9) - 1) if every_s else 0


class Purpose(StrEnum):
    """The purposes for which an attempt's resources were held."""

    WORK = "work"
    """Work that was kept: it is in a checkpoint that counted, or in the committed result."""
    START = "start"
    READ = "cold read"
    """A data set came to a node that did not hold it yet, more slowly than training could go."""
    CHECKPOINT = "checkpoint"
    """Time in which the loop waited for a checkpoint, also at a stop."""
    LOST = "lost"
    """Work after the last checkpoint of an attempt that was interrupted."""
    IDLE = "idle"
    """Held without work: the attempt hung, or a gang's death was not noticed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One attempt on its nodes: what a Gantt chart draws."""

    sweep: str
    job: str
    attempt_id: str
    nodes: tuple[str, ...]
    gpus: tuple[float, ...]
    """On each of the nodes."""
    placed_at_s: float
    worked_from_s: float
    ended_at_s: float
    ending: str
    """``committed``, or what ended it: ``gpu``, ``spot``, ``rack``, ``preempted``, a kind of failure, ..."""


@dataclass(slots=True, kw_only=True)
class ResourceAccount:
    """Resource-seconds by purpose. The resource is GPUs where the cluster has any, else CPUs."""

    seconds: dict[Purpose, float] = field(default_factory=lambda: dict.fromkeys(Purpose, 0.0))
    lost_by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Work lost, and time idle, by what ended the attempts."""
    num_ends: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Attempts by how they ended."""
    spans: list[Span] = field(default_factory=list)
    available_s: float = 0.0
    """Resource-seconds of nodes that were up, from the first moment to the latest measurement."""

    @property
    def allocated_s(self) -> float:
        """All that attempts held."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Effective training time by allocated time, start-up included, in [0, 1]; 1 if nothing was allocated."""
        return self.seconds[Purpose.WORK] / self.allocated_s if self.allocated_s else 1.0

    @property
    def utilisation(self) -> float:
        """Allocated by available time, in [0, 1]."""
        return self.allocated_s / self.available_s if self.available_s else 0.0

    def add(self, purpose: Purpose, amount_s: float, *, cause: str = "") -> None:
        """Add resource-seconds to a purpose."""
        self.seconds[purpose] += amount_s
        if amount_s > 0.0 and cause and purpose in {Purpose.LOST, Purpose.IDLE}:
            self.lost_by_cause[cause] += amount_s


class Phase(StrEnum):
    """Where an attempt is."""

    WAITING = "waiting"
    """It waits for resources on the nodes."""
    WORKING = "working"
    """Placed: it starts, works and writes checkpoints."""
    HUNG = "hung"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class LiveAttempt:
    """An attempt that its controller has not released."""

    request: JobRequest
    resources: Resources
    num_workers: int
    placement: Placement
    work: JobWork
    fate: Fate
    weight: float
    """How much it holds of the resource that is counted."""
    launched_at_s: float
    phase: Phase = Phase.WAITING
    places: tuple[str, ...] = ()
    """Names of its nodes."""
    by_rank: tuple[str, ...] = ()
    """Name of each worker's node."""
    gpus_by_place: tuple[float, ...] = ()
    placed_at_s: float = 0.0
    hung_at_s: float = 0.0
    ended_at_s: float = 0.0
    stint: Stint | None = None
    resumed_s: float = 0.0
    cold_read_s: float = 0.0
    """How much of its start it waits for data that its nodes do not hold yet."""
    is_stopping: bool = False
    stopped_at_s: float = 0.0
    alarm: Alarm | None = None
    report: AttemptReport | None = None
    """Set once the backend may report its end."""

    @property
    def attempt_id(self) -> str:
        """Id of the attempt."""
        return self.request.attempt_id

    @property
    def share(self) -> Resources:
        """What each worker holds."""
        return self.resources.share(self.num_workers)

    @property
    def worked_until_s(self) -> float:
        """Time until which it worked."""
        return min(self.ended_at_s, self.stopped_at_s) if self.is_stopping else self.ended_at_s

    @property
    def elastic_speed(self) -> float:
        """Speed with this many workers by that with the planned number."""
        # Not by the request's number: that is the attempt's own.
        return self.num_workers / (self.work.num_workers or self.num_workers)

    @property
    def start_s(self) -> float:
        """Seconds from placement to the first step."""
        return 0.0 if self.stint is None else self.stint.start_s - self.placed_at_s

    @property
    def held_s(self) -> float | None:
        """For how long it had held its resources when it ended; None = it never had any."""
        return max(0.0, self.ended_at_s - self.placed_at_s) if self.places else None

    @property
    def node(self) -> str:
        """Where it runs or ran, of a gang the first node; empty before it is placed."""
        return self.places[0] if self.places else ""

    def rearm(self, alarm: Alarm | None) -> None:
        """Replace one appointment by another."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = alarm

    def step_of(self, done_s: float) -> int:
        """The training step that so much work amounts to."""
        return int(self.work.steps * done_s / self.work.work_s) if self.work.work_s else 0

    def progress(self, now_s: float) -> Progress:
        """Where it is."""
        if self.phase is Phase.WAITING or self.stint is None:
            return Progress(phase=PLACING)
        if now_s < self.stint.start_s:
            return Progress(phase="setup")
        at_s = self.hung_at_s if self.phase is Phase.HUNG else now_s
        return Progress(phase="train", step=self.step_of(self.stint.done_at(at_s)), total_steps=self.work.steps)


def commit(store: ObjectStore, attempt: LiveAttempt, now_s: float) -> Outcome:
    """Commit a tiny artifact, with the real protocol."""
    writer = ArtifactWriter(store, attempt.request)
    writer.add("payload", attempt.attempt_id.encode())
    return writer.commit(now=now_s)


def succeeded(attempt: LiveAttempt, outcome: Outcome, now_s: float) -> AttemptReport:
    """A report of a success."""
    result = JobResult(
        attempt_id=attempt.attempt_id,
        key=attempt.request.key,
        outcome=outcome,
        timings=Timings(import_s=attempt.start_s, work_s=now_s - attempt.placed_at_s - attempt.start_s),
        resumed_from_step=attempt.step_of(attempt.resumed_s) if attempt.resumed_s else None,
    )
    status = AttemptStatus.SUCCEEDED
    return AttemptReport(
        attempt_id=attempt.attempt_id, status=status, result=result, node=attempt.node, placed_for_s=attempt.held_s
    )


def failed(
    attempt: LiveAttempt, kind: FailureKind, message: str, *, rank: int = -1, step: int | None = None
) -> AttemptReport:
    """A report of a failure; of a gang, with the rank at fault, or -1 where none can be named."""
    is_gang = len(attempt.by_rank) > 1
    named = rank % len(attempt.by_rank) if is_gang and rank >= 0 else None
    failure = JobFailure(
        attempt_id=attempt.attempt_id, key=attempt.request.key, kind=kind, message=message, rank=named, step=step
    )
    return AttemptReport(
        attempt_id=attempt.attempt_id,
        status=AttemptStatus.FAILED,
        failure=failure,
        node=attempt.by_rank[named] if named is not None else "" if is_gang else attempt.node,
        placed_for_s=attempt.held_s,
    )


def lost(attempt: LiveAttempt, reason: str) -> AttemptReport:
    """A report of a loss."""
    return AttemptReport(
        attempt_id=attempt.attempt_id,
        status=AttemptStatus.LOST,
        lost_reason=reason,
        node=attempt.node,
        placed_for_s=attempt.held_s,
    )


def book_end(account: ResourceAccount, attempt: LiveAttempt, ending: str, *, freed_at_s: float) -> None:
    """Divide the held time of an ended attempt into purposes; the parts add up to all that it held."""
    account.num_ends[ending] += 1
    stint = attempt.stint
    if stint is None:
        return
    end_s, weight = attempt.ended_at_s, attempt.weight
    worked_s = max(0.0, end_s - stint.start_s)
    until_s = attempt.worked_until_s
    done_s = (stint.done_at(until_s) - stint.saved_s) / stint.speed
    if ending == "committed":
        kept_s = done_s
    elif ending == "preempted":
        kept_s = done_s if attempt.work.checkpoint_every_s else 0.0
    else:
        kept_s = (stint.saved_at(until_s) - stint.saved_s) / stint.speed
    until_first_s = min(end_s, stint.start_s) - attempt.placed_at_s
    started_s = min(until_first_s, attempt.start_s - attempt.cold_read_s)
    account.add(Purpose.START, weight * started_s)
    account.add(Purpose.READ, weight * (until_first_s - started_s))
    account.add(Purpose.WORK, weight * kept_s)
    account.add(Purpose.LOST, weight * (done_s - kept_s), cause=ending)
    account.add(Purpose.CHECKPOINT, weight * (worked_s - done_s))
    account.add(Purpose.IDLE, weight * (freed_at_s - end_s), cause=ending)
    account.spans.append(
        Span(
            sweep=attempt.request.sweep,
            job=attempt.request.job,
            attempt_id=attempt.attempt_id,
            nodes=attempt.places,
            gpus=attempt.gpus_by_place,
            placed_at_s=attempt.placed_at_s,
            worked_from_s=min(end_s, stint.start_s),
            ended_at_s=freed_at_s,
            ending=ending,
        )
    )
