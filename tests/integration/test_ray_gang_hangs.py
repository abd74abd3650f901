"""Gangs in which some ranks wait for one that does not come: real Ray Train, gloo, and a process stopped for real."""

from __future__ import annotations

import json
import os
import signal

import pytest

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.storage.layout import flight_record_name, log_name
from orchestrator.storage.logs import read_log
from tests.integration.hang_jobs import ENTRY_POINT
from tests.integration.ray_jobs import job, look, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TWO_CPUS = Resources(cpus=2.0)
LIMIT_S = 4.0
SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1, train_hang_s=LIMIT_S)
UP_WITHIN_S = 150.0
"""Ray Train, and torch in two workers, on a busy machine."""


def _launch(backend, store, tmp_path, name: str, doing: str):
    attempt = request(store, job(name, folder=str(tmp_path), doing=doing), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    return attempt


def _logged(store, attempt, rank: int) -> str:
    return log_name("scripted", attempt.job, 0, rank, key=attempt.key)


def test_gang_with_a_rank_that_does_not_enter_ends_and_names_it_with_records_and_stacks(
    backend, store, finish, tmp_path, ray_cluster, until
) -> None:
    attempt = _launch(backend, store, tmp_path, "late", "work")
    report = finish(backend, attempt.attempt_id)
    assert report.failure is not None, report
    assert report.failure.kind is FailureKind.HANG
    assert "rank 1 on node" in report.failure.message
    assert report.failure.rank == 1
    assert report.node
    assert "did not enter it: it is at operation 20 (sum), doing: work" in report.failure.message
    for rank in range(2):
        record = json.loads(store.get(flight_record_name(_logged(store, attempt, rank))))
        assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    until(lambda: b"hang_jobs.py" in read_log(store, _logged(store, attempt, 1)))
    assert b"all_reduce" in read_log(store, _logged(store, attempt, 0))
    until(lambda: not _alive(tmp_path))  # its reservation is given back, and its processes with it


def test_gang_with_a_stopped_rank_ends_and_says_that_it_is_silent(backend, store, tmp_path, until) -> None:
    attempt = _launch(backend, store, tmp_path, "stopped", "data")
    until(lambda: (tmp_path / "pid1").exists() and (tmp_path / "pid1").read_text(), UP_WITHIN_S)
    stopped = int((tmp_path / "pid0").read_text())
    # Until rank 0 has said that it trains, the limit is that of the setup.
    until(lambda: _step(backend, attempt.attempt_id) == 2)
    os.kill(stopped, signal.SIGSTOP)  # in the collective operation: rank 1 has an excuse and is waited for
    (tmp_path / "gate").touch()
    # A stopped rank is given time to answer, and its stacks time to come.
    until(lambda: look(backend, attempt.attempt_id).status is not AttemptStatus.RUNNING, 2 * UP_WITHIN_S)
    report = look(backend, attempt.attempt_id)
    assert report.failure is not None, report
    assert report.failure.kind is FailureKind.HANG
    assert "rank 0 on node" in report.failure.message
    assert "does not report any more" in report.failure.message
    assert "rank 1" not in report.failure.message.partition("; the stacks")[0]
    until(lambda: not _alive(tmp_path))


def test_rank_that_waits_for_data_is_waited_for_and_the_gang_commits(backend, store, finish, tmp_path, until) -> None:
    attempt = _launch(backend, store, tmp_path, "patient", "data")
    until((tmp_path / "pid1").exists, UP_WITHIN_S)
    with pytest.raises(TimeoutError):
        _wait_until_ended(backend, attempt.attempt_id, until, 4 * LIMIT_S)
    (tmp_path / "gate").touch()
    assert finish(backend, attempt.attempt_id).status is AttemptStatus.SUCCEEDED


def _step(backend, attempt_id: str) -> int:
    progress = look(backend, attempt_id).progress
    return progress.step if progress is not None else 0


def _wait_until_ended(backend, attempt_id: str, until, limit_s: float) -> None:
    try:
        until(lambda: look(backend, attempt_id).status is not AttemptStatus.RUNNING, limit_s)
    except BaseException as error:  # `until` fails the test; here it is what is asked for
        raise TimeoutError from error


def _alive(folder) -> list[int]:
    return [pid for rank in range(2) if _is_alive(pid := int((folder / f"pid{rank}").read_text()))]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
