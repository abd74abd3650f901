"""The sweep that schedulers are measured by: 192 pretrains of 8-32 GPUs, 50 one-GPU transfers of each."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from orchestrator.contract import Execution, JobKind, Resources
from orchestrator.plan.graph import Job, Plan
from orchestrator.spec.policy import Policy
from orchestrator.state.nodes import Node

NUM_PRETRAINS = 192
NUM_TRANSFERS = 50
GPUS_PER_NODE = 8
_HOUR_S = 3600.0


def gpu_job(name: str, *needs: str, gpus: int, min_gpus: int = 0, key: str = "") -> Job:
    """A job of one worker per GPU, four CPUs each."""
    kind = JobKind(name.split("/", maxsplit=1)[0])
    chosen = key or f"{kind}-{name.partition('/')[2].replace('/', '-')}-0123"
    identity = {"kind": str(kind), "code_version": 1, "parameters": {"key": chosen}, "inputs": {}}
    resources = Resources(cpus=4.0 * gpus, gpus=float(gpus), min_gpus=float(min_gpus))
    execution = Execution(num_workers=max(1, gpus))
    return Job(
        name=name, kind=kind, key=chosen, identity=identity, needs=needs, resources=resources, execution=execution
    )


def gpu_nodes(num_gpus: int) -> tuple[Node, ...]:
    """Nodes of eight GPUs and 64 CPUs."""
    shape = Resources(cpus=64.0, gpus=float(GPUS_PER_NODE), memory_gib=512.0)
    return tuple(Node(name=f"node-{number:04d}", resources=shape) for number in range(num_gpus // GPUS_PER_NODE))


def paper_dag(
    seed: int,
    *,
    num_pretrains: int = NUM_PRETRAINS,
    num_transfers: int = NUM_TRANSFERS,
    sweep: str = "paper",
    skew: float = 0.0,
    policy: Policy | None = None,
) -> tuple[Plan, Mapping[str, float]]:
    """A plan in plan order (pretrains first, as the planner writes them) and what its jobs take, seconds.

    Pretrains take 2-10 h, evenly; or with ``skew`` mostly 3 h and up to 24 h (log-normal, its sigma), as models of
    different sizes do.
    """
    rng = random.Random(seed)  # noqa: S311 - a test's dice
    jobs, durations = [], {}
    for number in range(num_pretrains):
        job = gpu_job(f"pretrain/{sweep}/{number}", gpus=rng.choice([8, 16, 24, 32]))
        jobs.append(job)
        hours = min(24.0, rng.lognormvariate(math.log(3.0), skew)) if skew else rng.uniform(2.0, 10.0)
        durations[job.name] = hours * _HOUR_S
    for number in range(num_pretrains):
        for transfer in range(num_transfers):
            job = gpu_job(f"finetune/{sweep}/{number}/{transfer}", f"pretrain/{sweep}/{number}", gpus=1)
            jobs.append(job)
            durations[job.name] = rng.uniform(0.2, 1.2) * _HOUR_S
    plan = Plan(sweep=sweep, revision=1, store_uri="", jobs=tuple(jobs), baseline="", policy=policy or Policy())
    return plan, durations


def with_errors(durations: Mapping[str, float], seed: int, part: float = 0.3) -> Mapping[str, float]:
    """Estimates that are wrong by up to a part of what they estimate, each on its own."""
    rng = random.Random(seed)  # noqa: S311 - a test's dice
    return {name: seconds * rng.uniform(1.0 - part, 1.0 + part) for name, seconds in durations.items()}


def lower_bound_s(plan: Plan, durations: Mapping[str, float], num_gpus: float) -> float:
    """No schedule is shorter: all GPU-seconds by all GPUs, or the longest chain."""
    work = sum(durations[job.name] * job.resources.gpus for job in plan.jobs)
    ends: dict[str, float] = {}
    for job in plan.jobs:
        ends[job.name] = durations[job.name] + max((ends[need] for need in job.needs), default=0.0)
    return max(work / num_gpus, *ends.values())
