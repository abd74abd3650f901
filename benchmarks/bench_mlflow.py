"""Publishing into MLflow beside what else writes the same runs there; arms take turns, in one process, on one server.

Asked: over HTTP at least the rate of the best other one. Rates depend on the server far more than on who asks it, so
only ratios count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import mlflow
import pytest
import requests
from mlflow.entities import Metric, Param
from mlflow.tracking.request_header import registry

from orchestrator.planning.graph.plan import Job
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingServer
from tests.mlflow_servers import MlflowServer, new_database, postgres_cluster
from tests.tracking_sweeps import BigSweep, big_sweep, problems

NUM_JOBS, NUM_SERIAL_JOBS, NUM_SLOW_JOBS, NUM_ROUNDS = 300, 50, 5, 4
NUM_THREADS = 8
"""Of the script that somebody might write; as many as the publisher has."""
DELAY_S = 0.02
"""Of a network, added to each request of every arm."""
HEADERS = registry._request_header_provider_registry._registry
AS_IT_COMES = tuple(HEADERS)
"""What MLflow looks up at each request; the publisher leaves out a part of it in its own process."""
Arm = Callable[[str, BigSweep, str], int]
"""Writes some jobs of a sweep to a server into an experiment; returns how many."""


def content(big: BigSweep, job: Job) -> tuple[dict[str, str], dict[str, float], dict[str, str]]:
    """Parameters, metrics and tags: as many as the publisher writes."""
    params = {**job.facets, **job.identity["parameters"]["recipe"], "model": "resnet18", "key": job.key}
    tags = {f"tag_{number}": job.name for number in range(10)}
    return {name: str(value) for name, value in params.items()}, big.metrics_of(job.name), tags


def write(client: Any, experiment_id: str, big: BigSweep, job: Job) -> None:
    """The fewest requests that MLflow's client needs: make a run, one batch, its end."""
    params, metrics, tags = content(big, job)
    run_id = client.create_run(experiment_id, start_time=1, tags=tags, run_name=job.name).info.run_id
    batch = [Metric(name, value, 1000, 0) for name, value in metrics.items()]
    client.log_batch(run_id, batch, [Param(*item) for item in params.items()])
    client.set_terminated(run_id, "FINISHED", end_time=5)


def client_as_it_comes(uri: str) -> Any:
    client = TrackingServer(uri).client
    HEADERS[:] = AS_IT_COMES
    return client


def by_client(uri: str, big: BigSweep, experiment: str) -> int:
    client = client_as_it_comes(uri)
    experiment_id = client.create_experiment(experiment)
    jobs = big.plan.jobs[:NUM_SERIAL_JOBS]
    for job in jobs:
        write(client, experiment_id, big, job)
    return len(jobs)


def by_threads(uri: str, big: BigSweep, experiment: str) -> int:
    client = client_as_it_comes(uri)
    experiment_id = client.create_experiment(experiment)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda job: write(client, experiment_id, big, job), big.plan.jobs))
    return NUM_JOBS


def by_fluent_script(uri: str, big: BigSweep, experiment: str) -> int:
    """As MLflow's own pages show it."""
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(experiment)
    for job in big.plan.jobs[:NUM_SERIAL_JOBS]:
        params, metrics, tags = content(big, job)
        with mlflow.start_run(run_name=job.name, tags=tags):
            mlflow.log_params(params)
            mlflow.log_metrics(metrics, step=0)
    return NUM_SERIAL_JOBS


def by_ray_tune(uri: str, big: BigSweep, experiment: str) -> int:
    """The requests of Ray Tune's ``MLflowLoggerCallback``: one for each parameter and each value."""
    from ray.air._internal.mlflow import _MLflowLoggerUtil

    util = _MLflowLoggerUtil()
    util.setup_mlflow(tracking_uri=uri, experiment_name=experiment, create_experiment_if_not_exists=True)
    for job in big.plan.jobs[:NUM_SLOW_JOBS]:
        params, metrics, tags = content(big, job)
        run_id = util.start_run(run_name=job.name, tags=tags).info.run_id
        util.log_params(params, run_id=run_id)
        util.log_metrics(0, metrics, run_id=run_id)
        util.end_run("FINISHED", run_id=run_id)
    return NUM_SLOW_JOBS


def by_publisher(uri: str, big: BigSweep, _: str) -> int:
    assert Publisher(big.store, uri).publish_once(big.plan.sweep)
    return NUM_JOBS + 1  # that of the sweep


ARMS: dict[str, Arm] = {
    "the publisher": by_publisher,
    "a script with 8 threads": by_threads,
    "a script with MlflowClient": by_client,
    "a script with mlflow.log_*": by_fluent_script,
    "Ray Tune's callback": by_ray_tune,
}


def compare(title: str, uri: str, names: Sequence[str] = tuple(ARMS)) -> dict[str, float]:
    """Rates by arm, in runs per second: medians of the rounds, printed with those of the publisher to each."""
    by_client(uri, big_sweep(1), "warm")
    rates: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for number in range(NUM_ROUNDS):
        for name in names:
            experiment = f"{name} {number}".replace("'", "").replace("*", "")
            big = big_sweep(NUM_JOBS, sweep=experiment.replace(" ", "-").replace(".", "-"), is_over=False)
            HEADERS[:] = AS_IT_COMES
            began_s = time.perf_counter()
            num_done = ARMS[name](uri, big, experiment)
            rates[name].append(num_done / (time.perf_counter() - began_s))
        for name in names:
            ratios[name].append(rates["the publisher"][-1] / rates[name][-1])
    print(f"\n{title}:")  # noqa: T201 - a benchmark's result
    for name in names:
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios[name])
        print(f"  {name:28s} {median(rates[name]):6.1f} runs/s; the publisher to it, by round: {shown}")  # noqa: T201
    return {name: median(found) for name, found in rates.items()}


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = requests.Session.request

    def request(session: requests.Session, *arguments: Any, **options: Any) -> requests.Response:
        time.sleep(DELAY_S)
        return original(session, *arguments, **options)

    monkeypatch.setattr(requests.Session, "request", request)


def test_mlflow_over_http_on_postgresql(tmp_path: Path, delayed: None) -> None:
    with postgres_cluster() as database:
        assert TrackingServer(database).client is not None  # makes the tables
        with MlflowServer(tmp_path, database) as server:
            rates = compare(f"HTTP with {1000 * DELAY_S:.0f} ms, PostgreSQL", server.url)
    assert rates["the publisher"] > rates["a script with mlflow.log_*"]


def test_mlflow_over_http_on_sqlite(tmp_path: Path) -> None:
    with MlflowServer(tmp_path, new_database(tmp_path / "mlflow.db")) as server:
        compare("HTTP, SQLite", server.url)


def test_mlflow_in_a_sqlite_file(tmp_path: Path) -> None:
    """As the background stack has it, where the publisher uses the database and no server."""
    uri = new_database(tmp_path / "mlflow.db")
    compare("SQLite file", uri, ["the publisher", "a script with MlflowClient"])
    database, big = tmp_path / "whole.db", big_sweep(NUM_JOBS)
    assert Publisher(big.store, new_database(database)).publish_once(big.plan.sweep)
    assert problems(database, big) == []
