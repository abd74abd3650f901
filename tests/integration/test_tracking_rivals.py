"""Several publishers of one sweep on a real MLflow on sqlite: they end up with one run of each job."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Mapping

import pytest
from mlflow import MlflowClient

from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.local import LocalStore
from orchestrator.tracking.memory import Memory, MemoryFile
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingError, TrackingServer
from tests.mlflow_servers import new_database
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import BASELINE, sample_plan
from tests.tracking_sweeps import runs_by_job


@pytest.fixture
def tracking_uri(tmp_path) -> str:
    return new_database(tmp_path / "mlflow.db")


@pytest.fixture
def client(tracking_uri) -> MlflowClient:
    return MlflowClient(tracking_uri=tracking_uri)


@pytest.fixture
def plan(store) -> Plan:
    return sample_plan(store.uri, spaces=(BASELINE,), seeds=(0,), transfers=("superclass",))


@pytest.fixture
def publisher(store, tracking_uri) -> Publisher:
    return Publisher(store, tracking_uri)


def test_publisher_two_at_the_same_time_agree_on_the_runs(*, client, store, plan, publisher, tracking_uri, monkeypatch):
    SampleJournal(store, plan).run(plan.jobs[0])
    rival = Publisher(store, tracking_uri)
    make_experiment = TrackingServer.make_experiment

    def make_then_rival_publishes(server: TrackingServer, name: str, tags: Mapping[str, str]) -> str:
        made = make_experiment(server, name, tags)
        monkeypatch.setattr(TrackingServer, "make_experiment", make_experiment)
        assert rival.publish_once(plan.sweep)
        return made

    monkeypatch.setattr(TrackingServer, "make_experiment", make_then_rival_publishes)
    assert not publisher.publish_once(plan.sweep)
    assert publisher.publish_once(plan.sweep)
    assert set(runs_by_job(client, plan)) == {"(sweep)", plan.jobs[0].name}


def _ended_jobs_with_curves(store: LocalStore, plan: Plan) -> set[str]:
    """Some jobs of the sweep ran and wrote metric segments; their names."""
    journal = SampleJournal(store, plan)
    for job in plan.jobs[:3]:
        write_segment(store, job.key, 1, 0, [3.0, 2.0])
        journal.run(job)
    return {job.name for job in plan.jobs[:3]}


def test_publisher_that_is_slower_leaves_runs_that_the_faster_one_has_written(
    *, client, store, plan, publisher, tracking_uri, monkeypatch
):
    """It has made all runs when the faster one finds them, and notices that when that one has written the first."""
    names, made, written = _ended_jobs_with_curves(store, plan), threading.Event(), threading.Event()
    monkeypatch.setattr("orchestrator.tracking.publication._BATCH", 1)
    monkeypatch.setattr("orchestrator.tracking.publication._SAVE_EVERY_S", math.inf)
    slower = threading.Thread(target=publisher.publish_once, args=[plan.sweep])
    save, write, saves = MemoryFile.save, TrackingServer.write, itertools.count()

    def save_late(file: MemoryFile, memory: Memory) -> None:
        if threading.current_thread() is slower and next(saves) == 1:  # the first one: once the sweep has its run
            made.set()
            assert written.wait(60)
        save(file, memory)

    def write_and_wait(*arguments):
        for draft, run_id in write(*arguments):
            yield draft, run_id
            if threading.current_thread() is not slower and draft.facts.job in names:
                written.set()
                slower.join(60)

    monkeypatch.setattr(MemoryFile, "save", save_late)
    monkeypatch.setattr(TrackingServer, "write", write_and_wait)
    slower.start()
    assert made.wait(60)
    runs = runs_by_job(client, plan)
    faster = Publisher(store, tracking_uri)
    assert any(faster.publish_once(plan.sweep) for _ in range(3))
    after = runs_by_job(client, plan)
    assert {name: run.info.run_id for name, run in after.items()} == {n: run.info.run_id for n, run in runs.items()}
    assert set(after) == {"(sweep)", *names}
    for name in names:
        assert after[name].info.status == "FINISHED"
        history = client.get_metric_history(after[name].info.run_id, "train_loss")
        assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 2.0)]


def test_publisher_that_is_slower_restores_runs_that_the_faster_one_takes_over_while_it_deletes(
    *, client, store, plan, publisher, tracking_uri, monkeypatch
):
    names, faster = _ended_jobs_with_curves(store, plan), Publisher(store, tracking_uri)
    save, delete, saves = MemoryFile.save, TrackingServer.delete_runs, itertools.count()

    def save_too_late(file: MemoryFile, memory: Memory) -> None:
        if next(saves) == 1:
            other = MemoryFile(store, plan.sweep, tracking_uri)
            save(other, other.load())
        save(file, memory)

    def delete_late(server: TrackingServer, run_ids: list[str]) -> None:
        monkeypatch.setattr(TrackingServer, "delete_runs", delete)
        assert faster.publish_once(plan.sweep)
        delete(server, run_ids)

    monkeypatch.setattr(MemoryFile, "save", save_too_late)
    monkeypatch.setattr(TrackingServer, "delete_runs", delete_late)
    assert not publisher.publish_once(plan.sweep)
    assert TrackingServer.delete_runs is delete
    assert publisher.publish_once(plan.sweep)
    assert set(runs_by_job(client, plan)) == {"(sweep)", *names}


def test_publisher_that_cannot_delete_its_unused_runs_remembers_nothing(
    *, client, store, plan, publisher, tracking_uri, monkeypatch
):
    names, other = _ended_jobs_with_curves(store, plan), MemoryFile(store, plan.sweep, tracking_uri)
    save, delete, saves = MemoryFile.save, TrackingServer.delete_runs, itertools.count()

    def save_too_late(file: MemoryFile, memory: Memory) -> None:
        if next(saves) == 1:
            save(other, other.load())
        save(file, memory)

    def delete_nothing(server: TrackingServer, run_ids: list[str]) -> None:
        monkeypatch.setattr(TrackingServer, "delete_runs", delete)
        raise TrackingError("the server is away")

    monkeypatch.setattr(MemoryFile, "save", save_too_late)
    monkeypatch.setattr(TrackingServer, "delete_runs", delete_nothing)
    assert not publisher.publish_once(plan.sweep)
    other.forget()
    assert [run.job for run in other.load().runs] == ["(sweep)"]
    assert publisher.publish_once(plan.sweep)
    assert set(runs_by_job(client, plan)) == {"(sweep)", *names}


def test_publisher_deleted_run_of_a_job_with_another_one_goes_on_in_that(client, store, plan, publisher):
    """Made by a publisher that names the server by another URI, or by a request whose answer came too late."""
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    publisher.publish_once(plan.sweep)
    deleted = runs_by_job(client, plan)[job.name]
    client.delete_run(deleted.info.run_id)
    other = client.create_run(deleted.info.experiment_id, tags=deleted.data.tags)
    journal.succeed(job)

    assert not publisher.publish_once(plan.sweep)
    assert publisher.publish_once(plan.sweep)
    run = runs_by_job(client, plan)[job.name]
    assert (run.info.run_id, run.info.status) == (other.info.run_id, "FINISHED")
