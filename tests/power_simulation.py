"""Simulated sweeps of known noise, tested by the report's own comparisons: what predicted power is held to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from orchestrator.planning.estimate.power import Design, Noise
from orchestrator.report.statistics.corrections import corrected
from orchestrator.report.statistics.summaries import SeedPair, all_paired_differences, paired_differences

Values = dict[SeedPair, float]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Every label space spreads alike; the first one differs from the baseline."""

    effect: float = 0.0
    pretrain_std: float = 0.3
    """Of one label space; a difference of two has sqrt(2) times as much."""
    transfer_std: float = 0.0

    @property
    def noise(self) -> Noise:
        """Of the paired difference."""
        return Noise(
            pretrain_std=math.sqrt(2) * self.pretrain_std,
            transfer_std=math.sqrt(2) * self.transfer_std,
            num_pretrain_seeds=0,
            freedom=math.inf,
        )


def runs_of(truth: Truth, design: Design, num_spaces: int, random: np.random.Generator) -> tuple[list[Values], Values]:
    """Values of all label spaces but the baseline, and those of the baseline."""
    num_seeds, num_transfers = design.num_pretrain_seeds, design.num_transfer_seeds
    shared = random.standard_normal((1, num_seeds, 1))  # what a seed does to all label spaces: pairing takes it out
    values = shared + truth.pretrain_std * random.standard_normal((num_spaces, num_seeds, 1))
    values = values + truth.transfer_std * random.standard_normal((num_spaces, num_seeds, num_transfers))
    values[1] -= truth.effect
    pairs = [(i, j) for i in range(num_seeds) for j in range(num_transfers)]
    rows = [{SeedPair(pretrain=i, transfer=j): float(space[i, j]) for i, j in pairs} for space in values]
    return rows[1:], rows[0]


def found_share(truth: Truth, design: Design, num_spaces: int, *, num_sweeps: int, seed: int) -> float:
    """Share of the sweeps in which the report calls the label space that differs different from the baseline."""
    random, num_found = np.random.default_rng(seed), 0
    for _ in range(num_sweeps):
        rows, baseline = runs_of(truth, design, num_spaces, random)
        asked = paired_differences(rows, baseline)
        others = [found for row in all_paired_differences(rows) for found in row]
        first = corrected([*asked, *others], [True] * len(asked) + [False] * len(others))[0]
        num_found += first is not None and first.is_established
    return num_found / num_sweeps
