"""What every rendering of a report says in words: cells of the tables and the statements below them.

Here, and nowhere before, fractions become percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.report.results import Report, Row, Table
from orchestrator.report.statistics import PairedDifference, Summary
from orchestrator.units import format_percent

MISSING = "-"
_FRACTIONS = ("error", "accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one transfer says, in sentences: the best label space, then the best of every other entry."""

    title: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text; the first column is left-aligned, the others right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    expendable: tuple[range, ...]
    """Columns that can be left out where there is no room for them, in the order to do so."""
    best: int | None
    """Index of the row that deserves emphasis."""


def text_table(table: Table) -> TextTable:
    """Cells of a table, in the unit of its metric."""
    percent, points = (" [%]", " [points]") if is_fraction(table.metric) else ("", "")
    compares = table.baseline_row is not None
    header = ["pretrained on", "G", f"{table.metric}{percent}", "n"]
    subsets = range(len(header), len(header) + len(table.subsets))
    header += [f"{name}{percent}" for name in table.subsets]
    if compares:
        header += ["improvement [%]", f"difference{points}", "95 % CI"]
    best = table.ranked[:1]
    return TextTable(
        title=describe_transfer(table),
        header=tuple(header),
        rows=tuple(_cells(row, table, compares=compares) for row in table.rows),
        expendable=(subsets, range(len(header) - 1, len(header))) if compares else (subsets,),
        best=table.rows.index(best[0]) if best else None,
    )


def is_fraction(metric: str) -> bool:
    """Whether a metric is rendered in percent."""
    return any(word in metric for word in _FRACTIONS)


def describe_transfer(table: Table) -> str:
    """``superclass (finetune on levels/depth1)``."""
    return f"{table.transfer} ({table.protocol} on {table.target})"


def answers(report: Report) -> tuple[Answer, ...]:
    """The answer of every transfer."""
    return tuple(Answer(title=describe_transfer(table), sentences=_sentences(table)) for table in report.tables)


def caveats(report: Report) -> tuple[str, ...]:
    """Notes, and how much is still missing."""
    lines = list(report.notes)
    if report.missing:
        lines.append(f"{len(report.missing)} jobs are not committed, first: {', '.join(report.missing[:3])}")
    return tuple(lines)


def _cells(row: Row, table: Table, *, compares: bool) -> tuple[str, ...]:
    granularity = MISSING if row.granularity is None else str(row.granularity)
    value = "missing" if row.summary is None else _plus_minus(row.summary, table.metric)
    cells = [row.label_space, granularity, value, _count(row)]
    cells += [
        _plus_minus(row.subsets[name], table.metric) if name in row.subsets else MISSING for name in table.subsets
    ]
    if compares:
        cells += _comparison_cells(row, table)
    return tuple(cells)


def _count(row: Row) -> str:
    return str(row.num_expected) if row.is_complete else f"{len(row.results)}/{row.num_expected} seeds"


def _comparison_cells(row: Row, table: Table) -> list[str]:
    if row.label_space == table.baseline:
        return ["baseline", MISSING, MISSING]
    improvement = MISSING if row.improvement is None else f"{100 * row.improvement:+.1f}"
    if row.difference is None:
        return [improvement, MISSING, MISSING]
    return [improvement, _number(row.difference.mean, table.metric, sign="+"), _interval(row.difference, table.metric)]


def _interval(difference: PairedDifference, metric: str) -> str:
    if difference.low is None or difference.high is None:
        return MISSING
    return f"[{_number(difference.low, metric, sign='+')}, {_number(difference.high, metric, sign='+')}]"


def _plus_minus(summary: Summary, metric: str) -> str:
    mean = _number(summary.mean, metric)
    return mean if summary.std is None else f"{mean} ± {_number(summary.std, metric)}"


def _number(value: float, metric: str, *, sign: str = "") -> str:
    if not is_fraction(metric):
        return f"{value:{sign}.4g}"
    plus = "+" if sign and value >= 0 else ""
    return plus + format_percent(value)


def _sentences(table: Table) -> tuple[str, ...]:
    if not table.ranked:
        return ("no result yet",)
    best = table.ranked[0]
    others: dict[str, Row] = {}
    for row in table.ranked:
        if row.series != best.series:
            others.setdefault(row.series, row)
    rivals = [f"best of {row.series}: {_sentence(row, table)}" for row in others.values()]
    return (f"best: {_sentence(best, table)}", *rivals)


def _sentence(row: Row, table: Table) -> str:
    unit = " %" if is_fraction(table.metric) else ""
    classes = "" if row.granularity is None else f" (G = {row.granularity})"
    lacks = "" if row.is_complete else f" from {_count(row)}"
    value = MISSING if row.summary is None else _plus_minus(row.summary, table.metric)
    return f"{row.label_space}{classes}, {table.metric} {value}{unit}{lacks}{_verdict(row, table)}"


def _verdict(row: Row, table: Table) -> str:
    if row.label_space == table.baseline:
        return ", the baseline itself"
    if row.improvement is None:
        return ""
    direction = "lower" if row.improvement >= 0 else "higher"
    verdict = f", {format_percent(abs(row.improvement), digits=1)} % {direction} than the baseline {table.baseline}"
    return verdict + _confidence(row.difference)


def _confidence(difference: PairedDifference | None) -> str:
    if difference is None or difference.low is None:
        return ""
    percent = format_percent(difference.confidence, digits=0)
    if difference.excludes_zero:
        return f" ({percent} % CI of the paired difference excludes 0)"
    return f" (not distinguishable: {percent} % CI of the paired difference contains 0)"
