"""A report as flat records: a line per row, per run, per comparison and per cell of an ablation.

All rates are fractions; None is a value that does not exist (yet).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.planning.graph.plan import Published
from orchestrator.report.results import Compute, Place, Report, Row, Table
from orchestrator.report.statistics import PairedDifference, Summary

Value = str | int | float | None

PLACE_COLUMNS = ("transfer", "protocol", "target", "pretrain", "checkpoint", "fraction")
_SUMMARY = ("num_runs", "mean", "std", "mean_ci_low", "mean_ci_high", "pretrain_std", "transfer_std")
DIFFERENCE_COLUMNS = (
    *("paired_difference", "ci_low", "ci_high", "confidence", "num_pairs", "p_value", "p_holm", "p_bh"),
    *("std_error", "p_family", "family_low", "family_high", "p_pooled"),
)
_PUBLISHED = ("published", "published_std", "published_source")
_COMPUTE = ("gpu_hours", "cpu_hours", "cost", "cost_is_partial", "currency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """A table of plain values; every row has as many as there are columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


def result_records(report: Report) -> Records:
    """One line per label space and table, one per subset of the validation samples, one per one-pass baseline."""
    columns = (
        *(*PLACE_COLUMNS, "label_space", "granularity", "cell", "selected_by", "metric", "subset"),
        *("num_expected", "absent", *_SUMMARY, "relative_improvement", *DIFFERENCE_COLUMNS, "can_be_best"),
        *(*_COMPUTE, *_PUBLISHED),
    )
    return Records(columns=columns, rows=tuple(line for table in report.tables for line in _result_lines(table)))


def run_records(report: Report) -> Records:
    """One line per committed run with all of its final metrics."""
    runs = [
        (table, row, result) for table in report.tables for row in table.rows for result in (*row.results, *row.others)
    ]
    metrics = sorted({name for _, _, result in runs for name in result.metrics})
    lines = [
        (
            *place_values(table.place),
            *(row.label_space, row.granularity, result.cell, int(result.cell == row.cell)),
            *(result.seeds.pretrain, result.seeds.transfer, result.job, result.key),
            *(result.metrics.get(name) for name in metrics),
        )
        for table, row, result in runs
    ]
    names = ("label_space", "granularity", "cell", "is_selected", "pretrain_seed", "transfer_seed", "job", "key")
    return Records(columns=(*PLACE_COLUMNS, *names, *metrics), rows=tuple(lines))


def comparison_records(report: Report) -> Records:
    """One line per pair of label spaces of a table: the first minus the second."""
    lines = [
        (*place_values(table.place), table.metric, pair.first, pair.second, *difference_values(pair.difference))
        for table in report.tables
        for pair in table.comparisons
    ]
    return Records(columns=(*PLACE_COLUMNS, "metric", "first", "second", *DIFFERENCE_COLUMNS), rows=tuple(lines))


def ablation_records(report: Report) -> Records:
    """One line per label space and value of a grid, of the checkpoints or of the fractions."""
    names = ("facet", "value", "label_space", "granularity", "metric", "is_selected", "select_error", "num_expected")
    lines = [
        (
            *place_values(ablation.place),
            *(ablation.facet.value, value, row.label_space, row.granularity, ablation.metric),
            *(int(cell.is_selected), cell.select_error, cell.num_expected),
            *_summary(cell.summary),
            *_published(cell.published),
        )
        for ablation in report.ablations
        for row in ablation.rows
        for value, cell in zip(ablation.values, row.cells, strict=True)
    ]
    return Records(columns=(*PLACE_COLUMNS, *names, *_SUMMARY, *_PUBLISHED), rows=tuple(lines))


def _result_lines(table: Table) -> Iterator[tuple[Value, ...]]:
    for row in table.rows:
        yield _row_line(table, row)
        for name, summary in row.subsets.items():
            head = (*_head(table, row), f"{table.metric}_{name}", name, row.num_expected, "")
            yield (
                *head,
                *_summary(summary),
                *_nothing(1 + len(DIFFERENCE_COLUMNS) + 1 + len(_COMPUTE) + len(_PUBLISHED)),
            )
    found = table.one_pass
    if found is not None:
        head = (*place_values(table.place), "one-pass", None, "", "", table.metric, "", None, "")
        middle = _nothing(1 + len(DIFFERENCE_COLUMNS) + 1 + len(_COMPUTE))
        yield (*head, *_summary(found.summary), *middle, *_published(found.published))


def _row_line(table: Table, row: Row) -> tuple[Value, ...]:
    can_be_best = None if row.can_be_best is None else int(row.can_be_best)
    absent = "; ".join(f"{count} {why}" for why, count in row.absent.items())
    return (
        *(*_head(table, row), table.metric, "", row.num_expected, absent),
        *_summary(row.summary),
        *(row.improvement, *difference_values(row.difference), can_be_best),
        *_compute(row.compute),
        *_published(row.published),
    )


def _compute(found: Compute | None) -> tuple[Value, ...]:
    if found is None:
        return _nothing(len(_COMPUTE))
    money = (None, None, None) if found.cost is None else (found.cost, int(found.is_cost_partial), found.currency)
    return (found.gpu_hours, found.cpu_hours, *money)


def _head(table: Table, row: Row) -> tuple[Value, ...]:
    selected_by = row.selected_by.value if row.selected_by else ""
    return (*place_values(table.place), row.label_space, row.granularity, row.cell, selected_by)


def place_values(place: Place) -> tuple[Value, ...]:
    """Values of ``PLACE_COLUMNS``."""
    return (place.transfer, place.protocol, place.target, place.pretrain, place.checkpoint, place.fraction)


def _summary(summary: Summary | None) -> tuple[Value, ...]:
    if summary is None:
        return (0, *_nothing(len(_SUMMARY) - 1))
    parts = summary.components
    spread = (parts.pretrain_std, parts.transfer_std) if parts else (None, None)
    return (summary.num_values, summary.mean, summary.std, summary.low, summary.high, *spread)


def difference_values(found: PairedDifference | None) -> tuple[Value, ...]:
    """Values of ``DIFFERENCE_COLUMNS``."""
    if found is None:
        return _nothing(len(DIFFERENCE_COLUMNS))
    interval = (found.mean, found.low, found.high, found.confidence, found.num_pairs)
    family = (found.std_error, found.p_family, found.family_low, found.family_high, found.p_pooled)
    return (*interval, found.p_value, found.p_holm, found.p_bh, *family)


def _published(found: Published | None) -> tuple[Value, ...]:
    return (None, None, None) if found is None else (found.value, found.std, found.source)


def _nothing(count: int) -> tuple[None, ...]:
    return (None,) * count
