"""Samples by ranged reads: for shards that have no room in the cache, and before they are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.errors import CorruptObjectError, StorageError
from orchestrator.storage import ObjectStore
from workloads.data.cache.stats import CacheStats
from workloads.data.checks import check_of

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


class RangedReader:
    """Reads samples from the store, several requests at once. Thread-safe.

    The first answer of each shard is preceded by a question for its size, and each sample is compared with its check:
    a shard that was replaced by another one is noticed, also by one of the same size.
    """

    def __init__(self, store_of: Callable[[Shard], ObjectStore], stats: CacheStats) -> None:
        self._store_of, self._stats = store_of, stats
        self._checked: set[str] = set()
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
        if shard.object_name in self._checked:
            return
        size_bytes = self._store_of(shard).stat(shard.object_name).size_bytes
        if size_bytes != shard.size_bytes:
            raise self._another(shard, f"has {size_bytes} bytes, the index says {shard.size_bytes}")
        self._checked.add(shard.object_name)

    def _another(self, shard: Shard, how: str) -> CorruptObjectError:
        message = f"shard {shard.object_name} in {self._store_of(shard).uri} {how}: "
        return CorruptObjectError(message + "it is not the one that was indexed; index the data set again")
