"""The samples of a split, from local shards if these fit into the cache, else by ranged reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import CorruptObjectError, StorageError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import remedy_of
from workloads.data.cache.ahead import PATIENCE_BYTES, Ahead
from workloads.data.cache.folder import CacheSettings, CacheStats, Check, Pin
from workloads.data.cache.objects import STALLED_S, ObjectCache, Wanted
from workloads.data.images import check_of

if TYPE_CHECKING:
    from workloads.data.index import Shard  # which imports this package for its columns


GAP_BYTES = 128 * 1024
"""Neighbours so close are read together: a request costs more (1.4 ms of processor time, 10-100 ms of waiting)."""
MAX_SPAN_BYTES = 8 * 1024**2
_NUM_THREADS = 16
"""Requests at once: they wait for the store, not for a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request: bytes ``start <= i < stop``, and which samples of the call lie in them."""

    start: int
    stop: int
    members: tuple[int, ...]


def spans(
    offsets: Sequence[int], lengths: Sequence[int], *, gap_bytes: int = GAP_BYTES, max_bytes: int = MAX_SPAN_BYTES
) -> Iterator[Span]:
    """The requests that read all samples: neighbours with at most ``gap_bytes`` between them together.

    A span is at most ``max_bytes`` long unless a single sample is longer. Samples may be in any order, and overlap.
    """
    start, stop, members = 0, 0, list[int]()
    for member in sorted(range(len(offsets)), key=lambda member: offsets[member]):
        begin, end = offsets[member], offsets[member] + lengths[member]
        if members and (begin > stop + gap_bytes or max(end, stop) - start > max_bytes):
            yield Span(start=start, stop=stop, members=tuple(members))
            members = []
        if not members:
            start, stop = begin, end
        stop = max(stop, end)
        members.append(member)
    if members:
        yield Span(start=start, stop=stop, members=tuple(members))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """One sample of a call."""

    offset: int
    length: int
    check: int | None
    found: Future[bytes]


class FilePart(NamedTuple):
    """A sample in a local file, which stays there while the pin lives."""

    pin: Pin
    shard_id: int
    offset: int
    length: int


class RangedReader:
    """Reads samples from the store, several requests at once. Thread-safe.

    The first answer of each shard is preceded by a question for its size, and each sample is compared with its check:
    a shard that was replaced by another one is noticed, also by one of the same size.
    """

    def __init__(self, store_of: Callable[[Shard], ObjectStore], stats: CacheStats) -> None:
        self._store_of, self._stats = store_of, stats
        self._checked: set[tuple[str, str]] = set()
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ranged-read")
        self._pid = os.getpid()

    def start(
        self,
        shard: Shard,
        offsets: Sequence[int],
        lengths: Sequence[int],
        checks: Sequence[int] = (),
        *,
        asks_size: bool = True,
    ) -> list[Future[bytes]]:
        """Begin to read samples of one shard; one future for each, in the order asked for.

        ``checks`` are the samples' ``check_of``; empty where the index has none. ``asks_size=False`` saves the first
        request of a shard, where a whole copy follows.

        Raises (the futures):
            NotFoundError: the shard is gone.
            CorruptObjectError: the shard is not the one that was indexed.
        """
        if self._pid != os.getpid():
            self._begin()  # threads do not survive a fork
        known: Sequence[int | None] = checks or [None] * len(offsets)
        asks = [
            _Ask(offset=offset, length=length, check=check, found=Future())
            for offset, length, check in zip(offsets, lengths, known, strict=True)
        ]
        for span in spans(offsets, lengths):
            self._pool.submit(self._answer, shard, span, [asks[member] for member in span.members], asks_size=asks_size)
        return [ask.found for ask in asks]

    def close(self) -> None:
        """Let requests under way end by themselves, and begin no others: their readers are told."""
        self._is_closed = True
        self._pool.shutdown(wait=False)  # cancelled, they would never answer

    def _read(self, shard: Shard, offset: int, length: int) -> bytes:
        self._stats.add("ranged_reads")
        content = self._store_of(shard).get_range(shard.object_name, offset, length) if length else b""
        self._stats.add("bytes_from_store", len(content))
        if len(content) != length:
            raise self._another(shard, f"ends before byte {offset + length}")
        return content

    def _answer(self, shard: Shard, span: Span, asks: Sequence[_Ask], *, asks_size: bool) -> None:
        try:
            if self._is_closed:
                raise StorageError(f"shard {shard.object_name} is not read: its reader was closed")
            if asks_size:
                self._check_size(shard)
            content = self._read(shard, span.start, span.stop - span.start)
        except Exception as error:  # noqa: BLE001 - whoever waits for the sample raises it
            for ask in asks:
                ask.found.set_exception(error)
            return
        for ask in asks:
            try:
                first = ask.offset - span.start
                ask.found.set_result(self._verified(shard, ask, content[first : first + ask.length]))
            except Exception as error:  # noqa: BLE001 - as above
                ask.found.set_exception(error)

    def _verified(self, shard: Shard, ask: _Ask, encoded: bytes) -> bytes:
        """The sample as it was indexed; read once more if it seems another, since bytes get damaged on their way."""
        if ask.check is None or check_of(encoded) == ask.check:
            return encoded
        self._stats.add("damaged")
        encoded = self._read(shard, ask.offset, ask.length)
        if check_of(encoded) != ask.check:
            raise self._another(shard, f"has other bytes at {ask.offset}-{ask.offset + ask.length} than were indexed")
        return encoded

    def _check_size(self, shard: Shard) -> None:
        if (shard.store_uri, shard.object_name) in self._checked:
            return
        size_bytes = self._store_of(shard).stat(shard.object_name).size_bytes
        if size_bytes != shard.size_bytes:
            raise self._another(shard, f"has {size_bytes} bytes, the index says {shard.size_bytes}")
        self._checked.add((shard.store_uri, shard.object_name))

    def _another(self, shard: Shard, how: str) -> CorruptObjectError:
        message = f"shard {shard.object_name} in {self._store_of(shard).uri} {how}: "
        return CorruptObjectError(f"{message}it is not the one that was indexed; {remedy_of(shard.object_name)}")


class ShardCache:
    """The shards of one split as one process sees them; files are shared by the whole node. Thread-safe.

    The rule by which a sample is read:

    1. Its shard is here: from the local file.
    2. There is no room for its shard without evicting one that somebody has pinned: by a range, from the store.
    3. Its shard is being fetched, or at most ``patience_bytes`` are to be fetched before it: the reader waits.
    4. Otherwise, and for the first ``num_eager_reads`` samples in any case: by a range; the shard follows meanwhile.

    So every shard that has room travels once per node, a cache that is too small degrades into reading what is needed
    and nothing else, and no shard is fetched for a single sample and evicted again for the next.

    Args:
        store: where the shards are.
        folder: the node's cache folder.
        shards: of the split, in the order that ``shard_id`` counts.
        num_eager_reads: the first sample of so many workers comes after a single request.
        settings: the limit; from the environment by default.
        stalled_s: see ``ObjectCache``.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        shards: Sequence[Shard],
        *,
        num_eager_reads: int = 0,
        patience_bytes: int = PATIENCE_BYTES,
        settings: CacheSettings | None = None,
        stalled_s: float = STALLED_S,
    ) -> None:
        self.stats = CacheStats()
        self._store, self._shards = store, shards
        self._objects = ObjectCache(store, folder, stats=self.stats, settings=settings, stalled_s=stalled_s)
        self._ranges = RangedReader(self._store_of, self.stats)
        sizes = [shard.size_bytes for shard in shards]
        self._ahead = Ahead(sizes, self._obtain, patience_bytes=patience_bytes)
        self._eager_reads_left = num_eager_reads
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and let go of all shards."""
        self._ahead.close()
        self._ranges.close()

    def prefetch(self, shard_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Declare the shards needed from now on, in order of first use; this replaces what was declared before.

        They are fetched and pinned in this order while there is room, and stay until they are no longer declared. Name
        the shuffle block at hand and the next one or two. An equal declaration costs nothing, so it may come with every
        batch.
        """
        declared = shard_ids.tolist() if isinstance(shard_ids, np.ndarray) else list(shard_ids)
        self._ahead.declare(declared)

    def pin(self, shard_id: int) -> Pin | None:
        """The whole shard as a local file that stays while the pin lives, or None if there is no room for it.

        Raises:
            NotFoundError: the shard is gone.
            CorruptObjectError: the shard is not the one that was indexed.
        """
        return self._objects.pin(self._wanted(shard_id))

    def read_samples(self, shard_id: int, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Several samples of one shard, in the order asked for. Raises as ``pin``, but never for lack of space."""
        return [self._content(found) for found in self._find(shard_id, offsets, lengths)]

    def read_batch(
        self,
        shard_ids_B: NDArray[np.int64],
        offsets_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        checks_B: NDArray[np.uint32] | None = None,
    ) -> list[bytes]:
        """Samples of any shards, in the order asked for; as ``find_batch``. Raises as ``read_samples``."""
        return [self._content(found) for found in self.find_batch(shard_ids_B, offsets_B, lengths_B, checks_B)]

    def find_batch(
        self,
        shard_ids_B: NDArray[np.int64],
        offsets_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        checks_B: NDArray[np.uint32] | None = None,
    ) -> list[FilePart | Future[bytes]]:
        """Where samples of any shards are; those that are in no local file are on their way from the store, all at
        once. With ``checks_B``, what is read by ranges must have these ``check_of``; whole copies have their digests.

        Raises as ``read_samples``; so do the futures.
        """
        parts: dict[int, FilePart | Future[bytes]] = {}
        for shard_id in np.unique(shard_ids_B).tolist():
            slots = np.flatnonzero(shard_ids_B == shard_id)
            checks = () if checks_B is None else checks_B[slots].tolist()
            found = self._find(shard_id, offsets_B[slots].tolist(), lengths_B[slots].tolist(), checks)
            parts.update(zip(slots.tolist(), found, strict=True))
        return [parts[slot] for slot in range(len(shard_ids_B))]

    def recheck(self, shard_id: int) -> bool:
        """For a reader that cannot make sense of a sample: True if the local copy was damaged; read again then.

        Reads the whole local file. False: the bytes are what was indexed, or came from the store by a range.
        """
        held, wanted = self._ahead.held(shard_id), self._wanted(shard_id)
        damaged = self._objects.recheck(wanted)
        # Another process may have replaced the file, which this one still holds open.
        damaged = damaged or (held is not None and not wanted.is_in(held.descriptor))
        if damaged:
            self._ahead.drop(shard_id)
        return damaged

    def _find(
        self, shard_id: int, offsets: Sequence[int], lengths: Sequence[int], checks: Sequence[int] = ()
    ) -> Sequence[FilePart | Future[bytes]]:
        self.stats.add("bytes_served", sum(lengths))
        pin = self._ahead.held(shard_id) or self._pin_local(shard_id)
        self.stats.add("hits" if pin is not None else "misses", len(offsets))
        is_eager = pin is None and self._is_eager()
        if is_eager:
            self._ahead.ask(shard_id)
        elif pin is None:
            pin = self._wait(shard_id)
        if pin is None:
            return self._ranges.start(self._shards[shard_id], offsets, lengths, checks, asks_size=not is_eager)
        return [FilePart(pin, shard_id, *place) for place in zip(offsets, lengths, strict=True)]

    def _content(self, found: FilePart | Future[bytes]) -> bytes:
        if isinstance(found, Future):
            return found.result()
        pin, shard_id, offset, length = found
        content = pin.read(offset, length)
        if len(content) != length:
            message = f"shard {self._shards[shard_id].object_name} has no bytes {offset}-{offset + length}: the index "
            raise CorruptObjectError(message + "belongs to another data set; index the data set again")
        return content

    def _pin_local(self, shard_id: int) -> Pin | None:
        """A pin of a shard that somebody else has brought here."""
        pin = self._objects.pin_local(self._wanted(shard_id))
        if pin is not None:
            self._ahead.keep(shard_id, pin)
        return pin

    def _wait(self, shard_id: int) -> Pin | None:
        started_s = time.monotonic()
        try:
            return self._ahead.wait(shard_id)
        finally:
            self.stats.add("wait_s", time.monotonic() - started_s)

    def _is_eager(self) -> bool:
        with self._lock:
            self._eager_reads_left -= 1
            return self._eager_reads_left >= 0

    def _obtain(self, shard_id: int, check: Check) -> Pin | None:
        return self._objects.pin_ahead(self._wanted(shard_id), check=check)

    def _wanted(self, shard_id: int) -> Wanted:
        shard = self._shards[shard_id]
        store = self._store_of(shard)
        return Wanted(store=store, name=shard.object_name, size_bytes=shard.size_bytes, digests=shard.digests)

    def _store_of(self, shard: Shard) -> ObjectStore:
        from workloads.data.index import store_of  # which imports this package for its columns

        return store_of(shard, self._store)
