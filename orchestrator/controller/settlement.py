"""From a client's message to the events that settle it: each message exactly once, followed or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from orchestrator.planning.graph.plan import Plan
from orchestrator.state import events
from orchestrator.state.events import Event, MessageEvent, MessageRefused
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState, is_allowed
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweeps.inbox import (
    Cancel,
    ClientMessage,
    Consent,
    Message,
    Pause,
    Resume,
    Retry,
    SetPriority,
    Stop,
    Submit,
)
from orchestrator.sweeps.ledger import SweepLedger
from orchestrator.sweeps.submission import missed_artifacts, settle_submit

_HOPELESS = (JobState.FAILED, JobState.SKIPPED, JobState.CANCELLED)
_OPEN = (JobState.PENDING, JobState.RUNNING)
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class _RefusalError(Exception):
    """Why a message cannot be followed, and what to do; ends up in the journal."""


def settle(
    store: ObjectStore, ledger: SweepLedger, message: Message, *, now: float, on_alive: Callable[[], None]
) -> list[Event]:
    """Events that settle a message; for a new plan, the revision is in the store when this returns.

    ``on_alive`` is called again and again where this takes long.
    """
    if not isinstance(message, ClientMessage):
        return [MessageRefused(at_s=now, message_id=message.message_id, reason=message.reason)]
    try:
        _check_sender(ledger.snapshot, message)
        if isinstance(message, Submit):
            return settle_submit(store, ledger, message, now=now, on_alive=on_alive)
        event = _follow(ledger.snapshot, message, now)
    except _RefusalError as refusal:
        return [MessageRefused(at_s=now, message_id=message.message_id, sender=message.sender, reason=str(refusal))]
    except _MALFORMED as error:
        # It would raise at every look, and keep its sweep from all other messages.
        reason = f"it cannot be followed ({error!r}): it is not as this version writes it; send it again"
        return [MessageRefused(at_s=now, message_id=message.message_id, sender=str(message.sender), reason=reason)]
    snapshot = ledger.snapshot
    if isinstance(event, events.JobsRetried) and snapshot.state.is_final and snapshot.plan is not None:
        # Since the sweep ended, results that the retried jobs read may have been deleted.
        return [event, *missed_artifacts(store, snapshot, snapshot.plan, now, on_alive)]
    return [event]


def _check_sender(snapshot: Snapshot, message: ClientMessage) -> None:
    plan = snapshot.plan
    if plan is None or message.consent is Consent.FORCE or not message.sender or not plan.owner:
        return
    if message.sender != plan.owner and message.sender not in plan.policy.users:
        raise _RefusalError(
            f"sweep {snapshot.sweep} belongs to {plan.owner}, and this was sent by {message.sender}: ask them, let "
            "them list you under policy.users, or insist with --force"
        )


def _follow(snapshot: Snapshot, message: ClientMessage, now: float) -> MessageEvent:
    trigger, fields = _EVENTS[type(message)](snapshot, message)
    _check_state(snapshot, trigger)
    return trigger(at_s=now, message_id=message.message_id, sender=message.sender, **fields)


_Found = tuple[type[MessageEvent], Mapping[str, Any]]


def _cancel(snapshot: Snapshot, message: Cancel) -> _Found:
    if not message.jobs:
        if snapshot.state.is_final:
            raise _RefusalError(f"sweep {snapshot.sweep} is {snapshot.state}: it has ended, there is nothing to cancel")
        return events.CancelRequested, {}
    _check_state(snapshot, events.JobsCancelled)
    return events.JobsCancelled, {"jobs": tuple(_selected(snapshot, message.jobs, _OPEN, "pending or running"))}


def _retry(snapshot: Snapshot, message: Retry) -> _Found:
    _check_state(snapshot, events.JobsRetried)
    if message.jobs:
        chosen = _selected(snapshot, message.jobs, _HOPELESS, "failed, skipped or cancelled")
        jobs = _with_relatives(snapshot, chosen)
    else:
        jobs = [view.name for view in snapshot.jobs.values() if view.state in _HOPELESS]
    if not jobs:
        raise _RefusalError(
            f"no job of sweep {snapshot.sweep} has failed, was skipped or cancelled: there is nothing to retry"
        )
    return events.JobsRetried, {"jobs": tuple(jobs)}


_EVENTS: Mapping[type[ClientMessage], Callable[[Snapshot, Any], _Found]] = {
    Cancel: _cancel,
    Pause: lambda _, message: (events.SweepPaused, {"running": message.running}),
    Resume: lambda _snapshot, _message: (events.SweepResumed, {}),
    Stop: lambda _snapshot, _message: (events.SweepStopping, {}),
    Retry: _retry,
    SetPriority: lambda _, message: (events.PriorityChanged, {"priority": message.priority}),
}
_WISHES: Mapping[type[Event], str] = {
    events.SweepPaused: "pause it",
    events.SweepResumed: "resume it",
    events.SweepStopping: "stop it",
    events.JobsCancelled: "cancel some of its jobs",
    events.JobsRetried: "retry its jobs",
    events.PriorityChanged: "change its priority",
}


def _check_state(snapshot: Snapshot, trigger: type[Event]) -> None:
    if is_allowed(snapshot.state, trigger):
        return
    if snapshot.state is SweepState.SUBMITTED:
        why = "it has no plan yet; wait until a controller has accepted one"
    elif snapshot.state.is_final:
        why = "it has ended; submit it again to go on with it"
    elif trigger is events.SweepResumed:
        why = "it is not paused"
    elif trigger is events.JobsRetried:
        why = "it is on its way to its end; wait for that, then retry it"
    else:
        why = "it is on its way to its end; wait for that, then submit it again"
    raise _RefusalError(f"sweep {snapshot.sweep} is {snapshot.state}, so nobody can {_WISHES[trigger]}: {why}")


def _selected(snapshot: Snapshot, patterns: Sequence[str], states: Sequence[JobState], told: str) -> list[str]:
    """Jobs in one of the states that a client named, in plan order."""
    matched = {pattern: _matching(snapshot, pattern) for pattern in patterns}
    chosen = {name for names in matched.values() for name in names if snapshot.jobs[name].state in states}
    if not chosen:
        found = [f"{name} is {snapshot.jobs[name].state}" for names in matched.values() for name in names[:3]]
        raise _RefusalError(
            f"of the jobs that {', '.join(patterns)} names in sweep {snapshot.sweep}, none is {told} "
            f"({', '.join(found)})"
        )
    return [name for name in snapshot.jobs if name in chosen]


def _matching(snapshot: Snapshot, pattern: str) -> list[str]:
    if pattern in snapshot.jobs:
        return [pattern]
    names = [name for name in snapshot.jobs if fnmatchcase(name, pattern)]
    if not names:
        hint = did_you_mean(pattern, list(snapshot.jobs))
        raise _RefusalError(f"sweep {snapshot.sweep} has no job {pattern!r}: {hint}; nothing was done")
    return names


def _with_relatives(snapshot: Snapshot, chosen: Sequence[str]) -> list[str]:
    """Also what the chosen jobs need and does not exist, and what was skipped because of any of them."""
    jobs = _plan(snapshot).by_name()
    retried, waiting = set(chosen), list(chosen)
    while waiting:
        for need in jobs[waiting.pop()].needs:
            if need not in retried and snapshot.jobs[need].state in _HOPELESS:
                retried.add(need)
                waiting.append(need)
    for name, job in jobs.items():  # in plan order, so that descendants of descendants are found in one go
        if snapshot.jobs[name].state is JobState.SKIPPED and retried.intersection(job.needs):
            retried.add(name)
    return [name for name in snapshot.jobs if name in retried]


def _plan(snapshot: Snapshot) -> Plan:
    if snapshot.plan is None:
        raise _RefusalError(f"sweep {snapshot.sweep} has no plan yet")
    return snapshot.plan
