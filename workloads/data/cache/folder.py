"""The files of a node's cache: which are kept, their users, the size limit of the folder, and counters of its use.

``objects/<sha256>``   whole and verified: whatever has a name here may be read without another look
``partial/<sha256>``   being downloaded by whoever holds its lock; of full size from the start, so that it counts
``suspect/<sha256>``   left from before the machine's last start: a power failure may have taken what was in memory
``admission.lock``     held for milliseconds, by whoever counts, evicts or gives a file its name
``fetcher-<n>.lock``   held by a process that fetches more than one object ahead: the node shares a few of them

Sizes are summed again for each admission (2 us per file), so the sum is right after any kill of a process.

The kernel drops a lock when its holder dies, however it dies. A lock (``flock(2)``) belongs to an open file, so threads
exclude each other as processes do. It is given up by closing the file, never by unlocking: a forked child shares its
parent's open files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from pydantic import ByteSize, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.core.errors import StorageDeniedError, StorageError, StorageTimeoutError, UserError

Count = Literal[
    "hits", "misses", "ranged_reads", "downloads", "evictions", "bytes_from_store", "bytes_served", "wait_s", "damaged"
]

_COUNTS: Final[tuple[Count, ...]] = (
    "hits",
    "misses",
    "ranged_reads",
    "downloads",
    "evictions",
    "bytes_from_store",
    "bytes_served",
    "wait_s",
    "damaged",
)
NUM_FETCHERS = 8
"""Objects that are fetched ahead at once by one process: one of its own, so that it depends on nobody, and others that
the processes of a node share. A stream of a store gives 0.1-0.3 GB/s, a node of 8 GPUs needs 2.
"""
_FREE_SHARE = 0.5
"""Of the space that would be free without the cache: scratch, logs and other programs need the rest."""
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
_LOCK_TIMEOUT_S = 60.0
"""Locks that are waited for are held for milliseconds; a holder that was stopped must not stop the node."""
Check = Callable[[], None]
"""Called between waits; ends the wait by raising."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_TRIES = 100


class CacheStats:
    """Sums since the start. Thread-safe.

    ``hits``: samples read from a local file that was there when it was asked for; ``misses``: all other samples;
    ``ranged_reads``: requests for ranges, each for one or more neighbouring samples; ``downloads``, ``evictions``: of
    whole objects; ``wait_s``: readers' seconds, summed over threads, until a shard had arrived; ``damaged``: local
    copies that differed from their digest, and samples read by ranges that differed from their check: read once more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, count: Count, amount: float = 1) -> None:
        """Add to one sum."""
        with self._lock:
            self._sums[count] += amount  # type: ignore[assignment] # seconds are no integers

    def sums(self) -> dict[str, float]:
        """All of them."""
        with self._lock:
            return {count: float(self._sums[count]) for count in _COUNTS}

    def snapshot(self) -> dict[str, float]:
        """All sums, and ``hit_rate``: the share of samples that were hits, in [0, 1]; 0 before the first."""
        sums = self.sums()
        reads = sums["hits"] + sums["misses"]
        return {**sums, "hit_rate": sums["hits"] / reads if reads else 0.0}


class CacheSettings(BaseSettings):
    """``ORCHESTRATOR_CACHE_BYTES``: a number, or a size such as ``500GB`` or ``1.5TiB``; unset: half the free space."""

    model_config = SettingsConfigDict(env_prefix="ORCHESTRATOR_CACHE_", extra="ignore", frozen=True)

    bytes: ByteSize | None = None

    @classmethod
    def read(cls) -> CacheSettings:
        """From the environment. Raises ``UserError`` if the variable is no size."""
        try:
            return cls()
        except ValidationError as error:
            given = os.environ.get("ORCHESTRATOR_CACHE_BYTES")
            message = f"ORCHESTRATOR_CACHE_BYTES is {given!r}: write a number of bytes or a size such as 500GB or 2TiB"
            raise UserError(message) from error

    def limit_bytes(self, folder: Path, used_bytes: int) -> int:
        """What the cache in ``folder`` may hold now, where it holds ``used_bytes``."""
        if self.bytes is not None:
            return int(self.bytes)
        found = os.statvfs(folder)
        return int(_FREE_SHARE * (found.f_bavail * found.f_frsize + used_bytes))


class BusyError(Exception):
    """Others of this node fetch an object, or as many as the node may: ask again in a moment."""

    def __init__(self, *, is_node: bool) -> None:
        super().__init__(is_node)
        self.is_node = is_node
        """Whether no other object can be fetched either."""


class LockTimeoutError(StorageTimeoutError):
    """Somebody holds a lock that is held for milliseconds only; its process must have been stopped."""


class Hold(IntEnum):
    """How a file is locked."""

    SHARED = fcntl.LOCK_SH
    EXCLUSIVE = fcntl.LOCK_EX


def go_on() -> None:
    """The check that never ends anything."""


def try_lock(descriptor: int, hold: Hold) -> bool:
    """Lock an open file, or change its lock, unless another open file is in the way."""
    try:
        fcntl.flock(descriptor, hold | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int, hold: Hold, *, check: Check = go_on, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
    """Wait for a lock. Raises ``LockTimeoutError`` after a time for which nobody at work keeps it."""
    deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not try_lock(descriptor, hold):
        check()
        if time.monotonic() > deadline_s:
            message = (
                f"a lock of the node's cache was held for {timeout_s:g} s; is a process stopped (SIGSTOP)? Resume it"
            )
            raise LockTimeoutError(message)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class Pin:
    """A file of the cache that stays where it is while this object lives and is open.

    Dropping the last reference closes it, so a thread that is reading is never cut off by another one that lets go.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        """Open for reading, shared: use ``read``."""
        self._close = weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go. What is mapped or open elsewhere stays readable on Linux even after an eviction."""
        self._close()

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; fewer at the end of the file."""
        return os.pread(self.descriptor, length, offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedFile:
    """A file that counts."""

    path: Path
    size_bytes: int
    used_at_ns: int


class CacheFolder:
    """See the module.

    Args:
        root: the folder; created for this user alone.
        settings: how much may be in it.

    Raises:
        StorageDeniedError: the folder belongs to another user, who could plant files in it.
    """

    def __init__(self, root: Path, *, settings: CacheSettings | None = None, stats: CacheStats | None = None) -> None:
        self.root = _own(root)
        self._settings = settings or CacheSettings.read()
        self._stats = stats or CacheStats()
        self._objects, self._partial, self._suspect = (self.root / name for name in ("objects", "partial", "suspect"))
        self._make_folders()
        self._distrust_former_boot()

    def pin(self, digest: str, size_bytes: int) -> Pin | None:
        """Pin a whole object and mark it as used now; None if it is not there."""
        path = self._objects / digest
        for _ in range(_TRIES):
            try:
                descriptor = os.open(path, os.O_RDONLY | _FLAGS)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ELOOP}:  # a link is nothing of ours
                    return None
                raise
            pin = Pin(path, descriptor)
            lock(descriptor, Hold.SHARED)
            found = os.fstat(descriptor)
            if not found.st_nlink:
                continue  # evicted between opening and locking
            if found.st_size != size_bytes or found.st_uid != os.geteuid():
                self.discard(pin)
                return None
            _use(descriptor)
            return pin
        return None

    def discard(self, pin: Pin) -> None:
        """Take a damaged object out of the cache; whoever has it open may go on reading it."""
        with self.admission():
            if _is_at(pin.descriptor, pin.path):
                pin.path.unlink()
        pin.close()

    def open_partial(self, digest: str) -> tuple[Path, int]:
        """The file to download to, not locked yet."""
        path = self._partial / digest
        self._make_folders()
        return path, os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)

    def suspect(self, digest: str, size_bytes: int) -> Path | None:
        """A copy from before the last start of the machine, to be verified before it is used."""
        path = self._suspect / digest
        try:
            return path if path.lstat().st_size == size_bytes else None
        except FileNotFoundError:
            return None

    def publish(self, source: Path, descriptor: int, digest: str) -> Pin | None:
        """Give a verified file, open and locked by the caller, its name; None if somebody took it over meanwhile."""
        with self.admission():
            if not _is_at(descriptor, source):
                return None
            path = self._objects / digest
            os.fchmod(descriptor, 0o400)
            source.replace(path)
            # Within the admission: changing a lock gives it up for a moment, in which nobody may evict.
            lock(descriptor, Hold.SHARED)
            _use(descriptor)
        return Pin(path, os.dup(descriptor))

    def reserve(self, descriptor: int, size_bytes: int, *, force: bool = False) -> bool:
        """Make room for a download and give its file the full size, which counts from now on.

        Evicts what was not used for the longest time and is not pinned; if that is not enough, nothing is evicted and
        the answer is False; by ``force`` all of it is evicted and the answer is True.
        """
        with self.admission():
            entries = list(self._entries())
            used = sum(entry.size_bytes for entry in entries) + sum(self._partial_sizes())
            excess = used + size_bytes - self._settings.limit_bytes(self.root, used)
            if not self._evict(entries, excess):
                if not force:
                    return False
                for entry in entries:
                    self._remove(entry)
            os.truncate(descriptor, size_bytes)
            return True

    def evict_for(self, size_bytes: int) -> bool:
        """Evict because the disk is full, whatever the limit says; False if not enough can go for a file of this size.

        At least one file goes, so that a caller who tries again and again comes to an end.
        """
        found = os.statvfs(self.root)
        with self.admission():
            return self._evict(list(self._entries()), max(size_bytes - found.f_bavail * found.f_frsize, 1))

    @contextmanager
    def fetcher(self) -> Iterator[None]:
        """One of those that the node shares. Raises ``BusyError`` if all of them are at work."""
        self._make_folders()
        for number in range(1, NUM_FETCHERS):
            descriptor = os.open(self.root / f"fetcher-{number}.lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
            try:
                if try_lock(descriptor, Hold.EXCLUSIVE):
                    yield
                    return
            finally:
                os.close(descriptor)
        raise BusyError(is_node=True)

    def has_name(self, path: Path, descriptor: int) -> bool:
        """Whether an open file still has this name."""
        return _is_at(descriptor, path)

    def restore(self, former: Path, digest: str, size_bytes: int) -> Pin | None:
        """Give a suspect that was verified its place back; None if it was evicted meanwhile."""
        with suppress(FileNotFoundError):
            former.replace(self._objects / digest)
        return self.pin(digest, size_bytes)

    def forget_partial(self, path: Path, descriptor: int) -> None:
        """Delete a download's file unless another one has its name by now."""
        with self.admission():
            if _is_at(descriptor, path):
                path.unlink()

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Exclusive within the node; for milliseconds."""
        self._make_folders()
        descriptor = os.open(self.root / "admission.lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            lock(descriptor, Hold.EXCLUSIVE, check=go_on)
            yield
        finally:
            os.close(descriptor)

    def _make_folders(self) -> None:
        """Also later: people empty caches by hand, and a run should not mind."""
        for folder in (self.root, self._objects, self._partial, self._suspect):
            folder.mkdir(mode=0o700, exist_ok=True)

    def _evict(self, entries: list[CachedFile], excess_bytes: int) -> bool:
        """Evict at least so many bytes, or nothing: what is not enough would be lost for nothing."""
        chosen: list[CachedFile] = []
        for entry in sorted(entries, key=lambda entry: entry.used_at_ns):
            if excess_bytes <= 0:
                break
            if (descriptor := _open_unpinned(entry.path)) is not None:
                os.close(descriptor)  # not kept: thousands of small files may have to go at once
                chosen.append(entry)
                excess_bytes -= entry.size_bytes
        if excess_bytes > 0:
            return False
        return all(self._remove(entry) for entry in chosen)

    def _remove(self, entry: CachedFile) -> bool:
        """Delete a file unless somebody has pinned it meanwhile."""
        descriptor = _open_unpinned(entry.path)
        if descriptor is None:
            return False
        entry.path.unlink(missing_ok=True)  # before the lock goes: a pin sees that the name is gone
        os.close(descriptor)
        self._stats.add("evictions")
        return True

    def _entries(self) -> Iterator[CachedFile]:
        for folder in (self._objects, self._suspect):
            for path, found in _files(folder):
                yield CachedFile(path=path, size_bytes=found.st_size, used_at_ns=found.st_mtime_ns)

    def _partial_sizes(self) -> Iterator[int]:
        """Of downloads under way; those of dead processes are deleted."""
        for path, found in _files(self._partial):
            descriptor = _open_unpinned(path)
            if descriptor is None:
                yield found.st_size
                continue
            # Also one that its owner has made and not locked yet: it will see that the name is gone, and begin anew.
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _distrust_former_boot(self) -> None:
        """Files are not flushed to disk when they get their name: until the machine fails, memory has the truth."""
        boot_id = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.exists() else ""
        path = self.root / "boot_id"
        with suppress(FileNotFoundError):
            if path.read_text(encoding="ascii") == boot_id:
                return
        with self.admission():
            known = path.read_text(encoding="ascii") if path.exists() else None
            if known != boot_id:
                for entry, _ in _files(self._objects):
                    entry.replace(self._suspect / entry.name)
                # Last: a crash before this line only repeats the moves.
                path.write_text(boot_id, encoding="ascii")


def _own(root: Path) -> Path:
    """The folder, made for this user alone. In a shared temporary directory its name can be guessed and taken first."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        message = f"the cache folder {root} cannot be made: {error}; set ORCHESTRATOR_CACHE_DIR to another one"
        raise StorageError(message) from error
    owners = {found.st_uid, root.lstat().st_uid}  # of a link: the link's, too
    if owners != {os.geteuid()} or not stat.S_ISDIR(found.st_mode):
        message = f"the cache folder {root} belongs to user {max(owners)}, not to {os.geteuid()}, who runs this: "
        message += "what is read from it could be planted; delete it, chown it, or set ORCHESTRATOR_CACHE_DIR"
        raise StorageDeniedError(message)
    if stat.S_IMODE(found.st_mode) != 0o700:
        root.chmod(0o700)
    return root


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(folder) as found:
        for entry in found:
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def _open_unpinned(path: Path) -> int | None:
    """Open a file and lock it against new pins; None if it is pinned or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    if try_lock(descriptor, Hold.EXCLUSIVE):
        return descriptor
    os.close(descriptor)
    return None


def _use(descriptor: int) -> None:
    """Mark a file as used now, by the exact clock: the kernel's own stamp is that of its last tick, 4 ms."""
    now_ns = time.time_ns()
    os.utime(descriptor, ns=(now_ns, now_ns))


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    mine = os.fstat(descriptor)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (mine.st_ino, mine.st_dev) == (there.st_ino, there.st_dev)
