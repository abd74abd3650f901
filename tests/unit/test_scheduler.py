"""Single decisions; the properties over many sweeps are in ``tests/property/test_fold.py``."""

from dataclasses import replace
from typing import Any

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.commands import Command, FailJob, FinishSweep, LaunchJob, MarkReused, SkipJob, StopAttempt
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import fold
from orchestrator.state.snapshot import Snapshot
from tests.scripted_sweep import diamond, make_job, make_plan

NODE = Resources(cpus=2.0, memory_gib=8.0)


def after(jobs: tuple[Job, ...], *journal: Event, sweep: str = "sweep") -> Snapshot:
    accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
    plan = make_plan(*jobs, sweep=sweep)
    return fold(sweep, [accepted, *journal], lambda _: plan)


def reused(job: Job) -> Event:
    return events.JobReused(at_s=1.0, job=job.name, key=job.key)


def launched(job: Job) -> Event:
    return events.AttemptLaunched(at_s=1.0, job=job.name, key=job.key, attempt_id=f"{job.key}.1", number=1, epoch=1)


def commands(*snapshots: Snapshot, total: Resources = NODE, node: Resources = NODE, **options) -> list[Command]:
    nodes, now = options.pop("nodes", (node,)), options.pop("now", 10.0)
    return Scheduler().decide(ClusterView(snapshots=snapshots, total=total, nodes=nodes, now=now, **options))


def test_decide_fresh_sweep_launches_only_its_root() -> None:
    assert commands(after(diamond())) == [LaunchJob(sweep="sweep", job="dataset/tree")]


def test_decide_ready_jobs_launch_in_plan_order_as_many_as_fit() -> None:
    jobs = tuple(make_job(f"dataset/{name}") for name in "abc")
    assert [command.job for command in commands(after(jobs)) if isinstance(command, LaunchJob)] == [
        "dataset/a",
        "dataset/b",
    ]


def test_decide_live_attempts_of_other_sweeps_occupy_room() -> None:
    busy = (make_job("dataset/x", cpus=2.0),)
    assert commands(after(busy, launched(busy[0]), sweep="busy"), after(diamond())) == []


def test_decide_limit_of_live_attempts_holds_whatever_fits() -> None:
    jobs = tuple(make_job(f"dataset/{name}") for name in "abc")
    assert len(commands(after(jobs), max_live_attempts=1)) == 1


def test_decide_smaller_job_passes_one_that_does_not_fit_now_if_it_ends_before_that_one_can_start() -> None:
    jobs = (make_job("dataset/a"), make_job("dataset/b", cpus=2.0), make_job("dataset/c"))
    estimates = {"dataset/a": 100.0, "dataset/b": 100.0}
    short, long = estimates | {"dataset/c": 91.0}, estimates | {"dataset/c": 92.0}
    snapshot = after(jobs, launched(jobs[0]))  # a, launched at 1 s, ends at 101 s; now is 10 s
    assert commands(snapshot, durations={"sweep": short}) == [LaunchJob(sweep="sweep", job="dataset/c")]
    assert commands(snapshot, durations={"sweep": long}) == []


def test_decide_committed_key_is_reused_even_without_room() -> None:
    jobs = diamond()
    found = commands(after(jobs), total=Resources(cpus=0.0), committed={jobs[0].key})
    assert found == [MarkReused(sweep="sweep", job="dataset/tree")]


def test_decide_key_live_elsewhere_waits() -> None:
    job = make_job("dataset/tree")
    assert commands(after((job,), launched(job), sweep="other"), after((job,))) == []


def test_decide_failed_job_skips_all_its_descendants_in_one_round() -> None:
    jobs = (*diamond(), make_job("analyze/a", "probe/a"))
    failed = events.JobFailed(at_s=2.0, job="pretrain/a", reason="")
    found = commands(after(jobs, reused(jobs[0]), failed))
    assert SkipJob(sweep="sweep", job="probe/a", because="pretrain/a") in found
    assert SkipJob(sweep="sweep", job="analyze/a", because="probe/a") in found
    assert LaunchJob(sweep="sweep", job="pretrain/b") in found


def test_decide_infeasible_job_fails_and_names_the_largest_shape() -> None:
    (command,) = commands(after((make_job("dataset/tree", cpus=3.0),)), total=Resources(cpus=64.0))
    assert isinstance(command, FailJob)
    assert f"asks for {Resources(cpus=3.0)}" in command.reason
    assert f"largest node has {NODE}" in command.reason


def test_decide_job_that_fits_only_a_node_without_gpus_launches() -> None:
    nodes = (Resources(cpus=64.0), Resources(cpus=8.0, gpus=1.0))
    found = commands(after((make_job("dataset/tree", cpus=32.0),)), total=Resources(cpus=72.0, gpus=1.0), nodes=nodes)
    assert found == [LaunchJob(sweep="sweep", job="dataset/tree")]


def test_decide_infeasible_job_on_mixed_nodes_names_the_largest_of_each_sort() -> None:
    wide, accelerated, small = Resources(cpus=64.0), Resources(cpus=8.0, gpus=1.0), Resources(cpus=4.0)
    snapshot = after((make_job("dataset/tree", cpus=100.0),))
    (command,) = commands(snapshot, total=Resources(cpus=200.0), nodes=(wide, small, accelerated))
    assert isinstance(command, FailJob)
    assert f"largest nodes have {accelerated} or {wide};" in command.reason


def departing(sweep: str = "sweep") -> Snapshot:
    """One job runs and a new revision has another one in its place."""
    old, new = make_job("pretrain/old"), make_job("pretrain/new")
    plans = {1: make_plan(old, sweep=sweep), 2: make_plan(new, sweep=sweep)}
    journal = [
        events.PlanAccepted(at_s=0.0, message_id="m1", revision=1),
        launched(old),
        events.PlanAccepted(at_s=2.0, message_id="m2", revision=2),
        launched(new),
    ]
    return fold(sweep, journal, lambda event: plans[event.revision])


def test_decide_attempt_at_a_dropped_job_is_stopped() -> None:
    snapshot = departing()
    assert commands(snapshot) == [StopAttempt(sweep="sweep", attempt_id=next(iter(snapshot.leaving)))]


def test_decide_attempt_at_a_dropped_job_that_another_sweep_waits_for_goes_on() -> None:
    assert commands(departing(), after((make_job("pretrain/old"),), sweep="other")) == []


def gang(num_workers: int, cpus: float) -> Job:
    job = make_job("dataset/gang", cpus=cpus)
    return replace(job, execution=replace(job.execution, num_workers=num_workers))


def test_decide_gang_larger_than_any_node_launches_where_its_workers_fit() -> None:
    cluster: dict[str, Any] = {"total": Resources(cpus=4.0, memory_gib=16.0), "nodes": (NODE, NODE)}
    assert commands(after((gang(2, 4.0),)), **cluster) == [LaunchJob(sweep="sweep", job="dataset/gang")]


def test_decide_gang_with_a_worker_larger_than_any_node_is_infeasible() -> None:
    cluster: dict[str, Any] = {"total": Resources(cpus=9.0), "nodes": (NODE, NODE)}
    (command,) = [c for c in commands(after((gang(2, 6.0),)), **cluster) if isinstance(c, FailJob)]
    assert "6 CPU for 2 workers (3 CPU each)" in command.reason


def test_decide_gang_larger_than_the_cluster_is_infeasible() -> None:
    cluster: dict[str, Any] = {"total": Resources(cpus=4.0), "nodes": (NODE, NODE)}
    (command,) = [c for c in commands(after((gang(3, 6.0),)), **cluster) if isinstance(c, FailJob)]
    assert "the cluster 4 CPU" in command.reason


def test_decide_gang_occupies_all_of_its_workers() -> None:
    jobs = (gang(2, 2.0), make_job("dataset/other"))
    assert commands(after(jobs)) == [LaunchJob(sweep="sweep", job="dataset/gang")]


def test_decide_cluster_without_nodes_fails_nothing() -> None:
    nothing = Resources(cpus=0.0)
    assert commands(after(diamond()), total=nothing, node=nothing) == []


def test_decide_shape_that_ran_before_waits_for_its_node_to_come_back() -> None:
    job = make_job("dataset/tree", cpus=8.0)
    lost = events.AttemptLost(at_s=2.0, job=job.name, attempt_id=f"{job.key}.1", reason="node died")
    assert commands(after((job,), launched(job), lost)) == []


def test_decide_job_in_backoff_waits_for_its_time() -> None:
    job = make_job("dataset/tree")
    lost = events.AttemptLost(at_s=10.0, job=job.name, attempt_id=f"{job.key}.1", reason="")
    snapshot = after((job,), launched(job), lost)
    assert commands(snapshot, now=10.1) == []
    (command,) = commands(snapshot, now=10.5)
    assert isinstance(command, LaunchJob)
    assert command.reason.startswith("after node_lost, 1 of at most 10 (10 + one per 4 of 0.0025 node-hours run)")


def test_decide_backoff_by_a_clock_that_was_set_back_since_is_over() -> None:
    job = make_job("dataset/tree")
    lost = events.AttemptLost(at_s=86_400.0, job=job.name, attempt_id=f"{job.key}.1", reason="")
    assert [type(command) for command in commands(after((job,), launched(job), lost), now=10.0)] == [LaunchJob]


def test_decide_all_jobs_done_finishes_the_sweep() -> None:
    job = make_job("dataset/tree")
    assert commands(after((job,), reused(job))) == [FinishSweep(sweep="sweep", status=events.SweepEnding.SUCCEEDED)]


def test_decide_empty_plan_finishes_the_sweep() -> None:
    assert len(commands(after(()))) == 1
