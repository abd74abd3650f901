"""k-means over points that need not fit into memory; the same bits for any number of threads.

Lloyd's algorithm (S. Lloyd, Least squares quantization in PCM, 1982) over fixed blocks of points: blocks are assigned
independently of each other and their sums are added in order, in float64. Seeds are k-means++ (D. Arthur and
S. Vassilvitskii, 2007) on a random sample of ``SAMPLED_PER_CLUSTER`` points per cluster or, above
``MAX_CAREFULLY_SEEDED`` clusters, where that would take longer than the rest, random points. An empty cluster moves to
the point that is farthest from its centroid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.cluster import kmeans_plusplus

from orchestrator.core.errors import UserError
from workloads.data.streams import Purpose, Stage, permutation, seed_sequence
from workloads.labels.kmeans_search import Search

SAMPLED_PER_CLUSTER: Final = 64
"""With 16, inertia is 0.7 % above that of seeding on all points; with 64 it is equal, at an eighth of the cost."""
MAX_CAREFULLY_SEEDED: Final = 2048
_MIN_PROGRESS: Final = 1e-5
"""Relative gain of an iteration below which it was the last one: far below what tells two seeds apart."""
_MAX_REPAIRS: Final = 8


class Points(Protocol):
    """N points of D dimensions."""

    def __len__(self) -> int: ...

    def take(self, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """Points (B, D) by ascending rows. Thread-safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to cluster; identity of a ``cluster`` job."""

    seed: int
    iterations: int = 25
    """At most."""
    num_init: int = 1
    """Starts, of which the best is kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clusters:
    """K clusters of N points, none of them empty."""

    centroids_KD: NDArray[np.float32]
    ids_N: NDArray[np.int32]
    inertia: float
    """Sum of squared distances to the nearest centroid."""
    num_iterations: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Points (K,) of each."""
        return np.bincount(self.ids_N, minlength=len(self.centroids_KD))


Tick = Callable[[], None]


def kmeans(
    points: Points,
    num_clusters: int,
    search: Search,
    settings: Settings,
    *,
    stream: tuple[int, ...] = (),
    num_threads: int = 1,
    tick: Tick = lambda: None,
) -> Clusters:
    """Cluster points.

    Args:
        points: what to cluster.
        num_clusters: K, at most as many as there are points.
        search: the kernel.
        settings: seed, iterations and starts.
        stream: tells random streams of one seed apart.
        num_threads: blocks at once; changes nothing. Callers limit linear algebra to one thread per call.
        tick: called after every iteration; what it raises ends the call.

    Raises:
        UserError: there are fewer different points than clusters.
    """
    if not 1 <= num_clusters <= len(points):
        raise UserError(f"{num_clusters} clusters of {len(points)} samples are not possible; use fewer clusters")
    with ThreadPoolExecutor(num_threads) as pool:
        best: Clusters | None = None
        for start in range(settings.num_init):
            run = _Lloyd(points, search, pool, num_threads)
            found = run.fit(_seeds(points, num_clusters, settings.seed, (*stream, start)), settings.iterations, tick)
            best = found if best is None or found.inertia < best.inertia else best
    assert best is not None  # noqa: S101 - num_init >= 1
    return best


def operations(num_points: int, dim: int, num_clusters: int, settings: Settings) -> float:
    """Floating-point operations of a whole run at most: 2 N K D per iteration, and one more pass to end with."""
    return 2.0 * num_points * num_clusters * dim * (settings.iterations + 1) * settings.num_init


def assign(points: Points, search: Search, num_threads: int = 1) -> NDArray[np.int32]:
    """Nearest centroid (N,) of each point, among those that ``search`` holds."""
    with ThreadPoolExecutor(num_threads) as pool:
        return _Lloyd(points, search, pool, num_threads).assign().ids_N


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    """Of one block: sums (U, D) and sizes (U,) of the clusters ``members`` (U,)."""

    ids_B: NDArray[np.int32]
    distances_B: NDArray[np.float32]
    members: NDArray[np.int32]
    sums_UD: NDArray[np.float32]
    sizes_U: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Assignment:
    ids_N: NDArray[np.int32]
    distances_N: NDArray[np.float32]
    sums_KD: NDArray[np.float64]
    sizes_K: NDArray[np.int64]

    @property
    def inertia(self) -> float:
        return float(self.distances_N.sum(dtype=np.float64))


class _Lloyd:
    def __init__(self, points: Points, search: Search, pool: Executor, num_threads: int) -> None:
        self._points, self._search, self._pool, self._num_threads = points, search, pool, num_threads
        self._shape = (0, 0)

    def fit(self, centroids_KD: NDArray[np.float32], iterations: int, tick: Tick) -> Clusters:
        self._shape = centroids_KD.shape[0], centroids_KD.shape[1]
        inertia, done = np.inf, 0
        found = self._assign_to(centroids_KD)
        while done < iterations and inertia - found.inertia > _MIN_PROGRESS * found.inertia:
            inertia, done = found.inertia, done + 1
            centroids_KD = self._moved(found, centroids_KD)
            found = self._assign_to(centroids_KD)
            tick()
        for _ in range(_MAX_REPAIRS):
            if found.sizes_K.all():
                break
            centroids_KD = self._moved(found, centroids_KD)
            found = self._assign_to(centroids_KD)
        if not found.sizes_K.all():
            different = int(np.count_nonzero(found.sizes_K))
            message = f"{self._shape[0]} clusters were asked for, but {len(self._points)} samples have only about "
            raise UserError(f"{message}{different} different features; use fewer clusters, or another embedding")
        return Clusters(centroids_KD=centroids_KD, ids_N=found.ids_N, inertia=found.inertia, num_iterations=done)

    def assign(self) -> _Assignment:
        """Assign all points; sums are added up if ``fit`` has set the shape."""
        num_points, (num_clusters, dim) = len(self._points), self._shape
        ids_N, distances_N = np.empty(num_points, np.int32), np.empty(num_points, np.float32)
        sums_KD, sizes_K = np.zeros((num_clusters, dim)), np.zeros(num_clusters, np.int64)
        start = 0
        for block in self._blocks():
            stop = start + len(block.ids_B)
            ids_N[start:stop], distances_N[start:stop] = block.ids_B, block.distances_B
            if num_clusters:
                sums_KD[block.members] += block.sums_UD
                sizes_K[block.members] += block.sizes_U
            start = stop
        return _Assignment(ids_N=ids_N, distances_N=distances_N, sums_KD=sums_KD, sizes_K=sizes_K)

    def _assign_to(self, centroids_KD: NDArray[np.float32]) -> _Assignment:
        self._search.load(centroids_KD)
        return self.assign()

    def _blocks(self) -> Iterator[_Sums]:
        """Blocks in order; a bounded number of them is in work or waits."""
        starts = iter(range(0, len(self._points), self._search.block_rows))
        while window := list(islice(starts, 4 * self._num_threads)):
            yield from self._pool.map(self._block, window)

    def _block(self, start: int) -> _Sums:
        rows = np.arange(start, min(start + self._search.block_rows, len(self._points)))
        points_BD = self._points.take(rows)
        ids_B, distances_B = self._search.nearest(points_BD)
        members, slots_B, sizes_U = np.unique(ids_B, return_inverse=True, return_counts=True)
        ones = np.ones(len(rows), np.float32)
        chooser_UB = csr_array((ones, (slots_B, np.arange(len(rows)))), shape=(len(members), len(rows)))
        return _Sums(
            ids_B=ids_B, distances_B=distances_B, members=members, sums_UD=chooser_UB @ points_BD, sizes_U=sizes_U
        )

    def _moved(self, found: _Assignment, centroids_KD: NDArray[np.float32]) -> NDArray[np.float32]:
        """Means of the clusters; the empty ones take the farthest points of the others."""
        sums_KD, sizes_K = found.sums_KD, found.sizes_K
        empty = np.flatnonzero(sizes_K == 0)
        if len(empty):
            farthest = np.sort(np.argsort(-found.distances_N, kind="stable")[: len(empty)])
            points_ED = self._points.take(farthest).astype(np.float64)
            old = found.ids_N[farthest]
            np.subtract.at(sums_KD, old, points_ED)
            np.subtract.at(sizes_K, old, 1)
            sums_KD[empty], sizes_K[empty] = points_ED, 1
        means_KD = sums_KD / np.maximum(sizes_K, 1)[:, None]
        return np.where(sizes_K[:, None] > 0, means_KD, centroids_KD).astype(np.float32)


def _seeds(points: Points, num_clusters: int, seed: int, stream: tuple[int, ...]) -> NDArray[np.float32]:
    """First centroids (K, D)."""
    sequence = seed_sequence(seed, Stage.LABELS, Purpose.CLUSTERS, *stream)
    order = permutation(sequence, len(points))
    if num_clusters > MAX_CAREFULLY_SEEDED:
        return points.take(np.sort(order[:num_clusters]))
    sample_SD = points.take(np.sort(order[: SAMPLED_PER_CLUSTER * num_clusters]))
    state = int(sequence.spawn(1)[0].generate_state(1)[0])
    chosen, _ = kmeans_plusplus(sample_SD, num_clusters, random_state=state)
    centroids_KD: NDArray[np.float32] = chosen.astype(np.float32)
    return centroids_KD
