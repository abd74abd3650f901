"""Which samples of a split count as the data set: those with a label, or a seeded, stratified part of them.

Subsets are *nested*: under one seed a smaller fraction, cap or number is contained in a larger one. They are chosen by
leaf class, never by target, so that runs that differ in their label space only see the same samples. Samples may be
held out of training, so that a choice can be made on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.runtime.streams import Purpose, Stage, permutation, random_words, seed_sequence, stable_order

if TYPE_CHECKING:
    from workloads.data.index import SplitIndex
    from workloads.data.split_targets import SplitTargets


_RANDOM_BITS = 40  # of a sort key; the leaf class has the upper 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """A part of a training split; with several limits, a sample must meet all of them.

    Args:
        fraction: share of each class to keep, in (0, 1]; rounded half up, at least one sample.
        max_per_class: most samples of a class.
        num_samples: samples in total, as equal over the classes as these allow; "n classes at N samples".
        seed: of the choice.

    Raises:
        UserError: a limit is out of range.
    """

    fraction: float = 1.0
    max_per_class: int | None = None
    num_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UserError(f"subset: fraction {self.fraction!r} is not valid; it must lie in (0, 1]")
        for name in ("max_per_class", "num_samples"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise UserError(f"subset: {name} {limit!r} is not valid; it must be 1 or more")

    @classmethod
    def of(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        """From the fields of a job's ``subset``; None without one."""
        return cls(**parameters) if parameters else None

    def choose(self, leaves_N: NDArray[np.integer[Any]], words_N: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Rows that are kept, ascending.

        Args:
            leaves_N: leaf class of each candidate, >= -1.
            words_N: random bits of each candidate; a candidate's place in its class follows from them.

        Raises:
            UserError: there are fewer candidates than ``num_samples``.
        """
        ranks_N, class_sizes = ranks_in_classes(leaves_N, words_N)
        limits = np.maximum(1, np.floor(self.fraction * class_sizes + 0.5).astype(np.int64))
        if self.max_per_class is not None:
            limits = np.minimum(limits, self.max_per_class)
        kept = np.flatnonzero(ranks_N < limits[leaves_N + 1])
        if self.num_samples is None:
            return kept
        if len(kept) < self.num_samples:
            message = f"subset: num_samples {self.num_samples} is not valid; there are {len(kept)} to take from"
            raise UserError(message)
        return kept[self._evenly(leaves_N[kept], ranks_N[kept], len(class_sizes), self.num_samples)]

    def _evenly(
        self, leaves: NDArray[np.integer[Any]], ranks: NDArray[np.int32], num_groups: int, num_samples: int
    ) -> NDArray[np.int64]:
        """Rows of the first samples when all classes give one in turn, ascending."""
        up_to_rank = np.cumsum(np.bincount(ranks))
        last_rank = int(np.searchsorted(up_to_rank, num_samples))
        whole, partly = np.flatnonzero(ranks < last_rank), np.flatnonzero(ranks == last_rank)
        turn = permutation(seed_sequence(self.seed, Stage.LABELS, Purpose.SUBSET, 1), num_groups)
        of_last = partly[np.argsort(turn[leaves[partly] + 1], kind="stable")]
        return np.sort(np.concatenate([whole, of_last[: num_samples - len(whole)]]))


def ranks_in_classes(
    leaves_N: NDArray[np.integer[Any]], words_N: NDArray[np.uint64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Each sample's place [N] among those of its class, in the order of their random bits; and sizes of the classes.

    Classes count from -1, so ``sizes[c + 1]`` is that of class c.
    """
    groups = (leaves_N + 1).astype(np.int64)
    sizes = np.bincount(groups)
    keys = groups.view(np.uint64)
    keys <<= np.uint64(_RANDOM_BITS)
    keys |= words_N >> np.uint64(64 - _RANDOM_BITS)
    order = stable_order(keys)
    del groups, keys  # at 14M samples each array counts
    in_order = np.arange(len(order), dtype=np.int32)
    in_order -= np.repeat((np.cumsum(sizes) - sizes).astype(np.int32), sizes)
    ranks = np.empty(len(order), dtype=np.int32)
    ranks[order] = in_order
    return ranks, sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleView:
    """Samples of a split that count, in ordinal order; ``chosen`` is None where all do."""

    shard_sizes: NDArray[np.int64]
    """Samples that count, per shard [S]."""
    chosen: NDArray[np.int32 | np.int64] | None = None
    first_ordinal: int = 0
    """Of the first shard, where the view is a run of shards and nothing is chosen."""

    @classmethod
    def whole(cls, split: SplitIndex) -> Self:
        """All samples of a split."""
        return cls(shard_sizes=np.asarray(split.shard_sizes, dtype=np.int64))

    @classmethod
    def of(cls, split: SplitIndex, labels: SplitTargets | None = None, subset: Subset | None = None) -> Self:
        """The samples that have a label, thinned by a subset.

        At 14M samples labels alone cost 0.1 s, a subset 2 s and 0.5 GiB for that time.

        Raises:
            UserError: nothing is left, or the subset does not fit the split.
        """
        is_labelled_N = labels.is_labelled_N() if labels is not None else None
        if is_labelled_N is None and subset is None:
            return cls.whole(split)
        rows = None if is_labelled_N is None else np.flatnonzero(is_labelled_N)
        if subset is not None:
            words_N = random_words(seed_sequence(subset.seed, Stage.LABELS, Purpose.SUBSET, 0), split.num_samples)
            if rows is None:
                rows = subset.choose(split.leaves, words_N)
            else:
                rows = rows[subset.choose(split.leaves[rows], words_N[rows])]
        assert rows is not None  # noqa: S101 - one of the two limits it
        if not len(rows):
            raise UserError(f"no sample of split {split.name!r} has a label in this label space; choose other classes")
        return cls.selecting(split.first_ordinals, rows)

    @classmethod
    def selecting(cls, first_ordinals: NDArray[np.int64], ordinals: NDArray[np.int64]) -> Self:
        """These samples, by ascending ordinals; shard s holds ``first_ordinals[s] <= i < first_ordinals[s + 1]``."""
        ends = np.searchsorted(ordinals, first_ordinals)
        small = np.int32 if first_ordinals[-1] <= np.iinfo(np.int32).max else np.int64
        return cls(shard_sizes=np.diff(ends), chosen=ordinals.astype(small))

    def of_shards(self, start: int, stop: int) -> SampleView:
        """The part that lies in the shards ``start <= s < stop``."""
        first, last = int(self.shard_sizes[:start].sum()), int(self.shard_sizes[:stop].sum())
        sizes = self.shard_sizes[start:stop]
        if self.chosen is None:
            return SampleView(shard_sizes=sizes, first_ordinal=self.first_ordinal + first)
        return SampleView(shard_sizes=sizes, chosen=self.chosen[first:last])

    @property
    def num_samples(self) -> int:
        """How many count."""
        return int(self.shard_sizes.sum())

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ordinals of rows of the view."""
        return rows + self.first_ordinal if self.chosen is None else self.chosen[rows].astype(np.int64)

    def ordinals(self) -> NDArray[np.int64]:
        """All of them, ascending."""
        return self.take(np.arange(self.num_samples))


def hold_out(split: SplitIndex, view: SampleView, share: float, seed: int) -> tuple[SampleView, SampleView]:
    """A view without a share of its samples, and the view of these alone.

    Stratified by leaf class, never by target, so that all label spaces and backbones are judged on the same samples.
    Every class keeps one sample, unless none has a second one; of the others, put in the order of their classes, every
    n-th is held out.

    Args:
        split: whose samples they are.
        view: the samples to divide.
        share: of them, in (0, 0.5]; rounded half up, one at least.
        seed: of the transfer.

    Raises:
        UserError: there is only one sample.
    """
    ordinals = view.ordinals()
    if len(ordinals) < 2:
        message = f"split {split.name!r} has a single sample to train on, so none can be held out to choose by; "
        raise UserError(message + "train on a larger part")
    words = random_words(seed_sequence(seed, Stage.LABELS, Purpose.HOLDOUT), split.num_samples)[ordinals]
    chosen = np.zeros(len(ordinals), dtype=np.bool_)
    chosen[_spread(split.leaves[ordinals], words, share)] = True
    kept, held_out = ordinals[~chosen], ordinals[chosen]
    return SampleView.selecting(split.first_ordinals, kept), SampleView.selecting(split.first_ordinals, held_out)


def _spread(leaves_N: NDArray[np.integer], words_N: NDArray[np.uint64], share: float) -> NDArray[np.int64]:
    """Rows to hold out: evenly spaced among all but the first sample of each class, class after class; one at least."""
    ranks_N, _ = ranks_in_classes(leaves_N, words_N)
    candidates = np.flatnonzero(ranks_N > 0)
    candidates = candidates if len(candidates) else np.arange(len(leaves_N))
    candidates = candidates[np.lexsort((ranks_N[candidates], leaves_N[candidates]))]
    number = min(len(candidates), max(1, int(share * len(leaves_N) + 0.5)))
    # Places (i + 1/2) M / n: of every run of classes as many as its share, within one.
    return candidates[((np.arange(number) + 0.5) * len(candidates) / number).astype(np.int64)]
