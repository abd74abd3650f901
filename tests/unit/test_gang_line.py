"""Calls of a gang's workers to their runner: failed ones are tolerated for a while, and the first one compares code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from orchestrator.backends.ray import code_digest as digest_module
from orchestrator.backends.ray.gang import mailbox as mailbox_module
from orchestrator.backends.ray.gang import worker
from orchestrator.backends.ray.gang.mailbox import GangMailbox, GangShape
from orchestrator.backends.ray.gang.worker import TOLERATED_S, OtherCodeError, RunnerLine, exchange_every_s
from orchestrator.backends.ray.runner.attempt import AttemptRun
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.activity import RankActivity
from orchestrator.core.contract import JobFailure, Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.state.failure_policy import signature_of
from orchestrator.testing.memory_store import MemoryStore
from tests.integration.ray_jobs import job, request

OURS, OTHER = "0123456789abcdef", "fedcba9876543210"
FAILED_CALLS: list[Callable[[], Exception]] = [
    lambda: ActorUnavailableError("RPC error: Connection reset by peer rpc_code: 14", None),
    lambda: GetTimeoutError("Get timed out: some object(s) not ready."),
]


@dataclass
class FakeRay:
    """Answers calls, or fails them, on a clock that the test moves."""

    now_s: float = 1000.0
    error: Exception | None = None
    answer: dict[str, Any] = field(default_factory=lambda: {"stop": False})
    heard: list[dict[str, Any]] = field(default_factory=list)
    util: Any = field(default_factory=lambda: SimpleNamespace(get_current_placement_group=lambda: None))

    def get_actor(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(exchange=SimpleNamespace(remote=lambda *call: call[2]))

    def get(self, news: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.heard.append(news)
        return self.answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(worker, "ray", made)
    monkeypatch.setattr(worker, "own_digest", lambda: OURS)
    monkeypatch.setattr(worker, "_place", lambda: {"node_id": "n", "gpus": []})
    clock = SimpleNamespace(monotonic=lambda: made.now_s, sleep=lambda s: setattr(made, "now_s", made.now_s + s))
    monkeypatch.setattr(worker, "time", clock)
    return made


@pytest.fixture
def line(fake: FakeRay) -> RunnerLine:
    return RunnerLine("runner", "namespace", "k.1", 3, every_s=10.0)


@pytest.mark.parametrize("error", FAILED_CALLS)
def test_failed_calls_stop_no_rank_for_two_minutes_and_what_they_carried_is_told_again(
    fake: FakeRay, line: RunnerLine, error: Callable[[], Exception]
) -> None:
    fake.error = error()
    assert not line.send({"process": "here"})
    fake.now_s += TOLERATED_S - 1.0
    line.send({"progress": 1})
    assert not line.must_stop.is_set()
    fake.error = None
    line.send({"progress": 2})
    assert fake.heard == [{"process": "here", "progress": 2}]
    fake.error = error()
    fake.now_s += TOLERATED_S - 1.0  # counted from the last call that was heard
    line.send({"progress": 3})
    assert not line.must_stop.is_set()
    fake.now_s += 1.0
    line.send({"progress": 4})
    assert line.must_stop.is_set()


def test_dead_runner_stops_a_rank_at_once(fake: FakeRay, line: RunnerLine) -> None:
    fake.error = ActorDiedError()
    line.send({"progress": 1})
    assert line.must_stop.is_set()


def test_failure_is_told_until_it_is_heard_or_the_runner_given_up(fake: FakeRay, line: RunnerLine) -> None:
    failure = JobFailure(attempt_id="k.1", key="k", kind=FailureKind.UNKNOWN, message="a bug")
    fake.error = FAILED_CALLS[0]()
    line.report_failure(failure)
    assert fake.now_s >= 1000.0 + TOLERATED_S
    fake.error = None
    line.report_failure(failure)  # once only
    assert fake.heard == []


def test_ranks_above_the_first_call_every_ten_seconds() -> None:
    assert [exchange_every_s(rank) for rank in (0, 1, 63)] == [0.5, 10.0, 10.0]


def test_worker_says_its_code_in_its_first_call_and_ends_where_that_is_refused(fake: FakeRay, line: RunnerLine) -> None:
    fake.answer = {"stop": True, "refusal": "rank 3 runs other code"}
    with pytest.raises(OtherCodeError, match="rank 3 runs other code"), line:
        pass
    assert fake.heard[0]["digest"] == OURS


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> AttemptRun:
    monkeypatch.setattr(digest_module, "code_digest", lambda: OURS)
    attempt = request(MemoryStore(), job("gang"), num_workers=3)
    return AttemptRun(attempt, GangShape(num_workers=3, total=Resources(cpus=3.0)))


def test_work_of_all_ranks_shows_in_the_progress_of_the_gang(run: AttemptRun) -> None:
    """Also while the first one, whose progress it is, waits for others."""
    for rank, num_done in ((0, 2), (1, 3), (1, 4)):
        activity = RankActivity()
        activity.num_done = num_done
        run.on_report(rank, {"progress": {"phase": "setup"}, "activity": activity.to_json()}, OURS)
    assert run.report()["done"] == 6


def test_line_tells_what_its_rank_has_done(line: RunnerLine, fake: FakeRay) -> None:
    line.activity.tick()
    line.tell()
    assert fake.heard[0]["activity"]["done"] == 1


def test_readers_of_progress_know_no_field_but_those_of_the_first_version(line: RunnerLine, fake: FakeRay) -> None:
    """They would refuse it: a runner, its workers and the controller may have code of different versions."""
    line.tell()
    known = {"phase", "step", "total_steps", "metrics", "images_per_s", "step_s", "eta_s", "counters"}
    assert set(fake.heard[0]["progress"]) == known
    later = {"phase": "train", "step": 3, "later": 1}
    assert Progress.from_json(later) == Progress(phase="train", step=3)


def first_call(rank: int, digest: str | None) -> dict[str, Any]:
    said = {} if digest is None else {"digest": digest, "place": {"node_id": f"node{rank}", "gpus": []}}
    return {"placement_group": "", **said}


@pytest.mark.parametrize("digest", [OTHER, None, ""])
def test_worker_of_other_or_older_code_is_refused_and_its_node_is_blamed(run: AttemptRun, digest: str | None) -> None:
    assert run.on_report(0, first_call(0, OURS), OURS) == ""
    refusal = run.on_report(1, first_call(1, digest), OURS)
    assert f"and not {OURS} as the others" in refusal
    assert run.on_report(2, first_call(2, OURS), OURS) == ""
    assert isinstance(run.gang, GangMailbox)
    failure = run.gang.primary_failure()
    assert failure is not None
    assert (failure.kind, failure.rank, failure.node_id) == (
        FailureKind.NODE_LOST, 1, "node1" if digest is not None else "",
    )  # fmt: skip
    found = signature_of(failure.message)
    assert found is not None
    assert found.blames_node
    assert "digest" in found.advice


def test_all_workers_of_the_code_on_disk_may_work_for_a_runner_that_started_before_it_changed(run: AttemptRun) -> None:
    for rank in range(2):
        assert run.on_report(rank, first_call(rank, OURS), OTHER) == ""
    assert run.on_report(2, first_call(2, OTHER), OTHER)  # two versions would train one model


@pytest.mark.parametrize(("is_asked", "num_lost"), [(False, 1), (False, 0), (True, 1)])
def test_gang_that_stops_because_a_rank_lost_its_runner_is_not_said_to_have_been_asked(
    run: AttemptRun, monkeypatch: pytest.MonkeyPatch, is_asked: bool, num_lost: int
) -> None:
    for now_s, ranks in ((1000.0, range(3)), (1000.0 + TOLERATED_S, range(3 - num_lost))):
        monkeypatch.setattr(mailbox_module, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        for rank in ranks:
            place = {"place": {"node_id": f"node{rank}", "gpus": []}}
            run.on_report(rank, {**place, "activity": RankActivity().to_json()}, OURS)
    if is_asked:
        run.stop()
    failure = JobFailure(attempt_id="k.1", key="k", kind=FailureKind.PREEMPTED, message="stopped at step 7 as asked")
    monkeypatch.setattr(AttemptRun, "_run_gang", lambda *_: failure)
    run.execute(cast("Any", None), RunnerSettings(entry_point="none:none"), cast("Any", None))
    told = run.report()["failure"]
    if is_asked or not num_lost:
        assert (told["kind"], told["message"]) == ("preempted", failure.message)
    else:
        assert (told["kind"], told["rank"], told["node_id"]) == ("node_lost", 2, "node2")
        assert told["message"].startswith("rank(s) 2 of ")
