"""Placement, order, priorities and elastic sizes: one decision or one run each."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.contract import Outcome, Resources, Spot
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.budgets import Cap
from orchestrator.scheduling.commands import (
    FailJob,
    LaunchJob,
    PreemptAttempt,
)
from orchestrator.scheduling.demand import NOTHING, AttemptDemand, amount_of
from orchestrator.scheduling.occupancy import ROOM_KEPT_S
from orchestrator.scheduling.placement import ExpectedEnd, FreeCapacity, Machines, reserve
from orchestrator.scheduling.preemption import MADE_ROOM_S
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import fold
from orchestrator.state.nodes import Node
from tests.makespan import World, decides
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, done, failed, launched, of_type, plan_of

# Placement


def test_gang_goes_to_as_few_nodes_as_possible_the_fullest_of_those() -> None:
    small, gang = gpu_job("finetune/small", gpus=1), gpu_job("pretrain/gang", gpus=7)
    snapshot = after(plan_of("s", small, gang), launched(small, "node-0001"))
    (command,) = of_type(decide(snapshot, nodes=gpu_nodes(24)), LaunchJob)
    assert command.nodes == ("node-0001",) * 7


def test_gang_larger_than_a_node_fills_whole_nodes_and_has_one_name_per_worker() -> None:
    (command,) = decide(after(plan_of("s", gpu_job("pretrain/gang", gpus=20))), nodes=gpu_nodes(24))
    assert isinstance(command, LaunchJob)
    assert sorted(command.nodes.count(name) for name in set(command.nodes)) == [4, 8, 8]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"accelerator": "h100"}, {"new"}),
        ({"spot": Spot.REQUIRE}, {"spot"}),
        ({"spot": Spot.NEVER}, {"old", "new"}),
        ({"labels": {"rack": "b"}}, {"spot", "new"}),
        ({"labels": {"rack": "b"}, "spot": "never"}, {"new"}),
    ],
)
def test_job_goes_only_to_nodes_of_the_sort_it_asks_for(asked: Mapping[str, Any], expected: set[str]) -> None:
    shape = Resources(cpus=64.0, gpus=1.0)
    nodes = (
        Node(name="old", resources=shape, accelerator="A100", labels={"rack": "a"}),
        Node(name="spot", resources=shape, accelerator="A100", labels={"rack": "b"}, is_spot=True),
        Node(name="new", resources=shape, accelerator="H100", labels={"rack": "b"}),
    )
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(3)]
    jobs = [replace(job, resources=Resources(cpus=1.0, gpus=1.0, **asked)) for job in jobs]
    found = of_type(decide(after(plan_of("s", *jobs)), nodes=nodes), LaunchJob)
    assert {name for command in found for name in command.nodes} == expected


def test_job_for_a_sort_of_node_that_is_not_there_is_infeasible_and_told_so() -> None:
    job = gpu_job("finetune/a", gpus=1)
    job = replace(job, resources=replace(job.resources, accelerator="H100"))
    (command,) = of_type(decide(after(plan_of("s", job)), nodes=gpu_nodes(8)), FailJob)
    assert "no node is of that sort" in command.reason
    assert "of type H100" in command.reason


@pytest.mark.parametrize(("gpus", "is_refused"), [(1, False), (8, False), (9, True)])
def test_job_that_only_a_lost_node_would_hold_waits_for_it(gpus: int, is_refused: bool) -> None:
    lost = Node(name="big", resources=Resources(cpus=64.0, gpus=8.0), is_alive=False)
    left = Node(name="head", resources=Resources(cpus=64.0))
    scheduler = Scheduler()
    job = gpu_job("finetune/a", gpus=gpus)
    found = scheduler.decide(
        ClusterView(
            snapshots=[after(plan_of("s", job))], total=left.resources, nodes=(left, lost), now=0.0, stepping=None
        )
    )
    assert [type(command) for command in found] == ([FailJob] if is_refused else [])
    told = scheduler.waits["s"].get("finetune/a", "")
    assert told.startswith("waits for a node that was lost to come back") is not is_refused


def test_job_waits_for_nodes_to_join_until_the_cluster_is_settled() -> None:
    head, scheduler = Node(name="head", resources=Resources(cpus=64.0)), Scheduler()
    jobs = [gpu_job(f"finetune/{number}", gpus=8) for number in range(3)]
    view = ClusterView(
        snapshots=[after(plan_of("s", *jobs))], total=head.resources, nodes=(head,), now=10.0, is_settled=False
    )
    assert scheduler.decide(view) == []
    assert scheduler.waits["s"]["finetune/0"].startswith("waits for nodes to join: infeasible: it asks for ")
    assert scheduler.behind["s"] == {"finetune/0": 2}
    found = of_type(scheduler.decide(replace(view, is_settled=True)), FailJob)
    assert [command.job for command in found] == [job.name for job in jobs]


def test_cluster_that_grows_is_judged_by_its_largest_node_types() -> None:
    job, huge = gpu_job("finetune/a", gpus=1), gpu_job("finetune/b", gpus=1)
    huge = replace(huge, resources=Resources(cpus=500.0, gpus=1.0))
    kinds = (Node(resources=Resources(cpus=64.0, gpus=8.0)),)
    head = (Node(name="head", resources=Resources(cpus=4.0)),)
    found = decide(after(plan_of("s", job, huge)), nodes=head, maximum=kinds)
    assert [command.job for command in of_type(found, LaunchJob)] == ["finetune/a"]
    (refused,) = of_type(found, FailJob)
    assert "8 GPU" in refused.reason


@pytest.mark.parametrize(
    ("max_count", "num_other", "is_launched"), [(3, 0, True), (2, 0, False), (2, 1, True), (None, 0, True)]
)
def test_gang_larger_than_all_nodes_that_a_cluster_may_grow_to_is_refused(
    max_count: int | None, num_other: int, is_launched: bool
) -> None:
    gang, kind = gpu_job("pretrain/gang", gpus=24), replace(gpu_nodes(8)[0], name="", max_count=max_count)
    other = replace(gpu_nodes(8)[0], name="other", resources=Resources(cpus=96.0, gpus=8.0, memory_gib=512.0))
    nodes = (*gpu_nodes(8), *[other] * num_other)  # the first is one of the kind, which counts once
    found = decide(after(plan_of("s", gang)), nodes=nodes, maximum=(kind,))
    assert [command.awaits_room for command in of_type(found, LaunchJob)] == [True] * is_launched
    refusals = [command.reason for command in of_type(found, FailJob)]
    assert len(refusals) == (not is_launched)
    assert all("room for 16 of these workers in one zone; " in reason for reason in refusals)


def test_cluster_that_grows_sees_bounded_demand() -> None:
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(100)]
    kinds = (Node(resources=Resources(cpus=64.0, gpus=8.0)),)
    found = of_type(decide(after(plan_of("s", *jobs)), nodes=gpu_nodes(16), maximum=kinds), LaunchJob)
    assert sum(command.nodes == () for command in found) == 4  # a quarter of 16
    assert len(found) == 20


@pytest.mark.parametrize(("max_count", "num_asked"), [(8, 0), (9, 8), (None, 16)])
def test_cluster_that_cannot_grow_keeps_its_queue(max_count: int | None, num_asked: int) -> None:
    """What waits in Ray has no reservation, and preempts nothing."""
    runs, nodes = [gpu_job(f"finetune/runs{number}", gpus=8) for number in range(8)], gpu_nodes(64)
    holds = [launched(job, node.name) for job, node in zip(runs, nodes, strict=True)]
    kind = replace(nodes[0], name="", max_count=max_count)
    small, gang = [gpu_job(f"finetune/{number}", gpus=1) for number in range(100)], gpu_job("pretrain/gang", gpus=16)
    for waiting, expected in ((small, num_asked), ([gang], int(max_count is None))):  # one node is no use to the gang
        found = of_type(decide(after(plan_of("s", *runs, *waiting), *holds), nodes=nodes, maximum=(kind,)), LaunchJob)
        assert [command.awaits_room for command in found] == [True] * expected


def test_head_that_works_is_none_of_the_nodes_that_an_autoscaler_adds() -> None:
    gang, kind = gpu_job("pretrain/gang", gpus=16), replace(gpu_nodes(8)[0], name="", max_count=1)
    head = replace(gpu_nodes(8)[0], is_head=True)
    for node, expected in ((head, LaunchJob), (replace(head, is_head=False), FailJob)):
        (found,) = decide(after(plan_of("s", gang)), nodes=(node,), maximum=(kind,))
        assert isinstance(found, expected)


def test_nodes_that_leave_are_replaced_while_attempts_still_run_on_them() -> None:
    runs, ready = gpu_job("finetune/runs", gpus=8), gpu_job("finetune/ready", gpus=8)
    (leaves,) = (replace(node, leaves_at_s=math.inf) for node in gpu_nodes(8))
    snapshot = after(plan_of("s", runs, ready), launched(runs, leaves.name))
    kind = replace(leaves, name="", leaves_at_s=None, max_count=4)
    nothing = Resources(cpus=0.0)  # a node that leaves is no part of the total
    view = ClusterView(snapshots=(snapshot,), total=nothing, nodes=(leaves,), now=10.0, maximum=(kind,))
    found = Scheduler().decide(view)
    assert [command.job for command in of_type(found, LaunchJob)] == [ready.name]


@pytest.mark.parametrize("node", [Resources(cpus=0.0), Resources(cpus=64.0)])
@pytest.mark.parametrize(("max_count", "num_asked"), [(None, 1), (9, 18)])
def test_cluster_that_grows_is_asked_for_a_part_while_no_node_has_what_jobs_need(
    node: Resources, max_count: int | None, num_asked: int
) -> None:
    """Its head alone is present, as after the loss of all spot nodes, or no node with GPUs. 18 of 9 x 8 GPUs."""
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(100)]
    kinds = (Node(resources=Resources(cpus=64.0, gpus=8.0), max_count=max_count),)
    nodes, plan = (Node(name="head", resources=node),), plan_of("s", *jobs)
    found = of_type(decide(after(plan), nodes=nodes, maximum=kinds), LaunchJob)
    assert len(found) == num_asked
    assert all(command.awaits_room for command in found)
    by_name = {job.name: job for job in jobs}
    waiting = [launched(by_name[command.job], awaits_room=True, at_s=10.0) for command in found]
    assert decide(after(plan, *waiting), nodes=nodes, maximum=kinds, now=20.0) == []


def test_first_node_that_never_comes_keeps_no_other_shape_from_asking() -> None:
    lost, alike, other = (gpu_job(f"finetune/{name}", gpus=1) for name in ("lost", "alike", "other"))
    other = replace(other, resources=Resources(cpus=2.0, gpus=1.0))
    head, kinds = (Node(name="head", resources=Resources(cpus=0.0)),), (Node(resources=Resources(cpus=64.0, gpus=8.0)),)
    snapshot = after(plan_of("s", lost, alike, other), launched(lost, awaits_room=True, at_s=10.0))
    for now, asked in ((20.0, []), (11.0 + ROOM_KEPT_S, [other.name])):
        found = of_type(decide(snapshot, nodes=head, maximum=kinds, now=now), LaunchJob)
        assert [command.job for command in found] == asked


def test_job_avoids_the_node_that_it_failed_on_while_another_has_room() -> None:
    job = gpu_job("finetune/a", gpus=1)
    journal = [launched(job, "node-0000"), failed(job, FailureKind.UNKNOWN, node="node-0000")]
    snapshot = after(plan_of("s", job), *journal)
    assert of_type(decide(snapshot, nodes=gpu_nodes(16)), LaunchJob)[0].nodes == ("node-0001",)
    assert of_type(decide(snapshot, nodes=gpu_nodes(8)), LaunchJob)[0].nodes == ("node-0000",)


# Order within a sweep


def test_job_with_the_longest_way_to_the_end_goes_first() -> None:
    short, long = gpu_job("finetune/short", gpus=8), gpu_job("finetune/long", gpus=8)
    last = gpu_job("finetune/last", "finetune/long", gpus=8)
    estimates = {"finetune/short": 100.0, "finetune/long": 60.0, "finetune/last": 60.0}
    found = decide(after(plan_of("s", short, long, last)), nodes=gpu_nodes(8), durations={"s": estimates})
    assert [command.job for command in of_type(found, LaunchJob)] == ["finetune/long"]


def test_measured_durations_reorder_what_was_estimated_wrongly() -> None:
    trained = [gpu_job(f"pretrain/{number}", gpus=1) for number in range(10)]
    rest = gpu_job("pretrain/rest", gpus=8)
    tune = gpu_job("finetune/tune", gpus=8)
    ends: list[Event] = []
    for job in trained:
        ends.append(launched(job, "node-0000"))
        outcome = Outcome.COMMITTED
        ends.append(events.AttemptSucceeded(at_s=1001.0, job=job.name, attempt_id=f"{job.key}.1", outcome=outcome))
    estimates = dict.fromkeys((job.name for job in trained), 100.0) | {rest.name: 100.0, tune.name: 300.0}
    plan = plan_of("s", *trained, rest, tune)
    found = decide(after(plan, *ends), nodes=gpu_nodes(8), now=2000.0, durations={"s": estimates})
    assert [command.job for command in of_type(found, LaunchJob)] == ["pretrain/rest"]


# Priorities


def busy_and_urgent(num_gpus: int = 8, **policy: Any) -> tuple[Plan, Plan, list[Event]]:
    running = [gpu_job(f"pretrain/low/{number}", gpus=1) for number in range(8)]
    low = plan_of("low", *running, priority=-10, **policy)
    high = plan_of("high", gpu_job("pretrain/high", gpus=num_gpus), priority=10)
    return low, high, [launched(job, "node-0000", at_s=float(n)) for n, job in enumerate(running)]


def test_higher_priority_takes_the_room_of_lower_only_as_much_as_it_needs() -> None:
    low, high, journal = busy_and_urgent(num_gpus=3)
    found = of_type(decide(after(low, *journal), after(high), nodes=gpu_nodes(8)), PreemptAttempt)
    assert len(found) == 3
    assert all("priority 10 against -10" in command.reason for command in found)


def test_attempts_that_save_nothing_are_spared_where_others_can_make_room() -> None:
    jobs = [gpu_job("embed/a", gpus=4), gpu_job("pretrain/b", gpus=4)]
    low, high = plan_of("low", *jobs, priority=-10), plan_of("high", gpu_job("pretrain/high", gpus=4), priority=10)
    snapshot = after(low, *(launched(job, "node-0000") for job in jobs))
    (found,) = of_type(decide(snapshot, after(high), nodes=gpu_nodes(8), now=5000.0), PreemptAttempt)
    assert found.attempt_id == f"{jobs[1].key}.1"


def test_nobody_is_preempted_for_what_would_not_fit_anyway() -> None:
    low, high, journal = busy_and_urgent()
    other = gpu_job("pretrain/other", gpus=1)
    same = plan_of("same", other, priority=10)
    snapshots = after(low, *journal[1:]), after(same, launched(other, "node-0000")), after(high)
    assert of_type(decide(*snapshots, nodes=gpu_nodes(8)), PreemptAttempt) == []


def test_attempt_that_started_because_it_had_waited_makes_room_only_for_urgent_ones() -> None:
    """It was asked to end in the very round after its start, and waited for hours again."""
    job, more = gpu_job("pretrain/low", gpus=7), gpu_job("pretrain/more", gpus=1)
    others = [gpu_job(f"pretrain/{number}", gpus=8) for number in range(2)]
    low, normal = plan_of("low", job, more, priority=-10), plan_of("normal", *others)
    wait = launched(others[0], "node-0000"), done(others[0], at_s=7 * HOUR_S)
    now = 7 * HOUR_S + 1.0
    starts = of_type(decide(after(low), after(normal, *wait), nodes=gpu_nodes(8), now=now), LaunchJob)
    assert [(start.job, start.aging) for start in starts] == [(job.name, 11)]  # the next is at its own priority
    running = after(plan_of("low", job, priority=-10), launched(job, "node-0000", at_s=now, aging=11))
    later: dict[str, Any] = {"nodes": gpu_nodes(8), "now": now + 2 * HOUR_S}
    assert of_type(decide(running, after(normal, *wait), **later), PreemptAttempt) == []
    urgent = plan_of("urgent", *others, priority=100)
    (found,) = of_type(decide(running, after(urgent), **later), PreemptAttempt)
    assert "priority 100 against 1" in found.reason


def test_sweep_that_waited_for_long_starts_one_job_before_others_and_none_that_must_make_room_again() -> None:
    jobs = {name: [gpu_job(f"pretrain/{name}/{n}", gpus=1) for n in range(8)] for name in ("low", "normal")}
    recent, now = gpu_job("pretrain/recent", gpus=1), 7 * HOUR_S + 1.0
    plans = plan_of("low", *jobs["low"], priority=-10), plan_of("normal", recent, *jobs["normal"])
    journals: dict[str, list[Event]] = {"low": [], "normal": [launched(recent, "node-0000"), done(recent, now - 1.0)]}
    before = [after(plan, *journals[plan.sweep]) for plan in plans]
    starts = of_type(decide(*before, nodes=gpu_nodes(8), now=now), LaunchJob)
    assert Counter((start.sweep, start.aging) for start in starts) == {("low", 11): 1, ("normal", 0): 7}
    by_name = {job.name: job for sweep in jobs.values() for job in sweep}
    for start in starts:
        journals[start.sweep].append(launched(by_name[start.job], *start.nodes, at_s=now, aging=start.aging))
    running = [after(plan, *journals[plan.sweep]) for plan in plans]
    assert of_type(decide(*running, nodes=gpu_nodes(8), now=now + 60.0), PreemptAttempt) == []


def test_nobody_is_preempted_while_others_leave_already() -> None:
    low, high, journal = busy_and_urgent(num_gpus=1)
    job = low.jobs[0]
    leaving = events.AttemptPreempting(at_s=9.0, job=job.name, attempt_id=f"{job.key}.1", reason="asked", grace_s=120.0)
    assert of_type(decide(after(low, *journal, leaving), after(high), nodes=gpu_nodes(8)), PreemptAttempt) == []


def test_attempt_that_goes_on_for_a_renamed_job_is_not_taken_to_leave() -> None:
    old, other = gpu_job("pretrain/old", gpus=8), gpu_job("pretrain/other", gpus=8)
    renamed = replace(old, name="pretrain/new")  # of the same key: it waits for the attempt at the old one
    plans = {1: plan_of("same", old, priority=10), 2: replace(plan_of("same", renamed, priority=10), revision=2)}
    accepted = [events.PlanAccepted(at_s=float(n), message_id=f"m{n}", revision=n) for n in plans]
    journal = [accepted[0], launched(old, *["node-0000"] * 8), accepted[1]]
    same = fold("same", journal, lambda event: plans[event.revision])
    low = after(plan_of("low", other, priority=-10), launched(other, *["node-0001"] * 8))
    high = after(plan_of("high", gpu_job("pretrain/high", gpus=8), priority=10))
    (found,) = decide(low, same, high, nodes=gpu_nodes(16), now=HOUR_S, durations={"low": {other.name: 9 * HOUR_S}})
    assert isinstance(found, PreemptAttempt)
    assert found.sweep == "low"


def test_nobody_is_preempted_while_attempts_of_a_cancelled_sweep_leave() -> None:
    cancelled, other = gpu_job("pretrain/cancelled", gpus=8), gpu_job("pretrain/other", gpus=8)
    low, same = plan_of("low", other, priority=-10), plan_of("same", cancelled, priority=10)
    high = plan_of("high", gpu_job("pretrain/high", gpus=8), priority=10)
    starts = [launched(cancelled, *["node-0000"] * 8), launched(other, *["node-0001"] * 8)]
    durations = {"low": {other.name: 9 * HOUR_S}, "same": {cancelled.name: 9 * HOUR_S}}
    scheduler = Scheduler()  # it has seen the attempt when that was to run for hours
    for journal, num_preempted in (([], 1), ([events.CancelRequested(at_s=1000.0, message_id="c")], 0)):
        snapshots = [after(low, starts[1]), after(same, starts[0], *journal), after(high)]
        total = Resources(cpus=128.0, gpus=16.0)
        view = ClusterView(snapshots=snapshots, total=total, nodes=gpu_nodes(16), now=1000.0, durations=durations)
        found = of_type(scheduler.decide(view), PreemptAttempt)
        assert [command.sweep for command in found] == ["low"] * num_preempted


@pytest.mark.parametrize("waited_h", [0.0, 6.4])
@pytest.mark.parametrize("has_aged", [False, True])
def test_no_lower_job_starts_in_the_room_that_is_made_for_a_gang(*, has_aged: bool, waited_h: float) -> None:
    large, small, other = (gpu_job(f"pretrain/{gpus}", gpus=gpus) for gpus in (7, 1, 8))
    low = after(plan_of("low", large, small, priority=-10), launched(large, *["node-0000"] * 7, at_s=6 * HOUR_S))
    same = after(plan_of("same", other, priority=10), launched(other, *["node-0001"] * 8, at_s=0.0))
    now = 6.5 * HOUR_S
    accepted = events.PlanAccepted(at_s=now - waited_h * HOUR_S, message_id="m", revision=1)
    urgent = plan_of("high", gpu_job("pretrain/high", gpus=8), priority=10)
    aged = [after(plan_of("aged", gpu_job("pretrain/aged", gpus=8)))] * has_aged  # comes first, and may not preempt
    found = decide(
        low,
        same,
        *aged,
        fold("high", [accepted], lambda _: urgent),
        nodes=gpu_nodes(16),
        now=now,
        durations={"low": {large.name: 3 * HOUR_S, small.name: HOUR_S}, "same": {other.name: 90 * HOUR_S}},
    )
    assert [type(command) for command in found] == [PreemptAttempt]


def test_attempts_of_a_sweep_that_stops_are_not_preempted_for_others() -> None:
    """They would not be continued, and the user waits for their ends."""
    low, high, journal = busy_and_urgent()
    stop = events.SweepStopping(at_s=9.0, message_id="p")
    assert len(of_type(decide(after(low, *journal), after(high), nodes=gpu_nodes(8)), PreemptAttempt)) == 8
    assert of_type(decide(after(low, *journal, stop), after(high), nodes=gpu_nodes(8)), PreemptAttempt) == []


def test_job_that_made_room_as_often_as_its_policy_allows_is_left_alone() -> None:
    low, high, journal = busy_and_urgent(max_preemptions=0)
    assert of_type(decide(after(low, *journal), after(high), nodes=gpu_nodes(8)), PreemptAttempt) == []


def test_preempted_work_goes_on_after_the_urgent_one_and_loses_nothing() -> None:
    low, high, _ = busy_and_urgent()
    seconds = {job.name: HOUR_S for job in low.jobs}
    durations = {"low": seconds, "high": {"pretrain/high": 600.0}}
    scheduler = Scheduler()
    world = World(
        plans={"low": low, "high": high},
        nodes=gpu_nodes(8),
        durations=durations,
        decide=decides(scheduler, durations=durations),
    )
    world.submit("low")
    assert world.round()
    world.now_s = 1000.0
    world.submit("high")
    end_s = world.run()
    assert world.snapshots["high"].jobs["pretrain/high"].ended_at_s == pytest.approx(1000.0 + 10.0 + 600.0)
    assert world.num_preemptions == 8
    assert end_s == pytest.approx(HOUR_S + 10.0 + 600.0, abs=11.0)


def test_sweep_that_waits_for_long_rises_until_it_runs_something() -> None:
    nodes = gpu_nodes(8)
    high = plan_of("high", *(gpu_job(f"finetune/high/{n}", gpus=8) for n in range(3)), priority=10)
    low = plan_of("low", gpu_job("finetune/low", gpus=8), priority=-10)
    early = decide(after(high), after(low), nodes=nodes, now=11.0 * HOUR_S)
    late = decide(
        after(high, launched(high.jobs[0]), done(high.jobs[0], 13 * HOUR_S)), after(low), nodes=nodes, now=13.5 * HOUR_S
    )
    assert [command.sweep for command in of_type(early, LaunchJob)] == ["high"]
    assert [command.sweep for command in of_type(late, LaunchJob)] == ["low"]


def test_sweep_that_waits_for_long_stays_risen_when_another_finishes_what_its_next_job_needs() -> None:
    shared, ready = gpu_job("pretrain/shared", gpus=8), gpu_job("pretrain/ready", gpus=8)
    plan = plan_of("low", shared, gpu_job("finetune/next", shared.name, gpus=8), ready, priority=-10)
    view: dict[str, Any] = {"nodes": gpu_nodes(8), "now": 12 * HOUR_S, "durations": {"low": {"finetune/next": 9e9}}}
    low = after(plan, events.JobReused(at_s=12 * HOUR_S - 60.0, job=shared.name, key=shared.key))
    (found,) = of_type(decide(low, **view), LaunchJob)
    assert (found.job, found.aging) == ("finetune/next", 20)
    (found,) = of_type(decide(low, claimed={ready.key}, **view), LaunchJob)
    assert (found.job, found.aging) == ("finetune/next", 0), "it could start nothing before"


@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("num_gpus", [8, 4])
def test_sweep_that_waited_for_long_does_not_keep_a_higher_one_from_making_room_nor_takes_it(
    num_nodes: int, num_gpus: int
) -> None:
    nodes, submitted_s = gpu_nodes(8 * num_nodes), 6.5 * HOUR_S
    running = [gpu_job(f"pretrain/low/{number}", gpus=8) for number in range(num_nodes)]
    starts = [launched(job, *[node.name] * 8, at_s=0.0) for job, node in zip(running, nodes, strict=True)]
    low, aged = plan_of("low", *running), [plan_of(f"aged{n}", gpu_job(f"pretrain/aged{n}", gpus=8)) for n in (0, 1)]
    urgent = plan_of("high", gpu_job("pretrain/high", gpus=num_gpus), priority=10)
    accepted = events.PlanAccepted(at_s=submitted_s, message_id="m", revision=1)
    durations = {"low": {job.name: 100 * HOUR_S for job in running}}
    scheduler = Scheduler()

    def found(*journal: Event, now: float) -> list[Any]:
        high = fold("high", [accepted], lambda _: urgent)
        snapshots = [after(low, *starts, *journal), *map(after, aged), high]
        total = Resources(cpus=64.0 * num_nodes, gpus=8.0 * num_nodes)
        view = ClusterView(snapshots=snapshots, total=total, nodes=nodes, now=now, durations=durations)
        return scheduler.decide(view)

    (victim,) = found(now=submitted_s)
    assert "makes room for pretrain/high of sweep high" in victim.reason
    assert scheduler.waits["high"]
    (job,) = [job for job in running if victim.attempt_id == f"{job.key}.1"]
    asked = events.AttemptPreempting(
        at_s=submitted_s, job=job.name, attempt_id=victim.attempt_id, reason=victim.reason, grace_s=120.0
    )
    assert found(asked, now=submitted_s + 1.0) == []
    ended_s = submitted_s + 10.0
    ended = failed(job, FailureKind.PREEMPTED, at_s=ended_s, node=nodes[0].name)
    assert [one.sweep for one in of_type(found(asked, ended, now=ended_s), LaunchJob)] == ["high"]
    for journal, now in (
        ([asked, ended], ended_s + MADE_ROOM_S),
        ([asked, failed(job, FailureKind.PREEMPTED, at_s=ended_s, node="spot")], ended_s),  # it has left: no room
    ):
        starts_then = of_type(found(*journal, now=now), LaunchJob)
        assert [(one.sweep, one.aging) for one in starts_then] == [("aged0", 10)], "else it would wait for ever"


@pytest.mark.parametrize(
    ("options", "policy", "num_preempted"),
    [
        ({"stepping": None}, {}, 16),
        ({"stepping": set()}, {}, 1),
        ({"user_caps": {"ada": Cap(max_gpus=3)}}, {}, 3),
        ({"user_caps": {"ada": Cap(max_concurrent=2)}}, {}, 2),
        ({"claimed": [gpu_job(f"finetune/high/{n}", gpus=1).key for n in range(4)]}, {}, 12),
        ({}, {"gpu_hours": 10.0}, 5),
        ({}, {"max_gpus": 6.0}, 6),
    ],
)
def test_no_more_is_preempted_than_may_start_instead(
    options: dict[str, Any], policy: dict[str, Any], num_preempted: int
) -> None:
    running = [gpu_job(f"finetune/low/{n}", gpus=1) for n in range(16)]
    waiting = [gpu_job(f"finetune/high/{n}", gpus=1) for n in range(16)]
    low = after(
        plan_of("low", *running, priority=-10),
        *(launched(job, f"node-000{place // 8}") for place, job in enumerate(running)),
    )
    high = after(plan_of("high", *waiting, owner="ada", priority=100, **policy))
    durations = {name: {job.name: 2 * HOUR_S for job in jobs} for name, jobs in (("low", running), ("high", waiting))}
    found = decide(low, high, nodes=gpu_nodes(16), durations=durations, **options)
    assert len(of_type(found, PreemptAttempt)) == num_preempted


def test_priority_set_by_a_client_counts_instead_of_the_plans() -> None:
    first, second = plan_of("a", gpu_job("finetune/a", gpus=8)), plan_of("b", gpu_job("finetune/b", gpus=8))
    raised = events.PriorityChanged(at_s=1.0, message_id="m2", priority=5)
    (command,) = of_type(decide(after(first), after(second, raised), nodes=gpu_nodes(8)), LaunchJob)
    assert command.sweep == "b"


# Elastic sizes


def elastic(gpus: int = 8, min_gpus: int = 2) -> Job:
    return gpu_job("pretrain/elastic", gpus=gpus, min_gpus=min_gpus)


def test_elastic_job_starts_smaller_where_that_ends_it_earlier() -> None:
    other = gpu_job("finetune/other", gpus=4)
    plan = plan_of("s", other, elastic())
    snapshot = after(plan, launched(other, "node-0000"))
    slow = {"s": {other.name: 3 * HOUR_S, "pretrain/elastic": HOUR_S}}
    fast = {"s": {other.name: 60.0, "pretrain/elastic": HOUR_S}}
    (command,) = of_type(decide(snapshot, nodes=gpu_nodes(8), durations=slow), LaunchJob)
    assert (command.num_workers, command.resources.gpus, len(command.nodes)) == (4, 4.0, 4)
    assert of_type(decide(snapshot, nodes=gpu_nodes(8), durations=fast), LaunchJob) == []


def test_elastic_job_too_large_for_the_cluster_runs_at_the_size_that_it_has() -> None:
    (command,) = of_type(decide(after(plan_of("s", elastic(gpus=32, min_gpus=4))), nodes=gpu_nodes(16)), LaunchJob)
    assert command.num_workers == 16


def test_elastic_job_makes_room_also_behind_a_sweep_that_waited_for_long() -> None:
    """A smaller size fits, at which it would not start: it would end later than by waiting."""
    running, now = gpu_job("pretrain/low", gpus=8), 6.5 * HOUR_S
    low, aged = plan_of("low", running), plan_of("aged", elastic(gpus=16, min_gpus=8))
    urgent = plan_of("high", elastic(gpus=16, min_gpus=8), priority=10)
    high = fold("high", [events.PlanAccepted(at_s=now, message_id="m", revision=1)], lambda _: urgent)
    found = decide(
        after(low, launched(running, *["node-0000"] * 8, at_s=0.0)),
        after(aged),
        high,
        nodes=gpu_nodes(16),
        durations={"low": {running.name: 50 * HOUR_S}, "high": {"pretrain/elastic": 100 * HOUR_S}},
        now=now,
    )
    assert [command.sweep for command in of_type(found, PreemptAttempt)] == ["low"]


def test_elastic_attempt_grows_once_nothing_else_wants_the_room() -> None:
    job = elastic()
    small = Resources(cpus=8.0, gpus=2.0)
    snapshot = after(plan_of("s", job), launched(job, "node-0000", "node-0000", resources=small, num_workers=2))
    durations = {"s": {job.name: 2 * HOUR_S}}
    assert decide(snapshot, nodes=gpu_nodes(8), now=600.0, durations=durations) == []
    assert decide(snapshot, nodes=gpu_nodes(8), now=1000.0, durations=durations, may_start=False) == []
    (command,) = decide(snapshot, nodes=gpu_nodes(8), now=1000.0, durations=durations)
    assert isinstance(command, PreemptAttempt)
    assert "grows from 2 to 8 GPUs" in command.reason


def test_attempt_is_moved_off_a_leaving_node_even_while_nothing_may_start() -> None:
    job = gpu_job("pretrain/a", gpus=8)
    snapshot = after(plan_of("s", job), launched(job, *["node-0000"] * 8))
    nodes = (replace(gpu_nodes(8)[0], leaves_at_s=100.0),)
    (command,) = decide(snapshot, nodes=nodes, may_start=False)
    assert isinstance(command, PreemptAttempt)


@pytest.mark.parametrize(
    ("cap", "told"),
    [
        (Cap(max_gpus=3), []),
        (Cap(max_gpus=4), ["grows from 2 to 4 GPUs"]),
        (Cap(max_concurrent=1), ["grows from 2 to 8 GPUs"]),
    ],
)
def test_elastic_attempt_grows_as_far_as_its_user_may(cap: Cap, told: list[str]) -> None:
    job = elastic()
    small = Resources(cpus=8.0, gpus=2.0)
    plan = plan_of("s", job, owner="ada")
    snapshot = after(plan, launched(job, "node-0000", "node-0000", resources=small, num_workers=2))
    durations = {"s": {job.name: 2 * HOUR_S}}
    found = decide(snapshot, nodes=gpu_nodes(8), now=1000.0, durations=durations, user_caps={"ada": cap})
    assert [command.reason.partition(",")[0] for command in of_type(found, PreemptAttempt)] == told


def test_starving_attempt_takes_the_node_on_which_nothing_started_for_longest_others_the_one_free_first() -> None:
    nodes = tuple(Node(name=f"n{n}", resources=Resources(cpus=8.0, gpus=8.0)) for n in range(2))
    machines = Machines(nodes, Resources(cpus=16.0, gpus=16.0))
    whole = amount_of(nodes[0].resources)
    demand = AttemptDemand(resources=nodes[0].resources, num_workers=1, worker=whole, total=whole)
    room = FreeCapacity(machines, [(0, whole), (1, whole)], NOTHING)
    endings = [
        ExpectedEnd(
            attempt_id=f"a{place}",
            demand=demand,
            spread=((place, 1),),
            launched_at_s=launched_at_s,
            end_s=end_s,
            sure_end_s=end_s,
        )
        for place, launched_at_s, end_s in ((0, 0.0, 900.0), (1, 50.0, 300.0))
    ]
    for is_starving, place, until_s in ((False, 1, 300.0), (True, 0, 100.0)):
        found = reserve(room, demand, (0, 1), endings, now=100.0, is_starving=is_starving)
        assert found is not None
        assert (found.spread, found.until_s) == (((place, 1),), until_s)
