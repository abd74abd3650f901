"""What metrics cost: a training step with and without them, and a round of the controller over a large sweep."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from orchestrator.core.contract import Execution, JobKind, JobRequest, Progress
from orchestrator.metrics.attempts import AttemptMetrics
from orchestrator.metrics.catalog import Metric
from orchestrator.metrics.exporter import RayExporter
from orchestrator.metrics.sweeps import Observed, SweepMetrics
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.ledger import SweepLedger
from tests.integration.conftest import ray_cluster  # noqa: F401 - a fixture
from tests.live_sweep import SWEEP, write_live_sweep
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop
from workloads.models.build import Classifier
from workloads.train import step_metrics
from workloads.train.loop import TrainingLoop

ROUNDS, STEPS, BATCH_SIZE, IMAGE_SIZE = 11, 400, 8, 16
NUM_REPORTS = 2_000
NUM_TRANSFERS = 10_000
REQUEST = JobRequest(
    attempt_id="a.1", attempt_number=1, sweep="s", job="pretrain/x", key="a", kind=JobKind.PRETRAIN,
    identity={"parameters": {}, "inputs": {}}, store_uri="file:///nowhere",
)  # fmt: skip


def small_task() -> MemoryImages:
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = Classifier(backbone, nn.Linear(8, NUM_CLASSES))
    return MemoryImages(net, batch_size=BATCH_SIZE, num_samples=BATCH_SIZE * STEPS, image_size=IMAGE_SIZE)


def cpu_per_step_s(folder: Path, report: Callable[[Progress], None], counters: Callable[[TrainingLoop], Any]) -> float:
    recipe = {"epochs": 1, "batch_size": BATCH_SIZE, "lr": 0.01, "warmup_epochs": 0, "schedule": "constant"}
    execution = Execution(checkpoint_every_steps=STEPS)
    loop = memory_loop(small_task(), LocalStore(folder), recipe, execution=execution, report=report)
    loop.counters = lambda: counters(loop)  # type: ignore[method-assign]
    # Of the thread that trains: Ray's own threads come and go beside it, in both arms.
    started_s = time.thread_time()
    loop.run()
    return (time.thread_time() - started_s) / STEPS


@pytest.mark.bench
def test_training_step_with_metrics_and_without(ray_cluster, tmp_path) -> None:  # noqa: F811
    metrics = AttemptMetrics(REQUEST, RayExporter())

    inside = Inside()
    with_metrics = inside.timed(lambda progress: metrics.show(metrics.complete(progress)))
    counters = inside.timed(TrainingLoop.counters)

    runs: dict[str, Callable[[Path], float]] = {
        "with": lambda folder: cpu_per_step_s(folder, with_metrics, counters),
        "without": lambda folder: cpu_per_step_s(folder, lambda _: None, lambda _: {}),
    }
    arms: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        run(tmp_path / f"warm-{name}")
    inside.spent_s = 0.0
    for number in range(ROUNDS):
        for name in sorted(runs, reverse=number % 2 == 1):  # whoever is second finds the caches warm
            arms[name].append(runs[name](tmp_path / f"{name}{number}"))
    ratios = [one / other for one, other in zip(arms["with"], arms["without"], strict=True)]
    share = inside.spent_s / (sum(arms["with"]) * STEPS)
    cost_s = report_cost_s(metrics)
    sys.stdout.write(
        f"\nCPU per step with metrics / without: median {statistics.median(ratios):.4f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); step {statistics.median(arms['without']) * 1e3:.2f} ms\n"
        f"of that, in the code of metrics: {100 * share:.3f} % (asked: 0.5 %)\n"
        f"a report costs {cost_s * 1e6:.0f} us, one every {step_metrics._REPORT_EVERY_S:g} s: "
        f"{100 * cost_s / step_metrics._REPORT_EVERY_S:.4f} % of the time\n"
    )


class Inside:
    """Adds up the CPU time that some functions take in the thread that calls them."""

    spent_s = 0.0

    def timed(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(argument: Any) -> Any:
            started_s = time.thread_time()
            try:
                return function(argument)
            finally:
                self.spent_s += time.thread_time() - started_s

        return call


def report_cost_s(metrics: AttemptMetrics) -> float:
    """Seconds per report if each were exported, which only one in seven is."""
    names = ("images", "steps", "train_s", "data_wait_s", "checkpoint_stall_s", "cache_hits", "store_read_bytes")
    started_s = time.process_time()
    for number in range(NUM_REPORTS):
        metrics._show_at_s = 0.0
        metrics.show(metrics.complete(Progress(phase="train", counters=dict.fromkeys(names, float(number)))))
    return (time.process_time() - started_s) / NUM_REPORTS


class Counted:
    """An exporter that only counts."""

    num_values = 0

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self.num_values += 1

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        self.num_values += 1


@pytest.mark.bench
def test_controller_metrics_of_ten_thousand_jobs(tmp_path) -> None:
    store = LocalStore(tmp_path / "store")
    write_live_sweep(store, num_transfers=NUM_TRANSFERS, now=time.time())
    snapshot = SweepLedger(store, SWEEP).refresh()
    scheduler, exporter = Scheduler(), Counted()
    index = scheduler._follow(snapshot, {})
    metrics = SweepMetrics(exporter)
    now = time.time()
    metrics.follow([snapshot], now)
    follow_s = _median(lambda: metrics.follow([snapshot], now))
    one = Observed(snapshot=snapshot, index=index, progress={}, silent_s={})
    before = exporter.num_values
    show_s = _median(lambda: metrics.show([one], now))
    sys.stdout.write(
        f"\n{len(snapshot.jobs)} jobs: a round {follow_s * 1e6:.0f} us, an export {show_s * 1e3:.2f} ms every 5 s "
        f"({100 * show_s / 5:.3f} % of the controller's time), {(exporter.num_values - before) // 9} values\n"
    )


def _median(call: Callable[[], None]) -> float:
    times = []
    for _ in range(9):
        started_s = time.process_time()
        call()
        times.append(time.process_time() - started_s)
    return statistics.median(times)
