"""Keys that the server knows and that may not do what a store needs: told by doctor and at submit, nothing started."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.exits import ExitCode
from orchestrator.core.errors import StorageDeniedError, StorageError
from orchestrator.stack.description import BUCKET
from orchestrator.storage.s3.store import S3Store
from tests.s3_server import LIMITED, s3_server

__all__ = ["s3_server"]

REMEDY = "ask for read, write, list and delete on this bucket"
FAILED = {"reader": {"checksums", "uploads in parts", "read and write"}, "stranger": {"bucket"}}


@pytest.fixture(params=LIMITED)
def identity(request: pytest.FixtureRequest, s3_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment has its keys; a client of its own, because clients keep theirs."""
    name = str(request.param)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", name)
    monkeypatch.setenv("ORCHESTRATOR_S3_NUM_PARALLEL_PARTS", str(20 + list(LIMITED).index(name)))
    monkeypatch.chdir(tmp_path)
    return name


def some_place() -> str:
    return f"s3://{BUCKET}/rights-{secrets.token_hex(4)}"


def test_doctor_names_the_right_that_is_missing(identity: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--local", "--store", some_place(), "-o", "json"])
    assert result.exit_code == ExitCode.FAILURE
    checks: dict[str, Any] = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    failed = {name: check for name, check in checks.items() if check["verdict"] == "failed"}
    assert failed.keys() == FAILED[identity]
    for check in failed.values():
        told = check["detail"] + check["remedy"]
        assert "AccessDenied (HTTP 403)" in told
        assert REMEDY in told
    assert checks["conditional writes"]["verdict"] == "skipped"


def test_submit_without_rights_is_denied_before_anything_starts(
    identity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = some_place()
    monkeypatch.setenv("ORCHESTRATOR_STORE", place)
    result = CliRunner().invoke(app, ["submit", "quickstart", "-y"])
    assert isinstance(result.exception, StorageError), result.output
    assert REMEDY in str(result.exception)
    assert list(tmp_path.iterdir()) == [], "no stack"


def test_store_that_may_only_be_read_is_read(identity: str, s3_server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have put there can be looked at with a reader's keys; writes and deletions are refused."""
    prefix = f"rights-{secrets.token_hex(4)}"
    with monkeypatch.context() as owner:
        for name, value in s3_server.client_environment.items():
            owner.setenv(name, value)
        owner.setenv("ORCHESTRATOR_S3_NUM_PARALLEL_PARTS", "19")
        S3Store(BUCKET, prefix).put("a/b", b"content")
    store = S3Store(BUCKET, prefix)
    if identity == "reader":
        assert store.get("a/b") == b"content"
        assert [stat.name for stat in store.list_objects("")] == ["a/b"]
    else:
        with pytest.raises(StorageDeniedError, match="AccessDenied"):
            store.get("a/b")
    for write in (lambda: store.put("c", b""), lambda: store.put_if_absent("c", b""), lambda: store.delete("a/b")):
        with pytest.raises(StorageDeniedError, match=REMEDY):
            write()
