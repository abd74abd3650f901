"""What clients do: leave messages and read. They need only the store, never a cluster or a running controller."""

from __future__ import annotations

import time

from orchestrator.controller.inbox import Cancel, Ownership, Submit, new_message_id, post
from orchestrator.controller.ledger import SweepLedger, read_plan
from orchestrator.controller.progress import LiveProgress, read_progress
from orchestrator.controller.submission import check_plan
from orchestrator.errors import ControllerError, NotFoundError, StorageError
from orchestrator.plan.graph import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.layout import sweep_folder
from orchestrator.storage.protocol import ObjectStore, check_name

__all__ = [
    "LiveProgress",
    "Ownership",
    "SweepLedger",
    "cancel",
    "list_sweeps",
    "load_plan",
    "load_snapshot",
    "read_progress",
    "submit",
]


def submit(
    store: ObjectStore,
    plan: Plan,
    spec_text: str,
    cluster: str,
    *,
    ownership: Ownership = Ownership.KEEP,
    now: float | None = None,
) -> str:
    """Ask the controller of ``cluster`` to run a plan; returns the message's id, found in ``Snapshot.handled`` later.

    A plan that differs from the sweep's current one becomes its next revision; the same plan gives failed jobs another
    chance.

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
    message = Submit(
        message_id=new_message_id(time.time() if now is None else now),
        cluster=cluster,
        plan=plan.to_json(),
        spec_text=spec_text,
        ownership=ownership,
    )
    post(store, plan.sweep, message)
    return message.message_id


def cancel(store: ObjectStore, sweep: str, *, now: float | None = None) -> str:
    """Ask for the end of a sweep; returns the message's id. Raises ``NotFoundError`` for an unknown sweep."""
    _check_exists(store, sweep)
    message = Cancel(message_id=new_message_id(time.time() if now is None else now))
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
    return read_plan(store, sweep, snapshot.revision)


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
