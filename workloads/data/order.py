"""The order of training samples as a pure function of the position.

Positions run on across epochs: position p belongs to epoch ``p // N``, global batch b is ``[bB, (b+1)B)``. The
order therefore depends on no world size, worker count or interruption, and the state of a loader is one integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import UserError
from workloads.data.streams import Purpose, Stage, permutation, seed_sequence

_SHARDS = 0  # detail of the stream that permutes an epoch's shards; block b has the detail b + 1
_KEPT_BLOCKS = 4  # consecutive batches touch one or two blocks


class SampleOrder:
    """Shards are permuted per epoch, samples shuffled fully within blocks of ``block_shards`` consecutive such shards.

    A block of all shards is a full shuffle; a smaller one keeps the shards that a reader needs at a time few.

    Args:
        shard_sizes: samples per shard, in index order; ordinals count through them.
        seed: the run's seed.
        block_shards: shards per shuffle block, >= 1.
        stage: whose stream it is, so that pretraining and transfer under one seed differ.

    Raises:
        UserError: there are no samples, or ``block_shards`` is below 1.
    """

    def __init__(
        self, shard_sizes: Sequence[int], seed: int, block_shards: int, *, stage: Stage = Stage.PRETRAIN
    ) -> None:
        if block_shards < 1:
            raise UserError(
                f"shuffle_block_shards is {block_shards}; samples are shuffled in blocks of 1 shard or more"
            )
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self._first_ordinals = np.cumsum(self._sizes) - self._sizes
        self.num_samples = int(self._sizes.sum())
        if not self.num_samples:
            raise UserError("the split to train on has no samples; give the data set a num_train of 1 or more")
        self._seed, self._block_shards, self._stage = seed, block_shards, stage
        self._epoch = lru_cache(maxsize=2)(self._permuted_shards)
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._shuffled_block)

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop`` (``start >= 0``), over any number of epochs."""
        size = self.num_samples
        epochs = range(start // size, -(-stop // size)) if start < stop else range(0)
        pieces = [
            self._within_epoch(epoch, max(start - epoch * size, 0), min(stop - epoch * size, size)) for epoch in epochs
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _within_epoch(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Positions counted from the epoch's beginning; only the blocks that they touch are shuffled."""
        _, bounds = self._epoch(epoch)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        blocks = np.concatenate([self._block(epoch, block) for block in range(first, last)])
        offset = int(bounds[first])
        return blocks[start - offset : stop - offset]

    def _permuted_shards(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shards in the epoch's order, and the positions at which its blocks begin, closed by N."""
        shards = permutation(self._stream(epoch, _SHARDS), len(self._sizes))
        ends = np.cumsum(self._sizes[shards])
        lasts = np.arange(self._block_shards, len(shards) + self._block_shards, self._block_shards)
        bounds = np.concatenate([[0], ends[np.minimum(lasts, len(shards)) - 1]])
        return shards, bounds

    def _shuffled_block(self, epoch: int, block: int) -> NDArray[np.int64]:
        shards, _ = self._epoch(epoch)
        members = shards[block * self._block_shards : (block + 1) * self._block_shards]
        ordinals = np.concatenate([self._first_ordinals[shard] + np.arange(self._sizes[shard]) for shard in members])
        shuffled: NDArray[np.int64] = ordinals[permutation(self._stream(epoch, 1 + block), len(ordinals))]
        return shuffled

    def _stream(self, epoch: int, detail: int) -> np.random.SeedSequence:
        return seed_sequence(self._seed, self._stage, Purpose.ORDER, epoch, detail)


def total_steps(epochs: float, num_samples: int, batch_size: int) -> int:
    """Steps in some (also fractional) epochs: ``floor(epochs * N / B + 0.5)``; epoch e ends at this step too.

    ``epochs`` counts as the decimal number that was written (0.7 is 7/10), so that halves round up on every machine.
    """
    return math.floor(Fraction(repr(float(epochs))) * num_samples / batch_size + Fraction(1, 2))


def rank_slice(start: int, stop: int, *, rank: int, world_size: int, group_size: int = 1) -> tuple[int, int]:
    """The run of positions that a rank takes of a global batch: whole groups, contiguous, as equal as possible.

    Raises:
        UserError: the batch is not made of whole groups, or there are fewer groups than ranks.
    """
    num_groups, rest = divmod(stop - start, group_size)
    if rest or num_groups < world_size:
        message = (
            f"a batch of {stop - start} samples in groups of {group_size} cannot be shared by {world_size} ranks: "
        )
        raise UserError(message + "every rank needs at least one whole group; lower the workers or the norm_group")
    first, last = rank * num_groups // world_size, (rank + 1) * num_groups // world_size
    return start + first * group_size, start + last * group_size
