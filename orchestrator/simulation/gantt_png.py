"""A Gantt chart as a picture."""

from __future__ import annotations

from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from orchestrator.simulation.gantt import Bar, Chart

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, told apart by colour-blind people too."""
INTERRUPTED = "#000000"


def render_png(chart: Chart, title: str) -> bytes:
    """Bars by kind; a black end is work that was lost or an attempt that failed."""
    figure = Figure(figsize=(14, min(40.0, 2.5 + chart.num_rows * 0.03)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, kind in enumerate(chart.kinds):
        bars = [bar for bar in chart.bars if bar.kind == kind]
        axes.add_collection(
            PolyCollection(
                [_corners(bar) for bar in bars], facecolors=colour_of(number), edgecolors="white", linewidths=0.2
            )
        )
    ends = [_end_mark(bar, chart.end_s) for bar in chart.bars if bar.is_interrupted]
    axes.add_collection(PolyCollection(ends, facecolors=INTERRUPTED, edgecolors="none"))
    axes.set_xlim(0.0, chart.end_s / 3600.0 or 1.0)
    axes.set_ylim(chart.num_rows or 1, 0)
    axes.set_xlabel("hours since the submit")
    axes.set_ylabel("GPUs, by node")
    axes.set_title(title, loc="left")
    patches = [Patch(color=colour_of(number), label=kind) for number, kind in enumerate(chart.kinds)]
    patches += [Patch(color=INTERRUPTED, label="interrupted")] if ends else []
    if patches:
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def colour_of(number: int) -> str:
    """Colour of the n-th kind."""
    return COLOURS[number % len(COLOURS)]


def _corners(bar: Bar) -> list[tuple[float, float]]:
    left, right = bar.start_s / 3600.0, bar.end_s / 3600.0
    top, bottom = float(bar.row), float(bar.row + bar.num_rows)
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _end_mark(bar: Bar, end_s: float) -> list[tuple[float, float]]:
    """The last part of a bar, wide enough to be seen."""
    width_h = end_s / 3600.0 / 400.0
    right = bar.end_s / 3600.0
    top, bottom = float(bar.row), float(bar.row + bar.num_rows)
    return [(right - width_h, top), (right, top), (right, bottom), (right - width_h, bottom)]
