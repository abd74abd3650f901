"""The supervisor of a stack over real processes that stand in for Ray and MLflow: deaths, deleted directories, ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.core.errors import ClusterError
from orchestrator.stack import supervisor as module
from orchestrator.stack.children import IDLE_TIMEOUT_S, Child, ray_directory, ray_sessions
from orchestrator.stack.description import (
    STACK_FILE,
    TOKEN_FILE,
    TOUCH_FILE,
    Stack,
    own_boot_id,
    read_description,
    read_stack,
    touch_stack,
    write_stack,
)
from orchestrator.stack.supervisor import (
    MAX_STARTS_PER_HOUR,
    WATCH_EVERY_S,
    DirectoryLock,
    Idleness,
    StartLimit,
    Supervisor,
)
from tests.waiting import pids_below, wait_until

# Writes the file that says that Ray is up, and lets a process in a session of its own run, as Ray's workers may be.
RAY = """
import os, subprocess, sys, time
home = sys.argv[1]
os.makedirs(home, exist_ok=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.path.join(home, "ray_current_cluster"), "w").close()
time.sleep(600)
"""
# The one who was started waits, another one says who it is.
MLFLOW = """
import subprocess, sys
serve = '''
import os, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    listener.accept()[0].sendall(str(os.getppid()).encode())
'''
subprocess.run([sys.executable, "-c", serve, sys.argv[1]], pass_fds=[int(sys.argv[1])])
"""
WITHIN_S = 10.0
until = partial(wait_until, deadline_s=WITHIN_S)


class Running:
    """A supervisor in a thread of this process; its servers are real."""

    def __init__(self, directory: Path) -> None:
        self.error: BaseException | None = None
        self._lock = DirectoryLock(directory)
        self._lock.__enter__()
        self.home = ray_directory(directory)
        self.supervisor = Supervisor(directory, self._lock)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except ClusterError as error:
            self.error = error
        finally:
            self._lock.__exit__()

    def end(self) -> None:
        self.supervisor.request_end()
        self.thread.join(WITHIN_S)
        assert not self.thread.is_alive()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Of a project, with fakes in the place of Ray and MLflow, and a temporary folder of its own."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def start_ray(directory: Path, home: Path, **_: int) -> Child:
        command = [sys.executable, "-c", RAY, str(ray_sessions(home))]
        return Child("ray", command, directory, dict(os.environ), temporary=home / "tmp" / "ray")

    def start_mlflow(directory: Path, home: Path, *, listener: socket.socket) -> Child:
        command = [sys.executable, "-c", MLFLOW, str(listener.fileno())]
        temporary = home / "tmp" / "mlflow"
        return Child("mlflow", command, directory, dict(os.environ), temporary=temporary, sockets=[listener])

    monkeypatch.setattr(module, "start_ray", start_ray)
    monkeypatch.setattr(module, "start_mlflow", start_mlflow)
    project = tmp_path / ".orchestrator"
    project.mkdir()
    return project


@pytest.fixture
def run(directory) -> Iterator[Callable[[], Running]]:
    started: list[Running] = []

    def start() -> Running:
        running = Running(directory)
        started.append(running)
        until(lambda: (found := read_stack(directory)) is not None and not found.trouble, "the stack is up")
        return running

    yield start
    for running in started:
        running.end()


def child_pid(running: Running, name: str) -> int:
    child = getattr(running.supervisor, f"_{name}")
    return int(child._process.pid)


def answering(directory: Path) -> int:
    """The MLflow that answers; connections wait for one. Another try if it dies while it accepts this one."""
    found = read_stack(directory)
    assert found is not None
    host, _, port = found.mlflow_url.removeprefix("http://").partition(":")
    said = b""
    while not said:
        with socket.create_connection((host, int(port)), timeout=WITHIN_S) as connection:
            said = connection.recv(20)
    return int(said)


def test_starts_are_counted_within_an_hour_and_not_for_life():
    now_s = [0.0]
    limit = StartLimit(lambda: now_s[0])
    assert all(limit.allows_start() for _ in range(MAX_STARTS_PER_HOUR))
    assert not limit.allows_start()
    now_s[0] = 3601.0
    assert limit.allows_start()


def test_stack_is_idle_by_looks_without_a_use_and_not_by_the_wall_clock(tmp_path, monkeypatch):
    now_s = [0.0]
    touch_stack(tmp_path)
    idleness = Idleness(tmp_path, lambda: now_s[0])

    def look(after_s: float) -> float:
        now_s[0] += after_s
        return idleness.look()

    hour_later_s = time.time() + 3600.0
    monkeypatch.setattr(time, "time", lambda: hour_later_s)
    assert look(WATCH_EVERY_S) == WATCH_EVERY_S
    assert look(3600.0) == 3 * WATCH_EVERY_S  # the machine was suspended, its controller too
    os.utime(tmp_path / TOUCH_FILE, (0.0, 0.0))  # the clock was put back
    assert look(WATCH_EVERY_S) == 0.0
    for _ in range(round(IDLE_TIMEOUT_S / WATCH_EVERY_S)):
        idle_s = look(WATCH_EVERY_S)
    assert idle_s == IDLE_TIMEOUT_S


def test_stack_that_ends_leaves_no_process_and_no_folder(directory, run):
    running = run()
    until(lambda: len(pids_below(running.home)) >= 4, "Ray, its worker, MLflow and its server run")
    described = read_description(directory)
    assert described is not None
    assert (described.host, described.boot_id) == (socket.gethostname(), own_boot_id())
    running.end()
    assert pids_below(running.home) == []
    assert not running.home.exists()
    assert read_description(directory) is None


def test_killed_mlflow_gives_its_port_to_the_next_one(directory, run):
    running = run()
    first = child_pid(running, "mlflow")
    assert answering(directory) == first
    before = pids_below(running.home / "tmp" / "mlflow")
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    second = answering(directory)
    assert second == child_pid(running, "mlflow") != first
    assert not set(before) & set(pids_below(running.home / "tmp" / "mlflow"))


def test_dead_ray_is_told_at_once_and_started_again_with_what_it_left_gone(directory, run):
    running = run()
    until(lambda: len(pids_below(running.home / "tmp" / "ray")) == 2, "Ray's worker runs")
    before, was = pids_below(running.home / "tmp" / "ray"), read_stack(directory)
    token = read_token(directory)
    os.kill(child_pid(running, "ray"), signal.SIGKILL)
    told: list[str] = []

    def is_again() -> bool:
        found = read_stack(directory)
        assert found is not None
        told.extend([found.trouble] if found.trouble else [])
        return found.num_ray_starts == 2

    until(is_again, "Ray is up again", pause_s=0.02)  # its trouble is there for a moment only
    assert told[0].startswith("Ray has died")
    now = read_stack(directory)
    assert now is not None
    assert was is not None
    assert now.trouble == ""
    assert (now.ray_address, now.dashboard_url) == (was.ray_address, was.dashboard_url)
    assert token != read_token(directory)  # the port was free for a moment: others may have been shown the token
    assert len(before) == 2
    assert not set(before) & set(pids_below(running.home))


def read_token(directory: Path) -> str:
    path = directory / TOKEN_FILE
    return path.read_text() if path.exists() else ""


def test_ray_that_does_not_come_up_is_tried_twice_and_told_in_one_sentence(directory, monkeypatch):
    tokens = [read_token(directory)]

    def start_ray(directory: Path, home: Path, **_: int) -> Child:
        tokens.append(read_token(directory))
        command = [sys.executable, "-c", "raise SystemExit('Traceback')"]
        return Child("ray", command, directory, dict(os.environ), temporary=home / "tmp" / "ray")

    monkeypatch.setattr(module, "start_ray", start_ray)
    running = Running(directory)
    running.thread.join(WITHIN_S)
    assert len(set(tokens)) == len(tokens) == 3  # whoever took its ports before was shown the token
    assert "did not come up in 2 tries" in str(running.error)
    assert "\n" not in str(running.error)
    assert "Traceback" not in str(running.error)
    assert pids_below(running.home) == []


def test_ray_that_comes_up_the_second_time_is_fine(directory, monkeypatch, run):
    start_ray: Callable[..., Child] = getattr(module, "start_ray")  # noqa: B009 - the fixture's
    num_starts = []

    def fail_once(directory: Path, home: Path, **ports: int) -> Child:
        num_starts.append(1)
        if len(num_starts) > 1:
            return start_ray(directory, home, **ports)
        command = [sys.executable, "-c", "raise SystemExit(1)"]
        return Child("ray", command, directory, dict(os.environ), temporary=home / "tmp" / "ray")

    monkeypatch.setattr(module, "start_ray", fail_once)
    run()
    assert len(num_starts) == 2


@pytest.mark.parametrize("is_made_again", [True, False])
def test_stack_of_a_deleted_directory_ends_by_itself_and_takes_nothing_of_the_next(directory, run, is_made_again):
    first = run()
    shutil.rmtree(directory)
    if is_made_again:
        directory.mkdir()
        second = run()
        described = read_description(directory)
    first.thread.join(WITHIN_S)
    assert not first.thread.is_alive()
    assert pids_below(first.home) == []
    assert not first.home.exists()
    if is_made_again:
        assert read_description(directory) == described
        assert second.home.exists()
        assert second.home != first.home
        assert second.thread.is_alive()


def test_description_of_another_stack_is_not_taken_back(directory, run):
    running = run()
    (directory / "stack.lock").unlink()
    other = Stack(
        **{name: getattr(read_stack(directory), name) for name in Stack.__slots__}
        | {"mlflow_url": "http://127.0.0.1:1"}
    )
    write_stack(directory, other)
    running.thread.join(WITHIN_S)
    assert (directory / STACK_FILE).exists()


def test_what_a_killed_supervisor_left_is_ended_by_the_next_one(directory, run):
    with DirectoryLock(directory):
        left = ray_directory(directory) / "tmp" / "ray"
        left.mkdir(parents=True)
        environment = {**os.environ, "TMPDIR": str(left)}
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    run()
    assert orphan.wait(WITHIN_S) == -signal.SIGKILL
