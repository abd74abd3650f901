"""Processes that decode and augment for the threads of a loader, where a GPU trains.

Threads that decode take the interpreter's lock several times per image, and the thread that trains needs it for every
kernel that it launches (docs/data.md). Here a thread of the loader only says which bytes of which files make some
consecutive samples, waits without the lock, and copies their pixels out of memory that it shares with one process.

Invariants:

- Pixels are the same from a thread and from a process: both run the same code.
- Whatever a process cannot do (it is still starting, it was killed, a sample cannot be decoded), its thread does, so
  each error is raised, counted and repaired in one place.
- Processes are forked by one server process, which has no threads and has loaded what they need: they start within
  milliseconds and share that memory. A process ends when its loader closes the socket or is killed. The server ends
  with the process of the loader.
"""

from __future__ import annotations

import gc
import logging
import math
import mmap
import os
import pickle
import queue
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from workloads.data.augment import Augmenter, AugmentSpec
from workloads.data.cache import FilePart
from workloads.data.pixels import PixelSpec
from workloads.data.reasons import BadSampleError
from workloads.runtime.processes import HELPER_VARIABLES, accepted, hang_up, helper
from workloads.runtime.streams import Stage

_LOG = logging.getLogger(__name__)
_ENTRY: Final = "workloads.data.decode_pool:serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSpec:
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
        spec: what the loader renders.
        num_samples: the most that one call of ``fill`` fills.
    """

    def __init__(self, num_processes: int, spec: RenderSpec, num_samples: int) -> None:
        self.num_samples = num_samples
        side = spec.pixels.image_size
        self._shape = (num_samples, side, side, 3)
        self._idle: queue.SimpleQueue[_DecodeProcess] = queue.SimpleQueue()
        self._tries_left = num_processes
        """Processes that may still end, and tasks that may still fail. At 0, threads do all."""
        try:
            self._hello = pickle.dumps((list(map(str, sys.path)), dict(os.environ), spec, self._shape))
        except Exception as error:  # noqa: BLE001 - arguments of a plug-in may be anything
            self._note(f"what it needs cannot be sent to it: {error}", num_tries=num_processes + 1)
            return
        for _ in range(num_processes):
            self._start()

    def fill(
        self, find: Callable[[], Sequence[FilePart | Future[bytes]]], start: int, squares_BHWC: NDArray[np.uint8]
    ) -> list[int] | None:
        """Write the pixels of the positions from ``start`` on, whose samples ``find`` finds.

        Returns the slots whose samples cannot be decoded: what their squares hold means nothing. None if no square is
        written. Raises what ``find`` and its futures raise.
        """
        process = self._take()
        if process is None:
            return None
        try:
            found = find()  # its pins keep the files until they are read
            answer = process.run(_task(found, start))
            if isinstance(answer, str):
                self._note(answer)
                return None
            if answer is not None:
                np.copyto(squares_BHWC, process.squares_NHWC[: len(squares_BHWC)])
            return answer
        finally:
            self._give_back(process)

    def close(self) -> None:
        """End the processes; no thread may use them any more."""
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _start(self) -> None:
        try:
            connection, memory = helper(_ENTRY).connect(max(len(self._hello), math.prod(self._shape)))
            # Not through the socket, which may be too small for it as long as nobody reads.
            memory[: len(self._hello)] = self._hello
            self._idle.put(_DecodeProcess(connection, memory, self._shape))
        except OSError as error:  # too many open files, or no memory
            self._note(f"the process cannot be started: {error}")

    def _take(self) -> _DecodeProcess | None:
        """A process that nobody uses and that has started."""
        for _ in range(self._idle.qsize() if self._tries_left > 0 else 0):
            with suppress(queue.Empty):
                process = self._idle.get_nowait()
                if process.has_started():
                    return process
                self._give_back(process)
        return None

    def _give_back(self, process: _DecodeProcess) -> None:
        if not process.has_ended:
            self._idle.put(process)
            return
        process.close()
        self._note(process.problem or "its process has ended")
        if not process.problem and self._tries_left > 0:
            self._start()

    def _note(self, problem: str, num_tries: int = 1) -> None:
        self._tries_left -= num_tries
        _LOG.warning("a thread decodes images that a process should decode: %s", problem)
        if self._tries_left <= 0 < self._tries_left + num_tries:
            _LOG.warning("all images are decoded in threads from now on, which may slow down training on a GPU")


class _DecodeProcess:
    """The loader's end of one process."""

    def __init__(self, connection: Connection, memory: mmap.mmap, shape: tuple[int, ...]) -> None:
        self.squares_NHWC = np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape)).reshape(shape)
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

    def run(self, task: _Task) -> list[int] | str | None:
        """The slots without pixels, or why none has any; None if the process has ended."""
        self.has_ended = True  # unless its answer is read: the next task must not get it
        try:
            self._connection.send(task)
            answer: list[int] | str = self._connection.recv()
        except (EOFError, OSError):
            return None
        self.has_ended = False
        return answer

    def close(self) -> None:
        """End the process, after its current task."""
        hang_up(self._connection)


def _task(found: Sequence[FilePart | Future[bytes]], start: int) -> _Task:
    numbers: dict[int, int] = {}
    samples = [
        (numbers.setdefault(part.pin.descriptor, len(numbers)), part.offset, part.length)
        if isinstance(part, FilePart)
        else part.result()
        for part in found
    ]
    # Of an open file, not of the cache: somebody may have emptied that.
    return _Task(start=start, paths=[f"/proc/{os.getpid()}/fd/{number}" for number in numbers], samples=samples)


def serve(control: socket.socket) -> None:
    """Fork a process for each connection, whose memory is for its squares."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets ended processes at once
    gc.freeze()  # or the first collection would copy all memory that processes share
    for connection, memory in accepted(control):
        with suppress(OSError):  # no process can be forked, which the loader notices
            if os.fork() == 0:
                try:
                    control.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _work(Connection(connection), memory)
                except (EOFError, OSError):  # the loader has left
                    pass
                finally:
                    os._exit(0)
        os.close(connection)
        os.close(memory)


def _work(connection: Connection, memory_descriptor: int) -> None:
    memory = mmap.mmap(memory_descriptor, 0)
    # The code of a sweep, and what it reads of the environment, may be newer than the server.
    sys.path[:], variables, spec, shape = pickle.loads(memory)  # noqa: S301 - the loader wrote it
    os.environ.clear()
    os.environ.update({**variables, **HELPER_VARIABLES})
    squares_NHWC = np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape)).reshape(shape)
    try:
        augmenter = spec.augmenter()
    except Exception as error:  # noqa: BLE001 - of a package; the loader has opened the same one
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    while True:
        task: _Task = connection.recv()
        try:
            answer: list[int] | str = _render(task, spec.pixels, augmenter, squares_NHWC[: len(task.samples)])
        except Exception as error:  # noqa: BLE001 - the thread meets it too, and raises it
            answer = f"{type(error).__name__}: {error}"
        connection.send(answer)


def _render(task: _Task, pixels: PixelSpec, augmenter: Augmenter, squares_BHWC: NDArray[np.uint8]) -> list[int]:
    """Slots that stay without pixels, because their samples cannot be decoded."""
    places = augmenter.places(task.start, len(task.samples)) or [pixels.center] * len(task.samples)
    bad = []
    with ExitStack() as stack:
        files = [stack.enter_context(Path(path).open("rb", buffering=0)) for path in task.paths]
        for slot, (sample, place) in enumerate(zip(task.samples, places, strict=True)):
            try:
                pixels.render(_encoded(sample, files), place, squares_BHWC[slot])
            except BadSampleError:
                bad.append(slot)
    if not bad:
        augmenter.complete(squares_BHWC, task.start)
        return bad
    for slot in set(range(len(squares_BHWC))) - set(bad):
        augmenter.complete(squares_BHWC[slot : slot + 1], task.start + slot)
    return bad


def _encoded(sample: bytes | tuple[int, int, int], files: Sequence[IO[bytes]]) -> bytes:
    if isinstance(sample, bytes):
        return sample
    number, offset, length = sample
    encoded = os.pread(files[number].fileno(), length, offset)
    if len(encoded) != length:
        raise EOFError(f"{length} bytes from {offset} of {files[number].name}")
    return encoded
