"""Processes that never outlive their owner, also when the owner is killed: pools, and helpers that are kept."""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Final

from orchestrator.core.errors import OrchestratorError

HELPER_VARIABLES: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""A helper has no GPU, and one thread per call of a numerical library."""
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM)
"""Sent to groups of processes; the owner ends its helpers by their sockets."""


@contextmanager
def owned_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose pending work is dropped at the end of the block.

    Raises:
        OrchestratorError: a process died; usually the machine has too little memory for so many.
    """
    # spawn: a fork of a process with threads (torch, boto3) may deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_follow_owner)
    try:
        yield pool
    except BrokenProcessPool as error:
        message = f"one of {num_processes} processes was killed, probably for lack of memory; use fewer and run again"
        raise OrchestratorError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_owner() -> None:
    """Ctrl-C is the owner's business; its death is ours: nothing else would wake a process that waits for work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = multiprocessing.parent_process()
    if owner is not None:
        threading.Thread(target=_end_with, args=(owner.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class HelperProcess:
    """A Python process that serves this one, over any number of connections; it ends when this process does.

    Args:
        entry: ``module:function``; the function gets a socket and takes the connections with ``accepted``.
    """

    def __init__(self, entry: str) -> None:
        self.pid = os.getpid()
        self._control, theirs = socket.socketpair()
        module, _, function = entry.partition(":")
        command = f"import socket; from {module} import {function}; {function}(socket.socket(fileno={theirs.fileno()}))"
        variables = {
            **os.environ,
            **HELPER_VARIABLES,
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path))),
            "PYTHONSAFEPATH": "1",  # files of the folder that we happen to be in may have the names of modules
        }
        # Blocked until the helper ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", command],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=variables,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def process_id(self) -> int:
        """Of the helper."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it is there, and ours: not that of a process that forked us."""
        return self.pid == os.getpid() and self._process.poll() is None

    def connect(self, num_bytes: int) -> tuple[Connection, mmap.mmap]:
        """A connection to it, and memory that both share; it may still be starting. Raises ``OSError``."""
        descriptor = os.memfd_create("shared")
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
            ours, theirs = socket.socketpair()
            with theirs:
                connection = Connection(ours.detach())
                socket.send_fds(self._control, [b"."], [theirs.fileno(), descriptor])
        finally:
            os.close(descriptor)
        return connection, memory

    def end(self) -> str:
        """How it ended, or that it lives."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=1)
            reason = ", perhaps for lack of memory" if status == -signal.SIGKILL else ""
            return f"process {self.process_id} has ended with status {status}{reason}"
        return f"process {self.process_id} has closed its connection"

    def close(self) -> None:
        """End it."""
        self._control.close()
        if self.pid == os.getpid():
            self._process.kill()  # it may still be loading
            self._process.wait()


_helpers: dict[str, HelperProcess] = {}
_helpers_lock = threading.Lock()


def helper(entry: str) -> HelperProcess:
    """The helper with this entry; one of each for a process. Raises ``OSError``: it cannot be started."""
    with _helpers_lock:
        found = _helpers.get(entry)
        if found is None or not found.is_alive():
            if found is not None:
                found.close()
            found = _helpers[entry] = HelperProcess(entry)
        return found


@atexit.register
def _close_helpers() -> None:
    for found in _helpers.values():
        found.close()


def accepted(control: socket.socket) -> Iterator[tuple[int, int]]:
    """For a helper: the descriptors of each connection and its memory, which are the caller's, until the owner ends."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    while True:
        received, descriptors, *_ = socket.recv_fds(control, 1, 2)
        if not received:
            return
        if len(descriptors) == 2:
            yield descriptors[0], descriptors[1]
            continue
        for descriptor in descriptors:  # there were too many open files for both
            os.close(descriptor)


def hang_up(connection: Connection) -> None:
    """Close a connection; the other side notices, also if a process that was forked from ours still holds it."""
    ours = socket.socket(fileno=connection.fileno())
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
    ours.detach()
    connection.close()
