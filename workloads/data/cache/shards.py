"""The samples of a split, from local shards where these have room and by ranged reads where they have not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import CorruptObjectError
from orchestrator.storage import ObjectStore
from workloads.data.cache.ahead import PATIENCE_BYTES, Ahead
from workloads.data.cache.objects import STALLED_S, ObjectCache, Wanted
from workloads.data.cache.pins import Check, Pin
from workloads.data.cache.ranges import RangedReader
from workloads.data.cache.settings import CacheSettings
from workloads.data.cache.stats import CacheStats

if TYPE_CHECKING:
    from workloads.data.index import Shard


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

    def read_sample(self, shard_id: int, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` of a shard. Raises as ``pin``, but never for lack of space."""
        return self.read_samples(shard_id, [offset], [length])[0]

    def read_samples(self, shard_id: int, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Several samples of one shard, in the order asked for. Raises as ``read_sample``."""
        return [
            found if isinstance(found, bytes) else found.result() for found in self._read(shard_id, offsets, lengths)
        ]

    def read_batch(
        self,
        shard_ids_B: NDArray[np.int64],
        offsets_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        checks_B: NDArray[np.uint32] | None = None,
    ) -> list[bytes]:
        """Samples of any shards, in the order asked for; ranged reads of the whole batch are under way at once.

        With ``checks_B``, what is read by ranges must have these ``check_of``; whole copies have their digests.

        Raises as ``read_sample``.
        """
        found: list[bytes | Future[bytes]] = [b""] * len(shard_ids_B)
        for shard_id in np.unique(shard_ids_B).tolist():
            slots = np.flatnonzero(shard_ids_B == shard_id)
            checks = () if checks_B is None else checks_B[slots].tolist()
            read = self._read(shard_id, offsets_B[slots].tolist(), lengths_B[slots].tolist(), checks)
            for slot, content in zip(slots.tolist(), read, strict=True):
                found[slot] = content
        return [content if isinstance(content, bytes) else content.result() for content in found]

    def recheck(self, shard_id: int) -> bool:
        """For a reader that cannot make sense of a sample: True if the local copy was damaged; read again then.

        Reads the whole local file. False: the bytes are what was indexed, or came from the store by a range.
        """
        damaged = self._objects.recheck(self._wanted(shard_id))
        if damaged:
            self._ahead.drop(shard_id)
        return damaged

    def _read(
        self, shard_id: int, offsets: Sequence[int], lengths: Sequence[int], checks: Sequence[int] = ()
    ) -> Sequence[bytes | Future[bytes]]:
        self.stats.add("bytes_served", sum(lengths))
        pin = self._ahead.held(shard_id) or self._find(shard_id)
        self.stats.add("hits" if pin is not None else "misses", len(offsets))
        is_eager = pin is None and self._is_eager()
        if is_eager:
            self._ahead.ask(shard_id)
        elif pin is None:
            pin = self._wait(shard_id)
        if pin is None:
            return self._ranges.start(self._shards[shard_id], offsets, lengths, checks, asks_size=not is_eager)
        return [self._read_pinned(pin, shard_id, *place) for place in zip(offsets, lengths, strict=True)]

    def _read_pinned(self, pin: Pin, shard_id: int, offset: int, length: int) -> bytes:
        content = pin.read(offset, length)
        if len(content) != length:
            message = f"shard {self._shards[shard_id].object_name} has no bytes {offset}-{offset + length}: the index "
            raise CorruptObjectError(message + "belongs to another data set; index the data set again")
        return content

    def _find(self, shard_id: int) -> Pin | None:
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
        return self._objects.pin(self._wanted(shard_id), check=check)

    def _wanted(self, shard_id: int) -> Wanted:
        shard = self._shards[shard_id]
        store = self._store_of(shard)
        return Wanted(store=store, name=shard.object_name, size_bytes=shard.size_bytes, digests=shard.digests)

    def _store_of(self, shard: Shard) -> ObjectStore:
        from workloads.data.index import store_of  # which imports this package for its columns

        return store_of(shard, self._store)
