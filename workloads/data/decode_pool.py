"""Processes that decode and augment for the threads of a loader, where a GPU trains.

Threads that decode take the interpreter's lock a dozen times per image, and the thread that trains needs it for every
kernel that it launches (docs/data.md). Here a thread of the loader only says which bytes of which files make some
consecutive samples, waits without the lock, and copies their pixels out of memory that it shares with one process.

Invariants:

- A process computes what the thread would compute, by the same code: no pixel depends on who made it.
- Whatever a process cannot do (it is still starting, it was killed, a file is gone, a sample cannot be decoded), its
  thread does itself, so each error is raised, counted and repaired in one place.
- Processes are forked by one process that has no threads and has loaded what they need: they start within
  milliseconds and share that memory. They end when the sockets to their loader close, also if that was killed.
"""

from __future__ import annotations

import atexit
import gc
import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workloads.data.augment import Augmenter, AugmentSpec
from workloads.data.cache import FilePart
from workloads.data.pixels import PixelSpec
from workloads.runtime.streams import Stage

_LOG = logging.getLogger(__name__)
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """All that the pixels of a position depend on beside the bytes of its sample."""

    pixels: PixelSpec
    augment: AugmentSpec
    seed: int
    stage: Stage

    def augmenter(self) -> Augmenter:
        """Makes the places of positions, and what is left to do once they are decoded."""
        pixels = self.pixels
        return Augmenter(
            self.augment, seed=self.seed, stage=self.stage, image_size=pixels.image_size, resize=pixels.resize
        )

    def picklable(self) -> Rendering:
        """The same with plain arguments of a plug-in."""
        arguments = self.augment.arguments
        return replace(self, augment=replace(self.augment, arguments=dict(arguments) if arguments else None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Consecutive positions from ``start`` on; a sample is its bytes, or (number of a path, offset, length)."""

    start: int
    paths: Sequence[str]
    samples: Sequence[bytes | tuple[int, int, int]]


class DecodePool:
    """Processes for the threads of one loader.

    Args:
        num_processes: no more than this many threads use it at a time.
        rendering: of the loader.
        num_samples: the most that one call fills.
    """

    def __init__(self, num_processes: int, rendering: Rendering, num_samples: int) -> None:
        self.num_samples = num_samples
        side = rendering.pixels.image_size
        self._rendering, self._shape = rendering.picklable(), (num_samples, side, side, 3)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._restarts_left = num_processes
        """Where the machine kills one after the other, threads do the rest."""
        for _ in range(num_processes):
            self._start()

    def fill(
        self, find: Callable[[], Sequence[FilePart | Future[bytes]]], start: int, squares_BHWC: NDArray[np.uint8]
    ) -> bool:
        """Write the pixels of the positions from ``start`` on, whose samples ``find`` finds; False: nothing is written.

        Raises what ``find`` and its futures raise.
        """
        worker = self._take()
        if worker is None:
            return False
        try:
            found = find()  # its pins keep the files until they are read
            is_filled = worker.run(_task(found, start))
            if is_filled:
                np.copyto(squares_BHWC, worker.squares_NHWC[: len(squares_BHWC)])
            return is_filled
        finally:
            self._give_back(worker)

    def close(self) -> None:
        """End the processes; no thread may use them any more."""
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _start(self) -> None:
        try:
            self._idle.put(_fork_server().worker(self._rendering, self._shape))
        except OSError as error:  # too many open files, or no memory
            _LOG.warning("no process that decodes images can be started, a thread does its part: %s", error)

    def _take(self) -> _Worker | None:
        """A process that nobody uses and that has started."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            return None
        if worker.has_started():
            return worker
        self._give_back(worker)
        return None

    def _give_back(self, worker: _Worker) -> None:
        if not worker.has_ended:
            self._idle.put(worker)
            return
        worker.close()
        if worker.problem:
            _LOG.warning("images are decoded in threads, a process cannot do it: %s", worker.problem)
            return
        _LOG.warning("a process that decodes images has ended, perhaps for lack of memory; a thread did its part")
        self._restarts_left -= 1
        if self._restarts_left >= 0:
            self._start()


class _Worker:
    """The loader's end of one process."""

    def __init__(self, connection: Connection, memory: mmap.mmap, shape: tuple[int, ...]) -> None:
        self.squares_NHWC = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
        """What the process writes."""
        self._connection, self._has_started = connection, False
        self.has_ended, self.problem = False, ""
        """Whether it takes no tasks any more, and why it never took one."""

    def has_started(self) -> bool:
        """Whether it takes tasks."""
        try:
            if not self._has_started and self._connection.poll():
                self.problem = self._connection.recv()
                self._has_started, self.has_ended = not self.problem, bool(self.problem)
        except (EOFError, OSError):
            self.has_ended = True
        return self._has_started

    def run(self, task: _Task) -> bool:
        """Whether the squares are written."""
        try:
            self._connection.send(task)
            return bool(self._connection.recv())
        except (EOFError, OSError):
            self.has_ended = True
            return False

    def close(self) -> None:
        """End the process, at the latest when it has done what it is at."""
        self._connection.close()


def _task(found: Sequence[FilePart | Future[bytes]], start: int) -> _Task:
    numbers: dict[str, int] = {}
    samples = [
        (numbers.setdefault(str(part.pin.path), len(numbers)), part.offset, part.length)
        if isinstance(part, FilePart)
        else part.result()
        for part in found
    ]
    return _Task(start=start, paths=list(numbers), samples=samples)


class _ForkServer:
    """The process that forks the others; one for each process that loads, kept for its further loaders."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = f"from workloads.data.decode_pool import serve; serve({theirs.fileno()})"
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Not the folder that we happen to be in: its files may have the names of modules.
                env={**os.environ, **_ONE_THREAD, **_NO_GPU, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            )

    def is_alive(self) -> bool:
        """Whether it is there, and ours: not that of a process that forked us."""
        return self.pid == os.getpid() and self._process.poll() is None

    def worker(self, rendering: Rendering, shape: tuple[int, ...]) -> _Worker:
        """A new process; the server may still be starting. Raises ``OSError``."""
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        size = int(np.prod(shape, dtype=np.int64))
        descriptor = os.memfd_create("decoded")
        try:
            with theirs:
                os.ftruncate(descriptor, size)
                memory = mmap.mmap(descriptor, size)
                connection.send((sys.path, dict(os.environ), rendering, shape))
                socket.send_fds(self._control, [b"."], [theirs.fileno(), descriptor])
        finally:
            os.close(descriptor)
        return _Worker(connection, memory, shape)

    def close(self) -> None:
        """End it; the processes that it forked stay until their loaders end."""
        if self.pid == os.getpid():
            self._control.close()
            self._process.kill()  # it may still be loading
            self._process.wait()


_server: _ForkServer | None = None
_server_lock = threading.Lock()


def _fork_server() -> _ForkServer:
    global _server  # noqa: PLW0603 - one per process
    with _server_lock:
        if _server is None or not _server.is_alive():
            _server = _ForkServer()
            atexit.register(_server.close)
        return _server


def serve(control_descriptor: int) -> None:
    """Fork a process for each pair of descriptors that arrives: its socket, and the memory for its squares."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # when to end is the business of who loads
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended processes leave nothing behind
    gc.freeze()  # or the first collection would copy all memory that processes share
    control = socket.socket(fileno=control_descriptor)
    while True:
        received, descriptors, *_ = socket.recv_fds(control, 1, 2)
        if not received:
            return
        if os.fork() == 0:
            control.close()
            with suppress(EOFError, OSError):  # the loader has left
                _work(Connection(descriptors[0]), descriptors[1])
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _work(connection: Connection, memory_descriptor: int) -> None:
    path, variables, rendering, shape = connection.recv()
    # A sweep's own code, and what it reads of the environment, may be newer than the server.
    sys.path[:] = path
    os.environ.update({**variables, **_NO_GPU})
    squares_NHWC = np.frombuffer(mmap.mmap(memory_descriptor, 0), dtype=np.uint8).reshape(shape)
    try:
        augmenter = rendering.augmenter()
    except Exception as error:  # noqa: BLE001 - of a package; the loader has opened the same one
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    while True:
        task: _Task = connection.recv()
        is_filled = False
        with suppress(Exception):  # the thread meets it too, and knows what to do
            _render(task, rendering.pixels, augmenter, squares_NHWC[: len(task.samples)])
            is_filled = True
        connection.send(is_filled)


def _render(task: _Task, pixels: PixelSpec, augmenter: Augmenter, squares_BHWC: NDArray[np.uint8]) -> None:
    places = augmenter.places(task.start, len(task.samples)) or [pixels.center] * len(task.samples)
    files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in task.paths]
    try:
        for sample, place, square_HWC in zip(task.samples, places, squares_BHWC, strict=True):
            if isinstance(sample, bytes):
                encoded = sample
            else:
                number, offset, length = sample
                encoded = os.pread(files[number], length, offset)
                if len(encoded) != length:
                    raise EOFError(task.paths[number])
            pixels.render(encoded, place, square_HWC)
    finally:
        for file in files:
            os.close(file)
    augmenter.complete(squares_BHWC, task.start)
