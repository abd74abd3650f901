"""A gang whose node dies before its workers are up."""

from __future__ import annotations

from orchestrator.backends.protocol import AttemptStatus, Placement
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request

SETTINGS = RunnerSettings(entry_point=ENTRY_POINT)
GONE, GONE_ID = "gone/00000000", "00000000" * 7


def test_gang_that_waits_for_a_node_that_is_gone_is_lost_at_once(backend, store, until):
    backend._capacity._ids[GONE] = GONE_ID  # it was alive when the scheduler chose it
    attempt = request(store, job("gang"), num_workers=2)
    backend.launch(attempt, Resources(cpus=2.0), Placement(nodes=(GONE, GONE)))
    until(lambda: look(backend, attempt.attempt_id).status is not AttemptStatus.RUNNING, 50)
    report = look(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.LOST
    assert GONE_ID in report.lost_reason
