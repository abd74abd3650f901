"""``orchestrator doctor``, and what a submit refuses, on directories and on a real S3 server."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.exits import ExitCode
from orchestrator.core.checks import Check, Verdict, run_checks
from orchestrator.core.errors import OrchestratorError, StorageError, UnsupportedStoreError
from orchestrator.doctor.store import store_checks
from orchestrator.stack.description import BUCKET
from orchestrator.storage.local import FILE
from orchestrator.storage.protocol import OpenableStore
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.store import S3Store
from orchestrator.testing.memory_store import MemoryStore
from tests.s3_proxy import Damage, Faults, faulty_proxy
from tests.s3_server import s3_server

__all__ = ["s3_server"]

ROOT = Path(__file__).parents[2]
HOUR_S = 3600.0
WHY = {
    "nowhere": "does not exist: create it",
    "denied": "check the credentials",
    "missing": "no credentials",
    "conditions": "ignores If-None-Match",
    "skew": "set the clock",
    "silent": "check that the server runs",
    "other bucket": "ORCHESTRATOR_S3_ALLOWED_BUCKETS",
}
Usage = namedtuple("Usage", "total used free")  # noqa: PYI024 - as shutil's


class Doctor:
    """Runs the command in a directory of its own; ``checks`` are its results by name."""

    def __init__(self) -> None:
        self.checks: dict[str, dict[str, Any]] = {}
        self.shown = ""

    def __call__(self, store: str) -> int:
        result = CliRunner().invoke(app, ["doctor", "--local", "--store", store, "-o", "json"])
        assert result.stdout, result.output
        self.shown = result.output
        self.checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
        return result.exit_code

    def verdicts(self) -> dict[str, str]:
        return {name: check["verdict"] for name, check in self.checks.items()}

    def failed(self) -> dict[str, str]:
        return {
            name: f"{check['detail']} -> {check['remedy']}"
            for name, check in self.checks.items()
            if check["verdict"] == "failed"
        }


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.chdir(tmp_path)
    return Doctor()


@pytest.fixture
def faults(s3_server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Of a proxy before the server, which the environment now leads to."""
    with faulty_proxy(s3_server.endpoint_url) as (url, found):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        yield found


def uri(bucket: str = BUCKET) -> str:
    return f"s3://{bucket}/doctor-{secrets.token_hex(4)}"


def hide_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, os.devnull)


# ------------------------------------------------------------------------------------------------------------ the store
def test_doctor_good_directory_passes_and_leaves_no_trace(doctor: Doctor, tmp_path: Path) -> None:
    assert doctor((tmp_path / "new" / "store").as_uri()) == ExitCode.OK
    assert set(doctor.verdicts().values()) <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == []


def test_doctor_used_directory_stays_as_it_is(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "store" / "sweeps").mkdir(parents=True)
    (tmp_path / "store" / "sweeps" / "object").write_text("content")
    assert doctor((tmp_path / "store").as_uri()) == ExitCode.OK
    assert [path.name for path in (tmp_path / "store").iterdir() if not path.name.startswith(".")] == ["sweeps"]


def test_doctor_good_server_passes_every_check_and_leaves_nothing(doctor: Doctor, s3_server) -> None:
    place = uri()
    assert doctor(place) == ExitCode.OK
    assert set(doctor.verdicts().values()) <= {"ok", "warning"}
    assert {"credentials", "bucket", "clock", "checksums", "uploads in parts", "conditional writes"} <= set(
        doctor.checks
    )
    assert list(S3Store(BUCKET, place.rpartition("/")[2]).list_objects("")) == []
    for secret in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[secret] not in doctor.shown


def test_doctor_table_tells_the_same(doctor: Doctor, s3_server) -> None:
    result = CliRunner().invoke(app, ["doctor", "--local", "--store", uri("nowhere-at-all")])
    assert result.exit_code == ExitCode.FAILURE
    assert "create the bucket" in " ".join(result.stdout.split())


def test_doctor_wrong_bucket_is_named_and_the_rest_skipped(doctor: Doctor, s3_server) -> None:
    assert doctor(uri("nowhere-at-all")) == ExitCode.FAILURE
    assert list(doctor.failed()) == ["bucket"]
    assert "create the bucket" in doctor.failed()["bucket"]
    assert doctor.verdicts()["conditional writes"] == "skipped"


def test_doctor_bucket_that_is_not_allowed_is_refused_before_anything_is_asked(
    doctor: Doctor, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_S3_ALLOWED_BUCKETS", "some,others")
    assert doctor(uri()) == ExitCode.FAILURE
    assert "ORCHESTRATOR_S3_ALLOWED_BUCKETS" in doctor.failed()["store URI"]
    assert faults.seen == []


@pytest.mark.parametrize("bad", ["s3://bucket/a/../b", "ftp://somewhere/a", "file:relative", "s3://a b/c", "s3://"])
def test_doctor_uri_that_is_refused_fails_one_check(doctor: Doctor, bad: str) -> None:
    assert doctor(bad) == ExitCode.FAILURE
    assert list(doctor.failed()) == ["store URI"]


def test_doctor_wrong_secret_is_denied_and_never_shown(doctor: Doctor, s3_server, monkeypatch) -> None:
    hidden = secrets.token_hex(12)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", hidden)
    monkeypatch.setenv("ORCHESTRATOR_S3_NUM_PARALLEL_PARTS", "3")  # settings of its own: a client of its own
    assert doctor(uri()) == ExitCode.FAILURE
    assert list(doctor.failed()) == ["bucket"]
    assert "credentials" in doctor.failed()["bucket"]
    assert hidden not in doctor.shown


def test_doctor_missing_credentials_say_how_to_give_them(doctor: Doctor, s3_server, monkeypatch) -> None:
    hide_credentials(monkeypatch)
    assert doctor(uri()) == ExitCode.FAILURE
    assert "AWS_ACCESS_KEY_ID" in doctor.failed()["credentials"]
    assert doctor.verdicts()["server"] == "ok"
    assert doctor.verdicts()["bucket"] == "skipped"


def test_doctor_server_that_ignores_conditions_is_refused(doctor: Doctor, faults: Faults) -> None:
    faults.damage_all("PUT", Damage.CONDITIONS_IGNORED)
    assert doctor(uri()) == ExitCode.FAILURE
    assert list(doctor.failed()) == ["conditional writes"]
    assert "If-None-Match" in doctor.failed()["conditional writes"]


@pytest.mark.parametrize(("offset_s", "verdict"), [(0, "ok"), (-60, "warning"), (60, "warning"), (HOUR_S, "failed")])
def test_doctor_clock_that_is_off_is_told(doctor: Doctor, faults: Faults, offset_s: float, verdict: str) -> None:
    faults.clock_offset_s = offset_s
    assert doctor(uri()) == (ExitCode.FAILURE if verdict == "failed" else ExitCode.OK)
    assert doctor.verdicts()["clock"] == verdict
    if verdict != "ok":
        assert ("behind" if offset_s > 0 else "ahead") in doctor.checks["clock"]["detail"]


def test_doctor_server_that_is_away_ends_soon(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert doctor(uri()) == ExitCode.FAILURE
    assert "AWS_ENDPOINT_URL_S3" in doctor.failed()["server"]
    assert sum(check["duration_s"] for check in doctor.checks.values()) < 15


def test_doctor_server_without_uploads_in_parts_fails_that_check(doctor: Doctor, faults: Faults) -> None:
    faults.damage_all("POST", Damage.FULL)
    assert doctor(uri()) == ExitCode.FAILURE
    assert list(doctor.failed()) == ["uploads in parts"]


# ---------------------------------------------------------------------------------------------------- the machine
@pytest.mark.parametrize(("free_gib", "verdict"), [(100, "ok"), (5, "warning"), (0.1, "failed")])
def test_doctor_free_space_is_judged(doctor: Doctor, tmp_path: Path, monkeypatch, free_gib, verdict) -> None:
    usage = Usage(0, 0, int(free_gib * 1024**3))
    monkeypatch.setattr("orchestrator.doctor.store.shutil.disk_usage", lambda _: usage)
    doctor((tmp_path / "store").as_uri())
    assert doctor.verdicts()["cache"] == doctor.verdicts()["folder"] == verdict


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BaseHTTPRequestHandler]]:
    class Handler(BaseHTTPRequestHandler):
        status = 200
        text = ""

        def do_GET(self) -> None:
            is_asked = self.path == "/version"
            text = self.text if is_asked else "3.0.0"
            self.send_response(self.status if is_asked else 200)
            if self.status == HTTPStatus.FOUND:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://somebody:hidden-password@127.0.0.1:{server.server_address[1]}")
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "text", "detail"),
    [
        (200, "3.0.0", "MLflow at 127.0.0.1 answers"),
        (401, "who are you?", "MLflow at 127.0.0.1 answers"),
        (404, "", "is not an MLflow server (HTTP 404 to /version)"),
        (500, "", "is not an MLflow server (HTTP 500 to /version)"),
        (302, "", "is not an MLflow server (HTTP 302 to /version)"),
        (200, "<html>a page</html>", "is not an MLflow server"),
        (200, "1.30.0", "runs MLflow 1.30.0"),
    ],
)
def test_doctor_tracking_server_is_asked_as_by_the_publisher_and_its_password_never_shown(
    doctor, mlflow, tmp_path, status, text, detail
) -> None:
    mlflow.status, mlflow.text = status, text
    doctor((tmp_path / "store").as_uri())
    assert detail in doctor.checks["tracking"]["detail"]
    assert doctor.verdicts()["tracking"] == ("ok" if detail.endswith("answers") else "failed")
    assert "hidden-password" not in doctor.shown


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("", "mlflow.db can be used"),  # of a publisher that was killed before it made the tables
        ("not a database", "file is not a database"),
        (
            "CREATE TABLE experiments (id); CREATE TABLE alembic_version AS SELECT '0a8213491aaa' version_num;",
            "tables of version 0a8213491aaa, and the installed MLflow",
        ),
    ],
)
def test_doctor_tracking_database_is_refused_as_by_the_publisher(
    doctor: Doctor, tmp_path: Path, monkeypatch, script: str, detail: str
) -> None:
    database = tmp_path / "mlflow.db"
    database.write_text("" if ";" in script else script)
    if ";" in script:
        with sqlite3.connect(database) as connection:
            connection.executescript(script)
    before = database.read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    doctor((tmp_path / "store").as_uri())
    assert detail in doctor.checks["tracking"]["detail"]
    assert doctor.verdicts()["tracking"] == ("ok" if "can be used" in detail else "failed")
    assert database.read_bytes() == before


@pytest.mark.parametrize("tracking", ["http://127.0.0.1:9", "ftp://somewhere", "sqlite:////proc/nothing/mlflow.db"])
def test_doctor_tracking_that_cannot_work_fails(doctor: Doctor, tmp_path: Path, monkeypatch, tracking: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    if tracking.startswith("sqlite"):
        monkeypatch.setattr("orchestrator.cli.commands.doctor.os.access", lambda *_: False)  # root may write anywhere
    assert doctor((tmp_path / "store").as_uri()) == ExitCode.FAILURE
    assert list(doctor.failed()) == ["tracking"]


# ----------------------------------------------------------------------------------------------------------- checks
def test_doctor_store_of_another_scheme_has_the_checks_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    another = replace(FILE, name="memory", check=lambda *_: None, open=lambda *_: cast("OpenableStore", MemoryStore()))
    monkeypatch.setattr("orchestrator.storage.open._SCHEMES", {"memory": another})
    judged = list(run_checks(list(store_checks("memory://here"))))
    assert [found.name for found in judged][:2] == ["store URI", "read and write"]
    assert {found.verdict for found in judged} == {Verdict.OK}


def test_check_that_hangs_ends_at_its_limit() -> None:
    never = threading.Event()
    (result,) = run_checks([Check(name="slow", run=lambda: str(never.wait()), limit_s=0.05)])
    never.set()
    assert (result.verdict, result.detail) == (Verdict.FAILED, "no answer within 0.05 s")


def test_check_error_of_a_stranger_is_named_but_not_quoted() -> None:
    def fail() -> str:
        raise ValueError("password=1234")

    (result,) = run_checks([Check(name="odd", run=fail, remedy="look")])
    assert (result.verdict, result.detail, result.remedy) == (Verdict.FAILED, "ValueError", "look")


def test_check_that_builds_on_one_that_was_skipped_is_skipped() -> None:
    def fail() -> str:
        raise OrchestratorError("broken; mend it")

    checks = [
        Check(name="a", run=fail),
        Check(name="b", run=str, needs=["a"]),
        Check(name="c", run=str, needs=["b"]),
        Check(name="d", run=str),
    ]
    verdicts = [result.verdict for result in run_checks(checks)]
    assert verdicts == [Verdict.FAILED, Verdict.SKIPPED, Verdict.SKIPPED, Verdict.OK]


# -------------------------------------------------------------------------------------------------------- at submit
@pytest.mark.parametrize("cause", WHY)
def test_submit_to_a_store_that_cannot_hold_it_starts_nothing(
    cause: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = secrets.token_hex(12)
    bucket = "nowhere-at-all" if cause == "nowhere" else BUCKET
    monkeypatch.setenv("ORCHESTRATOR_S3_DEADLINE_S", "1")
    match cause:
        case "denied":
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", hidden)
        case "missing":
            hide_credentials(monkeypatch)
        case "conditions":
            faults.damage_all("PUT", Damage.CONDITIONS_IGNORED)
        case "skew":
            monkeypatch.setattr("botocore.auth.get_current_datetime", an_hour_ago)
        case "silent":
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        case "other bucket":
            monkeypatch.setenv("ORCHESTRATOR_S3_ALLOWED_BUCKETS", "mine")
    monkeypatch.setenv("ORCHESTRATOR_S3_NUM_PARALLEL_PARTS", str(5 + list(WHY).index(cause)))  # a client of its own
    monkeypatch.chdir(tmp_path)
    store = uri(bucket)
    monkeypatch.setenv("ORCHESTRATOR_STORE", store)
    result = CliRunner().invoke(app, ["submit", "quickstart", "-y"])
    assert isinstance(result.exception, StorageError), result.output
    assert WHY[cause] in str(result.exception)
    assert hidden not in str(result.exception) + result.output
    assert list(tmp_path.iterdir()) == [], "no stack"
    if cause == "conditions":
        assert isinstance(result.exception, UnsupportedStoreError)
        names = [stat.name for stat in S3Store(BUCKET, store.rpartition("/")[2], S3Settings()).list_objects("")]
        assert names == []


def an_hour_ago(*_: object, **__: object) -> Any:
    from datetime import UTC, datetime, timedelta

    return (datetime.now(UTC) - timedelta(hours=1)).replace(tzinfo=None)
