"""The orders that people give to sweeps, and what each of them means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from orchestrator.cli.exits import ExitCode
from orchestrator.cli.orders import Choice, Order, Sending, give_order
from orchestrator.cli.selection import parse_where
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.sweepfile.values import PriorityClass
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Running


def pause(sweep: str, running: Running, sending: Sending) -> ExitCode:
    """Nothing new starts."""
    fate = "what runs goes on" if running is Running.FINISH else "what runs ends after a checkpoint"
    order = Order(verb="pause", wish=f"pauses: nothing new starts, {fate}", undo=_then("resume", sweep))
    return give_order(
        sweep, order, lambda store, _: client.pause(store, sweep, running=running, **_envelope(sending)), sending
    )


def resume(sweep: str, sending: Sending) -> ExitCode:
    """The end of a pause."""
    order = Order(verb="resume", wish="goes on: ready jobs start again")
    return give_order(sweep, order, lambda store, _: client.resume(store, sweep, **_envelope(sending)), sending)


def stop(sweep: str, sending: Sending) -> ExitCode:
    """The end of a sweep, once what runs has ended."""
    wish = "stops: what runs goes on to its end, nothing else starts"
    order = Order(verb="stop", wish=wish, undo="Submitting it again goes on with it.", aim=SweepState.CANCELLED)
    return give_order(sweep, order, lambda store, _: client.stop(store, sweep, **_envelope(sending)), sending)


def cancel(sweep: str, jobs: Sequence[str], where: Sequence[str], sending: Sending) -> ExitCode:
    """The end of a sweep, or of some jobs, now."""
    wish = "is cancelled: what runs ends after a checkpoint, nothing else starts"
    choice = _choice(jobs, where, JobState.PENDING, JobState.RUNNING)
    return give_order(
        sweep,
        Order(
            verb="cancel",
            wish=wish,
            wish_many=wish.replace("is", "are", 1),
            undo=_then("retry", sweep),
            aim=SweepState.CANCELLED,
        ),
        lambda store, names: client.cancel(store, sweep, jobs=names, **_envelope(sending)),
        sending,
        choice,
    )


def retry(sweep: str, jobs: Sequence[str], where: Sequence[str], sending: Sending) -> ExitCode:
    """Another chance."""
    choice = _choice(jobs, where, JobState.FAILED, JobState.SKIPPED, JobState.CANCELLED)
    one = "gets another chance" + " for all that failed, was skipped or cancelled" * choice.is_everything
    tail = ", from checkpoints where there are any"
    order = Order(verb="retry", wish=one + tail, wish_many="get another chance" + tail, reopens=True)
    return give_order(
        sweep,
        order,
        lambda store, names: client.retry(store, sweep, jobs=names, **_envelope(sending)),
        sending,
        choice,
    )


def set_priority(sweep: str, priority: str, sending: Sending) -> ExitCode:
    """Another rank among sweeps."""
    number = parse_priority(priority)
    order = Order(verb="priority", wish=f"has priority {number} from the next decision on, until its plan changes")
    return give_order(
        sweep, order, lambda store, _: client.set_priority(store, sweep, number, **_envelope(sending)), sending
    )


def parse_priority(text: str) -> int:
    """``high`` or ``12``. Raises ``typer.BadParameter``."""
    names = {member.name.lower(): int(member) for member in PriorityClass}
    if text.lower() in names:
        return names[text.lower()]
    try:
        return int(text)
    except ValueError:
        listed = ", ".join(f"{name} ({number})" for name, number in names.items())
        message = f"priority {text!r} is neither a whole number nor one of {listed}"
        raise typer.BadParameter(message) from None


def _choice(jobs: Sequence[str], where: Sequence[str], *states: JobState) -> Choice:
    return Choice(names=tuple(jobs), conditions=parse_where(where), states=states)


def _envelope(sending: Sending) -> dict[str, Any]:
    return {"sender": sending.sender, "consent": sending.consent}


def _then(command: str, sweep: str) -> str:
    return f"Take it back with: orchestrator {command} {sweep}."
