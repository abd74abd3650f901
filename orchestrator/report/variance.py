"""How much of the spread comes from the pretrain seed and how much from the transfer seed.

The one-way random effects model ``y_ij = mean + pretrain_i + transfer_ij``, estimated by the analysis of variance
(Henderson's method 1; Searle, Casella, McCulloch: Variance Components, sections 3.5 balanced and 3.6 unbalanced): the
mean squares within and between pretrain seeds are set equal to what they are expected to be. For balanced runs with a
component that is not negative this is what REML gives too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import pvariance
from typing import TYPE_CHECKING

from orchestrator.planning.estimate.power import Noise

if TYPE_CHECKING:
    from orchestrator.report.statistics import SeedPair

METHOD = "one-way random effects, analysis of variance (Henderson's method 1), negative estimates set to 0"
_SHARED_BASELINE = 0.25
"""Squared correlation of two differences to one baseline, if all label spaces spread alike."""


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


def noise_of(rows: Sequence[Mapping[SeedPair, float]], baseline: Mapping[SeedPair, float]) -> Noise | None:
    """The noise of a table from the values of its rows; None without a row that has two pretrain seeds in common."""
    between, num_between, within, num_within, shares, most = 0.0, 0, 0.0, 0, list[float](), 0
    num_rows = 0
    for row in rows:
        groups: dict[int, list[float]] = {}
        for pair in sorted(row.keys() & baseline.keys()):
            groups.setdefault(pair.pretrain, []).append(row[pair] - baseline[pair])
        if len(groups) < 2:
            continue
        means = [math.fsum(group) / len(group) for group in groups.values()]
        between += pvariance(means) * len(means)
        within += math.fsum(pvariance(group) * len(group) for group in groups.values())
        num_between, num_within = num_between + len(means) - 1, num_within + sum(map(len, groups.values())) - len(means)
        shares += [1 / len(group) for group in groups.values()]
        num_rows, most = num_rows + 1, max(most, len(means))
    if not num_rows:
        return None
    of_mean = between / num_between
    transfer = within / num_within if num_within else None
    pretrain = of_mean if transfer is None else max(0.0, of_mean - transfer * math.fsum(shares) / len(shares))
    return Noise(
        pretrain_std=math.sqrt(pretrain),
        transfer_std=None if transfer is None else math.sqrt(transfer),
        num_pretrain_seeds=most,
        freedom=num_between / (1 + (num_rows - 1) * _SHARED_BASELINE),
    )
