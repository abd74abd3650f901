"""The order of training samples as a pure function of the position.

Positions run on across epochs: position p belongs to epoch ``p // N``, global batch b is ``[bB, (b+1)B)``. The
order therefore depends on no world size, worker count or interruption, and the state of a loader is one integer.

Ordinals of a mixture run through its components one after the other. Without weights a mixture is the union: a
`SampleOrder` over the shards of all components, in which every sample occurs once per epoch; the first k components of
a list are a cumulative prefix. With weights each component runs through its own epochs at its own pace.

With data groups each group owns a part of an epoch's shards and fills the same slots of every global batch. Ranks take
consecutive slots, so a rank, and a node of consecutive ranks, reads the shards of its own groups only. Groups are part
of the order and not of the layout: any world size sees the same batches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise, zip_longest
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import MIXTURE_WINDOW, weights_problem
from workloads.data.index import MixtureShares
from workloads.data.subset import SampleView
from workloads.runtime.memo import Memo
from workloads.runtime.streams import Purpose, Stage, permutation, random_words, seed_sequence, stable_order_between

_SHARDS = 0  # detail of the stream that permutes an epoch's shards; block b has the detail b + 1
_KEPT_BLOCKS = 4  # of each group: consecutive batches touch one or two blocks
WINDOW: Final = MIXTURE_WINDOW
"""Positions of which each component has its exact share, in random places."""


class Order(Protocol):
    """What loaders need of an order; positions run on across epochs."""

    num_samples: int

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop``."""
        ...

    def replacement(self, position: int, attempt: int) -> int:
        """Ordinal of the sample that stands in for the one at a position, if that cannot be used."""
        ...

    def shards_ahead(self, start: int, stop: int, *, num_later: int = 1, end: int | None = None) -> NDArray[np.int64]:
        """Shards to fetch for the positions ``start <= p < stop``, in order of first use.

        They are those of the positions' blocks and of the ``num_later`` blocks after them, the latter in no epoch that
        begins at ``end`` or later.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """Which slots of every global batch each data group fills: consecutive ones, group after group."""

    batch_size: int
    borders: tuple[int, ...]
    """First slot of each group, closed by the batch size."""

    @classmethod
    def of(cls, number: int, batch_size: int, unit: int = 1) -> Self | None:
        """Slots cut as ``rank_slice`` cuts a batch for ``number`` ranks; None for a single group.

        So borders of groups are borders of ranks if ``number`` divides the number of ranks, and borders of nodes with
        equally many ranks are borders of groups if the number of nodes divides ``number``.

        Raises:
            UserError: ``number`` is below 1, a group would have no slots, or the batch is no whole number of units.
        """
        if number == 1:
            return None
        units = f"units of {unit} samples (norm groups, pairs of mixed images)" if unit > 1 else "samples"
        if number < 1 or number * unit > batch_size:
            raise UserError(
                f"data_groups is {number}; use 1 to {max(1, batch_size // unit)}: every data group needs a part of "
                f"each batch, and a batch has {batch_size // unit} {units}"
            )
        if batch_size % unit:
            raise UserError(
                f"batch_size {batch_size} is not a whole number of {units}, and each of the {number} data groups takes "
                f"whole ones; use a batch_size that {unit} divides, or data_groups: 1"
            )
        slices = (rank_slice(0, batch_size, rank=group, world_size=number, group_size=unit) for group in range(number))
        return cls(batch_size=batch_size, borders=(*(start for start, _ in slices), batch_size))

    @property
    def number(self) -> int:
        """Of groups."""
        return len(self.borders) - 1

    def filled(self, position: int) -> NDArray[np.int64]:
        """Positions before this one, by group: int64 [number]."""
        borders = np.asarray(self.borders, dtype=np.int64)
        widths_G = np.diff(borders)
        batch, slot = divmod(position, self.batch_size)
        return np.asarray(batch * widths_G + np.clip(slot - borders[:-1], 0, widths_G))

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The positions ``start <= p < stop`` cut at the borders: group, first position, number, in order."""
        while start < stop:
            batch, slot = divmod(start, self.batch_size)
            group = bisect_right(self.borders, slot) - 1
            end = min(stop, batch * self.batch_size + self.borders[group + 1])
            yield group, start, end - start
            start = end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Epoch:
    """An epoch as a line of N samples: pieces of shards, consecutive ones of which are shuffled together as blocks.

    A piece is an entry of the tables ``shards``, ``firsts``, ``sizes`` and ``whole_sizes``. Without groups a piece is a
    whole shard or run, and the tables are those of all epochs.
    """

    members: NDArray[np.int64]
    """Pieces in their order."""
    shards: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """Row of a piece's first sample."""
    sizes: NDArray[np.int64]
    whole_sizes: NDArray[np.int64]
    """Samples of the shard (or run) that a piece is of."""
    pieces_at: NDArray[np.int64]
    """Of each block its first member, closed by their number."""
    bounds: NDArray[np.int64]
    """Of each block its place on the line, closed by N."""
    blocks_at: NDArray[np.int64]
    """Of each group its first block, closed by their number."""
    shifts: NDArray[np.int64]
    """Of each group its place on the line, less the positions that it had filled before the epoch."""

    def block_of(self, place: int) -> int:
        """The block of a place on the line."""
        return int(np.searchsorted(self.bounds, place, side="right")) - 1

    def pieces(self, block: int) -> NDArray[np.int64]:
        """The pieces of a block."""
        return self.members[self.pieces_at[block] : self.pieces_at[block + 1]]

    def shards_to_fetch(self, blocks: Sequence[int]) -> list[NDArray[np.int64]]:
        """Of each block the shards that are worth fetching by a reader of all these blocks.

        A shard that borders of groups cut is fetched by whoever reads half of it or more, in one piece or several.
        Smaller parts are read by ranges: so all parts together cost little more than the shard.
        """
        members = [self.pieces(block) for block in blocks]
        pieces = np.concatenate(members)
        shards, sizes, whole_sizes = self.shards[pieces], self.sizes[pieces], self.whole_sizes[pieces]
        cut = np.flatnonzero(sizes < whole_sizes)
        shards_cut, firsts, places = np.unique(shards[cut], return_index=True, return_inverse=True)
        taken = np.bincount(places, weights=sizes[cut])
        large = shards_cut[2 * taken >= whole_sizes[cut[firsts]]]
        is_worth = (sizes > 0) & ((sizes == whole_sizes) | np.isin(shards, large))
        ends = np.cumsum([len(own) for own in members])[:-1]
        return [own[worth] for own, worth in zip(np.split(shards, ends), np.split(is_worth, ends), strict=True)]


class SampleOrder:
    """Shards are permuted per epoch, samples shuffled fully within blocks of ``block_shards`` consecutive such shards.

    A block of all shards is a full shuffle; a smaller one keeps the shards that a reader needs at a time few. Shards
    that are sorted by class need more: with ``chunk_samples``, runs of so many neighbours are permuted in place of
    shards, into blocks of as many samples as before. A block then draws on the whole data set, by ranged reads of runs.

    With ``groups`` the permuted shards of an epoch are one line, which is cut into as many parts as there are groups:
    each has exactly the samples that its slots take in this epoch. A border may cut a shard, so at most one shard per
    border belongs to two groups. Each group is shuffled in blocks of its own, of nearly equal numbers of shards.

    Args:
        shard_sizes: samples per shard, in index order; ordinals count through them.
        seed: the run's seed.
        block_shards: shards per shuffle block, >= 1.
        stage: whose stream it is, so that pretraining and transfer under one seed differ.
        chunk_samples: samples per run, >= 1; None = whole shards.
        groups: which slots of a batch each data group fills; None = one group.

    Raises:
        UserError: there are no samples, ``block_shards`` or ``chunk_samples`` is below 1, or chunks and groups are
            given together.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        seed: int,
        block_shards: int,
        *,
        stage: Stage = Stage.PRETRAIN,
        chunk_samples: int | None = None,
        groups: DataGroups | None = None,
    ) -> None:
        if block_shards < 1:
            raise UserError(
                f"shuffle_block_shards is {block_shards}; samples are shuffled in blocks of 1 shard or more"
            )
        if groups is not None and chunk_samples is not None:
            raise UserError(
                f"data_groups is {groups.number} and shuffle_chunk_samples {chunk_samples}; use one of the two: chunks "
                "mix runs of all shards, so that every group would read every shard"
            )
        shard_sizes_S = np.asarray(shard_sizes, dtype=np.int64)
        self.num_samples = int(shard_sizes_S.sum())
        if not self.num_samples:
            raise UserError("the split to train on has no samples; give the data set a num_train of 1 or more")
        self._sizes, self._shard_of_run = _runs(shard_sizes_S, chunk_samples)
        self._first_rows = np.cumsum(self._sizes) - self._sizes
        block_samples = block_shards * self.num_samples / len(shard_sizes_S)
        self._block_runs = max(1, round(block_samples / chunk_samples)) if chunk_samples else block_shards
        self._seed, self._stage, self._groups = seed, stage, groups
        self._view: SampleView | None = None
        num_kept = _KEPT_BLOCKS * (1 if groups is None else groups.number)
        self._epoch = Memo(self._one_group if groups is None else partial(self._grouped, groups), 2)
        self._block = Memo(self._shuffled_block, num_kept)
        self._touched: deque[tuple[int, int]] = deque(maxlen=num_kept)
        self._ahead = Memo(self._fetched_in_turns, 1)

    @classmethod
    def over(
        cls,
        view: SampleView,
        seed: int,
        block_shards: int,
        *,
        stage: Stage = Stage.PRETRAIN,
        chunk_samples: int | None = None,
        groups: DataGroups | None = None,
    ) -> Self:
        """The order of a part of a split: an epoch is ``view.num_samples`` positions, ordinals are the split's."""
        sizes = view.shard_sizes.tolist()
        order = cls(sizes, seed, block_shards, stage=stage, chunk_samples=chunk_samples, groups=groups)
        order._view = view
        return order

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop`` (``start >= 0``), over any number of epochs."""
        pieces = [self._within_epoch(epoch, place, place + size) for _, epoch, place, size in self._parts(start, stop)]
        return self._named(np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64))

    def replacement(self, position: int, attempt: int) -> int:
        """Ordinal of the sample that stands in for the one at a position, if that cannot be used.

        It is another sample of the same shuffle block, whose shards are at hand; attempts 0, 1, ... give different
        samples until the block is used up. In a block of one sample it is drawn from the whole epoch.
        """
        _, number, place, _ = next(self._parts(position, position + 1))
        epoch = self._epoch(number)
        block = epoch.block_of(place)
        first, size = int(epoch.bounds[block]), int(epoch.bounds[block + 1] - epoch.bounds[block])
        if size == 1:
            first, size = 0, self.num_samples
        stream = seed_sequence(self._seed, self._stage, Purpose.REPLACEMENT, position)
        step = 1 + (int(np.random.PCG64(stream).random_raw()) + attempt) % max(1, size - 1)
        row = first + (place - first + step) % size
        return int(self._named(self._within_epoch(number, row, row + 1))[0])

    def shards_ahead(self, start: int, stop: int, *, num_later: int = 1, end: int | None = None) -> NDArray[np.int64]:
        """Shards to fetch for the positions ``start <= p < stop``, in order of first use; groups take turns.

        They are those of the positions' blocks and of the ``num_later`` blocks of the same group after them, which may
        lie in later epochs, but in none that begins at ``end`` or later. A shard that several blocks hold is named
        once, and empty ones never. With groups, a shard of which all these blocks of one epoch have less than half is
        left out: its samples are read by ranges.
        """
        blocks: dict[int, dict[tuple[int, int], None]] = {}
        for group, number, place, size in self._parts(start, max(stop, start + 1)):
            epoch = self._epoch(number)
            touched = range(epoch.block_of(place), epoch.block_of(place + size - 1) + 1)
            blocks.setdefault(group, {}).update(dict.fromkeys((number, block) for block in touched))
        for group, own in blocks.items():
            last = next(reversed(own))
            for _ in range(num_later):
                last = self._block_after(group, *last)
                if end is None or last[0] * self.num_samples < end:
                    own[last] = None
        # Most batches lie in the same blocks as the last one.
        return self._ahead(tuple(tuple(own) for own in blocks.values()))

    def _named(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows if self._view is None else self._view.take(rows)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Positions cut where their samples are no neighbours on the line: group, epoch, place, number."""
        size = self.num_samples
        for number in range(start // size, -(-stop // size) if start < stop else 0):
            first, last = max(start, number * size), min(stop, (number + 1) * size)
            if self._groups is None:
                yield 0, number, first - number * size, last - first
                continue
            shifts = self._epoch(number).shifts
            for group, position, length in self._groups.parts(first, last):
                place = int(shifts[group] + self._groups.filled(position)[group])
                yield group, number, place, length

    def _fetched_in_turns(self, queues: Sequence[Iterable[tuple[int, int]]]) -> NDArray[np.int64]:
        return _in_turns(self._shards_to_fetch(queues))

    def _shards_to_fetch(self, queues: Sequence[Iterable[tuple[int, int]]]) -> list[list[int]]:
        """Shards worth fetching for a reader of all these blocks (epoch, number); of each queue in its order."""
        by_epoch: dict[int, list[int]] = {}
        for number, block in chain.from_iterable(queues):
            by_epoch.setdefault(number, []).append(block)
        found = {
            (number, block): shards.tolist()
            for number, blocks in by_epoch.items()
            for block, shards in zip(blocks, self._epoch(number).shards_to_fetch(blocks), strict=True)
        }
        return [[shard for block in queue for shard in found[block]] for queue in queues]

    def _block_after(self, group: int, number: int, block: int) -> tuple[int, int]:
        """Epoch and number of the next block of a group."""
        if block + 1 < self._epoch(number).blocks_at[group + 1]:
            return number, block + 1
        while True:  # an epoch of few samples may have none for a group
            number += 1
            first, end = self._epoch(number).blocks_at[group : group + 2].tolist()
            if first < end:
                return number, first

    def _within_epoch(self, number: int, start: int, stop: int) -> NDArray[np.int64]:
        """Rows at places of an epoch's line; only the blocks that they touch are shuffled."""
        bounds = self._epoch(number).bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        pieces = []
        for block in range(first, last):
            begin, end = int(bounds[block]), int(bounds[block + 1])
            pieces.append(self._of_block(number, block, max(start, begin) - begin, min(stop, end) - begin))
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, dtype=np.int64)

    def _of_block(self, number: int, block: int, start: int, stop: int) -> NDArray[Any]:
        """Rows of a block at some of its positions.

        The first look at a block selects only these: a run that resumes has its first batch before all are in order.
        """
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        if (number, block) in self._touched:
            return self._block(number, block)[start:stop]
        self._touched.append((number, block))
        sizes, firsts = self._pieces_of_block(number, block)
        words = random_words(self._stream(number, 1 + block), int(sizes.sum()))
        picked = stable_order_between(words, start, stop)
        ends = np.cumsum(sizes)
        pieces = np.searchsorted(ends, picked, side="right")
        return picked + (firsts - (ends - sizes))[pieces]

    def _one_group(self, number: int) -> _Epoch:
        """Shards (or runs) in the epoch's order, and the positions at which its blocks begin."""
        runs = permutation(self._stream(number, _SHARDS), len(self._sizes))
        ends = np.concatenate([[0], np.cumsum(self._sizes[runs])])
        pieces_at = np.append(np.arange(0, len(runs), self._block_runs), len(runs))
        return _Epoch(
            members=runs,
            shards=self._shard_of_run,
            firsts=self._first_rows,
            sizes=self._sizes,
            whole_sizes=self._sizes,
            pieces_at=pieces_at,
            bounds=ends[pieces_at],
            blocks_at=np.array([0, len(pieces_at) - 1]),
            shifts=np.zeros(1, dtype=np.int64),
        )

    def _grouped(self, groups: DataGroups, number: int) -> _Epoch:
        """Shards in the epoch's order, cut at the groups' borders."""
        shards = permutation(self._stream(number, _SHARDS), len(self._sizes))
        shards = shards[self._sizes[shards] > 0]
        ends = np.cumsum(self._sizes[shards])
        filled_G = groups.filled(number * self.num_samples)
        lengths_G = groups.filled((number + 1) * self.num_samples) - filled_G
        cuts = np.concatenate([[0], np.cumsum(lengths_G)])
        edges = np.unique(np.concatenate([[0], ends, cuts]))
        owners = np.searchsorted(ends, edges[:-1], side="right")
        members_at = np.searchsorted(edges, cuts)
        pieces_at = [_even_blocks(first, end, self._block_runs) for first, end in pairwise(members_at.tolist())]
        blocks_at = np.concatenate([[0], np.cumsum([len(starts) for starts in pieces_at])])
        starts = np.array([*chain.from_iterable(pieces_at), len(owners)], dtype=np.int64)
        sizes = self._sizes[shards[owners]]
        return _Epoch(
            members=np.arange(len(owners)),
            shards=shards[owners],
            firsts=self._first_rows[shards[owners]] + edges[:-1] - (ends[owners] - sizes),
            sizes=np.diff(edges),
            whole_sizes=sizes,
            pieces_at=starts,
            bounds=edges[starts],
            blocks_at=blocks_at,
            shifts=cuts[:-1] - filled_G,
        )

    def _shuffled_block(self, number: int, block: int) -> NDArray[Any]:
        """Rows of a block in their order; of 4 bytes where they suffice, since a block may be all of the data."""
        sizes, firsts = self._pieces_of_block(number, block)
        rows = np.arange(int(sizes.sum())) + np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes)
        small: NDArray[Any] = rows.astype(np.uint32 if self.num_samples <= 1 << 32 else np.int64)
        return small[permutation(self._stream(number, 1 + block), len(rows))]

    def _pieces_of_block(self, number: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sizes and first rows of a block's pieces."""
        epoch = self._epoch(number)
        pieces = epoch.pieces(block)
        return epoch.sizes[pieces], epoch.firsts[pieces]

    def _stream(self, number: int, detail: int) -> np.random.SeedSequence:
        return seed_sequence(self._seed, self._stage, Purpose.ORDER, number, detail)


def _even_blocks(first: int, end: int, most: int) -> list[int]:
    """Where blocks of at most ``most`` of the members ``first <= i < end`` begin; their sizes differ by one at most."""
    num_blocks = -(-(end - first) // most)
    return [first + block * (end - first) // num_blocks for block in range(num_blocks)]


def _in_turns(queues: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    """The first of each queue, then the second of each, and so on; nothing twice."""
    turns = (item for turn in zip_longest(*queues) for item in turn if item is not None)
    return np.array(list(dict.fromkeys(turns)), dtype=np.int64)


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
        self._window = Memo(self._interleaved, 4)

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

    def shards_ahead(self, start: int, stop: int, *, num_later: int = 1, end: int | None = None) -> NDArray[np.int64]:
        """As `SampleOrder.shards_ahead`; the components take turns."""
        ahead = []
        for component, order in enumerate(self._orders):
            local = (self._before(component, start), self._before(component, stop))
            local_end = None if end is None else self._before(component, end)
            shards = order.shards_ahead(*local, num_later=num_later, end=local_end) + self._first_shards[component]
            ahead.append(shards.tolist())
        return _in_turns(ahead)

    def _before(self, component: int, position: int) -> int:
        """Positions of a component before a position."""
        window, slot = divmod(position, WINDOW)
        components, _ = self._window(window)
        return window * int(self.quotas[component]) + int(np.count_nonzero(components[:slot] == component))

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
    groups: DataGroups | None = None,
) -> Order:
    """The order of a view of a split: by the weights of its components if it is a weighted mixture.

    Raises:
        UserError: a component has no samples, or there are data groups and weights.
    """
    if shares is None:
        return SampleOrder.over(view, seed, block_shards, stage=stage, chunk_samples=chunk_samples, groups=groups)
    if groups is not None:
        raise UserError(
            f"data_groups is {groups.number}, but the data set is a mixture with weights, whose components have epochs "
            "of their own; use data_groups: 1, or a mixture without weights"
        )
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
    if problem := weights_problem(weights):
        raise UserError(problem)
    total = sum(weights)
    exact = np.array([weight / total * WINDOW for weight in weights])
    found: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: WINDOW - int(found.sum())]] += 1
    return found
