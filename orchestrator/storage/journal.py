"""The append-only log of a sweep, and states of the sweep at some points of it.

Invariants:

- A segment is immutable and written by ``put_if_absent`` at the next sequence number. The number protects against two
  writers: the slower one finds a segment that it did not write and must stop. A segment holds one JSON event per line
  after a header line with the writer's nonce, so equal events of two writers stay two contents.
- The header also holds the segment's seal (see ``seals``), the number of its events, and the sha256 of the segment
  before: a chain, so that a segment that was changed, truncated, exchanged or replaced by an earlier version is always
  found. Segments of earlier versions have none of these and are read without them; the first one written after them
  names the last of them.
- Stored states save reading a long journal from its beginning. They only save time: each has the segments that it
  covers and the sha256 of the last of them, is sealed (see ``seals``), and may be deleted at any time. One that is
  damaged, or of another version, is ignored.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from orchestrator.core.errors import ControllerError, CorruptObjectError, NotFoundError, PreconditionFailedError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import PLAN_BYTES, SEGMENT_BYTES, check_writable
from orchestrator.storage.layout import (
    journal_folder,
    journal_segment,
    segment_numbers,
    snapshot_name,
    snapshots_folder,
)
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal, seal

KEPT = 2
"""Number of stored states: one more than the newest, for readers that have listed it, or if the newest is damaged."""
_LOG = logging.getLogger(__name__)
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A stored state and its position in the journal."""

    next_sequence: int
    """Sequence number of the first segment that it does not cover."""
    journal_sha256: str
    """Of the last segment that it covers; empty in snapshots of earlier versions."""
    document: dict[str, Any]


def write_snapshot(
    store: ObjectStore, sweep: str, next_sequence: int, document: Mapping[str, Any], *, journal_sha256: str = ""
) -> None:
    """Store the state after all segments before ``next_sequence``, and delete all but the newest ones.

    To be called by the writer of the last of these segments, after it is durable.

    Raises:
        StorageError: none may have been stored.
    """
    body = json.dumps(document, allow_nan=False)
    header = {
        "next_sequence": next_sequence,
        "journal_sha256": journal_sha256,
        "sha256": sha256(body.encode()).hexdigest(),  # for earlier versions, which refuse a snapshot without it
    }
    name = snapshot_name(sweep, next_sequence)
    content = seal(name, f"{json.dumps(header)}\n{body}\n".encode())
    check_writable(name, len(content), PLAN_BYTES, "the journal is read instead")
    try:
        store.put_if_absent(name, content)
    except PreconditionFailedError:
        return  # another controller of the same journal has stored it: the state is the same
    for number in segment_numbers(store.list_children(snapshots_folder(sweep)))[:-KEPT]:
        store.delete(snapshot_name(sweep, number))


def read_snapshots(store: ObjectStore, sweep: str) -> Iterator[StoredSnapshot]:
    """Intact states, the newest first."""
    for number in reversed(segment_numbers(store.list_children(snapshots_folder(sweep)))):
        name = snapshot_name(sweep, number)
        try:
            yield parse_snapshot(name, store.get(name, max_bytes=PLAN_BYTES))
        except NotFoundError:
            continue  # replaced by a newer one meanwhile
        except (ValueError, KeyError, TypeError, CorruptObjectError) as error:
            _LOG.warning("%s is damaged and passed over: %s", name, error)


def parse_snapshot(name: str, content: bytes) -> StoredSnapshot:
    """A snapshot out of the object of this name. Raises ``ValueError``, ``KeyError`` or ``TypeError`` if damaged."""
    is_sealed = check_seal(name, content)
    header, body = content.decode().split("\n", 1)
    fields, body = parse_json(header), body.removesuffix("\n")
    if not is_sealed and sha256(body.encode()).hexdigest() != fields["sha256"]:
        raise ValueError("the sha256 of its state does not match")
    next_sequence = int(fields["next_sequence"])
    if not name.endswith(f"/{next_sequence:08d}.jsonl"):
        raise ValueError(f"its header says that segment {next_sequence} follows, which its name does not")
    document = parse_json(body)
    return StoredSnapshot(
        next_sequence=next_sequence, journal_sha256=str(fields.get("journal_sha256", "")), document=document
    )


class JournalFencedError(ControllerError):
    """Another writer appended first: this one no longer owns the sweep."""


class JournalDamagedError(ControllerError):
    """A segment was damaged or altered, or is missing."""

    def __init__(self, sweep: str, sequence: int, reason: str) -> None:
        super().__init__(sweep, sequence, reason)

    def __str__(self) -> str:
        sweep, sequence, reason = self.args
        return (
            f"segment {sequence} of the journal of sweep {sweep!r} cannot be used ({reason}): the journal was damaged "
            "or altered; restore it from a copy of the store, or submit the sweep under another name: its results are "
            "kept"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One segment as it was read and checked."""

    events: tuple[Event, ...]
    sha256: str
    """Of all its bytes: what the next segment names."""
    previous_sha256: str = ""
    """Of the segment before; empty for the first one, and in segments of earlier versions."""


class Journal:
    """One sweep's journal. ``holder`` names the writer in the headers; readers leave it empty.

    ``on_alive`` is called after each segment that was read.
    """

    def __init__(
        self,
        store: ObjectStore,
        sweep: str,
        *,
        holder: str = "",
        next_sequence: int = 0,
        last_sha256: str = "",
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_alive = on_alive
        self._store = store
        self._sweep = sweep
        self._holder = holder
        self.next_sequence = next_sequence
        """Sequence number after the last segment that this object has read, written or skipped."""
        self.last_sha256 = last_sha256
        """Of the segment before ``next_sequence``; empty if that is not known, or if there is none."""
        self._read: list[Event] = []
        """Events of segments before ``next_sequence`` that no call has returned, because a later read failed."""

    def append(self, events: Sequence[Event]) -> None:
        """Durably append events as one segment: all of them or none.

        Raises:
            JournalFencedError: somebody else wrote this sequence number.
            TooLargeError: no reader would take so large a segment; nothing is written.
        """
        header = {
            "sequence": self.next_sequence,
            "holder": self._holder,
            "nonce": secrets.token_hex(8),
            "num_events": len(events),
            "previous_sha256": self._previous(),
        }
        lines = [json.dumps(line, allow_nan=False) for line in (header, *events)]
        name = journal_segment(self._sweep, self.next_sequence)
        content = seal(name, ("\n".join(lines) + "\n").encode())
        # Checked before it is written: readers could not read it.
        check_writable(name, len(content), SEGMENT_BYTES, "split the sweep")
        try:
            self._store.put_if_absent(name, content)
        except PreconditionFailedError as error:
            message = f"journal of sweep {self._sweep} has a segment {self.next_sequence} of another writer"
            raise JournalFencedError(message) from error
        self._pass(sha256(content).hexdigest())

    def read_new(self) -> list[Event]:
        """The events of all segments from ``next_sequence`` on, which moves behind them.

        A failed read loses no events: the next call continues and returns all of them.
        """
        # Followers poll often: without new segments no object is read.
        if self._store.exists(journal_segment(self._sweep, self.next_sequence)):
            self._read_on()
        return self._take_read()

    def read_whole(self) -> list[Event]:
        """As ``read_new``, and certain that no segment is missing before the last one that was there at the call, from
        the one before ``next_sequence`` on.

        Raises:
            JournalDamagedError: one is missing; without this check the journal would seem to end before it.
        """
        # Listed before anything is read: segments that are appended meanwhile are in no list, and raise nothing.
        last = self._last_number()
        # A client of NFS may list what a folder held a while ago: the object itself decides.
        if last < self.next_sequence - 1 and self._find(self.next_sequence - 1) is None:
            raise JournalDamagedError(self._sweep, self.next_sequence - 1, "it is missing, and it was there before")
        if last >= self.next_sequence:
            self._read_on()
        if last >= self.next_sequence:
            raise JournalDamagedError(self._sweep, self.next_sequence, "it is missing, and later ones exist")
        return self._take_read()

    def _last_number(self) -> int:
        """Of the segments that are there now, from the one before ``next_sequence`` on; -1 if there are none."""
        start_after = ""
        if self.next_sequence > 1:  # the thousands that a stored state covers are not listed
            start_after = journal_segment(self._sweep, self.next_sequence - 2).rpartition("/")[2]
        children = self._store.list_children(journal_folder(self._sweep), start_after=start_after)
        return max(segment_numbers(children), default=-1)

    def _read_on(self) -> None:
        while (content := self._find(self.next_sequence)) is not None:
            segment = parse_segment(self._sweep, self.next_sequence, content)
            if segment.previous_sha256 and self.last_sha256 not in {"", segment.previous_sha256}:
                reason = "the segment before it is another one than its header names"
                raise JournalDamagedError(self._sweep, self.next_sequence, reason)
            self._read += segment.events
            self._pass(segment.sha256)
            self._on_alive()

    def _take_read(self) -> list[Event]:
        events, self._read = self._read, []
        return events

    def _pass(self, digest: str) -> None:
        self.next_sequence, self.last_sha256 = self.next_sequence + 1, digest

    def _previous(self) -> str:
        """Of the segment before the next one; read if a snapshot of earlier versions has left it out."""
        if not self.last_sha256 and self.next_sequence:
            content = self._find(self.next_sequence - 1)
            self.last_sha256 = "" if content is None else sha256(content).hexdigest()
        return self.last_sha256

    def _find(self, sequence: int) -> bytes | None:
        try:
            return self._store.get(journal_segment(self._sweep, sequence), max_bytes=SEGMENT_BYTES)
        except NotFoundError:
            return None
        except CorruptObjectError as error:
            raise JournalDamagedError(self._sweep, sequence, str(error)) from error


def parse_segment(sweep: str, sequence: int, content: bytes) -> Segment:
    """A segment out of the object that holds it. Raises ``JournalDamagedError``."""
    try:
        is_sealed = check_seal(journal_segment(sweep, sequence), content)
        header, *events = (parse_json(line) for line in content.decode().splitlines())
        if not all(isinstance(line, dict) for line in (header, *events)):
            raise TypeError("a line is no JSON object")
        if header["sequence"] != sequence or not content.endswith(b"\n"):
            raise ValueError(f"its header names segment {header['sequence']}, or its last line is cut")
        if not is_sealed and "num_events" in header:
            raise ValueError("its sha256 is missing")
        previous = str(header.get("previous_sha256", ""))
    except (ValueError, TypeError, KeyError) as error:
        raise JournalDamagedError(sweep, sequence, str(error)) from error
    return Segment(events=tuple(events), sha256=sha256(content).hexdigest(), previous_sha256=previous)


def journal_exists(store: ObjectStore, sweep: str) -> bool:
    """Whether a sweep has been adopted by any controller yet."""
    return bool(store.list_children(journal_folder(sweep)))
