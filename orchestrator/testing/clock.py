"""A clock that moves only when a test moves it."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in unix seconds."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, duration_s: float) -> None:
        """Let time pass."""
        self.now_s += duration_s
