"""Functions for clients: they send messages and read. They need only the store, no cluster or running controller."""

from __future__ import annotations

from typing import Unpack

from orchestrator.core.errors import ControllerError, StorageError
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.budgets import Cap
from orchestrator.state.events import Running
from orchestrator.state.transitions import SweepState
from orchestrator.storage.layout import sweep_folder
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.sweeps.drain import Drain, drain, end_drain, read_drain
from orchestrator.sweeps.ledger import SweepLedger, list_sweeps, load_plan, load_snapshot
from orchestrator.sweeps.progress import LiveProgress, read_progress, read_trouble, read_warnings
from orchestrator.sweeps.quotas import Quotas, change_quotas, read_quotas, write_quotas
from orchestrator.sweeps.request_handling import check_plan
from orchestrator.sweeps.requests import (
    Consent,
    Ownership,
    SubmitFields,
    cancel,
    current_user,
    new_message_id,
    new_submit,
    pause,
    post,
    resume,
    retry,
    set_priority,
    stop,
)

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


def submit(store: ObjectStore, plan: Plan, spec_text: str, cluster: str, **options: Unpack[SubmitFields]) -> str:
    """Ask the controller of ``cluster`` to run a plan; returns the message's id, found in ``Snapshot.handled`` later.

    A plan that differs from the sweep's current one becomes its next revision; the same plan gives failed jobs another
    chance. ``sender`` (default: this user) becomes the owner of a new sweep; a message to a sweep of somebody else is
    refused unless its plan lists the sender among ``policy.users`` or ``consent`` is ``FORCE``.

    Raises:
        ControllerError: the sweep is unfinished and belongs to another cluster, or the plan cannot run on this store.
        StorageError: the sweep's name cannot be part of an object's name.
    """
    _check_sweep_name(plan.sweep)
    problem = check_plan(plan, sweep=plan.sweep, store_uri=store.uri)
    if problem:
        raise ControllerError(problem)
    message = new_submit(plan, spec_text, cluster, options)
    if message.ownership is Ownership.KEEP:
        _check_owner(store, plan.sweep, cluster)
    post(store, plan.sweep, message)
    return message.message_id


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
