"""What jobs cost the controller, the store, the metrics and MLflow."""

from __future__ import annotations

import os
import secrets
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import nn

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.simulated import ClusterSpec, SimulatedBackend, SimulatedCluster, VirtualClock
from orchestrator.controller.connect import ensure_controller
from orchestrator.controller.controller import Controller
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.contract import Execution, JobRequest, Outcome, Progress, Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.metrics.attempts import AttemptMetrics
from orchestrator.metrics.catalog import Metric
from orchestrator.metrics.exporter import RayExporter
from orchestrator.metrics.sweeps import Observed, SweepMetrics
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.simulation.forecast import Assumptions, ControllerLoop, Pace, Workload
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.layout import journal_folder, snapshots_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps import client, ledger
from orchestrator.sweeps.client import load_snapshot, submit
from orchestrator.sweeps.ledger import SweepLedger
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.tracking.publisher import Publisher
from tests.clusters.small_sweep import write_sweep
from tests.integration.conftest import ray_cluster  # noqa: F401 - a fixture
from tests.integration.ray_jobs import ENTRY_POINT, job
from tests.live_sweep import SWEEP, write_live_sweep
from tests.makespan_dag import paper_dag
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop
from tests.mlflow_servers import new_database
from tests.simulation.sweeps import training_sweep
from tests.tracking_sweeps import big_sweep
from workloads.models.build import Classifier
from workloads.train import step_metrics
from workloads.train.loop import TrainingLoop

# ---------------------------------------------------------------------------------------------------------------------
# What large sweeps cost the controller and those who ask how a sweep stands. Prints; asserts no times.
#
# Measured on 2 shared cores: an event folds in 13 us with 1,000 or 10,000 jobs and in 24 us with 100,000.

TICK_EVENTS = 5
"""Events that a controller appends at once."""


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}")


def plan_of(num_jobs: int, store_uri: str = "") -> Plan:
    made, _ = paper_dag(1, num_pretrains=num_jobs // 50, num_transfers=49)
    return Plan(sweep="paper", revision=0, store_uri=store_uri, jobs=made.jobs, baseline="")


def life_of(plan: Plan, num_jobs: int) -> Iterator[list[Event]]:
    """Launch and success of the first jobs."""
    for number in range(0, num_jobs, TICK_EVENTS):
        jobs = plan.jobs[number : number + TICK_EVENTS]
        yield [
            events.AttemptLaunched(at_s=1.0, job=job.name, attempt_id=job.key, key=job.key, number=1, epoch=1)
            for job in jobs
        ]
        yield [
            events.AttemptSucceeded(
                at_s=2.0, job=job.name, attempt_id=job.key, outcome=Outcome.COMMITTED, metrics={"val_error": 0.5}
            )
            for job in jobs
        ]


def test_event_folds_as_fast_in_a_large_sweep_as_in_a_small_one() -> None:
    spent_us = {}
    for num_jobs in (1_000, 10_000, 100_000):
        plan = plan_of(num_jobs)
        accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
        snapshot = apply(Snapshot(sweep="paper"), [accepted], lambda _, plan=plan: plan)  # type: ignore[misc]
        segments = list(life_of(plan, 1_000))
        started_s = time.process_time()
        for segment in segments:
            snapshot = apply(snapshot, segment, lambda _, plan=plan: plan)  # type: ignore[misc]
        spent_us[num_jobs] = (time.process_time() - started_s) / 2_000 * 1e6
    say(", ".join(f"{n} jobs: {us:.1f} us per event" for n, us in spent_us.items()))
    say(f"100,000 jobs / 1,000 jobs: {spent_us[100_000] / spent_us[1_000]:.2f}")


def test_status_of_a_large_sweep_is_read_from_its_newest_snapshot(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = plan_of(10_000, store.uri)
    writer = SweepLedger(store, "paper", holder="bench")
    revision, documents = writer.add_revision(plan.to_json(), "")
    writer.append([events.SweepAdopted(at_s=0.0, cluster="c", epoch=1, holder="bench")])
    writer.append([events.PlanAccepted(at_s=0.0, message_id="m", revision=revision, documents=documents)])
    started_s = time.process_time()
    for segment in life_of(plan, 10_000):
        writer.append(segment)
    every = ledger._snapshot_distance(writer.snapshot)
    say(f"4,000 appends with snapshots every {every}: {time.process_time() - started_s:.1f} s of CPU")
    spent_s = _time_reads(store, ["with snapshots"])
    for name in store.list_children(snapshots_folder("paper")):
        store.delete(f"{snapshots_folder('paper')}{name}")
    spent_s |= _time_reads(store, ["journal alone"])
    say(", ".join(f"{arm}: {seconds:.2f} s" for arm, seconds in spent_s.items()))


def _time_reads(store: LocalStore, arms: Sequence[str]) -> dict[str, float]:
    spent_s = {}
    for arm in arms:
        started_s = time.perf_counter()
        snapshot = client.load_snapshot(store, "paper")
        spent_s[arm] = time.perf_counter() - started_s
        assert snapshot.num_events == 20_002
    return spent_s


def test_memory_of_a_controller_with_a_hundred_thousand_jobs(tmp_path: Path) -> None:
    for num_jobs in (0, 100_000):
        command = [sys.executable, "-m", "benchmarks.bench_controller", str(tmp_path), str(num_jobs)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        say(f"{num_jobs} jobs: {told.stdout.strip()}")


def _serve(folder: Path, num_jobs: int) -> None:
    """A controller that has accepted a sweep and has room for 1,000 attempts; prints what its process holds."""
    store = LocalStore(folder / str(num_jobs))
    if num_jobs and os.fork() == 0:  # the plan is made elsewhere: here it only counts as what the controller reads
        client.submit(store, plan_of(num_jobs, store.uri), "", "c")
        os._exit(0)
    if num_jobs:
        os.wait()
    controller = Controller(store, ScriptedBackend(store, total=Resources(cpus=0.0)), "c", "bench")
    spent_s = []
    for _ in range(20):
        started_s = time.process_time()
        controller.tick()
        spent_s.append(time.process_time() - started_s)
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    say(f"{held.split()[1]} kB held, {peak.split()[1]} kB at its peak; idle tick {1e3 * sorted(spent_s)[10]:.1f} ms")


# ---------------------------------------------------------------------------------------------------------------------
# What metrics cost: a training step with and without them, and a round of the controller over a large sweep.

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


# ---------------------------------------------------------------------------------------------------------------------
# What a short job costs beyond its work: our jobs on warm runners, and the same work as trials of Ray Tune.
#
# Both in one run, one after the other on one cluster, in turns. Prints; asserts no times.
# ``SHORT_JOBS`` sets the number.

NUM_JOBS = int(os.environ.get("SHORT_JOBS", "1000"))
SLOTS = 4
WORK_S = 0.5


def run_ours(folder: Path, namespace: str, num_jobs: int) -> float:
    """Seconds from the submit to the end of a sweep of short jobs."""
    store = LocalStore(folder / "store")
    link = ensure_controller(store.uri, namespace, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))
    sweep = f"short-{secrets.token_hex(3)}"
    jobs = tuple(job(f"{sweep}-{number}", work_s=WORK_S) for number in range(num_jobs))
    started_s = time.monotonic()
    submit(store, Plan(sweep=sweep, revision=0, store_uri=store.uri, jobs=jobs, baseline=""), "", namespace)
    link.wake(sweep)
    while not (snapshot := load_snapshot(store, sweep)).state.is_final:
        time.sleep(0.2)
    assert snapshot.state is SweepState.SUCCEEDED
    return time.monotonic() - started_s


def trial(_config: dict[str, Any]) -> dict[str, float]:
    """The same work as a trial."""
    time.sleep(WORK_S)
    return {"done": 1.0}


def run_tune(folder: Path, num_jobs: int) -> float:
    """Seconds that Ray Tune takes for as many trials."""
    from ray import tune

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        tune_config=tune.TuneConfig(num_samples=num_jobs, max_concurrent_trials=SLOTS, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
    )
    started_s = time.monotonic()
    results = tuner.fit()
    assert results.num_errors == 0
    return time.monotonic() - started_s


def overhead_s(spent_s: float, num_jobs: int) -> float:
    """Seconds of a slot per job, beyond its work."""
    return spent_s * SLOTS / num_jobs - WORK_S


def test_short_jobs_cost_little_beyond_their_work(cluster: Any, tmp_path: Path) -> None:
    namespace = f"bench-{secrets.token_hex(4)}"
    run_ours(tmp_path, namespace, 2 * SLOTS)  # runners are warm from here on
    cluster.kill(cluster.get_actor("watchdog", namespace=namespace), no_restart=True)
    ours_s = overhead_s(run_ours(tmp_path, namespace, NUM_JOBS), NUM_JOBS)
    for actor in cluster.util.list_named_actors(all_namespaces=True):  # their slots are Tune's now
        cluster.kill(cluster.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)
    tune_s = overhead_s(run_tune(tmp_path, NUM_JOBS), NUM_JOBS)
    sys.stdout.write(
        f"\n{NUM_JOBS} jobs of {WORK_S:g} s on {SLOTS} slots, overhead per job: ours {1e3 * ours_s:.0f} ms, "
        f"Ray Tune {1e3 * tune_s:.0f} ms; ours / Ray Tune {ours_s / tune_s:.2f}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# What grows with jobs: requests to the store, bytes of the journal, rows of MLflow. Prints for docs/scaling.md.

METHODS = (
    *("put", "put_file", "put_if_absent", "put_if_match", "get", "get_with_stat", "get_range", "download", "stat"),
    *("exists", "list_objects", "list_children", "delete"),
)
CLUSTER = "counted"


@dataclass(slots=True)
class Requests:
    """Requests to a store: calls of its methods from outside, by the first folder of the name, and by method."""

    by_folder: Counter[str] = field(default_factory=Counter)
    by_method: Counter[str] = field(default_factory=Counter)
    written_bytes: int = 0
    inside: threading.local = field(default_factory=threading.local)

    def watch(self, monkeypatch, store_class) -> None:
        for method in METHODS:
            monkeypatch.setattr(store_class, method, self._counted(method, getattr(store_class, method)))

    def _counted(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Any, name: str, *arguments: Any, **options: Any) -> Any:
            if getattr(self.inside, "is_so", False):  # a method that another one uses asks no store again
                return original(store, name, *arguments, **options)
            self.by_folder[name.partition("/")[0]] += 1
            self.by_method[method] += 1
            if method.startswith("put") and arguments and isinstance(arguments[0], bytes):
                self.written_bytes += len(arguments[0])
            self.inside.is_so = True
            try:
                return original(store, name, *arguments, **options)
            finally:
                self.inside.is_so = False

        return call

    def total(self) -> int:
        return sum(self.by_method.values())


def say_of_counts(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def per(counter: Counter[str], jobs: int) -> str:
    return ", ".join(f"{name} {count / jobs:.1f}" for name, count in counter.most_common())


def sizes_of(store: Any, folder: str) -> tuple[int, int]:
    stats = list(store.list_objects(folder))
    return len(stats), sum(stat.size_bytes for stat in stats)


def test_requests_of_a_real_sweep_per_job(tmp_path, monkeypatch) -> None:
    requests = Requests()
    store = LocalStore(tmp_path / "store")
    plan = build_plan(load_sweep(str(write_sweep(tmp_path / "small.yaml", num_epochs=4)))[0], store_uri=store.uri)
    kinds = Counter(job.kind for job in plan.jobs)
    requests.watch(monkeypatch, LocalStore)
    snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node")
    monkeypatch.undo()
    assert snapshot.state is SweepState.SUCCEEDED
    trained = kinds[JobKind.PRETRAIN] + kinds[JobKind.FINETUNE]
    say_of_counts(f"\n{len(plan.jobs)} jobs, {trained} of them train: {requests.total()} requests in one process")
    say_of_counts(f"per job, by folder: {per(requests.by_folder, len(plan.jobs))}")
    say_of_counts(f"per job, by method: {per(requests.by_method, len(plan.jobs))}")
    num_segments, num_bytes = sizes_of(store, journal_folder(plan.sweep))
    say_of_counts(f"journal: {num_segments} segments, {num_bytes / len(plan.jobs):.0f} bytes per job")
    count, total = sizes_of(store, "artifacts/")
    say_of_counts(f"artifacts: {count / len(plan.jobs):.1f} objects and {total / len(plan.jobs):.0f} bytes per job")
    assert requests.total() > len(plan.jobs)


@pytest.mark.parametrize("num_pretrains", [10, 40])
def test_requests_of_the_controller_per_job(num_pretrains, monkeypatch) -> None:
    plan, durations_s = training_sweep(num_pretrains=num_pretrains, num_transfers=49)
    clock = VirtualClock(1_800_000_000.0)
    store = MemoryStore(now=clock)
    requests = Requests()
    plan = replace(plan, store_uri=store.uri)
    workload = Workload(plan, durations_s, Assumptions())
    cluster = SimulatedCluster(ClusterSpec.uniform(512), clock, store, workload.work_of, Random(0))  # noqa: S311
    requests.watch(monkeypatch, MemoryStore)
    controller = Controller(store, SimulatedBackend(cluster), CLUSTER, "simulated", clock)
    client.submit(store, plan, "", CLUSTER, now=clock())
    loop = ControllerLoop(clock, controller, Pace(busy_s=1.0, idle_s=60.0))
    cluster.on_news = loop.news
    while not (loop.num_rounds and controller.is_idle):
        assert clock.step()
    monkeypatch.undo()
    hours = (clock() - 1_800_000_000.0) / 3600.0
    jobs = len(plan.jobs)
    title = f"{jobs} jobs, {hours:.0f} simulated hours, {loop.num_rounds} rounds"
    say_of_counts(f"\n{title}: {requests.total()} requests of controller and runners")
    say_of_counts(f"per job, by folder: {per(requests.by_folder, jobs)}")
    say_of_counts(f"per job, by method: {per(requests.by_method, jobs)}")
    num_segments, num_bytes = sizes_of(store, journal_folder(plan.sweep))
    say_of_counts(f"journal: {num_segments / jobs:.2f} segments and {num_bytes / jobs:.0f} bytes per job")
    count, total = sizes_of(store, snapshots_folder(plan.sweep))
    say_of_counts(f"snapshots: {count}, {total / max(1, count) / jobs:.0f} bytes per job each")
    say_of_counts(f"written in all: {requests.written_bytes / jobs:.0f} bytes per job")
    assert client.load_snapshot(store, plan.sweep).state is SweepState.SUCCEEDED


def test_rows_of_mlflow_per_job(tmp_path) -> None:
    num_jobs = 200
    big = big_sweep(num_jobs, is_over=False)
    uri = new_database(tmp_path / "mlflow.db")
    before = _rows(tmp_path / "mlflow.db")
    assert Publisher(big.store, uri).publish_once(big.plan.sweep)
    after = _rows(tmp_path / "mlflow.db")
    grown = {name: (after[name] - before[name]) / num_jobs for name in after if after[name] > before[name]}
    size = (tmp_path / "mlflow.db").stat().st_size / num_jobs
    say_of_counts(
        f"\nrows per job: {', '.join(f'{name} {count:.1f}' for name, count in sorted(grown.items()))}; {size:.0f} bytes"
    )
    assert grown["runs"] >= 1.0


def _rows(path: Any) -> dict[str, int]:
    with sqlite3.connect(path) as database:
        tables = [row[0] for row in database.execute("select name from sqlite_master where type = 'table'")]
        return {name: database.execute(f'select count(*) from "{name}"').fetchone()[0] for name in tables}  # noqa: S608


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
