"""A directory that fails: every error is one of ours, a listing is whole or an error, and nothing half-made stays."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.exits import ExitCode
from orchestrator.core.errors import (
    NoSpaceError,
    NotFoundError,
    StorageDeniedError,
    StorageError,
    StorageTimeoutError,
    UnsupportedStoreError,
)
from orchestrator.retention.roots import forget
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.local import LocalStore
from tests.gc_store import GRACE_S, TRASH_S, Lab, make_job

CALLS = {"listdir", "scandir", "stat", "open", "unlink", "mkdir"}
OPERATIONS: dict[str, Callable[[LocalStore], object]] = {
    "stat": lambda store: store.stat("a/b/c"),
    "exists": lambda store: store.exists("a/b/c"),
    "list_objects": lambda store: list(store.list_objects("")),
    "list_objects below": lambda store: list(store.list_objects("a/b/c")),
    "list_children": lambda store: store.list_children("a/b/"),
    "delete": lambda store: store.delete("a/b/c"),
    "put_if_match": lambda store: store.put_if_match("a/b/c", b"2", "etag"),
    "leftovers": lambda store: list(store.leftovers()),
}


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, number: int, *folders: Path) -> Iterator[None]:
    """The operating system answers with an error to whatever it is asked about these folders and what is in them."""

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if any(Path(os.fspath(path)).is_relative_to(folder) for folder in folders):
                raise OSError(number, os.strerror(number), path)
            return real(path, *arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, wrapped(getattr(os, name)))
        yield


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found = LocalStore(tmp_path / "store")
    found.put("a/b/c", b"1")
    found.put("d", b"2")
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EACCES, StorageDeniedError), (errno.EIO, StorageError), (errno.ESTALE, StorageError)],
)
def test_store_whose_folder_cannot_be_read_says_so_in_every_operation(
    operation: str, number: int, expected: type[StorageError], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [store.root / name for name in ("a/b", ".tmp", ".locks")]
    with failing(monkeypatch, number, *folders), pytest.raises(StorageError, match=os.strerror(number)) as caught:
        OPERATIONS[operation](store)
    assert type(caught.value) is expected
    assert store.uri in str(caught.value)
    assert store.get("a/b/c") == b"1"


def test_listing_of_a_whole_disk_leaves_out_its_own_folder(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.root / "lost+found").mkdir()
    with failing(monkeypatch, errno.EACCES, store.root / "lost+found"):
        assert {stat.name for stat in store.list_objects("")} == {"a/b/c", "d"}


def test_listing_of_a_folder_that_is_deleted_meanwhile_goes_on(store: LocalStore) -> None:
    listing = store.list_objects("")
    first = next(listing).name
    assert first == "d"
    store.delete("a/b/c")
    assert list(listing) == []
    assert list(store.list_objects("a/b/")) == []


def test_name_that_no_disk_takes_is_refused_with_its_remedy(store: LocalStore) -> None:
    name = "a/" + "x" * 256
    for operation in (store.exists, store.stat, store.get, store.delete, lambda name: store.put(name, b"")):
        with pytest.raises(StorageError, match="shorten it") as caught:
            operation(name)
        assert not isinstance(caught.value, NotFoundError)


def test_download_that_fails_leaves_the_target_as_it_was_and_nothing_beside_it(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"former")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("orchestrator.storage.local.shutil.copyfileobj", full)
        with pytest.raises(NoSpaceError, match=r"copying a/b/c from .* to .*target"):
            store.download("a/b/c", target)
    with pytest.raises(StorageError, match="copying"):
        store.download("a/b/c", tmp_path / "nowhere" / "target")
    with pytest.raises(NotFoundError):
        store.download("a/b/none", target)
    assert target.read_bytes() == b"former"
    assert {path.name for path in tmp_path.iterdir()} == {"store", "target"}


def test_doctor_and_submit_say_that_a_directory_is_closed_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "closed" / "store").as_uri()
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("ORCHESTRATOR_STORE", uri)
    with failing(monkeypatch, errno.EACCES, tmp_path / "closed"):
        told = CliRunner().invoke(app, ["doctor", "--local", "--store", uri, "-o", "json"])
        submitted = CliRunner().invoke(app, ["submit", "quickstart", "-y"])
    assert told.exit_code == ExitCode.FAILURE, told.output
    checks = {check["name"]: check for check in json.loads(told.stdout)["checks"]}
    assert checks["folder"]["verdict"] == "failed"
    assert "ask for read and write permissions" in checks["folder"]["remedy"]
    assert checks["read and write"]["verdict"] == "skipped"
    assert isinstance(submitted.exception, StorageError), submitted.output
    assert "ask for read and write permissions" in str(submitted.exception)
    assert list(home.iterdir()) == [], "no stack"


def test_collect_over_a_folder_that_cannot_be_read_forgets_no_hidden_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trash holds the only copy of a hidden record, and drops it once nothing is left of the artifact."""
    lab, job = Lab(), make_job(0)
    lab.clock.now_s = time.time()
    lab.store = LocalStore(tmp_path / "store")
    lab.run_sweep("red", [job])
    forget(lab.store, "red", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    assert not is_committed(lab.store, job.key)
    lab.clock.advance(TRASH_S + 1)
    with (
        failing(monkeypatch, errno.EIO, tmp_path / "store" / "artifacts"),
        pytest.raises(StorageError, match="looking for artifacts"),
    ):
        lab.collect()
    lab.post("green", [job])
    lab.collect()
    assert is_committed(lab.store, job.key)
    lab.check_intact([job])


def test_lock_that_another_writer_keeps_ends_in_a_timeout(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    etag = store.put_if_match("d", b"3", store.stat("d").etag).etag
    monkeypatch.setattr("orchestrator.storage.local._LOCK_TIMEOUT_S", 0.0)
    (lock,) = (store.root / ".locks").iterdir()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageTimeoutError, match=f"locking d in {store.uri} failed: .* {lock} for 0 s"):
            store.put_if_match("d", b"4", etag)
    assert store.get("d") == b"3"
    store.put_if_match("d", b"4", etag)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_file_system_without_locks_is_refused(number: int, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that exists is no lock: that of a dead process would stay."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UnsupportedStoreError, match=f"{os.strerror(number)}; .* Lustre with `-o flock`"):
        store.put_if_match("d", b"3", store.stat("d").etag)
    assert store.get("d") == b"2"
