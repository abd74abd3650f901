"""The events of a sweep: the lines of its journal.

An event is a frozen dataclass; its JSON form carries the ``type`` and ``version`` under which it was written. Fields
are only ever added, each with a default, so that a newer reader reads older journals. Invariants:

- The name of a class is its type in the store, and the names of its fields are keys there: neither is ever changed.
- An event says what happened, never what is to be done; consequences are decided from the snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from orchestrator.core.contract import Outcome, Resources, Timings
from orchestrator.core.errors import ControllerError, FailureKind
from orchestrator.state.codec import decode_value
from orchestrator.state.spending import PricedAllocation


class SweepEnding(StrEnum):
    """How a sweep ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """At least one job failed or was skipped; all other jobs are done."""
    CANCELLED = "cancelled"


class Running(StrEnum):
    """What running attempts do when no job may start any more."""

    FINISH = "finish"
    """They run to their end."""
    CHECKPOINT = "checkpoint"
    """They write a checkpoint and release their resources; their jobs continue from it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``at_s`` is the controller's clock in unix seconds."""

    VERSION: ClassVar[int] = 1
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEvent(Event):
    """An event that settles one message of a client; a message whose id is in the journal is never handled again."""

    message_id: str
    sender: str = ""
    """Sender of the message, as the client reports it; empty = not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent(Event):
    """An event about one job, by its name in the plan."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent(JobEvent):
    """An event about one attempt at a job."""

    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAdopted(Event):
    """A controller took the sweep: from here on, earlier writers find its segments and stop."""

    cluster: str
    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAccepted(MessageEvent):
    """``plan-<revision>.json`` is the current plan. Failed, skipped and cancelled jobs get a new chance."""

    revision: int
    documents: Mapping[str, str] = field(default_factory=dict)
    """Sha256 by object name of the revision's plan, spec and provenance; empty in journals of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReopened(MessageEvent):
    """The same plan was submitted again: failed, skipped and cancelled jobs get a new chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(MessageEvent):
    """A client wants the sweep to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPaused(MessageEvent):
    """No job starts until a client resumes the sweep."""

    running: Running = Running.FINISH


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResumed(MessageEvent):
    """A paused sweep continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStopping(MessageEvent):
    """No job starts any more; the sweep ends when its running attempts have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsCancelled(MessageEvent):
    """A client cancelled these jobs: their attempts are stopped, and jobs that need them are skipped."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsRetried(MessageEvent):
    """These jobs, which failed or were skipped or cancelled, are retried with new limits of failures."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged(MessageEvent):
    """From here on the sweep has this priority instead of its plan's; higher goes first."""

    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTripped(Event):
    """The circuit breaker: too many jobs failed in the same way. No job starts any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExcluded(Event):
    """No attempt of the cluster goes to this node before ``until_s`` (unix seconds), if it can be avoided."""

    node: str
    reason: str
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescribed(Event):
    """Hardware of a node on which attempts of the sweep run, recorded once: processor, GPUs, driver, system."""

    node: str
    machine: Mapping[str, Any]
    """See ``metrics.machine.describe_machine``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRefused(MessageEvent):
    """A client's message cannot be followed; ``reason`` says why and what to do."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReused(JobEvent):
    """The job's key was committed already."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactMissed(JobEvent):
    """The record of a finished job is no longer in the store: the job runs again."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunched(AttemptEvent):
    """The intent to launch, appended before the backend is called."""

    key: str
    number: int
    epoch: int
    nodes: tuple[str, ...] = ()
    """Names of its chosen nodes, one per worker of a gang; empty = any."""
    resources: Resources | None = None
    """Its resources; None = those that its job requests."""
    num_workers: int = 0
    """Its number of ranks; 0 = as many as its job requests."""
    reason: str = ""
    """Why it was launched here and now, if that is not obvious."""
    lots: tuple[PricedAllocation, ...] = ()
    """Types and prices of its nodes, if known; see ``AttemptPlaced``."""
    awaits_room: bool = False
    """Whether the autoscaler must add nodes for it: its hours count from ``AttemptPlaced`` on."""
    exclude: tuple[str, ...] = ()
    """Names of nodes that it must not use; empty if ``nodes`` has some."""
    aging: int = 0
    """By how much waiting had raised the priority of its sweep: others preempt it only at a higher one than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlaced(AttemptEvent):
    """The nodes of an attempt that was launched without chosen nodes, as on a cluster that adds nodes for it."""

    nodes: tuple[str, ...]
    """One per worker of a gang."""
    lots: tuple[PricedAllocation, ...]
    since_s: float = 0.0
    """Seconds before ``at_s`` at which it got its resources, because the controller polls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPreempting(AttemptEvent):
    """The attempt is asked to write a checkpoint and end; ``grace_s`` later it is ended by force."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSucceeded(AttemptEvent):
    """The attempt ended and its key is committed."""

    outcome: Outcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    resumed_from_step: int | None = None
    node: str = ""
    """Node on which it ran; of a gang, that of its runner."""
    quarantined: tuple[str, ...] = ()
    """Samples that its training could not read and replaced, by split: counts by reason, and the first samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(AttemptEvent):
    """The attempt ended without a commit."""

    kind: FailureKind
    message: str
    traceback: str = ""
    node: str = ""
    """Node at fault: where it ran, of a gang that of ``rank``; empty = none can be named."""
    rank: int | None = None
    """Of a gang, the rank at fault; None = one worker, none can be named, or written by an earlier version."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the process at fault held."""
    step: int | None = None
    """Of a failure of numerics in training, the number of updates before the wrong one."""
    had_no_room: bool = False
    """Whether it ended before it got its resources. Its ``kind`` is ``preempted`` then, which programs that know
    no ``no_room`` can read, and costs a job next to nothing."""

    @property
    def effective_kind(self) -> FailureKind:
        """The effective failure kind."""
        return FailureKind.NO_ROOM if self.had_no_room else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost(AttemptEvent):
    """The attempt's runner is gone, or never got the attempt."""

    reason: str
    node: str = ""
    """Node that was lost, or that of the process; empty = none can be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed(JobEvent):
    """No further attempt will be made."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSkipped(JobEvent):
    """The job can never be ready, because ``because`` (a job it needs) has no artifact."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled(JobEvent):
    """The job was not done when its sweep was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFinished(Event):
    """Every job has ended."""

    status: SweepEnding


EVENT_TYPES: tuple[type[Event], ...] = (
    SweepAdopted,
    PlanAccepted,
    SweepReopened,
    CancelRequested,
    SweepPaused,
    SweepResumed,
    SweepStopping,
    JobsCancelled,
    JobsRetried,
    PriorityChanged,
    SweepTripped,
    NodeExcluded,
    NodeDescribed,
    MessageRefused,
    JobReused,
    ArtifactMissed,
    AttemptLaunched,
    AttemptPlaced,
    AttemptPreempting,
    AttemptSucceeded,
    AttemptFailed,
    AttemptLost,
    JobFailed,
    JobSkipped,
    JobCancelled,
    SweepFinished,
)


def event_type(event: Event | type[Event]) -> str:
    """The type's name in journals: ``AttemptLaunched`` -> ``attempt_launched``."""
    name = event.__name__ if isinstance(event, type) else type(event).__name__
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_REGISTRY = {event_type(type_): type_ for type_ in EVENT_TYPES}


def encode_event(event: Event) -> dict[str, Any]:
    """Plain JSON form of an event."""
    return {"type": event_type(event), "version": event.VERSION, **asdict(event)}


def decode_event(document: Mapping[str, Any]) -> Event:
    """Inverse of ``encode_event``.

    Raises:
        ControllerError: the event's type or version is newer than this program.
    """
    type_ = _REGISTRY.get(document["type"])
    if type_ is None or document["version"] > type_.VERSION:
        message = (
            f"the journal holds an event {document['type']!r} of version {document['version']}, which this version "
            "does not know; read it with the version of pretraining-orchestrator that wrote it, or a newer one"
        )
        raise ControllerError(message)
    return decode_value(type_, document)
