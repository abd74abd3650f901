"""A report as CSV (RFC 4180): one file of summaries, one with a line per run to compute anything else from.

All rates are fractions; an empty cell is a value that does not exist (yet).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from orchestrator.report.results import Report, Row, Table
from orchestrator.report.statistics import Summary

_PLACE_COLUMNS = ("transfer", "protocol", "target", "label_space", "granularity")
_COMPARISON_COLUMNS = ("relative_improvement", "paired_difference", "ci_low", "ci_high", "confidence")
_SUMMARY_COLUMNS = (
    *_PLACE_COLUMNS,
    "metric",
    "subset",
    "num_runs",
    "num_expected",
    "mean",
    "std",
    *_COMPARISON_COLUMNS,
)
_RUN_COLUMNS = (*_PLACE_COLUMNS, "pretrain_seed", "transfer_seed", "job", "key")

Cell = str | int | float | None


def render_results_csv(report: Report) -> str:
    """One line per label space and transfer, and one per subset of the validation samples."""
    lines = [line for table in report.tables for row in table.rows for line in _summary_lines(table, row)]
    return _render(_SUMMARY_COLUMNS, lines)


def render_runs_csv(report: Report) -> str:
    """One line per committed run with all of its final metrics."""
    rows = [(table, row) for table in report.tables for row in table.rows]
    metrics = sorted({name for _, row in rows for result in row.results for name in result.metrics})
    lines = [
        [
            *_place(table, row),
            *(result.seeds.pretrain, result.seeds.transfer, result.job, result.key),
            *(result.metrics.get(name) for name in metrics),
        ]
        for table, row in rows
        for result in row.results
    ]
    return _render((*_RUN_COLUMNS, *metrics), lines)


def _summary_lines(table: Table, row: Row) -> list[list[Cell]]:
    def line(metric: str, subset: str, summary: Summary | None, comparison: Sequence[Cell]) -> list[Cell]:
        return [*_place(table, row), metric, subset, *_numbers(summary, row.num_expected), *comparison]

    nothing: list[Cell] = [None] * len(_COMPARISON_COLUMNS)
    subsets = [line(f"{table.metric}_{name}", name, summary, nothing) for name, summary in row.subsets.items()]
    return [line(table.metric, "", row.summary, _comparison(row)), *subsets]


def _numbers(summary: Summary | None, num_expected: int) -> list[Cell]:
    if summary is None:
        return [0, num_expected, None, None]
    return [summary.num_values, num_expected, summary.mean, summary.std]


def _comparison(row: Row) -> list[Cell]:
    difference = row.difference
    if difference is None:
        return [row.improvement, None, None, None, None]
    return [row.improvement, difference.mean, difference.low, difference.high, difference.confidence]


def _place(table: Table, row: Row) -> list[Cell]:
    return [table.transfer, table.protocol, table.target, row.label_space, row.granularity]


def _render(columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(lines)
    return file.getvalue()
