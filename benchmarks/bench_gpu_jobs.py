"""Whole jobs on a GPU: equal bits after an interruption, memory, CUDA graphs, features, probes, clusters.

For a machine with one GPU: ``make bench ARGS=benchmarks/bench_gpu_jobs.py``; ``KMEANS_POINTS``, ``KMEANS_CLUSTERS`` and
``KMEANS_ITERATIONS`` scale the clusters. Only equal bits are asserted. Without a GPU all of it is skipped; with
GPU_BENCHMARK_DRY_RUN=1 the same code runs with tiny sizes on the CPU: these figures say nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from orchestrator.core.contract import Execution
from orchestrator.core.errors import OutOfMemoryError, PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.local import LocalStore
from tests.tiny_training import TinyTraining
from workloads.solvers.kmeans import Library, Settings, kmeans, one_thread_per_call, open_search

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not HAS_GPU and not os.environ.get("GPU_BENCHMARK_DRY_RUN"),
    reason="there is no GPU here; GPU_BENCHMARK_DRY_RUN=1 runs the same code with tiny sizes on the CPU",
)
NUM_THREADS = len(os.sched_getaffinity(0)) if HAS_GPU else 1
NAMES = ("vit_base_patch16_224", "resnet50", "resnet34") if HAS_GPU else ("test_vit", "test_resnet", "test_resnet")
# On smaller images the CPU kernels of convolutions in bf16 read memory that nothing wrote (torch 2.15).
VIT, RESNET, SMALL = ({"name": name, "image_size": 224 if HAS_GPU else 64} for name in NAMES)
NUM_TRAIN, BATCH_SIZE, IMAGE_SIZE = (2048, 256, 64) if HAS_GPU else (64, 16, 16)
COMPILE_MODES = ("off", "default") if HAS_GPU else ("off",)
RECIPE: dict[str, Any] = {
    "epochs": 1,
    "batch_size": BATCH_SIZE,
    "norm_group": BATCH_SIZE // 4,
    "lr": 0.01,
    "warmup_epochs": 0,
    "precision": "bf16",
    "augment": "random_resized_crop_flip",
}


def say(line: str) -> None:
    """Print a figure at once: the machine may be taken back."""
    sys.stdout.write(f"\n  {line}")
    sys.stdout.flush()


class Jobs(TinyTraining):
    """A store with a data set of small images, which training enlarges."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStore(folder / "store"), folder)
        look = {"branching": [2, 4], "image_size": IMAGE_SIZE, "patch_size": IMAGE_SIZE // 8}
        sizes = {"num_train": NUM_TRAIN, "num_val": 64}
        parameters = {"builtin": "synthetic-hierarchy", "version": 1, **look, **sizes}
        self.dataset = self.run(self.request(JobKind.DATASET, parameters, {})).key
        self.index = self.run(self.request(JobKind.INDEX, {}, {"dataset": self.dataset})).key
        self._seeds = itertools.count(1)

    def trained(
        self, model: dict[str, Any], *, stop_at: int = 0, execution: dict[str, Any] | None = None, **recipe: Any
    ) -> Record:
        """The record of a new training; with ``stop_at`` of one that is preempted at that step and goes on."""
        seed = next(self._seeds)
        settings = Execution(num_threads=NUM_THREADS, **(execution or {}))
        attempts = [
            self.training(model=model, recipe=RECIPE | recipe, seed=seed, execution=settings, attempt=number)
            for number in (1, 2)
        ]
        if stop_at:
            steps = itertools.count()
            with pytest.raises(PreemptedError):
                self.run(attempts[0], should_stop=lambda: next(steps) == stop_at)
        return read_record(self.store, self.run(attempts[1]).key)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    if HAS_GPU:  # a job takes the GPU that its backend gave to it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    yield Jobs(tmp_path)
    if HAS_GPU:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("compile_mode", COMPILE_MODES)
@pytest.mark.parametrize("model", [VIT, RESNET], ids=lambda model: model["name"])
def test_interrupted_training_has_equal_bits(
    tmp_path: Path, jobs: Jobs, model: dict[str, Any], compile_mode: str
) -> None:
    """Asked where execution is deterministic; elsewhere nothing is promised, and what comes out is printed."""
    for is_deterministic in (True, False):
        execution = {"compile": compile_mode, "deterministic": is_deterministic}
        there = Jobs(tmp_path / f"deterministic-{is_deterministic}")  # the same job, so another store
        again = Jobs(tmp_path / f"again-{is_deterministic}")
        plain = there.trained(model, execution=execution)
        resumed = again.trained(model, stop_at=NUM_TRAIN // BATCH_SIZE // 2, execution=execution)
        is_equal = plain.summary["weights_sha256"] == resumed.summary["weights_sha256"]
        measured = ", ".join(f"{name} {value:.1f}" for name, value in plain.summary["measured"].items())
        say(
            f"{model['name']}, compile {compile_mode}, deterministic {is_deterministic}: resumed in the middle, equal "
            f"weights {is_equal}, equal metrics {plain.metrics == resumed.metrics}; {measured}"
        )
        assert is_equal or not is_deterministic


@pytest.mark.parametrize("model", [VIT, RESNET], ids=lambda model: model["name"])
def test_micro_batch_is_searched_and_halved_after_a_failure(jobs: Jobs, model: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"batch_size": NUM_TRAIN, "precision": "fp32", "epochs": 2}
    started_s = time.perf_counter()
    record = jobs.trained(model, **wanted)
    peak_gib, all_gib = (
        (torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1] / 2**30) if HAS_GPU else (0, 0)
    )
    say(
        f"{model['name']}, batch {NUM_TRAIN}, fp32: micro-batch {record.summary['fingerprint']['micro_batch']} was "
        f"found, {peak_gib:.1f} of {all_gib:.1f} GiB at most; {time.perf_counter() - started_s:.1f} s in all"
    )
    if HAS_GPU:
        with pytest.raises(OutOfMemoryError) as failure:
            jobs.trained(model, **wanted, execution={"micro_batch": NUM_TRAIN})
        say(f"  of {NUM_TRAIN}: {str(failure.value)[:300]}")
    record = jobs.trained(model, **wanted, execution={"micro_batch": NUM_TRAIN, "memory_retries": 3})
    say(f"  after three failures: micro-batch {record.summary['fingerprint']['micro_batch']}")


@pytest.mark.parametrize("wanted", [{"precision": "fp16"}, {"precision": "fp32", "tf32": True}], ids=str)
def test_other_arithmetic(jobs: Jobs, wanted: dict[str, Any]) -> None:
    for compile_mode in COMPILE_MODES:
        record = jobs.trained(SMALL, **wanted, execution={"compile": compile_mode})
        say(f"{SMALL['name']}, {wanted}, compile {compile_mode}: loss {record.metrics['train_loss']:.4f}")


def test_cuda_graphs(jobs: Jobs) -> None:
    for compile_mode in (*COMPILE_MODES, *(["reduce-overhead"] if HAS_GPU else [])):
        record = jobs.trained(SMALL, norm_group=BATCH_SIZE, epochs=2, execution={"compile": compile_mode})
        rate, compile_s = (record.summary["measured"][name] for name in ("images_per_s", "compile_s"))
        loss = record.metrics["train_loss"]
        compiled = f"compiled in {compile_s:.1f} s"
        say(f"{SMALL['name']}, compile {compile_mode}: loss {loss:.4f}, {rate:.0f} images/s, {compiled}")


def test_features_probes_and_fine_tuning(jobs: Jobs) -> None:
    backbone = jobs.trained(SMALL).key
    look = {"view": "center", "resize": None, "interpolation": "bilinear", "decoder": "pillow", "precision": "bf16"}
    normalization = {"mean": [0.5] * 3, "std": [0.25] * 3}
    execution = Execution(num_threads=NUM_THREADS)
    started_s = time.perf_counter()
    features = {
        split: jobs.run(
            jobs.request(
                JobKind.EMBED,
                {"split": split, "model": SMALL, **look, **normalization},
                {"index": jobs.index, "backbone": backbone},
                execution=execution,
            )
        ).key
        for split in ("train", "val")
    }
    say(f"features of {NUM_TRAIN} images: {time.perf_counter() - started_s:.1f} s")
    plain = RECIPE | {"precision": "fp32", "augment": "none", "epochs": 20}
    online = jobs.training(JobKind.PROBE, model=SMALL, recipe=plain, backbone=backbone, execution=execution)
    parameters = {**online.parameters, "recipe": {**online.parameters["recipe"], "features": "cached", "solver": "sgd"}}
    inputs = {"index": jobs.index, "labels": online.inputs["labels"], **features}
    tuned = jobs.training(JobKind.FINETUNE, model=SMALL, recipe=RECIPE, backbone=backbone, execution=execution)
    for name, request in {
        "probe of images": online,
        "probe of features": jobs.request(JobKind.PROBE, parameters, inputs, execution=execution),
        "fine-tuning": tuned,
    }.items():
        started_s = time.perf_counter()
        error = jobs.run(request).metrics["val_error"]
        say(f"{name}: {time.perf_counter() - started_s:.1f} s, error {error:.3f}")


class Half:
    """Points in float16, as feature tables hold them."""

    def __init__(self, points_ND: NDArray[np.float16]) -> None:
        self._points_ND = points_ND

    def __len__(self) -> int:
        return len(self._points_ND)

    def take(self, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """See ``Points``."""
        first, last = int(rows_B[0]), int(rows_B[-1])
        is_dense = last - first + 1 == len(rows_B)
        return (self._points_ND[first : last + 1] if is_dense else self._points_ND[rows_B]).astype(np.float32)


def test_kmeans_of_the_images_of_imagenet21k() -> None:
    """As many points and clusters as its train split has images and classes."""
    num_points = int(os.environ.get("KMEANS_POINTS", "12700000" if HAS_GPU else "2000"))
    num_clusters = int(os.environ.get("KMEANS_CLUSTERS", "21841" if HAS_GPU else "20"))
    settings = Settings(seed=0, iterations=int(os.environ.get("KMEANS_ITERATIONS", "2")))
    dim = 768
    torch.manual_seed(0)
    points_ND = np.empty((num_points, dim), np.float16)
    centers_KD = torch.randn(num_clusters, dim, device=DEVICE)
    for start in range(0, num_points, 1 << 18):
        size = min(1 << 18, num_points - start)
        block_BD = centers_KD[torch.randint(num_clusters, (size,), device=DEVICE)]
        block_BD += 2 * torch.randn(size, dim, device=DEVICE)
        points_ND[start : start + size] = block_BD.half().cpu().numpy()
    del centers_KD, block_BD
    marks_s = [time.perf_counter()]
    with one_thread_per_call():
        search = open_search(Library.SCIKIT_LEARN, num_clusters, DEVICE)
        found = kmeans(
            Half(points_ND),
            num_clusters,
            search,
            settings,
            num_threads=NUM_THREADS,
            tick=lambda: marks_s.append(time.perf_counter()),
        )
    first_s, *others_s = [after - before for before, after in itertools.pairwise(marks_s)]
    iteration_s = min(others_s, default=first_s)
    rate = 2e-12 * num_points * num_clusters * dim / iteration_s
    say(
        f"k-means of {num_points} x {dim}, k = {num_clusters}, {NUM_THREADS} threads: seeds and two passes "
        f"{first_s:.1f} s, a further iteration {iteration_s:.1f} s = {rate:.1f} TFLOP/s; inertia {found.inertia:.6g}"
    )
