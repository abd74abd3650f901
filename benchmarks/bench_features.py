"""k-means beside faiss and scikit-learn, and cached probes beside the online probe."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from orchestrator.core.contract import Execution, JobRequest
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.recipe import LOOK_FIELDS, LogisticSpec
from tests.tiny_training import RECIPE, TinyTraining
from tests.unit.test_kmeans import Held
from workloads.data.index import SampleIndex
from workloads.runtime.npy import npy_bytes
from workloads.solvers.kmeans import Library, _Lloyd, one_thread_per_call, open_search

# ---------------------------------------------------------------------------------------------------------------------
# Lloyd's loop beside those of faiss and scikit-learn: the same first centroids, the same number of iterations and one
# more pass to assign all points; interleaved in one run. Seeding is not part of it.
#
# ``KMEANS_POINTS`` and ``KMEANS_CLUSTERS`` scale it (200,000 x 768, k = 1,000 by default: minutes on two cores), and
# ``KMEANS_ITERATIONS``.

NUM_POINTS = int(os.environ.get("KMEANS_POINTS", "200000"))
NUM_CLUSTERS = int(os.environ.get("KMEANS_CLUSTERS", max(2, NUM_POINTS // 200)))
DIM = 768
ITERATIONS = int(os.environ.get("KMEANS_ITERATIONS", "3"))
NUM_THREADS = len(os.sched_getaffinity(0))
ROUNDS = 2

Arm = Callable[[NDArray[np.float32], NDArray[np.float32]], float]
"""Points and first centroids; returns the inertia."""


class Viewed(Held):
    """Points in memory, of which neighbours are not copied: neither do the others."""

    def take(self, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
        first, last = int(rows_B[0]), int(rows_B[-1])
        return self.points_ND[first : last + 1] if last - first + 1 == len(rows_B) else super().take(rows_B)


def ours(library: Library) -> Arm:
    def fit(points_ND: NDArray[np.float32], seeds_KD: NDArray[np.float32]) -> float:
        search = open_search(library, NUM_CLUSTERS, torch.device("cpu"))
        with one_thread_per_call(), ThreadPoolExecutor(NUM_THREADS) as pool:
            loop = _Lloyd(Viewed(points_ND), search, pool, NUM_THREADS)
            return loop.fit(seeds_KD, ITERATIONS, lambda: None).inertia

    return fit


def scikit_learn(points_ND: NDArray[np.float32], seeds_KD: NDArray[np.float32]) -> float:
    fitted = KMeans(NUM_CLUSTERS, init=seeds_KD, n_init=1, max_iter=ITERATIONS, tol=0, algorithm="lloyd").fit(points_ND)
    return float(fitted.inertia_)


def faiss_kmeans(points_ND: NDArray[np.float32], seeds_KD: NDArray[np.float32]) -> float:
    faiss = pytest.importorskip("faiss")
    faiss.omp_set_num_threads(NUM_THREADS)
    limits = {"max_points_per_centroid": len(points_ND), "min_points_per_centroid": 1}
    model = faiss.Kmeans(DIM, NUM_CLUSTERS, niter=ITERATIONS, seed=0, **limits)
    model.train(points_ND, init_centroids=seeds_KD)
    distances_N1, _ = model.index.search(points_ND, 1)
    return float(distances_N1.sum(dtype=np.float64))


def test_loops_of_kmeans_print_ratios() -> None:
    pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    centers = random.normal(size=(NUM_CLUSTERS, DIM)).astype(np.float32)
    points_ND = centers[random.integers(0, NUM_CLUSTERS, NUM_POINTS)]
    points_ND += 2 * random.normal(size=points_ND.shape).astype(np.float32)
    seeds_KD = points_ND[np.sort(random.permutation(NUM_POINTS)[:NUM_CLUSTERS])].copy()
    arms: dict[str, Arm] = {
        "faiss": faiss_kmeans,
        "ours (faiss)": ours(Library.FAISS),
        "ours (scikit-learn)": ours(Library.SCIKIT_LEARN),
        "scikit-learn": scikit_learn,
    }
    inertia: dict[str, float] = {}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            inertia[name] = arm(points_ND, seeds_KD.copy())
            wall[name].append(time.perf_counter() - wall_s)
            cpu[name].append(time.process_time() - cpu_s)
    sys.stdout.write(f"\n{NUM_POINTS} x {DIM}, k = {NUM_CLUSTERS}, {ITERATIONS} iterations, {NUM_THREADS} threads\n")
    for name in arms:
        cpu_s, cpu_ratio = median(cpu[name]), median(cpu[name]) / median(cpu["faiss"])
        sys.stdout.write(
            f"{name:20s} {median(wall[name]):8.2f} s {cpu_s:8.2f} CPU s; of faiss's: CPU {cpu_ratio:.3f}, "
            f"inertia {inertia[name] / inertia['faiss']:.6f}\n"
        )
    assert inertia["ours (faiss)"] == pytest.approx(inertia["faiss"], rel=1e-4)
    assert inertia["ours (scikit-learn)"] == pytest.approx(inertia["faiss"], rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Cached probes: many label fractions and seeds of one backbone, and beside the online probe at equal accuracy.
#
# ``PROBE_SAMPLES`` scales the first one down (50,000 samples of 512 features by default).

NUM_SAMPLES = int(os.environ.get("PROBE_SAMPLES", "50000"))
NUM_VAL = 5000
PROBE_DIM = 512
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
SEEDS = range(5)
EXECUTION = Execution(num_threads=NUM_THREADS)
LOGISTIC = {name: value for name, value in LogisticSpec().resolved().items() if name not in LOOK_FIELDS}
LOOK = {"view": "center", "resize": None, "interpolation": "bilinear", "decoder": "pillow", "precision": "fp32"}
MODEL: dict[str, Any] = {
    "name": "fasternet_t0",
    "image_size": 32,
    "kwargs": {"patch_size": 8, "embed_dim": 64, "depths": [1], "feature_dim": 256},
}


class Bench(TinyTraining):
    """A store with one data set."""

    def __init__(self, folder: Path, dataset: dict[str, Any]) -> None:
        super().__init__(LocalStore(folder / "store"), folder)
        parameters = {"builtin": "synthetic-hierarchy", "version": 1, **dataset}
        self.dataset = self.run(self.request(JobKind.DATASET, parameters, {})).key
        self.index = self.run(self.request(JobKind.INDEX, {}, {"dataset": self.dataset})).key

    def timed(self, request: JobRequest) -> tuple[float, float, float]:
        """Wall and processor seconds, and the error."""
        wall, cpu = time.perf_counter(), time.process_time()
        error = self.run(request).metrics["val_error"]
        return time.perf_counter() - wall, time.process_time() - cpu, error

    def probe(self, features: dict[str, str], recipe: dict[str, Any], *, seed: int = 0, **more: Any) -> JobRequest:
        inputs = {"index": self.index, "labels": self.labels({"hierarchy": "depth2"}), **features}
        parameters = {"model": MODEL, "recipe": recipe, "seed": seed, **more}  # ``more`` may name another model
        return self.request(JobKind.PROBE, parameters, inputs, execution=EXECUTION)

    def commit_features(self, split: str, features_ND: NDArray[np.float16]) -> str:
        """As an embed job would."""
        request = self.request(JobKind.EMBED, {"split": split, "made": len(features_ND)}, {"index": self.index})
        name = f"features-{0:012d}-{len(features_ND):012d}.npy"
        part = {"start": 0, "stop": len(features_ND), "features": name, "missing": "missing.npy"}
        document = {"split": split, "index": self.index, "dataset_digest": "", "dim": PROBE_DIM, "parts": [part]}
        writer = ArtifactWriter(self.store, request)
        writer.add("features.json", json.dumps(document).encode())
        writer.add(name, npy_bytes(features_ND))
        writer.add("missing.npy", npy_bytes(np.empty(0, dtype=np.int64)))
        writer.commit(now=0.0, metrics={}, summary={}, package_digest="")
        return request.key


def clouds(leaves_N: NDArray[np.integer], *, seed: int) -> NDArray[np.float16]:
    """Overlapping classes in features whose spectrum decays, as a network's does; none is centred."""
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed)
    means = 0.2 * fixed.standard_normal((int(leaves_N.max()) + 1, PROBE_DIM))
    spectrum = np.arange(1, PROBE_DIM + 1) ** -0.5
    basis = np.linalg.qr(fixed.standard_normal((PROBE_DIM, PROBE_DIM)))[0]
    points_ND = (means[leaves_N] + random.standard_normal((len(leaves_N), PROBE_DIM))) * spectrum
    features_ND: NDArray[np.float16] = (points_ND @ basis + 0.3).astype(np.float16)
    return features_ND


@pytest.mark.parametrize("num_classes", [10, 100])
def test_cached_probe_of_all_fractions_and_seeds_prints_seconds(tmp_path: Path, num_classes: int) -> None:
    # Images are never looked at: features are drawn by leaf class. Patches just hold the features of all nodes.
    pixels = {"image_size": 16, "patch_size": 2} if num_classes <= 10 else {"image_size": 32, "patch_size": 8}
    dataset = {"branching": [num_classes // 5, 5], **pixels}
    bench = Bench(tmp_path, {**dataset, "num_train": NUM_SAMPLES, "num_val": NUM_VAL})
    index = SampleIndex.open(bench.store, bench.index, tmp_path / "cache")
    splits = {"train": 1, "val": 2}
    features = {
        split: bench.commit_features(split, clouds(np.asarray(index.split(split).leaves), seed=seed))
        for split, seed in splits.items()
    }
    total_s = total_cpu_s = 0.0
    for fraction in FRACTIONS:
        subsets = [{"subset": {"fraction": fraction, "seed": seed}} if fraction < 1 else {} for seed in SEEDS]
        runs = [bench.timed(bench.probe(features, LOGISTIC, seed=seed, **subsets[seed])) for seed in SEEDS]
        wall_s, cpu_s = (sum(run[part] for run in runs) for part in (0, 1))
        errors = [100 * run[2] for run in runs]
        total_s, total_cpu_s = total_s + wall_s, total_cpu_s + cpu_s
        mean, std = np.mean(errors), np.std(errors, ddof=1)
        sys.stdout.write(f"  {fraction:6.0%}  {wall_s:6.1f} s  cpu {cpu_s:6.1f} s  error {mean:5.2f} +- {std:.2f} %\n")
    jobs = len(FRACTIONS) * len(SEEDS)
    shape = f"{NUM_SAMPLES:,} x {PROBE_DIM}, {num_classes} classes, {NUM_THREADS} threads"
    sys.stdout.write(f"{jobs} cached probes of {shape}: {total_s:.1f} s, processor {total_cpu_s:.1f} s\n")


ONLINE, PLAIN, SGD, SAME, BEST = (
    "online, augmented",
    "online",
    "cached, sgd",
    "cached, lbfgs, scaling none",
    "cached, lbfgs",
)
CACHED = (SGD, SAME, BEST)
EQUAL_POINTS = 0.3
"""Of accuracy."""
NUM_PROBES = 50
"""Of one backbone and target: 10 label fractions x 5 seeds."""


def test_cached_probe_beside_the_online_probe_prints_ratios(tmp_path: Path) -> None:
    """The 40 epochs of the paper's probe, and the same head from features that were computed once.

    ``cached, sgd`` does what ``online`` does without its images; ``scaling none`` has the objective of all SGD arms,
    at its optimum; the last arm regularises scaled features, which no SGD arm can say.
    """
    classes = {"branching": [4, 5], "num_common_patches": 4, "num_subclass_patches": 4}
    bench = Bench(tmp_path, {**classes, "image_size": 32, "patch_size": 8, "num_train": 4096, "num_val": 4096})
    model = {**MODEL, "kwargs": {**MODEL["kwargs"], "feature_dim": 64}}
    look = {"batch_size": 128, "std": [0.5] * 3}
    pretraining = {**look, "epochs": 4, "lr": 0.3, "augment": "flip", "eval_every_epochs": 4}
    backbone = bench.run(
        bench.training(model=model, recipe=pretraining, space={"hierarchy": "depth2"}, execution=EXECUTION)
    ).key
    # The best of lr 0.1 to 1 and weight decay 0 to 0.01.
    steps = {**RECIPE, **look, "epochs": 40, "warmup_epochs": 0, "lr": 1.0, "weight_decay": 1e-3}
    steps |= {"eval_every_epochs": 40}
    features, embed = embedded(bench, backbone, {**LOOK, "mean": steps["mean"], "std": steps["std"], "model": model})
    arms = {
        ONLINE: ({"backbone": backbone}, {**steps, "augment": "flip"}),
        PLAIN: ({"backbone": backbone}, steps),
        SGD: (features, {**steps, "features": "cached", "solver": "sgd"}),
        SAME: (features, {**LOGISTIC, "scaling": "none"}),
        BEST: (features, LOGISTIC),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    for seed in range(2):
        for name, (inputs, recipe) in arms.items():
            found[name].append(bench.timed(bench.probe(inputs, recipe, seed=seed, model=model)))
            sys.stdout.write(f"  seed {seed} {name}: {found[name][-1][0]:.2f} s\n")
    means = {name: np.mean(runs, axis=0) for name, runs in found.items()}
    sys.stdout.write(f"features, once for all: {embed[0]:.1f} s, processor {embed[1]:.1f} s\n")
    for name, (wall_s, cpu_s, error) in means.items():
        line = f"  {name:28}{wall_s:7.2f} s  cpu {cpu_s:7.2f} s  error {100 * error:5.2f} %"
        for other in (ONLINE, PLAIN):
            points = 100 * (error - means[other][2])
            faster = f"{means[other][0] / wall_s:6.1f} x ({means[other][1] / cpu_s:.1f} x processor)"
            line += f"  | {points:+.2f} points, {faster} beside {other}"
        once = NUM_PROBES * means[ONLINE][0] / (embed[0] + NUM_PROBES * wall_s)
        sys.stdout.write(
            line + (f"  | {NUM_PROBES} of them with their features: {once:.1f} x\n" if name in CACHED else "\n")
        )
    assert 100 * abs(means[SGD][2] - means[PLAIN][2]) <= EQUAL_POINTS, "the same steps on the same features"
    assert 100 * (means[SAME][2] - means[PLAIN][2]) <= EQUAL_POINTS, "the optimum of what these steps go down"


def embedded(bench: Bench, backbone: str, look: dict[str, Any]) -> tuple[dict[str, str], tuple[float, float]]:
    """Features of both splits, and what computing them took: wall and processor seconds."""
    started = time.perf_counter(), time.process_time()
    inputs = {"index": bench.index, "backbone": backbone}
    features = {
        split: bench.run(bench.request(JobKind.EMBED, {"split": split, **look}, inputs, execution=EXECUTION)).key
        for split in ("train", "val")
    }
    return features, (time.perf_counter() - started[0], time.process_time() - started[1])
