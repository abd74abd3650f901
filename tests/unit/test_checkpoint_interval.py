"""How often to save: the formula, the clock, and requests from before there was a choice."""

import math

import pytest

from orchestrator.core.clocks import young_interval_s
from orchestrator.core.contract import Execution, JobRequest
from orchestrator.core.job_kinds import JobKind
from workloads.checkpoint.writer import AutoInterval


def test_young_interval_is_the_formula() -> None:
    assert young_interval_s(2.0, 3600.0) == 120.0


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.1, 1e4), (2.0, 3600.0), (30.0, 86400.0)])
def test_young_interval_loses_less_than_others(cost_s: float, mtbf_s: float) -> None:
    def lost(interval_s: float) -> float:
        """Share of time that goes into checkpoints and into work done twice, to first order."""
        return cost_s / interval_s + interval_s / (2 * mtbf_s)

    best = lost(young_interval_s(cost_s, mtbf_s))
    assert all(best <= lost(young_interval_s(cost_s, mtbf_s) * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_auto_interval_first_is_due_at_once_and_the_next_after_the_interval() -> None:
    interval = AutoInterval(mtbf_s=3600.0)
    assert interval.is_due(cost_s=0.0, now_s=5.0)
    interval.saved(5.0)
    assert not interval.is_due(cost_s=2.0, now_s=math.nextafter(125.0, 0.0))
    assert interval.is_due(cost_s=2.0, now_s=125.0)


def test_execution_written_without_an_automatic_interval_is_read_as_none() -> None:
    request = JobRequest(
        attempt_id="a.1",
        attempt_number=1,
        sweep="s",
        job="pretrain/x",
        key="a",
        kind=JobKind.PRETRAIN,
        identity={},
        store_uri="file:///store",
    )
    document = request.to_json()
    document["execution"] = {"num_threads": 2, "checkpoint_every_steps": 5}
    assert JobRequest.from_json(document).execution == Execution(num_threads=2, checkpoint_every_steps=5)
