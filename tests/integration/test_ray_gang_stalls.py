"""Gangs whose workers never come up, although room is reserved for them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request, reservations, workers

TWO_CPUS = Resources(cpus=2.0)
START_S = (20.0, 90.0)
"""Longer than a gang's first reservation takes; on a busy machine the second is."""


class Frost:
    """Stops what may become, or has just become, a worker of a gang: to Ray it looks as if it took its time."""

    def __init__(self, ray_cluster) -> None:
        self._ray_cluster = ray_cluster
        self.pids: set[int] = set()

    def fall(self) -> None:
        for pid in workers(self._ray_cluster, "ray::IDLE", "ray::RayTrainWorker"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.pids.add(pid)

    def kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def frost(ray_cluster):
    made = Frost(ray_cluster)
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gang_whose_workers_never_come_up_is_lost_in_time_and_the_next_attempt_commits(
    ray_cluster, namespace, store, until, finish, frost
) -> None:
    # So it is with a gang in whose start the head died: the next head's question for its workers stays unanswered.
    before = reservations(ray_cluster)
    for number, start_s in enumerate(START_S):
        settings = RunnerSettings(entry_point=ENTRY_POINT, gang_start_s=start_s)
        backend = RayBackend(namespace, settings=settings, spare_runners=0)
        backend.announce(number + 1)
        stuck = request(store, job("stuck"), number, num_workers=2)
        backend.launch(stuck, TWO_CPUS)

        def has_ended(backend: RayBackend = backend, attempt_id: str = stuck.attempt_id) -> bool:
            if reservations(ray_cluster) - before:
                frost.fall()
            return look(backend, attempt_id).status is not AttemptStatus.RUNNING

        until(has_ended, start_s + 100.0, pause_s=0.02)
        report = look(backend, stuck.attempt_id)
        assert report.failure is not None, report
        assert report.failure.kind is FailureKind.NODE_LOST
        message = report.failure.message
        if "although no room is reserved for them" not in message:
            break
    assert "although room is reserved for them" in message
    until(lambda: not reservations(ray_cluster) - before)  # those of earlier tests may still be going
    frost.kill()
    backend.release(stuck.attempt_id)
    patient = RayBackend(namespace, settings=RunnerSettings(entry_point=ENTRY_POINT), spare_runners=0)
    patient.announce(len(START_S) + 1)
    again = request(store, job("stuck"), len(START_S), num_workers=2)
    patient.launch(again, TWO_CPUS)
    report = finish(patient, again.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report
