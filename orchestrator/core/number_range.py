"""A range of numbers, once for the schema of the sweep file and once more for values that come another way."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """The numbers that a field takes; never NaN, an infinity or a boolean."""

    least: int
    excludes_least: bool = False
    most: int | None = None
    is_whole: bool = False
    is_optional: bool = False
    """Whether it may be None, which is no bound."""

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.is_optional
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        is_above = value > self.least if self.excludes_least else value >= self.least
        return is_above and value <= (sys.float_info.max if self.most is None else self.most)

    @property
    def bounds(self) -> dict[str, Any]:
        """Arguments of a field of the schema."""
        least = {"gt" if self.excludes_least else "ge": self.least}
        return least if self.most is None else {**least, "le": self.most}

    def __str__(self) -> str:
        number = "a whole number" if self.is_whole else "a number"
        least = f"above {self.least}" if self.excludes_least else f"from {self.least} on"
        return f"{number} {least}" + (f", at most {self.most}" if self.most is not None else "")
