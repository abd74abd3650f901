"""A job that trains nothing but takes its samples as training does, on as many workers as it is given.

Each step's batch is shared between the ranks by the very rule of training, put together again by a collective
operation, and added to a digest of all samples in their order, which is the artifact. So the artifact says whether the
sequence was that of one undisturbed run, whatever the numbers of workers were on the way.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from orchestrator.core.contract import (
    ExecutionContext,
    JobRequest,
    JobResult,
    Outcome,
    Progress,
)
from orchestrator.core.errors import PreemptedError
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.protocol import ObjectStore
from tests.builders import make_job
from workloads.data.order import SampleOrder, rank_slice

ENTRY_POINT = "tests.integration.elastic_jobs:execute"
BATCH_SIZE = 12
NUM_STEPS = 300
EVERY = 5
"""Steps from checkpoint to checkpoint."""
STEP_S = 0.2
"""Until the gate is open; then as fast as it goes."""


def elastic_job(*, gpus: int, min_gpus: int, gate: Path) -> Job:
    """One worker per GPU; it does not end before its gate is open."""
    parameters = {"name": "elastic", "num_steps": NUM_STEPS, "gate": str(gate)}
    return make_job(
        "pretrain/elastic",
        cpus=0.5 * gpus,
        gpus=float(gpus),
        min_gpus=float(min_gpus),
        workers=gpus,
        parameters=parameters,
    )


def samples() -> SampleOrder:
    """Some 4 epochs of uneven shards."""
    return SampleOrder([250, 300, 350], seed=7, block_shards=2)


def digest_of_all() -> str:
    """What an undisturbed run on one worker ends in."""
    digest = ""
    for step in range(NUM_STEPS):
        digest = _next(digest, samples_of(step, rank=0, world_size=1))
    return digest


def samples_of(step: int, *, rank: int, world_size: int) -> list[int]:
    """Ordinals of a rank's part of a step's batch."""
    start, stop = rank_slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE, rank=rank, world_size=world_size)
    ordinals: list[int] = samples().ordinals(start, stop).tolist()
    return ordinals


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Entry point of the runners."""
    from torch import distributed

    gate = Path(request.parameters["gate"])
    first_step, digest = _newest_checkpoint(context.store, request.key)
    step, world_size = first_step, distributed.get_world_size()
    _leave_trace(context, request, first_step=first_step, last_step=step, world_size=world_size)
    while step < NUM_STEPS:
        metrics = {"pid": os.getpid(), "world_size": world_size}
        context.report(Progress(phase="train", step=step, total_steps=NUM_STEPS, metrics=metrics))
        parts: list[Any] = [None] * world_size
        own = samples_of(step, rank=context.rank, world_size=world_size)
        distributed.all_gather_object(parts, (own, context.should_stop(), gate.exists()))
        if any(part[1] for part in parts):
            _write_checkpoint(context, request.key, step, digest)
            _leave_trace(context, request, first_step=first_step, last_step=step, world_size=world_size)
            raise PreemptedError(f"stopped at step {step}, as asked")
        is_open = all(part[2] for part in parts)
        time.sleep(0.0 if is_open else STEP_S)
        if not is_open and step == NUM_STEPS - 1:
            continue
        digest = _next(digest, [ordinal for part in parts for ordinal in part[0]])
        step += 1
        if step % EVERY == 0:
            _write_checkpoint(context, request.key, step, digest)
    outcome = Outcome.COMMITTED
    if not context.rank:
        writer = ArtifactWriter(context.store, request)
        writer.add("payload", digest.encode())
        outcome = writer.commit(now=time.time())
    _leave_trace(context, request, first_step=first_step, last_step=step, world_size=world_size)
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome)


def read_traces(store: ObjectStore, key: str) -> list[dict[str, int]]:
    """What each attempt said last, in their order: its number, its steps from and to, and its ranks."""
    return [json.loads(store.get(name)) for name in sorted(stat.name for stat in store.list_objects(f"traces/{key}/"))]


def _next(digest: str, ordinals: list[int]) -> str:
    return sha256(f"{digest}/{ordinals}".encode()).hexdigest()


def _write_checkpoint(context: ExecutionContext, key: str, step: int, digest: str) -> None:
    if not context.rank:
        context.store.put(f"{checkpoints_folder(key)}/{step:08d}-{secrets.token_hex(8)}/state", digest.encode())


def _newest_checkpoint(store: ObjectStore, key: str) -> tuple[int, str]:
    folder = checkpoints_folder(key) + "/"
    names = sorted(stat.name for stat in store.list_objects(folder))
    if not names:
        return 0, ""
    return int(names[-1].removeprefix(folder).partition("-")[0]), store.get(names[-1]).decode()


def _leave_trace(context: ExecutionContext, request: JobRequest, **numbers: int) -> None:
    if not context.rank:
        content = json.dumps({"number": request.attempt_number, **numbers}).encode()
        context.store.put(f"traces/{request.key}/{request.attempt_number:06d}.json", content)
