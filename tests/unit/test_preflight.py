"""One job of a sort goes ahead before many like it start."""

from __future__ import annotations

from orchestrator.controller.attempt_tracker import Heartbeats
from orchestrator.core.contract import Progress, Resources
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.commands import LaunchJob
from orchestrator.scheduling.preflight import MIN_JOBS, SILENT_S
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state.snapshot import Snapshot
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, done, launched, of_type, plan_of

NUM_GPUS = 64


def sweep_of(num_jobs: int, hours: float) -> tuple[Plan, dict[str, dict[str, float]]]:
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(num_jobs)]
    return plan_of("s", *jobs), {"s": {job.name: hours * HOUR_S for job in jobs}}


def launches(snapshot: Snapshot, durations, now: float = 10.0, stepping=frozenset()) -> list[str]:
    found = decide(snapshot, nodes=gpu_nodes(NUM_GPUS), now=now, durations=durations, stepping=stepping)
    return [command.job for command in of_type(found, LaunchJob)]


def test_large_sort_sends_one_job_ahead_until_it_has_trained_two_steps() -> None:
    plan, durations = sweep_of(16, hours=2.0)
    assert launches(after(plan), durations) == ["finetune/0"]
    ahead = after(plan, launched(plan.jobs[0], "node-0000", at_s=10.0))
    assert launches(ahead, durations, now=20.0) == []
    attempt_id = ahead.live_attempts[0].attempt_id
    assert len(launches(ahead, durations, now=30.0, stepping={attempt_id})) == 15


def test_waiting_jobs_of_a_large_sort_say_whom_they_wait_for() -> None:
    plan, durations = sweep_of(16, hours=2.0)
    scheduler = Scheduler()
    ahead = after(plan, launched(plan.jobs[0], "node-0000", at_s=10.0))
    whole = gpu_nodes(NUM_GPUS)
    scheduler.decide(
        ClusterView(
            snapshots=[ahead],
            total=Resources(cpus=512.0, gpus=64.0),
            nodes=whole,
            now=20.0,
            durations=durations,
            stepping=set(),
        )
    )
    assert scheduler.waits["s"]["finetune/1"] == "preflight: finetune/0, which is of its sort, has not made 2 steps yet"


def test_job_that_goes_ahead_and_ends_opens_the_way_as_well() -> None:
    plan, durations = sweep_of(16, hours=2.0)
    first = plan.jobs[0]
    ended = after(plan, launched(first, "node-0000", at_s=10.0), done(first, 20.0))
    assert len(launches(ended, durations, now=30.0)) == 15


def test_attempt_that_never_tells_its_steps_holds_nobody_up_for_long() -> None:
    plan, durations = sweep_of(16, hours=2.0)
    ahead = after(plan, launched(plan.jobs[0], "node-0000", at_s=10.0))
    assert launches(ahead, durations, now=9.0 + SILENT_S) == []
    assert len(launches(ahead, durations, now=10.0 + SILENT_S)) == 15


def test_small_sorts_and_unwatched_clusters_have_no_preflight() -> None:
    few, durations = sweep_of(MIN_JOBS - 1, hours=20.0)
    assert len(launches(after(few), durations)) == MIN_JOBS - 1
    short, durations = sweep_of(16, hours=0.1)
    assert len(launches(after(short), durations)) == 16
    large, durations = sweep_of(16, hours=2.0)
    assert len(launches(after(large), durations, stepping=None)) == 16


def test_each_sort_has_its_own_preflight() -> None:
    jobs = [gpu_job(f"finetune/{number}", gpus=1) for number in range(10)]
    jobs += [gpu_job(f"pretrain/{number}", gpus=4) for number in range(10)]
    durations = {"s": {job.name: 4 * HOUR_S for job in jobs}}
    assert sorted(launches(after(plan_of("s", *jobs)), durations)) == ["finetune/0", "pretrain/0"]


def test_heartbeats_know_who_has_made_two_steps_since_it_was_seen_first() -> None:
    beats = Heartbeats()
    for at_s, step in ((0.0, 100), (1.0, 101)):  # resumed: what an earlier attempt did does not count
        beats.see("a", Progress(phase="train", step=step), at_s)
    assert "a" not in beats.stepping
    beats.see("a", Progress(phase="train", step=102), 2.0)
    assert "a" in beats.stepping
    beats.retain(())
    assert "a" not in beats.stepping
