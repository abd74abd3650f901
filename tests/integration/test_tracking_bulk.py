"""Batches of runs written straight into MLflow's tables: they leave what MLflow's own interface leaves."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.store.tracking.dbmodels.models import SqlDataset
from sqlalchemy import event
from sqlalchemy.orm import Session

from orchestrator.tracking import run_writers
from orchestrator.tracking.draft import DatasetUse, Experiment, MetricPoint, RunDraft
from orchestrator.tracking.facts import RunFacts, RunStatus
from orchestrator.tracking.publication import Publisher
from orchestrator.tracking.run_writers import BulkWriter, OneByOneWriter
from orchestrator.tracking.server import TrackingError, TrackingServer
from tests.mlflow_servers import new_database
from tests.tracking_sweeps import big_sweep, problems

START_S = 1_800_000_000.0
DATASET = DatasetUse(name="tree", digest="d" * 64, source="s3://bucket/tree", num_samples=4096)
TABLES = {
    "runs": "name, source_type, source_name, entry_point_name, user_id, status, start_time, end_time, deleted_time, "
    "source_version, lifecycle_stage, replace(artifact_uri, t.run_uuid, '')",
    "tags": "t.key, t.value",
    "params": "t.key, t.value",
    "metrics": "t.key, t.value, timestamp, step, is_nan",
    "latest_metrics": "t.key, t.value, timestamp, step, is_nan",
}


@pytest.fixture(scope="module")
def databases(tmp_path_factory) -> list[Path]:
    """Every test has an experiment of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    for name in ("bulk.db", "one.db"):
        new_database(folder / name)
    return [folder / "bulk.db", folder / "one.db"]


@pytest.fixture
def server(databases) -> TrackingServer:
    return TrackingServer(f"sqlite:///{databases[0]}")


def _facts(job: str, status: RunStatus = RunStatus.FINISHED, **tags: str) -> RunFacts:
    end_s = START_S + 9 if status.is_final else None
    identity = {"sweep": "s", "job": job, "key": job}
    return RunFacts(job=job, key=job, status=status, start_s=START_S, end_s=end_s, tags={**identity, **tags})


def _points(*values: float, name: str = "val_error") -> tuple[MetricPoint, ...]:
    return tuple(MetricPoint(name=name, value=v, step=s, at_s=START_S + s) for s, v in enumerate(values, start=1))


def _first_drafts() -> list[RunDraft]:
    return [
        RunDraft(name="running", facts=_facts("running", RunStatus.RUNNING), params={"lr": "0.1"}, points=_points(0.5)),
        RunDraft(
            name="done",
            facts=_facts("done", state="succeeded"),
            parent_run_id="f" * 32,
            params={"lr": "0.1", "model": "resnet18"},
            tags={"artifact": "s3://bucket/x"},
            points=(*_points(0.5, 0.25, 0.125), *_points(3.0, 2.0, name="train_loss")),
            datasets=(DATASET,),
        ),
        RunDraft(name="bare", facts=_facts("bare", RunStatus.KILLED)),
    ]


def _second_drafts(ids: list[str]) -> list[RunDraft]:
    """Told again with changes: one has ended, one is reopened and repeats points beside an older and a newer one."""
    older = MetricPoint(name="val_error", value=0.9, step=0, at_s=START_S)
    return [
        RunDraft(name="running", facts=_facts("running", state="ended"), run_id=ids[0], datasets=(DATASET,)),
        RunDraft(
            name="done",
            facts=_facts("done", RunStatus.RUNNING, state="running"),
            run_id=ids[1],
            params={"lr": "0.1", "model": "resnet18", "level": "depth2"},
            points=(older, *_points(0.5, 0.25, 0.125, 0.0625)),
        ),
    ]


def _rows(database: Path, table: str) -> list[tuple[object, ...]]:
    """Rows with the name of their run in place of its id; an end of 0 means none, see ``OneByOneWriter``."""
    query = f"SELECT n.value, {TABLES[table]} FROM {table} t JOIN tags n ON n.run_uuid = t.run_uuid AND n.key = 'job'"  # noqa: S608
    with sqlite3.connect(database) as connection:
        return sorted(connection.execute(query.replace("end_time", "nullif(end_time, 0)")).fetchall(), key=repr)


def _inputs(database: Path) -> list[tuple[object, ...]]:
    query = (
        "SELECT t.value, i.source_type, i.destination_type, i.step, d.name, d.digest, d.dataset_source_type, "
        "d.dataset_source, d.dataset_schema, d.dataset_profile FROM inputs i JOIN datasets d ON "
        "d.dataset_uuid = i.source_id JOIN tags t ON t.run_uuid = i.destination_id AND t.key = 'job'"
    )
    with sqlite3.connect(database) as connection:
        return sorted(connection.execute(query).fetchall(), key=repr)


def _by_mlflow(server: TrackingServer, experiment: Experiment, drafts: list[RunDraft]) -> list[str]:
    return list(OneByOneWriter(server.client, num_threads=1).write(experiment.experiment_id, drafts))


def _in_bulk(server: TrackingServer, experiment: Experiment, drafts: list[RunDraft]) -> list[str]:
    assert isinstance(server._writer(), BulkWriter)
    return [run_id for _, run_id in server.write(experiment, drafts)]


def test_bulk_tables_equal_those_that_mlflow_itself_writes(databases):
    for database, write in zip(databases, (_in_bulk, _by_mlflow), strict=True):
        server = TrackingServer(f"sqlite:///{database}")
        experiment = server.ensure_experiment("equal")
        write(server, experiment, _second_drafts(write(server, experiment, _first_drafts())))

    for table in TABLES:
        assert _rows(databases[0], table) == _rows(databases[1], table), table
        assert _rows(databases[0], table)
    assert _inputs(databases[0]) == _inputs(databases[1])
    assert len(_inputs(databases[0])) == 2


def test_bulk_same_batch_twice_changes_nothing(server, databases):
    experiment = server.ensure_experiment("twice")
    ids = [run_id for _, run_id in server.write(experiment, _first_drafts())]
    before = [_rows(databases[0], table) for table in TABLES]
    again = [replace(draft, run_id=run_id) for draft, run_id in zip(_first_drafts(), ids, strict=True)]
    assert [run_id for _, run_id in server.write(experiment, again)] == ids
    assert [_rows(databases[0], table) for table in TABLES] == before


def test_bulk_older_value_does_not_become_the_latest(server):
    experiment = server.ensure_experiment("latest")
    ((_, run_id),) = server.write(experiment, [replace(_first_drafts()[0], points=_points(0.5, 0.25))])
    late = replace(_first_drafts()[0], run_id=run_id, points=_points(0.5))
    assert [told for _, told in server.write(experiment, [late])] == [run_id]
    assert server.client.get_run(run_id).data.metrics == {"val_error": 0.25}


def test_bulk_deleted_run_is_told_and_the_others_are_written(server):
    experiment = server.ensure_experiment("gone")
    ids = [run_id for _, run_id in server.write(experiment, _first_drafts())]
    server.client.delete_run(ids[0])
    told = [run_id for _, run_id in server.write(experiment, _second_drafts(ids))]
    assert told == ["", ids[1]]
    assert server.client.get_run(ids[0]).info.status == "RUNNING"
    assert server.client.get_run(ids[1]).data.metrics["val_error"] == 0.0625


def test_bulk_batch_that_fails_leaves_nothing(server):
    experiment = server.ensure_experiment("whole")
    broken = replace(_first_drafts()[1], points=(replace(_points(1.0)[0], value=None),))  # type: ignore[arg-type]
    with pytest.raises(TrackingError, match="NOT NULL constraint failed"):
        list(server.write(experiment, [_first_drafts()[0], broken]))
    assert server.client.search_runs([experiment.experiment_id]) == []


def test_bulk_other_columns_than_known_ones_leave_the_writing_to_mlflow(server, monkeypatch):
    monkeypatch.setitem(run_writers.COLUMNS, "runs", "run_uuid name")
    assert isinstance(server._writer(), OneByOneWriter)
    experiment = server.ensure_experiment("unknown columns")
    ids = [run_id for _, run_id in server.write(experiment, _first_drafts())]
    assert len(server.client.search_runs([experiment.experiment_id])) == len(ids) == 3


@pytest.mark.parametrize("write", [_in_bulk, _by_mlflow])
def test_publisher_reopened_run_has_no_end_whoever_writes_it(server, write):
    experiment = server.ensure_experiment(f"reopened {write.__name__}")
    (run_id,) = write(server, experiment, [_first_drafts()[2]])
    assert server.client.get_run(run_id).info.end_time == 1000 * (START_S + 9)
    write(server, experiment, [RunDraft(name="bare", facts=_facts("bare", RunStatus.RUNNING), run_id=run_id)])
    info = server.client.get_run(run_id).info
    assert (info.status, info.end_time or None) == ("RUNNING", None)
    assert info.to_proto().end_time == 0  # what a page is told: none


def test_publisher_data_set_that_two_runs_name_at_once_is_named_by_both(server):
    """Both have looked for it before either writes it: one is refused by the database, and says it again."""
    both_looked = threading.Barrier(2)
    names: list[str] = []

    def wait_for_the_other(session, *_):
        named = [str(row.name) for row in session.new if isinstance(row, SqlDataset)]
        if named and len(names) < 2:
            names.extend(named)
            both_looked.wait(timeout=60)

    experiment = server.ensure_experiment("at once")
    drafts = [RunDraft(name=job, facts=_facts(job), datasets=(DATASET,)) for job in ("first", "second")]
    event.listen(Session, "before_flush", wait_for_the_other)
    try:
        ids = list(OneByOneWriter(server.client, num_threads=2).write(experiment.experiment_id, drafts))
    finally:
        event.remove(Session, "before_flush", wait_for_the_other)
    assert names == ["tree", "tree"]
    runs = [server.client.get_run(run_id) for run_id in ids]
    assert [[use.dataset.name for use in run.inputs.dataset_inputs] for run in runs] == [["tree"], ["tree"]]


def test_publisher_many_jobs_are_all_there_once(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.tracking.publication._BATCH", 64)
    big = big_sweep(200)
    assert Publisher(big.store, new_database(tmp_path / "mlflow.db")).publish_once("big")
    assert problems(tmp_path / "mlflow.db", big) == []
