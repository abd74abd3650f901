"""``orchestrator pause``, ``resume``, ``stop``, ``cancel``, ``retry``, ``priority``: requests to submitted sweeps.

A request is a message in the sweep's inbox, which its controller handles, now or when one runs again: these commands
need only the store. A new one is a function here, a line of the table in ``cli.app`` and a class in
``sweeps.requests``, which says what it does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from orchestrator.cli.arguments import JobPatterns, StoreOption, SweepName, Yes
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.core.errors import NotFoundError
from orchestrator.core.units import format_duration
from orchestrator.services.selection import JobSelection, parse_where
from orchestrator.services.status import revive_killed_stack
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import command_line, confirmed, stderr_console
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.policy import POLICY_RANGES
from orchestrator.sweepfile.values import PriorityClass
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Consent, Running, SweepLedger
from orchestrator.sweeps.lease import is_served, read_lease
from orchestrator.sweeps.requests import Retry, Submit, read_inbox

WAIT_S = 5.0
"""How long to wait for the controller, which reads inboxes every second."""
_POLL_S = 0.1
_SHOWN = 12

_Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="NAME=VALUE,...", help="Select jobs by facets, kind, state or name."),
]
_Force = Annotated[bool, typer.Option("--force", help="Allow this for a sweep of another user.")]
SenderOption = Annotated[str | None, typer.Option("--sender", help="User who sends the request; default: this user.")]
RunningOption = Annotated[
    Running, typer.Option("--running", help="What running jobs do: finish, or end after a checkpoint.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Flags of all these commands."""

    store: str = ""
    sender: str | None = None
    """None = this user."""
    force: bool = False
    yes: bool = False
    form: DocumentForm = DocumentForm.TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """One request to a sweep."""

    verb: str
    """The command's name, such as ``pause``."""
    send: Callable[..., str]
    """Function of ``sweeps.client``: takes store, sweep, sender, consent, and ``jobs`` where it takes jobs; returns the
    message's id."""
    effect: str
    """Its effect on the sweep or on one job: ``pauses: running jobs finish, nothing new starts``."""
    effect_on_many: str = ""
    """Its effect on several jobs; empty for requests that take no jobs."""
    undo: str = ""
    """Command that reverts it, or that continues."""
    reopens: bool = False
    """Whether it continues a sweep that has ended; other requests have no effect on such a sweep."""
    aim: SweepState | None = None
    """How a sweep ends after it; a sweep that has already ended like this needs no request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A request that was sent."""

    request: ControlRequest
    message_id: str
    jobs: list[str] | None
    """None = the whole sweep."""
    options: ControlOptions


def pause(
    sweep: SweepName,
    *,
    running: RunningOption = Running.FINISH,
    force: _Force = False,
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Pause a sweep: running jobs continue, and no job starts until resume."""
    options = ControlOptions(store=store, sender=sender, force=force, form=output)
    fate = "running jobs finish" if running is Running.FINISH else "running jobs end after a checkpoint"
    request = ControlRequest(
        verb="pause",
        send=partial(client.pause, running=running),
        effect=f"pauses: no job starts, and {fate}",
        undo=_then("resume", sweep, options),
    )
    raise typer.Exit(send_request(sweep, request, options))


def resume(
    sweep: SweepName,
    *,
    force: _Force = False,
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Resume a paused sweep."""
    request = ControlRequest(verb="resume", send=client.resume, effect="resumes: ready jobs start again")
    raise typer.Exit(send_request(sweep, request, ControlOptions(store=store, sender=sender, force=force, form=output)))


def stop(
    sweep: SweepName,
    *,
    force: _Force = False,
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Stop a sweep: running jobs finish, and no other job starts."""
    request = ControlRequest(
        verb="stop",
        send=client.stop,
        effect="stops: running jobs finish, and no other job starts",
        undo="Submit it again to continue it.",
        aim=SweepState.CANCELLED,
    )
    raise typer.Exit(send_request(sweep, request, ControlOptions(store=store, sender=sender, force=force, form=output)))


def cancel(
    sweep: SweepName,
    jobs: JobPatterns = None,
    *,
    where: _Where = None,
    yes: Yes = False,
    force: _Force = False,
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Cancel a sweep, or some of its jobs: running jobs end after a checkpoint, and no other job starts."""
    options = ControlOptions(store=store, sender=sender, force=force, yes=yes, form=output)
    tail = "cancelled: running jobs end after a checkpoint, and no other job starts"
    request = ControlRequest(
        verb="cancel",
        send=client.cancel,
        effect=f"is {tail}",
        effect_on_many=f"are {tail}",
        undo=_then("retry", sweep, options),
        aim=SweepState.CANCELLED,
    )
    selection = JobSelection(
        names=tuple(jobs or ()), conditions=parse_where(where or ()), states=(JobState.PENDING, JobState.RUNNING)
    )
    raise typer.Exit(send_request(sweep, request, options, selection))


def retry(
    sweep: SweepName,
    jobs: JobPatterns = None,
    *,
    where: _Where = None,
    yes: Yes = False,
    force: _Force = False,
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Retry jobs that failed, were skipped or were cancelled; without job names, all of them."""
    states = (JobState.FAILED, JobState.SKIPPED, JobState.CANCELLED)
    selection = JobSelection(names=tuple(jobs or ()), conditions=parse_where(where or ()), states=states)
    one = "is retried" + ": all jobs that failed, were skipped or were cancelled" * selection.is_everything
    tail = ", from checkpoints where there are any"
    request = ControlRequest(
        verb="retry",
        send=client.retry,
        effect=one + tail,
        effect_on_many="are retried" + tail,
        reopens=True,
    )
    options = ControlOptions(store=store, sender=sender, force=force, yes=yes, form=output)
    raise typer.Exit(send_request(sweep, request, options, selection))


def priority(
    sweep: SweepName,
    level: Annotated[
        str, typer.Argument(help="low, normal, high, urgent, or a whole number; sweeps of higher priority run first.")
    ],
    *,
    force: _Force = False,
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Change the priority of a sweep until its plan changes."""
    number = parse_priority(level)
    request = ControlRequest(
        verb="priority",
        send=partial(client.set_priority, priority=number),
        effect=f"has priority {number} from the next decision on, until its plan changes",
    )
    raise typer.Exit(send_request(sweep, request, ControlOptions(store=store, sender=sender, force=force, form=output)))


def parse_priority(text: str) -> int:
    """``high`` or ``12``. Raises ``typer.BadParameter``."""
    names = {member.name.lower(): int(member) for member in PriorityClass}
    if text.lower() in names:
        return names[text.lower()]
    try:
        priority = int(text)
    except ValueError:
        listed = ", ".join(f"{name} ({number})" for name, number in names.items())
        message = f"priority {text!r} is neither a whole number nor one of {listed}"
        raise typer.BadParameter(message) from None
    if priority not in POLICY_RANGES["priority"]:
        raise typer.BadParameter(f"priority {priority} is outside of [-1000, 1000]")
    return priority


def send_request(
    sweep: str, request: ControlRequest, options: ControlOptions, selection: JobSelection | None = None
) -> ExitCode:
    """Send a request, and print whether it was followed, refused, or waits for a controller."""
    store = open_existing_store(options.store)
    require_sweep(store, sweep)
    ledger = SweepLedger(store, sweep)
    snapshot = ledger.refresh()
    if selection is not None and snapshot.plan is not None:
        selection.select(snapshot)  # misspelt names are refused whatever the sweep's state
    if not request.reopens and snapshot.state.is_final and not _will_reopen(store, snapshot):
        return _print_has_ended(snapshot, request, options.form)
    jobs = None
    if selection is not None and not selection.is_everything:
        chosen = _chosen(snapshot, request, selection)
        jobs = [view.name for view in chosen]
        _show_jobs(request, snapshot, chosen)
        question = f"{request.verb.capitalize()} {_number(len(jobs))}?"
        subject = f"{request.verb} asks for confirmation when jobs are selected"
        if not options.yes and not confirmed(question, subject=subject):
            return ExitCode.REFUSED
    consent = Consent.FORCE if options.force else Consent.ASK
    named = {} if selection is None else {"jobs": jobs}
    message_id = request.send(store, sweep, sender=options.sender, consent=consent, **named)
    revive_killed_stack(ledger.refresh())
    sent = _Sent(request=request, message_id=message_id, jobs=jobs, options=options)
    return _conclude(store, _wait(store, ledger, message_id), sent)


def _will_reopen(store: ObjectStore, snapshot: Snapshot) -> bool:
    """Whether a waiting message continues an ended sweep: a request that is sent now is followed after it."""
    waiting = read_inbox(store, snapshot.sweep, skip=snapshot.handled)
    return any(isinstance(message, Submit | Retry) for message in waiting)


def _print_has_ended(snapshot: Snapshot, request: ControlRequest, form: DocumentForm) -> ExitCode:
    """Print that a request has no effect any more; it is not sent, as it would wait for a controller to refuse it."""
    is_reached = snapshot.state is request.aim
    message = f"sweep {snapshot.sweep} has ended ({snapshot.outcome}) already, so {request.verb} has no effect"
    if form is not DocumentForm.TABLE:
        refusal = "" if is_reached else message
        document = {
            "sweep": snapshot.sweep,
            "action": request.verb,
            "message": "",
            "jobs": None,
            "followed": is_reached,
        }
        print_document({**document, "refusal": refusal, "state": snapshot.state.value}, form)
    if is_reached:
        stderr_console().print(f"{message}.", soft_wrap=True)
        return ExitCode.OK
    complain(f"{message}; to continue it, use retry or submit")
    return ExitCode.FAILURE


def _chosen(snapshot: Snapshot, request: ControlRequest, selection: JobSelection) -> list[JobView]:
    if snapshot.plan is None:
        message = f"no controller has accepted a plan of sweep '{snapshot.sweep}' yet: it has no jobs to choose from"
        raise NotFoundError(message)
    found = selection.select(snapshot)
    chosen = [view for view in found if view.state in selection.states]
    if not chosen:
        states = ", ".join(f"{number} {state.value}" for state, number in Counter(v.state for v in found).items())
        wanted = " or ".join(state.value for state in selection.states)
        message = (
            f"nothing to {request.verb}: {len(found)} jobs of sweep '{snapshot.sweep}' are selected"
            f"{f' ({states})' if found else ''}, and none is {wanted}"
        )
        raise NotFoundError(message)
    return chosen


def _show_jobs(request: ControlRequest, snapshot: Snapshot, chosen: Sequence[JobView]) -> None:
    table = Table(title=f"{request.verb}: {_number(len(chosen))} of {snapshot.sweep}", title_justify="left")
    table.add_column("job", overflow="fold")
    table.add_column("state")
    for view in chosen[:_SHOWN]:
        table.add_row(view.name, view.state.value)
    if len(chosen) > _SHOWN:
        table.add_row(f"and {len(chosen) - _SHOWN} more", "")
    stderr_console().print(table)


def _wait(store: ObjectStore, ledger: SweepLedger, message_id: str) -> Snapshot:
    """The sweep's snapshot once the message is handled, or the current one if no controller handles it soon."""
    deadline_s = time.monotonic() + WAIT_S
    snapshot = ledger.refresh()
    while message_id not in snapshot.handled and time.monotonic() < deadline_s:
        if not is_served(store, snapshot.cluster):
            break
        time.sleep(_POLL_S)
        snapshot = ledger.refresh()
    return snapshot


def _conclude(store: ObjectStore, snapshot: Snapshot, sent: _Sent) -> ExitCode:
    refusal = snapshot.refusals.get(sent.message_id, "")
    is_followed = sent.message_id in snapshot.handled and not refusal
    if sent.options.form is not DocumentForm.TABLE:
        document = {
            "sweep": snapshot.sweep,
            "action": sent.request.verb,
            "message": sent.message_id,
            "jobs": sent.jobs,
            "followed": is_followed,
            "refusal": refusal,
            "state": snapshot.state.value,
        }
        print_document(document, sent.options.form)
    if refusal:
        complain(refusal)
        return ExitCode.REFUSED
    whose = f"{_number(len(sent.jobs))} of {snapshot.sweep}" if sent.jobs else snapshot.sweep
    effect = sent.request.effect_on_many if sent.jobs and len(sent.jobs) > 1 else sent.request.effect
    undo = f" {sent.request.undo}" if sent.request.undo else ""
    message = (
        f"Done: {whose} {effect}." if is_followed else f"Request sent: {whose} {effect}; {_when(store, snapshot)}."
    )
    see = command_line("status", snapshot.sweep, store=sent.options.store)
    stderr_console().print(f"{message}{undo} See: {see}", soft_wrap=True)
    return ExitCode.OK


def _number(jobs: int) -> str:
    return f"{jobs} job{'s' * (jobs > 1)}"


def _when(store: ObjectStore, snapshot: Snapshot) -> str:
    """When a request that was not followed at once takes effect."""
    if is_served(store, snapshot.cluster):
        return "the controller is busy and will do it as soon as it reads its inbox"
    lease, now = read_lease(store, snapshot.cluster) if snapshot.cluster else None, time.time()
    since = f" (the last one was seen {format_duration(now - lease.expires_at_s)} ago)" if lease is not None else ""
    return (
        f"no controller runs{since}, or its rounds fail (orchestrator doctor says why): the request waits in the "
        "store, and the next round of a controller follows it before it starts any job"
    )


def _then(command: str, sweep: str, options: ControlOptions) -> str:
    who = ["--sender", options.sender] if options.sender is not None else []
    words = [*who, "--force"] if options.force else who
    return f"To undo: {command_line(command, sweep, *words, store=options.store)}."
