"""Times: by a clock that people and programs may set, also back; and between two checkpoints."""

from __future__ import annotations

import math


def is_time(at_s: float, now: float, every_s: float) -> bool:
    """Whether a time has come that was at most ``every_s`` away when it was set: also where the clock was put back."""
    return not now < at_s <= now + every_s


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time in all, to first order.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974: T = sqrt(2 C M) for a cost C of one checkpoint and a mean time M between failures, good while C is far below
    M.
    """
    return math.sqrt(2 * cost_s * mtbf_s)
