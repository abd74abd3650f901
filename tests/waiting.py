"""Wait for what other processes bring about, and find these."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 900.0
"""Ends a hang; how long a busy machine takes for one step is no fault."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_REST = 19.0
"""Pause per CPU time of a look: to read a whole journal again and again would slow down what is waited for."""
Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    what: str = "a condition",
    *,
    deadline_s: float = DEADLINE_S,
    pause_s: float | None = None,
    tell: Callable[[], str] = str,
) -> Found:
    """Wait until a condition holds, and return what it returned.

    Args:
        what: what the condition means, for the error.
        pause_s: between two looks. By default it depends on what a look costs: give it where a look does something, or
            looks for something that does not last.
        tell: what else the error says.

    Raises:
        AssertionError: it does not hold after ``deadline_s``.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        used_s = _used_s()
        if found := condition():
            return found
        left_s = end_s - time.monotonic()
        assert left_s > 0, f"not after {deadline_s:g} s: {what}\n{tell()}"
        rest_s = min(max(_PAUSE_S, _REST * (_used_s() - used_s)), _LONGEST_PAUSE_S)
        time.sleep(min(rest_s if pause_s is None else pause_s, left_s))


def pids_below(temporary: Path) -> list[int]:
    """Processes whose temporary folder is this one, or below it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={temporary}" in entry.joinpath("environ").read_text():
                found.append(int(entry.name))
    return found


def _used_s() -> float:
    """CPU time of this thread, and of processes that have ended."""
    children = os.times()
    return time.thread_time() + children.children_user + children.children_system
