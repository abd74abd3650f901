"""Batches on their way: planned by one thread, filled by workers, collected in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.units import MIB
from workloads.data.bad_samples import BadSlot
from workloads.data.prefetch import Prefetcher

WINDOW_BYTES: Final = 128 * MIB
_MAX_DEPTH: Final = 4
_CHUNK_BYTES: Final = 8 * 3 * 224**2
_MIN_CHUNK, _MAX_CHUNK = 8, 64
"""Samples of one task. Eight photographs are 10 ms of work: handing them out costs nothing, no worker waits long.
Small images are many to a task, or the queue would cost more than they do."""


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


def batches_ahead(
    plan: Callable[[int], PlannedBatch], fill: FillPart, steps: Sequence[int], *, batch_bytes: int, num_workers: int
) -> Generator[PlannedBatch, None, None]:
    """The batches of ``steps`` in order, each complete.

    0 workers: everything in the caller's thread, when it asks. 1: in one thread ahead of the caller. More: one thread
    plans, a pool of ``num_workers`` fills. Closing the generator ends all threads.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(_Pool(num_workers)) if num_workers > 1 else None

        def start(step: int) -> PlannedBatch:
            batch = plan(step)
            if pool is None:
                fill(batch, slice(0, len(batch)))
            else:
                pool.fill(batch, fill)
            return batch

        batches: Iterator[PlannedBatch] = map(start, steps)
        if num_workers:
            depth = max(1, min(_MAX_DEPTH, WINDOW_BYTES // max(batch_bytes, 1)))
            batches = stack.enter_context(Prefetcher(batches, depth=depth))
        for batch in batches:
            batch.wait()
            yield batch


class _Pool:
    """Threads that fill parts of batches, first planned first filled."""

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What nobody will collect is not begun; what is being decoded takes milliseconds.
        self._threads.shutdown(wait=True, cancel_futures=True)

    def fill(self, batch: PlannedBatch, fill: FillPart) -> None:
        """Hand out the parts of a batch."""
        size = _chunk_samples(batch)
        for first in range(0, len(batch), size):
            part = slice(first, min(first + size, len(batch)))
            batch.parts.append(self._threads.submit(fill, batch, part))


def _chunk_samples(batch: PlannedBatch) -> int:
    square_bytes = batch.squares_BHWC.nbytes // max(len(batch), 1)
    return max(_MIN_CHUNK, min(_MAX_CHUNK, _CHUNK_BYTES // max(square_bytes, 1)))
