"""Everything in a table that relates its rows to each other; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.planning.estimate.power import Comparisons
from orchestrator.report.results import Comparison, Row, Table
from orchestrator.report.statistics.corrections import (
    Family,
    PooledFit,
    complete,
    corrected,
    p_all_pairs,
    p_many_to_one,
    two_way,
    within,
)
from orchestrator.report.statistics.intervals import MetricRange
from orchestrator.report.statistics.summaries import (
    PairedDifference,
    SeedPair,
    all_paired_differences,
    mean_in_common,
    relative_improvement,
)


def compared(table: Table, bounds: MetricRange | None = None) -> Table:
    """The table with every pair of its rows compared as one family, which all other comparisons are taken from.

    ``bounds`` are those of the metric, where it has any.
    """
    there = [row for row in table.rows if row.results]
    values = [values_of(row, table.metric) for row in there]
    baseline = table.baseline_row
    pairs = _all_pairs(there, values, baseline)
    flags = [baseline is not None and pair.second == baseline.label_space for pair in pairs]
    family = corrected([pair.difference for pair in pairs], flags)
    fit, family = _pooled([row.label_space for row in there], values, pairs, family, flags)
    runs = {row.label_space: some for row, some in zip(there, values, strict=True)}
    comparisons = tuple(
        replace(pair, difference=within(found, bounds, mean_in_common(runs[pair.first], runs[pair.second])))
        for pair, found in zip(pairs, family, strict=True)
        if found is not None
    )
    table = replace(table, comparisons=comparisons, family=_family(comparisons, flags, fit))
    return replace(table, rows=tuple(_related(row, table, baseline) for row in table.rows))


def values_of(row: Row, metric: str) -> dict[SeedPair, float]:
    """The row's values by what pairs them."""
    return {result.seeds: result.metrics[metric] for result in row.results}


def _all_pairs(
    there: Sequence[Row], values: Sequence[Mapping[SeedPair, float]], baseline: Row | None
) -> list[Comparison]:
    """Every pair with a run in common, in the order of the rows; the baseline is always what is subtracted."""
    pairs = []
    for index, (first, found) in enumerate(zip(there, all_paired_differences(values), strict=True)):
        for second, difference in zip(there[index + 1 :], found, strict=True):
            if difference is None:
                continue
            # Candidate minus baseline is second minus first: turned round by exchanging the names.
            names, of_pair = (second.label_space, first.label_space), difference
            if baseline is not None and second.label_space == baseline.label_space:
                names, of_pair = (first.label_space, second.label_space), difference.turned
            pairs.append(Comparison(first=names[0], second=names[1], difference=of_pair))
    return pairs


def _pooled(
    spaces: Sequence[str],
    values: Sequence[dict[SeedPair, float]],
    pairs: Sequence[Comparison],
    family: Sequence[PairedDifference | None],
    flags: Sequence[bool],
) -> tuple[PooledFit | None, list[PairedDifference | None]]:
    """The second analysis: its fit, and the comparisons with its p-values unless the runs contradict it."""
    chosen, means = complete(values)
    fit = two_way(means)
    if fit is None or fit.is_contradicted:
        return fit, list(family)
    names = {spaces[index] for index in chosen}
    inside = [index for index, pair in enumerate(pairs) if pair.first in names and pair.second in names]
    with_baseline, others = [index for index in inside if flags[index]], [i for i in inside if not flags[i]]
    with_share, other_share = Comparisons(num_with_baseline=len(with_baseline), num_others=len(others)).shares
    freedom, num_alike = fit.degrees_of_freedom, fit.num_label_spaces - bool(with_baseline)

    def t_of(indices: Sequence[int]) -> list[float]:
        return [abs(pairs[index].difference.mean) / fit.std_error for index in indices]

    p_values: dict[int, float] = {}
    if with_baseline:
        p_values |= zip(with_baseline, p_many_to_one(t_of(with_baseline), len(with_baseline), freedom), strict=True)
    if others:
        p_values |= zip(others, p_all_pairs(t_of(others), num_alike, freedom), strict=True)
    level = {True: with_share * len(with_baseline), False: other_share * len(others)}
    return fit, [
        replace(found, p_pooled=min(1.0, float(p_values[index]) / level[flags[index]]))
        if found is not None and index in p_values
        else found
        for index, found in enumerate(family)
    ]


def _family(comparisons: Sequence[Comparison], flags: Sequence[bool], fit: PooledFit | None) -> Family:
    tested = [
        (pair.difference, flag)
        for pair, flag in zip(comparisons, flags, strict=True)
        if pair.difference.p_family is not None
    ]
    return Family(
        num_comparisons=len(tested),
        num_with_baseline=sum(flag for _, flag in tested),
        num_established=sum(found.is_established for found, _ in tested),
        max_pretrain_seeds=max((pair.difference.num_pretrain_seeds for pair in comparisons), default=0),
        pooled=fit,
    )


def _related(row: Row, table: Table, baseline: Row | None) -> Row:
    """The row with what the table's comparisons say of it."""
    if not row.results:
        return row
    row = replace(row, can_be_best=_can_be_best(row, table))
    if baseline is None or row.label_space == baseline.label_space:
        return row
    pairs = (pair for pair in table.comparisons if pair.first == row.label_space)
    found = next((pair.difference for pair in pairs if pair.second == baseline.label_space), None)
    return replace(row, improvement=_improvement(row, baseline), difference=found)


def _can_be_best(row: Row, table: Table) -> bool | None:
    """Whether no other row is established to be lower."""
    if table.family is None or not table.family.num_comparisons:
        return None
    sides = [
        (pair.first == row.label_space) == (pair.difference.mean > 0)
        for pair in table.comparisons
        if row.label_space in {pair.first, pair.second} and pair.difference.is_established
    ]
    return not any(sides)


def _improvement(row: Row, baseline: Row) -> float | None:
    if row.summary is None or baseline.summary is None:
        return None
    return relative_improvement(row.summary.mean, baseline.summary.mean)
