"""Tests claims of papers about simulations, with error bars over seeds; pure.

A claim is about one or several numbers that follow from means over seeds: a mean, a ratio of two, a slope through
several. All cells of a simulation have the same seeds, so a seed is one observation of all of them together, and the
standard error of any such number is that of leaving out one seed at a time (the jackknife; Efron and Tibshirani, An
Introduction to the Bootstrap, section 11.3). For means and differences that is the usual and the paired one.

Where all seeds are equal there is no error: a closed form is judged as it is, and has no interval. A metric that is 0
or 1 in every seed of a simulation, and both in one of its cells, is the outcome of a trial. Its mean has the exact
interval (Clopper, Pearson: The Use of Confidence or Fiducial Limits, Biometrika 26, 1934): two-sided, but one-sided if
all n seeds have the same outcome. Then the other one can have a probability of up to 1 - 0.05^(1/n), also in a number
of several cells. Without a cell that has both outcomes, such a metric cannot be told from a closed form, nor from a
share of many samples that is 100 % for all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.planning.estimate.power import CONFIDENCE
from orchestrator.report.statistics.intervals import NO_SPREAD
from orchestrator.sweepfile.values import Expectation, Level, cell_name

Floats = NDArray[np.float64]


class Judgement(StrEnum):
    """What the runs say of a claim."""

    HOLDS = "holds"
    """Every number has its 95 % interval inside the claimed one."""
    FAILS = "does not hold"
    """A number has its interval outside, at 95 % for all numbers of the claim together (Bonferroni)."""
    TOO_FEW = "too few seeds"
    """Neither can be said yet."""
    UNDEFINED = "undefined"
    """A number does not exist for the means of the runs: see ``UNDEFINED_BECAUSE``."""


UNDEFINED_BECAUSE: Final[Mapping[str, str]] = {
    "slope": "the logarithm of a mean that is not above 0",
    "ratio": "a ratio to a mean of 0",
    "closed_form": "a ratio to a mean of 0",
}
"""By the rule of a claim; the numbers of others always exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedNumber:
    """One number of a claim."""

    name: str
    """Which cells it is about; empty where there is one alone."""
    num_seeds: int
    value: float | None
    """None without a seed, or where it is undefined: see ``UNDEFINED_BECAUSE``."""
    low: float | None = None
    """Ends of the 95 % interval; None with fewer than two seeds, and without any spread."""
    high: float | None = None
    is_equal: bool = False
    """Whether it is the same for all of two seeds or more, so that no interval can be stated."""

    @property
    def is_undefined(self) -> bool:
        """Whether there are seeds, and the number does not exist for their means."""
        return self.value is None and self.num_seeds > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedExpectation:
    """A claim, the numbers that it is about, and what they say."""

    expectation: Expectation
    metric: str
    numbers: tuple[ClaimedNumber, ...]
    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRuns:
    """All runs of a simulation: ``values[metric]`` (S, C) by seed and cell, NaN where there is none."""

    cells: Sequence[Mapping[str, Level]]
    values: Mapping[str, Floats]


Statistic = Callable[[Floats], Floats]
"""Means (..., n) of the cells of a number to that number (...)."""


@dataclass(frozen=True, slots=True)
class _Contrast:
    name: str
    columns: tuple[tuple[str, int], ...]
    """Metric and cell of each mean."""
    statistic: Statistic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What runs say of a number."""

    contrast: _Contrast
    value: float | None
    error: float
    """NaN with fewer than two seeds."""
    means_N: Floats
    """Of its cells, over the seeds that have all that it needs."""
    untried_N: Floats
    """By cell the direction of the outcome that no seed had: 1 where all are 0, -1 where all are 1; 0 elsewhere."""
    num_seeds: int
    is_equal: bool = False
    is_share: bool = False
    """Whether it is the share of trials of one cell that had the outcome 1, and both outcomes are there."""

    def ends(self, num_numbers: int) -> tuple[float, float]:
        """Of the interval that holds for so many numbers together; those of a single value if there is no error."""
        if self.is_share:
            return ends_of_share(round(float(self.value or 0) * self.num_seeds), self.num_seeds, num_numbers)
        value, near = float(self.value or 0), _half_width(self.error, self.num_seeds, num_numbers)
        missed = 1 - ((1 - CONFIDENCE) / num_numbers) ** (1 / self.num_seeds)
        low_N, high_N = self.means_N.copy(), self.means_N.copy()
        for cell in np.flatnonzero(self.untried_N):
            moved_N = self.means_N.copy()
            moved_N[cell] += missed * self.untried_N[cell]
            (low_N if self.contrast.statistic(moved_N) < value else high_N)[cell] = moved_N[cell]
        if not self.untried_N.any():
            return value - near, value + near
        return float(self.contrast.statistic(low_N)) - near, float(self.contrast.statistic(high_N)) + near


def judge(expectation: Expectation, runs: SimulationRuns, metric: str) -> JudgedExpectation:
    """Judge a claim; ``metric`` is what it is about where it does not say so itself."""
    asked = expectation.metric or metric
    contrasts = list(_contrasts(expectation, runs, asked))
    numbers, places = [], []
    for found in (_jackknife(contrast, runs) for contrast in contrasts):
        number = ClaimedNumber(name=found.contrast.name, num_seeds=found.num_seeds, value=found.value)
        if found.value is None or not np.isfinite(found.error):
            numbers.append(number)
            places.append(Judgement.UNDEFINED if number.is_undefined else Judgement.TOO_FEW)
            continue
        own, together = found.ends(1), found.ends(len(contrasts))
        low, high = (None, None) if found.is_equal else own
        numbers.append(replace(number, low=low, high=high, is_equal=found.is_equal))
        places.append(_place(expectation, own, together, is_exact=found.error == 0))
    order = (Judgement.FAILS, Judgement.UNDEFINED, Judgement.TOO_FEW, Judgement.HOLDS)
    verdict = min(places, key=order.index, default=Judgement.TOO_FEW)
    return JudgedExpectation(expectation=expectation, metric=asked, numbers=tuple(numbers), judgement=verdict)


def _place(claim: Expectation, own: tuple[float, float], together: tuple[float, float], *, is_exact: bool) -> Judgement:
    """Where a number lies, by its own interval and by the one that is corrected for all numbers of the claim."""
    low = -np.inf if claim.low is None else claim.low
    high = np.inf if claim.high is None else claim.high
    # The ends of an interval belong to it; a bound on one side, or an order, is strict.
    is_strict = claim.low is None or claim.high is None
    is_at_bound = is_exact and own[0] == own[1] and own[0] in {low, high}
    if together[1] < low or together[0] > high or (is_strict and is_at_bound):
        return Judgement.FAILS
    is_inside = low < own[0] and own[1] < high if is_strict else low <= own[0] <= own[1] <= high
    return Judgement.HOLDS if is_inside else Judgement.TOO_FEW


def _jackknife(contrast: _Contrast, runs: SimulationRuns) -> _Measured:
    """A number and its standard error, over the seeds that have all that it needs."""
    none = np.zeros(len(contrast.columns))
    if any(metric not in runs.values for metric, _ in contrast.columns):
        return _Measured(contrast=contrast, value=None, error=np.nan, means_N=none, untried_N=none, num_seeds=0)
    values_SN = np.stack([runs.values[metric][:, cell] for metric, cell in contrast.columns], axis=1)
    values_SN = values_SN[np.isfinite(values_SN).all(axis=1)]
    num = len(values_SN)
    if num == 0:
        return _Measured(contrast=contrast, value=None, error=np.nan, means_N=none, untried_N=none, num_seeds=0)
    means_N = values_SN.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(contrast.statistic(means_N))
        left_out_S = contrast.statistic((num * means_N - values_SN) / (num - 1)) if num > 1 else np.array([np.nan])
        error = float(np.sqrt((num - 1) / num * np.square(left_out_S - left_out_S.mean()).sum()))
    outcomes = [are_outcomes(runs.values[metric]) for metric, _ in contrast.columns]
    untried_N = np.where(outcomes, (values_SN == 0).all(axis=0) * 1.0 - (values_SN == 1).all(axis=0), 0.0)
    spread_N, scale_N = np.ptp(values_SN, axis=0), np.abs(values_SN).max(axis=0)
    is_flat = bool((spread_N <= NO_SPREAD * scale_N).all()) or error <= NO_SPREAD * abs(value)
    return _Measured(
        contrast=contrast,
        value=value if np.isfinite(value) else None,
        error=error,
        means_N=means_N,
        untried_N=untried_N,
        num_seeds=num,
        is_equal=is_flat and num > 1 and not untried_N.any(),
        is_share=contrast.statistic is _first and outcomes[0] and not untried_N.any(),
    )


def are_outcomes(values_SC: Floats) -> bool:
    """Whether a metric is the outcome of a trial: 0 or 1 wherever there is a value, and both in one of the cells."""
    is_0, is_1 = values_SC == 0, values_SC == 1
    return bool((is_0 | is_1 | np.isnan(values_SC)).all() and (is_0.any(axis=0) & is_1.any(axis=0)).any())


def _half_width(error: float, num_seeds: int, num_numbers: int) -> float:
    """Of a Student's t interval that holds for so many numbers together."""
    from scipy import special  # 0.1 s to import: only who reports pays for it

    return float(special.stdtrit(num_seeds - 1, 1 - (1 - CONFIDENCE) / 2 / num_numbers) * error)


def ends_of_share(num_ones: int, num_trials: int, num_numbers: int = 1) -> tuple[float, float]:
    """Clopper and Pearson's two-sided interval, where both outcomes were seen, for so many numbers together."""
    from scipy import special  # 0.1 s to import: only who reports pays for it

    missed = (1 - CONFIDENCE) / 2 / num_numbers
    low = special.betaincinv(num_ones, num_trials - num_ones + 1, missed)
    return float(low), float(special.betaincinv(num_ones + 1, num_trials - num_ones, 1 - missed))


def _contrasts(claim: Expectation, runs: SimulationRuns, metric: str) -> Iterator[_Contrast]:
    """The numbers of a claim, over each combination of the factors that it leaves open."""
    chosen = {index: cell for index, cell in enumerate(runs.cells) if claim.covers(cell)}
    if claim.rule == "mean":
        yield from (_Contrast(cell_name(cell), ((metric, index),), _first) for index, cell in chosen.items())
        return
    if claim.rule == "closed_form":
        for index, cell in chosen.items():
            yield _Contrast(cell_name(cell), ((metric, index), (claim.other_metric, index)), _agreement)
        return
    groups: dict[str, dict[Level, int]] = {}
    for index, cell in chosen.items():
        rest = {factor: level for factor, level in cell.items() if factor != claim.of}
        groups.setdefault(cell_name(rest), {})[cell[claim.of]] = index
    for name, by_level in groups.items():
        yield from _over_levels(claim, name, by_level, metric)


def _over_levels(claim: Expectation, name: str, by_level: Mapping[Level, int], metric: str) -> Iterator[_Contrast]:
    if claim.rule == "slope":
        levels = sorted(float(level) for level in by_level)
        order = sorted(by_level, key=float)
        columns = tuple((metric, by_level[level]) for level in order)
        yield _Contrast(name, columns, _slope(np.array(levels), log=claim.log))
        return
    if claim.rule == "ratio":
        wanted = [claim.levels]
    elif claim.rule == "ordering":
        wanted = list(pairwise(claim.levels))
    else:
        wanted = list(pairwise(sorted(by_level, key=float)))
    for first, second in wanted:
        if first in by_level and second in by_level:
            columns = ((metric, by_level[first]), (metric, by_level[second]))
            between = f"{claim.of} {first} to {second}" if claim.rule != "ratio" else ""
            label = ", ".join(part for part in (name, between) if part)
            yield _Contrast(label, columns, _ratio if claim.rule == "ratio" else _rise)


def _first(means_N: Floats) -> Floats:
    return means_N[..., 0]


def _ratio(means_N: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(means_N[..., 0] / means_N[..., 1])


def _agreement(means_N: Floats) -> Floats:
    """The ratio to a closed form; where both are 0, they agree."""
    are_0 = (means_N[..., 0] == 0) & (means_N[..., 1] == 0)
    return np.where(are_0, 1.0, _ratio(means_N))


def _rise(means_N: Floats) -> Floats:
    return means_N[..., 1] - means_N[..., 0]


def _slope(levels_N: Floats, *, log: bool) -> Statistic:
    """Of the least-squares line through the means."""
    x_N = np.log(levels_N) if log else levels_N
    weights_N = (x_N - x_N.mean()) / np.square(x_N - x_N.mean()).sum()

    def slope(means_N: Floats) -> Floats:
        return np.asarray((np.log(means_N) if log else means_N) @ weights_N)

    return slope
