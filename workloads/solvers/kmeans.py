"""k-means over points that need not fit into memory; the same bits for any number of threads.

Lloyd's algorithm (S. Lloyd, Least squares quantization in PCM, 1982) over fixed blocks of points: blocks are assigned
independently of each other. Runs of up to 8,192 points are added up in float32, their sums in order in float64. Seeds
are k-means++ (D. Arthur and S. Vassilvitskii, 2007) on a random sample of ``SAMPLED_PER_CLUSTER`` points per cluster
or, above ``MAX_CAREFULLY_SEEDED`` clusters, where that would take longer than the rest, random points. An empty cluster
moves to the point that is farthest from its centroid.

The nearest centroid is found by faiss on a CPU, or by matrix products on a CPU or a GPU. One call computes on one
thread of the CPU (callers run many at once), so that its bits depend on no thread count.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.cluster import kmeans_plusplus
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from orchestrator.core.code import version_or_empty
from orchestrator.core.errors import UserError
from workloads.runtime.streams import Purpose, Stage, permutation, seed_sequence

SAMPLED_PER_CLUSTER: Final = 64
"""With 16, inertia is 0.7 % above that of seeding on all points; with 64 it is equal, at an eighth of the cost."""
MAX_CAREFULLY_SEEDED: Final = 2048
_MIN_PROGRESS: Final = 1e-5
"""Relative gain of an iteration below which it was the last one: far below what tells two seeds apart."""
_MAX_REPAIRS: Final = 8
Tick = Callable[[], None]
_SCORES: Final = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Distances that are held at once, per call."""
_MAX_ROWS: Final = {"cpu": 1 << 13, "cuda": 1 << 17}
_MIN_ROWS: Final = 256
_SUMMED_ROWS: Final = 1 << 13
"""Points of a run that is added up in float32: in sums of more of them, as a block on a GPU has, digits are lost."""


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
    """Of one block: sums (U, D) and sizes (U,) of the clusters ``members`` (U,), ascending, or of all K."""

    ids_B: NDArray[np.int32]
    distances_B: NDArray[np.float32]
    members: NDArray[np.int64] | None
    sums_UD: NDArray[np.floating[Any]]
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
            if num_clusters and block.members is None:
                sums_KD += block.sums_UD
                sizes_K += block.sizes_U
            elif num_clusters:
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
        num_clusters = self._shape[0]
        sizes_U: NDArray[np.int64] = np.bincount(ids_B, minlength=num_clusters)
        members: NDArray[np.int64] | None = None
        places_B: NDArray[np.integer[Any]] = ids_B
        if len(rows) < num_clusters:  # most clusters have none of these points
            members = np.flatnonzero(sizes_U)
            sizes_U, places_B = sizes_U[members], np.searchsorted(members, ids_B)
        sums_UD = _sums(places_B[:_SUMMED_ROWS], points_BD[:_SUMMED_ROWS], len(sizes_U))
        for at in range(_SUMMED_ROWS, len(rows), _SUMMED_ROWS):
            run = slice(at, at + _SUMMED_ROWS)
            sums_UD = np.add(sums_UD, _sums(places_B[run], points_BD[run], len(sizes_U)), dtype=np.float64)
        return _Sums(ids_B=ids_B, distances_B=distances_B, members=members, sums_UD=sums_UD, sizes_U=sizes_U)

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


def _sums(places_B: NDArray[np.integer[Any]], points_BD: NDArray[np.float32], num: int) -> NDArray[np.float32]:
    """Sums (U, D) of the points of each place below ``num``, added in their order."""
    order_B, sizes_U = np.argsort(places_B, kind="stable"), np.bincount(places_B, minlength=num)
    starts = np.concatenate([[0], np.cumsum(sizes_U)])
    chooser_UB = csr_array((np.ones(len(places_B), np.float32), order_B, starts), shape=(num, len(places_B)))
    sums_UD: NDArray[np.float32] = chooser_UB @ points_BD
    return sums_UD


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


class Library(StrEnum):
    """What looks for the nearest centroids; identity, because libraries round differently."""

    FAISS = "faiss"
    SCIKIT_LEARN = "scikit-learn"

    @property
    def version(self) -> str:
        """Of the installed package. Raises ``UserError`` if there is none."""
        names = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "faiss") if self is Library.FAISS else (self.value,)
        for name in names:
            if version := version_or_empty(name):
                return version
        if importlib.util.find_spec("faiss") and self is Library.FAISS:  # built from source, without metadata
            return str(importlib.import_module("faiss").__version__)
        message = (
            f"this machine has no {self.value}, with which the sweep was planned; install the package on all nodes"
        )
        raise UserError(message + ", or set library: scikit-learn in the clusters block")


class Search(Protocol):
    """Finds nearest centroids among those it was last given."""

    block_rows: int
    """Points per call: part of the result's bits, so it follows from the number of centroids and the device alone."""

    def load(self, centroids_KD: NDArray[np.float32]) -> None:
        """Search among these from now on."""

    def nearest(self, points_BD: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Nearest centroid (B,) of each point, the lowest on ties, and its squared distance (B,). Thread-safe."""


def open_search(library: Library, num_clusters: int, device: torch.device) -> Search:
    """The search of a library; matrix products run on the device, faiss on the CPU."""
    if library is Library.FAISS:
        return FaissSearch(num_clusters)
    return MatrixSearch(num_clusters, device)


class MatrixSearch:
    """|x - c|^2 = |x|^2 - 2 x.c + |c|^2 by matrix products (numpy's on a CPU, as scikit-learn's own k-means)."""

    def __init__(self, num_clusters: int, device: torch.device) -> None:
        self.block_rows = _block_rows(num_clusters, device.type)
        self._device = device
        self._centroids_DK: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self._norms_K: NDArray[np.float32] = np.empty(0, np.float32)
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def load(self, centroids_KD: NDArray[np.float32]) -> None:
        # The factor 2 is exact in floating point, so it may as well be applied to the smaller matrix.
        self._centroids_DK = np.ascontiguousarray(-2 * centroids_KD.T)
        self._norms_K = np.einsum("kd,kd->k", centroids_KD, centroids_KD)
        if self._device.type == "cuda":
            pair = torch.from_numpy(self._centroids_DK), torch.from_numpy(self._norms_K)
            self._on_device = (pair[0].to(self._device), pair[1].to(self._device))

    def nearest(self, points_BD: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        norms_B = np.einsum("bd,bd->b", points_BD, points_BD)
        if self._on_device is not None:
            centroids_DK, norms_K = self._on_device
            best = torch.addmm(norms_K, torch.from_numpy(points_BD).to(self._device), centroids_DK).min(dim=1)
            ids_B, scores_B = best.indices.cpu().numpy(), best.values.cpu().numpy()
        else:
            scores_BK = points_BD @ self._centroids_DK
            scores_BK += self._norms_K
            ids_B = scores_BK.argmin(axis=1)
            scores_B = np.take_along_axis(scores_BK, ids_B[:, None], axis=1)[:, 0]
        return ids_B.astype(np.int32), np.maximum(scores_B + norms_B, 0)


class FaissSearch:
    """``faiss.IndexFlatL2``: exact, on the CPU; several threads may not search an index on a GPU at a time."""

    def __init__(self, num_clusters: int) -> None:
        self._faiss = importlib.import_module("faiss")  # by name: an optional package
        self.block_rows = _block_rows(num_clusters, "cpu")
        self._index: Any = None

    def load(self, centroids_KD: NDArray[np.float32]) -> None:
        self._index = self._faiss.IndexFlatL2(centroids_KD.shape[1])
        self._index.add(np.ascontiguousarray(centroids_KD))

    def nearest(self, points_BD: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        self._faiss.omp_set_num_threads(1)  # of the calling thread
        distances_B1, ids_B1 = self._index.search(points_BD, 1)
        return ids_B1[:, 0].astype(np.int32), np.maximum(distances_B1[:, 0], 0)


@contextmanager
def one_thread_per_call() -> Iterator[None]:
    """Run the body with linear algebra that starts no threads of its own."""
    with threadpool_limits(limits=1):
        yield


def _block_rows(num_clusters: int, device: str) -> int:
    return max(_MIN_ROWS, min(_MAX_ROWS[device], _SCORES[device] // num_clusters))
