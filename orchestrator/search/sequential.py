"""A search whose trials run one after the other in this process: for debugging and small machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from orchestrator.core.contract import (
    Evaluation,
    ExecutionContext,
    JobFailure,
    JobRequest,
    JobResult,
    Outcome,
    Progress,
    Watch,
)
from orchestrator.core.errors import PreemptedError
from orchestrator.search.outcome import commit_search
from orchestrator.search.study import Study, TrialTask
from orchestrator.storage.artifacts import is_committed, read_record

Execute = Callable[[JobRequest, ExecutionContext], JobResult]
FailureOf = Callable[[BaseException, JobRequest], JobFailure]


def run_in_turn(request: JobRequest, context: ExecutionContext, execute: Execute, failure_of: FailureOf) -> JobResult:
    """Run a search job to its commit; from its log, if an earlier attempt wrote one.

    Raises:
        OrchestratorError: why there is no commit.
    """
    if is_committed(context.store, request.key):
        return already_committed(request, context)
    study = Study(request, context.store, time.time)
    while (task := study.next_task()) is not None:
        outcome, spent_s = _run(study, task, context, execute, failure_of)
        study.end(task.number, outcome, spent_s)
        if context.should_stop():
            raise PreemptedError(f"{request.job} was asked to stop; it goes on from its log when it runs again")
    return commit_search(study, request, context.store, time.time())


def already_committed(request: JobRequest, context: ExecutionContext) -> JobResult:
    """The result that another writer committed before."""
    record = read_record(context.store, request.key, identity=request.identity)
    return JobResult(
        attempt_id=request.attempt_id, key=request.key, outcome=Outcome.ALREADY_COMMITTED, metrics=record.metrics
    )


def _run(
    study: Study, task: TrialTask, context: ExecutionContext, execute: Execute, failure_of: FailureOf
) -> tuple[JobResult | JobFailure, float]:
    """How an attempt at a trial ended, and its seconds."""
    falls_behind = False

    def tell(evaluation: Evaluation) -> None:
        nonlocal falls_behind
        falls_behind = not study.tell(task.number, evaluation)

    def report(progress: Progress) -> None:
        ended = sum(view.ended_at_s is not None for view in study.trials)
        context.report(replace(progress, phase=f"trial {ended + 1} of {study.num_trials}: {progress.phase}"))

    started_s = time.monotonic()
    watched = replace(
        context,
        watch=Watch(rungs=task.rungs, tell=tell, probe=study.plan.watched_probe(study.request)),
        should_stop=lambda: falls_behind or context.should_stop(),
        report=report,
    )
    outcome: JobResult | JobFailure
    try:
        outcome = execute(task.request, watched)
    except Exception as error:  # noqa: BLE001 - whatever ends a trial is a value, as for any attempt
        outcome = failure_of(error, task.request)
    return outcome, time.monotonic() - started_s
