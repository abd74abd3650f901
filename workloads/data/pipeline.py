"""Batches that are planned and filled ahead of their consumer.

One thread plans the batches, workers fill them, and they are handed over in order. Memory: at most ``depth + 3``
batches exist at a time: those ready or in work, one being planned, the one that is handed over and the one before it;
``depth`` is what ``Window`` says.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.units import MIB
from workloads.data.bad_samples import BadSlot

AHEAD_S: Final = 2.0
"""Of training that batches are ready for: as long as a store may take for one request, seldom."""
FIRST_BYTES: Final = 128 * MIB
_FIRST_DEPTH: Final = 4
_MAX_DEPTH: Final = 64
_STEPS: Final = 9
"""Newest ones, whose median says how long a step takes."""
_MEMORY_SHARE: Final = 1 / 16
"""Of what is free on the node, for the batches of one process: of eight ranks together half of it."""
CHUNK_BYTES: Final = 8 * 3 * 224**2
MIN_CHUNK: Final = 8
MAX_CHUNK: Final = 64
"""Samples of one task. Eight photographs are 10 ms of work: handing them out costs nothing, no worker waits long.
Small images are many to a task, or the queue would cost more than they do."""
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
Item = TypeVar("Item")


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


Filling = Generator[PlannedBatch, float | None, None]
"""Batches in order; takes the seconds of a step, or None: those until the next batch is asked for."""
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
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self.depth = self._first
        """Batches; read by another thread."""

    def note(self, step_s: float) -> None:
        """A step took so long, the wait for its batch not counted."""
        self._steps_s.append(step_s)
        usual_s = statistics.median(self._steps_s)  # an evaluation after a step, or a compilation in it, counts as one
        wanted = math.ceil(AHEAD_S / max(usual_s, AHEAD_S / _MAX_DEPTH))
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
) -> Filling:
    """The batches of ``steps`` in order, each complete.

    0 workers: everything in the caller's thread, when it asks. 1: in one thread ahead of the caller. More: one thread
    plans, a pool of ``num_workers`` fills. Closing the generator ends all threads. Whoever takes batches for another
    consumer sends what a step takes that one, or 0 if this is not known yet. ``memory_bytes``: for batches ahead;
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
            return max(MIN_CHUNK, min(chunk_samples, math.ceil(len(batch) * num_ahead / num_workers)))

        batches: Iterator[PlannedBatch] = map(start, steps)
        memory_bytes = int(_MEMORY_SHARE * free_memory_bytes()) if memory_bytes is None else memory_bytes
        window = Window(batch_bytes, memory_bytes)
        if num_workers:
            batches = stack.enter_context(Prefetcher(batches, depth=lambda: window.depth))
        for batch in batches:
            batch.wait()
            handed_out_s = time.perf_counter()
            step_s = yield batch
            if step_s is None:
                step_s = time.perf_counter() - handed_out_s
            if step_s > 0:
                window.note(step_s)


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
    return max(MIN_CHUNK, min(MAX_CHUNK, CHUNK_BYTES // max(square_bytes, 1)))


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
