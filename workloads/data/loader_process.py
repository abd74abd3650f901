"""The threads of a loader in another process, where a GPU trains.

The thread that trains needs the interpreter's lock for each kernel that it launches. Threads that find samples, hand
out tasks, copy pixels and download shards take this lock dozens of times per batch, and each time a thread sleeps and
is woken up. So they work in a process of their own, and one message per batch is left for the process that trains.

Invariants:

- Batches are the same: the other process runs the loader's own ``planned``.
- What raises there is raised here, at its batch. Bad samples, counters and log lines arrive with the batches.
- If the other process cannot be used, or ends, this process goes on with the same batch.
- A part of the shared memory is written again only when its copy has ended; a batch that was handed over has memory of
  its own, on the device that trains.
- One such process serves all loaders of a process. It ends when that process does.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import mmap
import os
import pickle
import queue
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError, OrchestratorError
from orchestrator.core.units import MIB
from workloads.data.bad_samples import BadSlot
from workloads.data.pipeline import PlannedBatch
from workloads.data.source import SampleSource
from workloads.runtime.processes import HELPER_VARIABLES, accepted, hang_up, helper

_LOG = logging.getLogger(__name__)
_ENTRY: Final = "workloads.data.loader_process:serve"
_MOST_SLOTS: Final = 4
"""Batches in shared memory: one being written, one ready, one on its way to the device, one whose copy has ended."""
_SLOTS_BYTES: Final = 512 * MIB
"""Fewer of larger batches, but two."""


class Plans(Protocol):
    """A loader that can be sent to another process."""

    source: SampleSource

    def planned(self, steps: Sequence[int], *, in_processes: bool) -> Generator[PlannedBatch, None, None]:
        """The batches of ``steps``, filled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What to load, and what the tally of its bad samples knows already."""

    loader: Plans
    steps: Sequence[int]
    known_bad: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """A batch in a slot of the shared memory, and what happened since the one before it."""

    slot: int
    step: int
    start: int
    ordinals_B: NDArray[np.int64]
    bad: list[BadSlot]
    new_bad: list[Any]
    counts: dict[str, float]
    log: list[logging.LogRecord]


def start_process() -> None:
    """Start the process, which takes seconds, before the first loader needs it."""
    with suppress(OSError):  # the first loader says so
        helper(_ENTRY)


class _LostError(Exception):
    """The other process cannot be used, or has ended."""


@contextmanager
def _connected() -> Iterator[None]:
    """Send or receive. Raises ``_LostError``: nobody is there."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise _LostError(f"the other process has ended ({type(error).__name__})") from error


def batches_of_process(
    loader: Plans, steps: Sequence[int], *, batch_shape: tuple[int, ...], device: torch.device
) -> Generator[PlannedBatch, None, None]:
    """``loader.planned(steps)``, made by another process, with pixels on the device; ``batch_shape``: of a whole batch.

    Raises as ``planned``.
    """
    num_done = 0
    try:
        with closing(_Link(loader, steps, batch_shape, device)) as link:
            for batch in link.batches():
                num_done += 1
                yield batch
            return
    except _LostError as error:
        _LOG.warning(
            "batches are loaded by threads of the process that trains, which may slow down training on a GPU: %s", error
        )
    yield from loader.planned(steps[num_done:], in_processes=True)


_Copied = tuple[PlannedBatch, "torch.cuda.Event | None"]
"""A batch on the device, once the event has come."""


class _Link:
    """Our end of a loader in the other process. Raises ``_LostError``."""

    def __init__(self, loader: Plans, steps: Sequence[int], batch_shape: tuple[int, ...], device: torch.device) -> None:
        self._source, self._device = loader.source, device
        try:
            request = pickle.dumps(
                _Request(loader=loader, steps=steps, known_bad=loader.source.bad_samples.to_json()),
                protocol=pickle.HIGHEST_PROTOCOL,
            )
        except Exception as error:  # arguments of a plug-in may be anything
            raise _LostError(f"what it needs cannot be sent: {error}") from error
        most = _SLOTS_BYTES // max(math.prod(batch_shape), 1)
        slots_shape = (max(2, min(_MOST_SLOTS, most)), *batch_shape)
        try:
            self._connection, self._memory = helper(_ENTRY).connect(max(math.prod(slots_shape), 1))
            # What the request is made of may be of a package that came later than the process.
            self._connection.send((list(map(str, sys.path)), dict(os.environ), slots_shape))
            self._connection.send_bytes(request)
        except OSError as error:
            raise _LostError(f"the process cannot be started: {error}") from error
        pixels = np.frombuffer(self._memory, dtype=np.uint8, count=math.prod(slots_shape)).reshape(slots_shape)
        self._slots = torch.from_numpy(pixels)
        self._in_use: deque[tuple[int, torch.cuda.Event | None]] = deque()
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._is_locked = self._stream is not None and _lock_pages(self._slots)

    def batches(self) -> Iterator[PlannedBatch]:
        """The batches in order. One travels to the device while the one before it is trained on."""
        next_one: _Copied | Exception | None = self._receive()
        while True:
            if next_one is None:
                return
            if isinstance(next_one, Exception):
                raise next_one
            batch, copied = next_one
            is_here = self._has_message()
            next_one = self._receive() if is_here else None
            if copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)
                batch.squares_BHWC.record_stream(current)
            yield batch
            if not is_here:
                next_one = self._receive()

    def close(self) -> None:
        """End the loader; the process stays."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())  # type: ignore[no-untyped-call]
        hang_up(self._connection)

    def _has_message(self) -> bool:
        self._give_back(wait=False)
        with _connected():
            return self._connection.poll()

    def _receive(self) -> _Copied | Exception | None:
        """The next batch, on its way to the device; an error that is to be raised in its place; None after the last."""
        if not self._has_message():
            self._give_back(wait=True)  # the other side may have no slot left
        with _connected():
            message: _Filled | Exception | None = self._connection.recv()
        if not isinstance(message, _Filled):
            return message
        for record in message.log:
            logging.getLogger(record.name).handle(record)
        for count, amount in message.counts.items():
            self._source.shards.stats.add(count, amount)  # type: ignore[arg-type]
        try:
            self._source.bad_samples.add_rows(message.new_bad)
        except BadDataError as error:
            return error
        return self._copied(message)

    def _copied(self, message: _Filled) -> _Copied:
        slot_BHWC, copied = self._slots[message.slot, : len(message.ordinals_B)], None
        if self._stream is None:
            squares_BHWC = slot_BHWC.clone()
        else:
            with torch.cuda.stream(self._stream):
                squares_BHWC = slot_BHWC.to(self._device, non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(self._stream)
        self._in_use.append((message.slot, copied))
        batch = PlannedBatch(
            step=message.step,
            start=message.start,
            ordinals_B=message.ordinals_B,
            squares_BHWC=squares_BHWC,
            bad=message.bad,
        )
        return batch, copied

    def _give_back(self, *, wait: bool) -> None:
        """Slots whose copy has ended."""
        while self._in_use:
            slot, copied = self._in_use[0]
            if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                if not wait:
                    return
                copied.synchronize()
            self._in_use.popleft()
            with suppress(OSError):  # the other side has sent all that it had to send, or the next message is missing
                self._connection.send_bytes(bytes([slot]))


def _lock_pages(slots: torch.Tensor) -> bool:
    """Page-lock memory, so that copies of it to a GPU run by themselves."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(slots.data_ptr(), slots.nbytes, 0)
    if result != runtime.cudaError.success:
        _LOG.warning("%d bytes for batches cannot be page-locked, so that copies to the GPU take longer", slots.nbytes)
        return False
    return True


def serve(control: socket.socket) -> None:
    """Load for each connection; called in the other process."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger().addHandler(logging.handlers.QueueHandler(records))
    torch.set_num_threads(1)
    for connection, memory in accepted(control):
        threading.Thread(target=_serve, args=(Connection(connection), memory, records), daemon=True).start()
    os._exit(0)  # whatever its threads do


def _serve(connection: Connection, descriptor: int, records: queue.SimpleQueue[logging.LogRecord]) -> None:
    with connection, suppress(_LostError, EOFError, OSError):  # the owner has left
        sys.path[:], variables, slots_shape = connection.recv()
        os.environ.clear()
        os.environ.update({**variables, **HELPER_VARIABLES})
        memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        slots = np.frombuffer(memory, dtype=np.uint8, count=math.prod(slots_shape)).reshape(slots_shape)
        request: _Request = pickle.loads(connection.recv_bytes())  # noqa: S301 - the owner wrote it
        message: Exception | None = None
        try:
            _load(request, connection, slots, records)
        except _LostError:
            return
        except Exception as error:  # noqa: BLE001 - the owner raises it, whatever it is
            message = _sendable(error)
        connection.send(message)


def _load(
    request: _Request,
    connection: Connection,
    slots: NDArray[np.uint8],
    records: queue.SimpleQueue[logging.LogRecord],
) -> None:
    source = request.loader.source
    source.bad_samples.merge(request.known_bad)
    free, before = deque(range(len(slots))), source.shards.stats.sums()
    try:
        with closing(request.loader.planned(request.steps, in_processes=True)) as batches:
            for batch in batches:
                with _connected():
                    while not free or connection.poll():
                        free.extend(connection.recv_bytes())
                slot = free.popleft()
                np.copyto(slots[slot, : len(batch)], batch.squares_BHWC.numpy())
                now = source.shards.stats.sums()
                filled = _Filled(
                    slot=slot,
                    step=batch.step,
                    start=batch.start,
                    ordinals_B=batch.ordinals_B,
                    bad=batch.bad,
                    new_bad=source.bad_samples.take_news(),
                    counts={count: now[count] - before[count] for count in now if now[count] != before[count]},
                    log=_drained(records),
                )
                before = now
                with _connected():
                    connection.send(filled)
    finally:
        source.close()


def _drained(records: queue.SimpleQueue[logging.LogRecord]) -> list[logging.LogRecord]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(records.get_nowait())
    return found


def _sendable(error: Exception) -> Exception:
    """The error, or its text if it cannot be sent."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - it is our own
    except Exception:  # noqa: BLE001 - of a package
        return OrchestratorError(f"{type(error).__name__}: {error}")
    return error
