"""The figures: error after transfer against the number of pretraining classes, and the power of a design."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from orchestrator.planning.estimate.power import Comparisons, Design, Noise, power_of
from orchestrator.planning.graph.design import number_of
from orchestrator.report.render.columns import describe_transfer, is_tied
from orchestrator.report.render.numbers import among_complete, in_brackets, in_words, number
from orchestrator.report.render.other_tables import lacking
from orchestrator.report.results import EffectTable, FactorReport, FactorTable, Report, Row, Table
from orchestrator.report.statistics.intervals import is_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
_MARKERS = ("o", "s", "D", "^", "v", "P")
_BASELINE_COLOR = "#555555"
_FAINT_COLOR = "#999999"
_PALE: Final = 0.65
"""Share of white in the markers of rows that lack runs."""
SPREAD: Final = "± standard deviation over all runs, not a confidence interval"
"""What error bars and bands of curves are."""
_PANEL_WIDTH_IN, _PANEL_HEIGHT_IN, _MAX_COLUMNS = 4.6, 3.7, 3
_PNG_DPI = 200
_LOG_RATIO = 30.0
"""Of the largest to the smallest number of a factor from which on its axis is logarithmic."""
_MAX_PANELS = 12
_MAX_LINES_NAMED = 24
"""Of a panel of factors: a longer legend leaves no room for the panel, and colours repeat long before."""
_MIN_TICK_DISTANCE = 0.07
"""Fraction of the axis below which the second of two tick labels is left out."""
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "granularity-curve",  # equal reports give equal files
}
_TRANSFER_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
_LEAST_SEEDS, _MOST_SEEDS = 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One label space on the curve, in the unit of the axis (percent for fractions)."""

    label_space: str
    granularity: int
    mean: float
    std: float
    """0 where it is unknown: no bar is drawn."""
    is_complete: bool = True
    """Whether every planned run is in the mean."""


def draw_curve(report: Report) -> Figure:
    """Draw a panel per transfer of final weights on all labels. Needs no display and touches no global figure.

    Encode it with ``encode_png`` or ``encode_svg``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    tables = report.headlines
    count = max(1, len(tables))
    columns = min(count, _MAX_COLUMNS)
    rows = -(-count // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_PANEL_WIDTH_IN * columns, _PANEL_HEIGHT_IN * rows))
        panels = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
        for panel, table in zip(panels, tables, strict=False):
            _draw_panel(panel, table)
        if not tables:
            _draw_empty(panels[0], "no transfer in this sweep")
        _name_spread(figure, tables)
        _lay_out(figure)
    return figure


def _name_spread(figure: Figure, tables: Sequence[Table]) -> None:
    """Say below the panels what their bars are, and the band of the baseline."""
    if any(row.summary and row.summary.std for table in tables for row in table.rows):
        baselines = [table.baseline_row for table in tables]
        has_band = any(row and row.summary and row.summary.std for row in baselines)
        figure.supxlabel(f"bars{' and band' * has_band}: {SPREAD}", fontsize=7, color=_BASELINE_COLOR)


def encode_png(figure: Figure) -> bytes:
    """The figure as PNG, the same bytes for the same report."""
    return _encode(figure, "png", {"Software": None})


def encode_svg(figure: Figure) -> bytes:
    """The figure as SVG, the same bytes for the same report."""
    return _encode(figure, "svg", {"Date": None})


def curve_points(rows: Iterable[Row], metric: str) -> dict[str, list[CurvePoint]]:
    """Points by series, each ordered by granularity; rows without a result or granularity are left out."""
    scale = 100 if is_fraction(metric) else 1
    series: dict[str, list[CurvePoint]] = {}
    for row in rows:
        if row.summary is not None and row.granularity is not None:
            mean, std = scale * row.summary.mean, scale * (row.summary.std or 0.0)
            point = CurvePoint(
                label_space=row.label_space,
                granularity=row.granularity,
                mean=mean,
                std=std,
                is_complete=row.is_complete,
            )
            series.setdefault(row.series, []).append(point)
    return {name: sorted(points, key=lambda point: point.granularity) for name, points in series.items()}


def _encode(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    import matplotlib as mpl

    file = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(file, format=kind, dpi=_PNG_DPI, metadata=metadata)
    return file.getvalue()


def _lay_out(figure: Figure) -> None:
    """Place the panels, once. With a layout engine of its own, a figure is drawn twice for each file."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ConstrainedLayoutEngine().execute(figure)


def _draw_panel(panel: Axes, table: Table) -> None:
    panel.set_title(describe_transfer(table), loc="left")
    if isinstance(table, FactorTable):
        if table.pretrain:  # the whole title would not fit
            panel.set_title(f"{table.transfer}: {table.pretrain}", loc="left")
        _draw_factor_panel(panel, table)
        return
    series = curve_points(table.rows, table.metric)
    if not series:
        _draw_empty(panel, "no row with a number of classes: see the table" if table.ranked else "no result yet")
        return
    panel.set_xscale("log")
    for index, (name, points) in enumerate(series.items()):
        _draw_series(panel, name, points, index)
    placed = [(point, index) for index, line in enumerate(series.values()) for point in line]
    _draw_lacking(panel, [(point.granularity, point.mean, index) for point, index in placed if not point.is_complete])
    _draw_published(panel, table, list(series))
    _draw_baseline(panel, table)
    _draw_one_pass(panel, table)
    _draw_levels(panel, table, len(series))
    _draw_optimum(panel, table)
    points = [point for point, _ in placed]
    _set_ticks(panel, sorted({point.granularity for point in points}))
    _set_limits(panel, points, table)
    panel.set_xlabel("pretraining granularity G [classes]")
    name = table.metric.replace("val_", "validation ").replace("_", " ")
    panel.set_ylabel(f"{name}{in_brackets(table.metric)}")
    panel.grid(visible=True, axis="y", linewidth=0.5, alpha=0.35)
    # Under the axis: inside, it would cover the baseline or a point sooner or later.
    panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorAxis:
    """Positions of the values of a factor on an axis: numbers at their value, other values side by side."""

    values: tuple[str, ...]
    positions: tuple[float, ...]
    is_log: bool

    @classmethod
    def of(cls, values: Sequence[str]) -> FactorAxis:
        """Numbers in their order, on a log axis where the largest is 30 times the smallest or more."""
        unique = tuple(dict.fromkeys(values))
        numbers = [number_of(value) for value in unique]
        if not unique or any(number is None for number in numbers):
            return cls(values=unique, positions=tuple(map(float, range(len(unique)))), is_log=False)
        placed = sorted((number or 0.0, value) for number, value in zip(numbers, unique, strict=True))
        positions = tuple(number for number, _ in placed)
        is_log = positions[0] > 0 and positions[-1] / positions[0] >= _LOG_RATIO
        return cls(values=tuple(value for _, value in placed), positions=positions, is_log=is_log)

    def set_on(self, panel: Axes, title: str) -> None:
        """Scale, ticks and title of a panel's axis."""
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

        panel.set_xscale("log" if self.is_log else "linear")
        panel.xaxis.set_major_locator(FixedLocator(list(self.positions)))
        panel.xaxis.set_major_formatter(FixedFormatter(list(self.values)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.margins(x=0.12)
        panel.set_xlabel(title)


def factor_lines(table: FactorTable) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and standard deviation by value of the first factor of the rows, for each combination of the others."""
    scale = 100 if is_fraction(table.metric) else 1
    lines: dict[str, dict[str, tuple[float, float]]] = {}
    for values, row in zip(table.row_values, table.rows, strict=True):
        if row.summary:
            found = scale * row.summary.mean, scale * (row.summary.std or 0.0)
            lines.setdefault(", ".join(values[1:]), {})[values[0]] = found
    return lines


def _draw_factor_panel(panel: Axes, table: FactorTable) -> None:
    """The first factor of the rows along the axis, a line for each combination of the others."""
    lines = factor_lines(table)
    if not lines:
        _draw_empty(panel, "no result yet")
        return
    axis = FactorAxis.of([value for points in lines.values() for value in points])
    for index, (name, points) in enumerate(lines.items()):
        _draw_factor_line(panel, axis, name or table.metric, points, index)
    places, numbers = dict(zip(axis.values, axis.positions, strict=True)), {name: at for at, name in enumerate(lines)}
    lacks = [
        (places[values[0]], _scaled(row.summary.mean, table.metric), numbers[", ".join(values[1:])])
        for values, row in zip(table.row_values, table.rows, strict=True)
        if row.summary and not row.is_complete
    ]
    _draw_lacking(panel, lacks)
    _draw_baseline(panel, table)
    axis.set_on(panel, table.row_factors[0])
    _finish_factor_panel(panel, table.metric)


def _draw_factor_line(
    panel: Axes, axis: FactorAxis, name: str, points: Mapping[str, tuple[float, float]], index: int
) -> None:
    placed = [
        (place, *points[value]) for value, place in zip(axis.values, axis.positions, strict=True) if value in points
    ]
    panel.errorbar(
        [place for place, _, _ in placed],
        [mean for _, mean, _ in placed],
        yerr=[std for _, _, std in placed] if any(std for _, _, std in placed) else None,
        label=name,
        color=_COLORS[index % len(_COLORS)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=5,
        linewidth=1.5,
        elinewidth=1.1,
        capsize=3,
        zorder=3,
    )


def _finish_factor_panel(panel: Axes, metric: str) -> None:
    name = metric.replace("val_", "validation ").replace("_", " ")
    panel.set_ylabel(f"{name}{in_brackets(metric)}")
    panel.grid(visible=True, axis="y", linewidth=0.5, alpha=0.35)
    if len(panel.get_legend_handles_labels()[1]) <= _MAX_LINES_NAMED:
        panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)


def draw_effects(report: FactorReport) -> Figure:
    """Interaction plots: a panel per transfer and pair of factors, mean over all other factors and seeds.

    All points of a panel are means over the same seeds and the same combinations of the other factors, so that parallel
    lines are effects that do not depend on each other. The first ``_MAX_PANELS`` panels are drawn.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    wanted = [
        (table, first, second)
        for table in report.effects
        for first, second in (list(combinations(table.factors, 2)) or [(next(iter(table.factors), ""), "")])
    ][:_MAX_PANELS]
    count = max(1, len(wanted))
    columns = min(count, _MAX_COLUMNS)
    rows = -(-count // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_PANEL_WIDTH_IN * columns, _PANEL_HEIGHT_IN * rows))
        panels = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
        for panel, (table, first, second) in zip(panels, wanted, strict=False):
            _draw_interaction(panel, table, first, second)
        _align(panels, [table for table, _, _ in wanted])
        if not wanted:
            _draw_empty(panels[0], "no result yet")
        _lay_out(figure)
    return figure


def _align(panels: Sequence[Axes], tables: Sequence[EffectTable]) -> None:
    """One range of values for all panels of a transfer: cut to its own, a small effect would look large."""
    limits: dict[str, tuple[float, float]] = {}
    for panel, table in zip(panels, tables, strict=False):
        low, high = panel.get_ylim()
        known = limits.get(table.place.transfer, (low, high))
        limits[table.place.transfer] = min(low, known[0]), max(high, known[1])
    for panel, table in zip(panels, tables, strict=False):
        panel.set_ylim(*limits[table.place.transfer])


def _draw_interaction(panel: Axes, table: EffectTable, first: str, second: str) -> None:
    scale = 100 if is_fraction(table.metric) else 1
    sums: dict[str, dict[str, list[float]]] = {}
    for value, line, mean in _complete_cells(table, first, second):
        sums.setdefault(line, {}).setdefault(value, []).append(scale * mean)
    axis = FactorAxis.of(table.factors[first])
    for index, line in enumerate(value for value in table.factors.get(second, (table.metric,)) if value in sums):
        points = {value: (math.fsum(some) / len(some), 0.0) for value, some in sums[line].items()}
        _draw_factor_line(panel, axis, line, points, index)
    panel.set_title(f"{table.place.transfer}: {first} by {second}" if second else table.place.transfer, loc="left")
    axis.set_on(panel, first)
    _finish_factor_panel(panel, table.metric)


def _complete_cells(table: EffectTable, first: str, second: str) -> list[tuple[str, str, float]]:
    """Place, line and mean of cells: of the combinations of other factors with the most points, and of these points."""
    names = list(table.factors)
    by_rest: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for cell, mean in zip(table.cells, table.means, strict=True):
        if mean is not None:
            point = cell[names.index(first)], cell[names.index(second)] if second else table.metric
            rest = tuple(value for name, value in zip(names, cell, strict=True) if name not in {first, second})
            by_rest.setdefault(rest, {})[point] = mean
    points = max(by_rest.values(), key=len, default={}).keys()
    return [(*point, some[point]) for some in by_rest.values() if points <= some.keys() for point in points]


def _draw_series(panel: Axes, name: str, points: Sequence[CurvePoint], index: int) -> None:
    color = _COLORS[index % len(_COLORS)]
    panel.errorbar(
        [point.granularity for point in points],
        [point.mean for point in points],
        yerr=[point.std for point in points],
        label=name,
        color=color,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=5,
        linewidth=1.5,
        elinewidth=1.1,
        capsize=3,
        zorder=3,
    )


def _draw_lacking(panel: Axes, points: Sequence[tuple[float, float, int]]) -> None:
    """Fade the markers of rows that lack runs: hollow ones are published. Of each, its place, mean and line."""
    from matplotlib.colors import to_rgb

    label = "pale: lacks runs"
    for place, mean, index in points:
        panel.plot(
            [place],
            [mean],
            label=label,
            linestyle="none",
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            color=[part + _PALE * (1 - part) for part in to_rgb(_COLORS[index % len(_COLORS)])],
            zorder=3.5,
        )
        label = "_nolegend_"  # once is enough


def _draw_baseline(panel: Axes, table: Table) -> None:
    row = table.baseline_row
    if row is None or row.summary is None:
        return
    scale = 100 if is_fraction(table.metric) else 1
    mean, std = scale * row.summary.mean, scale * (row.summary.std or 0.0)
    label = f"baseline {table.baseline}"
    panel.axhline(mean, color=_BASELINE_COLOR, linewidth=1.1, linestyle=(0, (5, 3)), label=label, zorder=2)
    if std:
        panel.axhspan(mean - std, mean + std, color=_BASELINE_COLOR, alpha=0.1, linewidth=0, zorder=1)


def _draw_one_pass(panel: Axes, table: Table) -> None:
    """What training on the target alone reaches, without pretraining on anything else."""
    found = table.one_pass
    if found is None or found.summary is None:
        return
    mean = (100 if is_fraction(table.metric) else 1) * found.summary.mean
    label = f"direct training on {found.label_space}"
    panel.axhline(mean, color=_FAINT_COLOR, linewidth=1.1, linestyle=(0, (1, 2)), label=label, zorder=2)


def _draw_levels(panel: Axes, table: Table, num_series: int) -> None:
    """Rows without a number of classes, such as the best of a search over labels, as lines across."""
    there = [(row, row.summary.mean) for row in table.rows if row.granularity is None and row.summary]
    for index, (row, mean) in enumerate(there):
        if row.label_space != table.baseline:
            label = (_optimum_text(table) if row is table.ranked[0] else "") or row.label_space
            color, dashes = _COLORS[(num_series + index) % len(_COLORS)], (0, (6, 2, 1, 2))
            label += lacking(row.num_values, row.num_expected)
            height = _scaled(mean, table.metric)
            panel.axhline(height, color=color, linewidth=1.3, linestyle=dashes, label=label, zorder=2)


def _draw_published(panel: Axes, table: Table, series: Sequence[str]) -> None:
    """Printed numbers as hollow markers in the colour of their line."""
    scale = 100 if is_fraction(table.metric) else 1
    label = "published"
    for index, name in enumerate(series):
        points = [
            (row.granularity, scale * row.published.value)
            for row in table.rows
            if row.series == name and row.published is not None and row.granularity is not None
        ]
        if points:
            panel.plot(
                [granularity for granularity, _ in points],
                [value for _, value in points],
                label=label,
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=6,
                markerfacecolor="none",
                color=_COLORS[index % len(_COLORS)],
                zorder=2,
            )
            label = "_nolegend_"  # once is enough: colour and shape say which line


def _draw_optimum(panel: Axes, table: Table) -> None:
    """Ring the best row of the table where it has a place; the legend has its name, where it can cover no point."""
    label, best = _optimum_text(table), next(iter(table.ranked), None)
    if not label or best is None or best.granularity is None or best.summary is None:
        return
    panel.plot(
        [best.granularity],
        [_scaled(best.summary.mean, table.metric)],
        label=label,
        linestyle="none",
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=1.3,
        color="black",
        zorder=4,
    )


def _scaled(value: float, metric: str) -> float:
    """In the unit of the axis: percent for fractions."""
    return 100 * value if is_fraction(metric) else value


def _optimum_text(table: Table) -> str:
    """The best row and its mean, as below the table; empty if all are alike or none has a result."""
    ranked = table.ranked
    if is_tied(table) or not ranked or ranked[0].summary is None:
        return ""
    value = f"{number(ranked[0].summary.mean, table.metric)}{in_words(table.metric)}"
    return f"{table.better.best} mean{among_complete(ranked, table)}: {ranked[0].label_space}, {value}"


def _set_ticks(panel: Axes, granularities: Sequence[int]) -> None:
    """Ticks at the granularities themselves, as far as their labels do not collide."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    smallest, largest = granularities[0], granularities[-1]
    # A log axis shows ratios; 1.8 on each side keeps error bars off the frame and gives a single point a width.
    panel.set_xlim(smallest / 1.8, largest * 1.8)
    distance = (largest * 1.8 * 1.8 / smallest) ** _MIN_TICK_DISTANCE
    ticks: list[int] = []
    for granularity in granularities:
        if not ticks or granularity / ticks[-1] >= distance:
            ticks.append(granularity)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_major_formatter(FixedFormatter([str(tick) for tick in ticks]))
    panel.xaxis.set_minor_locator(NullLocator())


def _set_limits(panel: Axes, points: Sequence[CurvePoint], table: Table) -> None:
    """Start the axis at 0 where the values come near it: a cut axis makes small differences look large."""
    scale = 100 if is_fraction(table.metric) else 1
    lines = [scale * found.summary.mean for found in (table.one_pass,) if found is not None and found.summary]
    lines += [scale * row.summary.mean for row in table.rows if row.granularity is None and row.summary]
    lines += [scale * row.published.value for row in table.rows if row.published is not None]
    low = min(point.mean - point.std for point in points)
    high = max(point.mean + point.std for point in points)
    if 0 <= low < high / 2 or low < 0 <= min(point.mean for point in points):
        panel.set_ylim(bottom=0, top=1.08 * max([high, *lines]))


def _draw_empty(panel: Axes, text: str) -> None:
    panel.set_axis_off()
    panel.text(0.5, 0.5, text, ha="center", va="center", transform=panel.transAxes, color=_BASELINE_COLOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPanel:
    """One transfer."""

    title: str
    noise: Noise
    difference: float
    comparisons: Comparisons
    planned: Design
    target_power: float
    transfer_seeds: Sequence[int]
    """A line for each."""
    has_line: bool
    """False where the noise is known so badly that only the range is drawn."""
    wanted: int
    """Pretrain seeds that the axis should reach."""
    is_paired: bool = True
    """False: the test is Welch's, of independent samples."""


def draw_power(panels: Sequence[PowerPanel]) -> Figure:
    """Draw a panel for each transfer, one below the other; encode it with ``curves.encode_png``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_power_panel(axis, panel)
    return figure


def _draw_power_panel(axis: Axes, panel: PowerPanel) -> None:
    from matplotlib.ticker import MaxNLocator

    last = min(_MOST_SEEDS, max(_LEAST_SEEDS, panel.wanted + 2, panel.planned.num_pretrain_seeds + 1))
    seeds = list(range(2, last + 1))

    def curve(noise: Noise, transfers: int) -> list[float]:
        designs = (Design(num_pretrain_seeds=num, num_transfer_seeds=transfers) for num in seeds)
        asked = (panel.difference, panel.comparisons)
        return [100 * power_of(design, noise, *asked, is_paired=panel.is_paired) for design in designs]

    low, high = panel.noise.ends
    first = panel.transfer_seeds[0]
    if low != high:
        label = f"80 % range of the noise, {_named(first)}"
        axis.fill_between(
            seeds, curve(high, first), curve(low, first), color=_TRANSFER_COLORS[0], alpha=0.15, lw=0, label=label
        )
    for transfers, color in zip(panel.transfer_seeds if panel.has_line else (), _TRANSFER_COLORS, strict=False):
        axis.plot(seeds, curve(panel.noise, transfers), "o-", color=color, markersize=3, label=_named(transfers))
    axis.axhline(100 * panel.target_power, color="#555555", linewidth=0.8, linestyle="--")
    axis.axvline(panel.planned.num_pretrain_seeds, color="#999999", linewidth=0.8, linestyle=":", label="planned")
    axis.set(ylim=(0, 102), xlim=(min(2, panel.planned.num_pretrain_seeds) - 0.3, last + 0.3))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("pretraining seeds")
    axis.set_ylabel("power [%]")
    axis.set_title(panel.title, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _named(transfers: int) -> str:
    return f"{transfers} transfer seed{'s' * (transfers > 1)}"
