"""Features as streams, the classes of their samples, and the first two moments by class.

Everything here works on chunks of rows and keeps no more than some arrays of (classes, dim) and (dim, dim), so that
millions of samples fit into bounded memory. Sums are in float64: squares of features that are equal up to their last
bit must not come out as noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from workloads.runtime.streams import Purpose, Stage, permutation, seed_sequence

ROWS_AT_ONCE: Final = 8192
"""Rows of a chunk: 50 MB of 768 features in float64."""


class FeatureStream(Protocol):
    """Features of N samples, which can be passed over any number of times, always in the same order."""

    @property
    def num_samples(self) -> int:
        """N."""

    @property
    def dim(self) -> int:
        """D."""

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Chunks (B, D) of any floating type; together N rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleClasses:
    """Which class each sample of a stream has; every class has at least one sample."""

    ids_N: NDArray[np.int64]
    """In ``[0, C)``."""
    names: tuple[str, ...]
    """Of the classes (C,)."""

    @classmethod
    def of(cls, targets_N: NDArray[np.integer[Any]], names: Sequence[str]) -> Self:
        """From targets, each in ``[0, len(names))``; classes without a sample are left out."""
        original, ids_N = np.unique(np.asarray(targets_N, dtype=np.int64), return_inverse=True)
        return cls(ids_N=ids_N, names=tuple(names[target] for target in original.tolist()))

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.names)

    @property
    def counts_C(self) -> NDArray[np.int64]:  # noqa: N802 - a shape
        """Samples (C,) of each class."""
        return np.bincount(self.ids_N, minlength=self.num_classes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassMoments:
    """Means and scatter of classes; classes count alike, whatever their number of samples."""

    means_CD: NDArray[np.float64]
    variances_C: NDArray[np.float64]
    """Mean squared distance of a class's samples to its mean."""
    within_DD: NDArray[np.float64]
    """``(1/C) sum_c (1/n_c) sum_i (x_i - mean_c)(x_i - mean_c)^T``."""

    @property
    def centred_CD(self) -> NDArray[np.float64]:  # noqa: N802 - a shape
        """Class means minus their mean."""
        centred_CD: NDArray[np.float64] = self.means_CD - self.means_CD.mean(axis=0)
        return centred_CD


def class_moments(stream: FeatureStream, classes: SampleClasses) -> ClassMoments:
    """Two passes: means, then what is left around them, which loses no digits to large means."""
    counts_C = classes.counts_C
    means_CD = _sums(stream, classes) / counts_C[:, None]
    squares_C = np.zeros(classes.num_classes)
    within_DD = np.zeros((stream.dim, stream.dim))
    weights_C = 1 / np.sqrt(counts_C * float(classes.num_classes))
    for ids_B, features_BD in _chunks(stream, classes):
        np.subtract(features_BD, means_CD[ids_B], out=features_BD)
        squares_C += np.bincount(
            ids_B, weights=np.einsum("bd,bd->b", features_BD, features_BD), minlength=len(squares_C)
        )
        np.multiply(features_BD, weights_C[ids_B, None], out=features_BD)
        within_DD += features_BD.T @ features_BD
    return ClassMoments(means_CD=means_CD, variances_C=squares_C / counts_C, within_DD=within_DD)


def second_moment(stream: FeatureStream) -> NDArray[np.float64]:
    """``sum_i x_i x_i^T`` (D, D), in one pass."""
    moment_DD = np.zeros((stream.dim, stream.dim))
    for chunk_BD in stream:
        features_BD = chunk_BD.astype(np.float64)
        moment_DD += features_BD.T @ features_BD
    return moment_DD


def take_rows(stream: FeatureStream, rows_M: NDArray[np.int64]) -> NDArray[np.float32]:
    """Some samples (M, D), by their ascending places in the stream."""
    taken_MD, start = np.empty((len(rows_M), stream.dim), np.float32), 0
    for chunk_BD in stream:
        stop = start + len(chunk_BD)
        first, last = np.searchsorted(rows_M, [start, stop])
        taken_MD[first:last] = chunk_BD[rows_M[first:last] - start]
        start = stop
    return taken_MD


def drawn_rows(num_samples: int, most: int) -> NDArray[np.int64]:
    """Ascending places of at most so many of N samples: always the same draw, without replacement."""
    stream = seed_sequence(0, Stage.ANALYZE, Purpose.ANALYZED_SAMPLES)
    return np.sort(np.argsort(permutation(stream, num_samples))[:most])


def _sums(stream: FeatureStream, classes: SampleClasses) -> NDArray[np.float64]:
    sums_CD = np.zeros((classes.num_classes, stream.dim))
    for ids_B, features_BD in _chunks(stream, classes):
        order = np.argsort(ids_B, kind="stable")
        there, firsts = np.unique(ids_B[order], return_index=True)
        sums_CD[there] += np.add.reduceat(features_BD[order], firsts, axis=0)
    return sums_CD


def _chunks(stream: FeatureStream, classes: SampleClasses) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Class ids (B,) and features (B, D) of each chunk, which are the caller's to change."""
    start = 0
    for chunk_BD in stream:
        stop = start + len(chunk_BD)
        yield classes.ids_N[start:stop], chunk_BD.astype(np.float64)
        start = stop
