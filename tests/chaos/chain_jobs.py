"""Jobs for tests that kill: chains of hashes, step by step, with checkpoints, whose ends anybody can work out.

No torch unless a job is a gang, so that a killed runner is back within seconds. Everything about storage, stops and
resuming is as in training: parts and a record by the commit protocol, checkpoints in the job's folder, one question per
step whether to stop. Each attempt leaves a trace: where it began, where it ended and what its commit did.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Outcome, Progress
from orchestrator.core.errors import PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import ArtifactWriter, read_record
from orchestrator.storage.layout import artifact_folder, checkpoints_folder
from orchestrator.storage.protocol import ObjectStore
from tests.builders import make_job

ENTRY_POINT = "tests.chaos.chain_jobs:execute"
_PART = "payload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one attempt says of itself; one that is killed says nothing after its first step."""

    attempt_id: str
    first_step: int
    """Steps that were done before it."""
    last_step: int
    end: str
    """``started``, ``preempted``, or the outcome of its commit."""


def chain_job(
    name: str,
    *parents: Job,
    num_steps: int,
    step_s: float,
    every: int = 5,
    num_workers: int = 1,
    cpus: float = 1.0,
    gate: str = "",
) -> Job:
    """A chain of hashes that starts from those of its parents; ``cpus`` are those of all of its workers.

    ``gate`` names an object of the store without which the last step is not made.
    """
    parameters = {"name": name, "num_steps": num_steps, "step_s": step_s, "every": every, "gate": gate}
    inputs = {f"parent{number}": parent for number, parent in enumerate(parents)}
    return make_job(
        name,
        kind=JobKind.PRETRAIN,
        label=name,
        cpus=cpus,
        workers=num_workers,
        parameters=parameters,
        inputs=inputs,
    )


def expected_ends(jobs: Sequence[Job]) -> dict[str, str]:
    """What the chains of a plan end in, by job: worked out here, without any of the program."""
    ends: dict[str, str] = {}
    for job in jobs:
        end = _start(job.identity["parameters"]["name"], [ends[parent] for parent in job.needs])
        for step in range(job.identity["parameters"]["num_steps"]):
            end = _next(end, step)
        ends[job.name] = end
    return ends


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Entry point of the runners."""
    parameters = request.parameters
    step, state = _newest_checkpoint(context.store, request) or (0, _first_state(context.store, request))
    first_step, num_steps = step, parameters["num_steps"]
    if not context.rank:
        _leave_trace(context.store, request, Trace(**_trace(request, first_step, step, "started")))
    while step < num_steps:
        place = {"pid": os.getpid(), "resumed_from_step": first_step}
        context.report(Progress(phase="train", step=step, total_steps=num_steps, metrics=place))
        if _must_stop(context):
            if not context.rank:
                _write_checkpoint(context.store, request, step, state)
                _leave_trace(context.store, request, Trace(**_trace(request, first_step, step, "preempted")))
            raise PreemptedError(f"stopped at step {step}, as asked")
        time.sleep(parameters["step_s"])
        if step == num_steps - 1 and not _is_open(context, parameters["gate"]):
            continue
        state = _next(state, step)
        step += 1
        if not context.rank and step % parameters["every"] == 0:
            _write_checkpoint(context.store, request, step, state)
    outcome = Outcome.COMMITTED
    if not context.rank:
        writer = ArtifactWriter(context.store, request)
        writer.add(_PART, state.encode())
        outcome = writer.commit(now=time.time())
        _leave_trace(context.store, request, Trace(**_trace(request, first_step, step, str(outcome))))
    return JobResult(
        attempt_id=request.attempt_id, key=request.key, outcome=outcome, resumed_from_step=first_step or None
    )


def end_of(store: ObjectStore, key: str) -> str:
    """What a committed chain ended in."""
    record = read_record(store, key)
    return store.get(f"{artifact_folder(key)}/{record.parts[_PART].path}").decode()


def read_traces(store: ObjectStore, key: str) -> list[Trace]:
    """What the attempts at a key said of themselves, in any order."""
    return [Trace(**json.loads(store.get(stat.name))) for stat in store.list_objects(f"traces/{key}/")]


def count_commits(store: ObjectStore, key: str) -> int:
    """How many attempts were told that theirs was the commit."""
    return Counter(trace.end for trace in read_traces(store, key))[str(Outcome.COMMITTED)]


def _start(name: str, parents: Sequence[str]) -> str:
    return sha256("/".join([name, *parents]).encode()).hexdigest()


def _next(state: str, step: int) -> str:
    return sha256(f"{state}/{step}".encode()).hexdigest()


def _first_state(store: ObjectStore, request: JobRequest) -> str:
    keys = [request.inputs[role] for role in sorted(request.inputs)]
    return _start(request.parameters["name"], [end_of(store, key) for key in keys])


def _must_stop(context: ExecutionContext) -> bool:
    """The same answer on all ranks, which also keeps them in step."""
    if context.world_size == 1:
        return context.should_stop()
    import torch

    said = torch.tensor(int(context.should_stop()))
    torch.distributed.all_reduce(said)
    return bool(said)


def _is_open(context: ExecutionContext, gate: str) -> bool:
    """The same answer on all ranks."""
    is_open = not gate or context.store.exists(gate)
    if context.world_size == 1:
        return is_open
    import torch

    said = torch.tensor(int(is_open))
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MIN)
    return bool(said)


def _write_checkpoint(store: ObjectStore, request: JobRequest, step: int, state: str) -> None:
    store.put(f"{checkpoints_folder(request.key)}/{step:08d}-{secrets.token_hex(8)}/state", state.encode())


def _newest_checkpoint(store: ObjectStore, request: JobRequest) -> tuple[int, str] | None:
    folder = checkpoints_folder(request.key) + "/"
    names = sorted(stat.name for stat in store.list_objects(folder))
    if not names:
        return None
    return int(names[-1].removeprefix(folder).partition("-")[0]), store.get(names[-1]).decode()


def _trace(request: JobRequest, first_step: int, last_step: int, end: str) -> dict[str, Any]:
    return {"attempt_id": request.attempt_id, "first_step": first_step, "last_step": last_step, "end": end}


def _leave_trace(store: ObjectStore, request: JobRequest, trace: Trace) -> None:
    content = json.dumps({name: getattr(trace, name) for name in Trace.__slots__}).encode()
    store.put(f"traces/{request.key}/{request.attempt_number:06d}-{secrets.token_hex(8)}.json", content)
