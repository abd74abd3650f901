"""Counters of one process's use of the cache."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final, Literal

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

    def snapshot(self) -> dict[str, float]:
        """All sums, and ``hit_rate``: the share of samples that were hits, in [0, 1]; 0 before the first."""
        with self._lock:
            sums: dict[str, float] = {count: float(self._sums[count]) for count in _COUNTS}
        reads = sums["hits"] + sums["misses"]
        return {**sums, "hit_rate": sums["hits"] / reads if reads else 0.0}
