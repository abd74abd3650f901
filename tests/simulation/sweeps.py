"""Sweeps for forecasts and benchmarks: gangs that pretrain, and transfers of one GPU each."""

from __future__ import annotations

from orchestrator.planning.graph.plan import Job, Plan
from tests.builders import make_job

GANGS = (8, 16, 32)


def training_sweep(
    *, num_pretrains: int, num_transfers: int, pretrain_s: float = 4 * 3600.0, transfer_s: float = 1800.0
) -> tuple[Plan, dict[str, float]]:
    """A plan, and the seconds of its jobs; no two pretrains take the same time."""
    jobs = [_job("index/photos", gpus=0)]
    durations_s = {"index/photos": 60.0}
    for number in range(num_pretrains):
        backbone = _job(f"pretrain/space{number}", "index/photos", gpus=GANGS[number % len(GANGS)])
        durations_s[backbone.name] = pretrain_s * (1.0 + (number % 7) / 7.0)
        transfers = [_job(f"probe/space{number}/seed{seed}", backbone.name, gpus=1) for seed in range(num_transfers)]
        durations_s |= {job.name: transfer_s * (1.0 + (seed % 5) / 10.0) for seed, job in enumerate(transfers)}
        jobs += [backbone, *transfers]
    return Plan(sweep="sweep", revision=0, store_uri="", jobs=tuple(jobs), baseline=""), durations_s


def _job(name: str, *needs: str, gpus: int) -> Job:
    parameters = {"name": name, "recipe": {"epochs": 90}}
    workers = max(1, gpus)
    return make_job(
        name, *needs, label=name, cpus=4.0 * workers, gpus=float(gpus), workers=workers, parameters=parameters
    )
