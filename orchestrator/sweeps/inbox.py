"""Messages of clients to whichever controller owns a sweep; they wait in the store while none is running.

A message is settled by an event that carries its id; only then is it deleted. A crash between the two leaves a message
whose id is in the journal already: it is deleted without being followed again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.planning.graph.plan import load_shared
from orchestrator.state.codec import decode_value
from orchestrator.state.events import Running
from orchestrator.storage.bounds import PLAN_BYTES, check_writable
from orchestrator.storage.layout import inbox_folder, inbox_message
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal, seal


class Ownership(StrEnum):
    """What a submit may do with an unfinished sweep that another cluster owns."""

    KEEP = "keep"
    TAKE = "take"
    """Adopt it; what the other cluster still runs for it is done again or found committed."""


class Consent(StrEnum):
    """Whether a client insists, though the sweep is somebody else's."""

    ASK = "ask"
    FORCE = "force"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
    """Base of what clients send. Names of senders are as they say: nobody checks them, they prevent accidents only."""

    message_id: str
    sender: str = ""
    """User name; empty = not told, which every sweep accepts."""
    consent: Consent = Consent.ASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(ClientMessage):
    """Run this plan on this cluster."""

    cluster: str
    plan: Mapping[str, Any]
    spec_text: str
    ownership: Ownership = Ownership.KEEP
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """What the client knows of code, packages and machine, as JSON; it goes into the revision's provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(ClientMessage):
    """End the sweep: stop what runs, start nothing. With ``jobs`` only these: names, or patterns as of a shell."""

    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(ClientMessage):
    """Start nothing new until told to resume."""

    running: Running = Running.FINISH


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(ClientMessage):
    """Go on after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(ClientMessage):
    """Start nothing new any more, let what runs end, then end the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(ClientMessage):
    """Give jobs that ended without an artifact a new chance; without ``jobs`` all that failed or were skipped."""

    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPriority(ClientMessage):
    """Give the sweep another priority; higher goes first."""

    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An object in the inbox that is no message of this version."""

    message_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """A submit to another cluster, which one that was sent after it has overtaken."""

    message_id: str
    reason: str


Message: TypeAlias = ClientMessage | Unreadable | Superseded
_TYPES: Mapping[str, type[ClientMessage]] = {
    "submit": Submit,
    "cancel": Cancel,
    "pause": Pause,
    "resume": Resume,
    "stop": Stop,
    "retry": Retry,
    "set_priority": SetPriority,
}
_NAMES = {type_: name for name, type_ in _TYPES.items()}


def new_message_id(now: float) -> str:
    """An id that sorts by time, so that a cancel after a submit is followed after it."""
    return f"{int(now * 1e6):017d}-{secrets.token_hex(8)}"


def post(store: ObjectStore, sweep: str, message: ClientMessage) -> None:
    """Put a message into a sweep's inbox. Raises ``TooLargeError`` if none would read it."""
    # Not ``asdict``, which copies the plan of a submit for a second per 10,000 jobs.
    document = {"type": _NAMES[type(message)]} | {item.name: getattr(message, item.name) for item in fields(message)}
    name = inbox_message(sweep, message.message_id)
    content = seal(name, json.dumps(document).encode())
    check_writable(f"the message to sweep {sweep}", len(content), PLAN_BYTES, "make several sweeps of it")
    store.put_if_absent(name, content)


def read_inbox(store: ObjectStore, sweep: str, *, skip: Collection[str] = ()) -> Iterator[Message]:
    """Messages in the order of their ids, without those to skip and those that are deleted meanwhile."""
    for name in store.list_children(inbox_folder(sweep)):
        message_id = name.removesuffix(".json")
        if message_id in skip:
            continue
        # Nothing here holds on to the text: that of a large sweep's plan is a third of what settling it takes.
        message = _read(store, sweep, message_id)
        if message is not None:
            yield message


def discard(store: ObjectStore, sweep: str, message_id: str) -> None:
    """Delete a settled message."""
    store.delete(inbox_message(sweep, message_id))


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
        return decode_value(_TYPES[kind], {**document, "message_id": message_id})
    except NotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError, CorruptObjectError) as error:
        return Unreadable(message_id=message_id, reason=f"not a message: {error}; send it again with `orchestrator`")
