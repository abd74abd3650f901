"""One garbage collection at a time: a lease, so that a dead one does not block the next for long."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from orchestrator.core.errors import NotFoundError, PreconditionFailedError, StorageError
from orchestrator.core.security.json_text import parse_json
from orchestrator.retention.gc_layout import LOCK
from orchestrator.storage.protocol import ObjectStore

LOCK_DURATION_S = 300.0
_RENEW_AFTER_S = 60.0


class CollectionBusyError(StorageError):
    """Another garbage collection works on this store, or has died and its lock has not expired yet."""


class CollectionLock:
    """Held inside a ``with`` block; call ``keep`` at least every few minutes.

    Raises:
        CollectionBusyError: on entering, and from ``keep`` if another collection took the expired lock.
    """

    def __init__(self, store: ObjectStore, holder: str, now: Callable[[], float]) -> None:
        self._store = store
        self._holder = f"{holder}-{secrets.token_hex(4)}"
        self._now = now
        self._etag = ""
        self._renew_at_s = 0.0
        self.deserted_at_s = 0.0
        """When the lock was last taken from a collection that never said that it ended: it died, or it sleeps and may
        still make the one request that it was about to make. 0: that has not happened."""

    def __enter__(self) -> Self:
        found = self._read()
        if found is None:
            self._write(None, LOCK_DURATION_S)
            return self
        document, etag = found
        wait_s = document["expires_at_s"] - self._now()
        if wait_s > 0:
            message = (
                f"{document['holder']} collects garbage in {self._store.uri}, or died while it did: two at once could "
                f"undo each other's work; try again after its end, or in {wait_s:.0f} s if it is dead"
            )
            raise CollectionBusyError(message)
        is_deserted = document["expires_at_s"] > 0
        self.deserted_at_s = self._now() if is_deserted else document.get("deserted_at_s", 0.0)
        self._write(etag, LOCK_DURATION_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Exception):
            try:
                self._write(self._etag, 0.0)
            except StorageError:
                if kind is None:
                    raise

    def keep(self) -> None:
        """Renew the lock when it is time."""
        if self._now() >= self._renew_at_s:
            self._write(self._etag, LOCK_DURATION_S)

    def _read(self) -> tuple[dict[str, Any], str] | None:
        try:
            content, stat = self._store.get_with_stat(LOCK)
        except NotFoundError:
            return None
        return parse_json(content), stat.etag

    def _write(self, etag: str | None, duration_s: float) -> None:
        now_s = self._now()
        document = {
            "holder": self._holder,
            "expires_at_s": now_s + duration_s if duration_s else 0.0,
            "deserted_at_s": self.deserted_at_s,
            "nonce": secrets.token_hex(8),
        }
        content = json.dumps(document).encode()
        try:
            if etag is None:
                stat = self._store.put_if_absent(LOCK, content)
            else:
                stat = self._store.put_if_match(LOCK, content, etag)
        except PreconditionFailedError as error:
            message = f"another garbage collection has started in {self._store.uri}: this one stops; let that one end"
            raise CollectionBusyError(message) from error
        self._etag = stat.etag
        self._renew_at_s = now_s + _RENEW_AFTER_S
