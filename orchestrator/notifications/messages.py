"""Notifications about sweeps, derived from journals and snapshots. Pure.

An id comes from the journal: that of the event, by its segment and line, or that of the condition, by its
numbers. The same event has the same id in every process and after every restart, so that receivers can recognise a
repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Self

from orchestrator.core.units import format_duration, printable
from orchestrator.scheduling.budgets import WARN_AT, overdue
from orchestrator.state.brief_reasons import brief_reason
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.sweepfile.values import Occasion

_MAX_REASONS = 5
_MAX_CHARS = 300
_ENDED = {"succeeded": Occasion.FINISHED, "cancelled": Occasion.FINISHED, "failed": Occasion.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One notification."""

    notification_id: str
    """Letters, digits and ``-``: also a part of an object's name."""
    occasion: Occasion
    sweep: str
    at_s: float
    """When it happened, unix seconds."""
    title: str
    """One line."""
    text: str
    """What people read below it."""
    state: str = ""
    """State of the sweep."""
    jobs: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs by state."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**{**document, "occasion": Occasion(document["occasion"])})


def notice_of_event(event: Mapping[str, Any], sequence: int, line: int, snapshot: Snapshot) -> Notice | None:
    """The notification of an event of the journal; most have none.

    Args:
        event: its JSON form.
        sequence: segment of the journal.
        line: number of the event within the segment.
        snapshot: the sweep as it is now.
    """
    kind = event.get("type")
    if kind == "sweep_finished":
        status = str(event["status"])
        took_s = float(event["at_s"]) - snapshot.accepted_at_s
        took = f" after {format_duration(took_s)}" if took_s >= 0 else ""  # it was submitted again since
        occasion, title = _ENDED[status], f"Sweep {snapshot.sweep} {_verb(_outcome(status, snapshot))}{took}"
    elif kind == "sweep_tripped":
        occasion, title = Occasion.FAILED, f"Sweep {snapshot.sweep} was stopped by its circuit breaker"
    else:
        return None
    text = "\n".join([*([printable(str(event["reason"]))] if kind == "sweep_tripped" else []), *_summary(snapshot)])
    notification_id = f"{sequence:08d}-{line}"
    return _notice(notification_id, occasion, snapshot, float(event["at_s"]), (title, text))


def budget_notices(snapshot: Snapshot, gpu_hours: float, now: float) -> Iterator[Notice]:
    """Notices about a budget that is nearly or fully spent, or a passed deadline; once for each plan revision."""
    if snapshot.plan is None or not snapshot.state.is_live:
        return
    policy, revision = snapshot.plan.policy, snapshot.revision
    bound = policy.gpu_hour_budget
    if bound is not None and gpu_hours >= WARN_AT * bound:
        is_spent = gpu_hours >= bound
        state = "has spent its budget" if is_spent else f"has used {gpu_hours / bound:.0%} of its budget"
        then = "Nothing starts any more that needs GPUs." if is_spent else "When it is spent, nothing more starts."
        text = f"{gpu_hours:.2f} of {bound:.2f} GPU-hours are used. {then} To go on: raise policy.budget, submit again."
        name = f"budget-{revision}-{'spent' if is_spent else 'nearly'}"
        yield _notice(name, Occasion.BUDGET, snapshot, now, (f"Sweep {snapshot.sweep} {state}", text))
    if late := overdue(policy, snapshot.accepted_at_s, now):
        text = f"{late}. Nothing starts any more; running jobs finish. To go on: move it and submit again."
        name = f"deadline-{revision}-{snapshot.accepted_at_s:.0f}"
        yield _notice(
            name, Occasion.BUDGET, snapshot, now, (f"The deadline of sweep {snapshot.sweep} has passed", text)
        )


def stall_notice(snapshot: Snapshot, since_s: float, mark: str, now: float) -> Notice:
    """The notice that nothing has happened since ``since_s``; ``mark`` is the state that has not changed since then."""
    quiet = format_duration(now - since_s)
    running, waiting = (
        [attempt.job for attempt in snapshot.live_attempts if attempt.awaits_room is awaits] for awaits in (False, True)
    )
    state = f"{len(running)} jobs run ({running[0]}, ...) and report no step." if running else "No job runs."
    state += f" {len(waiting)} jobs wait for nodes ({waiting[0]}, ...)." if waiting else ""
    text = "\n".join([state, *_summary(snapshot), f"See: orchestrator status {snapshot.sweep}"])
    name = f"stalled-{sha256(mark.encode()).hexdigest()[:16]}"
    title = f"Sweep {snapshot.sweep} has stalled: nothing has happened for {quiet}"
    return _notice(name, Occasion.STALLED, snapshot, now, (title, text))


def may_stall(snapshot: Snapshot) -> bool:
    """Whether a sweep should make progress: it has not ended, and it is not paused."""
    return snapshot.state in {SweepState.RUNNING, SweepState.SUBMITTED, SweepState.CANCELLING, SweepState.STOPPING}


def used_gpu_hours(snapshot: Snapshot, now: float) -> float:
    """GPU-hours of all attempts so far, also of running ones."""
    ended_s = sum(view.gpu_s for view in snapshot.jobs.values())
    live_s = sum(one.ran_s(now) * one.resources.gpus for one in snapshot.live_attempts)
    return (snapshot.spent_gpu_s + ended_s + live_s) / 3600.0


def trial_notice(now: float) -> Notice:
    """What ``orchestrator notify --test`` sends."""
    return Notice(
        notification_id=f"trial-{now:.0f}",
        occasion=Occasion.FINISHED,
        sweep="trial",
        at_s=now,
        title="A trial of orchestrator's notifications",
        text="This is a test notification. Nothing has happened.",
    )


def _notice(name: str, occasion: Occasion, snapshot: Snapshot, at_s: float, title_and_text: tuple[str, str]) -> Notice:
    return Notice(
        notification_id=name,
        occasion=occasion,
        sweep=snapshot.sweep,
        at_s=at_s,
        title=title_and_text[0],
        text=title_and_text[1],
        state=snapshot.state.value,
        jobs={state.value: number for state, number in snapshot.counts.items()},
    )


def _outcome(status: str, snapshot: Snapshot) -> str:
    """What was cancelled on purpose did not fail, whatever the event's status; see ``Snapshot.outcome``."""
    return snapshot.outcome if snapshot.state.value == status else status


def _verb(status: str) -> str:
    return "was cancelled" if status == "cancelled" else status


def _summary(snapshot: Snapshot) -> Iterator[str]:
    counts = ", ".join(f"{number} {state.value}" for state, number in snapshot.counts.items())
    yield f"Jobs: {counts or 'none'}."
    grouped: dict[str, list[str]] = {}
    for view in snapshot.jobs.values():
        if view.state is JobState.FAILED:
            grouped.setdefault(view.reason, []).append(view.name)
    for reason, names in list(grouped.items())[:_MAX_REASONS]:
        whose = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"
        shown = brief_reason(reason, _MAX_CHARS)
        rest = "" if shown == reason.strip() else f"; all of it: orchestrator logs {snapshot.sweep} {names[0]}"
        yield f"{whose}: {shown}{rest}"
    if len(grouped) > _MAX_REASONS:
        yield f"and {len(grouped) - _MAX_REASONS} more reasons"
