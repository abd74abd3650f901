"""Simulations of a report as tables of text, records, a figure and data of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from orchestrator.planning.estimate.power import CONFIDENCE_TEXT
from orchestrator.report.render.columns import Records, TextTable, Value, units
from orchestrator.report.render.numbers import MISSING, interval, number
from orchestrator.report.simulations import SimulationCell, SimulationReport
from orchestrator.report.statistics.expectations import UNDEFINED_BECAUSE, ClaimedNumber, JudgedExpectation
from orchestrator.report.statistics.intervals import Estimate, bounds_of, is_fraction
from orchestrator.sweepfile.values import Expectation, Level, cell_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIMULATIONS_METHOD: Final = (
    f"Intervals of simulations are Student's t at {CONFIDENCE_TEXT} over seeds. An expectation holds if the interval "
    "of each of its numbers is inside the claimed one. It does not hold if one interval, corrected for all of its "
    "numbers (Bonferroni), is outside. It is undefined if a ratio is to a mean of 0, or a logarithm of a mean that is "
    "not above 0. Otherwise there are too few seeds to decide. The error of a number that "
    "combines several cells comes from leaving out one seed at a time (jackknife). Where all seeds are equal there is "
    "no interval, and the number is judged as it is. Outcomes of trials (a metric that is 0 or 1 for every seed, and "
    "both in one of its cells) are an exception: means have Clopper and Pearson's exact interval, and expectations "
    "take its one-sided form where all seeds have the same outcome."
)
_INTERVAL: Final = f"{CONFIDENCE_TEXT} interval"
_EQUAL: Final = f"{MISSING} (all seeds are equal)"
"""In place of an interval: without any spread, none can be stated."""
_PANEL_IN = (5.2, 3.7)
_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DIGEST: Final = re.compile(r"^([0-9a-f]{12})[0-9a-f]{52}(?=\.py:)")
"""What a simulation of a plain file is called by, which a title need not have in full."""
_WIDE_RANGE = 5.0
"""Largest over smallest level from which on an axis is logarithmic."""
_LEAST_SPAN: Final = 1e-3
"""Least length of the axis of a metric, by its largest mean: below it, differences are rounding."""
_LOGARITHM: Final = "log_"
"""How names of logarithms of rates begin, which are no rates."""


def simulation_tables(found: SimulationReport) -> list[TextTable]:
    """The means of the cells, and the expectations if there are any."""
    unit = units(_printed_as(found, found.metric))[0]
    header = (*(found.cells[0].factors or ("cell",)), f"{found.metric}{unit}", _INTERVAL, "n")
    rows = tuple(_cell_row(found, cell) for cell in found.cells)
    run = _DIGEST.sub(r"\1...", found.run)
    title = f"Simulation {found.name} ({run}): {found.metric}{unit}"
    tables = [TextTable(title=title, header=header, rows=rows)]
    if found.expectations:
        claims = tuple(row for judged in found.expectations for row in _claim_rows(found, judged))
        names = ("claim", "where", "ours", _INTERVAL, "n", "paper", "verdict")
        tables.append(TextTable(title=f"Expectations of {found.name}", header=names, rows=claims))
    return tables


def _cell_row(found: SimulationReport, cell: SimulationCell) -> tuple[str, ...]:
    estimate = cell.estimates.get(found.metric)
    levels = tuple(str(level) for level in cell.factors.values()) or ("all",)
    if estimate is None:
        return (*levels, MISSING, MISSING, f"0/{found.num_expected}")
    metric = _printed_as(found, found.metric)
    ends = interval(estimate.low, estimate.high, metric)
    if estimate.low is None and estimate.num_values > 1:
        ends = _EQUAL
    return (*levels, number(estimate.mean, metric), ends, _count(estimate.num_values, found.num_expected))


def _count(num_seeds: int, num_expected: int) -> str:
    return str(num_seeds) if num_seeds == num_expected else f"{num_seeds}/{num_expected}"


def _printed_as(found: SimulationReport, metric: str) -> str:
    """The metric by whose unit values are printed; empty, so not percent, for what is a rate by its name alone.

    Simulations call their metrics as they like: ``log_error`` is a logarithm, and an error may be a mean of squares.
    """
    claimed = [judged.expectation for judged in found.expectations if judged.metric == metric and _is_value(judged)]
    values = [cell.estimates[metric].mean for cell in found.cells if metric in cell.estimates]
    values += [end for claim in claimed for end in (claim.low, claim.high) if end is not None]
    is_rate = not metric.startswith(_LOGARITHM) and bounds_of(metric, values) is not None
    return metric if is_rate or not is_fraction(metric) else ""


def _is_value(judged: JudgedExpectation) -> bool:
    """Whether the bounds of a claim are values of its metric."""
    return judged.expectation.rule == "mean"


def _claim_rows(found: SimulationReport, judged: JudgedExpectation) -> Iterator[tuple[str, ...]]:
    """A row for each number of a claim; the first row has what applies to all of them."""
    claim, metric = judged.expectation, _unit_of(found, judged)
    paper = MISSING if claim.paper is None else number(claim.paper, metric)
    printed = f"{paper} ({claim.source})" if claim.source else paper
    numbers: Sequence[ClaimedNumber | None] = judged.numbers or (None,)
    for position, one in enumerate(numbers):
        value = MISSING if one is None or one.value is None else number(one.value, metric)
        ends = MISSING if one is None else _ends(one, claim, metric)
        where, num_seeds = ("", 0) if one is None else (one.name, one.num_seeds)
        is_first = position == 0
        said = (printed, judged.judgement.value) if is_first else ("", "")
        claimed = describe_claim(found, judged) if is_first else ""
        yield (claimed, where, value, ends, _count(num_seeds, found.num_expected), *said)


def _ends(one: ClaimedNumber, claim: Expectation, metric: str) -> str:
    """The interval of a number, or why there is none."""
    if one.is_undefined:
        return f"{MISSING} ({UNDEFINED_BECAUSE.get(claim.rule, 'too large for a number')})"
    return _EQUAL if one.is_equal else interval(one.low, one.high, metric)


def describe_claim(found: SimulationReport, judged: JudgedExpectation) -> str:
    """Such as ``slope of log sub_to_common over log k in [-1.1, -0.8]``."""
    claim, metric = judged.expectation, judged.metric
    log = "log " if claim.log else ""
    texts = {
        "mean": metric,
        "slope": f"slope of {log}{metric} over {log}{claim.of}",
        "ratio": f"{metric} at {claim.of} {' / '.join(map(str, claim.levels))}",
        "ordering": f"{metric} rises with {claim.of} {', '.join(map(str, claim.levels))}",
        "monotone": f"{metric} {'falls' if claim.low is None else 'rises'} with {claim.of}",
        "closed_form": f"{metric} / {claim.other_metric}",
    }
    bounds = "" if claim.rule in {"ordering", "monotone"} else _bounds(claim, _unit_of(found, judged))
    where = "; ".join(f"{factor} {', '.join(map(str, levels))}" for factor, levels in claim.where.items())
    return f"{texts[claim.rule]}{bounds}" + (f" ({where})" if where else "")


def _bounds(claim: Expectation, metric: str) -> str:
    """In full: [0.999999, 1.000001] must not become [1, 1]."""
    scale = 100.0 if is_fraction(metric) else 1.0
    low, high = ("" if end is None else f"{scale * end:.10g}" for end in (claim.low, claim.high))
    if low and high:
        return f" in [{low}, {high}]"
    return f" > {low}" if low else f" < {high}"


def _unit_of(found: SimulationReport, judged: JudgedExpectation) -> str:
    """The metric whose unit the numbers of a claim have; ratios, slopes and logarithms have none."""
    has_unit = judged.expectation.rule in {"mean", "ordering", "monotone"}
    return _printed_as(found, judged.metric) if has_unit else ""


def simulation_records(simulations: Sequence[SimulationReport]) -> Records:
    """A line per simulation, cell and metric."""
    columns = ("simulation", "run", "cell", "metric", "mean", "std_error", "low", "high", "num_seeds", "num_expected")
    rows = [
        (found.name, found.run, cell_name(cell.factors), metric, *_estimate(estimate), found.num_expected)
        for found in simulations
        for cell in found.cells
        for metric, estimate in cell.estimates.items()
    ]
    return Records(columns=columns, rows=tuple(rows))


def _estimate(estimate: Estimate) -> tuple[Value, ...]:
    return estimate.mean, estimate.std_error, estimate.low, estimate.high, estimate.num_values


def expectation_records(simulations: Sequence[SimulationReport]) -> Records:
    """A line per number of each expectation."""
    columns = (
        *("simulation", "claim", "where", "value", "low", "high", "claimed_low", "claimed_high"),
        *("num_seeds", "num_expected", "paper", "source", "verdict"),
    )
    rows = [
        (
            *(found.name, describe_claim(found, judged), one.name, one.value, one.low, one.high),
            *(judged.expectation.low, judged.expectation.high, one.num_seeds, found.num_expected),
            *(judged.expectation.paper, judged.expectation.source, judged.judgement.value),
        )
        for found in simulations
        for judged in found.expectations
        for one in judged.numbers
    ]
    return Records(columns=columns, rows=tuple(rows))


# ------------------------------------------------------------------------------------------------------------- figures


def draw_simulations(simulations: Sequence[SimulationReport]) -> Figure:
    """A panel per simulation: means with bands over an ordered factor, else points with bars. Needs no display."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    width, height = _PANEL_IN
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "simulations"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height * len(simulations)), layout="constrained")
        axes = figure.subplots(len(simulations), 1, squeeze=False)
        for axis, found in zip(axes[:, 0], simulations, strict=True):
            _panel(axis, found)
        if told := " and ".join(dict.fromkeys(filter(None, map(_spread_text, simulations)))):
            figure.supxlabel(told, fontsize=7, color="#555555")
    return figure


def _spread_text(found: SimulationReport) -> str:
    """What its bands or bars are; empty if it has none."""
    estimates = [cell.estimates.get(found.metric) for cell in found.cells]
    if not any(one and one.low is not None for one in estimates):
        return ""
    return f"{'bands' if found.ordered_factor else 'bars'}: {CONFIDENCE_TEXT} intervals over seeds"


def _panel(axis: Axes, found: SimulationReport) -> None:
    scale = 100.0 if is_fraction(_printed_as(found, found.metric)) else 1.0
    factor = found.ordered_factor
    places: list[tuple[float, SimulationCell]] = []
    for position, (name, cells) in enumerate(_lines(found, factor).items()):
        there = [(level, cell) for level, cell in cells if found.metric in cell.estimates]
        if not there:
            continue
        estimates = [cell.estimates[found.metric] for _, cell in there]
        x = [float(level) for level, _ in there] if factor else [float(place) for place in range(len(there))]
        y = [scale * one.mean for one in estimates]
        low = [scale * (one.mean if one.low is None else one.low) for one in estimates]
        high = [scale * (one.mean if one.high is None else one.high) for one in estimates]
        color = _COLORS[position % len(_COLORS)]
        if factor:
            axis.plot(x, y, marker="o", markersize=4, color=color, label=name or None)
            axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            bars = [[mean - end for mean, end in zip(y, low, strict=True)]]
            bars += [[end - mean for mean, end in zip(y, high, strict=True)]]
            axis.errorbar(x, y, yerr=bars, fmt="o", capsize=3, color=color)
            axis.set_xticks(x, [_level_name(found, cell) for _, cell in there], rotation=20, ha="right")
        places += [(place, cell) for place, (_, cell) in zip(x, there, strict=True)]
    _mark_printed(axis, found, places, scale)
    _scale_axes(axis, found, factor)
    axis.set_title(found.name)
    axis.set_xlabel(next(iter(found.factors)) if len(found.factors) == 1 else factor)
    axis.set_ylabel(f"{found.metric}{units(_printed_as(found, found.metric))[0]}")
    if axis.get_legend_handles_labels()[1]:
        axis.legend()


def _level_name(found: SimulationReport, cell: SimulationCell) -> str:
    """The level alone where the axis says the factor."""
    return str(*cell.factors.values()) if len(found.factors) == 1 else cell_name(cell.factors) or found.name


def _mark_printed(
    axis: Axes, found: SimulationReport, cells: Sequence[tuple[float, SimulationCell]], scale: float
) -> None:
    """What the paper says of the means of cells, as a number or by its formula; ``cells`` are places along the axis."""
    printed = [
        (place, scale * value)
        for judged in found.expectations
        for place, cell in cells
        if judged.metric == found.metric and (value := _printed(judged.expectation, cell)) is not None
    ]
    if printed:
        x, y = zip(*printed, strict=True)
        axis.plot(x, y, linestyle="none", marker="D", markersize=8, color="black", fillstyle="none", label="paper")


def _printed(claim: Expectation, cell: SimulationCell) -> float | None:
    if not claim.covers(cell.factors):
        return None
    if claim.rule == "closed_form" and claim.other_metric in cell.estimates:
        return cell.estimates[claim.other_metric].mean
    return claim.paper if claim.rule == "mean" else None


def _scale_axes(axis: Axes, found: SimulationReport, factor: str) -> None:
    """Logarithmic where levels or means span much and none is zero or negative."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    levels = [float(level) for level in found.factors[factor]] if factor else []
    means = [cell.estimates[found.metric].mean for cell in found.cells if found.metric in cell.estimates]
    if _is_wide(levels):
        axis.set_xscale("log")
    if factor:
        axis.set_xticks(levels, [str(level) for level in found.factors[factor]])
        axis.minorticks_off()
    if _is_wide(means):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        return
    axis.ticklabel_format(axis="y", useOffset=False)
    low, high = axis.get_ylim()
    least = _LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least:
        axis.set_ylim((low + high - least) / 2, (low + high + least) / 2)


def _is_wide(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) > _WIDE_RANGE


def _lines(found: SimulationReport, factor: str) -> dict[str, list[tuple[Level, SimulationCell]]]:
    """Cells by everything but the factor along the axis, in its order."""
    lines: dict[str, list[tuple[Level, SimulationCell]]] = {}
    for cell in found.cells:
        rest = {name: level for name, level in cell.factors.items() if name != factor}
        lines.setdefault(cell_name(rest) if factor else "", []).append((cell.factors.get(factor, 0), cell))
    return {name: sorted(cells, key=lambda pair: float(pair[0])) for name, cells in lines.items()}


def page_document(found: SimulationReport) -> dict[str, Any]:
    """What the interactive page draws: the tables as text, and lines with bands."""
    factor = found.ordered_factor
    lines = [
        {
            "name": name or found.metric,
            "levels": [level if factor else cell_name(cell.factors) for level, cell in cells],
            "estimates": [cell.estimates.get(found.metric) for _, cell in cells],
        }
        for name, cells in _lines(found, factor).items()
    ]
    levels = [float(level) for level in found.factors[factor]] if factor else []
    means = [cell.estimates[found.metric].mean for cell in found.cells if found.metric in cell.estimates]
    return {
        "name": found.name,
        "metric": found.metric,
        "scale": 100 if is_fraction(_printed_as(found, found.metric)) else 1,
        "unit": units(_printed_as(found, found.metric))[0],
        "spread": _spread_text(found),
        "factor": factor,
        "isLogX": _is_wide(levels),
        "isLogY": _is_wide(means),
        "lines": lines,
        "tables": [
            {"title": table.title, "header": table.header, "rows": table.rows} for table in simulation_tables(found)
        ],
    }
