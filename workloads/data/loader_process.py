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
import math
import mmap
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security import redaction
from orchestrator.core.units import MIB
from workloads.data.bad_samples import BadSlot
from workloads.data.cache.objects import opened_store
from workloads.data.pipeline import Filling, PlannedBatch
from workloads.data.source import SampleSource
from workloads.runtime.processes import HELPER_VARIABLES, accepted, hang_up, helper

_LOG = logging.getLogger(__name__)
_ENTRY: Final = "workloads.data.loader_process:serve"
_MOST_SLOTS: Final = 4
"""Batches in shared memory: one being written, one ready, one on its way to the device, one whose copy has ended."""
_SLOTS_BYTES: Final = 512 * MIB
"""Fewer of larger batches, but two."""
_PATIENCE_S: Final = 60.0
"""Without a message; then the log says so."""
_RETURNED: Final = struct.Struct("<Bd")
"""A slot that may be written again, and what a step takes (seconds; 0 = not known yet)."""
_MOST_CAUSES: Final = 10
_Record = tuple[str, int, str, int, str]
"""A log line: logger, level, file, line, text."""


class Plans(Protocol):
    """A loader that can be sent to another process."""

    source: SampleSource

    def planned(self, steps: Sequence[int], *, in_processes: bool) -> Filling:
        """The batches of ``steps``, filled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What to load, and what the tally of its bad samples knows already."""

    loader: Plans
    steps: Sequence[int]
    known_bad: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What happened in the other process since the message before."""

    bad: list[Any]
    """Rows of the tally."""
    counts: Mapping[str, float]
    """Of the shards' cache."""
    damaged: Mapping[int, bool]
    log: Sequence[_Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """A batch in a slot of the shared memory."""

    slot: int
    step: int
    start: int
    ordinals_B: NDArray[np.int64]
    bad: list[BadSlot]
    news: _News


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """There are no more batches; ``errors``: why, and its causes."""

    errors: Sequence[Exception]
    news: _News


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """The request cannot be opened."""

    reason: str


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
        raise _LostError(f"its connection has ended ({type(error).__name__})") from error


def batches_of_process(
    loader: Plans, steps: Sequence[int], *, batch_shape: tuple[int, ...], device: torch.device
) -> Filling:
    """``loader.planned(steps)``, made by another process, with pixels on the device; ``batch_shape``: of a whole batch.

    Raises as ``planned``.
    """
    num_done = 0
    try:
        with closing(_Link(loader, steps, batch_shape, device)) as link:
            for batch in link.batches():
                num_done += 1
                yield batch
                del batch  # the next one takes as much of the device's memory
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
        self._source, self._device, self._step_s = loader.source, device, 0.0
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
            self._process = helper(_ENTRY)
            self._connection, memory = self._process.connect(max(math.prod(slots_shape), 1))
            # What the request is made of may be of a package that came later than the process.
            level = logging.getLogger().level
            self._connection.send((list(map(str, sys.path)), dict(os.environ), level, slots_shape))
            self._connection.send_bytes(request)
        except OSError as error:
            raise _LostError(f"the process cannot be started: {error}") from error
        self._slots = torch.from_numpy(_slots(memory, slots_shape))
        self._in_use: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._stream = _copy_stream(device) if device.type == "cuda" else None
        self._is_locked = self._stream is not None and _lock_pages(self._slots, device)

    def batches(self) -> Iterator[PlannedBatch]:
        """The batches in order. One travels to the device while the one before it is trained on."""
        received = self._receive()
        while not isinstance(received, _Ended):
            batch, copied = received
            is_here = self._has_message()
            if is_here:
                received = self._receive()
            if copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)
                batch.squares_BHWC.record_stream(current)
            started_s = time.perf_counter()
            yield batch
            self._step_s = time.perf_counter() - started_s
            del batch
            if not is_here:
                del received
                received = self._receive()
        if received.errors:
            error = _chained(received.errors)
            del received
            try:
                raise error
            finally:
                del error  # or this frame and the error would keep each other, and the shared memory

    def close(self) -> None:
        """End the loader; the process stays."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            if self._is_locked:
                torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())  # type: ignore[no-untyped-call]
            hang_up(self._connection)
            self._slots = torch.empty(0)  # lets go of the shared memory

    def _has_message(self) -> bool:
        self._give_back(wait=False)
        with _connected():
            return self._connection.poll()

    def _receive(self) -> _Copied | _Ended:
        """The next batch, on its way to the device."""
        if not self._has_message():
            self._give_back(wait=True)  # the other side may have no slot left
        try:
            while not self._connection.poll(_PATIENCE_S):
                _LOG.warning("process %d has loaded no batch for %.0f s", self._process.process_id, _PATIENCE_S)
            message: _Filled | _Ended | _Refused = self._connection.recv()
        except (EOFError, OSError) as error:
            raise _LostError(self._process.end()) from error
        if isinstance(message, _Refused):
            raise _LostError(f"the other process cannot open what it needs: {message.reason}")
        self._take_over(message.news)
        return self._copied(message) if isinstance(message, _Filled) else message

    def _take_over(self, news: _News) -> None:
        for name, level, path, line, text in news.log:
            logger = logging.getLogger(name)
            if logger.isEnabledFor(level):
                logger.handle(logger.makeRecord(name, level, path, line, text, (), None))
        for count, amount in news.counts.items():
            self._source.shards.stats.add(count, amount)  # type: ignore[arg-type]
        self._source.damaged.update(news.damaged)
        self._source.bad_samples.add_rows(news.bad)

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
                self._connection.send_bytes(_RETURNED.pack(slot, self._step_s))


def _chained(errors: Sequence[Exception]) -> Exception:
    """The first one, with the others as causes."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def _slots(memory: mmap.mmap, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape)).reshape(shape)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: freed memory of the device stays with the stream that it was taken for."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _lock_pages(slots: torch.Tensor, device: torch.device) -> bool:
    """Page-lock memory, so that copies of it to a GPU run by themselves."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        if runtime.cudaHostRegister(slots.data_ptr(), slots.nbytes, 0) == runtime.cudaError.success:
            return True
        with suppress(RuntimeError):  # the next kernel raises what CUDA remembers, and makes it forget it
            torch.zeros(1, device=device)
    _LOG.warning("%d bytes for batches cannot be page-locked, so that copies to the GPU take longer", slots.nbytes)
    return False


class _Records(logging.Handler):
    """Keeps the fields of log lines: all else of a record may be anything, and need not be possible to send."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: queue.SimpleQueue[_Record] = queue.SimpleQueue()
        self._num_loaders, self._count_lock = 0, threading.Lock()

    @contextmanager
    def of_a_loader(self) -> Iterator[None]:
        """While a loader works. Lines of a time without any belong to no attempt: the owner may run another one."""
        with self._count_lock:
            if not self._num_loaders:
                self.drain()
            self._num_loaders += 1
        try:
            yield
        finally:
            with self._count_lock:
                self._num_loaders -= 1

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        try:
            self._kept.put((record.name, record.levelno, record.pathname, record.lineno, self.format(record)))
        except Exception:  # noqa: BLE001 - arguments that do not fit, as every handler does
            self.handleError(record)

    def drain(self) -> list[_Record]:
        """Those since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._kept.get_nowait())
        return found


def serve(control: socket.socket) -> None:
    """Load for each connection; called in the other process."""
    redaction.install()
    records = _Records()
    logging.getLogger().addHandler(records)
    torch.set_num_threads(1)
    for connection, memory in accepted(control):
        threading.Thread(target=_serve, args=(Connection(connection), memory, records), daemon=True).start()
    os._exit(0)  # whatever its threads do


_environment_lock = threading.Lock()


def _take_environment(path: Sequence[str], variables: Mapping[str, str]) -> None:
    """That of the owner, step by step: loaders of other threads look at it."""
    wanted = {**variables, **HELPER_VARIABLES}
    with _environment_lock:
        if sys.path != path:
            sys.path[:] = path
        if dict(os.environ) == wanted:
            return
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})
        opened_store.cache_clear()  # it may name other credentials


def _serve(connection: Connection, descriptor: int, records: _Records) -> None:
    with connection, suppress(_LostError), records.of_a_loader():  # lost: the owner has left
        try:
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        with _connected():
            path, variables, level, slots_shape = connection.recv()
            request = connection.recv_bytes()
        try:
            _take_environment(path, variables)
            logging.getLogger().setLevel(level)
            slots = _slots(memory, slots_shape)
            loading = _Loading(pickle.loads(request), connection, slots, records)  # noqa: S301 - the owner wrote it
        except Exception as error:  # noqa: BLE001 - of a package, perhaps
            _send(connection, _Refused(reason=f"{type(error).__name__}: {error}"))
            return
        loading.run()


@dataclass(slots=True, kw_only=False)
class _Loading:
    """One loader."""

    request: _Request
    connection: Connection
    slots: NDArray[np.uint8]
    records: _Records
    _sent: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Send its batches and how it ended."""
        source, errors = self.request.loader.source, list[Exception]()
        source.bad_samples.merge(self.request.known_bad)
        self._sent = source.shards.stats.sums()
        try:
            self._send_batches()
        except _LostError:
            raise
        except Exception as error:  # noqa: BLE001 - the owner raises it, whatever it is
            errors = _sendable(error)
        finally:
            source.close()
        _send(self.connection, _Ended(errors=errors, news=self._news()))

    def _send_batches(self) -> None:
        free, step_s = deque(range(len(self.slots))), 0.0
        with closing(self.request.loader.planned(self.request.steps, in_processes=True)) as batches:
            batch = next(batches, None)
            while batch is not None:
                with _connected():
                    while not free or self.connection.poll():
                        slot, step_s = _RETURNED.unpack(self.connection.recv_bytes())
                        free.append(slot)
                slot = free.popleft()
                np.copyto(self.slots[slot, : len(batch)], batch.squares_BHWC.numpy())
                filled = _Filled(
                    slot=slot,
                    step=batch.step,
                    start=batch.start,
                    ordinals_B=batch.ordinals_B,
                    bad=batch.bad,
                    news=self._news(),
                )
                _send(self.connection, filled)
                try:
                    batch = batches.send(step_s)
                except StopIteration:
                    return

    def _news(self) -> _News:
        source, before = self.request.loader.source, self._sent
        self._sent = source.shards.stats.sums()
        return _News(
            bad=source.bad_samples.take_news(),
            counts={count: total - before[count] for count, total in self._sent.items() if total != before[count]},
            damaged=dict(source.damaged),
            log=self.records.drain(),
        )


def _send(connection: Connection, message: _Filled | _Ended | _Refused) -> None:
    with _connected():
        connection.send(message)


def _sendable(error: Exception) -> list[Exception]:
    """The error and its causes; the text of one that cannot be sent."""
    error.add_note("".join(traceback.format_exception(error)))
    found: list[Exception] = []
    link: BaseException | None = error
    while isinstance(link, Exception) and len(found) < _MOST_CAUSES:
        if not _arrives(link):
            found.append(OrchestratorError(f"{type(link).__name__}: {link}"))
            for note in getattr(link, "__notes__", []):
                found[-1].add_note(note)
        else:
            found.append(link)
        # Its frames hold the memory of batches.
        link.__traceback__ = link.__context__ = None
        link = link.__cause__
    return found


def _arrives(error: Exception) -> bool:
    """Whether the owner gets the same error."""
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - it is our own
    except Exception:  # noqa: BLE001 - of a package
        return False
    return type(again) is type(error) and str(again) == str(error)
