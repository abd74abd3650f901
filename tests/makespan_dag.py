"""The sweep that schedulers are measured by: 192 pretrains of 8-32 GPUs, 50 one-GPU transfers of each."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.nodes import Node
from orchestrator.sweepfile.values import Policy
from tests.builders import make_job

NUM_PRETRAINS = 192
NUM_TRANSFERS = 50
GPUS_PER_NODE = 8
_HOUR_S = 3600.0
_MODELS = ((8, 4.1e9), (16, 17.6e9), (32, 61.6e9))
"""GPUs, and multiply-adds per image of 224 pixels: ResNet-50, ViT-B/16, ViT-L/16."""
_IMAGES = {"imagenet-1k": 1.28e6, "inat-2021": 2.69e6, "imagenet-21k": 14.2e6}
_FLOPS_PER_S = 2.5e14


def gpu_job(name: str, *needs: str, gpus: int, min_gpus: int = 0, key: str = "") -> Job:
    """A job of one worker per GPU, four CPUs each."""
    return make_job(
        name, *needs, key=key, cpus=4.0 * gpus, gpus=float(gpus), min_gpus=float(min_gpus), workers=max(1, gpus)
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


def model_dag(
    seed: int, *, num_pretrains: int = NUM_PRETRAINS, sweep: str = "paper"
) -> tuple[Plan, Mapping[str, float]]:
    """A plan of the same shape whose durations follow from what is trained: three models on three data sets.

    Larger models have larger gangs. A pretraining takes 90 epochs (0.4-16 h), every other transfer fine-tunes for 8
    epochs of ImageNet-1k (0.3-4 h), the rest are half an epoch's work. Models and data sets are those of the published
    study and its ResNets; three passes of two operations per multiply-add, on GPUs that keep up 250 TFLOP/s.
    """
    rng = random.Random(seed)  # noqa: S311 - a test's dice
    sorts = [(model, images) for model in _MODELS for images in _IMAGES.values()]
    pretrains = [sorts[number * len(sorts) // num_pretrains] for number in range(num_pretrains)]
    rng.shuffle(pretrains)
    jobs, durations = [], {}
    for number, ((gpus, flops), images) in enumerate(pretrains):
        jobs.append(gpu_job(f"pretrain/{sweep}/{number}", gpus=gpus))
        durations[jobs[-1].name] = _training_s(images, 90.0, flops, gpus)
    for number, ((_, flops), _) in enumerate(pretrains):
        for transfer in range(NUM_TRANSFERS):
            job = gpu_job(f"finetune/{sweep}/{number}/{transfer}", f"pretrain/{sweep}/{number}", gpus=1)
            jobs.append(job)
            durations[job.name] = _training_s(_IMAGES["imagenet-1k"], 8.0 if transfer % 2 else 0.5, flops, 1)
    return Plan(sweep=sweep, revision=1, store_uri="", jobs=tuple(jobs), baseline="", policy=Policy()), durations


def _training_s(images: float, epochs: float, flops: float, gpus: int) -> float:
    return images * epochs * 6.0 * flops / (gpus * _FLOPS_PER_S)


def depth_first(plan: Plan) -> Plan:
    """The same jobs, each pretraining followed by its transfers, as people submit them to a queue."""
    after: dict[str, list[Job]] = {}
    for job in plan.jobs:
        for need in job.needs:
            after.setdefault(need, []).append(job)
    roots = [job for job in plan.jobs if not job.needs]
    return replace(plan, jobs=tuple(one for root in roots for one in (root, *after.get(root.name, ()))))


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
