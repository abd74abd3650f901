"""How planning and scheduling grow with the number of jobs, and how well simulated clusters are used.

``python -m benchmarks.bench_planning NUM_JOBS`` is one measurement of planning in a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.simulated import LLAMA3_GPU_MTBF_H, ClusterSpec, Hazards
from orchestrator.core.contract import Resources
from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.estimate.eta import critical_path, list_schedule
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.commands import LaunchJob
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.fleets import StatedCluster, stated_fleet
from orchestrator.simulation import Assumptions, Forecast, forecast
from orchestrator.state import events
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.sweepfile import parse_sweep
from tests.makespan import Decides, Fifo, SubmissionFifo, World, decides
from tests.makespan_dag import depth_first, gpu_job, gpu_nodes, lower_bound_s, model_dag, paper_dag, with_errors
from tests.simulation.sweeps import training_sweep

# ---------------------------------------------------------------------------------------------------------------------
# One arm of the planning benchmark, in a process of its own: ``python -m benchmarks.bench_planning NUM_JOBS``.

_SPACES, _TRANSFERS = 8, 9
_TEXT = """\
version: 1
name: large
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2, 2, 2, 2, 2, 2, 2], num_train: 51200, num_val: 2560,
         image_size: 64, patch_size: 16, num_common_patches: 1, num_subclass_patches: 1}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2, depth3, depth4, depth5, depth6, depth7, depth8]}}
pretrain:
  model: {{name: resnet50, image_size: 224}}
  labels: ["levels/*"]
  recipe: {{epochs: 90, batch_size: 512, lr: 0.1}}
  seeds: [{seeds}]
transfer:
{transfers}
resources: {{pretrain: {{gpus: 8, cpus: 64}}, transfer: {{gpus: 1, cpus: 8}}}}
"""
_TRANSFER = (
    "  - {{name: t{n}, target: levels/depth1, protocol: finetune, recipe: {{epochs: {n}, batch_size: 256, lr: 0.1}}}}"
)


def main() -> None:
    """Plan a sweep of about so many jobs on 1,000 GPUs; print seconds by step and the peak of memory."""
    num_jobs = int(sys.argv[1])
    seeds = ", ".join(str(seed) for seed in range(max(1, num_jobs // (_SPACES * (1 + _TRANSFERS)))))
    transfers = "\n".join(_TRANSFER.format(n=number) for number in range(1, _TRANSFERS + 1))
    text, marks = _TEXT.format(seeds=seeds, transfers=transfers), [("start", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    sweep = parse_sweep(text, "sweep.yaml", {})
    mark("read")
    plan = build_plan(sweep, store_uri="file:///nowhere")
    mark("build")
    found = lookup_artifacts(plan)
    mark("look up")
    estimates = estimate(plan, skip=found.reused)
    mark("estimate")
    durations_s = estimates.durations_s()
    critical_path(plan, durations_s)
    makespan = list_schedule(plan, durations_s, stated_fleet(StatedCluster(gpus=1000)))
    mark("schedule")
    steps = {name: at - marks[number][1] for number, (name, at) in enumerate(marks[1:])}
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ratio = makespan.seconds / makespan.bound_s
    sys.stdout.write(json.dumps({"jobs": len(plan.jobs), "steps": steps, "peak_mib": peak_mib, "makespan": ratio}))


# ---------------------------------------------------------------------------------------------------------------------
# How planning grows with the number of jobs: seconds by step, memory, and the schedule beside its bound.

ROOT = Path(__file__).parents[1]
_SIZES = (1_000, 10_000, 100_000)
_ROUNDS = 3


def test_planning_time_and_memory_over_numbers_of_jobs() -> None:
    """Asked: 1,000 jobs <= 1 s; 100,000 jobs <= 60 s and <= 2 GiB; linear growth."""
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in _SIZES}
    for _ in range(_ROUNDS):
        for size in _SIZES:
            command = [sys.executable, "-m", "benchmarks.bench_planning", str(size)]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            runs[size].append(json.loads(done.stdout))
    base = 0.0
    for size, found in runs.items():
        total_s = statistics.median(sum(run["steps"].values()) for run in found)
        per_job_us = 1e6 * total_s / found[0]["jobs"]
        base = base or per_job_us
        steps = {name: statistics.median(run["steps"][name] for run in found) for name in found[0]["steps"]}
        shown = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in steps.items())
        memory = f"{max(run['peak_mib'] for run in found):,.0f} MiB"
        speed = f"{per_job_us:5.0f} us/job ({per_job_us / base:.2f}x)"
        line = f"{found[0]['jobs']:7,} jobs  {total_s:6.2f} s  {speed}  {memory}"
        print(f"{line}  {shown}  makespan / bound {found[0]['makespan']:.3f}")  # noqa: T201 - a benchmark's result
        assert size * 0.8 <= found[0]["jobs"] <= size * 1.2


# ---------------------------------------------------------------------------------------------------------------------
# How long planning takes, and how much memory: 1,000 to 100,000 jobs, in a process each.

SIZES = (1_000, 10_000, 100_000)
_SCRIPT = """
import json, resource, sys, time
from pathlib import Path
from orchestrator.planning.graph.build import build_plan
from orchestrator.sweepfile import parse_sweep
size = int(sys.argv[1])
spaces, seeds = (10, 10) if size <= 1_000 else (100, 10) if size >= 100_000 else (50, 10)
transfers = max(1, round((size / (spaces * seeds) - 1) / 3))
recipe = "{epochs: 2, batch_size: 64, lr: 1e-3}"
text = f'''version: 1
name: scale
datasets: {{tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 4096, num_val: 256}}}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1]}}
  random: {{dataset: tree, random: {{num_classes: {list(range(2, 2 + spaces))}}}}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["random/*"]
  recipe: {recipe}
  seeds: {list(range(seeds))}
transfer:
''' + "".join(
    f"- {{name: t{n}, target: levels/depth1, protocol: finetune, recipe: {recipe}, seeds: [0, 1, 2]}}\\n"
    for n in range(transfers)
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
sweep = parse_sweep(text, "scale.yaml", {})
read_s = time.process_time() - start
plan = build_plan(sweep, store_uri="file:///store")
plan_s = time.process_time() - start - read_s
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sizes = {"mib": peak / 1024, "grown_mib": (peak - before) / 1024}
print(json.dumps({"jobs": len(plan.jobs), "read_s": read_s, "plan_s": plan_s, **sizes}))
"""


def _measure(size: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, str(size)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_planning_grows_linearly() -> None:
    sys.stdout.write("\n    jobs  read s  plan s  us/job  peak MiB  KiB/job\n")
    for size in SIZES:
        found = min((_measure(size) for _ in range(3 if size <= 10_000 else 1)), key=lambda one: one["plan_s"])
        jobs = found["jobs"]
        per_job = f"{found['plan_s'] / jobs * 1e6:7.1f} {found['mib']:9.0f} {found['grown_mib'] * 1024 / jobs:8.2f}"
        sys.stdout.write(f"{jobs:8.0f} {found['read_s']:7.2f} {found['plan_s']:7.2f} {per_job}\n")
        assert jobs >= size * 0.9


# ---------------------------------------------------------------------------------------------------------------------
# What a decision costs, and how close whole runs come to the shortest possible; prints, asserts no times.

NUM_GPUS = 1000
SWEEP = "paper"


def format_ms(ticks: list[float]) -> str:
    """Median, 99th percentile and longest of some seconds."""
    p99_s = sorted(ticks)[int(0.99 * len(ticks))]
    return (
        f"{1e3 * statistics.median(ticks):.2f} ms (median), {1e3 * p99_s:.1f} (p99), {1e3 * max(ticks):.0f} (longest)"
    )


def run(name: str, plan: Plan, durations: Mapping[str, float], decide: Decides) -> float:
    """The makespan, seconds."""
    world = World(plans={SWEEP: plan}, nodes=gpu_nodes(NUM_GPUS), durations={SWEEP: durations}, decide=decide)
    world.submit(SWEEP)
    makespan_s = world.run()
    bound_s = lower_bound_s(plan, durations, NUM_GPUS)
    cost = f"CPU {format_ms(world.tick_cpu_s)}, wall {format_ms(world.tick_s)}"
    told = (
        f"{makespan_s / 3600.0:.2f} h, {makespan_s / bound_s:.4f} of the lower bound; {len(world.tick_s)} ticks: {cost}"
    )
    told += f"; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
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


# ---------------------------------------------------------------------------------------------------------------------
# How well a simulated cluster of 1,000 GPUs is used: goodput under losses, and what simulating costs.

NODE_MTBF_S = 19.5 * 3600.0
"""Of a spot node that is lost with 5 % in an hour."""


def run_of_goodput(hazards: Hazards, *, spot: bool) -> tuple[Forecast, float]:
    plan, durations_s = training_sweep(num_pretrains=60, num_transfers=50)
    # Gangs of 8 to 32 GPUs lie on one to four nodes.
    assumptions = Assumptions(mtbf_s=NODE_MTBF_S / 4 if spot else 0.0)
    begin_s = time.process_time()
    found = forecast(plan, ClusterSpec.uniform(1000, spot=spot), durations_s, hazards=hazards, assumptions=assumptions)
    return found, time.process_time() - begin_s


@pytest.mark.parametrize(
    ("name", "hazards", "asked"),
    [
        ("1 fault per 50,677 GPU-hours", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H), 0.99),
        ("and spot, 2 % per node-hour", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.02), None),
        ("and spot, 5 % per node-hour", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.05), 0.98),
        ("and spot, 20 % per node-hour", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.2), None),
    ],
)
def test_goodput_of_a_thousand_gpus(name: str, hazards: Hazards, asked: float | None) -> None:
    found, cpu_s = run_of_goodput(hazards, spot=hazards.spot_loss_per_h > 0.0)
    assert found.state is SweepState.SUCCEEDED
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(  # noqa: T201
        f"\n{name}: goodput {found.goodput:.4f} (asked {asked}), utilisation {found.utilisation:.3f}, makespan "
        f"{found.makespan_s / 3600:.2f} h of at least {found.lower_bound_s / 3600:.2f} h, {found.num_attempts} "
        f"attempts of {found.num_jobs} jobs, {found.num_rounds} rounds, {cpu_s:.1f} s of CPU, peak {peak_mib:.0f} MiB"
    )


if __name__ == "__main__":
    main()
