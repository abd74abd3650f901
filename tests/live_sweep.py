"""A large sweep on disk in the midst of its run, as its controller and runners would have left it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from orchestrator.core.contract import Progress, Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state import events
from orchestrator.storage.layout import progress_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.lease import Lease
from tests.builders import SweepJournal, done, launched

SWEEP = "live"
CLUSTER = "ray-0123456789ab"
NUM_RUNNING = 100
NUM_PRETRAIN_SEEDS = 4
_EVENTS_PER_SEGMENT = 100


def write_live_sweep(store: ObjectStore, *, num_transfers: int, now: float, is_served: bool = False) -> Plan:
    """Label spaces and backbones are done, half of the transfers too, a hundred run, one of them a second time.

    Its controller renews its lease if ``is_served``.
    """
    if is_served:
        Lease(store, CLUSTER, "h", lambda: now).acquire()
    transfer_seeds = ", ".join(str(seed) for seed in range(num_transfers // (2 * 5 * NUM_PRETRAIN_SEEDS)))
    overrides = (
        f"name={SWEEP}",
        f"pretrain.seeds={list(range(NUM_PRETRAIN_SEEDS))}",
        f"transfer.*.seeds=[{transfer_seeds}]",
        "resources={pretrain: {gpus: 1, cpus: 8}, transfer: {gpus: 1, cpus: 8}}",
    )
    sweep, _ = load_sweep("quickstart", overrides)
    plan = replace(build_plan(sweep, store_uri=store.uri), revision=1, owner="ann")
    journal = SweepJournal(store, SWEEP, num_per_segment=_EVENTS_PER_SEGMENT)
    journal.accept(plan, now - 7200, cluster=CLUSTER)
    journal.tell(*_story(plan, now))
    journal.flush()
    store.put(progress_name(SWEEP), json.dumps({"at_s": now, "jobs": dict(_progress(plan))}).encode())
    return plan


def _transfers(plan: Plan) -> list[Job]:
    return [job for job in plan.jobs if job.kind in {JobKind.FINETUNE, JobKind.PROBE}]


def _running(plan: Plan) -> list[Job]:
    transfers = _transfers(plan)
    half = len(transfers) // 2
    return transfers[half : half + NUM_RUNNING]


def _story(plan: Plan, now: float) -> Iterator[events.Event]:
    running = _running(plan)
    waiting = {job.name for job in _transfers(plan)[len(_transfers(plan)) // 2 :]}
    for job in plan.jobs:
        if job.name not in waiting:
            yield _launch(job, 1, now - 3600)
            yield done(job, now - 1800, metrics={"val_error": 0.25})
    first = running[0]
    yield _launch(first, 1, now - 900)
    yield events.AttemptLost(at_s=now - 700, job=first.name, attempt_id=f"{first.key}.1", reason="its node is gone")
    for job in running:
        yield _launch(job, 2 if job is first else 1, now - 600)


def _launch(job: Job, number: int, at_s: float) -> events.Event:
    return launched(job, at_s=at_s, number=number, resources=Resources(cpus=8.0, gpus=1.0))


def _progress(plan: Plan) -> Iterator[tuple[str, object]]:
    running = _running(plan)
    for job in running:
        number = 2 if job is running[0] else 1
        place = len(job.name) * 7 % 40
        progress = Progress(
            phase="train",
            step=96 + place if number == 1 else 96,
            total_steps=512,
            images_per_s=1234.5,
            eta_s=190.0,
            metrics={"val_error": 0.31},
        )
        yield job.name, {"attempt_id": f"{job.key}.{number}", "progress": asdict(progress)}
    last = _transfers(plan)[-1]
    phase = "sweep other holds 4 of 104 GPUs at a higher priority"
    yield last.name, {"attempt_id": "", "progress": asdict(Progress(phase=phase))}
