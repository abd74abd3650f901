"""Turns a client's request into the events that handle it: exactly once, accepted or refused.

Invariants:

- The events of ``handle_request`` always settle the message: a request that cannot be accepted is refused with a
  reason, so that it does not come back in every round and block the other requests of its sweep.
- A new plan's revision is in the store before the event that names it.
- Plans are not trusted: names, keys and amounts are checked before they become names of objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.core.contract import MISSING_DATA
from orchestrator.core.errors import StorageError
from orchestrator.core.ids import sha256_hex
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.events import (
    ArtifactMissed,
    Event,
    JobsRetried,
    MessageRefused,
    PlanAccepted,
    SweepReopened,
)
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.storage.request_pool import RequestPool
from orchestrator.sweepfile.policy import policy_problem
from orchestrator.sweeps.ledger import SweepLedger, misaddressed, write_provenance
from orchestrator.sweeps.requests import ClientMessage, Consent, Message, RefusalError, Submit, Superseded, Unreadable

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def handle_request(
    store: ObjectStore,
    ledger: SweepLedger,
    message: Message,
    *,
    now: float,
    pool: RequestPool,
    on_alive: Callable[[], None],
    why_not: Callable[[Plan], str],
) -> list[Event]:
    """Events that settle a message; for a new plan, the revision is in the store when this returns.

    ``on_alive`` is called again and again where this takes long; ``why_not`` says why the
    cluster cannot run a plan.
    """
    if isinstance(message, Unreadable | Superseded):
        return [MessageRefused(at_s=now, message_id=message.message_id, reason=message.reason)]
    try:
        _check_sender(ledger.snapshot, message)
        if isinstance(message, Submit):
            return _handle_submit(store, ledger, message, now=now, pool=pool, on_alive=on_alive, why_not=why_not)
        event = message.to_event(ledger.snapshot, now)
    except RefusalError as refusal:
        return [MessageRefused(at_s=now, message_id=message.message_id, sender=message.sender, reason=str(refusal))]
    except _MALFORMED as error:
        # It would raise at every attempt, and block all other messages of its sweep.
        reason = f"it cannot be followed ({error!r}): it is not as this version writes it; send it again"
        return [MessageRefused(at_s=now, message_id=message.message_id, sender=str(message.sender), reason=reason)]
    snapshot = ledger.snapshot
    if isinstance(event, JobsRetried) and snapshot.state.is_final and snapshot.plan is not None:
        # Since the sweep ended, results that the retried jobs read may have been deleted.
        return [event, *missed_artifacts(store, snapshot, snapshot.plan, now, pool=pool, on_alive=on_alive)]
    return [event]


def _check_sender(snapshot: Snapshot, message: ClientMessage) -> None:
    plan = snapshot.plan
    if plan is None or message.consent is Consent.FORCE or not message.sender or not plan.owner:
        return
    if message.sender != plan.owner and message.sender not in plan.policy.users:
        raise RefusalError(
            f"sweep {snapshot.sweep} belongs to {plan.owner}, and this was sent by {message.sender}: ask them, let "
            "them list you under policy.users, or use --force"
        )


def _handle_submit(
    store: ObjectStore,
    ledger: SweepLedger,
    message: Submit,
    *,
    now: float,
    pool: RequestPool,
    on_alive: Callable[[], None],
    why_not: Callable[[Plan], str],
) -> list[Event]:
    """Events that settle a submit; a new plan's revision is in the store when this returns."""
    plan = _accepted_plan(message, ledger.sweep, store.uri)
    if isinstance(plan, Plan):
        plan = why_not(plan) or plan
    if not isinstance(plan, Plan):
        return [MessageRefused(at_s=now, message_id=message.message_id, sender=message.sender, reason=plan)]
    snapshot = ledger.snapshot
    event = pool.ask(on_alive, _submission, store, ledger, message, _owned(plan, message, snapshot), now)
    return [event, *missed_artifacts(store, snapshot, plan, now, pool=pool, on_alive=on_alive)]


def check_plan(plan: Plan, *, sweep: str, store_uri: str) -> str:
    """Why a controller with this store cannot run a plan; empty if it can."""
    if problem := _misfit(plan, sweep, store_uri):
        return problem
    known: set[str] = set()
    for job in plan.jobs:
        if absent := job.execution.data_location.get(MISSING_DATA):
            return f"{absent}; the sweep can be planned without the data, but not run"
        if problem := _unsafe(job):
            return problem
        missing = [need for need in job.needs if need not in known]
        if missing or job.name in known:
            return f"job {job.name} is twice in the plan or before {missing}, which it needs; plan the sweep again"
        known.add(job.name)
    wrong = misaddressed(plan)
    return f"{wrong}: the message was damaged, or another program wrote it; plan the sweep again" if wrong else ""


def _misfit(plan: Plan, sweep: str, store_uri: str) -> str:
    """What is wrong with a plan apart from its jobs; empty if nothing is."""
    if plan.sweep != sweep:
        return f"the plan is of sweep {plan.sweep!r} and was sent to {sweep!r}; submit it under its own name"
    if plan.store_uri != store_uri:
        return f"the plan names the store {plan.store_uri}, this controller serves {store_uri}; submit to that one"
    # The scheduler compares these with those of other sweeps: one that it cannot compare would stop them all.
    owner: object = plan.owner
    problem = policy_problem(plan.policy) or ("" if isinstance(owner, str) else f"its owner {owner!r:.80} is no name")
    return f"{problem}; plan the sweep again with `orchestrator`" if problem else ""


def _unsafe(job: Job) -> str:
    """Why a job's name or key cannot be part of names of objects; empty if it can. Plans are not trusted."""
    if not _is_well_formed(job):
        return f"job {str(job.name)[:80]!r} is not as a planner writes it; plan the sweep again with `orchestrator`"
    try:
        check_name(job.name)
        check_name(job.key)
    except StorageError as error:
        return f"{error}; plan the sweep again"
    if "/" in job.key or job.key.partition("-")[0] != job.kind.value:
        return f"the key {job.key!r} is none of a job of the kind {job.kind.value}; plan the sweep again"
    return ""


def _is_well_formed(job: Job) -> bool:
    """Whether the fields that later steps use have the right types; the JSON may contain anything."""
    identity: Any = job.identity
    parts = [identity.get(name, {}) for name in ("parameters", "inputs")] if isinstance(identity, Mapping) else []
    amounts: tuple[Any, ...] = (
        job.resources.cpus,
        job.resources.gpus,
        job.resources.memory_gib,
        job.resources.min_gpus,
    )
    return (
        all(isinstance(text, str) for text in (job.name, job.key, *job.needs))
        and all(isinstance(mapping, Mapping) for mapping in (job.identity, job.facets, *parts))
        and all(isinstance(amount, int | float) and 0 <= amount < math.inf for amount in amounts)
        and all(
            type(number) is int and number >= 1 for number in (job.execution.num_workers, job.execution.num_threads)
        )
    )


def _accepted_plan(message: Submit, sweep: str, store_uri: str) -> Plan | str:
    """The plan of a submit, or why it is refused."""
    try:
        plan = Plan.from_json(message.plan)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return f"the plan cannot be read: {error!r}; submit with the version that the controller runs"
    try:
        return check_plan(plan, sweep=sweep, store_uri=store_uri) or plan
    except ValueError as error:
        return f"an identity in the plan has no canonical form ({error}); plan the sweep again with `orchestrator`"


def _submission(store: ObjectStore, ledger: SweepLedger, message: Submit, plan: Plan, now: float) -> Event:
    current = ledger.snapshot.plan
    if current is not None and replace(current, revision=0) == replace(plan, revision=0):
        return SweepReopened(at_s=now, message_id=message.message_id, sender=message.sender)
    seen, revision = message.replaced_revision, current.revision if current is not None else 0
    if seen is not None and seen != revision:
        raise RefusalError(
            f"sweep {ledger.sweep} was submitted with another plan meanwhile: it has revision {revision}, and this "
            f"would replace {f'revision {seen}' if seen else 'none'}; submit it again to see the difference"
        )
    # The plan is durable before the event names it: a crash in between leaves an unused revision.
    revision, documents = ledger.add_revision({**message.plan, "owner": plan.owner}, message.spec_text)
    ledger.know_plan(revision, plan)
    if message.provenance:
        documents |= write_provenance(
            store,
            plan,
            revision,
            now=now,
            submission={
                "message_id": message.message_id,
                "sender": message.sender,
                "spec_sha256": sha256_hex(message.spec_text.encode()),
                "submitted_from": dict(message.provenance),
            },
        )
    return PlanAccepted(
        at_s=now, message_id=message.message_id, sender=message.sender, revision=revision, documents=documents
    )


def _owned(plan: Plan, message: Submit, snapshot: Snapshot) -> Plan:
    """The owner of a sweep stays its first submitter, unless another user forces the submit."""
    current = snapshot.plan
    if current is not None and current.owner and message.consent is Consent.ASK:
        return replace(plan, owner=current.owner)
    return replace(plan, owner=plan.owner or message.sender)


def missed_artifacts(
    store: ObjectStore,
    snapshot: Snapshot,
    plan: Plan,
    now: float,
    *,
    pool: RequestPool,
    on_alive: Callable[[], None],
) -> list[Event]:
    """Jobs that stay in the plan as done, but whose record was deleted since."""
    views = [snapshot.jobs.get(job.name) for job in plan.jobs]
    kept = [
        view
        for view, job in zip(views, plan.jobs, strict=True)
        if view is not None and view.key == job.key and view.state.is_done
    ]
    missed: list[Event] = []
    for start in range(0, len(kept), pool.num_threads):
        some = kept[start : start + pool.num_threads]
        with pool.batch(on_alive) as batch:
            answers = [batch.start(is_committed, store, view.key) for view in some]
            for view, is_there in zip(some, answers, strict=True):
                if not is_there():
                    missed.append(ArtifactMissed(at_s=now, job=view.name, key=view.key))
    return missed
