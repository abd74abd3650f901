"""Tracking servers that cannot be written to: one clear message, nothing changed there, nothing lost here."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orchestrator.core.errors import StorageError
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.layout import metrics_folder, plan_name, record_name
from orchestrator.testing.faults import FaultyStore, Harm, ReadFault
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.tracking.loop import publish_until_done
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingError, TrackingRefusedError, TrackingServer, may_hold_files
from tests.builders import SweepJournal, launched
from tests.mlflow_servers import new_database
from tests.tracking_sweeps import big_sweep, problems


@pytest.fixture
def database(tmp_path):
    new_database(tmp_path / "mlflow.db")
    return tmp_path / "mlflow.db"


def _client(database) -> Any:
    return TrackingServer(f"sqlite:///{database}").client


def _experiment_of_somebody_else(database) -> str:
    # MLflow's own default is a folder in the working directory.
    location = (database.parent / "mlflow-artifacts" / "theirs").as_uri()
    return str(_client(database).create_experiment("big", artifact_location=location))


def _run_of_somebody_else(database) -> str:
    experiment = _experiment_of_somebody_else(database)
    return str(_client(database).create_run(experiment, run_name="theirs").info.run_id)


def test_publisher_experiment_with_foreign_runs_is_refused_and_left_alone(database):
    big = big_sweep(3, is_over=False)
    run_id = _run_of_somebody_else(database)
    with pytest.raises(TrackingError, match=r"'big' holds runs of something else.*tracking\.experiment.*tag owner"):
        Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    client = _client(database)
    experiment = client.get_experiment_by_name("big")
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [run_id]
    assert experiment.tags == {}


def test_publisher_foreign_experiment_that_was_given_to_it_is_used(database):
    big = big_sweep(3, is_over=False)
    _run_of_somebody_else(database)
    client = _client(database)
    experiment = client.get_experiment_by_name("big").experiment_id
    client.set_experiment_tag(experiment, "owner", "pretraining-orchestrator")
    assert Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    assert len(client.search_runs([experiment])) == 1 + 1 + 3


def test_publisher_empty_experiment_of_the_same_name_becomes_its_own(database):
    client = _client(database)
    _experiment_of_somebody_else(database)
    big = big_sweep(3, is_over=False)
    assert Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    assert client.get_experiment_by_name("big").tags["owner"] == "pretraining-orchestrator"


def test_publisher_deleted_experiment_says_how_to_get_it_back(database):
    client = _client(database)
    number = _experiment_of_somebody_else(database)
    client.delete_experiment(number)
    big = big_sweep(3)
    with pytest.raises(TrackingError, match="is deleted, and MLflow keeps its name; restore it, purge it"):
        Publisher(big.store, f"sqlite:///{database}").publish_once("big")

    client.restore_experiment(number)
    assert Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    assert problems(database, big) == []


def test_publisher_read_only_database_says_so_and_changes_nothing(database, monkeypatch):
    monkeypatch.chdir(database.parent)  # MLflow makes a folder of the URI's text in the working directory
    before = database.read_bytes()
    big = big_sweep(3)
    publisher = Publisher(big.store, f"sqlite:///file:{database}?mode=ro&uri=true")
    with pytest.raises(TrackingError, match=r"readonly database; training goes on; let the publisher write there"):
        publisher.publish_once("big")
    assert database.read_bytes() == before


@pytest.mark.parametrize("version", ["0a8213491aaa", "fffffffffff"])
def test_publisher_database_of_another_release_is_refused_and_not_migrated(database, version):
    """MLflow itself would upgrade the first one, under the feet of the server that uses it."""
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", [version])
        connection.execute("DROP TABLE jobs")
    big = big_sweep(3)
    with pytest.raises(TrackingError, match=rf"tables of version {version}, and the installed MLflow .* needs"):
        Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(version,)]
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'jobs'").fetchall()


def test_publisher_name_that_mlflow_refuses_is_told_and_keeps_no_other_run(database, monkeypatch):
    """One run has a parameter, one a metric that is refused; all others are written, those of later batches, too."""
    monkeypatch.setattr("orchestrator.tracking.publication._BATCH", 2)
    big, uri = big_sweep(6), f"sqlite:///{database}"
    tagged, measured = (big.plan.jobs[position] for position in (1, 2))
    plan = json.loads(big.store.get(plan_name("big", 1)))
    for job in plan["jobs"]:
        if job["name"] == tagged.name:
            job["facets"]["factor.mixing (strong)"] = "yes"
    big.store.put(plan_name("big", 1), json.dumps(plan).encode())
    record = read_record(big.store, measured.key)
    wrong = replace(record, metrics={**record.metrics, "loss/": 1.0})
    big.store.put(record_name(measured.key), wrong.to_bytes())
    publisher = Publisher(big.store, uri)
    for _ in range(2):
        with pytest.raises(TrackingRefusedError, match=r"refuses the run of probe/top/00001.*mixing \(strong\)"):
            publisher.publish_once("big")
    client = _client(database)
    runs = client.search_runs([client.get_experiment_by_name("big").experiment_id])
    assert sorted((run.data.tags["job"], run.info.status) for run in runs) == [
        ("(sweep)", "FINISHED"),
        *((job.name, "RUNNING" if job in (tagged, measured) else "FINISHED") for job in big.plan.jobs),
    ]

    big.store.put(record_name(measured.key), record.to_bytes())
    with pytest.raises(TrackingRefusedError, match="refuses the run of probe/top/00001: "):
        publisher.publish_once("big")
    del plan["jobs"][1]["facets"]["factor.mixing (strong)"]
    big.store.put(plan_name("big", 1), json.dumps(plan).encode())
    assert Publisher(big.store, uri).publish_once("big")
    assert problems(database, big) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("1/0-10.jsonl", b'{"step": 1}\n'),
        ("1/0-10.jsonl", b'{"step": 1, "epoch": 1, "at_s": 1, "metrics": {"loss": null}}\n'),
        ("1/notes.jsonl", b""),
        ("", b"{}"),
    ],
    ids=["line", "value", "name", "record"],
)
def test_publisher_job_of_which_something_is_damaged_keeps_no_other_run(database, name, content, monkeypatch):
    """Its run says how it ended, and no value; all of it follows once the object is repaired or gone."""
    monkeypatch.setattr("orchestrator.tracking.publication._BATCH", 2)
    big = big_sweep(6)
    damaged = big.plan.jobs[1]
    whole = big.store.get(record_name(damaged.key))
    place = f"{metrics_folder(damaged.key)}{name}" if name else record_name(damaged.key)
    big.store.put(place, content)
    publisher = Publisher(big.store, f"sqlite:///{database}")
    num_written = []
    for _ in range(2):
        with pytest.raises(TrackingRefusedError, match=f"{damaged.name}.* is published without .*{place}.*all else is"):
            publisher.publish_once("big")
        num_written.append(publisher.num_written)
    assert num_written[0] == num_written[1], "its run is not sent again"
    client = _client(database)
    runs = {run.data.tags["job"]: run for run in client.search_runs(["1"])}
    assert set(runs) == {"(sweep)", *(job.name for job in big.plan.jobs)}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert [job for job, run in runs.items() if not run.data.metrics and job != "(sweep)"] == [damaged.name]

    big.store.put(place, whole) if place == record_name(damaged.key) else big.store.delete(place)
    assert publisher.publish_once("big")
    assert problems(database, big) == []
    assert "report.md" in {file.path for file in client.list_artifacts(runs["(sweep)"].info.run_id)}


def test_publisher_job_that_runs_with_damaged_metrics_is_told_at_every_pass(database):
    big = big_sweep(2)
    job = big.plan.jobs[0]
    store, plan = MemoryStore(), replace(big.plan, jobs=(job,))
    journal = SweepJournal(store, "big")
    journal.accept(plan)
    journal.tell(launched(job))
    publisher = Publisher(store, f"sqlite:///{database}")
    assert publisher.publish_once("big")
    store.put(f"{metrics_folder(job.key)}1/notes.jsonl", b"")
    for _ in range(2):
        with pytest.raises(TrackingRefusedError, match=r"notes\.jsonl is not named"):
            publisher.publish_once("big")


@contextmanager
def _answering(status: int, text: str, asked: list[str] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            self.send_response(status)
            if status == HTTPStatus.FOUND:
                self.send_header("Location", text)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (404, "nothing here", "is not an MLflow server.*correct tracking.uri"),
        (200, "<html>a page</html>", "is not an MLflow server"),
        (200, "1.30.0", r"runs MLflow 1\.30\.0, and 2\.4 is the oldest that works"),
        (200, "2.3.2", r"runs MLflow 2\.3\.2, and 2\.4 is the oldest that works"),
    ],
)
def test_publisher_server_that_is_not_a_usable_mlflow_is_named(status, text, message):
    big = big_sweep(3)
    with _answering(status, text) as url, pytest.raises(TrackingError, match=message):
        Publisher(big.store, url).publish_once("big")


def test_publisher_follows_no_redirect():
    """Only the address of the server that was named has been checked."""
    big = big_sweep(3)
    with (
        _answering(200, "3.0.0") as elsewhere,
        _answering(302, elsewhere) as url,
        pytest.raises(TrackingError, match=r"is not an MLflow server \(HTTP 302"),
    ):
        Publisher(big.store, url).publish_once("big")


LAB, MINE = "http://user:secret@lab/mlflow", "sqlite:////data/mlflow.db"
ALL = "s3://bucket file:///shared/listed"


@pytest.mark.parametrize(
    ("place", "server", "listed", "is_fine"),
    [
        ("mlflow-artifacts:/1/ab/artifacts", LAB, ALL, True),
        ("mlflow-artifacts://Lab:80/1", LAB, ALL, True),
        ("http://lab/mlflow/api/2.0/mlflow-artifacts/artifacts/1", LAB, ALL, True),
        ("s3://bucket/mlflow/1", LAB, ALL, True),
        ("s3://other/1", LAB, "", True),
        ("file:///shared/listed/1", LAB, ALL, True),
        ("file:///data/mlflow-artifacts/big/1", MINE, "", True),
        ("mlflow-artifacts://evil/1", LAB, "", False),
        (" mlflow-artifacts://evil/1", LAB, "", False),
        ("mlflow-artifacts:/\n/evil/1", LAB, "", False),
        ("mlflow-artifacts:/1/../../../other", LAB, "", False),
        ("http://evil/mlflow/api/2.0/mlflow-artifacts/artifacts/1", LAB, "", False),
        ("http://lab@evil/mlflow/api/2.0/mlflow-artifacts/artifacts/1", LAB, "", False),
        ("https://lab/mlflow/api/2.0/mlflow-artifacts/artifacts/1", LAB, "", False),
        ("http://lab/other", LAB, "", False),
        ("abfss://fs@evil.example/1", LAB, "", False),
        ("file:///home/alice", LAB, "", False),
        ("/home/alice", LAB, "", False),
        ("s3://[x", LAB, "", False),
        ("/shared/listed/%2e%2e/alice", LAB, ALL, False),
        ("s3://other/1", LAB, ALL, False),
        ("ftp://evil/1", LAB, "", False),
        ("file:///data/services", MINE, "", False),
        ("file:///data/mlflow-artifacts/../services", MINE, "", False),
        ("file://host/data/mlflow-artifacts/1", MINE, "", False),
        ("mlflow-artifacts:/1", MINE, "", False),
    ],
)
def test_files_of_runs_go_only_to_the_server_its_own_folder_and_listed_places(
    place, server, listed, is_fine, monkeypatch
):
    monkeypatch.setenv("ORCHESTRATOR_ALLOWED_URIS", listed)
    assert may_hold_files(place, server, "file:///data/mlflow-artifacts" if server == MINE else "") is is_fine


def test_publisher_sends_no_file_to_where_a_stranger_wants_it(database, monkeypatch):
    """Whoever makes an experiment first chooses where the files of its runs are kept."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    asked: list[str] = []
    with _answering(200, "3.0.0", asked) as elsewhere:
        _client(database).create_experiment("big", artifact_location=f"{elsewhere}/1")
        big = big_sweep(3)
        with pytest.raises(
            TrackingRefusedError, match=r"keeps the files of this run at http.*ORCHESTRATOR_ALLOWED_URIS"
        ):
            Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    assert asked == []
    assert len(_client(database).search_runs(["1"])) == 1 + 3


def test_publisher_does_not_make_a_report_again_for_a_place_that_is_refused(database):
    reads: list[str] = []

    class NotingStore(MemoryStore):
        def get_with_stat(self, name, *, max_bytes=None):
            reads.append(name)
            return super().get_with_stat(name, max_bytes=max_bytes)

    big = big_sweep(20, store=NotingStore())
    _client(database).create_experiment("big", artifact_location="http://127.0.0.1:9/1")
    publisher = Publisher(big.store, f"sqlite:///{database}")
    for most in (200, 5):
        reads.clear()
        with pytest.raises(TrackingRefusedError, match="keeps the files of this run at http"):
            publisher.publish_once("big")
        assert len(reads) <= most, reads


def test_loop_same_outage_is_told_once(caplog):
    class Failing:
        num_written = 0
        answers = iter(["down", "down", "down", "still down", None])

        def has_ended(self, sweep: str) -> bool:
            return True

        def publish_once(self, sweep: str) -> bool:
            if text := next(self.answers):
                raise TrackingError(text)
            return True

    with caplog.at_level(logging.WARNING):
        publish_until_done(Failing(), "sample", wait=lambda _: None, clock=lambda: 0.0)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ["down", "still down"]


def test_publisher_store_that_fails_in_the_middle_of_a_journal_loses_no_event(database):
    """Events were read, then the plan they name was not: they must be read again."""
    fault = ReadFault(harm=Harm.REFUSED, within="plan-")
    publisher = Publisher(FaultyStore(big_sweep(3, is_over=False).store, read_faults=[fault]), f"sqlite:///{database}")
    with pytest.raises(StorageError):
        publisher.publish_once("big")
    assert publisher.publish_once("big")
    assert len(_client(database).search_runs(["1"])) == 1 + 3
