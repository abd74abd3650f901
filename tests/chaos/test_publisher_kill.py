"""The publisher and the MLflow server are killed again and again; MLflow ends up with every job once and whole."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import pytest

from orchestrator.storage.local import LocalStore
from orchestrator.tracking.publisher import Publisher
from tests.mlflow_servers import MlflowServer, new_database
from tests.tracking_sweeps import NUM_METRICS, BigSweep, big_sweep, problems
from tests.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]


def _count_metrics(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60) as connection:
        return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])


def _start(*arguments: str, pipe: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.publish_process", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, text=True
    )


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _has_gone_on(pid: int, database: Path, num_metrics: int) -> bool:
    return _is_gone(pid) or _count_metrics(database) > num_metrics


def _has_ended_or_gone_on(child: subprocess.Popen[str], database: Path, num_metrics: int) -> bool:
    return child.poll() is not None or _count_metrics(database) > num_metrics


def _kill_publishers(big: BigSweep, root: Path, uri: str, database: Path, *, num_kills: int) -> None:
    """Each is killed at any moment, after it has written a few runs more: some of its requests have no answer."""
    moments = Random(1)  # noqa: S311 - not a secret
    with _start(pipe=subprocess.PIPE) as forking:
        assert forking.stdin is not None
        assert forking.stdout is not None
        for _ in range(num_kills):
            seen = _count_metrics(database) + moments.randrange(8 * NUM_METRICS)
            print(root, big.plan.sweep, uri, file=forking.stdin, flush=True)
            pid = int(forking.stdout.readline())
            wait_until(partial(_has_gone_on, pid, database, seen), "it never published anything")
            assert not _is_gone(pid), "it ended before it was killed"
            os.kill(pid, signal.SIGKILL)
            wait_until(partial(_is_gone, pid), "it is killed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("over_http", "num_jobs", "num_kills"), [(False, 300, 5), (True, 400, 20)], ids=["database", "server"]
)
def test_publisher_killed_again_and_again_publishes_every_job_once(tmp_path, over_http, num_jobs, num_kills):
    database, root = tmp_path / "mlflow.db", tmp_path / "store"
    big = big_sweep(num_jobs, store=LocalStore(root))
    uri = new_database(database)
    with MlflowServer(tmp_path, uri) if over_http else nullcontext() as server:
        uri = uri if server is None else server.url
        _kill_publishers(big, root, uri, database, num_kills=num_kills)
        assert Publisher(big.store, uri).publish_once("big")
    assert problems(database, big) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_publisher_server_killed_again_and_again_loses_and_repeats_nothing(tmp_path):
    """Over HTTP, the server dies in the middle of calls and comes back on the same port."""
    database, root, num_jobs, num_kills = tmp_path / "mlflow.db", tmp_path / "store", 150, 5
    big = big_sweep(num_jobs, store=LocalStore(root))
    server = MlflowServer(tmp_path, new_database(database))
    with server:
        child = _start(str(root), big.plan.sweep, server.url)
        kills = 0
        while kills < num_kills and child.poll() is None:
            seen = _count_metrics(database)
            wait_until(partial(_has_ended_or_gone_on, child, database, seen + 100), "the publisher makes no progress")
            server.kill()
            kills += 1
            server.start()
            server.wait_until_ready()
        assert child.wait(timeout=DEADLINE_S) == 0
    assert kills == num_kills
    assert problems(database, big) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_publisher_beside_a_server_that_is_killed_on_the_same_database(tmp_path):
    """As in the background stack: the publisher writes the database, and a server on it serves pages or dies."""
    database, root = tmp_path / "mlflow.db", tmp_path / "store"
    big = big_sweep(400, store=LocalStore(root))
    server = MlflowServer(tmp_path, new_database(database))
    done = threading.Event()
    kills = 0

    def keep_killing() -> None:
        nonlocal kills
        while not done.is_set():
            server.start()
            done.wait(1.5)  # any moment of its life will do
            server.kill()
            kills += 1

    killer = threading.Thread(target=keep_killing)
    killer.start()
    try:
        assert Publisher(big.store, f"sqlite:///{database}").publish_once("big")
    finally:
        done.set()
        killer.join()
    assert kills >= 3
    assert problems(database, big) == []
