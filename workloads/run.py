"""The one entry point of the data plane: ``execute(request, context) -> JobResult``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Outcome, Timings
from orchestrator.core.errors import CorruptObjectError, NotFoundError, StorageError, UserError
from orchestrator.core.ids import references_in
from orchestrator.core.job_kinds import KINDS, JobKind, require_own_versions
from orchestrator.storage.artifacts import is_committed, read_record
from workloads.runtime.publish import stopwatch

Handler = Callable[[JobRequest, ExecutionContext], JobResult]

# By name, so that a job imports only what its kind needs: torch and timm take seconds.
_HANDLERS = {kind: row.handler for kind, row in KINDS.items() if row.handler}
_JUDGE = "workloads.jobs.target_probe:judge_committed"


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Run one attempt of a job to its commit, from its newest checkpoint if it has one.

    A key that is committed already is returned as it is, without work.

    Raises:
        OrchestratorError: why there is no commit; ``failure_kind`` says what can be done.
    """
    started_s = time.perf_counter()
    if is_committed(context.store, request.key):
        if context.watch is not None and context.watch.probe:
            _load(_JUDGE)(request, context)
        return _committed(request, context, Timings(work_s=time.perf_counter() - started_s))
    # The code on disk may be newer than the plan, also under a controller of before: a new runner runs what lies there.
    require_own_versions(request.job, request.kind, request.identity)
    with _missing_inputs_named(request, context):
        request = _with_choice(request, context)
        handler = _load_handler(request.kind)
        import_s = time.perf_counter() - started_s
        with stopwatch():
            result = handler(request, context)
    setup_s = result.timings.setup_s and import_s + result.timings.setup_s
    timings = Timings(import_s=import_s, setup_s=setup_s, work_s=time.perf_counter() - started_s - import_s)
    if result.outcome is Outcome.ALREADY_COMMITTED:
        return _committed(request, context, timings)
    return replace(result, timings=timings)


def warm_up() -> None:
    """Load all that any kind needs, so that the next job starts at once; idle runners call it."""
    for kind in _HANDLERS:
        _load_handler(kind)


def _with_choice(request: JobRequest, context: ExecutionContext) -> JobRequest:
    """The request as the search among its inputs, if there is one, completes it."""
    search = request.inputs.get("search")
    if search is None:
        return request
    return replace(request, chosen=read_record(context.store, search).summary["chosen"])


@contextmanager
def _missing_inputs_named(request: JobRequest, context: ExecutionContext) -> Iterator[None]:
    """Raise ``StorageError`` for an error of the body if an input is missing, which waiting may help against."""
    try:
        yield
    except (CorruptObjectError, NotFoundError, UserError) as error:
        of_probe = context.watch.probe.get("inputs", {}) if context.watch is not None else {}
        keys = (*references_in(request.identity), *of_probe.values())
        missing = next((key for key in keys if not is_committed(context.store, key)), None)
        if missing is None:
            raise
        message = (
            f"the artifact {missing}, which this job reads, is not in {context.store.uri}: a collection may hide it "
            "until it sees that a sweep asks for it; if it was deleted, `orchestrator retry` of the sweep that plans "
            "it makes it anew"
        )
        raise StorageError(message) from error


def _committed(request: JobRequest, context: ExecutionContext, timings: Timings) -> JobResult:
    record = read_record(context.store, request.key, identity=request.identity)
    return JobResult(
        attempt_id=request.attempt_id,
        key=request.key,
        outcome=Outcome.ALREADY_COMMITTED,
        metrics=record.metrics,
        timings=timings,
    )


def _load_handler(kind: JobKind) -> Handler:
    if kind not in _HANDLERS:
        known = ", ".join(_HANDLERS)
        raise UserError(f"this version cannot run jobs of kind {kind}; it runs {known}")
    handler: Handler = _load(_HANDLERS[kind])
    return handler


def _load(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
