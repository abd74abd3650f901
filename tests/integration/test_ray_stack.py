"""The background stack: its description, and one real start and end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.errors import ClusterError
from orchestrator.stack import ensure_stack, read_stack, stop_stack
from orchestrator.stack.attach import attach_cluster
from orchestrator.stack.children import ray_directory
from orchestrator.stack.description import (
    SERVICES_FOLDER,
    STACK_FILE,
    TOKEN_FILE,
    make_private,
    own_boot_id,
    remember_service,
    remembered_services,
    start_ticks_of,
    touch_stack,
    touched_at_s,
    write_stack,
)
from orchestrator.stack.environment import python_path, renew_token
from orchestrator.stack.ports import FIRST_PORT, LAST_PORT, free_ports
from tests.described_stack import described_stack

ROOT = Path(__file__).parents[2]


@pytest.fixture
def described(tmp_path):
    """A description whose supervisor is this very process."""
    return described_stack(tmp_path)


def test_description_of_a_live_supervisor_is_read(described, tmp_path):
    assert read_stack(tmp_path) == described


def test_description_of_a_pid_that_is_somebody_elses_now_is_ignored(described, tmp_path):
    write_stack(tmp_path, replace(described, pid_started_at=described.pid_started_at - 1))
    assert read_stack(tmp_path) is None


def test_description_of_a_dead_supervisor_is_ignored(described, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    write_stack(tmp_path, replace(described, pid=ended.pid))
    assert read_stack(tmp_path) is None


def test_description_that_is_torn_is_ignored(tmp_path):
    (tmp_path / STACK_FILE).write_text('{"pid": 1')
    assert read_stack(tmp_path) is None


def test_description_of_another_release_is_read(described, tmp_path):
    document = json.loads((tmp_path / STACK_FILE).read_text())
    (tmp_path / STACK_FILE).write_text(json.dumps(document | {"prometheus_url": "http://127.0.0.1:4"}))
    assert read_stack(tmp_path) == described


def test_start_time_of_a_zombie_is_none():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; nobody has collected it
        assert start_ticks_of(child.pid) is None


def test_touch_moves_the_last_use(tmp_path):
    touch_stack(tmp_path)
    os.utime(tmp_path / "stack.touch", (1.0, 1.0))
    assert touched_at_s(tmp_path) == 1.0
    touch_stack(tmp_path)
    assert touched_at_s(tmp_path) > 1.0


def test_token_is_for_the_user_alone_and_another_one_at_each_start(tmp_path):
    path = tmp_path / TOKEN_FILE
    path.write_text("0" * 64)  # it came with a copied project
    assert renew_token(tmp_path) == path
    token = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) == 64
    assert renew_token(tmp_path).read_text() != token


@pytest.mark.parametrize(
    "forged",
    [
        {"pid": -1, "pid_started_at": None, "boot_id": own_boot_id()},
        {"pid": 1, "pid_started_at": start_ticks_of(1), "boot_id": own_boot_id()},
        {"boot_id": "of another machine"},
        {"boot_id": ""},
        {"inode": 1},
        {"ray_address": "192.0.2.1:6379"},
        {"mlflow_url": "http://192.0.2.1:5000"},
        {"s3_url": "https://192.0.2.1"},
        {"dashboard_url": 8265},
    ],
    ids=str,
)
def test_description_in_a_copied_directory_is_of_no_stack(described, tmp_path, forged):
    """`down` would send signals to any process, and others would show the token to a foreign server."""
    document = json.loads((tmp_path / STACK_FILE).read_text())
    (tmp_path / STACK_FILE).write_text(json.dumps(document | forged))
    assert read_stack(tmp_path) is None
    (tmp_path / STACK_FILE).write_text(json.dumps(document | {"token_path": "/secret", "tracking_uri": "http://x"}))
    assert read_stack(tmp_path) == described


def test_services_of_a_copied_directory_are_not_started_again(tmp_path):
    service = {"namespace": "n", "store_uri": "file:///s"}
    remember_service(tmp_path, service)
    assert remembered_services(tmp_path) == [service]
    (file,) = (tmp_path / SERVICES_FOLDER).iterdir()
    written = json.loads(file.read_text())
    for marks in ({"boot_id": "", "machine_id": ""}, {"boot_id": "another", "machine_id": "another"}, {"inode": "1"}):
        file.write_text(json.dumps(written | marks))
        assert remembered_services(tmp_path) == []


def test_directory_and_description_of_another_user_count_as_none(described, tmp_path, monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    assert read_stack(tmp_path) is None
    with pytest.raises(ClusterError, match=rf"{tmp_path} belongs to user {os.geteuid()}, .*ORCHESTRATOR_DIRECTORY"):
        make_private(tmp_path)
    with pytest.raises(ClusterError, match="run the command as its owner"):
        stop_stack(tmp_path)


def test_ports_are_distinct_free_and_outside_of_rays_own():
    ports = free_ports(4)
    assert len(set(ports)) == 4
    assert all(FIRST_PORT <= port < LAST_PORT for port in ports)
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_python_path_relative_entry_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert python_path({"PYTHONPATH": "lib"}).split(os.pathsep)[0] == str(tmp_path / "lib")


def test_stop_without_a_stack_says_so(tmp_path):
    assert stop_stack(tmp_path) is False


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:9"])
def test_attach_to_nobody_fails_at_once(address):
    with pytest.raises(ClusterError, match=address):
        attach_cluster(address, "tests")


def get(url: str, token: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=20) as response:  # noqa: S310 - our own server
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def has_processes(directory: Path) -> bool:
    listing = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    return str(ray_directory(directory)) in listing or str(directory) in listing


ATTACH = """
import sys
from pathlib import Path
from orchestrator.stack import attach_stack, read_stack
attach_stack(read_stack(Path(sys.argv[1])), "tests")
import ray
print(ray.cluster_resources()["CPU"])
"""


@pytest.mark.ci
def test_stack_starts_once_serves_with_its_token_and_ends_whole(tmp_path, until):
    stack = ensure_stack(tmp_path)
    try:
        assert ensure_stack(tmp_path) == stack
        assert get(f"{stack.dashboard_url}/api/version") == 401
        assert get(f"{stack.dashboard_url}/api/version", Path(stack.token_path).read_text()) == 200
        attach = subprocess.run(
            [sys.executable, "-c", ATTACH, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert float(attach.stdout) > 0
        assert json.loads((tmp_path / STACK_FILE).read_text())["pid"] == stack.pid
    finally:
        assert stop_stack(tmp_path)
    assert read_stack(tmp_path) is None
    until(lambda: not has_processes(tmp_path))


@pytest.mark.slow
def test_stack_whose_supervisor_is_killed_ends_whole(tmp_path, until):
    stack = ensure_stack(tmp_path)
    os.kill(stack.pid, signal.SIGKILL)
    until(lambda: not has_processes(tmp_path))
