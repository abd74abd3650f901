"""Attempts that were launched before the cluster had room for them: what they cost, and what is told of them."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.backends.protocol import AttemptReport, AttemptStatus
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.link import LinkState
from orchestrator.backends.ray.runner.runner import RunnerSite
from orchestrator.backends.simulated import (
    ClusterSpec,
    Fate,
    Hazards,
    JobWork,
    NodeGroup,
    SimulatedBackend,
    SimulatedCluster,
    SimulatedEnding,
    VirtualClock,
)
from orchestrator.controller.attempt_outcomes import judge_report
from orchestrator.controller.controller import Controller
from orchestrator.controller.node_pricing import NodePricing
from orchestrator.core.contract import JobFailure, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import Command, LaunchJob, PreemptAttempt, StopAttempt
from orchestrator.scheduling.occupancy import ROOM_KEPT_S
from orchestrator.services.status import SweepStatus, present_document, running_lines, used_hours
from orchestrator.simulation.forecast import ControllerLoop, Pace
from orchestrator.state import events
from orchestrator.state.failure_policy import RetryAt, judge, observed_mtbf_s
from orchestrator.state.fold import fold
from orchestrator.state.snapshot import Attempt, JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import load_snapshot, submit
from orchestrator.testing.memory_store import MemoryStore
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, done, launched, of_type, plan_of

GANG = gpu_job("pretrain/gang", gpus=16)
ID = f"{GANG.key}.1"
PRIOR_S = 1000.0


def waiting(*journal: events.Event) -> Snapshot:
    return after(plan_of("s", GANG), launched(GANG, awaits_room=True, at_s=10.0), *journal)


def placed(at_s: float, since_s: float = 0.0) -> events.Event:
    return events.AttemptPlaced(at_s=at_s, job=GANG.name, attempt_id=ID, nodes=(), lots=(), since_s=since_s)


def test_nodes_of_an_attempt_that_waited_are_those_where_it_was_placed_and_chosen_ones_stay() -> None:
    nodes = ("node-0001", "node-0001", "node-0000", "node-0001")
    gang, next_one = gpu_job("pretrain/four", gpus=4), gpu_job("pretrain/next", gpus=4)
    here, there = gpu_job("probe/here", gpus=4), gpu_job("probe/there", gpus=4)
    told: dict[str, Any] = {"at_s": 5.0, "job": gang.name, "attempt_id": f"{gang.key}.1", "lots": ()}
    journal = (
        launched(here, *["node-0000"] * 4),
        launched(there, *["node-0001"] * 4),
        launched(gang, awaits_room=True, at_s=2.0),
    )
    plan = plan_of("s", gang, here, there, next_one)
    # Both nodes are half full without it: which one has room left depends on where it was placed.
    for node, other in (("node-0000", "node-0001"), ("node-0001", "node-0000")):
        snapshot = after(plan, *journal, events.AttemptPlaced(**told, nodes=(node,) * 4))
        (command,) = of_type(decide(snapshot, nodes=gpu_nodes(16)), LaunchJob)
        assert (command.job, set(command.nodes)) == (next_one.name, {other})
    for launch, given, kept in (
        (launched(gang, awaits_room=True), nodes, nodes),
        (launched(gang, *["node-0000"] * 4), nodes, ("node-0000",) * 4),
        (launched(gang), (*nodes[:3], ""), ()),
        (launched(gang), nodes[:1], ()),
    ):
        attempt = after(plan, launch, events.AttemptPlaced(**told, nodes=given)).jobs[gang.name].attempt
        assert attempt is not None
        assert attempt.nodes == kept
    search = gpu_job("search/four", gpus=4)
    placed = events.AttemptPlaced(**{**told, "job": search.name, "attempt_id": f"{search.key}.1"}, nodes=nodes)
    attempt = after(plan_of("s", search), launched(search, awaits_room=True), placed).jobs[search.name].attempt
    assert attempt is not None
    assert attempt.nodes == (), "trials move from node to node"


def had_no_room(at_s: float) -> events.Event:
    return events.AttemptFailed(
        at_s=at_s, job=GANG.name, attempt_id=ID, kind=FailureKind.PREEMPTED, had_no_room=True, message="no node came"
    )


def costs(snapshot: Snapshot, now: float) -> tuple[float, float, float]:
    """GPU-hours, seconds of all uses, and the mean time between deaths beyond what was expected."""
    mtbf_s = observed_mtbf_s([snapshot], prior_s=PRIOR_S, now=now)
    return used_hours(snapshot, now)[0], sum(use.gpu_s for use in snapshot.uses(now)), mtbf_s - PRIOR_S


def test_attempt_that_waits_costs_nothing_until_it_has_its_room() -> None:
    assert costs(waiting(), 10.0 + 2 * HOUR_S) == (0.0, 0.0, 0.0)
    running = waiting(placed(2 * HOUR_S, since_s=60.0))
    assert costs(running, 3 * HOUR_S - 60.0) == (16.0, 16 * HOUR_S, HOUR_S)
    ended = waiting(placed(2 * HOUR_S, since_s=60.0), done(GANG, 3 * HOUR_S - 60.0))
    assert costs(ended, 9 * HOUR_S) == (16.0, 16 * HOUR_S, HOUR_S)
    assert ended.jobs[GANG.name].room_s == 2 * HOUR_S - 70.0


def test_attempt_of_an_earlier_version_costs_from_its_launch_on() -> None:
    running = after(plan_of("s", GANG), launched(GANG, at_s=10.0), placed(HOUR_S))
    assert costs(running, 10.0 + HOUR_S)[0] == 16.0


def test_attempt_that_ends_without_room_is_free_whatever_it_waited_for() -> None:
    for launch in (waiting(had_no_room(HOUR_S)), after(plan_of("s", GANG), launched(GANG, "n"), had_no_room(HOUR_S))):
        view = launch.jobs[GANG.name]
        assert costs(launch, 2 * HOUR_S) == (0.0, 0.0, 0.0)
        assert (view.state, view.num_deaths, dict(view.failures)) == (JobState.PENDING, 0, {FailureKind.NO_ROOM: 1})


def test_job_that_found_no_room_is_tried_again_without_end() -> None:
    failed = waiting(had_no_room(HOUR_S)).jobs[GANG.name]
    for count in (1, 100, 10_000):
        verdict = judge(replace(failed, failures={FailureKind.NO_ROOM: count}), max_failures=1)
        assert isinstance(verdict, RetryAt)
        assert "waits for room on the cluster: no node came" in verdict.reason
        assert verdict.at_s - HOUR_S <= 400.0


def test_no_room_stands_in_the_journal_as_a_kind_that_programs_know_which_do_not_know_it() -> None:
    document = events.encode_event(had_no_room(1.0))
    assert (document["kind"], document["had_no_room"]) == ("preempted", True)
    told = events.decode_event(document)
    assert isinstance(told, events.AttemptFailed)
    assert told.effective_kind is FailureKind.NO_ROOM


def attempt(*, awaits_room: bool) -> Attempt:
    return Attempt(
        attempt_id=ID, job=GANG.name, key=GANG.key, number=1, epoch=1, launched_at_s=0.0, resources=GANG.resources,
        num_workers=16, awaits_room=awaits_room,
    )  # fmt: skip


def failure(kind: FailureKind) -> JobFailure:
    return JobFailure(attempt_id=ID, key=GANG.key, kind=kind, message="told so")


@pytest.mark.parametrize(
    ("kind", "awaits_room", "placed_for_s", "told"),
    [
        (None, True, None, FailureKind.NO_ROOM),
        (None, True, 5.0, None),
        (None, False, None, None),
        (FailureKind.PREEMPTED, True, None, FailureKind.NO_ROOM),
        (FailureKind.PREEMPTED, True, 5.0, FailureKind.PREEMPTED),
        (FailureKind.NO_ROOM, False, 0.0, FailureKind.NO_ROOM),
        (FailureKind.USER_ERROR, True, None, FailureKind.USER_ERROR),
    ],
)
def test_end_is_judged_by_whether_there_ever_was_room(tmp_path, kind, awaits_room, placed_for_s, told) -> None:
    report = AttemptReport(
        attempt_id=ID,
        status=AttemptStatus.FAILED if kind else AttemptStatus.LOST,
        failure=failure(kind) if kind else None,
        lost_reason="" if kind else "its runner is gone",
        node="innocent",
        placed_for_s=placed_for_s,
    )
    event = judge_report(LocalStore(tmp_path), attempt(awaits_room=awaits_room), report, 9.0)
    if told is None:
        assert isinstance(event, events.AttemptLost)
    else:
        assert isinstance(event, events.AttemptFailed)
        assert event.effective_kind is told
    assert bool(event.node) is (told is not FailureKind.NO_ROOM)


def test_node_without_room_is_avoided_by_the_next_attempt(tmp_path) -> None:
    report = AttemptReport(attempt_id=ID, status=AttemptStatus.FAILED, failure=failure(FailureKind.NO_ROOM), node="n")
    one = replace(attempt(awaits_room=False), num_workers=1)
    event = judge_report(LocalStore(tmp_path), one, report, 9.0)
    assert isinstance(event, events.AttemptFailed)
    snapshot = after(plan_of("s", GANG), launched(GANG, "n"), event)
    failed = snapshot.jobs[GANG.name].last_failure
    assert failed is not None
    assert (failed.node, failed.kind) == ("n", FailureKind.NO_ROOM)
    busy = replace(event, attempt_id=f"{GANG.key}.2")
    for kind, avoided in ((FailureKind.HANG, "broken"), (FailureKind.NODE_LOST, "n"), (FailureKind.STORAGE, "n")):
        ended = events.AttemptFailed(at_s=5.0, job=GANG.name, attempt_id=ID, kind=kind, message="ended", node="broken")
        journal = [launched(GANG, "broken"), ended, launched(GANG, "n", number=2, at_s=6.0), busy]
        failed = after(plan_of("s", GANG), *journal).jobs[GANG.name].last_failure
        assert failed is not None
        assert failed.node == avoided


def test_gang_that_found_no_room_tries_without_another_of_its_nodes_each_time(tmp_path) -> None:
    report = AttemptReport(attempt_id=ID, status=AttemptStatus.FAILED, failure=failure(FailureKind.NO_ROOM), node="n")
    gang = replace(attempt(awaits_room=False), nodes=("n", "n", "m", "m"), num_workers=4)
    ends = [judge_report(LocalStore(tmp_path), replace(gang, number=number), report, 9.0) for number in range(1, 4)]
    failures = [end for end in ends if isinstance(end, events.AttemptFailed)]
    assert [end.node for end in failures] == ["m", "n", "m"]
    died = events.AttemptFailed(
        at_s=5.0, job=GANG.name, attempt_id=ID, kind=FailureKind.NODE_LOST, message="", node="x"
    )
    second = launched(GANG, "n", "m", number=2, at_s=6.0)
    no_room = replace(failures[0], at_s=7.0, attempt_id=f"{GANG.key}.2")
    failed = after(plan_of("s", GANG), launched(GANG, "x"), died, second, no_room).jobs[GANG.name].last_failure
    assert failed is not None
    assert failed.node == "m", "the lost node is avoided by itself"


def test_placement_is_told_once_from_when_it_was_on() -> None:
    report = AttemptReport(attempt_id=ID, status=AttemptStatus.RUNNING, placed_for_s=None)
    assert NodePricing().placement_events(waiting(), {ID: report}, 100.0) == []
    (event,) = NodePricing().placement_events(waiting(), {ID: replace(report, placed_for_s=30.0)}, 100.0)
    assert isinstance(event, events.AttemptPlaced)
    assert (event.at_s, event.since_s) == (100.0, 30.0)
    assert NodePricing().placement_events(waiting(event), {ID: replace(report, placed_for_s=30.0)}, 101.0) == []


def test_status_says_what_an_attempt_waits_for_and_since_when() -> None:
    now = 10.0 + 2 * HOUR_S
    (line,) = running_lines(SweepStatus(snapshot=waiting(), now=now))
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(10.0))
    assert f"waits for room for 64 CPU, 16 GPU (16 workers) since {since} (2h00m): the cluster has none yet" in line
    document = present_document(SweepStatus(snapshot=waiting(), now=now))
    told = {"since_s": 10.0, "resources": "64 CPU, 16 GPU", "workers": 16}
    assert document["waits_for_room"] == {GANG.name: told}
    assert present_document(SweepStatus(snapshot=waiting(placed(20.0)), now=now))["waits_for_room"] == {}


def test_attempt_that_waits_goes_once_its_job_asks_for_other_resources() -> None:
    asks = [replace(GANG, resources=replace(GANG.resources, accelerator=name)) for name in ("H100", "A100")]
    renamed = replace(asks[1], name="pretrain/renamed")

    def decided(job: Job, *journal: events.Event) -> list[Command]:
        plans = {1: plan_of("s", asks[0]), 2: replace(plan_of("s", job), revision=2)}
        accepted = [events.PlanAccepted(at_s=float(n), message_id=f"m{n}", revision=n) for n in plans]
        launch = launched(asks[0], awaits_room=True, resources=asks[0].resources, num_workers=16)
        snapshot = fold("s", [accepted[0], launch, *journal, accepted[1]], lambda event: plans[event.revision])
        kinds = tuple(replace(gpu_nodes(8)[0], name="", accelerator=name) for name in ("H100", "A100"))
        return decide(snapshot, nodes=(replace(kinds[0], name="head"),), maximum=kinds, now=20.0)

    assert decided(asks[0]) == []
    (command,) = decided(asks[1])
    assert isinstance(command, PreemptAttempt)
    assert "with other resources, now 64 CPU, 16 GPU, of type A100" in command.reason
    assert decided(renamed) == [StopAttempt(sweep="s", attempt_id=ID)], "of the same key, yet of no use for it"
    assert decided(asks[1], placed(1.5)) == decided(renamed, placed(1.5)) == [], "it works"


def test_gang_that_waits_for_long_neither_holds_what_there_is_nor_keeps_others_from_asking() -> None:
    nodes, kind = gpu_nodes(16), gpu_nodes(8)[0]
    small, alike = gpu_job("probe/small", gpus=1), gpu_job("pretrain/alike", gpus=24)
    gang = gpu_job("pretrain/gang", gpus=24)
    snapshot = after(plan_of("s", gang, alike, small), launched(gang, awaits_room=True, at_s=10.0))
    for now, started in ((20.0, []), (10.0 + ROOM_KEPT_S + 1.0, [small.name])):
        commands = of_type(decide(snapshot, nodes=nodes, now=now, maximum=(replace(kind, max_count=2),)), LaunchJob)
        assert [command.job for command in commands] == started
    other = replace(kind, name="", resources=Resources(cpus=64.0, gpus=16.0))
    big = gpu_job("pretrain/big", gpus=1)
    big = replace(big, resources=Resources(cpus=4.0, gpus=16.0))
    snapshot = after(plan_of("s", gang, big), launched(gang, awaits_room=True, at_s=10.0))
    for now, is_asked in ((20.0, False), (10.0 + ROOM_KEPT_S + 1.0, True)):
        commands = of_type(decide(snapshot, nodes=nodes, now=now, maximum=(other,)), LaunchJob)
        assert [command.awaits_room for command in commands] == [True] * is_asked


# On virtual time, with a real controller
WORK = JobWork(work_s=1000.0, cold_start_s=30.0, warm_start_s=2.0, stop_s=4.0)


class Grown:
    """A cluster of two nodes that are both lost in the first second, and come again much later."""

    def __init__(self, replace_s: float, *fates: Fate) -> None:
        self.clock = VirtualClock(0.0)
        self.store = MemoryStore(now=self.clock)
        node, left = Resources(cpus=64.0, gpus=8.0, memory_gib=64.0), list(fates)
        cluster = SimulatedCluster(
            ClusterSpec(groups=(NodeGroup(count=2, shape=node),), grows=True),
            self.clock,
            self.store,
            lambda _: WORK,
            Random(1),  # noqa: S311 - a simulation
            hazards=Hazards(replace_s=replace_s, detection_s=0.0),
            fates=lambda *_: left.pop(0) if left else Fate(),
        )
        if replace_s:
            cluster.lose(list(cluster.nodes.values()), "spot")
            self.clock.jump(0.1)
        policy = Policy(gpu_hours=17.0)  # one hour of the gang is what it is estimated at
        submit(
            self.store,
            Plan(sweep="s", revision=0, store_uri=self.store.uri, jobs=(GANG,), baseline="", policy=policy),
            "",
            "cluster",
        )
        controller = Controller(self.store, SimulatedBackend(cluster), "cluster", "holder", self.clock)
        loop = ControllerLoop(self.clock, controller, Pace(idle_s=300.0))
        cluster.on_news = loop.news

    @property
    def snapshot(self) -> Snapshot:
        return load_snapshot(self.store, "s")

    @property
    def view(self) -> JobView:
        return self.snapshot.jobs[GANG.name]


def test_gang_whose_room_comes_after_two_hours_is_charged_for_its_work_alone() -> None:
    grown = Grown(2 * HOUR_S)
    grown.clock.jump(2 * HOUR_S - 10.0)
    assert (grown.view.state, grown.view.num_attempts) == (JobState.RUNNING, 1)
    grown.clock.jump(4 * HOUR_S)
    assert grown.snapshot.state is SweepState.SUCCEEDED
    assert (grown.view.num_attempts, dict(grown.view.failures)) == (1, {})
    assert grown.view.ran_s == pytest.approx(1030.0, abs=1.0)
    assert grown.view.room_s == pytest.approx(2 * HOUR_S, abs=5.0)


def test_gang_whose_room_never_comes_waits_with_one_attempt_and_spends_no_budget() -> None:
    grown, days_s = Grown(1e9), 3 * 24 * HOUR_S
    grown.clock.jump(days_s)
    assert grown.snapshot.state is SweepState.RUNNING
    assert (grown.view.num_attempts, dict(grown.view.failures)) == (1, {})
    assert costs(grown.snapshot, days_s) == (0.0, 0.0, 0.0)


def test_gang_that_others_forestall_again_and_again_runs_in_the_end() -> None:
    grown = Grown(0.0, *[Fate(ending=SimulatedEnding.NO_ROOM)] * 20)
    grown.clock.jump(24 * HOUR_S)
    assert grown.snapshot.state is SweepState.SUCCEEDED
    assert dict(grown.view.failures) == {FailureKind.NO_ROOM: 20}
    assert grown.view.ran_s == pytest.approx(1030.0, abs=1.0)


def test_attempt_whose_runner_a_new_controller_seeks_is_not_taken_to_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RayBackend("namespace")
    link = SimpleNamespace(state=LinkState.FOUND)
    monkeypatch.setattr(backend, "_alive", lambda: [link])
    report = backend._report("dataset-0.1")
    assert (report.status, report.placed_for_s) == (AttemptStatus.RUNNING, None)
    link.state = LinkState.GONE
    assert backend._report("dataset-0.1").status is AttemptStatus.LOST


A100_SITE = RunnerSite(selector={"ray.io/accelerator-type": "A100"})


@pytest.mark.parametrize(
    ("site", "node", "is_used"), [(A100_SITE, "", False), (A100_SITE, "n", True), (RunnerSite(), "", True)]
)
def test_idle_runner_on_no_known_node_gets_no_attempt_that_needs_nodes_of_one_sort(
    monkeypatch: pytest.MonkeyPatch, site: RunnerSite, node: str, is_used: bool
) -> None:
    backend, shape = RayBackend("namespace"), Resources(cpus=1.0, gpus=1.0)
    link: Any = SimpleNamespace(shape=shape, node=node, is_idle=True, state=LinkState.CREATED, idle_since_s=0.0)
    monkeypatch.setattr(backend, "_alive", lambda: [link])
    assert backend._choose_idle(shape, site) is (link if is_used else None)


@pytest.mark.parametrize(("site", "num_runners"), [(A100_SITE, 1), (RunnerSite(), 3)])
def test_spare_runners_are_started_only_where_any_node_suits(
    monkeypatch: pytest.MonkeyPatch, site: RunnerSite, num_runners: int
) -> None:
    backend, shape = RayBackend("namespace", spare_runners=2), Resources(cpus=1.0, gpus=1.0)
    links: list[Any] = []
    monkeypatch.setattr(backend, "_alive", lambda: links)
    monkeypatch.setattr(backend, "_has_room", lambda *_: True)
    monkeypatch.setattr(backend, "_create", lambda shape, _: links.append(SimpleNamespace(shape=shape)))
    backend._create_with_spares(shape, site)
    assert len(links) == num_runners
