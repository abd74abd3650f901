"""The append-only log of a sweep: immutable segments, each written by ``put_if_absent`` at the next sequence number.

The sequence number is the fence: a writer that is behind meets a segment it did not write and must stop. Segments hold
one JSON event per line after a header line with the writer's nonce, so equal events of two writers stay two contents.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.errors import ControllerError, NotFoundError, PreconditionFailedError, TooLargeError
from orchestrator.security.json_text import parse_json
from orchestrator.storage.bounds import SEGMENT_BYTES, check_writable
from orchestrator.storage.layout import journal_folder, journal_segment
from orchestrator.storage.protocol import ObjectStore

Event = Mapping[str, Any]


class JournalFencedError(ControllerError):
    """Another writer appended first: this one no longer owns the sweep."""


class JournalDamagedError(ControllerError):
    """A segment is not as any program wrote it."""

    def __init__(self, sweep: str, sequence: int, reason: str) -> None:
        super().__init__(sweep, sequence, reason)

    def __str__(self) -> str:
        sweep, sequence, reason = self.args
        return (
            f"segment {sequence} of the journal of sweep {sweep!r} cannot be used ({reason}): it was damaged or "
            "altered; restore it from a copy of the store, or submit the sweep under another name: its results are kept"
        )


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
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_alive = on_alive
        self._store = store
        self._sweep = sweep
        self._holder = holder
        self.next_sequence = next_sequence
        """Sequence number after the last segment that this object has read or written, or was told to leave out."""
        self._read: list[Event] = []
        """Events of segments before ``next_sequence`` that no call has returned, because a later read failed."""

    def append(self, events: Sequence[Event]) -> None:
        """Durably append events as one segment: all of them or none.

        Raises:
            JournalFencedError: somebody else wrote this sequence number.
            TooLargeError: no reader would take so large a segment; nothing is written.
        """
        header = {"sequence": self.next_sequence, "holder": self._holder, "nonce": secrets.token_hex(8)}
        lines = [json.dumps(line, allow_nan=False) for line in (header, *events)]
        name, content = journal_segment(self._sweep, self.next_sequence), ("\n".join(lines) + "\n").encode()
        # Checked before it is written: no reader would get past it.
        check_writable(name, len(content), SEGMENT_BYTES, "split the sweep")
        try:
            self._store.put_if_absent(name, content)
        except PreconditionFailedError as error:
            message = f"journal of sweep {self._sweep} has a segment {self.next_sequence} of another writer"
            raise JournalFencedError(message) from error
        self.next_sequence += 1

    def read_new(self) -> list[Event]:
        """The events of all segments from ``next_sequence`` on, which moves behind them.

        A read that fails loses none: the next call goes on where it was and returns all of them.
        """
        # Followers look again and again where nothing has come: that shall read no object.
        has_news = self._store.exists(journal_segment(self._sweep, self.next_sequence))
        while has_news and (content := self._find(self.next_sequence)) is not None:
            self._read += self._events(content)
            self.next_sequence += 1
            self._on_alive()
        events, self._read = self._read, []
        return events

    def _events(self, content: bytes) -> list[Event]:
        """Of the segment ``next_sequence``. Raises ``JournalDamagedError``."""
        try:
            events = [parse_json(line) for line in content.decode().splitlines()[1:]]
            if not all(isinstance(event, dict) for event in events):
                raise TypeError("an event is no JSON object")
        except (ValueError, TypeError) as error:
            raise JournalDamagedError(self._sweep, self.next_sequence, repr(error)) from error
        return events

    def _find(self, sequence: int) -> bytes | None:
        try:
            return self._store.get(journal_segment(self._sweep, sequence), max_bytes=SEGMENT_BYTES)
        except NotFoundError:
            return None
        except TooLargeError as error:
            raise JournalDamagedError(self._sweep, sequence, str(error)) from error


def journal_exists(store: ObjectStore, sweep: str) -> bool:
    """Whether a sweep has been adopted by any controller yet."""
    return bool(store.list_children(journal_folder(sweep)))
