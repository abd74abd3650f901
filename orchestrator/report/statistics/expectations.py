"""Tests claims of papers about simulations, with error bars over seeds; pure.

A claim is about one or several numbers that follow from means over seeds: a mean, a ratio of two, a slope through
several. All cells of a simulation have the same seeds, so a seed is one observation of all of them together, and the
standard error of any such number is that of leaving out one seed at a time (the jackknife; Efron and Tibshirani, An
Introduction to the Bootstrap, section 11.3). For means and differences that is the usual and the paired one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from orchestrator.planning.estimate.power import CONFIDENCE
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedNumber:
    """One number of a claim."""

    name: str
    """Which cells it is about; empty where there is one alone."""
    num_seeds: int
    value: float | None
    """None without a seed, or where it is undefined, as the logarithm of a negative mean."""
    low: float | None = None
    """Ends of the 95 % interval; None with fewer than two seeds."""
    high: float | None = None


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


def judge(expectation: Expectation, runs: SimulationRuns, metric: str) -> JudgedExpectation:
    """Judge a claim; ``metric`` is what it is about where it does not say so itself."""
    asked = expectation.metric or metric
    contrasts = list(_contrasts(expectation, runs, asked))
    numbers, places = [], []
    for contrast in contrasts:
        value, error, num_seeds = _jackknife(contrast, runs)
        if value is None or not np.isfinite(error):
            numbers.append(ClaimedNumber(name=contrast.name, num_seeds=num_seeds, value=value))
            places.append(Judgement.TOO_FEW)
            continue
        near, far = _half_width(error, num_seeds, 1), _half_width(error, num_seeds, len(contrasts))
        ends = {"low": value - near, "high": value + near}
        numbers.append(ClaimedNumber(name=contrast.name, num_seeds=num_seeds, value=value, **ends))
        places.append(_place(expectation, value, near, far))
    verdict = Judgement.TOO_FEW
    if places and all(place is Judgement.HOLDS for place in places):
        verdict = Judgement.HOLDS
    elif Judgement.FAILS in places:
        verdict = Judgement.FAILS
    return JudgedExpectation(expectation=expectation, metric=asked, numbers=tuple(numbers), judgement=verdict)


def _place(claim: Expectation, value: float, near: float, far: float) -> Judgement:
    """Where a number lies: its own interval is ``near`` to either side, the corrected one ``far``."""
    low = -np.inf if claim.low is None else claim.low
    high = np.inf if claim.high is None else claim.high
    # The ends of an interval belong to it; a bound on one side, or an order, is strict.
    is_strict = claim.low is None or claim.high is None
    if value + far < low or value - far > high or (is_strict and far == 0 and value in {low, high}):
        return Judgement.FAILS
    is_inside = low < value - near and value + near < high if is_strict else low <= value - near <= value + near <= high
    return Judgement.HOLDS if is_inside else Judgement.TOO_FEW


def _jackknife(contrast: _Contrast, runs: SimulationRuns) -> tuple[float | None, float, int]:
    """A number, its standard error (NaN with fewer than two seeds), and the seeds that have all that it needs."""
    if any(metric not in runs.values for metric, _ in contrast.columns):
        return None, float("nan"), 0
    values_SN = np.stack([runs.values[metric][:, cell] for metric, cell in contrast.columns], axis=1)
    values_SN = values_SN[np.isfinite(values_SN).all(axis=1)]
    num = len(values_SN)
    if num == 0:
        return None, float("nan"), 0
    means_N = values_SN.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(contrast.statistic(means_N))
        left_out_S = contrast.statistic((num * means_N - values_SN) / (num - 1)) if num > 1 else np.array([np.nan])
        error = float(np.sqrt((num - 1) / num * np.square(left_out_S - left_out_S.mean()).sum()))
    return (value if np.isfinite(value) else None), error, num


def _half_width(error: float, num_seeds: int, num_numbers: int) -> float:
    """Of a Student's t interval that holds for so many numbers together."""
    from scipy import special  # 0.1 s to import: only who reports pays for it

    return float(special.stdtrit(num_seeds - 1, 1 - (1 - CONFIDENCE) / 2 / num_numbers) * error)


def _contrasts(claim: Expectation, runs: SimulationRuns, metric: str) -> Iterator[_Contrast]:
    """The numbers of a claim, over each combination of the factors that it leaves open."""
    chosen = {index: cell for index, cell in enumerate(runs.cells) if claim.covers(cell)}
    if claim.rule == "mean":
        yield from (_Contrast(cell_name(cell), ((metric, index),), _first) for index, cell in chosen.items())
        return
    if claim.rule == "closed_form":
        for index, cell in chosen.items():
            yield _Contrast(cell_name(cell), ((metric, index), (claim.other_metric, index)), _ratio)
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
    return means_N[..., 0] / means_N[..., 1]


def _rise(means_N: Floats) -> Floats:
    return means_N[..., 1] - means_N[..., 0]


def _slope(levels_N: Floats, *, log: bool) -> Statistic:
    """Of the least-squares line through the means."""
    x_N = np.log(levels_N) if log else levels_N
    weights_N = (x_N - x_N.mean()) / np.square(x_N - x_N.mean()).sum()

    def slope(means_N: Floats) -> Floats:
        return np.asarray((np.log(means_N) if log else means_N) @ weights_N)

    return slope
