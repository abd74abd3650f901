"""The one corrected family of a table: which comparisons it has, and what each may claim.

Sentences, stars, tables, the page and all files read it, so none of them can say more than another. The family of a
table is every pair of its label spaces. Each comparison is a paired t test over pretrain seeds, which needs no equal
variances. Bonferroni's inequality makes them one family, so the intervals hold for all comparisons at once with 95 %
whatever their dependence, and a comparison is established where its interval excludes 0. (A step-down method as Holm's
finds a few more differences, yet has no two-sided intervals to go with them and promises nothing about their signs.)

``planning.graph.comparisons`` says how the level is shared; ``planning.estimate.power`` predicts from it what a design
would find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.planning.estimate.power import ALPHA, CONFIDENCE, METHOD, Comparisons
from orchestrator.report.intervals import MetricRange
from orchestrator.report.pooled import PooledFit

if TYPE_CHECKING:
    from orchestrator.report.statistics import PairedDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is compared in one table."""

    num_comparisons: int
    """Those that can be tested: two pretrain seeds in common, and a spread."""
    num_with_baseline: int
    num_established: int
    max_pretrain_seeds: int
    """The most that any comparison has."""
    method: str = METHOD
    confidence: float = CONFIDENCE
    pooled: PooledFit | None = None
    """The second analysis, where there are complete runs for it; its assumption may be contradicted."""

    @property
    def has_own_share(self) -> bool:
        """Whether comparisons with the baseline have more of the level than the others."""
        num_others = self.num_comparisons - self.num_with_baseline
        with_share, other_share = Comparisons(num_with_baseline=self.num_with_baseline, num_others=num_others).shares
        return with_share > 1.001 * other_share


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
        half = _quantile(found.num_pretrain_seeds - 1, share) * (found.std_error or 0.0)
        family[index] = replace(
            found,
            p_family=min(1.0, p_value / share),
            family_low=found.mean - half,
            family_high=found.mean + half,
            p_holm=p_holm,
            p_bh=p_bh,
        )
    return family


def within(found: PairedDifference, bounds: MetricRange | None, reference: float) -> PairedDifference:
    """The difference with intervals that the metric can have, where ``reference`` is the mean of what was subtracted,
    over the same runs.

    A simultaneous interval that contains 0, is wider than half of what the metric can be, and reaches beyond what is
    possible from ``reference`` says only that seeds are too few: it is left out, and its p-value stays. ``reference``
    cuts no interval, since it is an estimate and the true mean may lie beyond. One that excludes 0 ends at +-100
    points of a rate.
    """
    if bounds is None:
        return found
    possible = MetricRange(low=bounds.low - bounds.high, high=bounds.high - bounds.low)
    found = replace(found, low=possible.clip(found.low), high=possible.clip(found.high))
    if found.family_low is None or found.family_high is None:
        return found
    is_possible = bounds.low <= reference + found.family_low and reference + found.family_high <= bounds.high
    is_narrow = found.family_high - found.family_low <= (bounds.high - bounds.low) / 2
    if not (found.is_established or is_possible or is_narrow):
        return replace(found, family_low=None, family_high=None)
    return replace(found, family_low=possible.clip(found.family_low), family_high=possible.clip(found.family_high))


@cache
def _quantile(freedom: int, share: float) -> float:
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
