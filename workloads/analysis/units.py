"""Measures of single units, and of the number of directions that features use: purity, sparsity, rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workloads.analysis.features import FeatureStream, second_moment
from workloads.runtime.streams import Purpose, Stage, seed_sequence

_EPSILON: Final = 1e-7
_RANDOM_SETS: Final = 1000
_NUMBERS_AT_ONCE: Final = 1 << 24
"""Of counts by group of some random sets: 128 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRanks:
    """How many directions features use, of at most their dimension."""

    rankme: float
    stable: float


def feature_ranks(stream: FeatureStream) -> FeatureRanks | None:
    """RankMe and stable rank of features (N, D) as they are, not centred; None where all are 0.

    RankMe is ``exp(-sum p log p)`` with ``p = s / sum s + 1e-7`` of the singular values s (Garrido, Balestriero, Najman
    and LeCun, "RankMe", equation 1); the stable rank is ``sum s^2 / max s^2`` (Rudelson and
    Vershynin, "Sampling from large matrices", section 1.1). Singular values below 1e-8 of the largest are lost to
    rounding, which is less than RankMe's own 1e-7.
    """
    squares_D = np.maximum(np.linalg.eigvalsh(second_moment(stream)), 0)
    if not squares_D[-1] > 0:
        return None
    singular_D = np.sqrt(squares_D)
    shares_D = singular_D / singular_D.sum() + _EPSILON
    return FeatureRanks(
        rankme=float(np.exp(-(shares_D * np.log(shares_D)).sum())), stable=float(squares_D.sum() / squares_D[-1])
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparsity:
    """Shares of activations above 0."""

    by_unit_D: NDArray[np.float64]
    """Share of samples for which a unit is active."""

    @property
    def active(self) -> float:
        """Mean share of units that are active for a sample."""
        return float(self.by_unit_D.mean())

    @property
    def dead(self) -> float:
        """Share of units that are active for no sample."""
        return float((self.by_unit_D == 0).mean())


def sparsity(stream: FeatureStream) -> Sparsity:
    """How often units are active: above 0, which only units behind a rectifier are not always."""
    counts_D = np.zeros(stream.dim, np.int64)
    for chunk_BD in stream:
        counts_D += (chunk_BD > 0).sum(axis=0)
    return Sparsity(by_unit_D=counts_D / stream.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purity:
    """At one level: the share of the commonest group among the samples that excite a unit most."""

    mean: float
    """Over the units that tell their top samples from others."""
    chance: float
    """Mean of the same share over random sets of as many samples, drawn without replacement as top samples are."""

    @property
    def above_chance(self) -> float:
        """0 = units know nothing of the level."""
        return self.mean - self.chance


def top_samples(stream: FeatureStream, top: int) -> NDArray[np.int64]:
    """The ``top`` samples (top, U) of the units that they excite most.

    Left out are units whose choice is arbitrary: those with the same value for the last sample that is chosen and for
    the least one of all (a rectified unit that is active for fewer than ``top`` samples). Of equal values the earlier
    sample is taken.
    """
    values_TD = np.empty((0, stream.dim), np.float32)
    places_TD = np.empty((0, stream.dim), np.int64)
    least_D = np.full(stream.dim, np.inf, np.float32)
    start = 0
    for chunk_BD in stream:
        features_BD = chunk_BD.astype(np.float32)
        np.minimum(least_D, features_BD.min(axis=0), out=least_D)
        rows_BD = np.broadcast_to(np.arange(start, start + len(features_BD))[:, None], features_BD.shape)
        values_TD, places_TD = np.concatenate([values_TD, features_BD]), np.concatenate([places_TD, rows_BD])
        best_TD = np.argsort(-values_TD, axis=0, kind="stable")[:top]
        values_TD, places_TD = np.take_along_axis(values_TD, best_TD, 0), np.take_along_axis(places_TD, best_TD, 0)
        start += len(features_BD)
    return places_TD[:, values_TD[-1] > least_D]


def purities(top_TU: NDArray[np.int64], ids_of_levels: Mapping[str, NDArray[np.int64]]) -> dict[str, Purity]:
    """By level; empty where no unit tells its top samples from others.

    Args:
        top_TU: see ``top_samples``.
        ids_of_levels: by level the group (N,) of each sample.
    """
    if not top_TU.shape[1]:
        return {}
    found = {}
    for number, (level, ids_N) in enumerate(ids_of_levels.items()):
        random = np.random.Generator(np.random.PCG64(seed_sequence(0, Stage.ANALYZE, Purpose.CHANCE, number)))
        counts_C = np.unique(ids_N, return_counts=True)[1]
        found[level] = Purity(mean=_commonest(ids_N[top_TU]), chance=_chance(counts_C, len(top_TU), random))
    return found


def _chance(counts_C: NDArray[np.int64], top: int, random: np.random.Generator) -> float:
    """Mean share of the commonest group in random sets of ``top`` samples, of groups with so many samples each."""
    if counts_C.max() == 1:
        return 1 / top
    # With replacement it would be too large wherever the sets are no small part of all samples.
    at_once = max(1, _NUMBERS_AT_ONCE // len(counts_C))
    commonest = [
        random.multivariate_hypergeometric(
            counts_C, top, size=min(at_once, _RANDOM_SETS - done), method="marginals"
        ).max(axis=1)
        for done in range(0, _RANDOM_SETS, at_once)
    ]
    return float(np.concatenate(commonest).mean() / top)


def _commonest(ids_TU: NDArray[np.int64]) -> float:
    """Mean over columns of the share that the commonest id of a column has."""
    counts = [np.unique(column_T, return_counts=True)[1].max() for column_T in ids_TU.T]
    return float(np.mean(counts) / len(ids_TU))
