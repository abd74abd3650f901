"""Batches for training (by position) and evaluation (by ordinal)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from workloads.data.augment import Augment, Augmenter
from workloads.data.order import SampleOrder
from workloads.data.prefetch import Prefetcher
from workloads.data.source import SampleSource
from workloads.data.streams import Stage

if TYPE_CHECKING:
    from workloads.labels.label_map import LabelMap

__all__ = ["Batch", "EvalLoader", "SampleSource", "TrainLoader"]

_PREFETCHED_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples of one step."""

    step: int
    """Batches before this one: batch b is trained on when b steps are complete."""
    images_BCHW: torch.Tensor
    """uint8, contiguous."""
    targets_B: torch.Tensor
    """int64, in ``[0, label_map.num_classes)``."""
    ordinals_B: NDArray[np.int64]
    """Rows of the split's index."""
    subset_ids_B: NDArray[np.int16]
    """Index into the split's ``subset_names``; -1 = in none."""


class TrainLoader:
    """Iterates over the global batches ``start_step <= b < total_steps``; its whole state is the step.

    A thread prepares batches ahead; leaving the iteration (also by an exception) ends it.

    Args:
        source: images of the split to train on.
        order: order of the same split.
        label_map: applied last, so that runs that differ in it see the same images.
        batch_size: B, samples per global batch; batch b holds the positions ``[bB, (b + 1)B)``.
        start_step: steps that are complete.
        seed, stage: name the augmentation's stream.
    """

    def __init__(  # noqa: PLR0913 - one argument per fact that a batch depends on
        self,
        source: SampleSource,
        order: SampleOrder,
        label_map: LabelMap,
        *,
        batch_size: int,
        start_step: int,
        total_steps: int,
        seed: int,
        stage: Stage,
        augment: Augment | str = Augment.NONE,
    ) -> None:
        self._source, self._order, self._batch_size = source, order, batch_size
        self._steps = range(start_step, total_steps)
        self._targets = label_map.bind(source.split.name, source.split.leaves)
        self._augmenter = Augmenter(Augment(augment), seed=seed, stage=stage)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        with Prefetcher(map(self._batch, self._steps), depth=_PREFETCHED_BATCHES) as batches:
            yield from batches

    def _batch(self, step: int) -> Batch:
        start = step * self._batch_size
        ordinals = self._order.ordinals(start, start + self._batch_size)
        images_BCHW = self._augmenter.apply(self._source.images(ordinals), start)
        return _batch(step, images_BCHW, self._targets, ordinals, self._source)


class EvalLoader:
    """Iterates over every sample of a split exactly once, in ordinal order; the last batch may be smaller."""

    def __init__(self, source: SampleSource, label_map: LabelMap, *, batch_size: int) -> None:
        self._source, self._batch_size = source, batch_size
        self._targets = label_map.bind(source.split.name, source.split.leaves)

    def __len__(self) -> int:
        return math.ceil(self._source.split.num_samples / self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            stop = min((step + 1) * self._batch_size, self._source.split.num_samples)
            ordinals = np.arange(step * self._batch_size, stop, dtype=np.int64)
            images_BCHW = np.ascontiguousarray(self._source.images(ordinals).transpose(0, 3, 1, 2))
            yield _batch(step, images_BCHW, self._targets, ordinals, self._source)


def _batch(
    step: int,
    images_BCHW: NDArray[np.uint8],
    targets: NDArray[np.int64],
    ordinals: NDArray[np.int64],
    source: SampleSource,
) -> Batch:
    return Batch(
        step=step,
        images_BCHW=torch.from_numpy(images_BCHW),
        targets_B=torch.from_numpy(targets[ordinals]),
        ordinals_B=ordinals,
        subset_ids_B=source.split.subset_ids[ordinals],
    )
