"""From a client's submit to the events that settle it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.contract import MISSING_DATA
from orchestrator.controller.inbox import Consent, Submit
from orchestrator.controller.ledger import SweepLedger
from orchestrator.plan.graph import Plan
from orchestrator.state.events import (
    ArtifactMissed,
    Event,
    MessageRefused,
    PlanAccepted,
    SweepReopened,
)
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.protocol import ObjectStore


def settle_submit(
    store: ObjectStore, ledger: SweepLedger, message: Submit, *, now: float, on_alive: Callable[[], None]
) -> list[Event]:
    """Events that settle a submit; a new plan's revision is in the store when this returns."""
    plan = _accepted_plan(message, ledger.sweep, store.uri)
    if not isinstance(plan, Plan):
        return [MessageRefused(at_s=now, message_id=message.message_id, sender=message.sender, reason=plan)]
    snapshot = ledger.snapshot
    event = _submission(ledger, message, _owned(plan, message, snapshot), now)
    return [event, *missed_artifacts(store, snapshot, plan, now, on_alive)]


def check_plan(plan: Plan, *, sweep: str, store_uri: str) -> str:
    """Why a controller with this store cannot run a plan; empty if it can."""
    if plan.sweep != sweep:
        return f"the plan is of sweep {plan.sweep!r} and was sent to {sweep!r}; submit it under its own name"
    if plan.store_uri != store_uri:
        return f"the plan names the store {plan.store_uri}, this controller serves {store_uri}; submit to that one"
    known: set[str] = set()
    for job in plan.jobs:
        if absent := job.execution.data_location.get(MISSING_DATA):
            return f"{absent}; what is declared suffices to plan, but not to run"
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


def _submission(ledger: SweepLedger, message: Submit, plan: Plan, now: float) -> Event:
    current = ledger.snapshot.plan
    if current is not None and replace(current, revision=0) == replace(plan, revision=0):
        return SweepReopened(at_s=now, message_id=message.message_id, sender=message.sender)
    # The plan is durable before the event names it: a crash in between leaves an unused revision.
    revision = ledger.add_revision({**message.plan, "owner": plan.owner}, message.spec_text)
    ledger.know_plan(revision, plan)
    return PlanAccepted(at_s=now, message_id=message.message_id, sender=message.sender, revision=revision)


def _owned(plan: Plan, message: Submit, snapshot: Snapshot) -> Plan:
    """A sweep stays its first submitter's, unless somebody else insists."""
    current = snapshot.plan
    if current is not None and current.owner and message.consent is Consent.ASK:
        return replace(plan, owner=current.owner)
    return replace(plan, owner=plan.owner or message.sender)


def missed_artifacts(
    store: ObjectStore, snapshot: Snapshot, plan: Plan, now: float, on_alive: Callable[[], None]
) -> list[Event]:
    """Jobs that stay in the plan as done, but whose record was deleted since."""
    views = [snapshot.jobs.get(job.name) for job in plan.jobs]
    kept = [
        view
        for view, job in zip(views, plan.jobs, strict=True)
        if view is not None and view.key == job.key and view.state.is_done
    ]
    missed: list[Event] = []
    for view in kept:
        on_alive()
        if not is_committed(store, view.key):
            missed.append(ArtifactMissed(at_s=now, job=view.name, key=view.key))
    return missed
