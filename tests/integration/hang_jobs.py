"""An entry point whose ranks meet again and again, until one of them does something else."""

from __future__ import annotations

import os
import time
from pathlib import Path

from orchestrator.core.activity import Activity
from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Outcome, Progress
from orchestrator.storage.artifacts import ArtifactWriter
from workloads.runtime.ranks import Ranks

ENTRY_POINT = "tests.integration.hang_jobs:execute"
STEPS = 20


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Meet a few times, then rank 1 waits for the file ``gate`` as ``doing`` says; rank 0 commits in the end."""
    ranks, parameters = Ranks.of(context), request.parameters
    folder = Path(parameters["folder"])
    context.report(Progress(phase="train", step=1, total_steps=2))
    for _ in range(STEPS):
        ranks.barrier()
        context.activity.stage = "train"
    context.report(Progress(phase="train", step=2, total_steps=2))  # travels with the activity, so both are known
    (folder / f"pid{context.rank}").write_text(str(os.getpid()))
    if context.rank == 1:
        with context.activity.during(Activity(parameters["doing"])):
            while not (folder / "gate").exists():
                time.sleep(0.01)
    for _ in range(STEPS):  # what a rank has sent before it is stopped may let others through the first
        ranks.barrier()
    if context.rank:
        return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=Outcome.COMMITTED)
    writer = ArtifactWriter(context.store, request)
    writer.add("payload", b"x")
    outcome = writer.commit(now=time.time(), metrics={})
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome)
