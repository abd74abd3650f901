"""An entry point whose jobs do what their parameters say, without torch; runs inside runners."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.backends.protocol import AttemptReport, Backend
from orchestrator.core.contract import Execution, ExecutionContext, JobRequest, JobResult, Outcome, Progress
from orchestrator.core.errors import PreemptedError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore
from tests.builders import make_job, request_of

ENTRY_POINT = "tests.integration.ray_jobs:execute"


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Report where it runs, wait for its gate if it has one, then end as told."""
    sys.stdout.write(f"hello from {request.job}\n")
    logging.getLogger("workloads").info("a word to the log")
    place = {
        "pid": os.getpid(),
        "rank_sum": rank_sum(context),
        "sees_gpus": bool(os.environ["CUDA_VISIBLE_DEVICES"]),
        "has_gpu": context.has_gpu,
    }
    context.report(Progress(phase="train", step=1, total_steps=2, metrics=place))
    context.activity.tick()
    if request.parameters.get("hangs") and not (request.parameters.get("hangs_once") and request.attempt_number > 1):
        hang_until(Path(request.parameters["hangs"]))
    time.sleep(request.parameters.get("work_s", 0.0))
    gate = request.parameters.get("gate")
    while gate and not Path(gate).exists():
        if context.should_stop():
            raise PreemptedError("stopped at step 1, as asked")
        time.sleep(0.01)
    match request.parameters.get("end"):
        case "rank1_user_error":
            end_on_rank1(context, UserError("no such model on rank 1"))
        case "rank1_ecc":
            end_on_rank1(context, RuntimeError("CUDA error: uncorrectable ECC error encountered"))
        case "user_error":
            raise UserError("no such model")
        case "memory_error":
            raise MemoryError
    if context.rank:
        return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=Outcome.COMMITTED)
    writer = ArtifactWriter(context.store, request)
    writer.add("payload", request.attempt_id.encode())
    outcome = writer.commit(now=time.time(), metrics=place)
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=place)


def hang_until(ready: Path) -> None:
    """Once told, hold Python's lock for ever: no thread of this process can do anything, or be asked to stop."""
    while not ready.exists():
        time.sleep(0.01)
    ctypes.PyDLL(None).pause()


def end_on_rank1(context: ExecutionContext, error: Exception) -> None:
    """Fail on rank 1; the others notice at their next collective operation."""
    if context.rank == 1:
        raise error
    rank_sum(context)


def rank_sum(context: ExecutionContext) -> int:
    """Sum of all ranks + 1, by a collective operation of the gang."""
    if context.world_size == 1:
        return 1
    import torch

    total = torch.tensor(context.rank + 1)
    torch.distributed.all_reduce(total)
    return int(total)


@dataclass(slots=True, kw_only=True)
class Gate:
    """A job that was given ``path`` waits until the gate is open."""

    path: Path

    def open(self) -> None:
        self.path.touch()


def job(name: str, *, needs: tuple[str, ...] = (), cpus: float = 1.0, **parameters: Any) -> Job:
    """A job of the scripted kind; its name is part of its identity."""
    return make_job(name, *needs, kind=JobKind.LABELS, label=name, cpus=cpus, parameters={"name": name, **parameters})


def workers(ray_cluster: Any, *titles: str) -> list[int]:
    """Processes that the shared cluster has started and whose title contains one of these texts."""
    raylet = ray_cluster._private.worker._global_node.all_processes["raylet"][0].process
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found_title = (folder / "cmdline").read_text()
            if parent == raylet.pid and any(title in found_title for title in titles):
                found.append(int(folder.name))
    return found


def reservations(ray_cluster: Any) -> set[str]:
    """Ids of placement groups that are there, whether they hold something or wait."""
    table = ray_cluster.util.placement_group_table()
    return {name for name, group in table.items() if group["state"] != "REMOVED"}


def request(store: ObjectStore, one: Job, number: int = 0, *, num_workers: int = 1) -> JobRequest:
    """An attempt at a job."""
    return request_of(one, store.uri, number, sweep="scripted", execution=Execution(num_workers=num_workers))


def look(backend: Backend, attempt_id: str) -> AttemptReport:
    """What a backend knows of one attempt."""
    (report,) = backend.observe([attempt_id])
    return report
