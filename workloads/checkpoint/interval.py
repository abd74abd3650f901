"""How often to save, from what a checkpoint costs and how often runs die."""

from __future__ import annotations

import math


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time in all, to first order.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974: T = sqrt(2 C M) for a cost C of one checkpoint and a mean time M between failures, good while C is far below
    M.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


class AutoInterval:
    """Says when the next checkpoint is due; the first one is due at once, because only it tells what one costs."""

    def __init__(self, mtbf_s: float) -> None:
        self._mtbf_s = mtbf_s
        self._saved_at_s = -math.inf

    def is_due(self, *, cost_s: float, now_s: float) -> bool:
        """Whether the interval is over; ``now_s`` by any clock that is always the same."""
        return now_s - self._saved_at_s >= young_interval_s(cost_s, self._mtbf_s)

    def saved(self, now_s: float) -> None:
        """A checkpoint was taken; the next interval begins."""
        self._saved_at_s = now_s
