"""The statistics of a report: spread over seeds, intervals, the paper's relative improvement, paired comparisons. Pure.

Runs that differ only in their label space see the same images in the same order from the same initial backbone, so two
label spaces are compared pair by pair, over equal (pretrain seed, transfer seed). Transfers of one backbone are not
independent of each other: everything that claims a certainty averages them per pretrain seed first and rests on those
averages, so n transfers of one backbone are one observation, not n.

How much of the spread comes from the pretrain seed and how much from the transfer seed is estimated by the one-way
random effects model ``y_ij = mean + pretrain_i + transfer_ij`` and the analysis of variance (Henderson's method 1;
Searle, Casella, McCulloch: Variance Components, sections 3.5 balanced and 3.6 unbalanced): the mean squares within and
between pretrain seeds are set equal to what they are expected to be. For balanced runs with a component that is not
negative this is what REML gives too.

The model takes transfers as nested in backbones. In truth all backbones share the transfer seeds: a seed gives each of
them the same head, order and drawn labels. What a transfer seed adds to one label space and not to another is common to
all pretrain seeds, so it is in no interval: intervals hold for the transfer seeds that a sweep has.
``transfer_seed_effect`` measures it where there are two of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import pvariance

import numpy as np

from orchestrator.planning.estimate.power import CONFIDENCE, Noise
from orchestrator.report.statistics.intervals import NO_SPREAD, Estimate, Floats, estimate_columns

SHARED_BASELINE = 0.25
"""Squared correlation of two differences to one baseline, if all label spaces spread alike."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SeedPair:
    """What two runs must share to be compared as a pair."""

    pretrain: int
    transfer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What some results say together, in the unit of the results."""

    num_values: int
    mean: float
    """Over all values."""
    std: float | None
    """Over all values, with ``ddof=1``; None for a single value, whose spread is unknown rather than 0."""
    low: float | None = None
    """Lower end of Student's t interval of the mean over pretrain seeds; None with fewer than two of them, or where
    they do not differ at all."""
    high: float | None = None
    confidence: float = CONFIDENCE
    num_pretrain_seeds: int = 0
    """0 where nobody told which values belong together."""
    components: VarianceComponents | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Mean of value minus baseline over the seed pairs that both have; negative = lower than the baseline."""

    num_pairs: int
    mean: float
    low: float | None
    """Lower end of the confidence interval; None if fewer than two pretrain seeds are there to estimate it from, or if
    their differences are all the same."""
    high: float | None
    confidence: float
    num_pretrain_seeds: int = 0
    p_value: float | None = None
    """Two-sided, of Student's t test that the mean is 0, uncorrected; None where there is no interval."""
    p_holm: float | None = None
    """Corrected by Holm's method for all comparisons of the same family."""
    p_bh: float | None = None
    """The same by Benjamini and Hochberg's: bounds the share of false ones among those called different."""
    std_error: float | None = None
    p_family: float | None = None
    """Corrected for the family, see ``orchestrator.report.statistics.corrections``: what every claim rests on."""
    family_low: float | None = None
    """Simultaneous interval of the family; None beside a ``p_family`` where seeds are too few for one that the metric
    can have."""
    family_high: float | None = None
    p_pooled: float | None = None
    """Of the second analysis, see ``orchestrator.report.statistics.corrections``; None where its assumption is
    contradicted.

    The comparisons with the baseline and the others share the 5 % as in the first analysis, so the printed p is
    Dunnett's or Tukey's divided by its share of the level, see ``planning.estimate.power.Comparisons``.
    """

    @property
    def freedom(self) -> float:
        """Degrees of freedom of ``std_error``."""
        return self.num_pretrain_seeds - 1

    @property
    def is_paired(self) -> bool:
        """Whether runs of equal seeds were subtracted; False: independent samples, by Welch's t."""
        return True

    @property
    def is_established(self) -> bool:
        """Whether it differs from 0 within the family: its simultaneous interval excludes 0."""
        return self.p_family is not None and self.p_family < 1 - CONFIDENCE

    @property
    def turned(self) -> PairedDifference:
        """Baseline minus value."""
        low, high = _negated(self.low, self.high)
        family_low, family_high = _negated(self.family_low, self.family_high)
        return replace(self, mean=-self.mean, low=low, high=high, family_low=family_low, family_high=family_high)


def _negated(low: float | None, high: float | None) -> tuple[float | None, float | None]:
    return (None, None) if low is None or high is None else (-high, -low)


def summarize(values: Sequence[float]) -> Summary:
    """Mean and sample standard deviation. Raises ``ValueError`` if there are no values."""
    if not values:
        raise ValueError("a summary of no values was asked for; leave the cell empty instead")
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else None
    return Summary(num_values=len(values), mean=mean, std=std)


def summarize_runs(values: Mapping[SeedPair, float], *, confidence: float = CONFIDENCE) -> Summary:
    """Mean, spread, interval and variance components of runs by their seeds. Raises ``ValueError`` without a run."""
    plain = summarize(list(values.values()))
    groups = _by_pretrain_seed(values)
    estimate = estimate_columns([[value] for value in values.values()], _group_numbers(list(values)), confidence)[0]
    return Summary(
        num_values=plain.num_values,
        mean=plain.mean,
        std=plain.std,
        low=estimate.low,
        high=estimate.high,
        confidence=confidence,
        num_pretrain_seeds=len(groups),
        components=variance_components(list(groups.values())),
    )


def relative_improvement(value: float, baseline: float) -> float | None:
    """``(baseline - value) / baseline``: the fraction of the baseline's error that is gone; negative if it grew.

    The measure of "Towards Understanding the Effect of Pretraining Label Granularity", section 5. None where the
    baseline is not positive, because no fraction of nothing can be gone.
    """
    return (baseline - value) / baseline if baseline > 0 else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean ranks; None where one of them does not vary."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    ranks_2N = np.stack([_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)])
    return float(np.asarray(np.corrcoef(ranks_2N))[0, 1])


def _ranks(values_N: Floats) -> Floats:
    _, places, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    firsts = np.cumsum(counts) - counts
    ranks_N: Floats = (firsts + (counts - 1) / 2)[places]
    return ranks_N


def paired_difference(
    values: Mapping[SeedPair, float], baseline: Mapping[SeedPair, float], *, confidence: float = CONFIDENCE
) -> PairedDifference | None:
    """Mean difference over common seed pairs with Student's t interval; None without a common pair.

    Differences are first averaged per pretrain seed and the interval rests on those averages: with one transfer seed
    this is the ordinary paired t interval.
    """
    return paired_differences([values], baseline, confidence=confidence)[0]


def paired_differences(
    candidates: Sequence[Mapping[SeedPair, float]],
    baseline: Mapping[SeedPair, float],
    *,
    confidence: float = CONFIDENCE,
) -> list[PairedDifference | None]:
    """``paired_difference`` of each candidate to one baseline; one pass over all of them."""
    pairs = sorted(baseline)
    if not pairs or not candidates:
        return [None] * len(candidates)
    table = np.array([[values.get(pair, math.nan) for values in candidates] for pair in pairs])
    return _differences(table, np.array([[baseline[pair]] for pair in pairs]), pairs, confidence)


def mean_in_common(values: Mapping[SeedPair, float], baseline: Mapping[SeedPair, float]) -> float:
    """Mean of the baseline over the seed pairs that both have, averaged per pretrain seed first as differences are.

    NaN without a common pair.
    """
    groups: dict[int, list[float]] = {}
    for pair, value in baseline.items():
        if pair in values:
            groups.setdefault(pair.pretrain, []).append(value)
    means = [math.fsum(group) / len(group) for group in groups.values()]
    return math.fsum(means) / len(means) if means else math.nan


def all_paired_differences(
    values: Sequence[Mapping[SeedPair, float]], *, confidence: float = CONFIDENCE
) -> list[list[PairedDifference | None]]:
    """For each of the values, ``paired_differences`` of all that follow it to it: a triangle."""
    pairs = sorted({pair for some in values for pair in some})
    table = np.array([[some.get(pair, math.nan) for some in values] for pair in pairs]).reshape(len(pairs), len(values))
    triangle: list[list[PairedDifference | None]] = []
    for index, baseline in enumerate(values):
        rows, num_left = [row for row, pair in enumerate(pairs) if pair in baseline], len(values) - index - 1
        if not rows or not num_left:
            triangle.append([None] * num_left)
            continue
        there = [pairs[row] for row in rows]
        triangle.append(_differences(table[rows, index + 1 :], table[rows, index : index + 1], there, confidence))
    return triangle


def _differences(
    values_PC: Floats, baseline_P1: Floats, pairs: Sequence[SeedPair], confidence: float
) -> list[PairedDifference | None]:
    """Of each column to the baseline, row by row."""
    differences_PC = values_PC - baseline_P1
    larger_PC = np.maximum(np.abs(values_PC), np.abs(baseline_P1))
    scale_C = np.where(np.isfinite(differences_PC), larger_PC, 0.0).max(axis=0)
    estimates = estimate_columns(differences_PC, _group_numbers(pairs), confidence, scale=scale_C)
    return [_paired(estimate, confidence) for estimate in estimates]


def _paired(estimate: Estimate, confidence: float) -> PairedDifference | None:
    if estimate.num_values == 0:
        return None
    return PairedDifference(
        num_pairs=estimate.num_values,
        mean=estimate.mean,
        low=estimate.low,
        high=estimate.high,
        confidence=confidence,
        num_pretrain_seeds=estimate.num_groups,
        p_value=estimate.p_value,
        std_error=estimate.std_error,
    )


def _by_pretrain_seed(values: Mapping[SeedPair, float]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for pair in sorted(values):
        groups.setdefault(pair.pretrain, []).append(values[pair])
    return groups


def _group_numbers(pairs: Sequence[SeedPair]) -> list[int]:
    numbers = {seed: number for number, seed in enumerate(sorted({pair.pretrain for pair in pairs}))}
    return [numbers[pair.pretrain] for pair in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceComponents:
    """Standard deviations, in the unit of the results; None where the runs cannot tell."""

    pretrain_std: float | None
    """Between backbones, transfers apart; 0 where transfers alone explain how much backbones differ."""
    transfer_std: float | None
    """Between transfers of one backbone."""
    is_balanced: bool
    """Whether every pretrain seed has the same number of transfers."""


def variance_components(groups: Sequence[Sequence[float]]) -> VarianceComponents:
    """Components of results grouped by pretrain seed.

    The transfer seed's needs a backbone with two transfers, the pretrain seed's two backbones besides.
    """
    sizes = [len(group) for group in groups if group]
    num_values, num_groups = sum(sizes), len(sizes)
    balanced = len(set(sizes)) <= 1
    if num_values == num_groups:
        return VarianceComponents(pretrain_std=None, transfer_std=None, is_balanced=balanced)
    means = [math.fsum(group) / len(group) for group in groups if group]
    within = math.fsum(
        (value - mean) ** 2 for group, mean in zip(filter(None, groups), means, strict=True) for value in group
    )
    within /= num_values - num_groups
    if num_groups < 2:
        return VarianceComponents(pretrain_std=None, transfer_std=math.sqrt(within), is_balanced=balanced)
    grand = math.fsum(size * mean for size, mean in zip(sizes, means, strict=True)) / num_values
    between = math.fsum(size * (mean - grand) ** 2 for size, mean in zip(sizes, means, strict=True)) / (num_groups - 1)
    # The number of transfers per backbone; for unbalanced runs a little less than their mean.
    effective = (num_values - sum(size * size for size in sizes) / num_values) / (num_groups - 1)
    pretrain = max(0.0, (between - within) / effective)
    return VarianceComponents(pretrain_std=math.sqrt(pretrain), transfer_std=math.sqrt(within), is_balanced=balanced)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSeedEffect:
    """What a transfer seed does to the differences between label spaces, the same for every backbone."""

    num_transfer_seeds: int
    std: float
    """Of a difference of two label spaces over transfer seeds, in the unit of the results; 0 = none was found."""
    p_value: float
    """Of the F test that there is none."""

    @property
    def std_error(self) -> float:
        """Of a difference, in addition to what its interval contains."""
        return self.std / math.sqrt(self.num_transfer_seeds)


def transfer_seed_effect(rows: Sequence[Mapping[SeedPair, float]]) -> TransferSeedEffect | None:
    """The interaction of label space and transfer seed, from the rows of a table that have every seed pair.

    The analysis of variance of ``label space x pretrain seed x transfer seed`` with one value in each cell: the mean
    square of the interaction against that of the residual (Searle, Casella, McCulloch: Variance Components, section
    4.3), taken as equal for all label spaces. None with fewer than two of any of the three, if seed pairs are no full
    grid, or if nothing is left to test against.
    """
    from scipy import special

    pairs = sorted({pair for row in rows for pair in row})
    whole = [row for row in rows if len(row) == len(pairs)]
    num_pretrain, num_transfer = len({pair.pretrain for pair in pairs}), len({pair.transfer for pair in pairs})
    if min(len(whole), num_pretrain, num_transfer) < 2 or len(pairs) != num_pretrain * num_transfer:
        return None
    values_KPT = np.array([[row[pair] for pair in pairs] for row in whole]).reshape(-1, num_pretrain, num_transfer)
    left_KPT = values_KPT - values_KPT.mean(axis=0) - values_KPT.mean(axis=(1, 2), keepdims=True)
    left_KPT += values_KPT.mean()
    of_transfer_K1T, of_pretrain_KP1 = left_KPT.mean(axis=1, keepdims=True), left_KPT.mean(axis=2, keepdims=True)
    freedom = (len(whole) - 1) * (num_transfer - 1)
    rest_freedom = freedom * (num_pretrain - 1)
    square = num_pretrain * float((of_transfer_K1T**2).sum()) / freedom
    rest = float(((left_KPT - of_transfer_K1T - of_pretrain_KP1) ** 2).sum()) / rest_freedom
    if rest <= (NO_SPREAD * float(np.abs(values_KPT).max())) ** 2:
        return None
    return TransferSeedEffect(
        num_transfer_seeds=num_transfer,
        std=math.sqrt(2 * max(0.0, square - rest) / num_pretrain),
        p_value=float(special.fdtrc(freedom, rest_freedom, square / rest)),
    )


def noise_of(rows: Sequence[Mapping[SeedPair, float]], baseline: Mapping[SeedPair, float]) -> Noise | None:
    """The noise of a table from the values of its rows.

    None without a row that has two pretrain seeds in common, or where all differences are equal: then nothing shows how
    much they vary.
    """
    between, num_between, within, num_within, shares, most = 0.0, 0, 0.0, 0, list[float](), 0
    num_rows, largest = 0, 0.0
    for row in rows:
        groups: dict[int, list[float]] = {}
        for pair in sorted(row.keys() & baseline.keys()):
            groups.setdefault(pair.pretrain, []).append(row[pair] - baseline[pair])
            largest = max(largest, abs(row[pair]), abs(baseline[pair]))
        if len(groups) < 2:
            continue
        means = [math.fsum(group) / len(group) for group in groups.values()]
        between += pvariance(means) * len(means)
        within += math.fsum(pvariance(group) * len(group) for group in groups.values())
        num_between, num_within = num_between + len(means) - 1, num_within + sum(map(len, groups.values())) - len(means)
        shares += [1 / len(group) for group in groups.values()]
        num_rows, most = num_rows + 1, max(most, len(means))
    if max(between, within) <= (NO_SPREAD * largest) ** 2:
        return None
    of_mean = between / num_between
    transfer = within / num_within if num_within else None
    pretrain = of_mean if transfer is None else max(0.0, of_mean - transfer * math.fsum(shares) / len(shares))
    return Noise(
        pretrain_std=math.sqrt(pretrain),
        transfer_std=None if transfer is None else math.sqrt(transfer),
        num_pretrain_seeds=most,
        freedom=num_between / (1 + (num_rows - 1) * SHARED_BASELINE),
    )
