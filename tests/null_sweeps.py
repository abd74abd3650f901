"""Simulated sweeps by the thousand, as arrays, judged as reports judge them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchestrator.planning.estimate.power import ALPHA, Comparisons
from orchestrator.report.statistics.corrections import (
    MIN_P_EQUAL_VARIANCES,
    corrected,
    p_all_pairs,
    p_equal_variances,
    p_many_to_one,
    residuals,
)
from orchestrator.report.statistics.effects import independent_difference
from orchestrator.report.statistics.intervals import estimate_arrays
from orchestrator.report.statistics.summaries import SeedPair

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Table 5 of "Towards Understanding the Effect of Pretraining Label Granularity": error and its standard deviation over
# runs in percent, the baseline first: manual, random ids, clusters per superclass, rebalanced, clusters of all.
TABLE_5 = (
    *((5.25, 0.051), (5.40, 0.075), (5.10, 0.038), (4.83, 0.041), (4.79, 0.045), (4.82, 0.056), (4.84, 0.033)),
    *((6.61, 0.215), (6.30, 0.070), (6.12, 0.77), (6.10, 0.053), (6.12, 0.042), (6.10, 0.057), (6.54, 0.758)),
    *((5.14, 0.049), (5.16, 0.033), (5.17, 0.027), (5.24, 0.029), (5.30, 0.029), (5.31, 0.077), (5.37, 0.032)),
    *((5.18, 0.054), (5.17, 0.038), (5.23, 0.052), (5.28, 0.045), (5.26, 0.035), (5.21, 0.040)),
    *((5.52, 0.015), (5.42, 0.047), (5.45, 0.049), (5.46, 0.019), (5.60, 0.029), (5.50, 0.029), (5.47, 0.029)),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Sweeps of one design; the first label space is the baseline."""

    num_seeds: int
    stds: tuple[float, ...]
    """Of the residual (pretrain seed x label space) of each label space."""
    effects: tuple[float, ...] = ()
    """Of each label space; nothing = none differs."""
    num_transfers: int = 1
    transfer_share: float = 0.5
    """Of the variance of a run that is the transfer seed's."""
    seed_std: float = 1.0
    """What a pretrain seed adds to all label spaces alike."""

    def draw(self, random: np.random.Generator, num_sweeps: int) -> Floats:
        """Means over transfers ``(seeds, label spaces, sweeps)``."""
        stds = np.array(self.stds)
        shape = (self.num_seeds, len(stds), num_sweeps)
        found: Floats = np.sqrt(1 - self.transfer_share) * random.standard_normal(shape)
        # The mean of the transfers of one backbone; for one transfer, the transfer's own noise.
        found += np.sqrt(self.transfer_share / self.num_transfers) * random.standard_normal(shape)
        found *= stds[None, :, None]
        found += self.seed_std * random.standard_normal((self.num_seeds, 1, num_sweeps))
        found += np.array(self.effects or (0.0,) * len(stds))[None, :, None]
        return found


def variances_of_table_5(num_spaces: int) -> tuple[float, ...]:
    """Standard deviations of table 5, from the largest, the smallest and the middle; the baseline keeps its own."""
    stds = [std for _, std in TABLE_5]
    if num_spaces == len(stds):
        return tuple(stds)
    extremes = [0.77, 0.015, 0.758, 0.215, 0.019, 0.077]
    return tuple([stds[0], *extremes][:num_spaces])


def established(means: Floats, *, has_baseline: bool = True) -> Bools:
    """Which comparisons the family of each sweep establishes: ``(pairs, sweeps)``, pairs as ``pairs_of`` has them."""
    num_seeds, num_spaces, num_sweeps = means.shape
    first, second = np.array(pairs_of(num_spaces)).T
    differences = (means[:, first] - means[:, second]).reshape(num_seeds, -1)
    p_values = estimate_arrays(differences, range(num_seeds)).p_value.reshape(len(first), num_sweeps)
    num_with = num_spaces - 1 if has_baseline else 0
    with_share, other_share = Comparisons(num_with_baseline=num_with, num_others=len(first) - num_with).shares
    share = np.where(has_baseline & (first == 0), with_share, other_share)
    found: Bools = p_values / share[:, None] < ALPHA
    return found


def pooled_established(means: Floats, *, is_checked: bool = True) -> Bools:
    """The same of the pooled analysis; with its check, sweeps whose variances differ establish nothing."""
    num_seeds, num_spaces, num_sweeps = means.shape
    pairs = pairs_of(num_spaces)
    num_others, freedom = len(pairs) - num_spaces + 1, (num_seeds - 1) * (num_spaces - 1)
    with_share, other_share = Comparisons(num_with_baseline=num_spaces - 1, num_others=num_others).shares
    variance, noisiest = residuals(means)
    error = np.sqrt(2 * variance / num_seeds)
    level = means.mean(axis=0)
    limits = (
        _limit(p_many_to_one, num_spaces - 1, freedom, ALPHA * with_share * (num_spaces - 1)),
        _limit(p_all_pairs, num_spaces - 1, freedom, ALPHA * other_share * num_others),
    )
    found = np.array(
        [np.abs(level[first] - level[second]) > limits[first != 0] * error for first, second in pairs], dtype=np.bool_
    )
    if is_checked:
        found &= p_equal_variances(noisiest, num_seeds, num_spaces) >= MIN_P_EQUAL_VARIANCES
    return found.reshape(len(pairs), num_sweeps)


def independent_established(
    sizes: Sequence[int], stds: Sequence[float], random: np.random.Generator, num_sweeps: int
) -> Bools:
    """The same of rows that share only the seed number and have so many seeds each, where none differs."""
    pairs = pairs_of(len(sizes))
    found = np.zeros((len(pairs), num_sweeps), dtype=np.bool_)
    for sweep in range(num_sweeps):
        rows = [
            {
                SeedPair(pretrain=seed, transfer=0): value
                for seed, value in enumerate(std * random.standard_normal(size))
            }
            for size, std in zip(sizes, stds, strict=True)
        ]
        differences = [independent_difference(rows[second], rows[first]) for first, second in pairs]
        family = corrected(differences, [first == 0 for first, _ in pairs])
        found[:, sweep] = [one is not None and one.is_established for one in family]
    return found


def pairs_of(num_spaces: int) -> Sequence[tuple[int, int]]:
    """All pairs of label spaces, by number; the baseline is 0."""
    return list(combinations(range(num_spaces), 2))


def lowest_can_be_best(means: Floats, found: Bools, lowest: int = 0) -> Bools:
    """Whether the label space that truly is the lowest stays in the confidence set of the best."""
    level = means.mean(axis=0)
    beaten = np.zeros(means.shape[2], dtype=np.bool_)
    for (first, second), is_established in zip(pairs_of(means.shape[1]), found, strict=True):
        if lowest in (first, second):
            other = second if first == lowest else first
            beaten |= is_established & (level[other] < level[lowest])
    return ~beaten


@cache
def _limit(p_of: Callable[[ArrayLike, int, float], Floats], number: int, freedom: float, alpha: float) -> float:
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(p_of([middle], number, freedom)[0]) > alpha else (low, middle)
    return high
