"""Attempts: their numbers, their requests, what their nodes cost, and what the journal makes of a backend's report.

Invariants:

- A number of a key is given out once, over all sweeps and clusters, by a conditional write.
- Only the store's record makes a success, whatever a runner reports.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Capacity
from orchestrator.core.contract import JobFailure, JobRequest, Outcome, Resources, Timings
from orchestrator.core.errors import (
    CorruptObjectError,
    FailureKind,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.events import (
    AttemptEvent,
    AttemptFailed,
    AttemptLost,
    AttemptPlaced,
    AttemptSucceeded,
    Event,
    NodeDescribed,
)
from orchestrator.state.failure_policy import POLICY
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.state.spending import PricedAllocation, priced_allocations
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.layout import attempt_name
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.storage.seals import seal

_MAX_TEXT = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """Who asks for an attempt number."""

    sweep: str
    cluster: str
    epoch: int


def attempt_id(key: str, number: int) -> str:
    """``<key>.<number>``."""
    return f"{key}.{number}"


def allocate_attempt(store: ObjectStore, job: Job, claimant: Claimant, *, has_run: bool = True) -> int:
    """Take the next attempt number of a key, over all sweeps and clusters, and return it; numbers start at 1.

    Without ``has_run`` (no attempt is known of) the first number is tried before those that are taken are listed.
    """
    if not has_run and _claim(store, job, 1, claimant):
        return 1
    taken = store.list_children(attempt_name(job.key, 0).rpartition("/")[0] + "/")
    number = 1 + max((int(name.removesuffix(".json")) for name in taken), default=0)
    while not _claim(store, job, number, claimant):
        number += 1
    return number


def make_request(plan: Plan, job: Job, number: int) -> JobRequest:
    """The request of one attempt at a job. Raises ``StorageError``: its key could be a folder elsewhere."""
    if "/" in check_name(job.key):
        raise StorageError(
            f"the key {job.key!r} of job {job.name} is a path; the plan was altered: submit the sweep again"
        )
    return JobRequest(
        attempt_id=attempt_id(job.key, number),
        attempt_number=number,
        sweep=plan.sweep,
        job=job.name,
        key=job.key,
        kind=job.kind,
        identity=job.identity,
        store_uri=plan.store_uri,
        execution=job.execution,
    )


def judge_report(store: ObjectStore, attempt: Attempt, report: AttemptReport, now: float) -> AttemptEvent | None:
    """The event that ends an attempt; ``None`` while it runs. Only the store's record makes a success."""
    if report.status is AttemptStatus.RUNNING:
        return None
    try:
        return _judge_end(store, attempt, report, now)
    except CorruptObjectError as error:
        # The attempt has ended all the same; the next look at its key fails the job with the reason.
        return AttemptFailed(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            kind=FailureKind.STORAGE,
            message=str(error)[:_MAX_TEXT],
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
            message=why[:_MAX_TEXT],
        )
    failure = report.failure
    if report.status is AttemptStatus.FAILED and failure is not None:
        where = _place_at_fault(failure, report.node)
        return AttemptFailed(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            kind=failure.kind,
            message=failure.message[: _MAX_TEXT - len(where)] + where,
            traceback=failure.traceback[-_MAX_TEXT:],
            node=report.node,
            rank=failure.rank,
            gpus=failure.gpus,
            step=failure.step,
        )
    reason = report.lost_reason or f"the backend reports {report.status} and says nothing more"
    return AttemptLost(
        at_s=now, job=attempt.job, attempt_id=attempt.attempt_id, reason=reason[:_MAX_TEXT], node=report.node
    )


def _why_no_room(attempt: Attempt, report: AttemptReport) -> str:
    """Why an attempt ended before it had room; empty if it had some. Its node is none's: that of a gang's runner is
    as good as any other.
    """
    failure = report.failure
    if failure is not None and failure.kind is FailureKind.NO_ROOM:
        return failure.message
    if not attempt.awaits_room or report.placed_for_s is not None:
        return ""
    if failure is None:
        return report.lost_reason or "its runner is gone"
    return failure.message if POLICY[failure.kind].ends_wait else ""


def _place_at_fault(failure: JobFailure, node: str) -> str:
    """A line for people on which rank of a gang it was, and where; empty without a gang."""
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


def _claim(store: ObjectStore, job: Job, number: int, claimant: Claimant) -> bool:
    document = {
        "sweep": claimant.sweep,
        "cluster": claimant.cluster,
        "epoch": claimant.epoch,
        "job": job.name,
        "nonce": secrets.token_hex(8),
    }
    try:
        name = attempt_name(job.key, number)
        store.put_if_absent(name, seal(name, json.dumps(document).encode()))
    except PreconditionFailedError:
        return False
    return True


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
    """What a training says of samples that it could not read and replaced."""
    splits = record.summary.get("bad_samples")
    if not isinstance(splits, Mapping):
        return ()
    try:
        return tuple(_told_of(split, reasons) for split, reasons in splits.items())
    except (ValueError, TypeError, LookupError, AttributeError):
        return ()  # somebody else's summary: whatever it means, the result is committed


def _told_of(split: str, reasons: Mapping[str, Mapping[str, Any]]) -> str:
    counts = ", ".join(f"{found['count']} {reason}" for reason, found in reasons.items())
    first = "; ".join(str(sample) for found in reasons.values() for sample in found["first"][:1])
    return f"{split}: {counts} ({first})"[:_MAX_TEXT]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON knows no NaN: a journal must stay readable whatever a workload measured."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class NodePricing:
    """Market, accelerator and price of every node that this controller has seen.

    Remembered, because a node that is gone tells nothing any more.
    """

    def __init__(self) -> None:
        self._host: Node | None = None
        self._machines: tuple[Node, ...] = ()
        self._nodes: dict[str, Node] = {}

    def look(self, capacity: Capacity) -> None:
        """Remember what a cluster is made of now. Once per decision: thousands of launches may follow from one."""
        self._host = capacity.host
        if capacity.machines is not self._machines:
            self._machines = capacity.machines
            self._nodes.update({node.name: node for node in self._machines if node.name})

    def allocations(self, nodes: Sequence[str], resources: Resources, num_workers: int) -> tuple[PricedAllocation, ...]:
        """Of an attempt on these nodes; empty where nothing is known of one. See ``priced_allocations``.

        Without nodes it runs on the backend's one machine, if it has only one.
        """
        if not nodes:
            return () if self._host is None else (_allocation_on(self._host, num_workers),)
        return priced_allocations(nodes, self._nodes, resources, num_workers)

    def placement_events(self, snapshot: Snapshot, reports: Mapping[str, AttemptReport], now: float) -> list[Event]:
        """Events that say where attempts run, where their launch could not, and what their nodes are; once each."""
        own = [(attempt, reports.get(attempt.attempt_id)) for attempt in snapshot.live_attempts]
        placed = [self._placed(attempt, report, now) for attempt, report in own]
        machines = {node: machine for _, report in own if report for node, machine in report.machines.items()}
        described = [
            NodeDescribed(at_s=now, node=node, machine=machine)
            for node, machine in machines.items()
            if node not in snapshot.nodes
        ]
        return [*described, *(event for event in placed if event is not None)]

    def _placed(self, attempt: Attempt, report: AttemptReport | None, now: float) -> AttemptPlaced | None:
        if report is None or (attempt.lots and not _is_elsewhere(attempt, report)):
            return None
        has_got_room = attempt.awaits_room and report.placed_for_s is not None
        nodes = report.worker_nodes or ((report.node,) if report.node and attempt.num_workers == 1 else ())
        lots = self.allocations(nodes, attempt.resources, attempt.num_workers) if nodes else ()
        if not has_got_room and (not lots or lots == attempt.lots or attempt.awaits_room):
            return None
        return AttemptPlaced(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            nodes=nodes,
            lots=lots,
            since_s=(report.placed_for_s or 0.0) if has_got_room else 0.0,
        )


def _allocation_on(host: Node, num_workers: int) -> PricedAllocation:
    return PricedAllocation(num_workers=num_workers, accelerator=host.accelerator, is_spot=host.is_spot)


def _is_elsewhere(attempt: Attempt, report: AttemptReport) -> bool:
    """Whether it did not go where it was sent, because that node was gone."""
    return bool(report.node) and len(attempt.nodes) == 1 and report.node != attempt.nodes[0]
