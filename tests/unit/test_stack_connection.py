"""Following a sweep on the local stack: what is said of each death, and what is started again. Ray is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
from filelock import FileLock

from orchestrator.cli.commands.live_rows import look_while
from orchestrator.controller.calls import CallsLostError, ServiceCalls, ServiceSettings
from orchestrator.core.errors import ClusterError, InfeasibleError, StorageError
from orchestrator.services import stack_transport as module
from orchestrator.services import stores
from orchestrator.services.settings import Settings
from orchestrator.services.stack_transport import StackTransport
from orchestrator.services.status import SweepStatus
from orchestrator.stack.children import LOCK_FILE
from orchestrator.stack.description import (
    STACK_FILE,
    own_boot_id,
    read_description,
    read_stack,
    remove_description,
    write_stack,
)
from orchestrator.stack.environment import METRICS_VARIABLE, child_environment
from orchestrator.stack.ports import FIRST_PORT, LAST_PORT
from orchestrator.stack.start import ensure_stack, foreground_cluster, no_stack, restart_killed_stack, stop_stack
from orchestrator.state.snapshot import Snapshot
from tests.described_stack import described_stack

SETTINGS = ServiceSettings(store_uri="file:///store", cluster="c", namespace="n", tracking_uri="sqlite:///x.db")


class Calls:
    """Stands in for the process that talks to Ray; answers at once."""

    failure = ""
    """Of the controller's last round."""

    def __init__(self, *_: object) -> None:
        self.num_asked = 0
        self.is_lost = False

    def send(self, call: str, **_: str) -> None:
        if self.is_lost:
            raise CallsLostError(call)
        self.num_asked += 1

    def poll(self) -> dict[str, str]:
        return {"notice": "", "failure": self.failure}

    def kill(self) -> None:
        self.is_lost = True


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """A running one, whose supervisor is this very process."""
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(module, "POLL_EVERY_S", 0.0)
    monkeypatch.setattr(module, "ServiceCalls", Calls)
    described = described_stack(tmp_path)
    monkeypatch.setattr(module, "ensure_stack", lambda home: read_stack(home) or pytest.fail("no stack"))
    return described


@pytest.fixture
def connection(stack):
    connection = StackTransport(Settings(), "file:///store")
    connection.open()
    return connection


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        return ended.pid


def test_death_of_ray_is_told_once_with_what_died_and_that_results_are_safe(connection, stack, tmp_path, capsys):
    write_stack(tmp_path, replace(stack, trouble="Ray has died (raylet)"))
    for _ in range(3):
        connection.keep_alive()
    told = capsys.readouterr().err
    assert told.count("Ray has died (raylet)") == 1
    assert "All results so far are safe in file:///store" in told
    assert "resumes from its checkpoints" in told
    write_stack(tmp_path, replace(stack, num_ray_starts=2))
    connection.keep_alive()
    assert "runs again" in capsys.readouterr().err
    assert connection._calls.num_asked == 1  # of the new Ray


def test_killed_supervisor_is_told_and_started_again(connection, stack, tmp_path, capsys, monkeypatch):
    pid = ended_pid()
    write_stack(tmp_path, replace(stack, pid=pid))

    def start(home):
        write_stack(home, stack)
        return stack

    monkeypatch.setattr(module, "ensure_stack", start)
    connection.keep_alive()
    told = capsys.readouterr().err
    assert f"(pid {pid}) has died" in told
    assert "safe in file:///store" in told
    assert read_stack(tmp_path) == stack


def test_controller_whose_rounds_fail_is_told_once(connection, capsys, monkeypatch):
    """It answers, so that nothing replaces it."""
    for failure in ("", "the store denies: first", "the store denies: second", "", "the store denies: third"):
        monkeypatch.setattr(Calls, "failure", failure)
        for _ in range(2):
            connection._ask_at_s = 0.0
            connection.keep_alive()
    told = capsys.readouterr().err
    assert [word in told for word in ("first", "second", "third")] == [True, False, True]


def test_stack_that_was_stopped_is_not_started_again(connection, tmp_path):
    remove_description(tmp_path)
    with pytest.raises(ClusterError, match="safe in file:///store") as raised:
        connection.keep_alive()
    assert "\n" not in str(raised.value)


def test_lost_calls_are_made_again(connection, stack):
    connection._calls.kill()
    connection._ask_at_s = 0.0
    connection.keep_alive()
    connection._ask_at_s = 0.0
    connection.keep_alive()
    assert connection._calls.num_asked == 1


def test_calls_without_a_stack_say_so(tmp_path):
    calls = ServiceCalls(tmp_path, SETTINGS)
    try:
        calls.send("ensure")
        with pytest.raises(ClusterError, match="no stack runs"):
            calls.wait(60.0)
    finally:
        calls.close()


def test_calls_whose_process_is_killed_are_lost(tmp_path):
    calls = ServiceCalls(tmp_path, SETTINGS)
    calls.kill()
    with pytest.raises(CallsLostError):
        calls.wake("sweep")


def test_killed_stack_is_started_once_however_many_commands_ask(stack, tmp_path, monkeypatch):
    started = []

    def launch(home, *_, **__):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    monkeypatch.setattr("orchestrator.stack.start._launch", launch)
    assert restart_killed_stack(tmp_path) is None  # it runs
    write_stack(tmp_path, replace(stack, pid=ended_pid()))
    assert restart_killed_stack(tmp_path) is not None
    assert restart_killed_stack(tmp_path) is None
    assert len(started) == 1
    found = read_stack(tmp_path)
    assert found is not None
    assert "has died" in found.trouble
    for process in started:
        process.kill()
        process.wait()


def test_stack_of_another_container_is_not_taken_for_killed(stack, tmp_path, monkeypatch):
    """Its processes cannot be seen, but the lock of its supervisor is held."""
    monkeypatch.setattr("orchestrator.stack.start._launch", lambda *_, **__: pytest.fail("it was started again"))
    elsewhere = replace(stack, pid=ended_pid())
    write_stack(tmp_path, elsewhere)
    with FileLock(tmp_path / LOCK_FILE):
        assert restart_killed_stack(tmp_path) is None
    assert read_description(tmp_path) == elsewhere


def test_stack_whose_supervisor_cannot_be_seen_is_not_said_to_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.stack.start.STACK_STOP_GRACE_S", -5.0)
    with FileLock(tmp_path / LOCK_FILE), pytest.raises(ClusterError, match="runs in another container"):
        stop_stack(tmp_path)


def test_project_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / ".orchestrator").touch()
    with pytest.raises(ClusterError, match="cannot be used: File exists; it must be a directory"):
        ensure_stack(tmp_path / ".orchestrator")


def test_stack_of_another_host_is_neither_started_nor_stopped_here(stack, tmp_path, monkeypatch):
    started = []

    def start(home, *_, **__):
        started.append(home)
        return stack

    monkeypatch.setattr("orchestrator.stack.start._start", start)
    elsewhere = replace(stack, pid=ended_pid(), host="another", boot_id="another's", s3_url="http://127.0.0.1:9")
    write_stack(tmp_path, elsewhere)
    (tmp_path / "stack.lock").touch()
    for order in (ensure_stack, stop_stack):
        with pytest.raises(ClusterError, match=rf"on host another, .* delete {tmp_path / STACK_FILE}; .* up --s3"):
            order(tmp_path)
    assert read_description(tmp_path) == elsewhere
    assert not started
    (tmp_path / STACK_FILE).unlink()  # as the message says
    assert not stop_stack(tmp_path)
    assert ensure_stack(tmp_path) == stack
    assert started


def test_foreground_and_stack_keep_each_other_away_from_a_directory(stack, tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.stack.start.NUM_TRIES", 0)
    monkeypatch.setattr("orchestrator.stack.start.STACK_STOP_GRACE_S", 0.0)
    with pytest.raises(InfeasibleError, match="a stack runs or is starting"), no_stack(tmp_path):
        pass
    (tmp_path / STACK_FILE).unlink()
    others = (InfeasibleError, no_stack), (ClusterError, lambda home: nullcontext(ensure_stack(home)))
    with no_stack(tmp_path):
        for error, other in others:
            with pytest.raises(error, match="or a command with --foreground runs there"), other(tmp_path):
                pass


def test_foreground_cluster_leaves_the_handler_of_sigterm_to_its_caller(tmp_path, monkeypatch):
    def mine(*_):
        """A handler."""

    monkeypatch.setattr("ray.init", lambda **_: signal.signal(signal.SIGTERM, lambda *_: None))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    former = signal.signal(signal.SIGTERM, mine)
    try:
        with patch.dict(os.environ), foreground_cluster(tmp_path, "tests"):
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, former)


def test_killed_stack_is_started_again_though_its_host_was_renamed(stack, tmp_path, monkeypatch):
    """A container that was made again has another host's name, too."""
    monkeypatch.setattr("orchestrator.stack.start._start", lambda *_, **__: stack)
    killed = replace(stack, pid=ended_pid(), host="earlier", boot_id=own_boot_id())
    write_stack(tmp_path, killed)
    assert ensure_stack(tmp_path) == stack
    assert not replace(killed, boot_id="").is_here  # one that is not known equals no other


def test_store_on_the_s3_server_of_a_killed_stack_is_waited_for(stack, tmp_path, monkeypatch, capsys):
    url, answers, launched = "http://127.0.0.1:9", iter([False, StorageError("no server"), True, True]), []

    def is_there(*_, **__):
        answer = next(answers)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    def launch(home, *_, with_s3):
        launched.append(with_s3)
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr("orchestrator.stack.start._launch", launch)
    monkeypatch.setattr(stores, "is_initialised", is_there)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    assert not stores.revive_killed_store("s3://orchestrator/x")  # the stack has no such server
    write_stack(tmp_path, replace(stack, s3_url=url))
    assert not stores.revive_killed_store("s3://orchestrator/x")  # it runs
    write_stack(tmp_path, replace(stack, pid=ended_pid(), s3_url=url, host="another", boot_id="another's"))
    assert not stores.revive_killed_store("s3://orchestrator/x")  # it may run where this host cannot see it
    assert restart_killed_stack(tmp_path) is None
    write_stack(tmp_path, replace(stack, pid=ended_pid(), s3_url=url))
    assert not stores.revive_killed_store("file:///x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example.org")
    assert not stores.revive_killed_store("s3://orchestrator/x")  # on another server
    assert not launched
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    assert stores.open_existing_store("s3://orchestrator/x").uri == "s3://orchestrator/x"
    assert launched == [True]
    assert "the stack is started again" in capsys.readouterr().err


def test_stack_is_tended_while_the_store_does_not_answer():
    is_back = threading.Event()

    def look():
        assert is_back.wait(60)
        return SweepStatus(snapshot=Snapshot(sweep="x"))

    assert look_while(look, is_back.set).snapshot.sweep == "x"

    def fail():
        raise StorageError("gone")

    with pytest.raises(StorageError, match="gone"):
        look_while(fail, lambda: None)


def test_metrics_servers_of_a_stack_have_ports_of_their_own(tmp_path, monkeypatch):
    """Ray has one number for each, and a second cluster of the machine would start without, or show the first one's."""
    names = ("DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT")
    found = child_environment(tmp_path)
    assert {found[name] for name in names} == {"65536"}
    for name in names:
        monkeypatch.setenv(name, found[name])  # as a process of a stack without metrics has it
    monkeypatch.setenv(METRICS_VARIABLE, "1")
    found = child_environment(tmp_path)
    ports = [int(found[name]) for name in names]
    assert len(set(ports)) == 2
    assert all(FIRST_PORT <= port < LAST_PORT for port in ports)  # not Ray's own, which are above
    monkeypatch.setenv(names[1], "9999")
    assert child_environment(tmp_path)[names[1]] == "9999"
