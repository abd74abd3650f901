"""What every rendering of a report says in words: cells of the tables and the statements below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.report.family import Family
from orchestrator.report.numbers import (
    MISSING,
    count,
    family_interval,
    fixed,
    hours,
    is_fraction,
    mean_and_std,
    mean_interval,
    money,
    number,
    p_text,
    plus_minus,
)
from orchestrator.report.results import Place, Report, Row, Table
from orchestrator.report.statistics import PairedDifference
from orchestrator.report.validation import on_these_images


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text; the first column is left-aligned, the others right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    expendable: tuple[tuple[int, ...], ...] = ()
    """Columns that can be left out where there is no room for them, in the order to do so."""
    best: int | None = None
    """Index of the row that deserves emphasis."""
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    header: str
    cell: Callable[[Row], str]
    leaves: int = 0
    """Who leaves a narrow terminal first: 1, then 2, ...; 0 stays."""


def text_table(table: Table) -> TextTable:
    """Cells of a table, in the unit of its metric."""
    columns = [*_own_columns(table), *_comparison_columns(table), *_other_columns(table)]
    best = table.ranked[:1]
    turns = sorted({column.leaves for column in columns if column.leaves})
    return TextTable(
        title=describe_transfer(table),
        header=tuple(column.header for column in columns),
        rows=tuple(tuple(column.cell(row) for column in columns) for row in table.rows),
        expendable=tuple(
            tuple(index for index, column in enumerate(columns) if column.leaves == turn) for turn in turns
        ),
        best=table.rows.index(best[0]) if best and not is_tied(table) else None,
        caption="; ".join(
            filter(
                None,
                [*(f"cell: {found.value}" for found in table.criteria), *family_caption(table), on_these_images(table)],
            )
        ),
    )


def is_tied(table: Table) -> bool:
    """Whether every row with a result prints the same value and none is established to differ: none is the best."""
    if table.family is not None and table.family.num_established:
        return False
    values = {number(row.summary.mean, table.metric) for row in table.ranked if row.summary}
    return len(table.ranked) > 1 and len(values) == 1


def family_caption(table: Table) -> list[str]:
    """What the corrected numbers of the table are corrected for; nothing where nothing is tested."""
    family = table.family
    if family is None or not family.num_comparisons:
        return []
    return [f"corrected: simultaneous over {family_text(family)}"]


def num_comparisons(family: Family) -> str:
    """``10 comparisons``."""
    return f"{family.num_comparisons} comparison{'s' * (family.num_comparisons > 1)}"


def family_text(family: Family) -> str:
    """How the correction is made: ``10 comparisons (...; the 4 with the baseline have half of the level)``."""
    pairs = num_comparisons(family)
    if not family.has_own_share:
        return f"{pairs} ({family.method})"
    return f"{pairs} ({family.method}; the {family.num_with_baseline} with the baseline have half of the level)"


def describe_transfer(table: Table) -> str:
    """``superclass (finetune on levels/depth1)``."""
    return describe_place(table.place)


def describe_place(place: Place) -> str:
    """``superclass (finetune on levels/depth1, epoch50, 10 % of the labels)``."""
    parts = [f"{place.protocol} on {place.target}"]
    parts += [f"pretrained by {place.pretrain}"] if place.pretrain else []
    parts += [place.checkpoint] if place.checkpoint else []
    parts += [f"{float(place.fraction):.3g} of the labels"] if place.fraction else []
    return f"{place.transfer} ({', '.join(parts)})"


def caveats(report: Report) -> tuple[str, ...]:
    """Notes, and how much is still missing."""
    lines = list(report.notes)
    if report.missing:
        jobs = "job is" if len(report.missing) == 1 else "jobs are"
        lines.append(f"{len(report.missing)} {jobs} not committed, first: {', '.join(report.missing[:3])}")
    return tuple(lines)


def units(metric: str) -> tuple[str, str]:
    """What stands behind the name of a metric and of a difference in a header."""
    return (" [%]", " [points]") if is_fraction(metric) else ("", "")


def _own_columns(table: Table) -> list[_Column]:
    metric, (percent, _) = table.metric, units(table.metric)
    columns = [
        _Column(header="pretrained on", cell=lambda row: row.label_space),
        _Column(header="G", cell=lambda row: MISSING if row.granularity is None else str(row.granularity)),
        _Column(
            header=f"{metric}{percent}",
            cell=lambda row: "missing" if row.summary is None else plus_minus(row.summary, metric),
        ),
        _Column(header="n", cell=count),
        _Column(header="seeds", cell=_num_seeds),
    ]
    if any(row.published for row in table.rows):
        columns.append(_Column(header=f"published{percent}", cell=lambda row: published_text(row, metric)))
    return columns + [_subset_column(name, metric) for name in table.subsets]


def _num_seeds(row: Row) -> str:
    """Pretrain seeds: what an interval rests on, however many transfers each has."""
    return MISSING if row.summary is None else str(row.summary.num_pretrain_seeds)


def _subset_column(name: str, metric: str) -> _Column:
    def cell(row: Row) -> str:
        return plus_minus(row.subsets[name], metric) if name in row.subsets else MISSING

    return _Column(header=f"{name}{units(metric)[0]}", cell=cell, leaves=5)


def _comparison_columns(table: Table) -> list[_Column]:
    if table.baseline_row is None:
        return []
    metric = table.metric

    def improvement(row: Row) -> str:
        if row.label_space == table.baseline:
            return "baseline"
        return MISSING if row.improvement is None else fixed(100 * row.improvement, 1, sign="+")

    def of_difference(render: Callable[[PairedDifference], str]) -> Callable[[Row], str]:
        return lambda row: MISSING if row.difference is None else render(row.difference)

    return [
        _Column(header="improvement [%]", cell=improvement),
        _Column(
            header=f"difference{units(metric)[1]}",
            cell=of_difference(lambda found: number(found.mean, metric, sign="+")),
        ),
        _Column(header="corrected 95 % CI", cell=of_difference(lambda found: family_interval(found, metric)), leaves=6),
        _Column(header="corrected p", cell=of_difference(lambda found: p_text(found.p_family)), leaves=7),
        *_pooled_column(table, of_difference(lambda found: p_text(found.p_pooled))),
    ]


def _pooled_column(table: Table, cell: Callable[[Row], str]) -> list[_Column]:
    has_any = any(row.difference and row.difference.p_pooled is not None for row in table.rows)
    return [_Column(header="pooled p", cell=cell, leaves=4)] if has_any else []


def _other_columns(table: Table) -> list[_Column]:
    metric, (percent, _) = table.metric, units(table.metric)
    columns = []
    if any(row.can_be_best is not None for row in table.rows):
        columns.append(_Column(header="can be best", cell=_can_be_best, leaves=4))
    if any(row.cell for row in table.rows):
        columns.append(_Column(header="cell", cell=lambda row: row.cell or MISSING, leaves=3))
    if (unit := hours_unit(table)) is not None:
        columns.append(_Column(header=f"{unit}-hours", cell=lambda row: _hours(row, unit), leaves=2))
    if any(row.compute and row.compute.cost is not None for row in table.rows):
        currency = next(row.compute.currency for row in table.rows if row.compute)
        columns.append(_Column(header=f"cost [{currency}]" if currency else "cost", cell=_cost, leaves=2))
    if any(row.summary and row.summary.low is not None for row in table.rows):
        header = f"95 % CI of the mean{percent}"
        columns.append(_Column(header=header, cell=lambda row: _mean_interval(row, metric), leaves=1))
    known = [name for name in ("pretrain", "transfer") if any(_component(row, name) is not None for row in table.rows)]
    return columns + [_component_column(name, metric) for name in known]


def _can_be_best(row: Row) -> str:
    return MISSING if row.can_be_best is None else ("yes" if row.can_be_best else "no")


def hours_unit(table: Table) -> str | None:
    """What costs of a table are counted in: GPU-hours where any were used, else CPU-hours; None where unknown."""
    found = [row.compute for row in table.rows if row.compute]
    if not found:
        return None
    return "GPU" if any(compute.gpu_hours for compute in found) else "CPU"


def published_text(row: Row, metric: str) -> str:
    """The printed number beside ours."""
    return MISSING if row.published is None else mean_and_std(row.published.value, row.published.std, metric)


def _hours(row: Row, unit: str) -> str:
    if row.compute is None:
        return MISSING
    return hours(row.compute.gpu_hours if unit == "GPU" else row.compute.cpu_hours)


def _cost(row: Row) -> str:
    if row.compute is None or row.compute.cost is None:
        return "unknown"
    return money(row.compute.cost, is_at_least=row.compute.is_cost_partial)


def _mean_interval(row: Row, metric: str) -> str:
    return MISSING if row.summary is None else mean_interval(row.summary, metric)


def _component(row: Row, name: str) -> float | None:
    if row.summary is None or row.summary.components is None:
        return None
    parts = row.summary.components
    return parts.pretrain_std if name == "pretrain" else parts.transfer_std


def _component_column(name: str, metric: str) -> _Column:
    def cell(row: Row) -> str:
        value = _component(row, name)
        return MISSING if value is None else number(value, metric)

    return _Column(header=f"std of {name} seeds{units(metric)[0]}", cell=cell, leaves=1)


def columns_left(table: TextTable, left_out: Sequence[tuple[int, ...]]) -> list[int]:
    """Indices of the columns that stay."""
    gone = {index for columns in left_out for index in columns}
    return [index for index in range(len(table.header)) if index not in gone]
