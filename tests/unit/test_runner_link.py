"""The calls of a controller to one runner: what follows from an answer, and from one that does not arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from orchestrator.backends.protocol import WAITING_PHASES, AttemptStatus
from orchestrator.backends.ray import link as link_module
from orchestrator.backends.ray.backend import START_TIMEOUT_S, RayBackend
from orchestrator.backends.ray.link import LinkState, PendingKill, RunnerLink, poll_links, report_of
from orchestrator.backends.ray.runner.runner import RunnerAnswer, RunnerDescription
from orchestrator.core.contract import JobRequest, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.testing.memory_store import MemoryStore
from tests.integration.ray_jobs import job, request

OLD, NEW = "0123456789abcdef", "fedcba9876543210"


class FakeRunner:
    """Notes calls; the test says what each of them answers, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return len(self.calls) - 1

        return SimpleNamespace(remote=remote)

    def answer(self, link: RunnerLink, name: str, answer: Any) -> None:
        """Answer the last call of a method, and let the link take it."""
        self.answers[max(number for number, call in enumerate(self.calls) if call[0] == name)] = answer
        poll_links([link])

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of a method."""
        return [arguments for called, arguments in self.calls if called == name]

    # What the link uses of Ray

    def wait(self, refs: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return [ref for ref in refs if ref in self.answers], []

    def kill(self, _handle: object, *, no_restart: bool) -> None:
        self.calls.append(("kill", ()))

    def get(self, ref: int) -> Any:
        if isinstance(self.answers[ref], Exception):
            raise self.answers[ref]
        return self.answers[ref]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    made = FakeRunner()
    monkeypatch.setattr(link_module, "ray", SimpleNamespace(wait=made.wait, get=made.get, kill=made.kill))
    return made


@pytest.fixture
def link(runner: FakeRunner) -> RunnerLink:
    handle: Any = runner
    made = RunnerLink("runner", Resources(), handle, LinkState.CREATED)
    made.digests, made.digests_now = (OLD,), lambda: (OLD, NEW)
    made.announce(3)
    return made


def described(digest: str) -> dict[str, Any]:
    return RunnerDescription(name="runner", pid=1, node_id="node", epoch=3, digest=digest).to_json()


def unavailable() -> Exception:
    return ActorUnavailableError("RPC error: Connection reset by peer rpc_code: 14", None)


@pytest.mark.parametrize("is_introduced_first", [True, False])
def test_runner_that_came_up_with_newer_code_than_its_first_call_knew_is_called_again(
    link: RunnerLink, runner: FakeRunner, is_introduced_first: bool
) -> None:
    """Its files changed on disk after the call had been queued; the answers may arrive in any order."""
    attempt = request(MemoryStore(), job("sleep"))
    link.start(attempt)
    answers: list[tuple[str, Any]] = [("announce", described(NEW)), ("start", RunnerAnswer.OTHER_CODE)]
    for name, answer in answers if is_introduced_first else reversed(answers):
        runner.answer(link, name, answer)
    assert [call[-1] for call in runner.of("start")] == [[OLD], [OLD, OLD, NEW]]
    runner.answer(link, "start", RunnerAnswer.ACCEPTED)
    assert (link.is_started, link.refused, link.attempt_id) == (True, None, attempt.attempt_id)
    assert runner.of("report"), "from now on it is asked for news, and its end is noticed"


def test_runner_is_waited_for_anew_after_each_epoch_and_not_after_each_call(
    link: RunnerLink, runner: FakeRunner
) -> None:
    link.since_s -= 100.0
    before_s = link.since_s
    runner.answer(link, "announce", unavailable())
    assert (len(runner.of("announce")), link.since_s) == (2, before_s)
    link.announce(4)
    assert link.since_s > before_s


def test_attempt_has_no_time_of_placement_before_its_runner_reports_one(link: RunnerLink, runner: FakeRunner) -> None:
    """While the store was away it may have run for hours: 0 s, once recorded, would stay."""
    attempt = request(MemoryStore(), job("sleep"))
    link.start(attempt)
    runner.answer(link, "announce", described(OLD))
    runner.answer(link, "start", RunnerAnswer.ACCEPTED)
    assert report_of(attempt.attempt_id, link).placed_for_s is None
    runner.answer(link, "report", {"status": "running", "placed_for_s": 7200.0})
    assert report_of(attempt.attempt_id, link).placed_for_s == 7200.0


def test_release_that_is_lost_is_sent_again_and_goes_with_every_start_until_one_is_accepted(
    link: RunnerLink, runner: FakeRunner
) -> None:
    """A runner that holds an ended attempt never leaves, and keeps its GPUs."""
    first, second = (request(MemoryStore(), job("sleep"), number) for number in (1, 2))
    runner.answer(link, "announce", described(OLD))
    link.start(first)
    runner.answer(link, "start", RunnerAnswer.ACCEPTED)
    link.release()
    runner.answer(link, "release", unavailable())
    assert runner.of("release") == [(first.attempt_id, 3)] * 2
    link.start(second)
    runner.answer(link, "start", unavailable())
    assert [call[2] for call in runner.of("start")] == ["", first.attempt_id, first.attempt_id]
    runner.answer(link, "start", RunnerAnswer.ACCEPTED)
    runner.answer(link, "release", unavailable())
    assert len(runner.of("release")) == 2, "the runner has released it with the start"


@pytest.mark.parametrize(("answer", "is_killed"), [(RunnerAnswer.RUNNING, True), (RunnerAnswer.ACCEPTED, False)])
def test_runner_that_still_runs_an_attempt_to_be_released_is_killed(
    link: RunnerLink, runner: FakeRunner, answer: RunnerAnswer, is_killed: bool
) -> None:
    """A suspended controller gave it the attempt, whose loss another one had recorded: nobody waits for its end."""
    runner.answer(link, "announce", described(OLD))
    link.start(request(MemoryStore(), job("sleep")))
    runner.answer(link, "start", RunnerAnswer.ACCEPTED)
    link.release()
    runner.answer(link, "release", answer)
    assert (link.state is LinkState.GONE) is is_killed
    assert len(runner.of("kill")) == is_killed


@pytest.mark.parametrize(
    ("kind", "has_died", "node"),
    [(FailureKind.NODE_LOST, False, ""), (FailureKind.NODE_LOST, True, "n1"), (FailureKind.HANG, False, "n1")],
)
def test_attempt_that_we_end_counts_against_its_node_only_if_it_hung_or_died_before(
    link: RunnerLink, runner: FakeRunner, kind: FailureKind, has_died: bool, node: str
) -> None:
    """What does not follow a pause, a drain or a cancel in time would else exclude a healthy node."""
    runner.answer(link, "announce", described(OLD))
    attempt = request(MemoryStore(), job("sleep"))
    link.start(attempt)
    runner.answer(link, "start", RunnerAnswer.ACCEPTED)
    link.node, link.pending_kill = "n1", PendingKill(reason="asked to stop", kind=kind)
    if has_died:
        runner.answer(link, "report", ActorDiedError())
    else:
        link.kill("asked to stop")
    assert link.state is LinkState.GONE
    assert report_of(attempt.attempt_id, link).node == node


class Placer:
    """A backend that notes what it would place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend, self.placed = RayBackend("namespace"), list[JobRequest]()
        monkeypatch.setattr(self.backend, "_place", lambda request, *_: self.placed.append(request))

    def check(self, link: RunnerLink, *, later_s: float = 0.0) -> None:
        """What a poll does of a link, so many seconds after the last one."""
        link.occupied_since_s -= later_s
        self.backend._check_link(link)


@pytest.fixture
def placer(monkeypatch: pytest.MonkeyPatch) -> Placer:
    return Placer(monkeypatch)


def test_idle_runner_that_does_not_answer_when_it_gets_an_attempt_is_ended_and_another_one_gets_it(
    link: RunnerLink, runner: FakeRunner, placer: Placer
) -> None:
    """A deadlock or a stopped process: it would hold its GPUs, and the job would be shown as placing, for days."""
    attempt = request(MemoryStore(), job("sleep"))
    runner.answer(link, "announce", described(OLD))
    link.start(attempt)
    placer.check(link, later_s=0.5 * START_TIMEOUT_S)
    assert (link.state, placer.placed) == (LinkState.READY, [])
    placer.check(link, later_s=START_TIMEOUT_S)
    assert (link.state, len(runner.of("kill")), placer.placed) == (LinkState.GONE, 1, [attempt])


@pytest.mark.parametrize("answer", [RunnerAnswer.ACCEPTED, None])
def test_runner_that_took_its_attempt_or_came_up_with_it_is_not_ended_for_its_silence(
    link: RunnerLink, runner: FakeRunner, placer: Placer, answer: RunnerAnswer | None
) -> None:
    """A new one may have waited for its node for hours, and its first answers arrive one after the other."""
    attempt = request(MemoryStore(), job("sleep"))
    if answer is None:
        link.start(attempt)
    runner.answer(link, "announce", described(OLD))
    if answer is not None:
        link.start(attempt)
        runner.answer(link, "start", answer)
    placer.check(link, later_s=2 * START_TIMEOUT_S)
    assert (link.state, placer.placed) == (LinkState.READY, [])


def test_attempt_that_was_taken_and_never_reported_can_be_found_to_hang(link: RunnerLink, runner: FakeRunner) -> None:
    attempt = request(MemoryStore(), job("sleep"))
    runner.answer(link, "announce", described(OLD))
    link.start(attempt)
    phases = []
    for answer in (None, RunnerAnswer.ACCEPTED):
        if answer is not None:
            runner.answer(link, "start", answer)
        progress = report_of(attempt.attempt_id, link).progress
        assert progress is not None
        phases.append(progress.phase in WAITING_PHASES)
    assert phases == [True, False]


def _stopped_before_it_was_taken(link: RunnerLink, runner: FakeRunner, placer: Placer) -> JobRequest:
    attempt = request(MemoryStore(), job("sleep"))
    runner.answer(link, "announce", described(OLD))
    link.start(attempt)
    placer.backend._attempts[attempt.attempt_id] = link
    placer.backend.stop(attempt.attempt_id)
    return attempt


def test_attempt_that_was_asked_to_end_starts_on_no_other_runner_when_its_own_dies(
    link: RunnerLink, runner: FakeRunner, placer: Placer
) -> None:
    attempt = _stopped_before_it_was_taken(link, runner, placer)
    runner.answer(link, "start", ActorDiedError())
    for _ in range(2):
        placer.check(link)
    assert (link.state, placer.placed) == (LinkState.GONE, [])
    assert report_of(attempt.attempt_id, link).status is AttemptStatus.LOST


def test_attempt_that_is_ended_by_force_before_its_runner_took_it_starts_on_no_other_one(
    link: RunnerLink, runner: FakeRunner, placer: Placer
) -> None:
    """Its sweep is cancelled: it has no successor under the same id."""
    attempt = _stopped_before_it_was_taken(link, runner, placer)
    placer.check(link, later_s=2 * START_TIMEOUT_S)
    assert link.state is LinkState.READY, "it is asked to end, and has its grace for that"
    placer.backend.kill(attempt.attempt_id, "it had 120 s to end and did not")
    for _ in range(2):
        placer.check(link)
    assert (link.state, placer.placed) == (LinkState.GONE, [])
    report = report_of(attempt.attempt_id, link)
    assert (report.status, report.lost_reason) == (AttemptStatus.LOST, "it had 120 s to end and did not")
