"""Times by a clock that people and programs may set, also back."""

from __future__ import annotations


def is_time(at_s: float, now: float, every_s: float) -> bool:
    """Whether a time has come that was at most ``every_s`` away when it was set: also where the clock was put back."""
    return not now < at_s <= now + every_s
