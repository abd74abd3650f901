"""What clients do: leave messages and read. They need only the store, never a cluster or a running controller."""

from __future__ import annotations

import getpass
import time
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.core.errors import ControllerError, NotFoundError, StorageError
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.events import Running
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.layout import sweep_folder
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.sweeps.drain import Drain, drain, end_drain, read_drain
from orchestrator.sweeps.inbox import (
    Cancel,
    ClientMessage,
    Consent,
    Ownership,
    Pause,
    Resume,
    Retry,
    SetPriority,
    Stop,
    Submit,
    new_message_id,
    post,
)
from orchestrator.sweeps.ledger import SweepLedger
from orchestrator.sweeps.progress import LiveProgress, read_progress, read_warnings
from orchestrator.sweeps.publishing_trouble import read_trouble
from orchestrator.sweeps.quotas import Cap, Quotas, change_quotas, read_quotas, write_quotas
from orchestrator.sweeps.submission import check_plan

__all__ = [
    "Cap",
    "Consent",
    "Drain",
    "LiveProgress",
    "Ownership",
    "Quotas",
    "Running",
    "SweepLedger",
    "cancel",
    "change_quotas",
    "current_user",
    "drain",
    "end_drain",
    "list_sweeps",
    "load_plan",
    "load_snapshot",
    "new_message_id",
    "pause",
    "read_drain",
    "read_progress",
    "read_quotas",
    "read_trouble",
    "read_warnings",
    "resume",
    "retry",
    "set_priority",
    "stop",
    "submit",
    "write_quotas",
]


def submit(  # noqa: PLR0913 - what a message holds, by name
    store: ObjectStore,
    plan: Plan,
    spec_text: str,
    cluster: str,
    *,
    ownership: Ownership = Ownership.KEEP,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    provenance: Mapping[str, Any] | None = None,
    message_id: str = "",
    now: float | None = None,
) -> str:
    """Ask the controller of ``cluster`` to run a plan; returns the message's id, found in ``Snapshot.handled`` later.

    A plan that differs from the sweep's current one becomes its next revision; the same plan gives failed jobs another
    chance. ``sender`` (default: this user) becomes the owner of a new sweep; a message to a sweep of somebody else is
    refused unless its plan lists the sender among ``policy.users`` or ``consent`` is ``FORCE``. ``provenance`` is what
    the client knows of where the plan comes from (``tracking.provenance.capture``); it is kept with the revision.
    Who may have to send the same submit twice gives it a ``message_id``: it is followed once.

    Raises:
        ControllerError: the sweep is unfinished and belongs to another cluster, or the plan cannot run on this store.
        StorageError: the sweep's name cannot be part of an object's name.
    """
    _check_sweep_name(plan.sweep)
    problem = check_plan(plan, sweep=plan.sweep, store_uri=store.uri)
    if problem:
        raise ControllerError(problem)
    if ownership is Ownership.KEEP:
        _check_owner(store, plan.sweep, cluster)
    envelope = _envelope(sender, consent, now)
    message = Submit(
        **(envelope | {"message_id": message_id} if message_id else envelope),
        cluster=cluster,
        plan=plan.to_json(),
        spec_text=spec_text,
        ownership=ownership,
        provenance=provenance or {},
    )
    post(store, plan.sweep, message)
    return message.message_id


def cancel(
    store: ObjectStore,
    sweep: str,
    *,
    jobs: Collection[str] | None = None,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    now: float | None = None,
) -> str:
    """Ask for the end of a sweep, or only of some jobs (names, or patterns as of a shell); returns the message's id.

    What runs is stopped with a checkpoint; what needs a cancelled job is skipped. As with all messages, the id is found
    in ``Snapshot.handled`` once a controller has followed it, or with the reason in ``Snapshot.refusals``. A sweep that
    has ended refuses; ``retry`` takes a cancel back.

    Raises:
        NotFoundError: the store knows no such sweep.
        ControllerError: ``jobs`` is there and empty.
    """
    return _send(store, sweep, Cancel(**_envelope(sender, consent, now), jobs=_named(jobs)))


def pause(
    store: ObjectStore,
    sweep: str,
    *,
    running: Running = Running.FINISH,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    now: float | None = None,
) -> str:
    """Ask that nothing new starts for now; see ``cancel``. Submitting the sweep again resumes it, too."""
    return _send(store, sweep, Pause(**_envelope(sender, consent, now), running=running))


def resume(
    store: ObjectStore,
    sweep: str,
    *,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    now: float | None = None,
) -> str:
    """Ask that a paused sweep goes on; see ``cancel``."""
    return _send(store, sweep, Resume(**_envelope(sender, consent, now)))


def stop(
    store: ObjectStore,
    sweep: str,
    *,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    now: float | None = None,
) -> str:
    """Ask that a sweep ends when its running attempts have ended; see ``cancel``."""
    return _send(store, sweep, Stop(**_envelope(sender, consent, now)))


def retry(
    store: ObjectStore,
    sweep: str,
    *,
    jobs: Collection[str] | None = None,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    now: float | None = None,
) -> str:
    """Ask for another chance of some jobs, or of all that failed, were skipped or cancelled; see ``cancel``.

    With a job comes what it needs and does not exist, and what was skipped because of it. Sweeps that have ended,
    cancelled ones too, go on.
    """
    return _send(store, sweep, Retry(**_envelope(sender, consent, now), jobs=_named(jobs)))


def set_priority(
    store: ObjectStore,
    sweep: str,
    priority: int,
    *,
    sender: str | None = None,
    consent: Consent = Consent.ASK,
    now: float | None = None,
) -> str:
    """Give a sweep another priority (higher goes first) until its plan changes; see ``cancel``."""
    return _send(store, sweep, SetPriority(**_envelope(sender, consent, now), priority=priority))


def current_user() -> str:
    """Name of whoever runs this process; empty where the system has none (as in some containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _envelope(sender: str | None, consent: Consent, now: float | None) -> dict[str, Any]:
    return {
        "message_id": new_message_id(time.time() if now is None else now),
        "sender": current_user() if sender is None else sender,
        "consent": consent,
    }


def _named(jobs: Collection[str] | None) -> tuple[str, ...]:
    if jobs is not None and not jobs:
        # An empty message means all of them, which a script with an empty list did not mean.
        message = "no job is named: name some, or leave jobs out to mean the whole sweep"
        raise ControllerError(message)
    return tuple(jobs or ())


def _send(store: ObjectStore, sweep: str, message: ClientMessage) -> str:
    _check_exists(store, sweep)
    post(store, sweep, message)
    return message.message_id


def load_snapshot(store: ObjectStore, sweep: str) -> Snapshot:
    """Where a sweep stands, from its plan and journal alone. Raises ``NotFoundError`` for an unknown sweep.

    To follow a sweep, keep one ``SweepLedger(store, sweep)`` and call ``refresh`` on it: it reads only what is new.
    """
    _check_exists(store, sweep)
    return SweepLedger(store, sweep).refresh()


def load_plan(store: ObjectStore, sweep: str) -> Plan:
    """The current revision's plan. Raises ``NotFoundError`` if there is none (yet)."""
    snapshot = load_snapshot(store, sweep)
    if snapshot.plan is None:
        message = f"no controller has accepted a plan of sweep {sweep!r} yet; wait, or start one with `orchestrator up`"
        raise NotFoundError(message)
    return snapshot.plan


def list_sweeps(store: ObjectStore) -> list[str]:
    """Names of all sweeps in the store, sorted."""
    return store.list_children("sweeps/")


def _check_exists(store: ObjectStore, sweep: str) -> None:
    sweeps = list_sweeps(store)
    if sweep not in sweeps:
        known = ", ".join(sweeps) or "none"
        message = f"no sweep {sweep!r} in {store.uri}; sweeps there: {known}"
        raise NotFoundError(message)


def _check_sweep_name(sweep: str) -> None:
    if "/" in sweep:
        message = f"sweep name {sweep!r} has a '/'; use letters, digits, '-' and '_'"
        raise StorageError(message)
    check_name(sweep_folder(sweep))


def _check_owner(store: ObjectStore, sweep: str, cluster: str) -> None:
    snapshot = SweepLedger(store, sweep).refresh()
    is_free = snapshot.state.is_final or snapshot.state is SweepState.SUBMITTED
    if not is_free and snapshot.cluster != cluster:
        message = (
            f"sweep {sweep!r} is {snapshot.state} on cluster {snapshot.cluster!r}, not {cluster!r}: two clusters would "
            "do the same work; submit it there, cancel it first, or take it over explicitly"
        )
        raise ControllerError(message)
