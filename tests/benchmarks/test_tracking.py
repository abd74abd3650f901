"""Publishing a large sweep into MLflow, against one ``log_batch`` per job; arms take turns, in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tracking.publication import Publisher
from orchestrator.tracking.server import TrackingServer
from tests.mlflow_servers import MlflowServer, new_database
from tests.tracking_sweeps import BigSweep, big_sweep, problems

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_JOBS, NUM_NAIVE, NUM_ROUNDS = 10_000, 200, 3


def _naive(uri: str, big: BigSweep, experiment: str, jobs: range) -> tuple[float, float]:
    """Seconds: of all that a job needs (a run, its batch, its end), and of ``log_batch`` alone."""
    from mlflow.entities import Metric, Param

    client: Any = TrackingServer(uri).client
    number = client.create_experiment(experiment)
    batches_s, began_s = 0.0, time.perf_counter()
    for position in jobs:
        job = big.plan.jobs[position]
        params = {**job.facets, **job.identity["parameters"]["recipe"], "seed": position, "model": "resnet18"}
        run = client.create_run(number, start_time=1, tags={"sweep": "naive", "job": job.name}, run_name=job.name)
        metrics = [Metric(name, value, 1000, 0) for name, value in big.metrics_of(job.name).items()]
        sent_s = time.perf_counter()
        client.log_batch(run.info.run_id, metrics, [Param(name, str(value)) for name, value in params.items()])
        batches_s += time.perf_counter() - sent_s
        client.set_terminated(run.info.run_id, "FINISHED", end_time=5)
    return time.perf_counter() - began_s, batches_s


def _publish(uri: str, big: BigSweep) -> float:
    publisher = Publisher(big.store, uri)
    publisher._server.client.search_experiments()  # connected, as the other arm is
    began_s = time.perf_counter()
    assert publisher.publish_once(big.plan.sweep)
    return time.perf_counter() - began_s


def _report(title: str, num_jobs: int, taken_s: float, naive_s: float, batches_s: float) -> None:
    ours, all_calls, batches = num_jobs / taken_s, NUM_NAIVE / naive_s, NUM_NAIVE / batches_s
    print(  # noqa: T201 - a benchmark's result
        f"\n{title}: {ours:.0f} jobs/s; run, log_batch and end per job {all_calls:.1f}/s ({ours / all_calls:.1f}x); "
        f"log_batch alone {batches:.1f}/s ({ours / batches:.1f}x)"
    )


def test_tracking_publish_10000_jobs_into_sqlite(tmp_path: Path) -> None:
    """Asked: >= 8x the rate of one ``log_batch`` per job. Without the report, which is not published per job."""
    big = big_sweep(NUM_JOBS, is_over=False)
    uri = new_database(tmp_path / "naive.db")
    for number in range(NUM_ROUNDS):
        naive = _naive(uri, big, f"naive {number}", range(number * NUM_NAIVE, (number + 1) * NUM_NAIVE))
        # A database of its own each time: the engine of the one before stays open in this process.
        database = tmp_path / f"ours-{number}.db"
        taken_s = _publish(new_database(database), big)
        assert problems(database, big) == ["(sweep) is RUNNING"]
        _report(f"sqlite, {NUM_JOBS} jobs", NUM_JOBS, taken_s, *naive)


def test_tracking_publish_over_http(tmp_path: Path) -> None:
    """No figure asked: MLflow's interface over HTTP takes one run per call."""
    big, few = big_sweep(NUM_NAIVE, is_over=False), NUM_NAIVE
    with MlflowServer(tmp_path, new_database(tmp_path / "mlflow.db")) as server:
        naive = _naive(server.url, big, "naive", range(few))
        _report(f"HTTP, {few} jobs", few, _publish(server.url, big), *naive)
