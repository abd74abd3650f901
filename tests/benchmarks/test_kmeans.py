"""k-means beside faiss's and scikit-learn's own, at equal numbers of iterations, interleaved in one run.

``KMEANS_POINTS`` scales it down (200,000 x 768, k = 1,000 by default: minutes on two cores).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from tests.unit.test_kmeans import Held
from workloads.solvers.kmeans import Library, Settings, kmeans, one_thread_per_call, open_search

NUM_POINTS = int(os.environ.get("KMEANS_POINTS", "200000"))
NUM_CLUSTERS = max(2, NUM_POINTS // 200)
DIM = 768
ITERATIONS = 25
NUM_THREADS = len(os.sched_getaffinity(0))
ROUNDS = 1

Arm = Callable[[NDArray[np.float32]], float]


def ours(library: Library) -> Arm:
    def fit(points_ND: NDArray[np.float32]) -> float:
        search, settings = open_search(library, NUM_CLUSTERS, torch.device("cpu")), Settings(seed=0)
        with one_thread_per_call():
            return kmeans(Held(points_ND), NUM_CLUSTERS, search, settings, num_threads=NUM_THREADS).inertia

    return fit


def scikit_learn(points_ND: NDArray[np.float32]) -> float:
    fitted = KMeans(NUM_CLUSTERS, n_init=1, max_iter=ITERATIONS, random_state=0).fit(points_ND)
    return float(fitted.inertia_)


def faiss_kmeans(points_ND: NDArray[np.float32]) -> float:
    faiss = pytest.importorskip("faiss")
    faiss.omp_set_num_threads(NUM_THREADS)
    model = faiss.Kmeans(DIM, NUM_CLUSTERS, niter=ITERATIONS, seed=0, max_points_per_centroid=len(points_ND))
    model.train(points_ND)
    return float(model.index.search(points_ND, 1)[0].sum(dtype=np.float64))


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_kmeans_beside_faiss_and_scikit_learn_prints_ratios() -> None:
    pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    centers = random.normal(size=(NUM_CLUSTERS * 3 // 2, DIM)).astype(np.float32)
    noise = random.normal(size=(NUM_POINTS, DIM)).astype(np.float32)
    points_ND = centers[random.integers(0, len(centers), NUM_POINTS)] + np.float32(1.5) * noise
    arms: dict[str, Arm] = {
        "ours (faiss)": ours(Library.FAISS),
        "faiss": faiss_kmeans,
        "ours (scikit-learn)": ours(Library.SCIKIT_LEARN),
        "scikit-learn": scikit_learn,
    }
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    inertia: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            inertia[name] = arm(points_ND)
            wall[name].append(time.perf_counter() - wall_s)
            cpu[name].append(time.process_time() - cpu_s)
    best_of_theirs = min(inertia["faiss"], inertia["scikit-learn"])
    sys.stdout.write(f"\n{NUM_POINTS} x {DIM}, k = {NUM_CLUSTERS}, {NUM_THREADS} threads\n")
    for name in arms:
        sys.stdout.write(
            f"{name:20s} {median(wall[name]):8.1f} s  {median(cpu[name]):8.1f} CPU s  "
            f"inertia / best of theirs {inertia[name] / best_of_theirs:.4f}\n"
        )
    assert inertia["ours (faiss)"] <= 1.005 * best_of_theirs
    assert inertia["ours (scikit-learn)"] <= 1.005 * best_of_theirs
