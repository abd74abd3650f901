"""Which centroid is nearest: the kernel of k-means, by faiss or by matrix products, on a CPU or a GPU.

One call computes on one thread of the CPU (callers run many at once), so that its bits depend on no thread count.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from orchestrator.core.errors import UserError

_SCORES: Final = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Distances that are held at once, per call."""
_MAX_ROWS: Final = {"cpu": 1 << 13, "cuda": 1 << 17}
_MIN_ROWS: Final = 256


class Library(StrEnum):
    """What looks for the nearest centroids; identity, because libraries round differently."""

    FAISS = "faiss"
    SCIKIT_LEARN = "scikit-learn"

    @property
    def version(self) -> str:
        """Of the installed package. Raises ``UserError`` if there is none."""
        names = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "faiss") if self is Library.FAISS else (self.value,)
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
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
    """The search of a library, on a GPU if there is one that the library can use."""
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
    """``faiss.IndexFlatL2``: exact; on all GPUs that faiss sees."""

    def __init__(self, num_clusters: int) -> None:
        self._faiss = importlib.import_module("faiss")  # by name: an optional package
        self._on_gpus = getattr(self._faiss, "get_num_gpus", lambda: 0)() > 0
        self.block_rows = _block_rows(num_clusters, "cuda" if self._on_gpus else "cpu")
        self._index: Any = None

    def load(self, centroids_KD: NDArray[np.float32]) -> None:
        index = self._faiss.IndexFlatL2(centroids_KD.shape[1])
        self._index = self._faiss.index_cpu_to_all_gpus(index) if self._on_gpus else index
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
