"""What is told of a runner whose process, or whose whole node, was killed."""

from __future__ import annotations

import os
import signal

import pytest

from orchestrator.backends.protocol import AttemptStatus, Placement
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
GPU = Resources(cpus=1.0, gpus=1.0)


@pytest.fixture
def running(namespace, nodes, store, gate, running_pid):
    """A backend, and the id, process and node of an attempt that runs on a node of its own."""
    node = nodes.start(cpus=2, gpus=1)
    backend = RayBackend(namespace, settings=RunnerSettings(entry_point=ENTRY_POINT), spare_runners=0)
    backend.announce(1)
    attempt = request(store, job("doomed", gate=str(gate.path)))
    backend.launch(attempt, GPU, Placement(nodes=(node,)))
    return backend, attempt.attempt_id, running_pid(backend, attempt.attempt_id), node


def test_killed_process_is_told_as_such_and_its_node_as_alive(running, finish):
    backend, attempt_id, pid, node = running
    progress = look(backend, attempt_id).progress
    assert progress is not None
    assert (progress.metrics["sees_gpus"], progress.metrics["has_gpu"]) == (True, True)
    os.kill(pid, signal.SIGKILL)
    report = finish(backend, attempt_id)
    assert (report.status, report.node) == (AttemptStatus.LOST, node)
    told = f"its process was killed (as by signal 9) or crashed, while node '{node}' was alive ("
    assert report.lost_reason.startswith(told), report


def test_killed_node_is_told_to_have_died(running, nodes, until):
    backend, attempt_id, _, node = running
    nodes.kill(node)
    until(lambda: look(backend, attempt_id).status is not AttemptStatus.RUNNING, 120)
    report = look(backend, attempt_id)
    assert (report.status, report.node) == (AttemptStatus.LOST, node)
    assert report.lost_reason.startswith(f"node '{node}' died: "), report
