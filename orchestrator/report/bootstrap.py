"""How likely each label space is the best: a bootstrap over pretrain seeds and, within them, transfer seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from orchestrator.report.statistics import SeedPair

NUM_RESAMPLES = 10_000
_MAX_DRAWS, _MIN_RESAMPLES = 5_000_000, 1000
"""Of single runs over all resamples: 40 MB. Only sweeps of more than 500 seed pairs get fewer resamples by it, and need
fewer: their means hardly move."""
_SEED = 0


def probabilities_best(
    candidates: Sequence[Mapping[SeedPair, float]], *, num_resamples: int = NUM_RESAMPLES, seed: int = _SEED
) -> list[float] | None:
    """Share of resamples in which each candidate has the lowest mean; ties are shared. None with a single seed pair.

    Each resample draws as many pretrain seeds as there are, with replacement, and for every one drawn as many of its
    transfer seeds (Davison and Hinkley: Bootstrap Methods, section 3.8). All candidates see the same draw: they stay
    paired. A candidate without any drawn run cannot win that resample; means are over what it has.
    """
    pairs = sorted({pair for values in candidates for pair in values})
    if len(pairs) < 2:
        return None
    affordable = max(_MIN_RESAMPLES, _MAX_DRAWS // len(pairs))
    weights = _draw(pairs, min(num_resamples, affordable), np.random.default_rng(seed))
    matrix = np.array([[values.get(pair, np.nan) for values in candidates] for pair in pairs])
    present = np.isfinite(matrix)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (weights @ np.where(present, matrix, 0.0)) / (weights @ present.astype(np.float64))
    means = np.where(np.isnan(means), np.inf, means)
    lowest = means.min(axis=1, keepdims=True)
    # The same numbers added in another order differ in their last bits: equal to 1e-12 is a tie.
    wins = means <= lowest + 1e-12 * np.abs(lowest)
    shares = wins / wins.sum(axis=1, keepdims=True)
    return [float(share) for share in shares.mean(axis=0)]


def _draw(pairs: Sequence[SeedPair], num_resamples: int, random: np.random.Generator) -> NDArray[np.float64]:
    """How often each pair is drawn in each resample: ``(resamples, pairs)``."""
    groups: dict[int, list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair.pretrain, []).append(index)
    counts = random.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=num_resamples)
    weights = np.zeros((num_resamples, len(pairs)))
    for size in sorted({len(indices) for indices in groups.values()}):
        alike = [number for number, indices in enumerate(groups.values()) if len(indices) == size]
        columns = [indices for indices in groups.values() if len(indices) == size]
        # A pretrain seed that is drawn twice draws its transfer seeds twice.
        drawn = random.multinomial(counts[:, alike] * size, np.full(size, 1 / size))
        weights[:, np.ravel(columns)] = drawn.reshape(num_resamples, -1) / size
    return weights
