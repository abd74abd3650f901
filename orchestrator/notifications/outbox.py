"""What is to be told, in the store: written before anything is sent, and marked after it was.

So a process that dies in between sends again: at least once, always with the same id.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.notifications.notifications import Notice
from orchestrator.storage.layout import notification_name, notifications_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal
from orchestrator.sweepfile.values import Channel

FIRST_DELAY_S, LAST_DELAY_S = 5.0, 3600.0
"""Between two tries, doubled from the first up to the last."""
GIVE_UP_S = 3 * 24 * 3600.0
_LOG = logging.getLogger(__name__)


class DeliveryState(StrEnum):
    """How far a notification is on one channel."""

    WAITING = "waiting"
    SENT = "sent"
    GIVEN_UP = "given up"


@dataclass(slots=True, kw_only=True)
class Delivery:
    """One notification on one channel."""

    channel: Channel
    state: DeliveryState = DeliveryState.WAITING
    num_tries: int = 0
    next_at_s: float = 0.0
    """Not tried before; unix seconds."""
    error: str = ""
    """Of the latest try that failed."""
    ended_at_s: float | None = None

    def note_success(self, now: float) -> None:
        """It was taken."""
        self.state, self.error, self.ended_at_s = DeliveryState.SENT, "", now
        self.num_tries += 1

    def note_failure(self, why: str, now: float, *, is_final: bool) -> None:
        """It was not; it is tried again later unless that is pointless."""
        self.error = why
        self.num_tries += 1
        self.next_at_s = now + min(FIRST_DELAY_S * 2.0 ** (self.num_tries - 1), LAST_DELAY_S)
        if is_final:
            self.state, self.ended_at_s = DeliveryState.GIVEN_UP, now

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        channel, state = Channel.from_json(document["channel"]), DeliveryState(document["state"])
        return cls(**{**document, "channel": channel, "state": state})


@dataclass(slots=True, kw_only=True)
class Entry:
    """One notification with all its channels."""

    notice: Notice
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def waiting(self) -> list[Delivery]:
        """Those that were neither taken nor given up."""
        return [delivery for delivery in self.deliveries if delivery.state is DeliveryState.WAITING]

    @property
    def name(self) -> str:
        """Of the object that holds it."""
        return notification_name(self.notice.sweep, self.notice.notification_id)

    def to_bytes(self) -> bytes:
        """JSON document."""
        document = {"notice": self.notice.to_json(), "deliveries": [asdict(delivery) for delivery in self.deliveries]}
        return seal(self.name, json.dumps(document, indent=1).encode())

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> Self:
        """Inverse of ``to_bytes``. Raises ``ValueError``, ``TypeError`` or ``KeyError`` for anything else."""
        document = parse_sealed(name, content)
        deliveries = [Delivery.from_json(one) for one in document["deliveries"]]
        return cls(notice=Notice.from_json(document["notice"]), deliveries=deliveries)


def add(store: ObjectStore, notice: Notice, channels: Iterable[Channel]) -> Entry | None:
    """Decide to tell something; None if that was decided before.

    Raises:
        StorageError: the store does not answer; the next call tells whether it was written.
    """
    entry = Entry(notice=notice, deliveries=[Delivery(channel=channel) for channel in channels])
    if store.exists(entry.name):
        return None
    try:
        store.put_if_absent(entry.name, entry.to_bytes())
    except PreconditionFailedError:
        return None
    return entry


def save(store: ObjectStore, entry: Entry) -> None:
    """Remember how far an entry is."""
    store.put(entry.name, entry.to_bytes())


def read_all(store: ObjectStore, sweep: str) -> Sequence[Entry]:
    """All that was, or is to be, told about a sweep, by time. What cannot be read is passed over."""
    entries = []
    for child in store.list_children(notifications_folder(sweep)):
        name = f"{notifications_folder(sweep)}{child}"
        try:
            entries.append(Entry.from_bytes(name, store.get(name)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            _LOG.warning("the notification %s of sweep %s cannot be read: %s", child, sweep, error)
    return sorted(entries, key=lambda entry: entry.notice.at_s)
