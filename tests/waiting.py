"""Wait for what other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 900.0
"""Ends a hang; how long a busy machine takes for one step is no fault."""
_POLL_S = 0.05
_REST = 19.0
"""Pause per CPU time of a look: to read a whole journal again and again would slow down what is waited for."""
Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found], what: str = "", *, deadline_s: float = DEADLINE_S, tell: Callable[[], str] = str
) -> Found:
    """Wait until a condition holds, and return what it returned.

    Raises:
        AssertionError: it does not hold after ``deadline_s``; the message has ``what`` and what ``tell`` returns.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        used_s = time.process_time()
        if found := condition():
            return found
        assert time.monotonic() < end_s, f"not after {deadline_s:g} s: {what}\n{tell()}"
        time.sleep(max(_POLL_S, _REST * (time.process_time() - used_s)))
