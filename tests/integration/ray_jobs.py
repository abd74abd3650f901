"""An entry point whose jobs do what their parameters say, without torch; runs inside runners."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.contract import ExecutionContext, JobKind, JobRequest, JobResult, Progress, Resources
from orchestrator.errors import PreemptedError, UserError
from orchestrator.ids import make_key
from orchestrator.plan.graph import Job
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore

ENTRY_POINT = "tests.integration.ray_jobs:execute"


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Report where it runs, wait for its gate if it has one, then end as told."""
    sys.stdout.write(f"hello from {request.job}\n")
    place = {"pid": os.getpid()}
    context.report(Progress(phase="train", step=1, total_steps=2, metrics=place))
    gate = request.parameters.get("gate")
    while gate and not Path(gate).exists():
        if context.should_stop():
            raise PreemptedError("stopped at step 1, as asked")
        time.sleep(0.01)
    match request.parameters.get("end"):
        case "user_error":
            raise UserError("no such model")
        case "memory_error":
            raise MemoryError
    writer = ArtifactWriter(context.store, request)
    writer.add("payload", request.attempt_id.encode())
    outcome = writer.commit(now=time.time(), metrics=place)
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=place)


@dataclass(slots=True, kw_only=True)
class Gate:
    """A job that was given ``path`` waits until the gate is open."""

    path: Path

    def open(self) -> None:
        self.path.touch()


def job(name: str, *, needs: tuple[str, ...] = (), cpus: float = 1.0, **parameters: Any) -> Job:
    """A job of the scripted kind; its name is part of its identity."""
    identity = {"kind": "labels", "code_version": 1, "parameters": {"name": name, **parameters}, "inputs": {}}
    return Job(
        name=name,
        kind=JobKind.LABELS,
        key=make_key("labels", name, identity),
        identity=identity,
        needs=needs,
        resources=Resources(cpus=cpus),
    )


def request(store: ObjectStore, one: Job, number: int = 0) -> JobRequest:
    """An attempt at a job."""
    return JobRequest(
        attempt_id=f"{one.key}.{number}",
        attempt_number=number,
        sweep="scripted",
        job=one.name,
        key=one.key,
        kind=one.kind,
        identity=one.identity,
        store_uri=store.uri,
    )
