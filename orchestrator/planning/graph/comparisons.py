"""How many comparisons a table of a report makes, and how the 5 % that they may err by together is shared; pure.

Comparisons with the baseline are what a sweep asks, so they share at least half of the level. A tenth of the 5 % is
given to no comparison: Bonferroni's bound is nearly reached where seeds are few (4.9 % of null sweeps at 3 seeds), and
errors of real runs are not quite normal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

CONFIDENCE: Final = 0.95
ALPHA: Final = 1 - CONFIDENCE
METHOD: Final = "paired t tests over pretrain seeds, Bonferroni"
_BASELINE_SHARE: Final = 0.5
_USED_SHARE: Final = 0.9
"""Of the 5 %; the rest is the reserve. A single comparison needs none: it is an ordinary test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """Those of one table that can be tested."""

    num_with_baseline: int
    num_others: int

    @classmethod
    def of_spaces(cls, num_spaces: int, *, has_baseline: bool) -> Self:
        """Every pair of so many label spaces, one of which may be the baseline."""
        with_baseline = num_spaces - 1 if has_baseline else 0
        return cls(num_with_baseline=with_baseline, num_others=num_spaces * (num_spaces - 1) // 2 - with_baseline)

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_with_baseline + self.num_others

    @property
    def shares(self) -> tuple[float, float]:
        """Which part of the 5 % each comparison with the baseline and each other one has."""
        whole = self.total
        if whole < 2:
            return (1.0, 1.0)
        if not self.num_with_baseline or not self.num_others:
            return (_USED_SHARE / whole, _USED_SHARE / whole)
        of_baseline = max(_BASELINE_SHARE, self.num_with_baseline / whole)
        return _USED_SHARE * of_baseline / self.num_with_baseline, _USED_SHARE * (1 - of_baseline) / self.num_others

    @property
    def level(self) -> float:
        """The p-value below which a comparison with the baseline is established; without a baseline, any one."""
        with_baseline, other = self.shares
        return ALPHA * (with_baseline if self.num_with_baseline else other)
