"""The columns of a report: as text, for tables that people read, and as plain values, for CSV and Parquet.

A new column is a field of ``results.Row``, which ``report.tables`` fills, and an entry here: in ``_own_columns``,
``_comparison_columns`` or ``_other_columns`` for text (the HTML page shows and sorts the same columns), in
``_RESULT_COLUMNS`` for files.

In files, numbers are fractions, and None means that a value does not exist (yet). In text, numbers are formatted for
people. The statements below the tables are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from orchestrator.planning.graph.plan import FACTOR_PREFIX
from orchestrator.report.render.numbers import (
    CORRECTED_INTERVAL,
    MEAN_INTERVAL,
    MISSING,
    count,
    family_interval,
    fixed,
    hours,
    in_brackets,
    mean_and_std,
    mean_interval,
    money,
    not_in_intervals,
    number,
    p_text,
    plus_minus,
)
from orchestrator.report.results import EffectTable, FactorReport, FactorTable, OnePass, Report, Row, Table, TablePlace
from orchestrator.report.statistics.corrections import Family, family_method
from orchestrator.report.statistics.effects import Effect, VarianceTest
from orchestrator.report.statistics.summaries import PairedDifference, Summary
from orchestrator.sweepfile.values import LABELS_FACTOR

Value = str | int | float | None
Values = Mapping[str, Callable[[Any], Value]]
"""Columns of a file by name, each with how its value is read from what the columns are of."""
_PUBLISHED: Values = {
    "published": attrgetter("value"),
    "published_std": attrgetter("std"),
    "published_source": attrgetter("source"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text; the first column is left-aligned, the others right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    expendable: tuple[tuple[int, ...], ...] = ()
    """Columns that are left out, in this order, if the terminal is too narrow."""
    best: int | None = None
    """Index of the row that deserves emphasis."""
    caption: str = ""


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    cell: Callable[[Row], str]
    value: Callable[[Row], Value]
    """What the HTML page sorts by; None = unknown."""
    leaves: int = 0
    """Columns with 1 are left out first on a narrow terminal, then 2, ...; 0 always stays."""


def text_table(table: Table) -> TextTable:
    """Cells of a table, in the unit of its metric."""
    columns = _columns(table)
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
        caption="; ".join((*_selection_caption(table), *family_caption(table), *not_in_intervals(table))),
    )


def page_columns(table: Table) -> list[dict[str, Any]]:
    """The columns of ``text_table`` for the HTML page: their texts, and the values to sort by, by row."""
    return [
        {
            "header": column.header,
            "texts": [column.cell(row) for row in table.rows],
            "values": [column.value(row) for row in table.rows],
        }
        for column in _columns(table)
    ]


def _columns(table: Table) -> list[_Column]:
    return [*_own_columns(table), *_comparison_columns(table), *_other_columns(table)]


def _of(part: str, name: str) -> Callable[[Row], Value]:
    """A value of a part of a row (``summary``, ``difference``, ...); None where the row has no such part."""

    def value(row: Row) -> Value:
        found = getattr(row, part)
        return None if found is None else getattr(found, name)

    return value


def _selection_caption(table: Table) -> list[str]:
    """By what the cells of the rows, or the trials of their searches, were selected."""
    what = "cell" if any(row.cell for row in table.rows) else "search"
    return [f"{what}: {found.value}" for found in table.criteria]


def is_tied(table: Table) -> bool:
    """Whether every row with a result shows the same value and no difference is established: no row is the best."""
    if table.family is not None and table.family.num_established:
        return False
    values = {number(row.summary.mean, table.metric) for row in table.ranked if row.summary}
    return len(table.ranked) > 1 and len(values) == 1


def family_caption(table: Table) -> list[str]:
    """For which comparisons the numbers of the table are corrected; empty if nothing is tested."""
    family = table.family
    if family is None or not family.num_comparisons:
        return []
    return [f"corrected: simultaneous over {family_text(family)}"]


def num_comparisons(family: Family) -> str:
    """``10 comparisons``."""
    return f"{family.num_comparisons} comparison{'s' * (family.num_comparisons > 1)}"


def family_text(family: Family) -> str:
    """How the correction is made: ``10 comparisons (...; half of the error level for the 4 with the baseline)``."""
    pairs = num_comparisons(family)
    if not family.has_own_share:
        return f"{pairs} ({family.method})"
    return f"{pairs} ({family.method}; half of the error level for the {family.num_with_baseline} with the baseline)"


def describe_transfer(table: Table) -> str:
    """``superclass (finetune on levels/depth1)``."""
    return describe_place(table.place)


def describe_place(place: TablePlace) -> str:
    """``superclass (finetune on levels/depth1, epoch50, 10 % of the labels)``."""
    parts = [f"{place.protocol} on {place.target}"]
    parts += [f"pretrained by {place.pretrain}"] if place.pretrain else []
    parts += [place.checkpoint] if place.checkpoint else []
    parts += [f"{100 * float(place.fraction):.3g} % of the labels"] if place.fraction else []
    return f"{place.transfer} ({', '.join(parts)})"


def describe_effects(table: EffectTable) -> str:
    """``factors: superclass (finetune on levels/depth1)``."""
    return f"factors: {describe_place(table.place)}"


def contrast_text(effect: Effect) -> str:
    """``optimizer lamb - sgd``; of an interaction ``optimizer lamb - sgd x mix mixup - none``."""
    parts = zip(effect.factors, effect.values, effect.references, strict=True)
    return " x ".join(f"{factor} {value} - {reference}" for factor, value, reference in parts)


def effect_table(table: EffectTable) -> TextTable:
    """Main effects and interactions as text: each contrast with its interval, and what makes its runs pairs."""
    metric, points = table.metric, units(table.metric)[1]
    shared = {(found.factor, found.value, found.reference): found.shared for found in table.pairings}
    tested = sum(effect.difference.p_family is not None for effect in table.contrasts)
    rows = []
    for effect in table.contrasts:
        found = effect.difference
        single = (effect.factors[0], effect.values[0], effect.references[0])
        rows.append(
            (
                contrast_text(effect),
                number(found.mean, metric, sign="+"),
                family_interval(found, metric),
                p_text(found.p_family),
                _of_all(effect.num_matched, effect.num_combinations),
                _of_all(found.num_pretrain_seeds, effect.num_seeds),
                shared.get(single, MISSING) if len(effect.factors) == 1 else MISSING,
            )
        )
    header = (f"{metric}: effect", f"mean{points}", CORRECTED_INTERVAL, "corrected p", "cells", "seeds", "paired by")
    plural = "s" * (tested > 1)
    method = family_method(effect.difference for effect in table.contrasts)
    return TextTable(
        title=describe_effects(table),
        header=header,
        rows=tuple(rows),
        expendable=((6,), (4, 5)),
        caption="; ".join(
            [
                *([f"corrected: simultaneous over {tested} contrast{plural} ({method})"] if tested else []),
                "cells: combinations of the other factors that have both sides in every seed that counts",
                *(_test_text(test) for test in table.tests if test.freedom > 1),
            ]
        ),
    )


def _of_all(number_of: int, total: int) -> str:
    """``2``; ``1/2`` where some are left out."""
    return str(number_of) if number_of == total else f"{number_of}/{total}"


def _test_text(test: VarianceTest) -> str:
    """``optimizer x mix: F(1, 4) = 3.20, p = 0.148``."""
    text = p_text(test.p_value)
    p_value = f"p {text}" if text.startswith("<") else f"p = {text}"
    name = " x ".join(test.factors)
    return f"{name} as a whole: F({test.freedom}, {test.error_freedom}) = {test.f_value:.2f}, {p_value}"


def caveats(report: Report) -> tuple[str, ...]:
    """Notes, and how much is still missing."""
    lines = list(report.notes)
    if report.missing:
        jobs = "job is" if len(report.missing) == 1 else "jobs are"
        lines.append(f"{len(report.missing)} {jobs} not committed, first: {', '.join(report.missing[:3])}")
    return tuple(lines)


def units(metric: str) -> tuple[str, str]:
    """Suffixes of headers: for the metric, and for a difference of it."""
    return in_brackets(metric), in_brackets(metric, of_difference=True)


def _own_columns(table: Table) -> list[_Column]:
    metric, (percent, _) = table.metric, units(table.metric)
    columns = [
        _Column(table.row_title, attrgetter("label_space"), attrgetter("label_space")),
        _Column(
            "G", lambda row: MISSING if row.granularity is None else str(row.granularity), attrgetter("granularity")
        ),
        _Column(
            f"{metric}{percent}",
            lambda row: "missing" if row.summary is None else plus_minus(row.summary, metric),
            _of("summary", "mean"),
        ),
        _Column("n", count, attrgetter("num_values")),
        _Column("seeds", _num_seeds, _of("summary", "num_pretrain_seeds")),
    ]
    if any(row.published for row in table.rows):
        header = f"published{percent}"
        columns.append(_Column(header, lambda row: published_text(row, metric), _of("published", "value")))
    return columns + [_subset_column(name, metric) for name in table.subsets]


def _num_seeds(row: Row) -> str:
    """Number of pretrain seeds: intervals are computed over these, for any number of transfers of each."""
    return MISSING if row.summary is None else str(row.summary.num_pretrain_seeds)


def _subset_column(name: str, metric: str) -> _Column:
    def cell(row: Row) -> str:
        return plus_minus(row.subsets[name], metric) if name in row.subsets else MISSING

    def value(row: Row) -> Value:
        return row.subsets[name].mean if name in row.subsets else None

    return _Column(f"{name}{units(metric)[0]}", cell, value, leaves=5)


def _comparison_columns(table: Table) -> list[_Column]:
    if table.baseline_row is None:
        return []
    metric = table.metric

    def improvement(row: Row) -> str:
        if row.label_space == table.baseline:
            return "baseline"
        return MISSING if row.improvement is None else fixed(100 * row.improvement, 1, sign="+")

    def compared(header: str, name: str, render: Callable[[PairedDifference], str], leaves: int = 0) -> _Column:
        def cell(row: Row) -> str:
            return MISSING if row.difference is None else render(row.difference)

        return _Column(header, cell, _of("difference", name), leaves)

    columns = [
        _Column("improvement [%]", improvement, attrgetter("improvement")),
        compared(f"difference{units(metric)[1]}", "mean", lambda found: number(found.mean, metric, sign="+")),
        compared(CORRECTED_INTERVAL, "family_low", lambda found: family_interval(found, metric), leaves=6),
        compared("corrected p", "p_family", lambda found: p_text(found.p_family), leaves=7),
    ]
    if any(row.difference and row.difference.p_pooled is not None for row in table.rows):
        columns.append(compared("pooled p", "p_pooled", lambda found: p_text(found.p_pooled), leaves=4))
    return columns


def _other_columns(table: Table) -> list[_Column]:
    metric, (percent, _) = table.metric, units(table.metric)
    columns = []
    if any(row.can_be_best is not None for row in table.rows):
        columns.append(_Column("possibly best", _can_be_best, attrgetter("can_be_best"), leaves=4))
    if any(row.cell for row in table.rows):
        columns.append(_Column("cell", lambda row: row.cell or MISSING, attrgetter("cell"), leaves=3))
    if (unit := hours_unit(table)) is not None:
        used = _of("compute", f"{unit.lower()}_hours")
        columns.append(_Column(f"{unit}-hours", lambda row: _hours(row, unit), used, leaves=2))
    if any(row.compute and row.compute.cost is not None for row in table.rows):
        currency = next(row.compute.currency for row in table.rows if row.compute)
        header = f"cost [{currency}]" if currency else "cost"
        columns.append(_Column(header, _cost, _of("compute", "cost"), leaves=2))
    if any(row.summary and row.summary.low is not None for row in table.rows):
        header = f"{MEAN_INTERVAL}{percent}"
        columns.append(_Column(header, lambda row: _mean_interval(row, metric), _of("summary", "low"), leaves=1))
    known = [name for name in ("pretrain", "transfer") if any(_component(row, name) is not None for row in table.rows)]
    return columns + [_component_column(name, metric) for name in known]


def _can_be_best(row: Row) -> str:
    return MISSING if row.can_be_best is None else ("yes" if row.can_be_best else "no")


def hours_unit(table: Table) -> str | None:
    """Unit of the costs of a table: GPU-hours if any were used, else CPU-hours; None if unknown."""
    found = [row.compute for row in table.rows if row.compute]
    if not found:
        return None
    return "GPU" if any(compute.gpu_hours for compute in found) else "CPU"


def published_text(row: Row, metric: str) -> str:
    """The published number."""
    return MISSING if row.published is None else mean_and_std(row.published.value, row.published.std, metric)


def _hours(row: Row, unit: str) -> str:
    if row.compute is None:
        return MISSING
    at_least = "≥ " if row.compute.num_unknown else ""
    return at_least + hours(row.compute.gpu_hours if unit == "GPU" else row.compute.cpu_hours)


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

    header = f"std of {name} seeds{units(metric)[0]}"
    return _Column(header, cell, lambda row: _component(row, name), leaves=1)


def columns_left(table: TextTable, left_out: Sequence[tuple[int, ...]]) -> list[int]:
    """Indices of the columns that stay."""
    gone = {index for columns in left_out for index in columns}
    return [index for index in range(len(table.header)) if index not in gone]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """A table of plain values; every row has as many as there are columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResultLine:
    """A line of ``results.csv``: a row of a table, one of its subsets, or the one-pass baseline as a row."""

    table: Table
    row: Row
    metric: str
    factors: Mapping[str, str]
    """The values of the row's factors, by the name of their columns."""
    subset: str = ""
    num_expected: int | None = None


def values(columns: Values, of: object) -> tuple[Value, ...]:
    """One value per column; all of them missing where there is nothing to read them from."""
    return tuple(None if of is None else get(of) for get in columns.values())


def _fields(*names: str) -> Values:
    return {name: attrgetter(name) for name in names}


def _part(columns: Values, part: Callable[[_ResultLine], object]) -> Values:
    """The columns of a part of a line, which need not be there."""

    def reader(get: Callable[[Any], Value]) -> Callable[[_ResultLine], Value]:
        return lambda line: None if (found := part(line)) is None else get(found)

    return {name: reader(get) for name, get in columns.items()}


PLACE_COLUMNS: Values = _fields("transfer", "protocol", "target", "pretrain", "checkpoint", "fraction")
_SUMMARY: Values = {
    "num_runs": attrgetter("num_values"),
    **_fields("mean", "std"),
    "mean_ci_low": attrgetter("low"),
    "mean_ci_high": attrgetter("high"),
    "pretrain_std": lambda summary: summary.components and summary.components.pretrain_std,
    "transfer_std": lambda summary: summary.components and summary.components.transfer_std,
}
DIFFERENCE_COLUMNS: Values = {
    "paired_difference": attrgetter("mean"),
    "ci_low": attrgetter("low"),
    "ci_high": attrgetter("high"),
    **_fields("confidence", "num_pairs", "p_value", "p_holm", "p_bh"),
    **_fields("std_error", "p_family", "family_low", "family_high", "p_pooled"),
}
TEST_COLUMNS: Values = {
    "is_paired": lambda difference: int(difference.is_paired),
    **_fields("num_pretrain_seeds", "freedom"),
}
"""What the interval of a difference rests on."""
_COMPUTE: Values = {
    **_fields("gpu_hours", "cpu_hours", "cost"),
    "cost_is_partial": lambda compute: None if compute.cost is None else int(compute.is_cost_partial),
    "currency": lambda compute: None if compute.cost is None else compute.currency,
}
_RESULT_COLUMNS: Values = {
    **_part(PLACE_COLUMNS, lambda line: line.table.place),
    "label_space": lambda line: line.row.label_space,
    "granularity": lambda line: line.row.granularity,
    "cell": lambda line: line.row.cell,
    "selected_by": lambda line: line.row.selected_by.value if line.row.selected_by else "",
    **_fields("metric", "subset", "num_expected"),
    "absent": lambda line: "; ".join(f"{count} {why}" for why, count in line.row.absent.items()),
    **_part(_SUMMARY, lambda line: line.row.summary),
    "num_runs": lambda line: line.row.num_values,
    "relative_improvement": lambda line: line.row.improvement,
    **_part(DIFFERENCE_COLUMNS, lambda line: line.row.difference),
    "can_be_best": lambda line: None if line.row.can_be_best is None else int(line.row.can_be_best),
    **_part(_COMPUTE, lambda line: line.row.compute),
    **_part(_PUBLISHED, lambda line: line.row.published),
    **_part(TEST_COLUMNS, lambda line: line.row.difference),
}


def result_records(report: Report) -> Records:
    """One line per label space and table, one per subset of the validation samples, one per one-pass baseline."""
    factors = _factor_columns(report)
    lines = (
        (*values(_RESULT_COLUMNS, line), *map(line.factors.get, factors))
        for table, cells in _with_cells(report)
        for line in _result_lines(table, cells)
    )
    return Records(columns=(*_RESULT_COLUMNS, *factors), rows=tuple(lines))


def _factor_columns(report: Report) -> tuple[str, ...]:
    """The last columns of a sweep that compares more than label spaces, whose ``label_space`` is the row's name."""
    return tuple(f"{FACTOR_PREFIX}{name}" for name in report.factors) if isinstance(report, FactorReport) else ()


def _with_cells(report: Report) -> Iterator[tuple[Table, Sequence[Mapping[str, str]]]]:
    """Every table with the values of factors by row."""
    for index, table in enumerate(report.tables):
        yield table, report.cells[index] if isinstance(report, FactorReport) else ({},) * len(table.rows)


def _result_lines(table: Table, cells: Sequence[Mapping[str, str]]) -> Iterator[_ResultLine]:
    for row, cell in zip(table.rows, cells, strict=True):
        line = _ResultLine(table=table, row=row, metric=table.metric, factors=cell, num_expected=row.num_expected)
        yield line
        for name, summary in row.subsets.items():
            yield replace(line, row=_row_of(row, summary), metric=f"{table.metric}_{name}", subset=name)
    one_passes: dict[tuple[tuple[str, str], ...], OnePass | None] = {(): table.one_pass}
    if isinstance(table, FactorTable):  # with the values of its row, but trained on the target; rows may share one
        trained = {f"{FACTOR_PREFIX}{LABELS_FACTOR}": table.target}
        of_target = [tuple((name, trained.get(name, value)) for name, value in cell.items()) for cell in cells]
        one_passes = dict(zip(of_target, table.one_passes, strict=True))
    for values, found in one_passes.items():
        if found is not None:
            yield _ResultLine(table=table, row=found.row, metric=table.metric, factors=dict(values))


def _row_of(row: Row, subset: Summary) -> Row:
    """The row with nothing but the summary of a subset."""
    return Row(
        label_space=row.label_space,
        series=row.series,
        granularity=row.granularity,
        num_expected=row.num_expected,
        results=(),
        summary=subset,
        subsets={},
        improvement=None,
        difference=None,
        cell=row.cell,
        selected_by=row.selected_by,
    )


def run_records(report: Report) -> Records:
    """One line per committed run that has a finite value of the report's metric, with all of its final metrics."""
    runs = [
        (table, row, cell, result)
        for table, cells in _with_cells(report)
        for row, cell in zip(table.rows, cells, strict=True)
        for result in (*row.results, *row.others)
    ]
    metrics = sorted({name for *_, result in runs for name in result.metrics})
    factors = _factor_columns(report)
    lines = [
        (
            *values(PLACE_COLUMNS, table.place),
            *(row.label_space, row.granularity, result.cell, int(result.cell == row.cell)),
            *(result.seeds.pretrain, result.seeds.transfer, result.job, result.key),
            *map(result.metrics.get, metrics),
            *map(cell.get, factors),
        )
        for table, row, cell, result in runs
    ]
    names = ("label_space", "granularity", "cell", "is_selected", "pretrain_seed", "transfer_seed", "job", "key")
    return Records(columns=(*PLACE_COLUMNS, *names, *metrics, *factors), rows=tuple(lines))


def comparison_records(report: Report) -> Records:
    """One line per pair of label spaces of a table: the first minus the second."""
    lines = [
        (
            *values(PLACE_COLUMNS, table.place),
            table.metric,
            pair.first,
            pair.second,
            *(*values(DIFFERENCE_COLUMNS, pair.difference), *values(TEST_COLUMNS, pair.difference)),
        )
        for table in report.tables
        for pair in table.comparisons
    ]
    names = ("metric", "first", "second")
    return Records(columns=(*PLACE_COLUMNS, *names, *DIFFERENCE_COLUMNS, *TEST_COLUMNS), rows=tuple(lines))


def effect_records(report: FactorReport) -> Records:
    """One line per main effect and interaction, values minus references; ``x`` joins the parts of an interaction."""
    lines = [
        (
            *values(PLACE_COLUMNS, table.place),
            table.metric,
            *(" x ".join(some) for some in (effect.factors, effect.values, effect.references)),
            *(effect.num_matched, effect.num_combinations, int(effect.is_paired)),
            *(effect.difference.num_pretrain_seeds, effect.num_seeds),
            *(*values(DIFFERENCE_COLUMNS, effect.difference), effect.difference.freedom),
        )
        for table in report.effects
        for effect in table.contrasts
    ]
    names = ("metric", "factors", "values", "references", "num_matched", "num_combinations", "is_paired")
    seeds = ("num_pretrain_seeds", "num_seeds")
    return Records(columns=(*PLACE_COLUMNS, *names, *seeds, *DIFFERENCE_COLUMNS, "freedom"), rows=tuple(lines))


def ablation_records(report: Report) -> Records:
    """One line per label space and value of a grid, of the checkpoints or of the fractions."""
    names = ("facet", "value", "label_space", "granularity", "metric", "is_selected", "select_error", "num_expected")
    lines = [
        (
            *values(PLACE_COLUMNS, ablation.place),
            *(ablation.facet.value, value, row.label_space, row.granularity, ablation.metric),
            *(int(cell.is_selected), cell.select_error, cell.num_expected),
            cell.summary.num_values if cell.summary else 0,
            *values(_SUMMARY, cell.summary)[1:],
            *values(_PUBLISHED, cell.published),
        )
        for ablation in report.ablations
        for row in ablation.rows
        for value, cell in zip(ablation.values, row.cells, strict=True)
    ]
    return Records(columns=(*PLACE_COLUMNS, *names, *_SUMMARY, *_PUBLISHED), rows=tuple(lines))
