"""Sends notifications about sweeps: an outbox in the store, and the thread that sends its entries.

A notice is written before anything is sent, and marked after it was: a process that dies in between sends again, at
least once and always with the same id. The notifier's whole state is in the store, so a new one continues where another
stopped.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any, Self

from orchestrator.core.errors import (
    CorruptObjectError,
    NotFoundError,
    OrchestratorError,
    PreconditionFailedError,
    UserError,
)
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.redaction import redacted
from orchestrator.notifications.channels import RefusedForeverError, deliver
from orchestrator.notifications.messages import (
    Notice,
    budget_notices,
    may_stall,
    notice_of_event,
    stall_notice,
    used_gpu_hours,
)
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.journal import parse_segment
from orchestrator.storage.layout import (
    journal_folder,
    journal_segment,
    notification_cursor,
    notification_name,
    notifications_folder,
    notifications_since,
    progress_name,
    segment_numbers,
)
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal
from orchestrator.sweepfile.notify import check_channel_of_sweep
from orchestrator.sweepfile.values import Channel, Occasion

FIRST_DELAY_S, LAST_DELAY_S = 5.0, 3600.0
"""Between two tries, doubled from the first up to the last."""
GIVE_UP_S = 3 * 24 * 3600.0
_LOG = logging.getLogger(__name__)
_SAVE_EVERY = 64
"""Segments of the journal between two notes of how far it was read: what a restart reads again."""
_PASSED_AT_ONCE = 20
_PASSED_AFTER_S = 3600.0
"""After its end. Until then the file of the channels may not be readable yet."""
_NUM_SENDERS = 4
_MOVED = "the cluster's file no longer has this receiver; what waited for it goes to those that are new there"


class DeliveryState(StrEnum):
    """State of a notification on one channel."""

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
    """Time of the next try, unix seconds."""
    error: str = ""
    """Of the latest try that failed."""
    ended_at_s: float | None = None

    def note_success(self, now: float) -> None:
        """Mark it as delivered."""
        self.state, self.error, self.ended_at_s = DeliveryState.SENT, "", now
        self.num_tries += 1

    def note_failure(self, why: str, now: float, *, is_final: bool) -> None:
        """Mark a failed try; it is repeated later unless that is pointless."""
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
        """Channels to which it is neither delivered nor given up."""
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


def add_entry(store: ObjectStore, notice: Notice, channels: Iterable[Channel]) -> Entry | None:
    """Write a notice to the outbox; None if it was there already.

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


def save_entry(store: ObjectStore, entry: Entry) -> None:
    """Store the state of an entry."""
    store.put(entry.name, entry.to_bytes())


def read_entries(store: ObjectStore, sweep: str) -> Sequence[Entry]:
    """All notifications of a sweep, sent or pending, by time. Unreadable entries are skipped."""
    entries = []
    for child in store.list_children(notifications_folder(sweep)):
        name = f"{notifications_folder(sweep)}{child}"
        try:
            entries.append(Entry.from_bytes(name, store.get(name)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            _LOG.warning("the notification %s of sweep %s cannot be read: %s", child, sweep, error)
    return sorted(entries, key=lambda entry: entry.notice.at_s)


@dataclass(slots=True, kw_only=True)
class _Followed:
    """Position in one sweep's journal."""

    next_sequence: int
    saved_sequence: int
    num_events: int = -1
    """Of the snapshot up to which the journal was read."""
    mark: str = ""
    """State that has not changed since ``marked_at_s``."""
    marked_at_s: float = 0.0


class Notifier:
    """Call ``turn`` again and again, from one thread.

    Args:
        store: of the cluster's controller.
        cluster: its name.
        read_snapshots: all sweeps in the controller's hands, from any thread.
        read_channels: those that count for every sweep.
        send: sends one notice over one channel, or raises.
        now: unix seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        cluster: str,
        read_snapshots: Callable[[], Sequence[Snapshot]],
        read_channels: Callable[[], Sequence[Channel]] = lambda: (),
        *,
        send: Callable[[Notice, Channel], None] = deliver,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._cluster = store, cluster
        self._read_snapshots, self._read_channels = read_snapshots, read_channels
        self._send, self._now = send, now
        self._since_s: float | None = None
        self._general: tuple[Channel, ...] = ()
        """Channels of the cluster's own file in this round."""
        self._receivers: set[Channel] = set()
        """All that this process has seen in that file."""
        self._followed: dict[str, _Followed] = {}
        self._passed: dict[str, int] = {}
        """Ended sweeps without a channel whose cursor is at the end, by the number of their events."""
        self._in_outbox: set[tuple[str, str]] = set()
        """Sweep and id of notices that are certainly in the outbox."""
        self._waiting: dict[tuple[str, str], Entry] = {}
        self._unsaved: dict[tuple[str, str], Entry] = {}
        """Those that something was tried for since they were last saved."""

    def turn(self) -> None:
        """Check every sweep, then send due notices. An unreadable sweep does not block the others.

        Raises:
            StorageError: the store does not answer at all; call again later.
        """
        if self._since_s is None:
            self._since_s = self._begin()
        self._general = tuple(self._read_channels())
        self._receivers |= _receivers(self._general)
        silent = []
        for snapshot in self._read_snapshots():
            channels = (*(snapshot.plan.notify if snapshot.plan is not None else ()), *self._general)
            if snapshot.cluster != self._cluster:
                continue
            if not channels:
                silent.append(snapshot)
                continue
            try:
                self._follow_sweep(snapshot, channels)
            except (OrchestratorError, ValueError, TypeError, LookupError, AttributeError) as error:
                _LOG.warning("notifications of sweep %s are delayed: %s", snapshot.sweep, redacted(str(error)))
        self._send_due()
        self._pass_over(silent)

    def _pass_over(self, snapshots: Iterable[Snapshot]) -> None:
        """Put the cursors of ended sweeps without a channel to the ends of their journals.

        Else a channel that comes later would be told of all these ends. A few in each turn: a store may have thousands.
        """
        ended = (
            one for one in snapshots if self._ended_long_ago(one) and self._passed.get(one.sweep) != one.num_events
        )
        for snapshot in list(islice(ended, _PASSED_AT_ONCE)):
            is_new = snapshot.sweep not in self._passed and snapshot.sweep not in self._followed
            if not (is_new and self._store.exists(notification_cursor(snapshot.sweep))):
                self._save_end(snapshot.sweep)
            self._passed[snapshot.sweep] = snapshot.num_events
            self._followed.pop(snapshot.sweep, None)

    def _ended_long_ago(self, snapshot: Snapshot) -> bool:
        return snapshot.state.is_final and self._now() - (snapshot.finished_at_s or 0.0) >= _PASSED_AFTER_S

    def _begin(self) -> float:
        """When this cluster began to notify."""
        name = notifications_since(self._cluster)
        with suppress(PreconditionFailedError):
            self._store.put_if_absent(name, seal(name, json.dumps({"since_s": self._now()}).encode()))
        try:
            return float(parse_sealed(name, self._store.get(name))["since_s"])
        except (ValueError, TypeError, LookupError) as error:
            message = f"{name} is damaged ({error}), and nothing is notified until it is deleted or restored"
            raise CorruptObjectError(message) from error

    def _follow_sweep(self, snapshot: Snapshot, channels: Sequence[Channel]) -> None:
        followed = self._follow(snapshot)
        self._move_to_corrected(snapshot.sweep, channels)
        if followed.num_events != snapshot.num_events:  # or else nothing was appended: no request for it
            for notice in self._events(snapshot, followed):
                self._add_to_outbox(notice, channels)
            followed.num_events = snapshot.num_events
        has_budget = any(Occasion.BUDGET in channel.on for channel in channels)
        if has_budget and snapshot.plan is not None and snapshot.state.is_live:
            policy = snapshot.plan.policy
            used = used_gpu_hours(snapshot, self._now()) if policy.gpu_hour_budget is not None else 0.0
            for notice in budget_notices(snapshot, used, self._now()):
                self._add_to_outbox(notice, channels)
        self._check_for_stall(snapshot, followed, channels)
        is_far = followed.next_sequence - followed.saved_sequence >= _SAVE_EVERY
        if is_far or (snapshot.state.is_final and followed.next_sequence > followed.saved_sequence):
            self._save_cursor(snapshot.sweep, followed)

    def _follow(self, snapshot: Snapshot) -> _Followed:
        sweep = snapshot.sweep
        if sweep not in self._followed:
            for entry in read_entries(self._store, sweep):
                identity = (sweep, entry.notice.notification_id)
                self._in_outbox.add(identity)
                if entry.waiting:
                    self._waiting[identity] = entry
            sequence = self._first_sequence(snapshot)
            self._followed[sweep] = _Followed(next_sequence=sequence, saved_sequence=sequence)
        return self._followed[sweep]

    def _move_to_corrected(self, sweep: str, channels: Sequence[Channel]) -> None:
        """A receiver that was corrected in the cluster's own file is another one, and gets what waits for the former.

        What waits for a channel that the sweep itself had, before a revision, still goes to that one.
        """
        present = _receivers(channels)
        for entry in [entry for (name, _), entry in self._waiting.items() if name == sweep]:
            absent = [delivery for delivery in entry.waiting if _receiver(delivery.channel) not in present]
            gone = [delivery for delivery in absent if self._was_general(delivery.channel)]
            known = _receivers(delivery.channel for delivery in entry.deliveries if delivery.error != _MOVED)
            fresh = [one for one in self._general if entry.notice.occasion in one.on and _receiver(one) not in known]
            if gone and fresh:
                for delivery in gone:
                    delivery.note_failure(_MOVED, self._now(), is_final=True)
                entry.deliveries += [Delivery(channel=channel) for channel in fresh]

    def _was_general(self, channel: Channel) -> bool:
        """Whether a channel was in the cluster's file, as far as it can be known after a restart."""
        try:
            check_channel_of_sweep(channel)
        except UserError:
            return True
        return _receiver(channel) in self._receivers

    def _first_sequence(self, snapshot: Snapshot) -> int:
        """Position from which to read a journal; for a journal older than this cluster's notifications, its end."""
        name = notification_cursor(snapshot.sweep)
        try:
            return int(parse_sealed(name, self._store.get(name))["next_sequence"])
        except NotFoundError:
            pass
        except (ValueError, TypeError, LookupError) as error:
            _LOG.warning("%s is damaged (%s): the journal is read again, and nothing is sent twice", name, error)
        if snapshot.accepted_at_s >= (self._since_s or 0.0):
            return 0
        return self._save_end(snapshot.sweep)

    def _save_end(self, sweep: str) -> int:
        """Put the cursor of a sweep to the end of its journal, and return it."""
        segments = segment_numbers(self._store.list_children(journal_folder(sweep)))
        sequence = max(segments, default=-1) + 1
        self._save_cursor(sweep, _Followed(next_sequence=sequence, saved_sequence=0))
        return sequence

    def _events(self, snapshot: Snapshot, followed: _Followed) -> Iterator[Notice]:
        while (content := self._segment(snapshot.sweep, followed.next_sequence)) is not None:
            segment = parse_segment(snapshot.sweep, followed.next_sequence, content)
            for line, event in enumerate(segment.events):
                is_old = float(event["at_s"]) < (self._since_s or 0.0)
                notice = None if is_old else notice_of_event(event, followed.next_sequence, line, snapshot)
                if notice is not None:
                    yield notice
            followed.next_sequence += 1  # only now: the notices are in the outbox

    def _segment(self, sweep: str, sequence: int) -> bytes | None:
        name = journal_segment(sweep, sequence)
        try:
            return self._store.get(name) if self._store.exists(name) else None
        except NotFoundError:
            return None

    def _check_for_stall(self, snapshot: Snapshot, followed: _Followed, channels: Sequence[Channel]) -> None:
        wanted = {channel.stalled_after_s for channel in channels if Occasion.STALLED in channel.on}
        if not wanted or not may_stall(snapshot):
            followed.mark = ""
            return
        mark, now = f"{snapshot.num_events} {self._steps(snapshot.sweep)}", self._now()
        if mark != followed.mark:
            followed.mark, followed.marked_at_s = mark, now
        for patience_s in sorted(wanted):
            if now - followed.marked_at_s >= patience_s:
                notice = stall_notice(snapshot, followed.marked_at_s, f"{mark} {patience_s:g}", now)
                self._add_to_outbox(notice, [channel for channel in channels if channel.stalled_after_s == patience_s])

    def _steps(self, sweep: str) -> str:
        """Progress of running attempts, as the controller publishes it."""
        try:
            jobs = parse_json(self._store.get(progress_name(sweep)))["jobs"]
        except NotFoundError:
            return ""
        running = {job: line for job, line in jobs.items() if line["attempt_id"]}
        steps = {
            job: [*map(line["progress"].get, ("phase", "step")), line.get("done")] for job, line in running.items()
        }
        return json.dumps(steps, sort_keys=True)

    def _add_to_outbox(self, notice: Notice, channels: Iterable[Channel]) -> None:
        identity = (notice.sweep, notice.notification_id)
        if identity in self._in_outbox:
            return
        entry = add_entry(self._store, notice, (one for one in channels if notice.occasion in one.on))
        self._in_outbox.add(identity)
        if entry is not None and entry.deliveries:
            self._waiting[identity] = entry

    def _save_cursor(self, sweep: str, followed: _Followed) -> None:
        name = notification_cursor(sweep)
        self._store.put(name, seal(name, json.dumps({"next_sequence": followed.next_sequence}).encode()))
        followed.saved_sequence = followed.next_sequence

    def _send_due(self) -> None:
        now = self._now()
        due = [
            (entry, delivery)
            for entry in self._waiting.values()
            for delivery in entry.waiting
            if delivery.next_at_s <= now
        ]
        if not due and not self._unsaved:
            return
        with ThreadPoolExecutor(_NUM_SENDERS, thread_name_prefix="notify") as pool:
            list(pool.map(lambda pair: self._try(*pair), due))
        self._unsaved.update(((entry.notice.sweep, entry.notice.notification_id), entry) for entry, _ in due)
        for identity, entry in [*self._unsaved.items()]:  # those that the store did not take remain for the next turn
            save_entry(self._store, entry)
            del self._unsaved[identity]
        self._waiting = {identity: entry for identity, entry in self._waiting.items() if entry.waiting}

    def _try(self, entry: Entry, delivery: Delivery) -> None:
        notice, kind = entry.notice, delivery.channel.kind
        try:
            self._check(delivery.channel)
            self._send(notice, delivery.channel)
        except Exception as error:  # noqa: BLE001 - libraries of mail and TLS fail in many ways, none of which may end us
            # An unexpected error may quote anything: only our own errors are shown.
            why = redacted(str(error)) if isinstance(error, OrchestratorError) else type(error).__name__
            is_old = self._now() - notice.at_s > GIVE_UP_S
            delivery.note_failure(why, self._now(), is_final=is_old or isinstance(error, RefusedForeverError))
            _LOG.warning("%r was not sent by %s (try %d): %s", notice.title, kind, delivery.num_tries, why)
        else:
            delivery.note_success(self._now())

    def _check(self, channel: Channel) -> None:
        if _receiver(channel) in _receivers(self._general):
            return
        try:
            check_channel_of_sweep(channel)
        except UserError as error:
            # Submits refuse it in a sweep, too: almost always it was in the cluster's file.
            message = f"the cluster's own file (ORCHESTRATOR_NOTIFY_FILE) does not have this channel now, and {error}"
            raise UserError(message) from None


def _receiver(channel: Channel) -> Channel:
    """A channel without what it is told of: where this changes, it is not another receiver."""
    return replace(channel, on=(), stalled_after_s=0.0)


def _receivers(channels: Iterable[Channel]) -> set[Channel]:
    return {_receiver(channel) for channel in channels}
