"""The publishing loop against a scripted publisher, in virtual time."""

from __future__ import annotations

import pytest

from orchestrator.tracking.loop import publish_until_done
from orchestrator.tracking.server import TrackingError


class ScriptedPublisher:
    """Answers ``publish_once`` from a script of (sweep has ended, answer or outage)."""

    def __init__(self, *script: tuple[bool, bool | None]) -> None:
        self._script = list(script)
        self.num_calls = 0
        self.num_written = 0

    def has_ended(self, sweep: str) -> bool:
        return self._script[0][0]

    def publish_once(self, sweep: str) -> bool:
        self.num_calls += 1
        answer = self._script.pop(0)[1]
        if answer is None:
            raise TrackingError("no route to MLflow")
        return answer


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def wait(self, duration_s: float) -> None:
        self.pauses.append(duration_s)
        self.now += duration_s

    def clock(self) -> float:
        return self.now


def _loop(publisher: ScriptedPublisher, *, give_up_s: float | None = None) -> VirtualTime:
    time = VirtualTime()
    publish_until_done(publisher, "sample", poll_s=2.0, give_up_s=give_up_s, wait=time.wait, clock=time.clock)
    return time


def test_loop_ended_and_published_sweep_returns_at_once():
    publisher = ScriptedPublisher((True, True))
    assert _loop(publisher).pauses == []
    assert publisher.num_calls == 1


def test_loop_running_sweep_is_polled_until_it_ends():
    publisher = ScriptedPublisher((False, True), (False, True), (True, True))
    assert _loop(publisher).pauses == [2.0, 2.0]


def test_loop_unpublished_rest_is_tried_again_soon():
    publisher = ScriptedPublisher((True, False), (True, True))
    pauses = _loop(publisher).pauses
    assert len(pauses) == 1
    assert pauses[0] < 1.0


def test_loop_outage_is_sat_out_with_growing_pauses():
    publisher = ScriptedPublisher((True, None), (True, None), (True, None), (True, True))
    assert _loop(publisher).pauses == [2.0, 4.0, 8.0]


def test_loop_pauses_start_small_again_after_an_outage():
    publisher = ScriptedPublisher((False, None), (False, None), (False, True), (False, None), (True, True))
    assert _loop(publisher).pauses == [2.0, 4.0, 2.0, 2.0]


def test_loop_server_that_works_now_and_then_is_not_given_up():
    class Flapping(ScriptedPublisher):
        def publish_once(self, sweep: str) -> bool:
            self.num_written += 1
            return super().publish_once(sweep)

    assert _loop(Flapping(*[(True, None)] * 5, (True, True)), give_up_s=5.0).pauses == [2.0] * 5


def test_loop_outage_beyond_the_limit_raises():
    publisher = ScriptedPublisher(*[(True, None)] * 10)
    with pytest.raises(TrackingError, match="no route"):
        _loop(publisher, give_up_s=5.0)
    assert publisher.num_calls == 3
