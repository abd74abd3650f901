"""What a decision costs, and how close whole runs come to the shortest possible; prints, asserts no times."""

import statistics
import time
from collections.abc import Mapping
from functools import partial

import pytest

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.commands import LaunchJob
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from tests.makespan import Decides, Fifo, SubmissionFifo, World, decides
from tests.makespan_dag import depth_first, gpu_job, gpu_nodes, lower_bound_s, model_dag, paper_dag, with_errors

NUM_GPUS = 1000
SWEEP = "paper"


def run(name: str, plan: Plan, durations: Mapping[str, float], decide: Decides) -> float:
    """The makespan, seconds."""
    world = World(plans={SWEEP: plan}, nodes=gpu_nodes(NUM_GPUS), durations={SWEEP: durations}, decide=decide)
    world.submit(SWEEP)
    makespan_s = world.run()
    ticks = sorted(world.tick_s)
    bound_s = lower_bound_s(plan, durations, NUM_GPUS)
    cost = f"median {1e3 * statistics.median(ticks):.2f} ms, p99 {1e3 * ticks[int(0.99 * len(ticks))]:.1f} ms"
    told = f"{makespan_s / 3600.0:.2f} h, {makespan_s / bound_s:.4f} of the lower bound; {len(ticks)} ticks: {cost}"
    print(f"\n{name}: {told}")  # noqa: T201 - a benchmark's result
    assert all(snapshot.state.is_final for snapshot in world.snapshots.values())
    return makespan_s


DAGS = {
    "pretrains of 2-10 h, evenly": partial(paper_dag, 0),
    "pretrains of 3 h mostly, up to 24 h": partial(paper_dag, 0, skew=1.0),
    "the same, other dice": partial(paper_dag, 1, skew=1.0),
    "durations of three models on three data sets": partial(model_dag, 0),
    "the same in another order": partial(model_dag, 1),
}


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dag", DAGS)
def test_makespan_of_a_paper_sweep_on_a_thousand_gpus(dag) -> None:
    plan, durations = DAGS[dag]()
    bound_s = lower_bound_s(plan, durations, NUM_GPUS)
    exact_s = run("exact estimates", plan, durations, decides(Scheduler(), durations={SWEEP: durations}))
    wrong = {SWEEP: with_errors(durations, 100)}
    wrong_s = run("estimates wrong by up to 30 %", plan, durations, decides(Scheduler(), durations=wrong))
    blind_s = run("no estimates", plan, durations, decides(Scheduler(), durations={}))
    ready_s = run("first ready, first out", plan, durations, Fifo().decide)
    submitted_s = run("first submitted, first out", depth_first(plan), durations, SubmissionFifo().decide)
    print(  # noqa: T201 - a benchmark's result
        f"{dag}, of the makespan with exact estimates: no estimates {blind_s / exact_s:.4f}, wrong ones "
        f"{wrong_s / exact_s:.4f}; FIFO by readiness {ready_s / exact_s:.3f}, by submission "
        f"{submitted_s / exact_s:.3f} (a perfect schedule: {ready_s / bound_s:.3f}, {submitted_s / bound_s:.3f})"
    )


@pytest.mark.bench
def test_placements_of_ten_thousand_ready_jobs_on_a_free_cluster() -> None:
    jobs = tuple(gpu_job(f"finetune/{number}", gpus=1) for number in range(10_000))
    plan = Plan(sweep=SWEEP, revision=1, store_uri="", jobs=jobs, baseline="")
    accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
    snapshot = apply(Snapshot(sweep=SWEEP), [accepted], lambda _: plan)
    scheduler, nodes = Scheduler(), gpu_nodes(NUM_GPUS)
    total = Resources(cpus=64.0 * len(nodes), gpus=float(NUM_GPUS))
    seconds = []
    for _ in range(10):
        started_s = time.process_time()
        commands = scheduler.decide(ClusterView(snapshots=[snapshot], total=total, nodes=nodes, now=1.0))
        seconds.append(time.process_time() - started_s)
        assert sum(isinstance(command, LaunchJob) for command in commands) == NUM_GPUS
    rate = NUM_GPUS / statistics.median(seconds[1:])
    print(f"\n{rate:,.0f} placements per CPU second; first tick {seconds[0]:.3f} s")  # noqa: T201 - a benchmark's result
