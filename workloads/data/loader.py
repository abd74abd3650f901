"""Batches for training (by position) and evaluation (by ordinal).

Workers are threads of this process. Where a GPU trains, each of them has a process that decodes for it
(``decode_pool``); batches are the same. Memory: at most ``depth + 3`` batches exist at a time: those ready or in work,
one being planned, the one that is handed over and the one before it; ``depth`` is what ``Window`` says. Besides, each
worker holds one decoded image, and with processes the squares of one task.

One thread plans the batches ahead of their consumer, workers fill them, and they are collected in order.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError
from orchestrator.core.units import MIB
from workloads.data.augment import Augment, AugmentSpec
from workloads.data.bad_samples import BadSlot
from workloads.data.decode_pool import DecodePool, RenderSpec
from workloads.data.order import Order, rank_slice
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
AHEAD_S: Final = 2.0
"""Of training that batches are ready for: as long as a store may take for one request, seldom."""
FIRST_BYTES: Final = 128 * MIB
_FIRST_DEPTH: Final = 4
_MAX_DEPTH: Final = 64
_MEMORY_SHARE: Final = 1 / 16
"""Of what is free on the node, for the batches of one process: of eight ranks together half of it."""
_CHUNK_BYTES: Final = 8 * 3 * 224**2
_MIN_CHUNK, _MAX_CHUNK = 8, 64
"""Samples of one task. Eight photographs are 10 ms of work: handing them out costs nothing, no worker waits long.
Small images are many to a task, or the queue would cost more than they do."""
_PROCESS_CHUNK_BYTES: Final = 8 * _CHUNK_BYTES
"""Of one task of a process, at most: a thread takes the interpreter's lock several times to hand one over, whatever is
in it."""
_MIN_PROCESSES: Final = 2
"""One worker plans and decodes in one thread."""
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples of one step, or of one rank's share of it."""

    step: int
    """Batches before this one: batch b is trained on when b steps are complete."""
    images_BCHW: torch.Tensor
    """uint8 in channels-last memory; page-locked if the loader was given a CUDA device."""
    targets: torch.Tensor
    """int64 (B,) in ``[0, num_classes)``, or (B, M) padded with -1 where samples have several."""
    ordinals_B: NDArray[np.int64]
    """Rows of the split's index; of a replaced sample the replacement's."""
    positions: tuple[int, int]
    """First position and the one after the last. In evaluation, of the numbers in the order of evaluation."""

    subset_ids_B: NDArray[np.integer[Any]]
    """Index into the split's ``subset_names``; -1 = in none."""


class TrainLoader:
    """Iterates over the batches ``start_step <= b < total_steps``; its whole state is the step.

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
        self._source, self._order, self._labels = source, order, labels
        self._batch_size, self._step, self._total_steps = batch_size, start_step, total_steps
        self._slice = partial(rank_slice, rank=rank, world_size=world_size, group_size=group_size)
        self._num_workers, self._device = num_workers, device
        spec = augment if isinstance(augment, AugmentSpec) else AugmentSpec(augment=Augment(augment))
        self._spec = RenderSpec(pixels=source.pixels, augment=spec, seed=seed, stage=stage)
        self._augmenter = self._spec.augmenter()
        self.stats = LoaderStats(source=source)

    def __len__(self) -> int:
        return max(self._total_steps - self._step, 0)

    def __iter__(self) -> Iterator[Batch]:
        start, stop = self._slice(0, self._batch_size)
        with _decode_pool(self._source, self._spec, stop - start, self._num_workers, self._device) as pool:
            batches = batches_ahead(
                self._plan,
                partial(self._fill, pool),
                range(self._step, self._total_steps),
                batch_bytes=(stop - start) * self._source.square_bytes,
                num_workers=self._num_workers,
                chunk_samples=pool.num_samples if pool is not None else None,
            )
            with closing(_hand_out(batches, self._labels, self._source, self.stats)) as handed_out:
                for planned, batch in handed_out:
                    self._step = planned.step + 1
                    yield batch

    def state_dict(self) -> dict[str, int]:
        """The number of batches that were handed out, counted from the first one of the run."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the batches that a loader of the same run had handed out; for the next iteration."""
        self._step = int(state["step"])

    def _plan(self, step: int) -> PlannedBatch:
        start, stop = self._slice(step * self._batch_size, (step + 1) * self._batch_size)
        ordinals = self._order.ordinals(start, stop)
        end = self._total_steps * self._batch_size
        self._source.shards.prefetch(self._order.shards_ahead(start, stop, end=end))
        squares = empty_squares(len(ordinals), self._source.image_size, self._device)
        return PlannedBatch(step=step, start=start, ordinals_B=ordinals, squares_BHWC=squares)

    def _fill(self, pool: DecodePool | None, batch: PlannedBatch, part: slice) -> None:
        for rest in _not_filled(pool, self._source, batch, part):
            start, ordinals = batch.start + rest.start, batch.ordinals_B[rest]
            squares = batch.squares_BHWC.numpy()[rest]
            places = self._augmenter.places(start, len(squares))
            for found in self._source.fill(ordinals, squares, places):
                self._source.bad_samples.add(found)
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
            again = self._source.fill(np.array([ordinal]), square_1HWC, place)
            if not again:
                return ordinal
            self._source.bad_samples.add(again[0])
        name = self._source.split.place(found.ordinal)
        raise BadDataError(
            f"{name} {found.error.message}, and none of the {_MAX_REPLACEMENTS} samples that could replace it can be "
            "decoded either; look at the shards, or at what decodes them"
        )


class EvalLoader:
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
        self._source, self._labels, self._batch_size = source, labels, batch_size
        self._spec = RenderSpec(pixels=source.pixels, augment=AugmentSpec(), seed=0, stage=Stage.PRETRAIN)
        self._ordinals = np.arange(source.split.num_samples, dtype=np.int64) if ordinals is None else ordinals
        num_batches = math.ceil(len(self._ordinals) / batch_size)
        self._steps = share_of(num_batches, rank, world_size)
        self._shards_ahead = max(_MIN_EVAL_SHARDS_AHEAD, _EVAL_SHARDS_AHEAD // world_size)
        last_ordinals = self._ordinals[: self._steps.stop * batch_size][-1:]
        self._end_shard = int(source.split.shard_of(last_ordinals).max(initial=-1)) + 1
        self._num_workers, self._device = num_workers, device
        self.num_bad = 0
        """Samples that the last iteration left out so far."""
        self.stats = LoaderStats(source=source)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        self.num_bad = 0
        with _decode_pool(self._source, self._spec, self._batch_size, self._num_workers, self._device) as pool:
            batches = batches_ahead(
                self._plan,
                partial(self._fill, pool),
                self._steps,
                batch_bytes=self._batch_size * self._source.square_bytes,
                num_workers=self._num_workers,
                chunk_samples=pool.num_samples if pool is not None else None,
            )
            with closing(_hand_out(batches, self._labels, self._source, self.stats)) as handed_out:
                for planned, batch in handed_out:
                    self.num_bad += len(planned.bad)
                    yield batch

    def _plan(self, step: int) -> PlannedBatch:
        start = step * self._batch_size
        ordinals = self._ordinals[start : start + self._batch_size].copy()
        shard_ids = self._source.split.shard_of(ordinals)
        # Ordinals may come in any order: then the last one does not have the last shard.
        last = int(shard_ids[-1]) + 1
        ahead = max(last, min(last + self._shards_ahead - 1, self._end_shard))
        self._source.shards.prefetch(range(int(shard_ids[0]), ahead))
        squares = empty_squares(len(ordinals), self._source.image_size, self._device)
        return PlannedBatch(step=step, start=start, ordinals_B=ordinals, squares_BHWC=squares)

    def _fill(self, pool: DecodePool | None, batch: PlannedBatch, part: slice) -> None:
        for rest in _not_filled(pool, self._source, batch, part):
            for found in self._source.fill(batch.ordinals_B[rest], batch.squares_BHWC.numpy()[rest]):
                self._source.bad_samples.add(found)
                batch.bad.append(replace(found, slot=rest.start + found.slot))


@contextmanager
def _decode_pool(
    source: SampleSource, spec: RenderSpec, share: int, num_workers: int, device: torch.device | None
) -> Iterator[DecodePool | None]:
    """A process for each of several workers, where a GPU trains and images are not read from memory; ``share``: samples
    of a batch.
    """
    is_placed = spec.augment.augment.is_placed
    if num_workers < _MIN_PROCESSES or not decodes_in_processes(device) or source.reads_memory(is_placed=is_placed):
        yield None
        return
    most = max(_MIN_CHUNK, min(_MAX_CHUNK, share, _PROCESS_CHUNK_BYTES // source.square_bytes))
    with closing(DecodePool(num_workers, spec, most)) as pool:
        yield pool


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


def decodes_in_processes(device: torch.device | None) -> bool:
    """Whether the thread that trains must not wait for the interpreter's lock: a GPU would wait too."""
    return device is not None and device.type == "cuda"


def _hand_out(
    batches: Generator[PlannedBatch, None, None], labels: SplitTargets, source: SampleSource, stats: LoaderStats
) -> Generator[tuple[PlannedBatch, Batch], None, None]:
    with closing(batches):
        while True:
            requested_s = stats.request()
            planned = next(batches, None)
            if planned is None:
                return
            batch = _batch(planned, labels, source)
            stats.receive(requested_s, len(batch.targets))
            yield planned, batch


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """A batch whose samples are known and whose pixels may still be missing."""

    step: int
    start: int
    """Position (or number in the split's order) of the first sample."""
    ordinals_B: NDArray[np.int64]
    """Which samples; replacements of bad ones are written into it."""
    squares_BHWC: torch.Tensor
    """uint8, contiguous."""
    bad: list[BadSlot] = field(default_factory=list)
    """Filled by workers: slots that stayed without pixels."""
    parts: list[Future[None]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ordinals_B)

    def wait(self) -> None:
        """Until all pixels are there. Raises what a worker raised."""
        for part in self.parts:
            part.result()


FillPart = Callable[[PlannedBatch, slice], None]
"""Writes the pixels of some consecutive slots of a batch."""


def empty_squares(num_images: int, image_size: int, device: torch.device | None) -> torch.Tensor:
    """Memory for a batch [B, H, W, 3]; page-locked if it goes to a CUDA device, so that the copy runs in parallel."""
    is_pinned = device is not None and device.type == "cuda"
    return torch.empty((num_images, image_size, image_size, 3), dtype=torch.uint8, pin_memory=is_pinned)


def free_memory_bytes() -> int:
    """What this process may still take: of the machine, or of its container or its job's group if that has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    own = _CGROUP / _OWN_CGROUP.read_text(encoding="utf-8").rpartition("0::/")[2].strip()
    for group in (own, *own.parents):
        if group.is_relative_to(_CGROUP):
            free = min(free, _left_in(group, free))
    return max(free, 0)


def _left_in(group: Path, otherwise: int) -> int:
    """Bytes that a cgroup (v2) may still take; ``otherwise`` where it has no limit. What it holds of files, such as the
    shards that it has read, the kernel gives back when memory is needed.
    """
    with suppress(OSError, ValueError, KeyError):  # without a limit it says ``max``
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit - used + int(kinds["inactive_file"]) + int(kinds["active_file"])
    return otherwise


class Window:
    """How many batches to have ready: those of ``AHEAD_S`` of training, by what a step takes its consumer.

    Before that is known, what fits into ``FIRST_BYTES``, 1 to 4; and never more than 64, or than
    ``memory_bytes`` hold, but 1.
    """

    def __init__(self, batch_bytes: int, memory_bytes: int) -> None:
        size = max(batch_bytes, 1)
        self._most = max(1, min(_MAX_DEPTH, memory_bytes // size))
        self._first = max(1, min(_FIRST_DEPTH, FIRST_BYTES // size, self._most))
        self._step_s: float | None = None
        self.depth = self._first
        """Batches; read by another thread."""

    def note(self, step_s: float) -> None:
        """A step took so long, the wait for its batch not counted."""
        self._step_s = step_s if self._step_s is None else 0.9 * self._step_s + 0.1 * step_s
        wanted = math.ceil(AHEAD_S / max(self._step_s, AHEAD_S / _MAX_DEPTH))
        self.depth = max(self._first, min(self._most, wanted))


def batches_ahead(
    plan: Callable[[int], PlannedBatch],
    fill: FillPart,
    steps: Sequence[int],
    *,
    batch_bytes: int,
    num_workers: int,
    memory_bytes: int | None = None,
    chunk_samples: int | None = None,
) -> Generator[PlannedBatch, None, None]:
    """The batches of ``steps`` in order, each complete.

    0 workers: everything in the caller's thread, when it asks. 1: in one thread ahead of the caller. More: one thread
    plans, a pool of ``num_workers`` fills. Closing the generator ends all threads. ``memory_bytes``: for batches ahead;
    by default a share of what is free. ``chunk_samples``: of one task, at most; by default as many as suit a thread.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(_ThreadPool(num_workers)) if num_workers > 1 else None

        def start(step: int) -> PlannedBatch:
            batch = plan(step)
            if pool is None:
                fill(batch, slice(0, len(batch)))
            else:
                pool.fill(batch, fill, most_samples(batch))
            return batch

        def most_samples(batch: PlannedBatch) -> int:
            if chunk_samples is None:
                return _chunk_samples(batch.squares_BHWC.nbytes // max(len(batch), 1))
            # No more than leaves work for all of them.
            num_ahead = min(window.depth, len(steps))
            return max(_MIN_CHUNK, min(chunk_samples, math.ceil(len(batch) * num_ahead / num_workers)))

        batches: Iterator[PlannedBatch] = map(start, steps)
        memory_bytes = int(_MEMORY_SHARE * free_memory_bytes()) if memory_bytes is None else memory_bytes
        window = Window(batch_bytes, memory_bytes)
        if num_workers:
            batches = stack.enter_context(Prefetcher(batches, depth=lambda: window.depth))
        for batch in batches:
            batch.wait()
            handed_out_s = time.perf_counter()
            yield batch
            window.note(time.perf_counter() - handed_out_s)


class _ThreadPool:
    """Threads that fill parts of batches, first planned first filled."""

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What nobody will collect is not begun; what is being decoded takes milliseconds.
        self._threads.shutdown(wait=True, cancel_futures=True)

    def fill(self, batch: PlannedBatch, fill: FillPart, most_samples: int) -> None:
        """Hand out the parts of a batch, of equal size as far as possible."""
        size = math.ceil(len(batch) / math.ceil(len(batch) / most_samples)) if len(batch) else 1
        for first in range(0, len(batch), size):
            part = slice(first, min(first + size, len(batch)))
            batch.parts.append(self._threads.submit(fill, batch, part))


def _chunk_samples(square_bytes: int) -> int:
    """Samples of one task."""
    return max(_MIN_CHUNK, min(_MAX_CHUNK, _CHUNK_BYTES // max(square_bytes, 1)))


class Prefetcher(Generic[Item]):
    """Iterates over ``items`` in a thread, at most ``depth()`` ahead; an exception there is raised here, at its turn.

    Use as a context manager: leaving it ends the thread.
    """

    def __init__(self, items: Iterable[Item], *, depth: Callable[[], int]) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_finished = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_finished)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._offer(item):
                    break
        except BaseException as error:  # noqa: BLE001 - the consumer raises it, whatever it is
            self._error = error
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def _offer(self, item: Item) -> bool:
        """Wait for room and hand over; False once the consumer has left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth() or self._is_closed)
            if not self._is_closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._is_closed


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
