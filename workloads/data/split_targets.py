"""Labels of one split: what turns ordinals into targets while batches are made.

Multi-label targets are rows of ids padded with ``NO_LABEL``; a row is as wide in every batch of a split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.index import LeafSets

NO_LABEL: Final = -1
_ROWS_AT_ONCE = 1 << 18  # bounds the memory of a pass over all samples


class SplitTargets(ABC):
    """Targets of the N samples of a split, in ``[0, num_classes)`` or ``NO_LABEL``.

    Args:
        num_classes: K.
        num_samples: N.
        max_targets: M, the width of a row of `take`: no sample has more targets.
        is_multi_label: whether `take` gives rows.
    """

    def __init__(self, *, num_classes: int, num_samples: int, max_targets: int = 1, is_multi_label: bool) -> None:
        self.num_classes, self.num_samples = num_classes, num_samples
        self.max_targets, self.is_multi_label = max_targets, is_multi_label

    @staticmethod
    def of(targets_N: NDArray[Any], num_classes: int) -> SplitTargets:
        """One target for each sample, by ordinal."""
        return TableTargets(targets_N, num_classes=num_classes)

    @abstractmethod
    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Targets (B,) of samples; with several labels (B, M): ascending ids, then ``NO_LABEL``."""

    def targets_N(self) -> NDArray[np.int64]:  # noqa: N802 - a shape
        """Targets (N,) of all samples. Raises ``UserError`` for multi-label targets."""
        if self.is_multi_label:
            raise UserError("samples have several labels in this label space; choose one with a single label each")
        return self.take(np.arange(self.num_samples))

    def counts(self) -> NDArray[np.int64]:
        """Samples (K,) of each class; a sample counts in each of its classes."""
        counts = np.zeros(self.num_classes + 1, dtype=np.int64)  # NO_LABEL counts first
        for rows in self._runs():
            counts += np.bincount(self.take(rows).ravel() + 1, minlength=self.num_classes + 1)
        return counts[1:]

    def is_labelled_N(self) -> NDArray[np.bool_] | None:  # noqa: N802 - a shape
        """Which samples (N,) have a label; None when all do."""
        is_labelled = np.empty(self.num_samples, dtype=np.bool_)
        for rows in self._runs():
            is_labelled[rows] = self.take(rows).reshape(len(rows), -1)[:, 0] != NO_LABEL
        return None if is_labelled.all() else is_labelled

    def _runs(self) -> Iterator[NDArray[np.int64]]:
        for start in range(0, self.num_samples, _ROWS_AT_ONCE):
            yield np.arange(start, min(start + _ROWS_AT_ONCE, self.num_samples))


class TableTargets(SplitTargets):
    """By ordinal: ``targets`` [N]."""

    def __init__(self, targets_N: NDArray[Any], *, num_classes: int) -> None:
        super().__init__(num_classes=num_classes, num_samples=len(targets_N), is_multi_label=False)
        self._targets_N = targets_N

    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._targets_N[ordinals_B].astype(np.int64)


class LeafTargets(SplitTargets):
    """By leaf class: sample i has the targets ``table[leaves[i]]``.

    Args:
        leaves_N: leaf classes, -1 = none; usually memory-mapped.
        table_CM: targets of each class, ascending and padded with ``NO_LABEL``; one column = single-label.
    """

    def __init__(self, leaves_N: NDArray[Any], table_CM: NDArray[np.int32], *, num_classes: int) -> None:
        num_targets = table_CM.shape[1]
        is_multi_label = num_targets > 1
        super().__init__(
            num_classes=num_classes,
            num_samples=len(leaves_N),
            max_targets=num_targets,
            is_multi_label=is_multi_label,
        )
        self._leaves_N = leaves_N
        self._table = _with_empty_row(table_CM) if is_multi_label else _with_empty_row(table_CM)[:, 0].copy()

    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.int64]:
        targets: NDArray[np.int64] = self._table[self._leaves_N[ordinals_B]].astype(np.int64)
        return targets


class LeafSetTargets(SplitTargets):
    """By leaf classes of multi-label samples: a sample has the union of its classes' targets.

    Args:
        leaf_sets: classes of each sample.
        table_CM: as in `LeafTargets`.
    """

    def __init__(self, leaf_sets: LeafSets, table_CM: NDArray[np.int32], *, num_classes: int) -> None:
        self._sets, self._table_CM = leaf_sets, table_CM
        per_class = np.count_nonzero(table_CM != NO_LABEL, axis=1)
        ends = np.concatenate([[0], np.cumsum(per_class[leaf_sets.values])])[leaf_sets.offsets]
        widest = int(np.diff(ends).max(initial=1))  # exact where no two classes of a sample share a target
        super().__init__(
            num_classes=num_classes,
            num_samples=len(leaf_sets.offsets) - 1,
            max_targets=min(widest, num_classes),
            is_multi_label=True,
        )

    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.int64]:
        firsts = self._sets.offsets[ordinals_B].astype(np.int64)
        sizes = self._sets.offsets[ordinals_B + 1].astype(np.int64) - firsts
        slots = np.repeat(np.arange(len(ordinals_B)), sizes)
        within = np.arange(len(slots)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows_LM = self._table_CM[self._sets.values[np.repeat(firsts, sizes) + within]].astype(np.int64)
        pairs = (slots[:, None] * self.num_classes + rows_LM)[rows_LM != NO_LABEL]
        pairs.sort()
        is_first = np.ones(len(pairs), dtype=np.bool_)
        is_first[1:] = pairs[1:] != pairs[:-1]
        owners, targets = np.divmod(pairs[is_first], self.num_classes)
        num_targets = np.bincount(owners, minlength=len(ordinals_B))
        columns = np.arange(len(owners)) - np.repeat(np.cumsum(num_targets) - num_targets, num_targets)
        targets_BM = np.full((len(ordinals_B), self.max_targets), NO_LABEL, dtype=np.int64)
        targets_BM[owners, columns] = targets
        return targets_BM


class LargestTargets(SplitTargets):
    """One target for each multi-label sample: the largest of its classes' targets.

    Of targets 0 = no, 1 = yes that is whether any class of the sample says yes.
    """

    def __init__(self, sets: LeafSetTargets) -> None:
        super().__init__(num_classes=sets.num_classes, num_samples=sets.num_samples, is_multi_label=False)
        self._sets = sets

    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.int64]:
        targets: NDArray[np.int64] = self._sets.take(ordinals_B).max(axis=1)  # NO_LABEL is smaller than any
        return targets


def _with_empty_row(table_CM: NDArray[np.int32]) -> NDArray[np.int32]:
    """A last row without targets, which the class -1 finds."""
    return np.vstack([table_CM, np.full((1, table_CM.shape[1]), NO_LABEL, dtype=np.int32)])


def unseen_notes(
    train: SplitTargets, train_ordinals: NDArray[np.int64], val: SplitTargets, val_ordinals: NDArray[np.int64]
) -> list[str]:
    """What to tell of validation samples that can only be wrong; nothing if there are none.

    Raises:
        UserError: all of them can only be wrong.
    """
    is_seen_K = np.zeros(train.num_classes + 1, dtype=np.bool_)  # NO_LABEL is the last one, and never seen
    for targets in _targets(train, train_ordinals):
        is_seen_K[targets.ravel()] = True
    is_seen_K[NO_LABEL] = False
    wanted_K, num_lost, num_val = np.zeros_like(is_seen_K), 0, len(val_ordinals)
    for targets in _targets(val, val_ordinals):
        wanted_K[targets.ravel()] = True
        num_lost += int((~is_seen_K[targets].reshape(len(targets), -1).any(axis=1)).sum())
    wanted_K[NO_LABEL] = False
    num_unseen = int((wanted_K & ~is_seen_K).sum())
    if num_val and num_lost == num_val:
        message = f"none of the {num_unseen} classes of the {num_val} validation samples has a training sample"
        raise UserError(f"{message}: nothing can be predicted; transfer to another label space, or use a larger subset")
    if not num_unseen:
        return []
    found = f"{num_unseen} of {int(wanted_K.sum())} classes of the validation split have no training sample"
    return [f"{found}: {num_lost} of {num_val} validation samples ({num_lost / num_val:.1%}) can only be wrong"]


def _targets(labels: SplitTargets, ordinals: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(ordinals), _ROWS_AT_ONCE):
        yield labels.take(ordinals[start : start + _ROWS_AT_ONCE])
