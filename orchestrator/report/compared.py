"""Everything in a table that relates its rows to each other; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.report.bootstrap import probabilities_best
from orchestrator.report.corrections import benjamini_hochberg, holm
from orchestrator.report.results import Comparison, Row, Table
from orchestrator.report.statistics import (
    PairedDifference,
    SeedPair,
    all_paired_differences,
    paired_differences,
    relative_improvement,
)


def compared(table: Table) -> Table:
    """The table with its rows compared: with the baseline, with each other, and all at once."""
    rows = _with_probabilities(table.rows, table.metric)
    table = replace(table, rows=rows, comparisons=_all_pairs(rows, table.metric))
    baseline = table.baseline_row
    return table if baseline is None else replace(table, rows=_to_baseline(rows, baseline, table.metric))


def corrected(differences: Sequence[PairedDifference | None]) -> list[PairedDifference | None]:
    """The same differences as one family: with their corrected p-values."""
    tested = [
        (index, found, found.p_value)
        for index, found in enumerate(differences)
        if found is not None and found.p_value is not None
    ]
    p_values = [p_value for _, _, p_value in tested]
    family = list(differences)
    for (index, found, _), p_holm, p_bh in zip(tested, holm(p_values), benjamini_hochberg(p_values), strict=True):
        family[index] = replace(found, p_holm=p_holm, p_bh=p_bh)
    return family


def values_of(row: Row, metric: str) -> dict[SeedPair, float]:
    """The row's values by what pairs them."""
    return {result.seeds: result.metrics[metric] for result in row.results}


def _with_probabilities(rows: Sequence[Row], metric: str) -> tuple[Row, ...]:
    there = [row for row in rows if row.results]
    found = probabilities_best([values_of(row, metric) for row in there]) if len(there) > 1 else None
    shares = dict(zip((row.label_space for row in there), found or (), strict=False))
    return tuple(replace(row, probability_best=shares.get(row.label_space)) for row in rows)


def _to_baseline(rows: Sequence[Row], baseline: Row, metric: str) -> tuple[Row, ...]:
    others = [row for row in rows if row.label_space != baseline.label_space and row.summary]
    family = corrected(paired_differences([values_of(row, metric) for row in others], values_of(baseline, metric)))
    found = dict(zip((row.label_space for row in others), family, strict=True))
    return tuple(
        replace(row, improvement=_improvement(row, baseline), difference=found[row.label_space])
        if row.label_space in found
        else row
        for row in rows
    )


def _improvement(row: Row, baseline: Row) -> float | None:
    if row.summary is None or baseline.summary is None:
        return None
    return relative_improvement(row.summary.mean, baseline.summary.mean)


def _all_pairs(rows: Sequence[Row], metric: str) -> tuple[Comparison, ...]:
    there = [row for row in rows if row.results]
    values = [values_of(row, metric) for row in there]
    pairs, differences = [], []
    for index, (first, found) in enumerate(zip(there, all_paired_differences(values), strict=True)):
        # Candidate minus baseline is second minus first: turned round by exchanging the names.
        pairs += [(second.label_space, first.label_space) for second in there[index + 1 :]]
        differences += found
    family = zip(pairs, corrected(differences), strict=True)
    return tuple(Comparison(first=first, second=second, difference=found) for (first, second), found in family if found)
