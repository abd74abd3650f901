"""Live attempts as a controller follows them: their time limits, whether they hang, and stops on request.

Invariants:

- Only time counts in which the controller ran and looked: while the store does not answer, or the controller is
  suspended, attempts may wait for the same reason, and must not all be ended at the first look afterwards.
- Observations of an attempt end with the controller: the next one starts to count from zero. Only preemptions, which
  are in journals, are kept, with what is left of their time and at least ``RESUMED_GRACE_S`` of it.
- An attempt that was asked to end is asked again until it does, and is ended when its grace is over.
- A runner is released only once the end of its attempt is in the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from orchestrator.backends.protocol import WAITING_PHASES, AttemptReport, AttemptStatus, Backend
from orchestrator.core.clocks import is_time
from orchestrator.core.contract import Progress
from orchestrator.core.errors import FailureKind
from orchestrator.metrics.attempts import CounterBook
from orchestrator.scheduling.preflight import NUM_STEPS
from orchestrator.state.codec import decode_value
from orchestrator.state.snapshot import Attempt

ATTEMPT_STOP_GRACE_S = 120.0
"""Time for a checkpoint: a network of 1e9 parameters with its optimizer is 16 GB, which takes a minute to write."""
RESUMED_GRACE_S = 60.0
"""Least time for a checkpoint after a new controller has found a preemption: nobody looked in between."""
MAX_GAP_S = 30.0
"""Of the time between two polls, at most this counts."""
_LONG_STEPS = dict.fromkeys(("simulate", "list"), 86_400.0)
"""Phases that report nothing for hours, and their limits in seconds: only the author of a simulation knows how long a
seed takes, and a source may be millions of files on a network file system. They hold cores alone.
"""
_ASK_EVERY_S = 10.0
"""A request may be lost on its way; asking again changes nothing."""


# --------------------------------------------------------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """The limits of time without a further step, or other work that the attempt counts (``Progress.done``)."""

    multiple: float = 30.0
    """The limit is at least so many of its own steps: waiting for a slow store or a busy node takes a few."""
    floors_s: Mapping[str, float] = field(
        default_factory=lambda: (
            {
                # Steps are short, but a rank that fetches its shards again after an outage takes minutes.
                "train": 600.0,
                "embed": 600.0,
                # Importing, downloading the index, compiling the network.
                "starting": 1800.0,
                "setup": 1800.0,
                # These make no steps while they go on.
                "evaluate": 3600.0,
                "write": 1800.0,
                **_LONG_STEPS,
            }
        )
    )
    """Least time by phase, seconds."""
    other_s: float = 3600.0
    """Least time in any other phase, seconds."""

    def limit_s(self, phase: str, step_s: float) -> float:
        """Seconds without a further step or other work after which an attempt hangs."""
        return max(self.floors_s.get(phase, self.other_s), self.multiple * step_s)


class PreflightRule(StrEnum):
    """When one job of each duration class starts before the others, until it has trained a few steps."""

    LARGE = "large"
    """Where they take more than a few GPU-hours."""
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
    """All limits of one controller's attempts."""

    grace_s: float = ATTEMPT_STOP_GRACE_S
    """From the request to write a checkpoint and end to the end by force."""
    hangs: HangLimits = field(default_factory=HangLimits)
    preflight: PreflightRule = PreflightRule.LARGE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return decode_value(cls, document)


# ---------------------------------------------------------------------------------------------------------------- hangs


@dataclass(slots=True, kw_only=True)
class _Beat:
    phase: str
    step: int
    done: int
    at_s: float
    seen_at_s: float
    silent_s: float = 0.0
    """Seconds since the latest step or other work, counted only between polls."""
    step_s: float = 0.0
    """Longest step in this phase, by the attempt's own figure and by our measurement."""
    num_steps: int = 0
    """Steps that were seen."""


class Heartbeats:
    """The latest step of every running attempt, and when it was first seen."""

    def __init__(self, limits: HangLimits | None = None) -> None:
        self._limits = limits or HangLimits()
        self._beats: dict[str, _Beat] = {}
        self._stepping: set[str] = set()

    @property
    def stepping(self) -> Collection[str]:
        """Attempts that have trained a few steps since they were first seen."""
        return self._stepping

    @property
    def steps(self) -> dict[str, int]:
        """The training step that each attempt has reached."""
        return {attempt_id: beat.step for attempt_id, beat in self._beats.items()}

    def see(self, attempt_id: str, progress: Progress, now: float) -> str:
        """Take a report; returns why the attempt counts as hanging, or nothing."""
        beat = self._beats.get(attempt_id)
        if beat is None or progress.phase != beat.phase:
            self._beats[attempt_id] = _Beat(
                phase=progress.phase, step=progress.step, done=progress.done, at_s=now, seen_at_s=now
            )
            return ""
        beat.silent_s += _looked_s(beat.seen_at_s, now)
        beat.seen_at_s = now
        if progress.done != beat.done:
            beat.done, beat.silent_s = progress.done, 0.0
        if progress.step != beat.step:
            beat.num_steps += max(0, progress.step - beat.step)
            if beat.num_steps >= NUM_STEPS:
                self._stepping.add(attempt_id)
            own_s = (now - beat.at_s) / max(1, progress.step - beat.step)
            beat.step_s = progress.step_s or max(own_s, 0.5 * beat.step_s)
            beat.step, beat.at_s, beat.silent_s = progress.step, now, 0.0
            return ""
        return "" if beat.phase in WAITING_PHASES else self._verdict(beat)

    @property
    def silent_s(self) -> dict[str, float]:
        """Seconds without a step or other work, by attempt; 0 in phases that report nothing for hours."""
        return {
            attempt_id: 0.0 if beat.phase in _LONG_STEPS else beat.silent_s for attempt_id, beat in self._beats.items()
        }

    def retain(self, attempt_ids: Collection[str]) -> None:
        """Forget all attempts but these."""
        if len(self._beats) > len(attempt_ids):
            self._stepping.intersection_update(attempt_ids)
            self._beats = {attempt_id: beat for attempt_id, beat in self._beats.items() if attempt_id in attempt_ids}

    def _verdict(self, beat: _Beat) -> str:
        silent_s, limit_s = beat.silent_s, self._limits.limit_s(beat.phase, beat.step_s)
        if silent_s <= limit_s:
            return ""
        pace = f", {self._limits.multiple:g} of its steps of {beat.step_s:.3g} s," if beat.step_s else ""
        return (
            f"hangs: no progress for {silent_s:.0f} s in phase {beat.phase!r} at step {beat.step}; "
            f"{limit_s:.0f} s{pace} are allowed; the stacks of its processes are at the end of its log"
        )


# ------------------------------------------------------------------------------------------------------ requests to end


def _looked_s(seen_at_s: float, now: float) -> float:
    """Seconds since the last poll that count; none where the clock was set back."""
    return max(0.0, min(now - seen_at_s, MAX_GAP_S))


@dataclass(slots=True, kw_only=True)
class _StopRequest:
    reason: str
    grace_s: float
    seen_at_s: float
    ask_again_at_s: float
    waited_s: float = 0.0
    """Seconds since the request, counted only between polls."""


class StopRequests:
    """Attempts that this controller has asked to end. A new controller starts with the preemptions of the journals."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stops: dict[str, _StopRequest] = {}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._stops

    def ask(self, attempt_id: str, reason: str, now: float, grace_s: float = ATTEMPT_STOP_GRACE_S) -> None:
        """Ask an attempt to write a checkpoint and end, for the first time; later calls change nothing."""
        if attempt_id not in self._stops:
            self._stops[attempt_id] = _StopRequest(reason=reason, grace_s=grace_s, seen_at_s=now, ask_again_at_s=now)
            self._ask(attempt_id, now)

    def retry_or_kill(self, now: float) -> None:
        """Repeat requests that are due, and end attempts whose grace is over."""
        for attempt_id, stop in list(self._stops.items()):
            stop.waited_s += _looked_s(stop.seen_at_s, now)
            stop.seen_at_s = now
            if stop.waited_s >= stop.grace_s:
                self._backend.kill(attempt_id, f"{stop.reason}; it had {stop.waited_s:.0f} s to end and did not")
                # Reported as lost from now on; if the command is lost on its way, it is sent once more.
                stop.waited_s = 0.0
            elif is_time(stop.ask_again_at_s, now, _ASK_EVERY_S):
                self._ask(attempt_id, now)

    def forget(self, attempt_id: str) -> None:
        """The attempt has ended."""
        self._stops.pop(attempt_id, None)

    def _ask(self, attempt_id: str, now: float) -> None:
        self._stops[attempt_id].ask_again_at_s = now + _ASK_EVERY_S
        self._backend.stop(attempt_id)


# ---------------------------------------------------------------------------------------------------------- the tracker
class AttemptTracker:
    """State of live attempts that is not in journals; a new controller starts without it."""

    def __init__(self, backend: Backend, limits: AttemptLimits, now: float) -> None:
        self._backend = backend
        self._preflight = limits.preflight
        self.stops = StopRequests(backend)
        self.heartbeats = Heartbeats(limits.hangs)
        self.counters = CounterBook(now)
        """Sums that attempts report, for metrics."""
        self.remaining_s: dict[str, float] = {}
        """Time left of live attempts, as they report it."""
        self.node_by_attempt: dict[str, str] = {}
        """Nodes of live attempts, of gangs that of the coordinator."""
        self.orphans: set[str] = set()
        """Attempts of sweeps that another cluster has taken over: asked to end, and not ended yet."""

    @property
    def stepping(self) -> Collection[str] | None:
        """Attempts that have trained a few steps; ``None`` where no job waits for another's first steps."""
        return None if self._preflight is PreflightRule.NEVER else self.heartbeats.stepping

    def follow(self, attempt_id: str, node: str, progress: Progress, now: float) -> None:
        """Take the progress of an attempt that runs, and end it if it hangs."""
        self.node_by_attempt[attempt_id] = node
        if progress.eta_s:
            self.remaining_s[attempt_id] = progress.eta_s
        else:  # not known, as in the evaluation at the end: what was known before it does not count that
            self.remaining_s.pop(attempt_id, None)
        # The end comes back as a report: an event before it could leave a live attempt under an ended one.
        if why := self.heartbeats.see(attempt_id, progress, now):
            self._backend.kill(attempt_id, why, FailureKind.HANG)

    def disown(self, attempt: Attempt, now: float) -> None:
        """Another cluster has taken the sweep of an attempt over: ask it to end."""
        self.orphans.add(attempt.attempt_id)
        self.stops.ask(attempt.attempt_id, "another cluster has taken its sweep over", now)

    def release(self, attempt_id: str) -> None:
        """The end of an attempt is on record: its runner may go, and nothing is remembered of it."""
        self.stops.forget(attempt_id)
        self.remaining_s.pop(attempt_id, None)
        self.node_by_attempt.pop(attempt_id, None)
        self._backend.release(attempt_id)

    def release_orphans(self, reports: Mapping[str, AttemptReport]) -> None:
        """Release disowned attempts that have ended."""
        for attempt_id in sorted(self.orphans & reports.keys()):
            if reports[attempt_id].status is not AttemptStatus.RUNNING:
                self.orphans.discard(attempt_id)
                self.release(attempt_id)

    def retain(self, attempt_ids: Collection[str]) -> None:
        """Forget what all attempts but these have reported."""
        self.heartbeats.retain(attempt_ids)
        self.counters.retain(attempt_ids)
