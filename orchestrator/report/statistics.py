"""Pure statistics of a report: spread over seeds, the paper's relative improvement, paired comparisons.

Runs that differ only in their label space see the same images in the same order from the same initial backbone, so two
label spaces are compared pair by pair, over equal (pretrain seed, transfer seed).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SeedPair:
    """What two runs must share to be compared as a pair."""

    pretrain: int
    transfer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and sample standard deviation of ``num_values`` results, in the unit of the values."""

    num_values: int
    mean: float
    std: float | None
    """With ``ddof=1``; None for a single value, whose spread is unknown rather than 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Mean of value minus baseline over the seed pairs that both have; negative = lower than the baseline."""

    num_pairs: int
    mean: float
    low: float | None
    """Lower end of the confidence interval; None if fewer than two pretrain seeds are there to estimate it from."""
    high: float | None
    confidence: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is there and lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def summarize(values: Sequence[float]) -> Summary:
    """Mean and sample standard deviation. Raises ``ValueError`` if there are no values."""
    if not values:
        raise ValueError("a summary of no values was asked for; leave the cell empty instead")
    std = statistics.stdev(values) if len(values) > 1 else None
    return Summary(num_values=len(values), mean=statistics.fmean(values), std=std)


def relative_improvement(value: float, baseline: float) -> float | None:
    """``(baseline - value) / baseline``: the fraction of the baseline's error that is gone; negative if it grew.

    The measure of "Towards Understanding the Effect of Pretraining Label Granularity", section 5. None where the
    baseline is not positive, because no fraction of nothing can be gone.
    """
    return (baseline - value) / baseline if baseline > 0 else None


def paired_difference(
    values: Mapping[SeedPair, float], baseline: Mapping[SeedPair, float], *, confidence: float = CONFIDENCE
) -> PairedDifference | None:
    """Mean difference over common seed pairs with Student's t interval; None without a common pair.

    Transfers of one backbone are not independent of each other, so differences are first averaged per pretrain seed and
    the interval rests on those averages: with one transfer seed this is the ordinary paired t interval.
    """
    by_pretrain: dict[int, list[float]] = defaultdict(list)
    common = sorted(values.keys() & baseline.keys())
    for pair in common:
        by_pretrain[pair.pretrain].append(values[pair] - baseline[pair])
    if not by_pretrain:
        return None
    means = [statistics.fmean(differences) for differences in by_pretrain.values()]
    mean, half = statistics.fmean(means), _half_width(means, confidence)
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return PairedDifference(num_pairs=len(common), mean=mean, low=low, high=high, confidence=confidence)


def _half_width(means: Sequence[float], confidence: float) -> float | None:
    if len(means) < 2:
        return None
    from scipy import stats  # 0.5 s to import: only who reports pays for it

    quantile = float(stats.t.ppf((1 + confidence) / 2, df=len(means) - 1))
    return quantile * statistics.stdev(means) / math.sqrt(len(means))
