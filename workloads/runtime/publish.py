"""How short jobs report, and how they end: asked to stop, or with a commit that says how long the attempt worked."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from orchestrator.core.code import package_digest
from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import NumericsError, PreemptedError
from orchestrator.storage.artifacts import ArtifactWriter

_STARTED_S: ContextVar[float | None] = ContextVar("started_s", default=None)


def report_or_stop(request: JobRequest, context: ExecutionContext, progress: Progress, sequel: str) -> None:
    """Report progress; ``sequel`` ends the sentence that an attempt was asked to stop.

    Raises:
        PreemptedError: it was.
    """
    context.report(progress)
    if context.should_stop():
        raise PreemptedError(f"{request.job} was asked to stop{sequel}")


class Ticker:
    """Counts pieces of work, by any thread, of a job that starts over when it was stopped; see ``report_or_stop``."""

    def __init__(self, request: JobRequest, context: ExecutionContext, phase: str) -> None:
        self._request, self._context, self._phase = request, context, phase
        self._lock, self._done = threading.Lock(), 0

    def __call__(self) -> None:
        with self._lock:
            self._done += 1
            progress = Progress(phase=self._phase, step=self._done)
            report_or_stop(self._request, self._context, progress, "; it starts over when it runs again")


def publish(
    writer: ArtifactWriter, request: JobRequest, *, metrics: Mapping[str, float], summary: Mapping[str, Any]
) -> JobResult:
    """Commit the parts written so far as the artifact of the request's key.

    Where it is known how long the attempt worked, the record says so: plans estimate by it.

    Raises:
        NumericsError: a metric is NaN or infinite.
    """
    check_finite(metrics, f"{request.job} measures", "look for huge values in what it reads")
    work_s = elapsed_s()
    measured = {"work_s": work_s, "num_threads": request.execution.num_threads} if work_s is not None else {}
    told = {**summary, "measured": {**measured, **summary.get("measured", {})}} if measured else summary
    outcome = writer.commit(now=time.time(), metrics=metrics, summary=told, package_digest=package_digest())
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=metrics)


def check_finite(metrics: Mapping[str, float], found: str, remedy: str, step: int | None = None) -> None:
    """Refuse metrics that a record cannot hold.

    Args:
        metrics: by name.
        found: what measures them, with its verb.
        remedy: what to do about it.
        step: of the training, None = there is none.

    Raises:
        NumericsError: one is NaN or infinite.
    """
    wrong = ", ".join(f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value))
    if wrong:
        raise NumericsError(f"{found} {wrong}, which no record can hold; {remedy}", step)


@contextmanager
def stopwatch() -> Iterator[None]:
    """Let the stopwatch run until the body ends."""
    token = _STARTED_S.set(time.perf_counter())
    try:
        yield
    finally:
        _STARTED_S.reset(token)


def elapsed_s() -> float | None:
    """Seconds since it was started; None where it does not run."""
    started_s = _STARTED_S.get()
    return None if started_s is None else time.perf_counter() - started_s
