"""The order of training samples as a pure function of the position.

Positions run on across epochs: position p belongs to epoch ``p // N``, global batch b is ``[bB, (b+1)B)``. The
order therefore depends on no world size, worker count or interruption, and the state of a loader is one integer.

Ordinals of a mixture run through its components one after the other. Without weights a mixture is the union: a
`SampleOrder` over the shards of all components, in which every sample occurs once per epoch; the first k components of
a list are a cumulative prefix. With weights each component runs through its own epochs at its own pace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.index import MixtureShares
from workloads.data.subset import SampleView
from workloads.runtime.streams import Purpose, Stage, permutation, random_words, seed_sequence, stable_order_between

_SHARDS = 0  # detail of the stream that permutes an epoch's shards; block b has the detail b + 1
_KEPT_BLOCKS = 4  # consecutive batches touch one or two blocks
WINDOW: Final = 10_000
"""Positions of which each component has its exact share, in random places; so weights count in ten-thousandths."""


class Order(Protocol):
    """What loaders need of an order; positions run on across epochs."""

    num_samples: int

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop``."""
        ...

    def replacement(self, position: int, attempt: int) -> int:
        """Ordinal of the sample that stands in for the one at a position, if that cannot be used."""
        ...

    def shards_ahead(self, position: int, num_blocks: int = 2) -> NDArray[np.int64]:
        """Shards, in order of first use, of a position's block and of those after it."""
        ...


class SampleOrder:
    """Shards are permuted per epoch, samples shuffled fully within blocks of ``block_shards`` consecutive such shards.

    A block of all shards is a full shuffle; a smaller one keeps the shards that a reader needs at a time few. Shards
    that are sorted by class need more: with ``chunk_samples``, runs of so many neighbours are permuted in place of
    shards, into blocks of as many samples as before. A block then draws on the whole data set, by ranged reads of runs.

    Args:
        shard_sizes: samples per shard, in index order; ordinals count through them.
        seed: the run's seed.
        block_shards: shards per shuffle block, >= 1.
        stage: whose stream it is, so that pretraining and transfer under one seed differ.
        chunk_samples: samples per run, >= 1; None = whole shards.

    Raises:
        UserError: there are no samples, or ``block_shards`` or ``chunk_samples`` is below 1.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        seed: int,
        block_shards: int,
        *,
        stage: Stage = Stage.PRETRAIN,
        chunk_samples: int | None = None,
    ) -> None:
        if block_shards < 1:
            raise UserError(
                f"shuffle_block_shards is {block_shards}; samples are shuffled in blocks of 1 shard or more"
            )
        shard_sizes_S = np.asarray(shard_sizes, dtype=np.int64)
        self.num_samples = int(shard_sizes_S.sum())
        if not self.num_samples:
            raise UserError("the split to train on has no samples; give the data set a num_train of 1 or more")
        self._sizes, self._shard_of_run = _runs(shard_sizes_S, chunk_samples)
        self._first_rows = np.cumsum(self._sizes) - self._sizes
        block_samples = block_shards * self.num_samples / len(shard_sizes_S)
        self._block_runs = max(1, round(block_samples / chunk_samples)) if chunk_samples else block_shards
        self._seed, self._stage = seed, stage
        self._view: SampleView | None = None
        self._epoch = lru_cache(maxsize=2)(self._permuted_runs)
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._shuffled_block)
        self._touched: deque[tuple[int, int]] = deque(maxlen=_KEPT_BLOCKS)

    @classmethod
    def over(
        cls,
        view: SampleView,
        seed: int,
        block_shards: int,
        *,
        stage: Stage = Stage.PRETRAIN,
        chunk_samples: int | None = None,
    ) -> Self:
        """The order of a part of a split: an epoch is ``view.num_samples`` positions, ordinals are the split's."""
        order = cls(view.shard_sizes.tolist(), seed, block_shards, stage=stage, chunk_samples=chunk_samples)
        order._view = view
        return order

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop`` (``start >= 0``), over any number of epochs."""
        size = self.num_samples
        epochs = range(start // size, -(-stop // size)) if start < stop else range(0)
        pieces = [
            self._within_epoch(epoch, max(start - epoch * size, 0), min(stop - epoch * size, size)) for epoch in epochs
        ]
        return self._named(np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64))

    def replacement(self, position: int, attempt: int) -> int:
        """Ordinal of the sample that stands in for the one at a position, if that cannot be used.

        It is another sample of the same shuffle block, whose shards are at hand; attempts 0, 1, ... give different
        samples until the block is used up. In a block of one sample it is drawn from the whole epoch.
        """
        epoch, offset = divmod(position, self.num_samples)
        _, bounds = self._epoch(epoch)
        block = int(np.searchsorted(bounds, offset, side="right")) - 1
        first, size = int(bounds[block]), int(bounds[block + 1] - bounds[block])
        if size == 1:
            first, size = 0, self.num_samples
        stream = seed_sequence(self._seed, self._stage, Purpose.REPLACEMENT, position)
        step = 1 + (int(np.random.PCG64(stream).random_raw()) + attempt) % max(1, size - 1)
        row = first + (offset - first + step) % size
        return int(self._named(self._within_epoch(epoch, row, row + 1))[0])

    def shards_ahead(self, position: int, num_blocks: int = 2) -> NDArray[np.int64]:
        """Shards, in order of first use, of a position's block and of the ``num_blocks - 1`` blocks after it.

        They may lie in later epochs; a shard that two of the blocks hold is named once, and empty ones never.
        """
        epoch, offset = divmod(position, self.num_samples)
        block = int(np.searchsorted(self._epoch(epoch)[1], offset, side="right")) - 1
        found = []
        for _ in range(num_blocks):
            members = self._members(epoch, block)
            found.append(self._shard_of_run[members[self._sizes[members] > 0]])
            epoch, block = (epoch, block + 1) if block + 2 < len(self._epoch(epoch)[1]) else (epoch + 1, 0)
        shards = np.concatenate(found)
        _, first_uses = np.unique(shards, return_index=True)
        return shards[np.sort(first_uses)]

    def _named(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows if self._view is None else self._view.take(rows)

    def _within_epoch(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Positions counted from the epoch's beginning; only the blocks that they touch are shuffled."""
        _, bounds = self._epoch(epoch)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        pieces = []
        for block in range(first, last):
            begin, end = int(bounds[block]), int(bounds[block + 1])
            pieces.append(self._of_block(epoch, block, max(start, begin) - begin, min(stop, end) - begin))
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, dtype=np.int64)

    def _of_block(self, epoch: int, block: int, start: int, stop: int) -> NDArray[Any]:
        """Rows of a block at some of its positions.

        The first look at a block selects only these: a run that resumes has its first batch before all are in order.
        """
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        if (epoch, block) in self._touched:
            return self._block(epoch, block)[start:stop]
        self._touched.append((epoch, block))
        sizes, firsts = self._runs_of_block(epoch, block)
        words = random_words(self._stream(epoch, 1 + block), int(sizes.sum()))
        picked = stable_order_between(words, start, stop)
        ends = np.cumsum(sizes)
        runs = np.searchsorted(ends, picked, side="right")
        return picked + (firsts - (ends - sizes))[runs]

    def _permuted_runs(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shards (or runs) in the epoch's order, and the positions at which its blocks begin, closed by N."""
        runs = permutation(self._stream(epoch, _SHARDS), len(self._sizes))
        ends = np.cumsum(self._sizes[runs])
        lasts = np.arange(self._block_runs, len(runs) + self._block_runs, self._block_runs)
        bounds = np.concatenate([[0], ends[np.minimum(lasts, len(runs)) - 1]])
        return runs, bounds

    def _members(self, epoch: int, block: int) -> NDArray[np.int64]:
        runs, _ = self._epoch(epoch)
        return runs[block * self._block_runs : (block + 1) * self._block_runs]

    def _shuffled_block(self, epoch: int, block: int) -> NDArray[Any]:
        """Rows of a block in their order; of 4 bytes where they suffice, since a block may be all of the data."""
        sizes, firsts = self._runs_of_block(epoch, block)
        rows = np.arange(int(sizes.sum())) + np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes)
        small: NDArray[Any] = rows.astype(np.uint32 if self.num_samples <= 1 << 32 else np.int64)
        return small[permutation(self._stream(epoch, 1 + block), len(rows))]

    def _runs_of_block(self, epoch: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sizes and first rows of a block's runs."""
        members = self._members(epoch, block)
        return self._sizes[members], self._first_rows[members]

    def _stream(self, epoch: int, detail: int) -> np.random.SeedSequence:
        return seed_sequence(self._seed, self._stage, Purpose.ORDER, epoch, detail)


def _runs(shard_sizes_S: NDArray[np.int64], chunk_samples: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sizes of the runs of neighbours that stay together, in ordinal order, and the shard of each."""
    if chunk_samples is None:
        return shard_sizes_S, np.arange(len(shard_sizes_S))
    if chunk_samples < 1:
        raise UserError(f"shuffle_chunk_samples is {chunk_samples}; a run has 1 sample or more")
    num_runs_S = -(-shard_sizes_S // chunk_samples)
    sizes = np.full(int(num_runs_S.sum()), chunk_samples, dtype=np.int64)
    is_full_S = num_runs_S > 0
    lasts = np.cumsum(num_runs_S)[is_full_S] - 1
    sizes[lasts] = (shard_sizes_S - (num_runs_S - 1) * chunk_samples)[is_full_S]
    return sizes, np.repeat(np.arange(len(shard_sizes_S)), num_runs_S)


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


class MixtureOrder:
    """The order of a weighted mixture: like `SampleOrder` a pure function of the position.

    Args:
        orders: of the components, which give ordinals of the mixture; each runs through its own epochs.
        num_shards: of each component.
        weights: share of each component, any positive unit.
        seed, stage: name the stream that interleaves the components.

    Raises:
        UserError: weights are missing, negative or too small.
    """

    def __init__(
        self,
        orders: Sequence[SampleOrder],
        num_shards: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        stage: Stage = Stage.PRETRAIN,
    ) -> None:
        self._orders, self._seed, self._stage = tuple(orders), seed, stage
        self._first_shards = (np.cumsum(num_shards) - np.asarray(num_shards)).tolist()
        self.quotas = quotas(weights, len(orders))
        self.num_samples = sum(order.num_samples for order in orders)
        """Positions that count as an epoch: as many as there are samples, though some occur more often than others."""
        self._window = lru_cache(maxsize=4)(self._interleaved)

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop``."""
        found = np.empty(max(stop - start, 0), dtype=np.int64)
        for window in range(start // WINDOW, -(-stop // WINDOW)):
            first, last = max(start, window * WINDOW), min(stop, (window + 1) * WINDOW)
            components, ranks = (column[first % WINDOW :][: last - first] for column in self._window(window))
            part = found[first - start : last - start]
            for component, order in enumerate(self._orders):
                slots = np.flatnonzero(components == component)
                if slots.size:
                    begin = window * int(self.quotas[component]) + int(ranks[slots[0]])
                    part[slots] = order.ordinals(begin, begin + len(slots))  # its ranks ascend without gaps
        return found

    def replacement(self, position: int, attempt: int) -> int:
        """As `SampleOrder.replacement`, by a sample of the same component."""
        component, local = self._place(position)
        return self._orders[component].replacement(local, attempt)

    def shards_ahead(self, position: int, num_blocks: int = 2) -> NDArray[np.int64]:
        """As `SampleOrder.shards_ahead`; the components take turns."""
        window, slot = divmod(position, WINDOW)
        components, _ = self._window(window)
        ahead = []
        for component, order in enumerate(self._orders):
            before = int(np.count_nonzero(components[:slot] == component))
            local = window * int(self.quotas[component]) + before
            shards = order.shards_ahead(local, num_blocks) + self._first_shards[component]
            ahead.append(shards.tolist())
        turns = (shard for turn in zip_longest(*ahead) for shard in turn if shard is not None)
        return np.array(list(turns), dtype=np.int64)

    def _place(self, position: int) -> tuple[int, int]:
        """Component and position within it."""
        window, slot = divmod(position, WINDOW)
        components, ranks = self._window(window)
        component = int(components[slot])
        return component, window * int(self.quotas[component]) + int(ranks[slot])

    def _interleaved(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Component of each slot of a window, and how many slots of the same component come before it."""
        stream = seed_sequence(self._seed, self._stage, Purpose.MIXTURE, window)
        components = np.repeat(np.arange(len(self._orders)), self.quotas)[permutation(stream, WINDOW)]
        ranks = np.empty(WINDOW, dtype=np.int64)
        for component, quota in enumerate(self.quotas.tolist()):
            ranks[components == component] = np.arange(quota)
        return components, ranks


def make_order(
    view: SampleView,
    shares: MixtureShares | None,
    seed: int,
    block_shards: int,
    *,
    stage: Stage = Stage.PRETRAIN,
    chunk_samples: int | None = None,
) -> Order:
    """The order of a view of a split: by the weights of its components if it is a weighted mixture."""
    if shares is None:
        return SampleOrder.over(view, seed, block_shards, stage=stage, chunk_samples=chunk_samples)
    ends = np.cumsum(shares.num_shards).tolist()
    parts = [view.of_shards(end - number, end) for end, number in zip(ends, shares.num_shards, strict=True)]
    if empty := [number for number, part in enumerate(parts) if not part.num_samples]:
        message = f"component {empty[0]} of the mixture has no samples to train on in this label space; leave it out"
        raise UserError(message)
    orders = [SampleOrder.over(part, seed, block_shards, stage=stage, chunk_samples=chunk_samples) for part in parts]
    return MixtureOrder(orders, shares.num_shards, shares.weights, seed=seed, stage=stage)


def quotas(weights: Sequence[float], num_components: int) -> NDArray[np.int64]:
    """Positions of each component per window; the largest remainders are rounded up.

    Raises:
        UserError: not one weight per component, or one below a ten-thousandth of their sum.
    """
    if len(weights) != num_components:
        raise UserError(f"a mixture of {num_components} data sets has {len(weights)} weights; give one for each")
    total = sum(weights)
    if not all(weight > 0 and weight * WINDOW >= total for weight in weights):
        message = f"the weights {list(weights)} of a mixture are not valid; each must be above 0 and at least "
        raise UserError(message + f"1/{WINDOW} of their sum; leave a data set out instead")
    exact = np.array([weight / total * WINDOW for weight in weights])
    found: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: WINDOW - int(found.sum())]] += 1
    return found
