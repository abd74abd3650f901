"""Figures as SVG, drawn here: they need no script on a page, and equal reports give equal bytes.

A figure is a part of the page. In a file, several figures share one sheet, to which no style of the page applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Final

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")  # Okabe and Ito
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 280, 56, 28, 60
_SHEET_WIDTH: Final = 1340.0
_GAP: Final = 16.0
FIGURES_STYLE: Final = (
    ".figures { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1rem; } "
    ".figures svg { max-width: 100%; height: auto; } .figures text { font: 11px sans-serif; fill: var(--ink); }"
)
"""Of a page, for figures inside of an element of the class ``figures``."""
_SHEET_STYLE = "text { font: 11px sans-serif; fill: #1c2430; }"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing of a size in pixels, with what it is called."""

    label: str
    width: float
    height: float
    parts: tuple[str, ...]
    is_second: bool = False
    """Whether it belongs beside the one before."""

    def svg(self, *, x: float = 0, y: float = 0) -> str:
        """The element; a place is that inside of a sheet."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        place = f' x="{x:.0f}" y="{y:.0f}"' if x or y else ""
        start = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self.label)}"{place} {size}>'
        return f"{start}{''.join(self.parts)}</svg>"


def side_by_side(figures: Sequence[Figure]) -> str:
    """All figures as one element of a page, in rows, in their order; empty without any."""
    pairs: list[str] = []
    for figure in figures:
        if figure.is_second and pairs:
            pairs[-1] = f'<div class="figures">{pairs[-1]}{figure.svg()}</div>'
        else:
            pairs.append(figure.svg())
    return f'<div class="figures">{"".join(pairs)}</div>' if pairs else ""


def sheet(figures: Sequence[Figure]) -> bytes:
    """All figures as one file of SVG, in rows, in their order."""
    x = y = height = 0.0
    placed = []
    for figure in figures:
        if x and x + figure.width > _SHEET_WIDTH:
            x, y, height = 0.0, y + height + _GAP, 0.0
        placed.append(figure.svg(x=x, y=y))
        x, height = x + figure.width + _GAP, max(height, figure.height)
    style = f"<style>{_SHEET_STYLE}</style>"
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    whole = Figure(label="figures", width=_SHEET_WIDTH, height=y + height, parts=(style, white, *placed))
    return whole.svg().encode()


Point = tuple[float, float, float]
"""Position on the horizontal axis, value, and spread to each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAxes:
    """The axes of lines; ``ticks`` name places of the horizontal one."""

    ends: tuple[float, float]
    ticks: Mapping[float, str]
    top: float
    is_log: bool = False
    bottom: float = 0.0
    """Where the vertical axis begins; above 0 it is logarithmic."""

    def x(self, at: float) -> float:
        """Pixels from the left."""
        first, last, place = (log10(one) if self.is_log else one for one in (*self.ends, at))
        return _LEFT + (_WIDTH - _LEFT - 24) * (place - first) / ((last - first) or 1.0)

    def y(self, value: float) -> float:
        """Pixels from above."""
        if self.bottom:
            share = log10(max(self.bottom, value) / self.bottom) / log10(self.top / self.bottom)
        else:
            share = max(0.0, value) / self.top
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def parts(self) -> list[str]:
        """Both axes with their numbers."""
        left, right, zero = self.x(self.ends[0]), self.x(self.ends[1]), self.y(self.bottom)
        named = [share * self.top for share in (0.0, 0.5, 1.0)]
        if self.bottom:
            decades = range(round(log10(self.bottom)), round(log10(self.top)) + 1)
            named = [10.0**decade for decade in decades[:: 1 + len(decades) // 8]]
        shares = [(self.y(value) + 4, f"{value:.3g}") for value in named]
        drawn = f'<path d="M{left:.1f} {self.y(self.top):.1f}V{zero:.1f}H{right:.1f}"'
        return [
            f'{drawn} fill="none" stroke="#888888"/>',
            *(text_at(self.x(at), zero + 14, text, anchor="middle") for at, text in self.ticks.items()),
            *(text_at(left - 5, height, text, anchor="end") for height, text in shares),
        ]


def line_figure(
    title: str,
    ticks: Mapping[float, str],
    lines: Mapping[str, Sequence[Point]],
    *,
    is_log: bool = False,
    is_log_upwards: bool = False,
    has_bands: bool = False,
    numbers: Mapping[str, int] | None = None,
    note: str = "",
) -> Figure:
    """Lines by name, from 0 upwards, with their spread as bars or bands.

    Args:
        title: what is above it.
        ticks: names of places of the horizontal axis.
        lines: points from left to right.
        is_log: whether the horizontal axis is logarithmic.
        is_log_upwards: whether the vertical axis is logarithmic and begins at a power of ten; values of 0 are left out.
        has_bands: spreads are bands along lines and not bars.
        numbers: of names, so that a name has one colour in all figures of a group; none = by their order here.
        note: what is below it, such as what the spreads are.
    """
    highest = max(value + spread for line in lines.values() for _, value, spread in line)
    places = [*ticks, *(at for line in lines.values() for at, _, _ in line)]
    top, bottom = highest * 1.05 or 1.0, 0.0
    if is_log_upwards:
        lines = {name: [point for point in line if point[1] > 0] for name, line in lines.items()}
        lowest = min(value for line in lines.values() for _, value, _ in line)
        top, bottom = 10.0 ** ceil(log10(highest)), 10.0 ** floor(log10(lowest))
    axes = LineAxes(ends=(min(places), max(places)), ticks=ticks, top=top, is_log=is_log, bottom=bottom)
    parts = [text_at(_WIDTH / 2, 16, title, anchor="middle"), *axes.parts()]
    for number, (name, line) in enumerate(lines.items()):
        color = hue(number if numbers is None else numbers[name])
        parts += _band(axes, line, color) if has_bands else _bars(axes, line, color)
        parts += _line(axes, line, color)
        at_x, at_y = _LEFT + (number % 3) * 120, _HEIGHT - 26 + 14 * (number // 3)
        parts.append(f'<rect x="{at_x}" y="{at_y - 8}" width="9" height="9" fill="{color}"/>')
        parts.append(text_at(at_x + 13, at_y, shortened(name, 18)))
    height = _HEIGHT + 14 * ((len(lines) - 1) // 3)
    if note:
        parts.append(text_at(_WIDTH / 2, height - 8, note, anchor="middle"))
        height += 6
    return Figure(label=title, width=_WIDTH, height=height, parts=tuple(parts))


def _line(axes: LineAxes, line: Sequence[Point], color: str) -> list[str]:
    places = [(axes.x(at), axes.y(value)) for at, value, _ in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>', *dots]


def _bars(axes: LineAxes, line: Sequence[Point], color: str) -> list[str]:
    ends = [(axes.x(at), axes.y(value - spread), axes.y(value + spread)) for at, value, spread in line if spread]
    return [f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{color}"/>' for x, low, high in ends]


def _band(axes: LineAxes, line: Sequence[Point], color: str) -> list[str]:
    above = [(axes.x(at), axes.y(value + spread)) for at, value, spread in line]
    below = [(axes.x(at), axes.y(value - spread)) for at, value, spread in reversed(line)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*above, *below))
    return [f'<polygon points="{points}" fill="{color}" fill-opacity="0.15"/>']


def hue(number: int) -> str:
    """Eight colours that colour-blind readers tell apart, then others by the golden angle."""
    return _COLORS[number] if number < len(_COLORS) else f"hsl({number * 137.508 % 360:.0f} 60% 45%)"


def shortened(name: str, length: int = 16) -> str:
    """A name that is no longer than this many characters: its middle goes, since names differ at their ends."""
    kept = length - 1
    return name if len(name) <= length else f"{name[: kept // 2]}…{name[-(kept - kept // 2) :]}"


def text_at(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    """Text at a place, with more attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
