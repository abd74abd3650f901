"""What steers a sweep: messages into its inbox, which its controller follows, now or when one runs again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, print_document, stderr_console
from orchestrator.cli.selection import Condition, select
from orchestrator.core.errors import NotFoundError
from orchestrator.core.units import format_duration
from orchestrator.services.sources import open_existing_store, require_sweep
from orchestrator.services.status import revive_killed_stack
from orchestrator.services.terminal import confirmed
from orchestrator.state.job_view import JobView
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import Consent, SweepLedger
from orchestrator.sweeps.inbox import Retry, Submit, read_inbox
from orchestrator.sweeps.lease import read_lease

WAIT_S = 5.0
"""For the controller to follow a message: it looks into inboxes every second."""
_POLL_S = 0.1
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Flags of all commands that steer."""

    store: str = ""
    sender: str | None = None
    """None = this user."""
    consent: Consent = Consent.ASK
    yes: bool = False
    form: DocumentForm = DocumentForm.TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One thing to ask of a sweep."""

    verb: str
    """``pause``, as the command is called."""
    wish: str
    """``pauses: what runs goes on, nothing new starts``, said of the sweep or of one job."""
    wish_many: str = ""
    """The same, said of several jobs; empty for orders that take no jobs."""
    undo: str = ""
    """Command that takes it back, or leads on."""
    reopens: bool = False
    """Whether it lets a sweep that has ended go on; any other order means nothing to one."""
    aim: SweepState | None = None
    """How a sweep ends by it, so that one that has ended so needs nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which jobs a user named; with neither names nor conditions the whole sweep is meant."""

    names: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    states: tuple[JobState, ...] = ()
    """In which a job can be meant at all."""

    @property
    def is_everything(self) -> bool:
        """Whether nothing was named."""
        return not self.names and not self.conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An order that was sent."""

    order: Order
    message_id: str
    jobs: list[str] | None
    """None = the whole sweep."""
    form: DocumentForm


Send = Callable[[ObjectStore, list[str] | None], str]
"""Sends the order for some jobs (None = all); returns the message's id."""


def give_order(sweep: str, order: Order, send: Send, sending: Sending, choice: Choice | None = None) -> ExitCode:
    """Send an order, and say whether it was followed, refused, or waits for a controller."""
    store = open_existing_store(sending.store)
    require_sweep(store, sweep)
    ledger = SweepLedger(store, sweep)
    snapshot = ledger.refresh()
    if not order.reopens and snapshot.state.is_final and not _will_reopen(store, snapshot):
        return _tell_ended(snapshot, order, sending.form)
    jobs = None
    if choice is not None and not choice.is_everything:
        chosen = _chosen(snapshot, order, choice)
        jobs = [view.name for view in chosen]
        _show_jobs(order, snapshot, chosen)
        question = f"{order.verb.capitalize()} {_number(len(jobs))}?"
        subject = f"{order.verb} asks before it acts on chosen jobs"
        if not sending.yes and not confirmed(question, subject=subject):
            return ExitCode.REFUSED
    given = Given(order=order, message_id=send(store, jobs), jobs=jobs, form=sending.form)
    revive_killed_stack(ledger.refresh())
    return _conclude(store, _wait(store, ledger, given.message_id), given)


def is_served(store: ObjectStore, snapshot: Snapshot, now: float) -> bool:
    """Whether the controller of a sweep's cluster renews its lease."""
    lease = read_lease(store, snapshot.cluster) if snapshot.cluster else None
    return lease is not None and lease.expires_at_s > now


def _will_reopen(store: ObjectStore, snapshot: Snapshot) -> bool:
    """Whether a message waits that lets an ended sweep go on: what is sent now is followed after it."""
    waiting = read_inbox(store, snapshot.sweep, skip=snapshot.handled)
    return any(isinstance(message, Submit | Retry) for message in waiting)


def _tell_ended(snapshot: Snapshot, order: Order, form: DocumentForm) -> ExitCode:
    """Say that an order means nothing any more; it is not sent, as it would wait for a controller to refuse it."""
    is_reached = snapshot.state is order.aim
    told = f"sweep {snapshot.sweep} has ended ({snapshot.state.value}) already: nothing to {order.verb}"
    if form is not DocumentForm.TABLE:
        refusal = "" if is_reached else told
        document = {"sweep": snapshot.sweep, "action": order.verb, "message": "", "jobs": None, "followed": is_reached}
        print_document({**document, "refusal": refusal, "state": snapshot.state.value}, form)
    if is_reached:
        stderr_console().print(f"{told}.", markup=False, soft_wrap=True)
        return ExitCode.OK
    complain(f"{told}; retry or submit lets it go on")
    return ExitCode.FAILURE


def _chosen(snapshot: Snapshot, order: Order, choice: Choice) -> list[JobView]:
    if snapshot.plan is None:
        message = f"no controller has accepted a plan of sweep '{snapshot.sweep}' yet: it has no jobs to choose from"
        raise NotFoundError(message)
    found = select(snapshot, choice.names, choice.conditions)
    chosen = [view for view in found if view.state in choice.states]
    if not chosen:
        states = ", ".join(f"{number} {state.value}" for state, number in Counter(v.state for v in found).items())
        wanted = " or ".join(state.value for state in choice.states)
        message = (
            f"nothing to {order.verb}: {len(found)} jobs of sweep '{snapshot.sweep}' are meant"
            f"{f' ({states})' if found else ''}, and none is {wanted}"
        )
        raise NotFoundError(message)
    return chosen


def _show_jobs(order: Order, snapshot: Snapshot, chosen: Sequence[JobView]) -> None:
    table = Table(title=f"{order.verb}: {_number(len(chosen))} of {snapshot.sweep}", title_justify="left")
    table.add_column("job", overflow="fold")
    table.add_column("state")
    for view in chosen[:_SHOWN]:
        table.add_row(view.name, view.state.value)
    if len(chosen) > _SHOWN:
        table.add_row(f"and {len(chosen) - _SHOWN} more", "")
    stderr_console().print(table)


def _wait(store: ObjectStore, ledger: SweepLedger, message_id: str) -> Snapshot:
    """The sweep once the message is settled, or as it is if nobody settles it soon."""
    deadline_s = time.monotonic() + WAIT_S
    snapshot = ledger.refresh()
    while message_id not in snapshot.handled and time.monotonic() < deadline_s:
        if not is_served(store, snapshot, time.time()):
            break
        time.sleep(_POLL_S)
        snapshot = ledger.refresh()
    return snapshot


def _conclude(store: ObjectStore, snapshot: Snapshot, given: Given) -> ExitCode:
    refusal = snapshot.refusals.get(given.message_id, "")
    is_followed = given.message_id in snapshot.handled and not refusal
    if given.form is not DocumentForm.TABLE:
        document = {
            "sweep": snapshot.sweep,
            "action": given.order.verb,
            "message": given.message_id,
            "jobs": given.jobs,
            "followed": is_followed,
            "refusal": refusal,
            "state": snapshot.state.value,
        }
        print_document(document, given.form)
    if refusal:
        complain(refusal)
        return ExitCode.REFUSED
    whose = f"{_number(len(given.jobs))} of {snapshot.sweep}" if given.jobs else snapshot.sweep
    wish = given.order.wish_many if given.jobs and len(given.jobs) > 1 else given.order.wish
    undo = f" {given.order.undo}" if given.order.undo else ""
    told = f"Done: {whose} {wish}." if is_followed else f"Asked: {whose} {wish}; {_when(store, snapshot)}."
    stderr_console().print(f"{told}{undo} See: orchestrator status {snapshot.sweep}", markup=False, soft_wrap=True)
    return ExitCode.OK


def _number(jobs: int) -> str:
    return f"{jobs} job{'s' * (jobs > 1)}"


def _when(store: ObjectStore, snapshot: Snapshot) -> str:
    """When an order that was not followed at once takes effect."""
    now = time.time()
    if is_served(store, snapshot, now):
        return "the controller is alive but busy, and follows it as soon as it gets to its inbox"
    lease = read_lease(store, snapshot.cluster) if snapshot.cluster else None
    since = f" (the last one was seen {format_duration(now - lease.expires_at_s)} ago)" if lease is not None else ""
    return f"no controller runs{since}: it waits in the store and is followed before anything starts, once one does"
