"""What a gang on a real Ray cluster tells of its nodes; test_ray_controller.py has what a controller records of one."""

from __future__ import annotations

import pytest

from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.metrics.machine import describe_machine
from tests.integration.ray_jobs import ENTRY_POINT, job, request

SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)


@pytest.mark.slow
def test_gang_tells_the_nodes_of_all_ranks_and_what_they_are(namespace, store, gate, finish, until):
    backend = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    backend.announce(1)
    attempt = request(store, job("gang", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, Resources(cpus=2.0))
    until(lambda: backend.observe([attempt.attempt_id])[0].worker_nodes)
    report = backend.observe([attempt.attempt_id])[0]
    assert report.worker_nodes == (report.node, report.node)
    assert report.machines[report.node] == describe_machine()
    gate.open()
    finish(backend, attempt.attempt_id)
