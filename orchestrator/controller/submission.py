"""From a client's message to the events that settle it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.controller.inbox import Cancel, Message, Submit
from orchestrator.controller.ledger import SweepLedger
from orchestrator.plan.graph import Plan
from orchestrator.state.events import (
    ArtifactMissed,
    CancelRequested,
    Event,
    MessageRefused,
    PlanAccepted,
    SweepReopened,
)
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.protocol import ObjectStore


def settle(store: ObjectStore, ledger: SweepLedger, message: Message, *, now: float) -> list[Event]:
    """Events that settle a message; for a new plan, the revision is in the store when this returns."""
    if isinstance(message, Cancel):
        return [CancelRequested(at_s=now, message_id=message.message_id)]
    if isinstance(message, Submit):
        plan = _accepted_plan(message, ledger.sweep, store.uri)
        if isinstance(plan, Plan):
            return _submission(store, ledger, message, plan, now)
        reason = plan
    else:
        reason = message.reason
    return [MessageRefused(at_s=now, message_id=message.message_id, reason=reason)]


def check_plan(plan: Plan, *, sweep: str, store_uri: str) -> str:
    """Why a controller with this store cannot run a plan; empty if it can."""
    if plan.sweep != sweep:
        return f"the plan is of sweep {plan.sweep!r} and was sent to {sweep!r}; submit it under its own name"
    if plan.store_uri != store_uri:
        return f"the plan names the store {plan.store_uri}, this controller serves {store_uri}; submit to that one"
    known: set[str] = set()
    for job in plan.jobs:
        missing = [need for need in job.needs if need not in known]
        if missing or job.name in known:
            return f"job {job.name} stands twice in the plan or before {missing}, which it needs; plan the sweep again"
        known.add(job.name)
    return ""


def _accepted_plan(message: Submit, sweep: str, store_uri: str) -> Plan | str:
    """The plan of a submit, or why it is refused."""
    try:
        plan = Plan.from_json(message.plan)
    except (ValueError, TypeError, KeyError) as error:
        return f"the plan cannot be read: {error!r}; submit with the version that the controller runs"
    return check_plan(plan, sweep=sweep, store_uri=store_uri) or plan


def _submission(store: ObjectStore, ledger: SweepLedger, message: Submit, plan: Plan, now: float) -> list[Event]:
    current = ledger.snapshot.plan
    event: Event
    if current is not None and _unnumbered(current.to_json()) == _unnumbered(plan.to_json()):
        event = SweepReopened(at_s=now, message_id=message.message_id)
    else:
        # The plan is durable before the event names it: a crash in between leaves an unused revision.
        revision = ledger.add_revision(plan.to_json(), message.spec_text)
        event = PlanAccepted(at_s=now, message_id=message.message_id, revision=revision)
    return [event, *_missed_artifacts(store, ledger.snapshot, plan, now)]


def _unnumbered(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "revision"}


def _missed_artifacts(store: ObjectStore, snapshot: Snapshot, plan: Plan, now: float) -> list[Event]:
    """Jobs that stay in the plan as done, but whose record was deleted since."""
    views = [snapshot.jobs.get(job.name) for job in plan.jobs]
    kept = [
        view
        for view, job in zip(views, plan.jobs, strict=True)
        if view is not None and view.key == job.key and view.state.is_done
    ]
    return [ArtifactMissed(at_s=now, job=view.name, key=view.key) for view in kept if not is_committed(store, view.key)]
