"""Locks that the kernel drops when their holder dies, however it dies, and pins made of them.

A lock (``flock(2)``) belongs to an open file, so threads exclude each other as processes do. It is given up by closing
the file, never by unlocking: a forked child shares its parent's open files.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.core.errors import StorageTimeoutError

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
_LOCK_TIMEOUT_S = 60.0
"""Locks that are waited for are held for milliseconds; a holder that was stopped must not stop the node."""

Check = Callable[[], None]
"""Called between waits; ends the wait by raising."""


class LockTimeoutError(StorageTimeoutError):
    """Somebody holds a lock that is held for milliseconds only; its process must have been stopped."""


class Hold(IntEnum):
    """How a file is locked."""

    SHARED = fcntl.LOCK_SH
    EXCLUSIVE = fcntl.LOCK_EX


def go_on() -> None:
    """The check that never ends anything."""


def try_lock(descriptor: int, hold: Hold) -> bool:
    """Lock an open file, or change its lock, unless another open file is in the way."""
    try:
        fcntl.flock(descriptor, hold | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int, hold: Hold, *, check: Check = go_on, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
    """Wait for a lock. Raises ``LockTimeoutError`` after a time for which nobody at work keeps it."""
    deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not try_lock(descriptor, hold):
        check()
        if time.monotonic() > deadline_s:
            message = (
                f"a lock of the node's cache was held for {timeout_s:g} s; is a process stopped (SIGSTOP)? Resume it"
            )
            raise LockTimeoutError(message)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class Pin:
    """A file of the cache that stays where it is while this object lives and is open.

    Dropping the last reference closes it, so a thread that is reading is never cut off by another one that lets go.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        """Open for reading, shared: use ``read``."""
        self._close = weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go. What is mapped or open elsewhere stays readable on Linux even after an eviction."""
        self._close()

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; fewer at the end of the file."""
        return os.pread(self.descriptor, length, offset)
