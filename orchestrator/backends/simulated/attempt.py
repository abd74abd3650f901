"""One attempt on a simulated cluster, its reports, its commit, and the bill at its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Placement
from orchestrator.backends.simulated.account import Account, Purpose, Span
from orchestrator.backends.simulated.clock import Alarm
from orchestrator.backends.simulated.work import Fate, JobWork, Stint
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Outcome, Progress, Resources, Timings
from orchestrator.core.errors import FailureKind
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore

PREEMPTED = (FailureKind.PREEMPTED, "asked to stop: wrote a checkpoint and ended")


class Phase(StrEnum):
    """Where an attempt is."""

    WAITING = "waiting"
    """For room on the nodes."""
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
    is_stopping: bool = False
    stopped_at_s: float = 0.0
    alarm: Alarm | None = None
    report: AttemptReport | None = None
    """Once the backend may tell of its end."""

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
        """When it did its last work."""
        return min(self.ended_at_s, self.stopped_at_s) if self.is_stopping else self.ended_at_s

    @property
    def elastic_speed(self) -> float:
        """Speed with this many workers by that with the planned number."""
        return self.num_workers / max(1, self.request.execution.num_workers)

    @property
    def start_s(self) -> float:
        """Seconds from placement to the first step."""
        return 0.0 if self.stint is None else self.stint.start_s - self.placed_at_s

    @property
    def held_s(self) -> float | None:
        """For how long it held its room when it ended; none = it never had any."""
        return max(0.0, self.ended_at_s - self.placed_at_s) if self.places else None

    @property
    def node(self) -> str:
        """Where it runs or ran, of a gang the first node; empty before it is placed."""
        return self.places[0] if self.places else ""

    def rearm(self, alarm: Alarm | None) -> None:
        """Put one appointment in the place of another."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = alarm

    def step_of(self, done_s: float) -> int:
        """The training step that so much work amounts to."""
        return int(self.work.steps * done_s / self.work.work_s) if self.work.work_s else 0

    def progress(self, now_s: float) -> Progress:
        """Where it is."""
        if self.phase is Phase.WAITING or self.stint is None:
            return Progress(phase="placing")
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


def book_end(account: Account, attempt: LiveAttempt, ending: str, *, freed_at_s: float) -> None:
    """Divide the time of an attempt that has ended into purposes; what adds up is all that it held."""
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
    account.add(Purpose.START, weight * (min(end_s, stint.start_s) - attempt.placed_at_s))
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
