"""How much of the spread comes from the pretrain seed and how much from the transfer seed.

The one-way random effects model ``y_ij = mean + pretrain_i + transfer_ij``, estimated by the analysis of variance
(Henderson's method 1; Searle, Casella, McCulloch: Variance Components, sections 3.5 balanced and 3.6 unbalanced): the
mean squares within and between pretrain seeds are set equal to what they are expected to be. For balanced runs with a
component that is not negative this is what REML gives too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

METHOD = "one-way random effects, analysis of variance (Henderson's method 1), negative estimates set to 0"


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
