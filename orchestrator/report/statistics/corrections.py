"""How the comparisons of a table are corrected for each other: one family, and a second, pooled analysis. Pure.

*The family* has the comparisons of a table and the result of each; sentences, stars, tables, the page and all files
read it, so they always agree. It is every pair of the table's label spaces. Each comparison
is a paired t test over pretrain seeds, which needs no equal variances. Bonferroni's inequality makes them one family,
so the intervals hold for all comparisons at once with 95 % for any dependence, and a comparison is established
if its interval excludes 0. (A step-down method as Holm's finds a few more differences, yet has no two-sided
intervals to go with them and promises nothing about their signs.) ``planning.estimate.power`` says how the error level
is shared, and predicts from it what a design would find.

*The pooled two-way analysis* lets all label spaces of a table share one variance: ``y = label space + pretrain seed +
residual`` over the means of the transfers of every backbone, so the residual is the interaction of pretrain seed and
label space, and transfers of one backbone count once. With ``m`` label spaces and ``s`` seeds the residual variance has
``(m - 1)(s - 1)`` degrees of freedom, where a paired test has ``s - 1``. The model with random seeds gives the same
comparisons, because every label space has every seed. Simultaneous p-values come from the multivariate t of the
comparisons: Dunnett's for many with one (A Multiple Comparison Procedure for Comparing Several Treatments with a
Control, JASA 50, 1955; the correlation is 1/2) and Tukey's studentized range for all pairs. Both are integrals over one
normal and one chi variable. The analysis assumes that all label spaces have the same variance over seeds. ``two_way``
checks this by Cochran's C test, which can miss differences if seeds are few: ``docs/report.md`` has the simulated
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchestrator.planning.estimate.power import ALPHA, CONFIDENCE, FAMILY_METHOD, Comparisons, method_of
from orchestrator.report.statistics.intervals import NO_SPREAD, MetricRange
from orchestrator.report.statistics.summaries import PairedDifference, SeedPair

Floats = NDArray[np.float64]

MIN_P_EQUAL_VARIANCES = 0.05
"""Below, the check finds that the variances differ, and there is no pooled comparison."""
_NUM_DRAWS = 4000
"""Of the check's distribution, which depends on the numbers of label spaces and seeds only."""
_NUM_NORMAL_NODES, _NUM_CHI_NODES = 64, 32
"""Of the quadrature: p-values are right to 1e-4 (tested against scipy)."""
_REACH = 8.0
"""Standard deviations of the normal variable that are integrated over."""
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFit:
    """The residuals of one table, and whether they look alike."""

    num_label_spaces: int
    """Those that have every seed pair of the table; the others are not in the analysis."""
    num_pretrain_seeds: int
    degrees_of_freedom: int
    residual_std: float
    p_equal_variances: float
    """Of Cochran's C: the largest share of one label space in the sum of squared residuals."""

    @property
    def is_contradicted(self) -> bool:
        """Whether the runs themselves contradict the assumption of equal variances."""
        return self.p_equal_variances < MIN_P_EQUAL_VARIANCES

    @property
    def std_error(self) -> float:
        """Of a difference of two label spaces."""
        return float(self.residual_std * np.sqrt(2 / self.num_pretrain_seeds))


def complete(values: Sequence[Mapping[SeedPair, float]]) -> tuple[list[int], Floats]:
    """The label spaces that have every seed pair, and their means ``(seeds, label spaces)`` over transfers."""
    pairs = sorted({pair for some in values for pair in some})
    chosen = [index for index, some in enumerate(values) if len(some) == len(pairs)]
    seeds = sorted({pair.pretrain for pair in pairs})
    means = np.full((len(seeds), len(chosen)), np.nan)
    for row, seed in enumerate(seeds):
        of_seed = [pair for pair in pairs if pair.pretrain == seed]
        for column, index in enumerate(chosen):
            means[row, column] = np.mean([values[index][pair] for pair in of_seed])
    sizes = {sum(pair.pretrain == seed for pair in pairs) for seed in seeds}
    # Means over unequal numbers of transfers would not have one variance.
    return (chosen, means) if len(sizes) <= 1 else ([], means[:, :0])


def two_way(means: Floats) -> PooledFit | None:
    """The fit of ``(seeds, label spaces)``; None with fewer than two of either, or without any spread."""
    num_seeds, num_spaces = means.shape
    if num_seeds < 2 or num_spaces < 2:
        return None
    variance, share = residuals(means)
    if variance <= (NO_SPREAD * np.abs(means).max()) ** 2:
        return None
    return PooledFit(
        num_label_spaces=num_spaces,
        num_pretrain_seeds=num_seeds,
        degrees_of_freedom=(num_seeds - 1) * (num_spaces - 1),
        residual_std=float(np.sqrt(variance)),
        p_equal_variances=float(p_equal_variances(share, num_seeds, num_spaces)),
    )


def residuals(means: Floats) -> tuple[Floats, Floats]:
    """Residual variance and largest share of a label space in it, of ``(seeds, label spaces, ...)``."""
    num_seeds, num_spaces = means.shape[:2]
    left = means - means.mean(axis=0, keepdims=True) - means.mean(axis=1, keepdims=True) + means.mean(axis=(0, 1))
    squares = (left**2).sum(axis=0)
    total = squares.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / ((num_seeds - 1) * (num_spaces - 1)), squares.max(axis=0) / total


def p_equal_variances(share: ArrayLike, num_seeds: int, num_spaces: int) -> Floats:
    """How often equal variances give a share at least as large; 1 for two label spaces, which share by halves."""
    if num_spaces == 2:
        return np.ones_like(np.asarray(share, dtype=np.float64))
    null = _null_shares(num_seeds, num_spaces)
    found: Floats = (1 + len(null) - np.searchsorted(null, share)) / (1 + len(null))
    return found


@cache
def _null_shares(num_seeds: int, num_spaces: int) -> Floats:
    random = np.random.default_rng(0)
    return np.sort(residuals(random.standard_normal((num_seeds, num_spaces, _NUM_DRAWS)))[1])


def p_many_to_one(t: ArrayLike, num_others: int, freedom: float) -> Floats:
    """Two-sided adjusted p-values of ``num_others`` comparisons with one label space (Dunnett)."""
    from scipy import special

    def inside(limit: Floats, z: Floats) -> Floats:
        # T_i = (Z_i - Z_0) / sqrt(2): given Z_0 = z, all others lie within sqrt(2) limits of it.
        found: Floats = (special.ndtr(z + limit) - special.ndtr(z - limit)) ** num_others
        return found

    return _outside(np.asarray(t, dtype=np.float64), freedom, inside)


def p_all_pairs(t: ArrayLike, num_spaces: int, freedom: float) -> Floats:
    """Two-sided adjusted p-values of all pairs of ``num_spaces`` label spaces (Tukey); ``t`` = q / sqrt(2)."""
    from scipy import special

    def inside(limit: Floats, z: Floats) -> Floats:
        # The smallest of them is at z, the others above it and within the range.
        found: Floats = num_spaces * (special.ndtr(z + limit) - special.ndtr(z)) ** (num_spaces - 1)
        return found

    return _outside(np.asarray(t, dtype=np.float64), freedom, inside)


def _outside(t: Floats, freedom: float, inside: Callable[[Floats, Floats], Floats]) -> Floats:
    """1 - E over chi and normal of ``inside(sqrt(2) t chi, z)``, for every t."""
    from scipy import special

    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NORMAL_NODES)
    z, z_weights = _REACH * nodes, _REACH * weights * np.exp(-((_REACH * nodes) ** 2) / 2) / np.sqrt(2 * np.pi)
    nodes, weights = np.polynomial.legendre.leggauss(_NUM_CHI_NODES)
    share = (nodes + 1) / 2  # of the distribution of chi: its quantiles need no bounds of their own
    chi = np.sqrt(special.chdtri(freedom, 1 - share) / freedom)
    flat = np.abs(t).ravel()
    found = np.empty_like(flat)
    for start in range(0, len(flat), _CHUNK):
        limit = np.sqrt(2) * flat[start : start + _CHUNK, None, None] * chi[None, :, None]
        found[start : start + _CHUNK] = (inside(limit, z[None, None, :]) @ z_weights) @ (weights / 2)
    outside: Floats = np.clip(1 - found.reshape(t.shape), 0.0, 1.0)
    return outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is compared in one table."""

    num_comparisons: int
    """Those that can be tested: two pretrain seeds in common, and a spread."""
    num_with_baseline: int
    num_established: int
    max_pretrain_seeds: int
    """The most that any comparison has."""
    method: str = FAMILY_METHOD
    confidence: float = CONFIDENCE
    pooled: PooledFit | None = None
    """The second analysis, where there are complete runs for it; its assumption may be contradicted."""

    @property
    def has_own_share(self) -> bool:
        """Whether comparisons with the baseline have more of the level than the others."""
        num_others = self.num_comparisons - self.num_with_baseline
        with_share, other_share = Comparisons(num_with_baseline=self.num_with_baseline, num_others=num_others).shares
        return with_share > 1.001 * other_share


def family_method(family: Iterable[PairedDifference | None]) -> str:
    """How the comparisons of a family that could be tested were tested and corrected, in words."""
    return method_of(found.is_paired for found in family if found is not None and found.p_family is not None)


def corrected(
    differences: Sequence[PairedDifference | None], with_baseline: Sequence[bool] | None = None
) -> list[PairedDifference | None]:
    """The same differences as one family, with corrected p-values and simultaneous intervals.

    ``with_baseline`` tells the comparisons that share at least half of the level; without it all share equally.
    """
    flags = with_baseline or [False] * len(differences)
    tested = [
        (index, found, found.p_value)
        for index, found in enumerate(differences)
        if found is not None and found.p_value is not None
    ]
    num_flagged = sum(flags[index] for index, _, _ in tested)
    comparisons = Comparisons(num_with_baseline=num_flagged, num_others=len(tested) - num_flagged)
    with_share, other_share = comparisons.shares
    p_values = [p_value for _, _, p_value in tested]
    family = list(differences)
    for (index, found, p_value), p_holm, p_bh in zip(tested, holm(p_values), benjamini_hochberg(p_values), strict=True):
        share = with_share if flags[index] else other_share
        half = _quantile(found.freedom, share) * (found.std_error or 0.0)
        family[index] = replace(
            found,
            p_family=min(1.0, p_value / share),
            family_low=found.mean - half,
            family_high=found.mean + half,
            p_holm=p_holm,
            p_bh=p_bh,
        )
    return family


def within(
    found: PairedDifference, bounds: MetricRange | None, reference: float, *, num_differences: int = 1
) -> PairedDifference:
    """The difference with intervals that the metric can have, where ``reference`` is the mean of what was subtracted,
    over the same runs.

    A simultaneous interval that contains 0, is wider than half of what the metric can be, and reaches beyond what is
    possible from ``reference`` says only that seeds are too few: it is left out, and its p-value stays. ``reference``
    cuts no interval, since it is an estimate and the true mean may lie beyond. One that excludes 0 ends at +-100
    points of a rate, and at +-200 of an interaction, which consists of two differences (``num_differences``).
    """
    if bounds is None:
        return found
    largest = num_differences * (bounds.high - bounds.low)
    possible = MetricRange(low=-largest, high=largest)
    found = replace(found, low=possible.clip(found.low), high=possible.clip(found.high))
    if found.family_low is None or found.family_high is None:
        return found
    is_possible = bounds.low <= reference + found.family_low and reference + found.family_high <= bounds.high
    is_narrow = found.family_high - found.family_low <= (bounds.high - bounds.low) / 2
    if not (found.is_established or is_possible or is_narrow):
        return replace(found, family_low=None, family_high=None)
    return replace(found, family_low=possible.clip(found.family_low), family_high=possible.clip(found.family_high))


@cache
def _quantile(freedom: float, share: float) -> float:
    """Of Student's t, for an interval that errs with its share of the 5 % on both sides together."""
    from scipy import special

    return float(special.stdtrit(freedom, 1 - ALPHA * share / 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm's step-down method, in the order given: they bound the chance of any false finding.

    Holm: A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979). Holds
    for any dependence between the tests, which comparisons with one baseline always have.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that bound the expected share of false findings among the findings.

    Benjamini and Hochberg: Controlling the false discovery rate, JRSS B 57 (1995). Assumes independent or positively
    dependent tests.
    """
    if not p_values:
        return []
    # Rather than by scipy.stats, whose import takes 0.7 s of every report; the tests hold it to statsmodels.
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    scaled = p[order] * (len(p) / np.arange(1, len(p) + 1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    found: list[float] = adjusted.tolist()
    return found
