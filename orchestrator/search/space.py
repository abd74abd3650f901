"""The values that a search tries, and how a number in [0, 1) becomes one of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

_DIGITS = 6
"""Significant digits of a float: recipes stay readable, and no search needs more."""


class Scale(StrEnum):
    """How values lie between two ends."""

    VALUES = "values"
    UNIFORM = "uniform"
    LOG = "log"
    INTEGER = "integer"
    LOG_INTEGER = "log_integer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One field and its values: a list of them, or a range with both ends."""

    field: str
    scale: Scale
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def from_json(cls, field: str, document: Mapping[str, Any]) -> Self:
        """From ``{"values": [...]}`` or ``{"uniform" | "log" | "integer" | "log_integer": [low, high]}``."""
        ((scale, content),) = document.items()
        if scale == Scale.VALUES:
            return cls(field=field, scale=Scale.VALUES, values=tuple(content))
        return cls(field=field, scale=Scale(scale), low=content[0], high=content[1])

    @property
    def size(self) -> float:
        """Number of different values."""
        if self.scale is Scale.VALUES:
            return len(self.values)
        return self.high - self.low + 1 if self.scale in {Scale.INTEGER, Scale.LOG_INTEGER} else math.inf

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that stand for all of them when a space is checked."""
        if self.scale is Scale.VALUES:
            return self.values
        return (self.at(0.0), self.at(math.nextafter(1.0, 0.0)))

    def at(self, unit: float) -> Any:  # noqa: ANN401 - recipe fields are of any JSON type
        """The value at a share of the way, ``0 <= unit < 1``."""
        match self.scale:
            case Scale.VALUES:
                return self.values[int(unit * len(self.values))]
            case Scale.UNIFORM:
                return _rounded(self.low + unit * (self.high - self.low), self)
            case Scale.LOG:
                return _rounded(self.low * (self.high / self.low) ** unit, self)
            case Scale.INTEGER:
                return int(self.low + math.floor(unit * (self.high - self.low + 1)))
            case Scale.LOG_INTEGER:
                # From half an integer below to half a one above, so that both ends are as likely as their neighbours.
                low, high = self.low - 0.5, self.high + 0.5
                return int(min(self.high, max(self.low, math.floor(low * (high / low) ** unit + 0.5))))


def _rounded(value: float, dimension: Dimension) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return min(max(rounded, dimension.low), dimension.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All dimensions, in the order of their fields' names."""

    dimensions: tuple[Dimension, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Mapping[str, Any]]) -> Self:
        """From fields and their dimensions."""
        return cls(dimensions=tuple(Dimension.from_json(field, document[field]) for field in sorted(document)))

    @property
    def size(self) -> float:
        """Number of different combinations."""
        return math.prod(dimension.size for dimension in self.dimensions)

    def at(self, units: Mapping[str, float]) -> dict[str, Any]:
        """The combination at a place of the unit cube."""
        return {dimension.field: dimension.at(units[dimension.field]) for dimension in self.dimensions}
