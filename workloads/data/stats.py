"""What a loader did, for people: throughput, waits, bad samples, and where the bytes came from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from workloads.data.source import SampleSource


@dataclass(slots=True, kw_only=True, eq=False)
class LoaderStats:
    """Counters of one loader; the consumer's thread writes them."""

    source: SampleSource
    num_batches: int = 0
    num_images: int = 0
    wait_s: float = 0.0
    """Time for which the consumer waited for batches."""
    _first_request_s: float | None = field(default=None)
    _last_batch_s: float = 0.0

    def request(self) -> float:
        """Note that the consumer asks for a batch; returns the time, for `receive`."""
        now_s = time.perf_counter()
        if self._first_request_s is None:
            self._first_request_s = now_s
        return now_s

    def receive(self, requested_s: float, num_images: int) -> None:
        """Note that the consumer got it."""
        self._last_batch_s = time.perf_counter()
        self.wait_s += self._last_batch_s - requested_s
        self.num_batches += 1
        self.num_images += num_images

    def snapshot(self) -> dict[str, float]:
        """Numbers so far; ``cache_*`` and ``bytes_*`` count for all loaders of the source."""
        elapsed_s = self._last_batch_s - (self._first_request_s or 0.0) if self.num_batches else 0.0
        shards = self.source.shards.stats.snapshot()
        return {
            "images": float(self.num_images),
            "images_per_s": self.num_images / elapsed_s if elapsed_s > 0 else 0.0,
            "wait_s": self.wait_s,
            "wait_s_per_step": self.wait_s / self.num_batches if self.num_batches else 0.0,
            "bad_samples": float(self.source.bad_samples.num_bad),
            "cache_hit_rate": shards["hit_rate"],
            "cache_hits": shards["hits"],
            "cache_misses": shards["misses"],
            "bytes_from_store": shards["bytes_from_store"],
        }
