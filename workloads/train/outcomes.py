"""Collects, while a network is evaluated, which samples it predicted rightly."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.storage.sample_outcomes import SampleOutcomes
from workloads.data.index import SplitIndex
from workloads.train.ranks import Ranks

_WRONG, _RIGHT = 1, 2


class OutcomeTally:
    """The outcomes of one evaluation, as one rank sees them; pass it to ``evaluate``, once."""

    def __init__(self) -> None:
        self._batches: list[tuple[NDArray[np.int64] | None, NDArray[np.bool_]]] = []

    def add(self, ordinals_B: NDArray[np.int64] | None, wrong_B: NDArray[np.bool_]) -> None:
        """Add a batch; one that does not say which samples it holds makes ``of_split`` fail."""
        self._batches.append((ordinals_B, wrong_B))

    def of_split(self, split: SplitIndex, ranks: Ranks | None = None) -> SampleOutcomes:
        """The outcomes of all ranks by ordinal of the split, on every rank; collective.

        Raises:
            ValueError: a batch did not name its samples.
        """
        seen_N = np.zeros(split.num_samples, dtype=np.uint8)
        for ordinals_B, wrong_B in self._batches:
            if ordinals_B is None or len(ordinals_B) != len(wrong_B):
                raise ValueError(f"a batch of {len(wrong_B)} samples does not name each of them: give it ordinals_B")
            seen_N[ordinals_B] = np.where(wrong_B, _WRONG, _RIGHT)
        # A sample is on one rank only, and the others add zeros to it.
        seen_N = (ranks or Ranks()).sum_(torch.from_numpy(seen_N)).numpy()
        return SampleOutcomes(right_N=seen_N == _RIGHT, counted_N=seen_N > 0, order_sha256=order_digest(split))


def order_digest(split: SplitIndex) -> str:
    """Sha256 of the names and sizes of the split's shards and of its samples' keys, in the order of ordinals."""
    digest = sha256()
    for shard in split.shards:
        digest.update(f"{shard.name}\0{shard.num_samples}\n".encode(errors="surrogateescape"))
    digest.update(np.ascontiguousarray(np.diff(split.key_offsets.astype(np.int64))).tobytes())
    digest.update(np.ascontiguousarray(split.key_bytes).tobytes())
    return digest.hexdigest()
