"""Whole objects as local files: one download per node, for all readers, also if some of them die."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.core.errors import CorruptObjectError, NoSpaceError, StorageError
from orchestrator.core.units import format_bytes
from orchestrator.storage import ObjectStore, open_store
from orchestrator.storage.artifacts import remedy_of
from orchestrator.storage.bulk import fetch
from orchestrator.storage.digests import Digests, descriptor_digest
from workloads.data.cache.folder import (
    BusyError,
    CacheFolder,
    CacheSettings,
    CacheStats,
    Check,
    Hold,
    LockTimeoutError,
    Pin,
    go_on,
    try_lock,
)

_KEPT_PATHS = 32
_POLL_S = 0.005
_COUNT_S = 1.0
"""A lock on a download's file that is still empty lasts milliseconds: somebody counts sizes, or is about to begin."""
STALLED_S = 150.0
"""A download that writes nothing for so long belongs to a stopped process: the store gives up after 60 s + 30 s."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


opened_store = lru_cache(maxsize=64)(open_store)
"""Of a URI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An object by its place in a store and by its content."""

    store: ObjectStore
    name: str
    size_bytes: int
    digests: Digests

    @property
    def sha256(self) -> str:
        """Its name in the cache."""
        return self.digests.sha256

    def is_in(self, descriptor: int) -> bool:
        """Whether a file has its content."""
        return self.digests.match(descriptor_digest(descriptor, self.digests.algorithm))


class _NoRoomError(Exception):
    """Neither the limit nor the disk has place for a file."""


class ObjectCache:
    """Files under the sha256 of their content, so that sweeps, data sets and stores can share one folder.

    Args:
        store: where objects come from.
        folder: the node's cache folder.
        stats: counters to add to.
        settings: the limit; from the environment by default.
        kept_paths: how many of the last paths stay where they are.
        stalled_s: after so long without a byte another process's download is taken over.

    Raises:
        StorageDeniedError: the folder belongs to another user.
        UserError: the limit in the environment is no size.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        *,
        stats: CacheStats | None = None,
        settings: CacheSettings | None = None,
        kept_paths: int = _KEPT_PATHS,
        stalled_s: float = STALLED_S,
    ) -> None:
        self.stats = stats or CacheStats()
        self._store = store
        self._folder = CacheFolder(folder, settings=settings, stats=self.stats)
        self._stalled_s = stalled_s
        self._handed_out: deque[Pin] = deque(maxlen=kept_paths)
        self._own_fetcher = threading.Lock()
        self._last_write: dict[str, tuple[int, float]] = {}
        """Of downloads of others that were met: when their file was last written, and when that was first seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process of the node: the same folder, and a store that is opened there."""
        return _cache_of, (self._store.uri, self._folder.root)

    def path(self, name: str, *, size_bytes: int, digests: Digests) -> Path:
        """A local, verified copy of an object, even if the cache's limit has no room for it.

        The last ``kept_paths`` paths stay where they are while this object lives. What was opened or mapped stays
        readable longer: Linux keeps a deleted file until its last user lets go.

        Raises:
            NotFoundError: the store has no such object.
            CorruptObjectError: the object's bytes are not those that its record names, twice in a row.
            NoSpaceError: the disk is full of what cannot be evicted.
        """
        wanted = Wanted(store=self._store, name=name, size_bytes=size_bytes, digests=digests)
        pin = self.pin_local(wanted) or self._obtain(wanted, go_on, force=True)
        if pin is None:
            message = f"no room for {name} ({format_bytes(size_bytes)}) under {self._folder.root}: the disk is full; "
            raise NoSpaceError(message + "free space there or set ORCHESTRATOR_CACHE_DIR to a larger disk")
        self._handed_out.append(pin)
        return pin.path

    def pin(self, wanted: Wanted, *, check: Check = go_on) -> Pin | None:
        """A local, verified copy that nothing evicts while the pin lives; None if there is no room for it.

        Processes and threads that ask at the same time share one download. ``check`` is called between waits and
        pieces; what it raises ends the call.

        Raises:
            NotFoundError, CorruptObjectError: as ``path``.
        """
        return self.pin_local(wanted) or self._obtain(wanted, check, force=False)

    def pin_ahead(self, wanted: Wanted, *, check: Check = go_on) -> Pin | None:
        """``pin`` for several threads of a process, bounded within the node, and without waiting for others.

        Raises:
            BusyError: others fetch this object, or as many as may; what else there is to do comes first.
        """
        pin = self.pin_local(wanted)
        if pin is not None:
            return pin
        if self._own_fetcher.acquire(blocking=False):
            try:
                return self._obtain(wanted, check, force=False, waits=False)
            finally:
                self._own_fetcher.release()
        try:
            with self._folder.fetcher():
                return self._obtain(wanted, check, force=False, waits=False)
        except OSError as error:  # of the lock's own file
            if error.errno in _FULL:
                return None
            raise self._failed(error) from error

    def pin_local(self, wanted: Wanted) -> Pin | None:
        """``pin`` if the object is here already; asks no store."""
        try:
            return self._folder.pin(wanted.sha256, wanted.size_bytes)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self, pin: Pin) -> None:
        """Let go of a file that nobody needs any more; whoever has it open may go on reading it."""
        self._folder.discard(pin)

    def recheck(self, wanted: Wanted) -> bool:
        """Whether the local copy was damaged: it is gone then, and the next ``pin`` fetches the object again."""
        pin = self.pin_local(wanted)
        if pin is None or wanted.is_in(pin.descriptor):
            return False
        self.stats.add("damaged")
        self._folder.discard(pin)
        return True

    def _obtain(self, wanted: Wanted, check: Check, *, force: bool, waits: bool = True) -> Pin | None:
        while True:
            try:
                with self._turn(wanted, check, waits=waits) as turn:
                    # Also without a turn: somebody else's has ended, most likely with the file in its place.
                    pin = self.pin_local(wanted)
                    if pin is None and turn is not None:
                        pin = self._take(turn, wanted, check, force=force)
            except _NoRoomError:
                return None
            except LockTimeoutError:
                if force:
                    raise
                return None
            except OSError as error:
                if error.errno in _FULL:
                    return None
                raise self._failed(error) from error
            if pin is not None:
                return pin

    def _failed(self, error: OSError) -> StorageError:
        message = f"writing under {self._folder.root} failed: {error}; check the disk or set "
        return StorageError(message + "ORCHESTRATOR_CACHE_DIR to another one")

    @contextmanager
    def _turn(self, wanted: Wanted, check: Check, *, waits: bool) -> Iterator[tuple[Path, int] | None]:
        """The file to download to, ours alone; None if its name was given away while we waited.

        The lock is the file's own, and the kernel drops it when its holder dies: whoever waits goes on at once.
        """
        path, descriptor = self._folder.open_partial(wanted.sha256)
        try:
            if self._wait_for(path, descriptor, check, waits=waits):
                try:
                    yield path, descriptor
                finally:
                    self._folder.forget_partial(path, descriptor)
                return
        finally:
            os.close(descriptor)
        # Only now that it is closed: our lock may be on the very file that has become the object to pin.
        yield None

    def _wait_for(self, path: Path, descriptor: int, check: Check, *, waits: bool) -> bool:
        started_s = time.monotonic()
        while not try_lock(descriptor, Hold.EXCLUSIVE):
            check()
            if not self._folder.has_name(path, descriptor):
                return False  # published, and pinned as long as somebody reads it
            found = os.fstat(descriptor)
            written_ns, seen_s = self._last_write.get(path.name, (-1, 0.0))
            if found.st_mtime_ns != written_ns:
                self._last_write[path.name] = found.st_mtime_ns, time.monotonic()
            elif time.monotonic() - seen_s > self._stalled_s:
                # Its owner is alive but writes nothing. It will find its file nameless, and what we fetch instead.
                self._last_write.pop(path.name, None)
                self._folder.forget_partial(path, descriptor)
                return False
            if not waits and (found.st_size or time.monotonic() - started_s > _COUNT_S):
                raise BusyError(is_node=False)
            time.sleep(_POLL_S)
        self._last_write.pop(path.name, None)
        return self._folder.has_name(path, descriptor)

    def _take(self, turn: tuple[Path, int], wanted: Wanted, check: Check, *, force: bool) -> Pin | None:
        """A copy from before the last start of the machine if it is still what it was, else from the store."""
        path, descriptor = turn
        former = self._folder.suspect(wanted.sha256, wanted.size_bytes)
        if former is not None:
            with suppress(FileNotFoundError):  # others may evict it meanwhile
                with former.open("rb") as file:
                    if wanted.is_in(file.fileno()):
                        return self._folder.restore(former, wanted.sha256, wanted.size_bytes)
                self.stats.add("damaged")
                former.unlink(missing_ok=True)
        self._reserve(descriptor, wanted.size_bytes, force=force)
        self._fetch(descriptor, wanted, check)
        return self._folder.publish(path, descriptor, wanted.sha256)

    def _reserve(self, descriptor: int, size_bytes: int, *, force: bool) -> None:
        while True:
            try:
                if not self._folder.reserve(descriptor, size_bytes, force=force):
                    raise _NoRoomError
                if size_bytes:
                    os.posix_fallocate(descriptor, 0, size_bytes)  # a full disk shows before anything is transferred
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # Others fill this disk, too. Theirs we cannot count, so it is tried again after each eviction.
                os.truncate(descriptor, 0)
                if not self._folder.evict_for(size_bytes):
                    raise _NoRoomError from error

    def _fetch(self, descriptor: int, wanted: Wanted, check: Check) -> None:
        found, digests = "", wanted.digests
        for _ in range(2):

            def arrived(num_bytes: int) -> None:
                self.stats.add("bytes_from_store", num_bytes)
                check()

            found = fetch(
                wanted.store,
                wanted.name,
                descriptor,
                size_bytes=wanted.size_bytes,
                algorithm=digests.algorithm,
                arrived=arrived,
            )
            if digests.match(found):
                self.stats.add("downloads")
                return
        raise CorruptObjectError(
            f"{wanted.name} in {wanted.store.uri} has {digests.algorithm} {found[:12]}..., its record says "
            f"{digests.expected[:12]}..., also when read again: the store lost or changed it; {remedy_of(wanted.name)}"
        )


def _cache_of(store_uri: str, folder: Path) -> ObjectCache:
    return ObjectCache(opened_store(store_uri), folder)
