"""The publisher against PostgreSQL, and against a server over HTTP that asks for a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.local import LocalStore
from orchestrator.tracking.links import find_compare_link
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingError, TrackingServer
from tests.mlflow_servers import MlflowServer, new_database, postgres_cluster
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import sample_plan
from tests.tracking_sweeps import big_sweep, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PASSWORD = "a password of 16 signs"  # noqa: S105 - of a server that lives for seconds


@pytest.fixture
def postgres():
    with postgres_cluster() as uri:
        yield uri


def _published(client, experiment: str) -> dict[str, Any]:
    number = client.get_experiment_by_name(experiment).experiment_id
    runs = []
    page = client.search_runs([number], max_results=500)
    while True:
        runs += page
        if not page.token:
            break
        page = client.search_runs([number], max_results=500, page_token=page.token)
    by_job = {run.data.tags["job"]: run for run in runs}
    assert len(by_job) == len(runs)
    return by_job


def test_publisher_postgresql_is_written_and_read_by_mlflow(postgres, tmp_path):
    big = big_sweep(1200, store=LocalStore(tmp_path / "store"))
    assert Publisher(big.store, postgres).publish_once("big")

    server = TrackingServer(postgres)
    runs = _published(server.client, "big")
    assert len(runs) == 1 + 1200
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    # Not in whichever directory the publisher runs in, where MLflow would put them.
    assert runs["(sweep)"].info.artifact_uri.startswith(f"{big.store.uri}/mlflow/big/")
    assert "report.md" in {file.path for file in server.client.list_artifacts(runs["(sweep)"].info.run_id)}
    for position, job in enumerate(big.plan.jobs[:50]):
        assert runs[job.name].data.metrics == metrics_of(position)
        assert runs[job.name].data.params["level"] == job.facets["level"]

    for stat in list(big.store.list_objects("sweeps/big/tracking/")):
        big.store.delete(stat.name)
    assert Publisher(big.store, postgres).publish_once("big")
    assert {name: run.info.run_id for name, run in _published(server.client, "big").items()} == {
        name: run.info.run_id for name, run in runs.items()
    }
    history = server.client.get_metric_history(runs["probe/top/00007"].info.run_id, "val_error")
    assert [point.value for point in history] == [0.07]


def test_publisher_postgresql_user_without_rights_is_told(postgres, tmp_path):
    import sqlalchemy

    assert TrackingServer(postgres).client is not None  # made its tables
    engine = sqlalchemy.create_engine(postgres)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE guest LOGIN")
        connection.exec_driver_sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
    engine.dispose()
    big = big_sweep(3, store=LocalStore(tmp_path / "store"))
    with pytest.raises(TrackingError, match=r"permission denied.*training goes on; let the publisher write there"):
        Publisher(big.store, postgres.replace("tester@", "guest@")).publish_once("big")
    assert Publisher(big.store, postgres).publish_once("big")


def test_publisher_postgresql_user_comes_from_the_environment(postgres, tmp_path, monkeypatch):
    nobody = postgres.replace("tester@", "")
    monkeypatch.setenv("PGUSER", "absent")
    with pytest.raises(TrackingError, match='role "absent" does not exist') as caught:
        TrackingServer(nobody).check()
    assert "nothing is lost" in str(caught.value)
    monkeypatch.setenv("PGUSER", "tester")
    TrackingServer(nobody).check()
    big = big_sweep(3, store=LocalStore(tmp_path / "store"))
    assert Publisher(big.store, nobody).publish_once("big")


@pytest.fixture
def guarded(tmp_path):
    """A server that asks for a password, over HTTP."""
    Path(tmp_path, "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{tmp_path}/auth.db\nadmin_username = admin\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    environment = {
        "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "for this test",
    }
    arguments = ("--app-name", "basic-auth")
    with MlflowServer(tmp_path, new_database(tmp_path / "mlflow.db"), *arguments, env=environment) as server:
        yield server


def test_publisher_server_with_passwords_takes_only_the_right_one(guarded, tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "store")
    plan = sample_plan(store.uri, spaces=("levels/depth1", "levels/depth3"), seeds=(0, 1))
    backbone = next(job for job in plan.jobs if job.kind is JobKind.PRETRAIN)
    write_segment(store, backbone.key, 1, 0, [3.0, 2.0])
    SampleJournal(store, plan).run_all()
    for user, password in (("", ""), ("admin", "wrong")):
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        with pytest.raises(TrackingError, match="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD") as caught:
            Publisher(store, guarded.url).publish_once("sample")
        assert "wrong" not in str(caught.value)

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    assert Publisher(store, guarded.url).publish_once("sample")

    client = TrackingServer(guarded.url).client
    runs = _published(client, "sample")
    assert set(runs) == {"(sweep)", *plan.by_name()}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert "report.md" in {file.path for file in client.list_artifacts(runs["(sweep)"].info.run_id)}
    points = client.get_metric_history(runs[backbone.name].info.run_id, "train_loss")
    assert [point.value for point in points][:2] == [3.0, 2.0]
    assert find_compare_link(store, "sample", guarded.url, guarded.url).startswith(f"{guarded.url}/#/experiments/")
