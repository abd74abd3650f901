"""How an attempt ended: the journal's event for a backend's report.

An attempt is a success only if the record is in the store, also if a runner reports one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.backends.protocol import AttemptReport, AttemptStatus
from orchestrator.core.contract import JobFailure, Outcome, Timings
from orchestrator.core.errors import (
    CorruptObjectError,
    FailureKind,
    NotFoundError,
)
from orchestrator.core.units import printable
from orchestrator.state.events import (
    AttemptEvent,
    AttemptFailed,
    AttemptLost,
    AttemptSucceeded,
)
from orchestrator.state.failure_policy import POLICY
from orchestrator.state.snapshot import Attempt
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.protocol import ObjectStore

_MAX_TEXT = 4000


def judge_report(store: ObjectStore, attempt: Attempt, report: AttemptReport, now: float) -> AttemptEvent | None:
    """The event that ends an attempt; ``None`` while it runs. Only the store's record makes a success."""
    if report.status is AttemptStatus.RUNNING:
        return None
    try:
        return _judge_end(store, attempt, report, now)
    except CorruptObjectError as error:
        # The attempt has ended; the next lookup of its key fails the job with the reason.
        return AttemptFailed(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            kind=FailureKind.STORAGE,
            message=printable(str(error))[:_MAX_TEXT],
            node=report.node,
        )


def _judge_end(store: ObjectStore, attempt: Attempt, report: AttemptReport, now: float) -> AttemptEvent:
    if report.status is AttemptStatus.SUCCEEDED:
        return _success(store, attempt, report, now)
    # A runner may die between its commit and its report.
    record = find_record(store, attempt.key)
    if record is not None and record.attempt_id == attempt.attempt_id:
        return _success(store, attempt, report, now)
    if why := _why_no_room(attempt, report):
        return AttemptFailed(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            kind=FailureKind.PREEMPTED,
            had_no_room=True,
            message=printable(why)[:_MAX_TEXT],
            node=_busy_node(attempt, report),
        )
    failure = report.failure
    if report.status is AttemptStatus.FAILED and failure is not None:
        where = _place_at_fault(failure, report.node)
        return AttemptFailed(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            kind=failure.kind,
            message=printable(failure.message)[: _MAX_TEXT - len(where)] + where,
            traceback=printable(failure.traceback)[-_MAX_TEXT:],
            node=report.node,
            rank=failure.rank,
            gpus=failure.gpus,
            step=failure.step,
        )
    reason = report.lost_reason or f"the backend reports {report.status} and says nothing more"
    return AttemptLost(
        at_s=now, job=attempt.job, attempt_id=attempt.attempt_id, reason=printable(reason)[:_MAX_TEXT], node=report.node
    )


def _why_no_room(attempt: Attempt, report: AttemptReport) -> str:
    """Why an attempt ended before it got its resources; empty if it had them."""
    failure = report.failure
    if failure is not None and failure.kind is FailureKind.NO_ROOM:
        return failure.message
    if not attempt.awaits_room or report.placed_for_s is not None:
        return ""
    if failure is None:
        return report.lost_reason or "its runner is gone"
    return failure.message if POLICY[failure.kind].ends_wait else ""


def _busy_node(attempt: Attempt, report: AttemptReport) -> str:
    """The node that had no room, which the next attempt avoids if it can; empty if it was sent to none.

    Of a gang nobody knows which node it was: each attempt names another one, or all would choose the same nodes again.
    """
    if report.failure is None or report.failure.kind is not FailureKind.NO_ROOM:
        return ""
    if nodes := tuple(dict.fromkeys(attempt.nodes)):
        return nodes[attempt.number % len(nodes)]
    return report.node if attempt.num_workers == 1 else ""


def _place_at_fault(failure: JobFailure, node: str) -> str:
    """Text that names the rank of a gang at fault and its node; empty without a gang."""
    if failure.rank is None:
        return ""
    gpus = f", GPU {', '.join(failure.gpus)}" if failure.gpus else ""
    return f"\nat rank {failure.rank}" + (f", on node {node}{gpus}" if node else gpus)


def find_record(store: ObjectStore, key: str) -> Record | None:
    """The record of a key, if it is committed."""
    try:
        return read_record(store, key)
    except NotFoundError:
        return None


def _success(store: ObjectStore, attempt: Attempt, report: AttemptReport, now: float) -> AttemptEvent:
    result = report.result
    record = find_record(store, attempt.key)
    if record is None:
        return AttemptFailed(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            kind=FailureKind.STORAGE,
            message=f"the attempt reports success, but {store.uri} holds no record of {attempt.key}; it runs again",
            node=report.node,
        )
    own = record.attempt_id == attempt.attempt_id
    return AttemptSucceeded(
        at_s=now,
        job=attempt.job,
        attempt_id=attempt.attempt_id,
        outcome=Outcome.COMMITTED if own else Outcome.ALREADY_COMMITTED,
        metrics=_finite(record.metrics),
        timings=Timings() if result is None else result.timings,
        resumed_from_step=None if result is None else result.resumed_from_step,
        node=report.node,
        quarantined=_quarantined(record),
    )


def _quarantined(record: Record) -> tuple[str, ...]:
    """A training's summary of samples that it could not read and replaced."""
    splits = record.summary.get("bad_samples")
    if not isinstance(splits, Mapping):
        return ()
    try:
        return tuple(_describe_split(split, reasons) for split, reasons in splits.items())
    except (ValueError, TypeError, LookupError, AttributeError):
        return ()  # a summary of another format: the result is committed anyway


def _describe_split(split: str, reasons: Mapping[str, Mapping[str, Any]]) -> str:
    counts = ", ".join(f"{found['count']} {reason}" for reason, found in reasons.items())
    first = "; ".join(str(sample) for found in reasons.values() for sample in found["first"][:1])
    return f"{split}: {counts} ({first})"[:_MAX_TEXT]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON knows no NaN: a journal must stay readable whatever a workload measured."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
