"""Requests of clients: each in one place, with its stored form and the event that it becomes.

Requests wait as messages in the store while no controller runs. A new one is a class here, with its function for
clients, and a member of ``REQUESTS``. Invariants:

- A message is settled by an event that carries its id; only then is it deleted. A crash between the two leaves a
  message whose id is already in the journal: it is deleted without being handled again.
- A message is in its inbox before its marker is written. Markers only save requests.
- Messages are handled in the order of their ids, which is that of the clients' clocks.
- A message that this version cannot read is refused with a reason, never ignored.
"""

from __future__ import annotations

import getpass
import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeAlias, TypedDict, Unpack

from orchestrator.core.errors import ControllerError, CorruptObjectError, NotFoundError, StorageError
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.plan import Plan, load_shared
from orchestrator.state import events
from orchestrator.state.codec import decode_value
from orchestrator.state.events import MessageEvent, Running
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState, is_allowed
from orchestrator.storage.bounds import PLAN_BYTES, check_writable
from orchestrator.storage.layout import MARKERS, inbox_folder, inbox_message, marker_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal, seal
from orchestrator.sweepfile.policy import POLICY_RANGES
from orchestrator.sweeps.ledger import check_exists

_HOPELESS = (JobState.FAILED, JobState.SKIPPED, JobState.CANCELLED)
_OPEN = (JobState.PENDING, JobState.RUNNING)


class RefusalError(Exception):
    """Why a request cannot be followed, and what to do; the text is recorded in the journal."""


class Ownership(StrEnum):
    """What a submit may do with an unfinished sweep that another cluster owns."""

    KEEP = "keep"
    TAKE = "take"
    """Adopt it; jobs that the other cluster still runs are run again or found committed."""


class Consent(StrEnum):
    """Whether a client forces a request to a sweep of another user."""

    ASK = "ask"
    FORCE = "force"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
    """Base of messages of clients. Names of senders are not checked: they only prevent accidents."""

    NAME: ClassVar[str]
    """Its type in the store."""
    message_id: str
    sender: str = ""
    """User name; empty = not given, which every sweep accepts."""
    consent: Consent = Consent.ASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(ClientMessage):
    """Run this plan on this cluster. See ``request_handling`` for how it is handled."""

    NAME: ClassVar[str] = "submit"
    cluster: str
    plan: Mapping[str, Any]
    spec_text: str
    ownership: Ownership = Ownership.KEEP
    replaced_revision: int | None = None
    """The only revision that another plan may replace, which its sender saw; 0: none yet. None = whichever there is."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """What the client knows of code, packages and machine, as JSON; it goes into the revision's provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleRequest(ClientMessage):
    """A request about an existing sweep: it becomes one event, or is refused."""

    ACTION: ClassVar[str]
    """In words, as a refusal says it: ``pause it``."""

    @abstractmethod
    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The event that settles it. Raises ``RefusalError``."""

    def _allowed(self, snapshot: Snapshot, trigger: type[MessageEvent]) -> None:
        if is_allowed(snapshot.state, trigger):
            return
        if snapshot.state is SweepState.SUBMITTED:
            why = "it has no plan yet; wait until a controller has accepted one"
        elif snapshot.state.is_final:
            why = "it has ended; submit it again to go on with it"
        elif trigger is events.SweepResumed:
            why = "it is not paused"
        elif trigger is events.JobsRetried:
            why = "it is on its way to its end; wait for that, then retry it"
        else:
            why = "it is on its way to its end; wait for that, then submit it again"
        raise RefusalError(f"sweep {snapshot.sweep} is {snapshot.state}, so nobody can {self.ACTION}: {why}")

    def _settled_by(
        self,
        trigger: type[MessageEvent],
        snapshot: Snapshot,
        now: float,
        **values: Any,  # noqa: ANN401 - fields of the event
    ) -> MessageEvent:
        self._allowed(snapshot, trigger)
        return trigger(at_s=now, message_id=self.message_id, sender=self.sender, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(LifecycleRequest):
    """End the sweep: stop attempts, start no jobs. With ``jobs`` only these: names, or patterns as of a shell."""

    NAME: ClassVar[str] = "cancel"
    ACTION: ClassVar[str] = "cancel some of its jobs"
    jobs: tuple[str, ...] = ()

    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The end of the sweep, or of the jobs named."""
        if not self.jobs:
            if snapshot.state.is_final:
                raise RefusalError(
                    f"sweep {snapshot.sweep} is {snapshot.state}: it has ended, there is nothing to cancel"
                )
            return self._settled_by(events.CancelRequested, snapshot, now)
        self._allowed(snapshot, events.JobsCancelled)
        jobs = tuple(_selected(snapshot, self.jobs, _OPEN, "pending or running"))
        return self._settled_by(events.JobsCancelled, snapshot, now, jobs=jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(LifecycleRequest):
    """Start no jobs until a resume request."""

    NAME: ClassVar[str] = "pause"
    ACTION: ClassVar[str] = "pause it"
    running: Running = Running.FINISH

    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The beginning of a pause."""
        return self._settled_by(events.SweepPaused, snapshot, now, running=self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(LifecycleRequest):
    """Go on after a pause."""

    NAME: ClassVar[str] = "resume"
    ACTION: ClassVar[str] = "resume it"

    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The end of a pause."""
        return self._settled_by(events.SweepResumed, snapshot, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(LifecycleRequest):
    """Start no more jobs, let running attempts end, then end the sweep."""

    NAME: ClassVar[str] = "stop"
    ACTION: ClassVar[str] = "stop it"

    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The beginning of the sweep's end."""
        return self._settled_by(events.SweepStopping, snapshot, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(LifecycleRequest):
    """Retry jobs that ended without an artifact; without ``jobs`` all that failed or were skipped."""

    NAME: ClassVar[str] = "retry"
    ACTION: ClassVar[str] = "retry its jobs"
    jobs: tuple[str, ...] = ()

    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The retry of the jobs, of jobs that they need, and of jobs that were skipped because of them."""
        self._allowed(snapshot, events.JobsRetried)
        if self.jobs:
            chosen = _selected(snapshot, self.jobs, _HOPELESS, "failed, skipped or cancelled")
            jobs = _with_relatives(snapshot, chosen)
        else:
            jobs = [view.name for view in snapshot.jobs.values() if view.state in _HOPELESS]
        if not jobs:
            raise RefusalError(
                f"no job of sweep {snapshot.sweep} has failed, was skipped or cancelled: there is nothing to retry"
            )
        return self._settled_by(events.JobsRetried, snapshot, now, jobs=tuple(jobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPriority(LifecycleRequest):
    """Give the sweep another priority; higher goes first."""

    NAME: ClassVar[str] = "set_priority"
    ACTION: ClassVar[str] = "change its priority"
    priority: int

    def to_event(self, snapshot: Snapshot, now: float) -> MessageEvent:
        """The sweep's new priority."""
        if self.priority not in POLICY_RANGES["priority"]:
            # In the journal it would stay, and the scheduler could not compare it with those of other sweeps.
            raise RefusalError(f"{self.priority!r:.80} is not a priority, which is {POLICY_RANGES['priority']}")
        return self._settled_by(events.PriorityChanged, snapshot, now, priority=self.priority)


REQUESTS: tuple[type[Submit | LifecycleRequest], ...] = (Submit, Cancel, Pause, Resume, Stop, Retry, SetPriority)
"""All requests of clients, in any order."""
_TYPES: Mapping[str, type[Submit | LifecycleRequest]] = {type_.NAME: type_ for type_ in REQUESTS}


def _selected(snapshot: Snapshot, patterns: Sequence[str], states: Sequence[JobState], wanted: str) -> list[str]:
    """Jobs in one of the states that a client named, in plan order."""
    matched = {pattern: _matching(snapshot, pattern) for pattern in patterns}
    chosen = {name for names in matched.values() for name in names if snapshot.jobs[name].state in states}
    if not chosen:
        found = [f"{name} is {snapshot.jobs[name].state}" for names in matched.values() for name in names[:3]]
        raise RefusalError(
            f"of the jobs that {', '.join(patterns)} names in sweep {snapshot.sweep}, none is {wanted} "
            f"({', '.join(found)})"
        )
    return [name for name in snapshot.jobs if name in chosen]


def _matching(snapshot: Snapshot, pattern: str) -> list[str]:
    if pattern in snapshot.jobs:
        return [pattern]
    names = [name for name in snapshot.jobs if fnmatchcase(name, pattern)]
    if not names:
        hint = did_you_mean(pattern, list(snapshot.jobs))
        raise RefusalError(f"sweep {snapshot.sweep} has no job {pattern!r}: {hint}; nothing was done")
    return names


def _with_relatives(snapshot: Snapshot, chosen: Sequence[str]) -> list[str]:
    """Also missing jobs that the chosen ones need, and jobs that were skipped because of any of them."""
    jobs = _plan(snapshot).by_name()
    retried, waiting = set(chosen), list(chosen)
    while waiting:
        for need in jobs[waiting.pop()].needs:
            if need not in retried and snapshot.jobs[need].state in _HOPELESS:
                retried.add(need)
                waiting.append(need)
    for name, job in jobs.items():  # in plan order, so that descendants of descendants are found in one go
        if snapshot.jobs[name].state is JobState.SKIPPED and retried.intersection(job.needs):
            retried.add(name)
    return [name for name in snapshot.jobs if name in retried]


def _plan(snapshot: Snapshot) -> Plan:
    if snapshot.plan is None:
        raise RefusalError(f"sweep {snapshot.sweep} has no plan yet")
    return snapshot.plan


# ----------------------------------------------------------------------------------------------------------- the inbox
@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An object in the inbox that is no message of this version."""

    message_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """A submit to another cluster that came too late, or was superseded by a later submit."""

    message_id: str
    reason: str


Message: TypeAlias = Submit | LifecycleRequest | Unreadable | Superseded


def new_message_id(now: float) -> str:
    """An id that sorts by time, so that a cancel after a submit is followed after it."""
    return f"{int(now * 1e6):017d}-{secrets.token_hex(8)}"


def post(store: ObjectStore, sweep: str, message: ClientMessage) -> None:
    """Put a message into a sweep's inbox. Raises ``TooLargeError`` if none would read it."""
    # Not ``asdict``, which copies the plan of a submit for a second per 10,000 jobs.
    document = {"type": message.NAME} | {item.name: getattr(message, item.name) for item in fields(message)}
    name = inbox_message(sweep, message.message_id)
    content = seal(name, json.dumps(document).encode())
    check_writable(f"the message to sweep {sweep}", len(content), PLAN_BYTES, "make several sweeps of it")
    store.put_if_absent(name, content)
    with suppress(StorageError):  # the message is there, and is found without it, too
        store.put(marker_name(sweep, message.message_id), b"")


def read_markers(store: ObjectStore) -> list[tuple[str, str]]:
    """Sweep and id of the messages with markers; some are settled already."""
    names = [stat.name.removeprefix(MARKERS) for stat in store.list_objects(MARKERS)]
    return [(sweep, message_id) for sweep, _, message_id in (name.partition("/") for name in names) if message_id]


def discard_marker(store: ObjectStore, sweep: str, message_id: str) -> None:
    """Delete the marker of a settled message; a remaining one costs a read. Raises nothing."""
    with suppress(StorageError):
        store.delete(marker_name(sweep, message_id))


def list_inbox(store: ObjectStore, sweep: str) -> list[str]:
    """Names of the messages in an inbox, in order."""
    return store.list_children(inbox_folder(sweep))


def read_inbox(
    store: ObjectStore, sweep: str, *, skip: Collection[str] = (), names: Sequence[str] | None = None
) -> Iterator[Message]:
    """Messages in the order of their ids, without those to skip and those that are deleted meanwhile. ``names`` are
    those of ``list_inbox``, if they are known.
    """
    for name in list_inbox(store, sweep) if names is None else names:
        message_id = name.removesuffix(".json")
        if message_id in skip:
            continue
        # No reference to the text is kept: for a large plan it is a third of the memory for handling it.
        message = _read(store, sweep, message_id)
        if message is not None:
            yield message


def discard(store: ObjectStore, sweep: str, message: Message) -> None:
    """Delete a settled message. The marker of one that took the sweep from another cluster stays for a while, for that
    cluster's controller to see.
    """
    store.delete(inbox_message(sweep, message.message_id))
    if not (isinstance(message, Submit) and message.ownership is Ownership.TAKE):
        discard_marker(store, sweep, message.message_id)


def _read(store: ObjectStore, sweep: str, message_id: str) -> Message | None:
    """A message; ``None`` if it is deleted meanwhile."""
    try:
        name = inbox_message(sweep, message_id)
        content = store.get(name, max_bytes=PLAN_BYTES)
        check_seal(name, content)
        # The plan of a large sweep is most of a controller's memory.
        document = load_shared(content.decode())
        kind = document["type"]
        if kind not in _TYPES:
            return Unreadable(message_id=message_id, reason=f"unknown message {kind!r}; update the running controller")
        message: Submit | LifecycleRequest = decode_value(_TYPES[kind], {**document, "message_id": message_id})
        if not isinstance(message.sender, str):
            raise TypeError(f"its sender {message.sender!r:.80} is no name")
    except NotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError, CorruptObjectError) as error:
        return Unreadable(message_id=message_id, reason=f"not a message: {error}; send it again with `orchestrator`")
    return message


# ------------------------------------------------------------------------------------------------- what clients call
class Envelope(TypedDict, total=False):
    """Arguments of every request: its sender, whether it is forced, and the time (unix seconds)."""

    sender: str | None
    """None = this user."""
    consent: Consent
    now: float | None
    """None = the clock's."""


class SubmitFields(Envelope, total=False):
    """Optional arguments of a submit: fields of ``Submit``, including those of its envelope."""

    ownership: Ownership
    replaced_revision: int | None
    provenance: Mapping[str, Any] | None
    """What is known of where the plan comes from (``tracking.provenance.capture``); it is kept with the revision."""
    message_id: str
    """Id for a submit that may be sent twice: it is followed once. Empty = a new id."""


def new_submit(plan: Plan, spec_text: str, cluster: str, options: SubmitFields) -> Submit:
    """The message of a submit."""
    given = {name: value for name, value in options.items() if name != "now" and value is not None and value != ""}
    return Submit(**(new_envelope(options) | given), cluster=cluster, plan=plan.to_json(), spec_text=spec_text)


def cancel(store: ObjectStore, sweep: str, *, jobs: Collection[str] | None = None, **envelope: Unpack[Envelope]) -> str:
    """Ask for the end of a sweep, or only of some jobs (names, or patterns as of a shell); returns the message's id.

    What runs is stopped with a checkpoint; what needs a cancelled job is skipped. As with all messages, the id is found
    in ``Snapshot.handled`` once a controller has followed it, or with the reason in ``Snapshot.refusals``. A sweep that
    has ended refuses; ``retry`` takes a cancel back.

    Raises:
        NotFoundError: the store knows no such sweep.
        ControllerError: ``jobs`` is there and empty.
    """
    return _send(store, sweep, Cancel(**new_envelope(envelope), jobs=_named(jobs)))


def pause(store: ObjectStore, sweep: str, *, running: Running = Running.FINISH, **envelope: Unpack[Envelope]) -> str:
    """Ask that no job starts until a resume; see ``cancel``. Submitting the sweep again resumes it, too."""
    return _send(store, sweep, Pause(**new_envelope(envelope), running=running))


def resume(store: ObjectStore, sweep: str, **envelope: Unpack[Envelope]) -> str:
    """Ask that a paused sweep continues; see ``cancel``."""
    return _send(store, sweep, Resume(**new_envelope(envelope)))


def stop(store: ObjectStore, sweep: str, **envelope: Unpack[Envelope]) -> str:
    """Ask that a sweep ends when its running attempts have ended; see ``cancel``."""
    return _send(store, sweep, Stop(**new_envelope(envelope)))


def retry(store: ObjectStore, sweep: str, *, jobs: Collection[str] | None = None, **envelope: Unpack[Envelope]) -> str:
    """Ask for a retry of some jobs, or of all that failed, were skipped or cancelled; see ``cancel``.

    With a job comes what it needs and does not exist, and what was skipped because of it. Sweeps that have ended,
    cancelled ones too, go on.
    """
    return _send(store, sweep, Retry(**new_envelope(envelope), jobs=_named(jobs)))


def set_priority(store: ObjectStore, sweep: str, priority: int, **envelope: Unpack[Envelope]) -> str:
    """Give a sweep another priority (higher goes first) until its plan changes; see ``cancel``."""
    return _send(store, sweep, SetPriority(**new_envelope(envelope), priority=priority))


def current_user() -> str:
    """Name of this process's user; empty if the system has none (as in some containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def new_envelope(envelope: Envelope) -> dict[str, Any]:
    """The fields that all messages have, with a new id."""
    sender, now = envelope.get("sender"), envelope.get("now")
    return {
        "message_id": new_message_id(time.time() if now is None else now),
        "sender": current_user() if sender is None else sender,
        "consent": envelope.get("consent", Consent.ASK),
    }


def _named(jobs: Collection[str] | None) -> tuple[str, ...]:
    if jobs is not None and not jobs:
        # An empty message means all of them, which a script with an empty list did not mean.
        message = "no job is named: name some, or leave jobs out to mean the whole sweep"
        raise ControllerError(message)
    return tuple(jobs or ())


def _send(store: ObjectStore, sweep: str, message: ClientMessage) -> str:
    check_exists(store, sweep)
    post(store, sweep, message)
    return message.message_id
