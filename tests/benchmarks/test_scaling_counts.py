"""What grows with jobs: requests to the store, bytes of the journal, rows of MLflow. Prints for docs/scaling.md."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from orchestrator.backends.simulated import ClusterSpec, SimulatedBackend, SimulatedCluster, VirtualClock
from orchestrator.controller.controller import Controller
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.simulation.forecast import Assumptions, ControllerLoop, Pace, Workload
from orchestrator.state.transitions import SweepState
from orchestrator.storage.layout import journal_folder, snapshots_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps import client
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.tracking.publication import Publisher
from tests.clusters.small_sweep import write_sweep
from tests.mlflow_servers import new_database
from tests.simulation.sweeps import training_sweep
from tests.tracking_sweeps import big_sweep

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]
METHODS = (
    "put",
    "put_file",
    "put_if_absent",
    "put_if_match",
    "get",
    "get_with_stat",
    "get_range",
    "download",
    "stat",
    "exists",
    "list_objects",
    "list_children",
    "delete",
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


def say(text: str) -> None:
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
    say(f"\n{len(plan.jobs)} jobs, {trained} of them train: {requests.total()} requests in one process")
    say(f"per job, by folder: {per(requests.by_folder, len(plan.jobs))}")
    say(f"per job, by method: {per(requests.by_method, len(plan.jobs))}")
    num_segments, num_bytes = sizes_of(store, journal_folder(plan.sweep))
    say(f"journal: {num_segments} segments, {num_bytes / len(plan.jobs):.0f} bytes per job")
    count, total = sizes_of(store, "artifacts/")
    say(f"artifacts: {count / len(plan.jobs):.1f} objects and {total / len(plan.jobs):.0f} bytes per job")
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
    say(f"\n{title}: {requests.total()} requests of controller and runners")
    say(f"per job, by folder: {per(requests.by_folder, jobs)}")
    say(f"per job, by method: {per(requests.by_method, jobs)}")
    num_segments, num_bytes = sizes_of(store, journal_folder(plan.sweep))
    say(f"journal: {num_segments / jobs:.2f} segments and {num_bytes / jobs:.0f} bytes per job")
    count, total = sizes_of(store, snapshots_folder(plan.sweep))
    say(f"snapshots: {count}, {total / max(1, count) / jobs:.0f} bytes per job each")
    say(f"written in all: {requests.written_bytes / jobs:.0f} bytes per job")
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
    say(
        f"\nrows per job: {', '.join(f'{name} {count:.1f}' for name, count in sorted(grown.items()))}; {size:.0f} bytes"
    )
    assert grown["runs"] >= 1.0


def _rows(path: Any) -> dict[str, int]:
    with sqlite3.connect(path) as database:
        tables = [row[0] for row in database.execute("select name from sqlite_master where type = 'table'")]
        return {name: database.execute(f'select count(*) from "{name}"').fetchone()[0] for name in tables}  # noqa: S608
