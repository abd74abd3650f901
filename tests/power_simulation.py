"""Simulated sweeps of known noise, tested by the report's own comparisons: what predicted power is held to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from orchestrator.planning.estimate.power import Design, Noise
from orchestrator.report.render.columns import contrast_text
from orchestrator.report.statistics.corrections import corrected
from orchestrator.report.statistics.effects import DesignCell, FactorialDesign
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


def effect_shares(
    levels: Mapping[str, Sequence[str]],
    slopes: Mapping[str, float],
    num_seeds: int,
    num_transfers: int,
    *,
    std: float,
    num_sweeps: int,
) -> dict[str, float]:
    """Share of the sweeps in which the report establishes an effect, of those that are not 0.

    Args:
        levels: values of each factor; the first two have an effect.
        slopes: by factor what its second value adds, and ``both`` what the two second values add together.
        num_seeds: of pretraining.
        num_transfers: of each backbone, half of whose variance is theirs.
        std: of the difference of two cells, averaged over the transfers of a pretraining seed.
        num_sweeps: that are simulated.
    """
    random, num_found = np.random.default_rng(num_seeds), Counter[str]()
    cells, (first, second) = list(product(*levels.values())), tuple(levels)[:2]
    names = [f"{first} {levels[first][1]} - {levels[first][0]}", f"{second} {levels[second][1]} - {levels[second][0]}"]
    names.append(" x ".join(names))
    has = np.array([[cell[place] == levels[name][1] for cell in cells] for place, name in enumerate((first, second))])
    means = slopes[first] * has[0] + slopes[second] * has[1] + slopes["both"] * (has[0] & has[1])
    pairs = [SeedPair(pretrain=i, transfer=j) for i in range(num_seeds) for j in range(num_transfers)]
    for _ in range(num_sweeps):
        shared = random.standard_normal((1, num_seeds, 1))
        noise = random.standard_normal((len(cells), num_seeds, 1))
        noise = noise + math.sqrt(num_transfers) * random.standard_normal((len(cells), num_seeds, num_transfers))
        values = means[:, None, None] + shared + std / 2 * noise  # half of the variance of a cell is of its backbones
        design = FactorialDesign(
            tuple(levels),
            [
                DesignCell(values=cell, runs=dict(zip(pairs, map(float, some.ravel()), strict=True)))
                for cell, some in zip(cells, values, strict=True)
            ],
            levels=levels,
        )
        num_found.update(contrast_text(one) for one in design.effects().contrasts if one.difference.is_established)
    return {name: num_found[name] / num_sweeps for name in names}
