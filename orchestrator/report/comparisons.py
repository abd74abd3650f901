"""Everything in a table that relates its rows to each other; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from orchestrator.planning.estimate.power import MAX_ROWS_ALL_PAIRS, Comparisons
from orchestrator.report.results import Comparison, FactorTable, Row, Table, values_by_seeds
from orchestrator.report.statistics.corrections import (
    Family,
    PooledFit,
    complete,
    corrected,
    family_method,
    p_all_pairs,
    p_many_to_one,
    two_way,
    within,
)
from orchestrator.report.statistics.effects import independent_difference
from orchestrator.report.statistics.intervals import MetricRange
from orchestrator.report.statistics.summaries import (
    PairedDifference,
    SeedPair,
    all_paired_differences,
    mean_in_common,
    paired_differences,
    relative_improvement,
)

IsPaired = Callable[[str, str], bool]
"""Of the names of two rows: whether runs of equal seeds share more than the number of the seed."""
Compared = TypeVar("Compared", bound=Table)


def compared(table: Compared, bounds: MetricRange | None = None, is_paired: IsPaired | None = None) -> Compared:
    """The table with every pair of its rows compared as one family, which all other comparisons are taken from.

    Args:
        table: of label spaces, or of combinations of factors.
        bounds: those of the metric, where it has any.
        is_paired: of two rows; by default all are.
    """
    there = [row for row in table.rows if row.results]
    values = [values_of(row, table.metric) for row in there]
    baseline = table.baseline_row
    is_large = not has_all_pairs(table)
    find = _with_baseline if is_large else _all_pairs
    pairs = find(there, values, baseline, is_paired or _all_paired)
    num_unpaired = sum(not is_paired(pair.first, pair.second) for pair in pairs) if is_paired else 0
    flags = [baseline is not None and pair.second == baseline.label_space for pair in pairs]
    family = corrected([pair.difference for pair in pairs], flags)
    fit = None
    if not (is_large or num_unpaired):  # the pooled analysis is one of pairs, and of all rows
        fit, family = _pooled([row.label_space for row in there], values, pairs, family, flags)
    runs = {row.label_space: some for row, some in zip(there, values, strict=True)}
    comparisons = tuple(
        replace(pair, difference=within(found, bounds, subtracted_mean(found, runs[pair.first], runs[pair.second])))
        for pair, found in zip(pairs, family, strict=True)
        if found is not None
    )
    table = replace(table, comparisons=comparisons, family=_family(comparisons, flags, fit))
    return replace(table, rows=tuple(_related(row, table, baseline, has_all=not is_large) for row in table.rows))


def has_all_pairs(table: Table) -> bool:
    """Whether every pair of rows with results is compared; of many combinations each is with the baseline alone."""
    return not isinstance(table, FactorTable) or sum(bool(row.results) for row in table.rows) <= MAX_ROWS_ALL_PAIRS


def planned_comparisons(table: Table) -> Comparisons:
    """The family of a table once all of its rows have results."""
    num, has_baseline = len(table.rows), any(row.label_space == table.baseline for row in table.rows)
    make = Comparisons.of_combinations if isinstance(table, FactorTable) else Comparisons.of_spaces
    return make(num, has_baseline=has_baseline)


def values_of(row: Row, metric: str) -> dict[SeedPair, float]:
    """The row's values by what pairs them."""
    return values_by_seeds(row.results, metric)


def subtracted_mean(
    difference: PairedDifference, values: Mapping[SeedPair, float], subtracted: Mapping[SeedPair, float]
) -> float:
    """Mean of what was subtracted over the runs that the difference is about: of pairs, those that both have."""
    return mean_in_common(values if difference.is_paired else subtracted, subtracted)


def _all_paired(_first: str, _second: str) -> bool:
    return True


def _all_pairs(
    there: Sequence[Row], values: Sequence[Mapping[SeedPair, float]], baseline: Row | None, is_paired: IsPaired
) -> list[Comparison]:
    """Every pair that can be compared, in the order of the rows; the baseline is always what is subtracted.

    Pairs have a run in common; independent samples, which are compared by Welch's t, need none.
    """
    pairs = []
    for index, (first, found) in enumerate(zip(there, all_paired_differences(values), strict=True)):
        later = zip(there[index + 1 :], values[index + 1 :], found, strict=True)
        for second, runs, of_pairs in later:
            # Candidate minus baseline is second minus first: turned round by exchanging the names.
            names, difference = (second.label_space, first.label_space), of_pairs
            if not is_paired(*names):
                difference = independent_difference(runs, values[index]) or of_pairs
            if difference is None:
                continue
            if baseline is not None and second.label_space == baseline.label_space:
                names, difference = (first.label_space, second.label_space), difference.turned
            pairs.append(Comparison(first=names[0], second=names[1], difference=difference))
    return pairs


def _with_baseline(
    there: Sequence[Row], values: Sequence[Mapping[SeedPair, float]], baseline: Row | None, is_paired: IsPaired
) -> list[Comparison]:
    """Every row with the baseline."""
    if baseline is None:
        return []
    subtracted = values[[row.label_space for row in there].index(baseline.label_space)]
    pairs = []
    for row, runs, difference in zip(there, values, paired_differences(values, subtracted), strict=True):
        if row.label_space == baseline.label_space:
            continue
        found = difference
        if not is_paired(row.label_space, baseline.label_space):
            found = independent_difference(runs, subtracted) or difference
        if found is not None:
            pairs.append(Comparison(first=row.label_space, second=baseline.label_space, difference=found))
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
        method=family_method(pair.difference for pair in comparisons),
        pooled=fit,
    )


def _related(row: Row, table: Table, baseline: Row | None, *, has_all: bool) -> Row:
    """The row with what the table's comparisons say of it; whether it can be the best needs all of them."""
    if not row.results:
        return row
    row = replace(row, can_be_best=_can_be_best(row, table) if has_all else None)
    if baseline is None or row.label_space == baseline.label_space:
        return row
    pairs = (pair for pair in table.comparisons if pair.first == row.label_space)
    found = next((pair.difference for pair in pairs if pair.second == baseline.label_space), None)
    return replace(row, improvement=_improvement(row, baseline, table, found), difference=found)


def _can_be_best(row: Row, table: Table) -> bool | None:
    """Whether no other row is established to be better."""
    sign = table.better.sign
    if table.family is None or not table.family.num_comparisons:
        return None
    sides = [
        (pair.first == row.label_space) == (sign * pair.difference.mean > 0)
        for pair in table.comparisons
        if row.label_space in {pair.first, pair.second} and pair.difference.is_established
    ]
    return not any(sides)


def _improvement(row: Row, baseline: Row, table: Table, difference: PairedDifference | None) -> float | None:
    """Positive = better; of a metric that is better higher, the share by which it is.

    Where rows lack runs, it is that of the runs which the difference beside it is about, averaged as there (pretrain
    seeds count equally): the two never have opposite signs.
    """
    if row.summary is None or baseline.summary is None:
        return None
    value, subtracted = row.summary.mean, baseline.summary.mean
    runs, of_baseline = values_of(row, table.metric), values_of(baseline, table.metric)
    if difference is not None and (runs.keys() != of_baseline.keys() or not _is_balanced(row)):
        subtracted = subtracted_mean(difference, runs, of_baseline)
        value = subtracted + difference.mean
    found = relative_improvement(value, subtracted)
    return None if found is None else table.better.sign * found


def _is_balanced(row: Row) -> bool:
    """Whether every pretrain seed has as many runs, so that means over runs and over seeds are the same."""
    return row.summary is None or row.summary.components is None or row.summary.components.is_balanced
