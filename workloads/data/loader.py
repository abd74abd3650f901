"""Batches for training (by position) and evaluation (by ordinal).

Workers are threads of this process. Where a GPU trains, they are threads of another process (``loader_process``), and
each of them has a process that decodes for it (``decode_pool``); batches are the same. Memory: what ``pipeline`` says,
for each worker one decoded image, with processes the squares of one task, and with another process two to four batches
that both share, and up to three on the GPU.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError
from workloads.data.augment import Augment, AugmentSpec
from workloads.data.bad_samples import BadSlot
from workloads.data.decode_pool import DecodePool, RenderSpec
from workloads.data.loader_process import batches_of_process
from workloads.data.order import Order, rank_slice
from workloads.data.pipeline import (
    CHUNK_BYTES,
    MAX_CHUNK,
    MIN_CHUNK,
    Filling,
    PlannedBatch,
    batches_ahead,
    empty_squares,
)
from workloads.data.pixels import Place
from workloads.data.source import SampleSource
from workloads.data.split_targets import SplitTargets
from workloads.runtime.ranks import share_of
from workloads.runtime.streams import Stage

__all__ = ["Batch", "EvalLoader", "SampleSource", "TrainLoader"]

_MAX_REPLACEMENTS: Final = 16
_EVAL_SHARDS_AHEAD: Final = 16
_MIN_EVAL_SHARDS_AHEAD: Final = 4
"""Ranks of a node read different shards, and have one cache for them."""
_PROCESS_CHUNK_BYTES: Final = 8 * CHUNK_BYTES
"""Of one task of a process, at most: a thread takes the interpreter's lock several times to hand one over, whatever is
in it."""
_MIN_PROCESSES: Final = 2
"""One worker plans and decodes in one thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples of one step, or of one rank's share of it."""

    step: int
    """Batches before this one: batch b is trained on when b steps are complete."""
    images_BCHW: torch.Tensor
    """uint8 in channels-last memory; if the loader was given a CUDA device, there or page-locked."""
    targets: torch.Tensor
    """int64 (B,) in ``[0, num_classes)``, or (B, M) padded with -1 where samples have several."""
    ordinals_B: NDArray[np.int64]
    """Rows of the split's index; of a replaced sample the replacement's."""
    positions: tuple[int, int]
    """First position and the one after the last. In evaluation, of the numbers in the order of evaluation."""

    subset_ids_B: NDArray[np.integer[Any]]
    """Index into the split's ``subset_names``; -1 = in none."""


class _Loader(ABC):
    """What both loaders share: how batches are made of plans, here or in another process."""

    def __init__(
        self,
        source: SampleSource,
        labels: SplitTargets,
        spec: RenderSpec,
        *,
        share: int,
        num_workers: int,
        device: torch.device | None,
    ) -> None:
        self.source = source
        self.stats = LoaderStats(source=source)
        self._labels, self._spec, self._share = labels, spec, share
        self._num_workers, self._device = num_workers, device

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to plan and to fill: neither targets nor the device."""
        left_out = {"stats", "_labels", "_augmenter"}
        return {name: value for name, value in vars(self).items() if name not in left_out} | {"_device": None}

    def planned(self, steps: Sequence[int], *, in_processes: bool) -> Filling:
        """The batches of ``steps``, filled by threads of this process, or by processes of these threads."""
        with self._decode_pool(in_processes=in_processes) as pool:
            yield from batches_ahead(
                self._plan,
                partial(self._fill, pool),
                steps,
                batch_bytes=self._share * self.source.square_bytes,
                num_workers=self._num_workers,
                chunk_samples=pool.num_samples if pool is not None else None,
            )

    def _handed_out(self, steps: Sequence[int]) -> Generator[tuple[PlannedBatch, Batch], None, None]:
        if uses_process(self.source, self._spec.augment.augment, self._num_workers, self._device):
            shape = (self._share, self.source.image_size, self.source.image_size, 3)
            device = self._device or torch.device("cpu")
            batches = batches_of_process(self, steps, batch_shape=shape, device=device)
        else:
            batches = self.planned(steps, in_processes=False)
        with closing(batches):
            while True:
                requested_s = self.stats.request()
                planned = next(batches, None)
                if planned is None:
                    return
                batch = _batch(planned, self._labels, self.source)
                self.stats.receive(requested_s, len(batch.targets))
                yield planned, batch
                del planned, batch  # the next one takes as much of the device's memory

    @contextmanager
    def _decode_pool(self, *, in_processes: bool) -> Iterator[DecodePool | None]:
        if not in_processes:
            yield None
            return
        most = max(MIN_CHUNK, min(MAX_CHUNK, self._share, _PROCESS_CHUNK_BYTES // self.source.square_bytes))
        with closing(DecodePool(self._num_workers, self._spec, most)) as pool:
            yield pool

    @abstractmethod
    def _plan(self, step: int) -> PlannedBatch:
        """Which samples a batch has, and memory for them."""

    @abstractmethod
    def _fill(self, pool: DecodePool | None, batch: PlannedBatch, part: slice) -> None:
        """Write the pixels of some slots of a batch."""


class TrainLoader(_Loader):
    """Iterates over the batches ``start_step <= b < total_steps``.

    Leaving the iteration (also by an exception) ends its threads.

    Args:
        source: images of the split to train on.
        order: order of the same split.
        labels: applied last, so that runs that differ in them see the same images.
        batch_size: B, samples per global batch; batch b holds the positions ``[bB, (b + 1)B)``.
        start_step: steps that are complete.
        seed, stage: name the augmentation's stream.
        rank, world_size, group_size: which share of each batch; see ``rank_slice``.
        num_workers: threads that decode. Changes no batch.
        device: where batches go.
    """

    def __init__(  # noqa: PLR0913 - one argument per fact that a batch depends on
        self,
        source: SampleSource,
        order: Order,
        labels: SplitTargets,
        *,
        batch_size: int,
        start_step: int,
        total_steps: int,
        seed: int,
        stage: Stage,
        augment: Augment | AugmentSpec | str = Augment.NONE,
        rank: int = 0,
        world_size: int = 1,
        group_size: int = 1,
        num_workers: int = 1,
        device: torch.device | None = None,
    ) -> None:
        spec = augment if isinstance(augment, AugmentSpec) else AugmentSpec(augment=Augment(augment))
        rendered = RenderSpec(pixels=source.pixels, augment=spec, seed=seed, stage=stage)
        self._slice = partial(rank_slice, rank=rank, world_size=world_size, group_size=group_size)
        start, stop = self._slice(0, batch_size)
        super().__init__(source, labels, rendered, share=stop - start, num_workers=num_workers, device=device)
        self._order, self._batch_size, self._start_step, self._total_steps = order, batch_size, start_step, total_steps
        self._augmenter = rendered.augmenter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._augmenter = self._spec.augmenter()

    def __len__(self) -> int:
        return max(self._total_steps - self._start_step, 0)

    def __iter__(self) -> Iterator[Batch]:
        with closing(self._handed_out(range(self._start_step, self._total_steps))) as handed_out:
            for planned, batch in handed_out:
                yield batch
                del planned, batch

    def _plan(self, step: int) -> PlannedBatch:
        start, stop = self._slice(step * self._batch_size, (step + 1) * self._batch_size)
        ordinals = self._order.ordinals(start, stop)
        end = self._total_steps * self._batch_size
        self.source.shards.prefetch(self._order.shards_ahead(start, stop, end=end))
        squares = empty_squares(len(ordinals), self.source.image_size, self._device)
        return PlannedBatch(step=step, start=start, ordinals_B=ordinals, squares_BHWC=squares)

    def _fill(self, pool: DecodePool | None, batch: PlannedBatch, part: slice) -> None:
        for rest in _not_filled(pool, self.source, batch, part):
            start, ordinals = batch.start + rest.start, batch.ordinals_B[rest]
            squares = batch.squares_BHWC.numpy()[rest]
            places = self._augmenter.places(start, len(squares))
            for found in self.source.fill(ordinals, squares, places):
                self.source.bad_samples.add(found)
                slot, place = found.slot, places[found.slot : found.slot + 1] if places else None
                ordinals[slot] = self._replace(start + slot, squares[slot : slot + 1], place, found)
            self._augmenter.complete(squares, start)

    def _replace(
        self,
        position: int,
        square_1HWC: NDArray[np.uint8],
        place: Sequence[Place] | None,
        found: BadSlot,
    ) -> int:
        """Fill the square of a bad sample with that of another one, which is returned."""
        for attempt in range(_MAX_REPLACEMENTS):
            ordinal = self._order.replacement(position, attempt)
            again = self.source.fill(np.array([ordinal]), square_1HWC, place)
            if not again:
                return ordinal
            self.source.bad_samples.add(again[0])
        name = self.source.split.place(found.ordinal)
        raise BadDataError(
            f"{name} {found.error.message}, and none of the {_MAX_REPLACEMENTS} samples that could replace it can be "
            "decoded either; look at the shards, or at what decodes them"
        )


class EvalLoader(_Loader):
    """Iterates over every sample exactly once, unaugmented, in order; the last batch may be smaller.

    A rank takes a run of the batches (``share_of``), so every layout evaluates the same batches, and a node reads the
    shards of its own ranks only. Samples that cannot be decoded are left out of their batch and counted in `num_bad`.

    Args:
        ordinals: which samples, in this order; None = all of the split.
    """

    def __init__(
        self,
        source: SampleSource,
        labels: SplitTargets,
        *,
        batch_size: int,
        ordinals: NDArray[np.int64] | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 1,
        device: torch.device | None = None,
    ) -> None:
        spec = RenderSpec(pixels=source.pixels, augment=AugmentSpec(), seed=0, stage=Stage.PRETRAIN)
        super().__init__(source, labels, spec, share=batch_size, num_workers=num_workers, device=device)
        self._batch_size = batch_size
        if ordinals is None:
            ordinals = np.arange(source.split.num_samples, dtype=np.int64)
        num_batches = math.ceil(len(ordinals) / batch_size)
        self._steps = share_of(num_batches, rank, world_size)
        self._shards_ahead = max(_MIN_EVAL_SHARDS_AHEAD, _EVAL_SHARDS_AHEAD // world_size)
        self._first = self._steps.start * batch_size
        self._ordinals = ordinals[self._first : self._steps.stop * batch_size].copy()
        """Of this rank's batches."""
        self._end_shard = int(source.split.shard_of(self._ordinals[-1:]).max(initial=-1)) + 1
        self.num_bad = 0
        """Samples that the last iteration left out so far."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        self.num_bad = 0
        with closing(self._handed_out(self._steps)) as handed_out:
            for planned, batch in handed_out:
                self.num_bad += len(planned.bad)
                yield batch
                del planned, batch

    def _plan(self, step: int) -> PlannedBatch:
        start = step * self._batch_size
        ordinals = self._ordinals[start - self._first :][: self._batch_size].copy()
        shard_ids = self.source.split.shard_of(ordinals)
        # Ordinals may come in any order: then the last one does not have the last shard.
        last = int(shard_ids[-1]) + 1
        ahead = max(last, min(last + self._shards_ahead - 1, self._end_shard))
        self.source.shards.prefetch(range(int(shard_ids[0]), ahead))
        squares = empty_squares(len(ordinals), self.source.image_size, self._device)
        return PlannedBatch(step=step, start=start, ordinals_B=ordinals, squares_BHWC=squares)

    def _fill(self, pool: DecodePool | None, batch: PlannedBatch, part: slice) -> None:
        for rest in _not_filled(pool, self.source, batch, part):
            for found in self.source.fill(batch.ordinals_B[rest], batch.squares_BHWC.numpy()[rest]):
                self.source.bad_samples.add(found)
                batch.bad.append(replace(found, slot=rest.start + found.slot))


def _not_filled(pool: DecodePool | None, source: SampleSource, batch: PlannedBatch, part: slice) -> Iterator[slice]:
    """The slots of a part of a batch that are left to this thread, once a process has done what it can."""
    if pool is None:
        yield part
        return
    find = partial(source.find, batch.ordinals_B[part])
    left = pool.fill(find, batch.start + part.start, batch.squares_BHWC.numpy()[part])
    if left is None:
        yield part
        return
    for slot in left:
        yield slice(part.start + slot, part.start + slot + 1)


def uses_process(source: SampleSource, augment: Augment, num_workers: int, device: torch.device | None) -> bool:
    """Whether another process loads: a GPU trains, there are several workers, and images are not read from memory."""
    has_work = num_workers >= _MIN_PROCESSES and not source.reads_memory(is_placed=augment.is_placed)
    return has_work and decodes_in_processes(device)


def decodes_in_processes(device: torch.device | None) -> bool:
    """Whether the thread that trains must not wait for the interpreter's lock: a GPU would wait too."""
    return device is not None and device.type == "cuda"


def _batch(planned: PlannedBatch, labels: SplitTargets, source: SampleSource) -> Batch:
    ordinals, images_BCHW = planned.ordinals_B, planned.squares_BHWC.permute(0, 3, 1, 2)
    if planned.bad:
        is_good = np.ones(len(ordinals), dtype=np.bool_)
        is_good[[found.slot for found in planned.bad]] = False
        ordinals, images_BCHW = ordinals[is_good], images_BCHW[torch.from_numpy(is_good)]
    return Batch(
        step=planned.step,
        images_BCHW=images_BCHW,
        targets=torch.from_numpy(labels.take(ordinals)),
        ordinals_B=ordinals,
        positions=(planned.start, planned.start + len(planned)),
        subset_ids_B=np.asarray(source.split.subset_ids[ordinals]),
    )


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
