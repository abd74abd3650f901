"""From what a runner said, or that it is gone, to what the controller is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from orchestrator.backends.protocol import AttemptReport, AttemptStatus
from orchestrator.backends.ray.gang import PLACING
from orchestrator.backends.ray.link import LinkState, RunnerLink
from orchestrator.backends.ray.stacks import LoggedProcess, examine
from orchestrator.core.contract import JobFailure, JobResult, Progress
from orchestrator.core.errors import FailureKind

_PLACING_RUNNER = "placing"
"""Phase of an attempt whose runner is not up, or has not taken it yet."""


def report_of(attempt_id: str, link: RunnerLink) -> AttemptReport:
    """What is known of the attempt of a runner; of one that has ended, its last progress, too."""
    report = link.report
    if link.is_overtaken:
        reason = link.gone_reason or f"runner {link.name} obeys a later controller"
        return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.OVERTAKEN, lost_reason=reason, node=link.node)
    if link.state is LinkState.GONE and not link.has_ended:
        return _ended_by_force(attempt_id, link)
    status = AttemptStatus(report.get("status", AttemptStatus.RUNNING))
    # A runner of an earlier version tells no progress with the end.
    progress = Progress.from_json(report["progress"]) if "progress" in report else None
    if status is AttemptStatus.SUCCEEDED:
        result = JobResult.from_json(report["result"])
        return AttemptReport(
            attempt_id=attempt_id,
            status=status,
            progress=progress,
            result=result,
            node=link.node,
            placed_for_s=placed_for_s(link),
        )
    if status is AttemptStatus.FAILED:
        failure = JobFailure.from_json(report["failure"])
        return AttemptReport(
            attempt_id=attempt_id,
            status=status,
            progress=progress,
            failure=failure,
            node=link.node,
            placed_for_s=placed_for_s(link),
        )
    if status is AttemptStatus.LOST:
        return replace(
            lost(attempt_id, f"runner {link.name} does not have it", link.node), placed_for_s=placed_for_s(link)
        )
    progress = progress or Progress(phase=_PLACING_RUNNER)
    return AttemptReport(
        attempt_id=attempt_id, status=status, progress=progress, node=link.node, placed_for_s=placed_for_s(link)
    )


def placed_for_s(link: RunnerLink) -> float | None:
    """For how long the attempt of a runner has had its room; none = it has had none yet."""
    if "placed_for_s" in link.report:
        told: float | None = link.report["placed_for_s"]
        return told
    if link.gang is not None:  # a runner of an earlier version, or one that has said nothing yet
        is_up = link.report.get("progress", {}).get("phase", PLACING) != PLACING
    else:
        is_up = bool(link.node_id) or link.death is not None
    return 0.0 if is_up else None


def lost(attempt_id: str, reason: str, node: str = "") -> AttemptReport:
    """Nothing of the attempt will ever take effect again."""
    return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.LOST, lost_reason=reason, node=node)


def machines_of(link: RunnerLink) -> dict[str, Mapping[str, Any]]:
    """What the nodes of a runner and of its gang's workers are, by Ray's ids, as far as they have said it."""
    told = {link.node_id: link.machine, **link.report.get("machines", {})}
    return {node_id: machine for node_id, machine in told.items() if node_id and machine}


def worker_node_ids(link: RunnerLink) -> list[str]:
    """Ray's ids of the nodes of a gang's workers, by rank once all of them are up; empty before there is room for them,
    and without a gang.
    """
    if link.gang is None:
        return []
    ids = [LoggedProcess.from_json(one).node_id for one in link.report.get("processes", ())]
    ids = ids if len(ids) == link.gang.num_workers else list(link.report.get("room_node_ids", ()))
    return ids if len(ids) == link.gang.num_workers else []


def names_culprit(link: RunnerLink) -> bool:
    """Whether something better is known of the node at fault than where the runner is, be it that nobody knows.

    A gang's runner is on one of the gang's nodes: it tells of that node's fault only where it died itself.
    """
    if link.state is LinkState.GONE and not link.has_ended:
        return link.gang is not None and link.death is None and link.is_started
    return "node_id" in link.report.get("failure", {})  # a runner of an earlier version does not say


def culprit_id(link: RunnerLink) -> str:
    """Ray's id of the node at fault, as the runner says; empty = none can be named."""
    node_id: str = link.report.get("failure", {}).get("node_id", "") if link.has_ended else ""
    return node_id


def stacks_of(link: RunnerLink) -> list[ray.ObjectRef[Any]]:
    """Start to bring the stacks of an attempt's processes into their logs."""
    request = link.request
    store_uri = request.store_uri if request is not None else link.report.get("store_uri", "")
    processes = [LoggedProcess.from_json(one) for one in link.report.get("processes", ())]
    return [examine(process, store_uri) for process in processes if store_uri]


def _ended_by_force(attempt_id: str, link: RunnerLink) -> AttemptReport:
    kind, reason = FailureKind.NODE_LOST, link.gone_reason
    if link.doom is not None:
        kind, reason = link.doom.kind, link.doom.reason
    elif link.death is not None:
        kind = link.death.kind
    if kind is FailureKind.NODE_LOST:
        return replace(lost(attempt_id, link.gone_reason, link.node), placed_for_s=placed_for_s(link))
    failure = JobFailure(attempt_id=attempt_id, key=attempt_id.rpartition(".")[0], kind=kind, message=reason)
    return AttemptReport(
        attempt_id=attempt_id,
        status=AttemptStatus.FAILED,
        failure=failure,
        node=link.node,
        placed_for_s=placed_for_s(link),
    )
