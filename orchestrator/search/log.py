"""The log of a search: immutable segments of JSON lines, each written by ``put_if_absent`` at the next number.

The number is the fence: of two attempts at one search, of which the controller takes the older for dead, the one that
is behind meets a segment that it did not write, and must end. Who begins a log writes its head first, which is a fence
too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from orchestrator.core.errors import NotFoundError, PreconditionFailedError, PreemptedError
from orchestrator.search.events import SearchEvent, decode_search_event, encode_search_event
from orchestrator.storage.bounds import SEGMENT_BYTES
from orchestrator.storage.layout import search_log_folder, search_log_head, search_log_segment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal, seal
from orchestrator.storage.trials import encode_head, find_folder

LOG_VERSION = 1


class SearchFencedError(PreemptedError):
    """Another attempt writes this search's log: this one no longer owns it."""


class SearchLog:
    """The log of one search job as one attempt sees it; use from one thread at a time."""

    def __init__(self, store: ObjectStore, key: str, *, attempt_id: str = "") -> None:
        self._store, self._key, self._attempt_id = store, key, attempt_id
        self._next, self._folder = 0, ""

    @property
    def folder(self) -> str:
        """What names this log among all of the search; empty as long as it has not begun."""
        return self._folder

    def read(self) -> list[SearchEvent]:
        """Every event so far; later ones are appended behind them."""
        events: list[SearchEvent] = []
        self._folder = self._folder or find_folder(self._store, self._key)
        while self._folder and (content := self._find(self._next)) is not None:
            name = search_log_segment(self._key, self._folder, self._next)
            check_seal(name, content)
            header, *lines = (json.loads(line) for line in content.decode().splitlines())
            if header["version"] > LOG_VERSION:
                raise ValueError(f"{name} has version {header['version']}, this program reads {LOG_VERSION}: update it")
            events += [decode_search_event(line) for line in lines]
            self._next += 1
        return events

    def append(self, events: Sequence[SearchEvent]) -> None:
        """Durably append events as one segment: all of them or none.

        Raises:
            SearchFencedError: another attempt wrote this segment.
        """
        nonce = secrets.token_hex(8)
        header = {"version": LOG_VERSION, "sequence": self._next, "attempt": self._attempt_id, "nonce": nonce}
        lines = [json.dumps(line, allow_nan=False) for line in (header, *map(encode_search_event, events))]
        self._begin()
        name = search_log_segment(self._key, self._folder, self._next)
        self._put_first(
            name,
            seal(name, ("\n".join(lines) + "\n").encode()),
            f"the log of search {self._key} has a segment {self._next} of another attempt, which goes on",
        )
        self._next += 1

    def _begin(self) -> None:
        """Write the head of a log that has none. A crash behind it leaves an empty log, which the next one goes on."""
        if not self._folder:
            folder = secrets.token_hex(8)
            message = f"the log of search {self._key} was begun by another attempt, which goes on"
            self._put_first(search_log_head(self._key), encode_head(self._key, folder), message)
            self._folder = folder

    def _put_first(self, name: str, content: bytes, otherwise: str) -> None:
        try:
            self._store.put_if_absent(name, content)
        except PreconditionFailedError as error:
            raise SearchFencedError(otherwise) from error

    def _find(self, sequence: int) -> bytes | None:
        try:
            return self._store.get(search_log_segment(self._key, self._folder, sequence), max_bytes=SEGMENT_BYTES)
        except NotFoundError:
            return None


def read_search(store: ObjectStore, key: str) -> list[SearchEvent]:
    """All events of a search job; none of one that has not begun."""
    if not store.list_children(search_log_folder(key)):
        return []
    return SearchLog(store, key).read()
