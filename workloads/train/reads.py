"""Where the training samples of a run came from, for the lines of metrics: all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from workloads.train.ranks import Ranks

_COUNTS: Final = ("cache_hits", "cache_misses", "bytes_from_store")
_GIB: Final = 1024**3


class Reads:
    """Differences of a loader's sums between lines of metrics; what validation reads is not among them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._seen = torch.zeros(len(_COUNTS), dtype=torch.float64)
        self._epoch_bytes = 0.0
        self.of_last_epoch: dict[str, float] = {}
        """``store_gib_per_epoch`` once an epoch has ended."""

    def lap(self, stats: Mapping[str, float], *, ends_epoch: bool) -> dict[str, float]:
        """What was read since the last call. A collective.

        ``cache_hit_rate``: share in [0, 1] of the samples whose shard was on the node; not where nothing was read,
        because all pixels are in memory. ``store_gib_per_epoch``: GiB that this attempt has read from the store since
        the epoch began; at its end alone. Nothing for a task that tells no sums.

        Args:
            stats: sums since the attempt began, see ``LoaderStats.snapshot``.
            ends_epoch: whether an epoch ends with this line.
        """
        sums = torch.tensor([stats.get(name, 0.0) for name in _COUNTS], dtype=torch.float64)
        new, self._seen = sums - self._seen, sums
        hits, misses, num_bytes = self._ranks.sum_(new).tolist()
        self._epoch_bytes += num_bytes
        found = {"cache_hit_rate": hits / (hits + misses)} if hits + misses > 0 else {}
        if ends_epoch and "bytes_from_store" in stats:
            self.of_last_epoch = {"store_gib_per_epoch": self._epoch_bytes / _GIB}
            self._epoch_bytes = 0.0
            found |= self.of_last_epoch
        return found
