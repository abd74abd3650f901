"""Seconds since the attempt began that this thread works on: what records of short jobs say of their speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_STARTED_S: ContextVar[float | None] = ContextVar("started_s", default=None)


@contextmanager
def running() -> Iterator[None]:
    """Let the stopwatch run until the body ends."""
    token = _STARTED_S.set(time.perf_counter())
    try:
        yield
    finally:
        _STARTED_S.reset(token)


def elapsed_s() -> float | None:
    """Seconds since it was started; None where it does not run."""
    started_s = _STARTED_S.get()
    return None if started_s is None else time.perf_counter() - started_s
