"""The data plane's entry point for runners that a test kills while they write shards."""

from __future__ import annotations

import os
from dataclasses import replace
from threading import Event

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from workloads.run import execute as run_job

ENTRY_POINT = "tests.integration.conversion_runs:execute"
VICTIM = "part0"


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Run a job; the first attempt at part 0 says which process it is once a shard is durable, and goes no further."""
    if not request.job.endswith(VICTIM) or request.attempt_number > 1:
        return run_job(request, context)

    def report(progress: Progress) -> None:
        context.report(replace(progress, metrics={**progress.metrics, "pid": os.getpid()}))
        if progress.step:
            Event().wait()

    return run_job(request, replace(context, report=report))
