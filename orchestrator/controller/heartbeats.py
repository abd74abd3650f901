"""Which running attempts hang: they report no further step for a multiple of their own step time.

Time is the controller's, and only that counts in which it looked: while the store is away, or the controller stands
still, attempts may wait for the same cause, and must not all be ended at the first look afterwards. What it saw of an
attempt is forgotten with the controller: the next one waits as long again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.core.contract import Progress
from orchestrator.scheduling.preflight import NUM_STEPS
from orchestrator.sweeps.limits import HangLimits

_WAITING = frozenset({"placing", "placing workers", "reconnecting", "queued"})
"""Phases in which an attempt waits for the cluster, which is no fault of its own."""
MAX_GAP_S = 30.0
"""Of the time between two looks, no more than this counts."""


@dataclass(slots=True, kw_only=True)
class _Beat:
    phase: str
    step: int
    at_s: float
    seen_at_s: float
    silent_s: float = 0.0
    """Since the latest step, as far as somebody looked."""
    step_s: float = 0.0
    """Longest of its own figure and ours, over the phase."""
    num_steps: int = 0
    """That were seen."""


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
            self._beats[attempt_id] = _Beat(phase=progress.phase, step=progress.step, at_s=now, seen_at_s=now)
            return ""
        beat.silent_s += min(now - beat.seen_at_s, MAX_GAP_S)
        beat.seen_at_s = now
        if progress.step != beat.step:
            beat.num_steps += max(0, progress.step - beat.step)
            if beat.num_steps >= NUM_STEPS:
                self._stepping.add(attempt_id)
            own_s = (now - beat.at_s) / max(1, progress.step - beat.step)
            beat.step_s = progress.step_s or max(own_s, 0.5 * beat.step_s)
            beat.step, beat.at_s, beat.silent_s = progress.step, now, 0.0
            return ""
        return "" if beat.phase in _WAITING else self._verdict(beat)

    @property
    def silent_s(self) -> dict[str, float]:
        """Seconds without a step, by attempt."""
        return {attempt_id: beat.silent_s for attempt_id, beat in self._beats.items()}

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
