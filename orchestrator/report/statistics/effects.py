"""Main effects and two-way interactions of a factorial design; pure.

A *cell* is one combination of factor values with its runs. The effect of one value against another is a contrast over
*matched* cells: pairs of cells that differ in this factor alone. Within each pretraining seed the differences of all
matched cells are averaged, and Student's t over these averages gives interval and p-value, so that a pretraining seed
is one observation here as in every other comparison. On complete designs this is the contrast of the repeated-measures
analysis of variance with the seed as subject (Maxwell, Delaney, Kelley: Designing Experiments and Analyzing Data, 3rd
edition, chapters 11 and 12): its standard error comes from the contrast's own interaction with the seed, so that no
sphericity is assumed. If cells are missing, only matched ones count. If runs are missing, all seeds average the same
cells: those that every one of them has. Otherwise a cell would count the more, the more of its seeds survived. What is
left out is reported.

The interaction of two factors is the difference of differences ``(a c - b c) - (a d - b d)``, also over matched cells.

Two values whose runs share only the seed number are independent samples: there the means of each side are
compared by Welch's t (Welch: The generalization of Student's problem, Biometrika 34, 1947), with the degrees of freedom
of Satterthwaite, limited where one sample has fewer seeds than another (``_welch_freedom``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from orchestrator.planning.estimate.power import CONFIDENCE, Noise
from orchestrator.report.statistics.corrections import corrected, within
from orchestrator.report.statistics.intervals import NO_SPREAD, Floats, MetricRange, estimate_columns
from orchestrator.report.statistics.summaries import SHARED_BASELINE, PairedDifference, SeedPair

MAX_VALUES_ALL_PAIRS = 8
"""Factors with more values are compared with their reference alone: pairs would grow with the square."""
MAX_INTERACTIONS = 64
"""Of two factors; where they have more, their test as a whole stands alone."""

Values = tuple[str, ...]
IsPaired = Callable[[str, str, str], bool]
"""Of a factor and two of its values: whether runs of equal seeds share more than the number of the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignCell:
    """The runs of one combination of values, in the order of the design's factors."""

    values: Values
    runs: Mapping[SeedPair, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WelchDifference(PairedDifference):
    """A difference of independent samples; ``num_pretrain_seeds`` is that of the smaller one."""

    welch_freedom: float
    """Satterthwaite's degrees of freedom, limited for samples of unequal sizes: see ``_welch_freedom``."""

    @property
    def freedom(self) -> float:
        """Degrees of freedom of ``std_error``."""
        return self.welch_freedom

    @property
    def is_paired(self) -> bool:
        """False: these are independent samples."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One contrast: of one factor a main effect, of two factors an interaction."""

    factors: tuple[str, ...]
    values: Values
    """A value of each factor; the contrast is these minus the references."""
    references: Values
    difference: PairedDifference
    """Mean contrast, corrected in the family of all effects of the design."""
    num_matched: int
    """Combinations of the other factors that are averaged: every seed that counts has all parts of the contrast in
    each of them."""
    num_combinations: int
    """Combinations of the other factors in which any part of the contrast has a run."""
    num_seeds: int
    """Pretraining seeds with all parts of the contrast in any combination; those that count may be fewer. Of
    independent samples those of the smaller one."""
    is_paired: bool = True
    """Whether runs of equal seeds were subtracted; False: independent samples, by Welch's t."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceTest:
    """The F test of a whole factor or interaction: whether any of its values differ. Assumes sphericity."""

    factors: tuple[str, ...]
    f_value: float
    freedom: int
    error_freedom: int
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What a design says of its factors."""

    contrasts: tuple[Effect, ...]
    """Main effects by factor, then interactions; one family."""
    tests: tuple[VarianceTest, ...]
    """Empty where a combination of values, or a run of one, is missing."""


class FactorialDesign:
    """The cells of one transfer by factor.

    Args:
        factors: their names.
        cells: combinations that have runs, each once; fewer than all combinations are fine.
        references: by factor the value that others are compared with; without one the first of ``levels``.
        levels: the values of every factor, in their order.
        is_paired: see ``IsPaired``; by default all are.
    """

    def __init__(
        self,
        factors: Sequence[str],
        cells: Sequence[DesignCell],
        *,
        levels: Mapping[str, Sequence[str]],
        references: Mapping[str, str] | None = None,
        is_paired: IsPaired | None = None,
    ) -> None:
        self._is_paired = is_paired or _all_paired
        present = [{cell.values[position] for cell in cells} for position in range(len(factors))]
        self._levels = [[v for v in levels[name] if v in some] for name, some in zip(factors, present, strict=True)]
        # A factor of one value has no effect; it stays, so that cells keep their places.
        self._factors = tuple(factors)
        self._references = [
            found if (found := (references or {}).get(name, "")) in some else next(iter(some), "")
            for name, some in zip(factors, self._levels, strict=True)
        ]
        pairs = sorted({pair for cell in cells for pair in cell.runs})
        seeds = {seed: number for number, seed in enumerate(sorted({pair.pretrain for pair in pairs}))}
        self._groups = [seeds[pair.pretrain] for pair in pairs]
        self._runs_PC: Floats = np.array(
            [[cell.runs.get(pair, np.nan) for cell in cells] for pair in pairs], dtype=np.float64
        ).reshape(len(pairs), len(cells))
        self._columns = {cell.values: column for column, cell in enumerate(cells)}

    def effects(self, bounds: MetricRange | None = None) -> Effects:
        """All main effects and two-way interactions as one family; ``bounds`` are those of the metric, if any."""
        found = self._contrasts()
        family = corrected([effect.difference for effect, _ in found], [self.is_asked(effect) for effect, _ in found])
        contrasts = [
            replace(effect, difference=within(difference, bounds, subtracted(), num_differences=len(effect.factors)))
            if bounds
            else replace(effect, difference=difference)
            for (effect, subtracted), difference in zip(found, family, strict=True)
            if difference
        ]
        return Effects(contrasts=tuple(contrasts), tests=tuple(self._variance_tests()))

    def contrasts(self) -> list[Effect]:
        """The main effects by factor, then the two-way interactions, before they are corrected as a family."""
        return [effect for effect, _ in self._contrasts()]

    def _contrasts(self) -> list[_Contrast]:
        return [found for found in (*self._main_effects(), *self._interactions()) if found is not None]

    def is_asked(self, effect: Effect) -> bool:
        """Whether it is a main effect against the reference, which has the baseline's share of the level."""
        if len(effect.factors) > 1:
            return False
        return effect.references == (self._references[self._factors.index(effect.factors[0])],)

    def _main_effects(self) -> Iterator[_Contrast | None]:
        for place, factor in enumerate(self._factors):
            cells = self._by_rest((place,))
            levels, reference = self._levels[place], self._references[place]
            others = [value for value in levels if value != reference]
            pairs = [(value, reference) for value in others]
            if len(levels) <= MAX_VALUES_ALL_PAIRS:
                pairs += [(second, first) for first, second in combinations(others, 2)]
            for value, other in pairs:
                paired = self._is_paired(factor, value, other)
                terms: list[_Term] = [(1, cells[value,]), (-1, cells[other,])]
                samples = [terms] if paired else [[term] for term in terms]
                yield self._effect((factor,), (value,), (other,), samples)

    def _interactions(self) -> Iterator[_Contrast | None]:
        for first, second in combinations(range(len(self._factors)), 2):
            cells = self._by_rest((first, second))
            a, c = self._references[first], self._references[second]
            rows = [value for value in self._levels[first] if value != a]
            columns = [value for value in self._levels[second] if value != c]
            if len(rows) * len(columns) > MAX_INTERACTIONS:
                continue
            for b, d in ((b, d) for b in rows for d in columns):
                terms: list[_Term] = [
                    (sign, cells.get(key, {})) for sign, key in ((1, (b, d)), (-1, (a, d)), (-1, (b, c)), (1, (a, c)))
                ]
                factors = (self._factors[first], self._factors[second])
                paired = self._is_paired(factors[0], b, a), self._is_paired(factors[1], d, c)
                yield self._effect(factors, (b, d), (a, c), _samples(terms, *paired))

    def _by_rest(self, places: tuple[int, ...]) -> dict[Values, dict[Values, int]]:
        """Columns by the values at ``places``, and below by those of all other factors."""
        found: dict[Values, dict[Values, int]] = {}
        for values, column in self._columns.items():
            rest = tuple(value for place, value in enumerate(values) if place not in places)
            found.setdefault(tuple(values[place] for place in places), {})[rest] = column
        return found

    def _effect(
        self, factors: tuple[str, ...], values: Values, references: Values, samples: list[list[_Term]]
    ) -> _Contrast | None:
        columns = [cells for sample in samples for _, cells in sample]
        rests = [rest for rest in columns[0] if all(rest in some for some in columns)]
        parts = [self._combined(sample, rests) for sample in samples]
        present = [self._by_seed(np.isfinite(part)) for part in parts]
        matched = np.logical_and.reduce([some.any(axis=0) for some in present])
        cells, seeds = balanced([some[:, matched] for some in present])
        if not len(cells):
            return None
        chosen = np.flatnonzero(matched)[cells]
        used = [self._of_seeds(part, some)[:, chosen] for part, some in zip(parts, seeds, strict=True)]
        of_contrast = [cell[rests[place]] for cell in columns for place in chosen]
        effect = Effect(
            factors=factors,
            values=values,
            references=references,
            difference=self._difference(used, float(np.nanmax(np.abs(self._runs_PC[:, of_contrast])))),
            num_matched=len(cells),
            num_combinations=len({rest for some in columns for rest in some}),
            num_seeds=min(int(some[:, matched].any(axis=1).sum()) for some in present),
            is_paired=len(samples) == 1,
        )
        return effect, partial(self._subtracted, samples, used, [rests[place] for place in chosen])

    def _by_seed(self, present_PC: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a pretraining seed has any run of each column."""
        if not self._groups:
            return present_PC
        first = np.searchsorted(self._groups, range(self._groups[-1] + 1))  # they ascend, as the seed pairs do
        return np.logical_or.reduceat(present_PC, first, axis=0)

    def _of_seeds(self, part_PC: Floats, seeds: NDArray[np.bool_]) -> Floats:
        """The runs of some pretraining seeds; NaN for the others."""
        return np.where(seeds[self._groups][:, None], part_PC, np.nan)

    def _combined(self, sample: Sequence[_Term], rests: Sequence[Values]) -> Floats:
        """Signed sum of the terms, ``(seed pairs, matched cells)``."""
        total = np.zeros((len(self._groups), len(rests)))
        for sign, cells in sample:
            total = total + sign * self._runs_PC[:, [cells[rest] for rest in rests]]
        return total

    def _subtracted(self, samples: Sequence[Sequence[_Term]], used: Sequence[Floats], rests: Sequence[Values]) -> float:
        """Mean of all terms but the first, as a number that was subtracted from it, over the runs that count."""
        of_first = np.where(np.isfinite(used[0]), self._combined(samples[0][1:], rests), np.nan)
        return -math.fsum(float(np.nanmean(_seed_means(part, self._groups))) for part in (of_first, *used[1:]))

    def _difference(self, parts: Sequence[Floats], scale: float) -> PairedDifference:
        """``scale`` is the largest of the values that were subtracted: below its rounding there is no spread."""
        means = [_seed_means(part, self._groups) for part in parts]
        num_pairs = min(int(np.isfinite(part).sum()) for part in parts)
        if len(parts) == 1:
            there = _without_rounding(means[0][np.isfinite(means[0])], scale)
            estimate = estimate_columns(there[:, None], range(len(there)))[0]
            return PairedDifference(
                num_pairs=num_pairs,
                mean=estimate.mean,
                low=estimate.low,
                high=estimate.high,
                confidence=CONFIDENCE,
                num_pretrain_seeds=estimate.num_groups,
                p_value=estimate.p_value,
                std_error=estimate.std_error,
            )
        return _welch([part[np.isfinite(part)] for part in means], num_pairs, scale)

    def _variance_tests(self) -> Iterator[VarianceTest]:
        means = self._complete()
        if means is None:
            return
        places = [place for place, levels in enumerate(self._levels) if len(levels) > 1]
        for chosen in (*combinations(places, 1), *combinations(places, 2)):
            test = _variance_test(means, chosen, tuple(self._factors[place] for place in chosen))
            if test is not None:
                yield test

    def _complete(self) -> Floats | None:
        """Means over transfers, ``(seeds, values of factor 1, values of factor 2, ...)``; None unless all are there."""
        shape = tuple(len(levels) for levels in self._levels)
        if len(self._columns) != np.prod(shape, dtype=int) or not np.isfinite(self._runs_PC).all():
            return None
        if len(set(np.bincount(self._groups))) != 1:  # seeds with more transfers would have another variance
            return None
        places = [{value: number for number, value in enumerate(levels)} for levels in self._levels]
        num_seeds = max(self._groups) + 1
        if num_seeds < 2:
            return None
        found = np.empty((num_seeds, *shape))
        by_seed = np.add.reduceat(self._runs_PC, np.searchsorted(self._groups, range(num_seeds)), axis=0)
        by_seed /= np.bincount(self._groups)[:, None]
        for values, column in self._columns.items():
            index: tuple[slice | int, ...] = (
                slice(None),
                *(place[value] for place, value in zip(places, values, strict=True)),
            )
            found[index] = by_seed[:, column]
        return found


def effect_noise(effects: Sequence[Effect]) -> Noise | None:
    """What contrasts of the same factors vary by from seed to seed, pooled; None where none shows any spread.

    The standard deviation is that of the contrast within one pretraining seed, averaged over matched cells and
    transfers, whose spread is in it. Of independent samples it is the root of the sum of their variances.
    """
    found = [(effect.difference, error) for effect in effects if (error := effect.difference.std_error)]
    if not found:
        return None
    variance = sum(error**2 * difference.num_pretrain_seeds for difference, error in found) / len(found)
    return Noise(
        pretrain_std=variance**0.5,
        transfer_std=None,
        num_pretrain_seeds=max(difference.num_pretrain_seeds for difference, _ in found),
        freedom=sum(difference.freedom for difference, _ in found) / (1 + (len(found) - 1) * SHARED_BASELINE),
    )


def independent_difference(
    values: Mapping[SeedPair, float], baseline: Mapping[SeedPair, float]
) -> PairedDifference | None:
    """Mean of the values minus that of the baseline by Welch's t over pretraining seeds; None without a value of both.

    For runs that share the number of the seed only, where ``summaries.paired_difference`` would subtract by chance.
    """
    if not values or not baseline:
        return None
    sides = [
        sign * _seed_means(np.array(list(runs.values()))[:, None], [pair.pretrain for pair in runs])
        for sign, runs in ((1, values), (-1, baseline))
    ]
    scale = max(map(abs, (*values.values(), *baseline.values())))
    return _welch([side[np.isfinite(side)] for side in sides], min(len(values), len(baseline)), scale)


def _all_paired(*_: str) -> bool:
    return True


_Term = tuple[int, Mapping[Values, int]]
"""Sign of a part of a contrast, and its cells by the values of the other factors."""
_Contrast = tuple[Effect, Callable[[], float]]
"""An effect, and what computes the mean of what was subtracted: only intervals of rates need it."""


def _samples(terms: Sequence[_Term], first_paired: bool, second_paired: bool) -> list[list[_Term]]:  # noqa: FBT001
    """The four parts of an interaction by what they share: parts within a sample are subtracted seed by seed."""
    bd, ad, bc, ac = terms
    if first_paired and second_paired:
        return [[bd, ad, bc, ac]]
    if first_paired:
        return [[bd, ad], [bc, ac]]
    return [[bd, bc], [ad, ac]] if second_paired else [[bd], [ad], [bc], [ac]]


def balanced(
    present: Sequence[NDArray[np.bool_]],
) -> tuple[NDArray[np.intp], list[NDArray[np.bool_]]]:
    """The columns to average, and of every matrix the rows that have all of them.

    Of the columns in the order of how many rows have them, the first ones such that most is kept of the matrix that
    keeps least: all columns and the rows that have all, the columns that all rows have, or what lies between. Of equal
    choices the one with more rows. No column where nothing is present.

    Args:
        present: matrices of the same columns, such as seeds by cells.
    """
    order = np.argsort(-np.minimum.reduce([some.sum(axis=0) for some in present]), kind="stable")
    whole = [np.logical_and.accumulate(some[:, order], axis=1) for some in present]
    kept = np.minimum.reduce([some.sum(axis=0) for some in whole]) * np.arange(1, len(order) + 1)
    if not kept.any():
        return np.array([], dtype=np.intp), [np.zeros(len(some), dtype=np.bool_) for some in present]
    last = int(np.argmax(kept))
    return np.sort(order[: last + 1]), [some[:, last] for some in whole]


def balanced_means(cells: Sequence[DesignCell], expected: Sequence[Collection[SeedPair]]) -> list[float | None]:
    """By cell the mean over runs that no other of these cells lacks; None for a cell that is left out for that.

    Args:
        cells: of a design.
        expected: the runs of each that are planned; what is not planned is not lacking.
    """
    pairs = sorted({pair for cell in cells for pair in cell.runs})
    planned = list(zip(cells, expected, strict=True))
    present = [[pair in cell.runs or pair not in some for cell, some in planned] for pair in pairs]
    chosen, (rows,) = balanced([np.array(present, dtype=np.bool_).reshape(len(pairs), len(cells))])
    kept = {pair for pair, is_kept in zip(pairs, rows, strict=True) if is_kept}
    values = [[value for pair, value in cell.runs.items() if pair in kept] for cell in cells]
    return [math.fsum(some) / len(some) if some and index in chosen else None for index, some in enumerate(values)]


def _without_rounding(differences: Floats, scale: float) -> Floats:
    """Differences that are the same to the rounding of what was subtracted, exactly the same; 0 where they are none."""
    limit = NO_SPREAD * scale
    mean = float(differences.mean())
    if np.abs(differences - mean).max() > limit:
        return differences
    return np.full_like(differences, 0.0 if abs(mean) <= limit else mean)


def _seed_means(values_PC: Floats, groups: Sequence[int]) -> Floats:
    """By pretraining seed the mean over matched cells of the means over transfers; NaN without a value."""
    numbers = np.asarray(groups)
    present = np.isfinite(values_PC)
    num_seeds = int(numbers.max(initial=-1)) + 1
    sums, counts = np.zeros((num_seeds, values_PC.shape[1])), np.zeros((num_seeds, values_PC.shape[1]))
    for row, seed in enumerate(numbers):
        sums[seed] += np.where(present[row], values_PC[row], 0.0)
        counts[seed] += present[row]
    has_any: NDArray[np.bool_] = counts > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = np.where(has_any, sums / counts, 0.0).sum(axis=1) / has_any.sum(axis=1)
    return found


def _welch(samples: Sequence[Floats], num_pairs: int, scale: float) -> PairedDifference:
    """The sum of the means of independent, signed samples, each of seed means; ``scale`` as of ``_difference``."""
    from scipy import special

    mean = float(sum(sample.mean() for sample in samples))
    mean = 0.0 if abs(mean) <= NO_SPREAD * scale else mean
    smallest = min(map(len, samples))
    known = WelchDifference(
        num_pairs=num_pairs,
        mean=mean,
        low=None,
        high=None,
        confidence=CONFIDENCE,
        num_pretrain_seeds=smallest,
        welch_freedom=0.0,
    )
    if smallest < 2:
        return known
    parts = [(float(sample.var(ddof=1)) / len(sample), len(sample)) for sample in samples]
    variance = sum(part for part, _ in parts)
    if variance <= (NO_SPREAD * scale) ** 2:
        return known
    freedom = _welch_freedom(parts)
    error = variance**0.5
    half = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return replace(
        known,
        low=mean - half,
        high=mean + half,
        p_value=2 * float(special.stdtr(freedom, -abs(mean / error))),
        std_error=error,
        welch_freedom=freedom,
    )


def _welch_freedom(parts: Sequence[tuple[float, int]]) -> float:
    """Satterthwaite's degrees of freedom, but at most ``(m - 1) * sum(m / n)``, where m is the smallest n.

    Satterthwaite's formula has estimates in place of the true variances. Where the few seeds of a small sample happen
    to be close to each other, the formula gives the large freedom of the other sample, and the standard error is too
    small: two seeds beside ten differed twice as often as the level of 5 % allows, and 13 times as often as that of
    0.1 %. The limit is what the formula has at most for samples of equal sizes, where it changes nothing. For two
    samples of m and M seeds it is ``(m - 1) * (1 + m / M)``, which tends to ``m - 1``: that is exact where the other
    mean is known.

    Args:
        parts: of each sample the estimated variance of its mean, and the number n of its seeds, at least 2.
    """
    smallest = min(size for _, size in parts)
    satterthwaite = sum(part for part, _ in parts) ** 2 / sum(part**2 / (size - 1) for part, size in parts)
    return min(satterthwaite, (smallest - 1) * sum(smallest / size for _, size in parts))


def _variance_test(means: Floats, places: tuple[int, ...], factors: tuple[str, ...]) -> VarianceTest | None:
    """F of one or two within-seed factors against their interaction with the seed; None without any spread."""
    from scipy import special

    others = tuple(1 + place for place in range(means.ndim - 1) if place not in places)
    num_seeds, centred = len(means), means.mean(axis=others) if others else means
    scale = NO_SPREAD * float(np.abs(means).max())
    for axis in range(1, centred.ndim):
        centred = centred - centred.mean(axis=axis, keepdims=True)
    effect = centred.mean(axis=0)
    freedom = int(np.prod([size - 1 for size in effect.shape]))
    error_freedom = freedom * (num_seeds - 1)
    error = float(((centred - effect) ** 2).sum()) / error_freedom
    if error <= scale**2:
        return None
    f_value = num_seeds * float((effect**2).sum()) / freedom / error
    return VarianceTest(
        factors=factors,
        f_value=f_value,
        freedom=freedom,
        error_freedom=error_freedom,
        p_value=float(special.fdtrc(freedom, error_freedom, f_value)),
    )
