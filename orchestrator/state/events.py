"""What happened to a sweep, in the past tense: the lines of its journal.

An event is a frozen dataclass; its JSON form carries the ``type`` and ``version`` under which it was written. Fields
are only ever added, each with a default, so that a newer reader reads older journals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, get_type_hints

from orchestrator.contract import Outcome, Timings
from orchestrator.errors import ControllerError, FailureKind


class SweepStatus(StrEnum):
    """How a sweep ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """At least one job failed or was skipped; all the others are done."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``at_s`` is the controller's clock in unix seconds."""

    VERSION: ClassVar[int] = 1
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEvent(Event):
    """An event that settles one message of a client; a message whose id is in the journal is never handled again."""

    message_id: str


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
    """A controller took the sweep: from here on, earlier writers meet its segments and stop."""

    cluster: str
    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAccepted(MessageEvent):
    """``plan-<revision>.json`` is the plan now. Failed, skipped and cancelled jobs get a new chance."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReopened(MessageEvent):
    """The same plan was submitted again: failed, skipped and cancelled jobs get a new chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(MessageEvent):
    """A client wants the sweep to end."""


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
    """The intent to launch, appended before the backend is told."""

    key: str
    number: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSucceeded(AttemptEvent):
    """The attempt ended and its key is committed."""

    outcome: Outcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    resumed_from_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(AttemptEvent):
    """The attempt ended without a commit."""

    kind: FailureKind
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost(AttemptEvent):
    """The attempt's runner is gone, or never got the attempt."""

    reason: str


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

    status: SweepStatus


EVENT_TYPES: tuple[type[Event], ...] = (
    SweepAdopted,
    PlanAccepted,
    SweepReopened,
    CancelRequested,
    MessageRefused,
    JobReused,
    ArtifactMissed,
    AttemptLaunched,
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
    known = _FIELD_TYPES[type_]
    return type_(**{name: _decode(kind, document[name]) for name, kind in known.items() if name in document})


def _field_types(type_: type[Event]) -> dict[str, Any]:
    hints = get_type_hints(type_)
    return {item.name: hints[item.name] for item in fields(type_)}


_FIELD_TYPES = {type_: _field_types(type_) for type_ in EVENT_TYPES}


def _decode(kind: Any, value: Any) -> Any:  # noqa: ANN401 - any JSON value to any field
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**value)
    return value
