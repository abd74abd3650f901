"""Bounds, budgets, breakers, excluded nodes and orders of clients: one decision each."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.budgets import Cap
from orchestrator.scheduling.commands import (
    CancelJob,
    ExcludeNode,
    FinishSweep,
    LaunchJob,
    PreemptAttempt,
    TripSweep,
)
from orchestrator.scheduling.node_exclusion import OUTAGE_S
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.snapshot import Snapshot, decode_snapshot, encode_snapshot
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, done, failed, launched, of_type, plan_of

# Bounds


def test_sweep_holds_no_more_than_its_bounds() -> None:
    jobs = [gpu_job(f"finetune/{number}", gpus=2) for number in range(8)]
    assert len(decide(after(plan_of("s", *jobs, max_concurrent=3)), nodes=gpu_nodes(16))) == 3
    assert len(decide(after(plan_of("s", *jobs, max_gpus=5)), nodes=gpu_nodes(16))) == 2


def test_users_share_one_bound_over_all_their_sweeps() -> None:
    plans = [
        plan_of(name, *(gpu_job(f"finetune/{name}/{n}", gpus=1) for n in range(4)), owner=owner)
        for name, owner in (("a", "ada"), ("b", "ada"), ("c", "bob"))
    ]
    scheduler = Scheduler()
    found = scheduler.decide(
        ClusterView(
            snapshots=[after(plan) for plan in plans],
            total=Resources(cpus=128.0, gpus=16.0),
            nodes=gpu_nodes(16),
            now=10.0,
            user_caps={"*": Cap(max_gpus=3)},
        )
    )
    assert [command.sweep for command in of_type(found, LaunchJob)].count("c") == 3
    assert len(found) == 6
    assert any("user ada holds 3 GPUs" in why for why in scheduler.waits["a"].values())


def test_budget_of_gpu_hours_ends_the_sweep_with_its_sums() -> None:
    first, second = gpu_job("pretrain/first", gpus=8), gpu_job("pretrain/second", gpus=8)
    plan = plan_of("s", first, second, gpu_hours=20.0)
    durations = {"s": {first.name: HOUR_S, second.name: 2 * HOUR_S}}
    # The first took twice as long as estimated: 16 GPU-hours are gone.
    ended = after(plan, launched(first, *["node-0000"] * 8, at_s=0.0), done(first, 2 * HOUR_S))
    (command,) = decide(ended, nodes=gpu_nodes(8), now=2 * HOUR_S, durations=durations)
    assert isinstance(command, TripSweep)
    assert "the budget is 20 GPU-hours (policy.budget.gpu_hours): 16 GPU-hours are used" in command.reason


@pytest.mark.parametrize(("gpu_hours", "may_go_on"), [(90.0, True), (80.0, False)])
@pytest.mark.parametrize("kind", [FailureKind.NODE_LOST, FailureKind.STORAGE])
def test_budget_counts_what_a_job_had_saved_before_its_death(
    kind: FailureKind, gpu_hours: float, may_go_on: bool
) -> None:
    job = gpu_job("pretrain/long", gpus=8)
    options: dict[str, Any] = {"nodes": gpu_nodes(8), "durations": {"s": {job.name: 10 * HOUR_S}}}
    journal = [launched(job, *["node-0000"] * 8, at_s=0.0), failed(job, kind, at_s=9 * HOUR_S)]
    found = decide(after(plan_of("s", job, gpu_hours=gpu_hours), *journal), now=9 * HOUR_S + 60.0, **options)
    assert bool(of_type(found, LaunchJob)) is may_go_on  # 72 of 80 GPU-hours are used; 8 and a tenth of 80 are left


def test_budget_counts_elastic_jobs_by_their_gpu_hours_at_any_size() -> None:
    jobs = [gpu_job(f"pretrain/{number}", gpus=8, min_gpus=2) for number in range(10)]
    small: dict[str, Any] = {"resources": Resources(cpus=8.0, gpus=2.0), "num_workers": 2}
    node = replace(gpu_nodes(8)[0], resources=Resources(cpus=8.0, gpus=2.0))
    options: dict[str, Any] = {"nodes": (node,), "durations": {"s": {job.name: HOUR_S for job in jobs}}}
    journal: list[Event] = []
    for number, job in enumerate(jobs):
        now = 4 * HOUR_S * number
        (command,) = decide(after(plan_of("s", *jobs, gpu_hours=90.0), *journal), now=now, **options)
        assert isinstance(command, LaunchJob)
        journal += [launched(job, node.name, node.name, at_s=now, **small), done(job, now + 4 * HOUR_S)]


def test_budget_keeps_what_fits_into_it_going() -> None:
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(8)]
    plan = plan_of("s", *jobs, cost=30.0, gpu_hour_price=10.0)
    durations = {"s": dict.fromkeys((job.name for job in jobs), HOUR_S)}
    found = decide(after(plan), nodes=gpu_nodes(8), durations=durations)
    assert len(of_type(found, LaunchJob)) == 3
    assert of_type(found, TripSweep) == []


def test_budget_does_not_end_a_sweep_while_a_job_that_fits_it_waits() -> None:
    large, small = gpu_job("pretrain/large", gpus=8), gpu_job("finetune/small", gpus=1)
    options: dict[str, Any] = {"nodes": gpu_nodes(8), "durations": {"s": {large.name: 3 * HOUR_S, small.name: HOUR_S}}}
    plan = plan_of("s", large, small, gpu_hours=10.0)
    lost = after(plan, launched(small, "node-0000"), failed(small, FailureKind.NODE_LOST, at_s=2.0))
    assert decide(lost, now=2.1, **options) == [], "its next attempt starts after a moment"
    assert [one.job for one in of_type(decide(lost, now=10.0, **options), LaunchJob)] == [small.name]
    assert decide(after(plan), claimed={small.key}, **options) == [], "another cluster works on it"
    full = after(plan_of("other", gpu_job("finetune/other", gpus=8)), launched(gpu_job("finetune/other", gpus=8)))
    assert decide(full, after(plan), **options) == [], "there is no room for it yet"
    rest = after(plan, launched(small, "node-0000"), done(small, HOUR_S))
    (command,) = decide(rest, now=HOUR_S, **options)
    assert isinstance(command, TripSweep)


def test_budget_lets_a_short_job_pass_a_long_one_of_its_shape() -> None:
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(4)]
    hours = dict(zip((job.name for job in jobs), (10.0, 9.0, 1.0, 8.0), strict=True))
    durations = {"s": {name: length * HOUR_S for name, length in hours.items()}}
    scheduler = Scheduler()
    view = ClusterView(
        snapshots=[after(plan_of("s", *jobs, gpu_hours=5.0))],
        total=Resources(cpus=64.0, gpus=8.0),
        nodes=gpu_nodes(8),
        now=10.0,
        durations=durations,
    )
    assert [one.job for one in of_type(scheduler.decide(view), LaunchJob)] == ["finetune/2"]
    assert list(scheduler.waits["s"]) == ["finetune/0"]
    assert scheduler.behind["s"] == {"finetune/0": 2}


def test_deadline_that_has_passed_stops_the_sweep() -> None:
    plan = plan_of("s", gpu_job("finetune/a", gpus=1), time_limit_s=HOUR_S)
    assert of_type(decide(after(plan), nodes=gpu_nodes(8), now=HOUR_S - 1.0), LaunchJob)
    (command,) = decide(after(plan), nodes=gpu_nodes(8), now=HOUR_S)
    assert isinstance(command, TripSweep)
    assert "1 h after submission" in command.reason
    waits = after(plan, launched(plan.jobs[0], awaits_room=True))
    assert decide(waits, nodes=gpu_nodes(8), now=HOUR_S - 1.0) == []
    (command,) = decide(waits, nodes=gpu_nodes(8), now=HOUR_S)
    assert isinstance(command, TripSweep), "what it waits for would come after the deadline"


@pytest.mark.parametrize(
    ("policy", "num_asked"),
    [
        ({}, 1),
        ({"deadline_s": 5 * HOUR_S}, 1),
        ({"deadline_s": 3 * HOUR_S}, 0),
        ({"gpu_hours": 9.0}, 1),
        ({"gpu_hours": 8.5}, 0),  # 8 are used, and 1 is left
    ],
)
@pytest.mark.parametrize("is_growth", [True, False])
def test_no_attempt_makes_room_or_grows_whose_next_one_could_not_start(
    policy: dict[str, Any], num_asked: int, *, is_growth: bool
) -> None:
    """It would be cancelled, and running jobs are never ended because of a limit."""
    gang = gpu_job("pretrain/gang", gpus=8, min_gpus=2)
    small: dict[str, Any] = {"resources": Resources(cpus=8.0, gpus=2.0), "num_workers": 2}
    runs = after(plan_of("s", gang, priority=-10, **policy), launched(gang, *["node-0000"] * 2, at_s=0.0, **small))
    high = [] if is_growth else [after(plan_of("high", gpu_job("pretrain/high", gpus=8), priority=10))]
    durations = {"s": {gang.name: 9.0 * HOUR_S / 8}}
    found = decide(runs, *high, nodes=gpu_nodes(8), now=4 * HOUR_S, durations=durations)
    assert len(of_type(found, PreemptAttempt)) == num_asked


@pytest.mark.parametrize(("gpu_hours", "num_asked"), [(24.0, 2), (23.0, 0)])
def test_attempts_that_make_room_together_are_within_the_budget_together(gpu_hours: float, num_asked: int) -> None:
    """Each of them would be within 20: after one hour of two, 8 are used, 8 are left, and either one is done anew."""
    jobs = [gpu_job(f"embed/{number}", gpus=4) for number in range(2)]
    plan = plan_of("s", *jobs, priority=-10, gpu_hours=gpu_hours)
    starts = [launched(job, "node-0000", at_s=0.0) for job in jobs]
    durations = {"s": {job.name: 2 * HOUR_S for job in jobs}}
    high = [gpu_job(f"pretrain/high/{gpus}", gpus=gpus) for gpus in (8, 4)]

    def asked(*journal: Event, waiting: Job = high[0]) -> list[str]:
        snapshots = after(plan, *starts, *journal), after(plan_of("high", waiting, priority=10))
        found = decide(*snapshots, nodes=gpu_nodes(8), now=HOUR_S, durations=durations)
        return [one.attempt_id for one in of_type(found, PreemptAttempt)]

    assert len(asked()) == num_asked
    (first,) = asked(waiting=high[1])
    job = next(job for job in jobs if first == f"{job.key}.1")
    leaving = events.AttemptPreempting(at_s=HOUR_S, job=job.name, attempt_id=first, reason="asked", grace_s=120.0)
    assert len(asked(leaving)) == max(0, num_asked - 1), "the next attempt of one that ends already counts"


@pytest.mark.parametrize(
    ("gpus", "hours", "now_h", "gpu_hours", "num_asked"),
    [
        # The cheap one of 2 GPUs would use up what the one of 6 needs, which makes the room alone.
        ((2, 6), (2.0, 2.0), 1.0, 22.0, 1),
        ((2, 6), (2.0, 2.0), 1.0, 21.0, 0),
        # The one of 2 GPUs takes longer than estimated: its end would lower the use, but it is let go again.
        ((2, 3, 3), (0.5, 6.0, 6.0), 5.0, 78.5, 2),
        ((2, 3, 3), (0.5, 6.0, 6.0), 5.0, 77.5, 0),
    ],
)
def test_attempts_that_are_not_needed_for_the_room_do_not_count(
    gpus: tuple[int, ...], hours: tuple[float, ...], now_h: float, gpu_hours: float, num_asked: int
) -> None:
    jobs = [gpu_job(f"embed/{number}", gpus=count) for number, count in enumerate(gpus)]
    plan = plan_of("s", *jobs, priority=-10, gpu_hours=gpu_hours)
    low = after(plan, *(launched(job, "node-0000", at_s=0.0) for job in jobs))
    high = after(plan_of("high", gpu_job("pretrain/high", gpus=6), priority=10))
    durations = {"s": {job.name: length * HOUR_S for job, length in zip(jobs, hours, strict=True)}}
    found = decide(low, high, nodes=gpu_nodes(8), now=now_h * HOUR_S, durations=durations)
    assert len(of_type(found, PreemptAttempt)) == num_asked


# Breakers and nodes


def all_failing(num_jobs: int, message: str, *more: Event, **policy: Any) -> Snapshot:
    jobs = [gpu_job(f"pretrain/{number}", gpus=1) for number in range(num_jobs)]
    waiting = gpu_job("pretrain/waiting", gpus=1)
    journal: list[Event] = []
    for number, job in enumerate(jobs):
        text = message.format(number)
        journal += [launched(job, "node-0000"), failed(job, FailureKind.USER_ERROR, text)]
        journal.append(events.JobFailed(at_s=3.0, job=job.name, reason=text))
    return after(plan_of("s", *jobs, waiting, **policy), *journal, *more)


def test_breaker_trips_when_the_first_jobs_fail_alike() -> None:
    text = "no file '/data/{0}/x.tar' at step 1{0}"
    (command,) = of_type(decide(all_failing(5, text), nodes=gpu_nodes(8)), TripSweep)
    assert "5 pretrain jobs failed in the same way" in command.reason
    assert of_type(decide(all_failing(4, text), nodes=gpu_nodes(8)), TripSweep) == []
    assert of_type(decide(all_failing(5, text, breaker=0), nodes=gpu_nodes(8)), TripSweep) == []


def test_retry_of_some_jobs_after_the_breaker_is_not_stopped_by_the_failures_before_it() -> None:
    journal = (
        events.SweepTripped(at_s=4.0, reason="7 failed"),
        events.JobCancelled(at_s=4.0, job="pretrain/waiting"),
        events.SweepFinished(at_s=5.0, status=events.SweepEnding.FAILED),
        # The clock was set back meanwhile: the order of the journal says which failures were before it.
        events.JobsRetried(at_s=1.0, message_id="r", jobs=("pretrain/0", "pretrain/1")),
    )
    found = decide(all_failing(7, "no file", *journal), nodes=gpu_nodes(8))
    assert of_type(found, TripSweep) == []
    assert {command.job for command in of_type(found, LaunchJob)} == {"pretrain/0", "pretrain/1"}


def test_breaker_trips_again_when_retried_jobs_fail_as_before() -> None:
    jobs = [gpu_job(f"pretrain/{number}", gpus=1) for number in range(5)]
    journal: list[Event] = [
        events.SweepTripped(at_s=4.0, reason="5 failed"),
        events.SweepFinished(at_s=5.0, status=events.SweepEnding.FAILED),
        events.JobsRetried(at_s=6.0, message_id="r", jobs=tuple(job.name for job in jobs)),
    ]
    for job in jobs:
        journal += [
            launched(job, "node-0000", at_s=7.0, number=2),
            failed(job, FailureKind.USER_ERROR, "no file", at_s=8.0, number=2),
            events.JobFailed(at_s=8.0, job=job.name, reason="no file"),
        ]
    assert len(of_type(decide(all_failing(5, "no file", *journal), nodes=gpu_nodes(8)), TripSweep)) == 1


def test_breaker_holds_while_failures_differ() -> None:
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    jobs = [gpu_job(f"pretrain/{number}", gpus=1) for number in range(5)]
    journal: list[Event] = []
    for word, job in zip(words, jobs, strict=True):
        journal += [launched(job), failed(job, FailureKind.USER_ERROR, f"{word} is wrong")]
        journal.append(events.JobFailed(at_s=3.0, job=job.name, reason=word))
    assert (
        of_type(
            decide(after(plan_of("s", *jobs, gpu_job("pretrain/x", gpus=1)), *journal), nodes=gpu_nodes(8)), TripSweep
        )
        == []
    )


def failing_on(
    node: str,
    num_jobs: int,
    message: str = "died",
    kind: FailureKind = FailureKind.UNKNOWN,
    *,
    sweep: str = "s",
    store_uri: str = "",
) -> Snapshot:
    jobs = [gpu_job(f"pretrain/{number}", gpus=1) for number in range(num_jobs)]
    journal: list[Event] = []
    for job in jobs:
        journal += [launched(job, node), failed(job, kind, message, node=node)]
    return after(replace(plan_of(sweep, *jobs), store_uri=store_uri), *journal)


FULL, SILENT = "[Errno 28] No space left on device: '/scratch'", "the store did not answer in 60 s"
FULL_CACHE = "no room for artifacts/index/x under /cache: the disk is full; free space there"


def test_node_on_which_different_jobs_fail_is_excluded_for_a_while() -> None:
    found = decide(failing_on("node-0002", 3), nodes=gpu_nodes(80))
    (command,) = of_type(found, ExcludeNode)
    assert (command.node, command.until_s) == ("node-0002", 10.0 + HOUR_S)
    assert "3 jobs failed on it" in command.reason
    assert of_type(decide(failing_on("node-0002", 2), nodes=gpu_nodes(80)), ExcludeNode) == []
    gone = failing_on("a-spot-node", 40, kind=FailureKind.NODE_LOST, sweep="t")
    found = decide(gone, failing_on("node-0002", 3), nodes=gpu_nodes(80))
    assert [command.node for command in of_type(found, ExcludeNode)] == ["node-0002"]


@pytest.mark.parametrize(
    ("message", "failures", "excluded"),
    [
        (FULL, (0, 3), ["node-0001"]),
        (FULL, (0, 0, 3, *[0] * 7), ["node-0002"]),
        (FULL, (0, 3, 5, *[0] * 17), ["node-0002", "node-0001"]),
        (FULL_CACHE, (0, 3), ["node-0001"]),
        (FULL, (8, 1), []),
        (FULL, (2, 7), []),
        (FULL, (0, 3, 5, 1, *[0] * 16), []),
        (FULL, [8] * 10, []),
        (SILENT, (8, 0), []),
        (SILENT, (8, 1), []),
        (SILENT, [1, 2, 3, 4, 3, 2, 1, 2, 3, 4], []),
    ],
)
def test_node_with_a_full_disk_is_excluded_and_none_if_the_store_is_full_or_out_of_reach(
    message: str, failures: Sequence[int], excluded: list[str]
) -> None:
    snapshots = [
        failing_on(f"node-{node:04d}", num_jobs, message, FailureKind.STORAGE, sweep=f"s{node}")
        for node, num_jobs in enumerate(failures)
    ]
    found = of_type(decide(*snapshots, nodes=gpu_nodes(8 * len(failures))), ExcludeNode)
    assert [command.node for command in found] == excluded


def test_full_store_excludes_no_node() -> None:
    message = f"writing pins/x under file:///shared failed: {FULL}"
    full = failing_on("node-0001", 3, message, FailureKind.STORAGE, store_uri="file:///shared")
    assert of_type(decide(full, nodes=gpu_nodes(16)), ExcludeNode) == []


@pytest.mark.parametrize(("later_s", "excluded"), [(OUTAGE_S, []), (3 * OUTAGE_S, ["node-0000"])])
def test_full_disk_counts_if_another_node_met_one_at_another_time(later_s: float, excluded: list[str]) -> None:
    other = gpu_job("pretrain/other", gpus=8)
    failure = replace(failed(other, FailureKind.STORAGE, FULL, node="node-0001"), at_s=later_s)
    elsewhere = after(plan_of("other", other), launched(other, "node-0001"), failure)
    full = failing_on("node-0000", 4, FULL, FailureKind.STORAGE)
    found = of_type(decide(full, elsewhere, nodes=gpu_nodes(16), now=4 * OUTAGE_S), ExcludeNode)
    assert [command.node for command in found] == excluded


def test_node_whose_hardware_is_named_is_excluded_at_once() -> None:
    snapshot = failing_on("node-0002", 1, "CUDA error: uncorrectable ECC error encountered", FailureKind.NODE_LOST)
    (command,) = of_type(decide(snapshot, nodes=gpu_nodes(80)), ExcludeNode)
    assert command.reason.startswith("node node-0002 is excluded for 1 h: broken GPU")


def test_jobs_keep_away_from_an_excluded_node_until_its_time_is_over() -> None:
    job = gpu_job("finetune/a", gpus=8)
    excluded = events.NodeExcluded(at_s=1.0, node="node-0000", reason="", until_s=100.0)
    snapshot = after(plan_of("s", job), excluded)
    assert set(of_type(decide(snapshot, nodes=gpu_nodes(16)), LaunchJob)[0].nodes) == {"node-0001"}
    assert set(of_type(decide(snapshot, nodes=gpu_nodes(16), now=100.0), LaunchJob)[0].nodes) == {"node-0000"}
    # On the only node there is, an exclusion would be a silent wait.
    assert set(of_type(decide(snapshot, nodes=gpu_nodes(8)), LaunchJob)[0].nodes) == {"node-0000"}


# Orders of clients


def test_paused_sweep_starts_nothing_and_gives_its_room_back_where_asked() -> None:
    running, waiting = gpu_job("pretrain/a", gpus=1), gpu_job("pretrain/b", gpus=1)
    plan = plan_of("s", running, waiting)
    finish = events.SweepPaused(at_s=2.0, message_id="p")
    save = events.SweepPaused(at_s=2.0, message_id="p", running=events.Running.CHECKPOINT)
    assert decide(after(plan, launched(running, "node-0000"), finish), nodes=gpu_nodes(8)) == []
    (command,) = decide(after(plan, launched(running, "node-0000"), save), nodes=gpu_nodes(8))
    assert isinstance(command, PreemptAttempt)


@pytest.mark.parametrize("other", [-20, 0])
def test_attempt_that_ends_because_its_sweep_pauses_is_asked_once_and_makes_room(other: int) -> None:
    first, second = gpu_job("pretrain/paused", gpus=8), gpu_job("pretrain/other", gpus=8)
    save = events.SweepPaused(at_s=HOUR_S, message_id="p", running=events.Running.CHECKPOINT)
    paused = after(plan_of("paused", first, priority=-10), launched(first, *["node-0000"] * 8), save)
    runs = after(plan_of("runs", second, priority=other), launched(second, *["node-0001"] * 8))
    high = after(plan_of("high", gpu_job("pretrain/high", gpus=8), priority=10))
    durations = {"paused": {first.name: 9 * HOUR_S}, "runs": {second.name: 9 * HOUR_S}}
    options: dict[str, Any] = {"now": HOUR_S, "durations": durations}
    (command,) = decide(paused, runs, high, nodes=gpu_nodes(16), **options)
    assert isinstance(command, PreemptAttempt)
    assert (command.sweep, "the sweep is paused" in command.reason) == ("paused", True)
    leaves = replace(gpu_nodes(16)[0], leaves_at_s=HOUR_S + 60.0)
    found = decide(paused, runs, high, nodes=(leaves, gpu_nodes(16)[1]), **options)
    assert [one.attempt_id for one in of_type(found, PreemptAttempt)].count(f"{first.key}.1") == 1


def test_time_in_which_its_sweep_was_paused_makes_no_job_more_urgent() -> None:
    turns = [
        (1.0, events.SweepPaused),
        (12.0, events.SweepResumed),
        (13.0, events.SweepPaused),
        (14.0, events.SweepResumed),
    ]
    pauses = [event(at_s=hour * HOUR_S, message_id=f"p{hour}") for hour, event in turns]
    plan, nodes, now = plan_of("low", gpu_job("finetune/low", gpus=8)), gpu_nodes(8), 17 * HOUR_S
    snapshot = after(plan, *pauses)
    restarted = decode_snapshot(json.loads(json.dumps(encode_snapshot(snapshot))), plan)
    for found, waited_h in ((snapshot, 5), (restarted, 5), (after(plan, *pauses[:2]), 6), (after(plan), 12)):
        (command,) = of_type(decide(found, nodes=nodes, now=now), LaunchJob)
        assert command.aging == int(waited_h / 6 * 10)
    again = events.PlanAccepted(at_s=15 * HOUR_S, message_id="again", revision=1)
    (command,) = of_type(decide(after(plan, *pauses, again), nodes=nodes, now=now), LaunchJob)
    assert command.aging == int(2 / 6 * 10), "the pauses before it are over"


@pytest.mark.parametrize(("paused_h", "first"), [(0.0, "gang"), (1.0, "small")])
def test_job_does_not_starve_by_the_time_in_which_its_sweep_was_paused(paused_h: float, first: str) -> None:
    """A gang beyond its sweep's share goes first once it has waited for more than six hours."""
    runs = {name: gpu_job(f"finetune/{name}", gpus=1) for name in ("gang", "small")}
    waits = {"gang": gpu_job("pretrain/gang", gpus=4), "small": gpu_job("pretrain/small", gpus=3)}
    pause = [
        events.SweepPaused(at_s=HOUR_S, message_id="p"),
        events.SweepResumed(at_s=(1.0 + paused_h) * HOUR_S, message_id="r"),
    ]
    snapshots = [
        after(plan_of(name, job, waits[name]), launched(job, "node-0000"), *pause if name == "gang" else ())
        for name, job in runs.items()
    ]
    durations = {name: {job.name: 90 * HOUR_S} for name, job in runs.items()}
    found = decide(*snapshots, nodes=gpu_nodes(8), now=6.5 * HOUR_S, durations=durations)
    assert [one.sweep for one in of_type(found, LaunchJob)] == [first]


def test_job_that_fails_for_good_in_a_paused_sweep_fails_there_so_that_it_can_be_retried() -> None:
    job, below = gpu_job("pretrain/a", gpus=1), gpu_job("finetune/a", "pretrain/a", gpus=1)
    pause = events.SweepPaused(at_s=1.5, message_id="p")
    snapshot = after(plan_of("s", job, below), launched(job), pause, failed(job, FailureKind.USER_ERROR, "no file"))
    found = decide(snapshot, nodes=gpu_nodes(8))
    assert [type(command).__name__ for command in found] == ["FailJob", "SkipJob"]
    assert decide(snapshot, nodes=gpu_nodes(8), held={"s"}) == []


def test_stopping_sweep_cancels_what_waits_and_ends_when_the_rest_has() -> None:
    running, waiting = gpu_job("pretrain/a", gpus=1), gpu_job("pretrain/b", gpus=1)
    plan, stop = plan_of("s", running, waiting), events.SweepStopping(at_s=2.0, message_id="p")
    journal = [launched(running, "node-0000"), stop]
    assert decide(after(plan, *journal), nodes=gpu_nodes(8)) == [CancelJob(sweep="s", job="pretrain/b")]
    cancelled = events.JobCancelled(at_s=3.0, job="pretrain/b")
    assert decide(after(plan, *journal, cancelled), nodes=gpu_nodes(8)) == []
    ended = after(plan, *journal, cancelled, done(running, 4.0))
    assert decide(ended, nodes=gpu_nodes(8)) == [FinishSweep(sweep="s", status=events.SweepEnding.CANCELLED)]


@pytest.mark.parametrize("order", [events.SweepStopping, events.SweepPaused])
def test_sweep_that_starts_nothing_more_takes_back_attempts_that_wait_for_their_resources(
    order: type[events.SweepStopping | events.SweepPaused],
) -> None:
    running, waiting = gpu_job("pretrain/a", gpus=8), gpu_job("pretrain/b", gpus=8)
    plan, nodes = plan_of("s", running, waiting), gpu_nodes(8)
    journal = [launched(running, *["node-0000"] * 8), launched(waiting, awaits_room=True)]
    journal.append(order(at_s=2.0, message_id="p"))
    (command,) = decide(after(plan, *journal), nodes=nodes, maximum=nodes)
    assert isinstance(command, PreemptAttempt)
    assert command.attempt_id == f"{waiting.key}.1"
    assert "the attempt waits for its resources" in command.reason
    asked = events.AttemptPreempting(
        at_s=3.0, job=waiting.name, attempt_id=command.attempt_id, reason=command.reason, grace_s=120.0
    )
    assert decide(after(plan, *journal, asked), nodes=nodes, maximum=nodes) == []
