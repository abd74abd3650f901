"""What the scheduler promises on any cluster, for any sweeps: checked at every decision of whole runs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import Command, LaunchJob
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state.nodes import Node
from orchestrator.state.transitions import JobState
from orchestrator.sweepfile.values import Policy
from tests.makespan import World, decides
from tests.makespan_dag import gpu_job

HOUR_S = 3600.0


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Node, ...]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5))
    return tuple(
        Node(name=f"n{number}", resources=Resources(cpus=4.0 * size, gpus=float(size), memory_gib=64.0))
        for number, size in enumerate(sizes)
    )


@st.composite
def sweeps(draw: st.DrawFn, name: str, most: int) -> tuple[Plan, Mapping[str, float]]:
    jobs: list[Job] = []
    durations: dict[str, float] = {}
    for number in range(draw(st.integers(1, 12))):
        earlier = [job.name for job in jobs]
        needs = draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)) if earlier else []
        gpus = draw(st.integers(0, most))
        min_gpus = draw(st.integers(0, gpus)) if gpus > 1 else 0
        job = gpu_job(f"pretrain/{name}/{number}", *needs, gpus=gpus, min_gpus=min_gpus)
        if not gpus:
            job = replace(job, resources=Resources(cpus=draw(st.sampled_from([0.5, 1.0, 4.0]))))
        jobs.append(job)
        durations[job.name] = draw(st.floats(1.0, 5 * HOUR_S))
    policy = Policy(
        priority=draw(st.sampled_from([-10, 0, 10])),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        max_gpus=draw(st.sampled_from([None, float(most)])),
        max_concurrent=draw(st.sampled_from([None, 1, 3])),
    )
    return Plan(sweep=name, revision=1, store_uri="", jobs=tuple(jobs), baseline="", policy=policy), durations


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Plan], dict[str, Mapping[str, float]], tuple[Node, ...]]:
    nodes = draw(clusters())
    most = int(sum(node.resources.gpus for node in nodes))
    drawn = [draw(sweeps(f"s{number}", most)) for number in range(draw(st.integers(1, 3)))]
    plans = {plan.sweep: plan for plan, _ in drawn}
    return plans, {plan.sweep: durations for plan, durations in drawn}, nodes


def check_room(world: World, _commands: list[Command]) -> None:
    used: dict[str, Counter[str]] = {}
    for sweep, snapshot in world.snapshots.items():
        live, policy = snapshot.live_attempts, world.plans[sweep].policy
        assert len(live) <= (policy.max_concurrent or len(live))
        assert policy.max_gpus is None or sum(one.resources.gpus for one in live) <= policy.max_gpus + 1e-6
        for attempt in live:
            job = world.plans[sweep].by_name()[attempt.job]
            assert len(attempt.nodes) == attempt.num_workers, "a gang has a node for each of its workers"
            assert max(1.0, job.resources.min_gpus or job.resources.gpus) <= attempt.num_workers
            share = attempt.resources.share(attempt.num_workers)
            for name in attempt.nodes:
                used.setdefault(name, Counter()).update(cpus=share.cpus, gpus=share.gpus)  # type: ignore[call-overload]
    shapes = {node.name: node.resources for node in world.nodes}
    for name, amounts in used.items():
        assert amounts["cpus"] <= shapes[name].cpus + 1e-6, f"{name}: CPUs"
        assert amounts["gpus"] <= shapes[name].gpus + 1e-6, f"{name}: GPUs"


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_whole_runs_end_without_overbooking_a_node_or_breaking_a_cap(drawn) -> None:
    plans, durations, nodes = drawn
    scheduler = Scheduler()

    def decide(snapshots, **options):
        commands = scheduler.decide(ClusterView(snapshots=snapshots, durations=durations, **options))
        assert Scheduler().decide(ClusterView(snapshots=snapshots, durations=durations, **options)) == commands, (
            "a new one decides the same"
        )
        return commands

    world = World(plans=plans, nodes=nodes, durations=durations, decide=decide, on_decided=check_room)
    for sweep in plans:
        world.submit(sweep)
    world.run()
    assert all(snapshot.state.is_final for snapshot in world.snapshots.values()), scheduler.waits


@settings(max_examples=60, deadline=None)
@given(data=st.data(), gang=st.integers(2, 16))
def test_reservation_of_a_large_gang_is_never_delayed_by_small_jobs(data, gang) -> None:
    nodes = tuple(Node(name=f"n{n}", resources=Resources(cpus=32.0, gpus=8.0)) for n in range(2))
    running = [gpu_job(f"pretrain/run/{n}", gpus=data.draw(st.integers(1, 8))) for n in range(4)]
    waiting = [gpu_job(f"finetune/small/{n}", gpus=data.draw(st.integers(1, 2))) for n in range(12)]
    seconds = st.floats(1.0, 100.0)
    durations = {
        "run": {job.name: data.draw(seconds) for job in running},
        "gang": {"pretrain/gang": 50.0},
        "small": {job.name: data.draw(seconds) for job in waiting},
    }
    plans = {"run": tuple(running), "gang": (gpu_job("pretrain/gang", gpus=gang),), "small": tuple(waiting)}

    def start_of_gang(*others: str) -> float:
        scheduler = Scheduler()
        world = World(
            plans={
                name: Plan(
                    sweep=name,
                    revision=1,
                    store_uri="",
                    jobs=jobs,
                    baseline="",
                    policy=Policy(priority=1 if name == "gang" else 0, max_preemptions=0),
                )
                for name, jobs in plans.items()
            },
            nodes=nodes,
            durations=durations,
            decide=decides(scheduler, durations=durations),
        )
        world.submit("run")
        world.round()  # they hold their room before anybody else comes
        for name in ("gang", *others):
            world.submit(name)
        world.run()
        started_s = world.snapshots["gang"].jobs["pretrain/gang"].launched_at_s
        assert started_s is not None
        return started_s

    assert start_of_gang("small") <= start_of_gang() + 1e-6


@pytest.mark.parametrize("num_gpus", [1, 2, 10])
def test_two_sweeps_of_weights_three_and_one_share_a_busy_cluster_so(num_gpus) -> None:
    nodes = tuple(Node(name=f"n{n}", resources=Resources(cpus=64.0, gpus=1.0)) for n in range(num_gpus))
    plans, durations = {}, {}
    for name, weight in (("much", 3.0), ("little", 1.0)):
        jobs = tuple(gpu_job(f"finetune/{name}/{n}", gpus=1) for n in range(100 * num_gpus))
        policy = Policy(weight=weight)
        plans[name] = Plan(sweep=name, revision=1, store_uri="", jobs=jobs, baseline="", policy=policy)
        durations[name] = {job.name: 60.0 + 10.0 * (number % 7) for number, job in enumerate(jobs)}
    scheduler = Scheduler()
    world = World(plans=plans, nodes=nodes, durations=durations, decide=decides(scheduler))
    for name in plans:
        world.submit(name)
    world.run(until_s=1.5 * HOUR_S)
    assert all(snapshot.jobs.counts[JobState.PENDING] for snapshot in world.snapshots.values()), "both still want more"
    assert world.gpu_seconds["much"] / world.gpu_seconds["little"] == pytest.approx(3.0, rel=0.05)


def test_gang_of_the_whole_cluster_starts_although_small_jobs_keep_coming() -> None:
    nodes = tuple(Node(name=f"n{n}", resources=Resources(cpus=64.0, gpus=8.0)) for n in range(4))
    small = tuple(gpu_job(f"finetune/small/{n}", gpus=1) for n in range(600))
    whole = (gpu_job("pretrain/whole", gpus=32),)
    plans = {
        name: Plan(sweep=name, revision=1, store_uri="", jobs=jobs, baseline="")
        for name, jobs in (("small", small), ("whole", whole))
    }
    # The estimates are wrong: every small job takes four times as long.
    durations = {"small": {job.name: 400.0 + n % 90 for n, job in enumerate(small)}, "whole": {"pretrain/whole": 60.0}}
    estimates = {"small": dict.fromkeys((job.name for job in small), 100.0), "whole": {"pretrain/whole": 60.0}}
    scheduler = Scheduler()
    world = World(
        plans=plans,
        nodes=nodes,
        durations=durations,
        decide=decides(scheduler, durations=estimates),
    )
    for name in plans:
        world.submit(name)
    world.run()
    started_s, end_s = world.snapshots["whole"].jobs["pretrain/whole"].launched_at_s, world.now_s
    assert started_s is not None
    assert started_s < 0.25 * end_s


@pytest.mark.parametrize(("weight", "gpus_of_long"), [(1.0, 0), (3.0, 0), (3.0, 1)])
def test_gangs_larger_than_the_share_of_their_sweep_start_while_it_runs_more_and_shares_stay_right(
    weight, gpus_of_long
) -> None:
    nodes = tuple(Node(name=f"n{n}", resources=Resources(cpus=64.0, gpus=8.0)) for n in range(2))
    small = tuple(gpu_job(f"finetune/small/{n}", gpus=1) for n in range(1200))
    gangs = tuple(gpu_job(f"pretrain/gang/{n}", gpus=14) for n in range(20))
    jobs = {"small": small, "gangs": (*gangs, gpu_job("theory/long", gpus=gpus_of_long))}
    plans = {
        name: Plan(sweep=name, revision=1, store_uri="", jobs=some, baseline="", policy=Policy(weight=each))
        for (name, some), each in zip(jobs.items(), (weight, 1.0), strict=True)
    }
    durations = {
        "small": {job.name: HOUR_S * (0.8 + n * 37 % 100 / 300) for n, job in enumerate(small)},
        "gangs": {job.name: 8 * HOUR_S for job in gangs} | {"theory/long": 1000 * HOUR_S},
    }
    scheduler = Scheduler()
    world = World(plans=plans, nodes=nodes, durations=durations, decide=decides(scheduler, durations=durations))
    for name in plans:
        world.submit(name)
    world.run(until_s=9 * HOUR_S)
    assert world.snapshots["gangs"].jobs["pretrain/gang/0"].launched_at_s, "it starves after six hours"
    world.run(until_s=80 * HOUR_S)
    used = world.gpu_seconds
    assert used["small"] / used["gangs"] == pytest.approx(weight, rel=0.25)
    assert sum(used.values()) > 0.9 * 16 * world.now_s, "hardly a GPU is idle"


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_job_of_higher_priority_never_waits_while_a_lower_one_of_its_shape_starts(data) -> None:
    nodes = tuple(Node(name=f"n{n}", resources=Resources(cpus=32.0, gpus=8.0)) for n in range(2))
    plans, durations = {}, {}
    for name, priority in (("low", -10), ("high", 10)):
        jobs = tuple(gpu_job(f"finetune/{name}/{n}", gpus=1) for n in range(data.draw(st.integers(1, 60))))
        policy = Policy(priority=priority)
        plans[name] = Plan(sweep=name, revision=1, store_uri="", jobs=jobs, baseline="", policy=policy)
        durations[name] = {job.name: data.draw(st.floats(1.0, 60.0)) for job in jobs}

    def check(world: World, commands: list[Command]) -> None:
        started = {command.sweep for command in commands if isinstance(command, LaunchJob)}
        if "low" in started:
            assert not world.snapshots["high"].jobs.counts[JobState.PENDING]

    scheduler = Scheduler()
    world = World(plans=plans, nodes=nodes, durations=durations, decide=decides(scheduler), on_decided=check)
    for name in plans:
        world.submit(name)
    world.run()
