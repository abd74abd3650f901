"""Attempts that were asked to end: asked again until they do, and ended when their grace is over."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.backends.protocol import Backend
from orchestrator.sweeps.limits import GRACE_S

_ASK_EVERY_S = 10.0
"""A request may be lost on its way; asking again changes nothing."""


@dataclass(slots=True, kw_only=True)
class _Stop:
    reason: str
    asked_at_s: float
    grace_s: float
    ask_again_at_s: float


class Stops:
    """What this controller has asked to end. A new one starts over, with what the journals tell of preemptions."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stops: dict[str, _Stop] = {}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._stops

    def ask(self, attempt_id: str, reason: str, now: float, grace_s: float = GRACE_S) -> None:
        """Ask an attempt to write a checkpoint and end, for the first time; later calls change nothing."""
        if attempt_id not in self._stops:
            self._stops[attempt_id] = _Stop(reason=reason, asked_at_s=now, grace_s=grace_s, ask_again_at_s=now)
            self._ask(attempt_id, now)

    def insist(self, now: float) -> None:
        """Ask again where it is time, and end what has had its grace."""
        for attempt_id, stop in list(self._stops.items()):
            if now >= stop.asked_at_s + stop.grace_s:
                waited_s = now - stop.asked_at_s
                self._backend.kill(attempt_id, f"{stop.reason}; it had {waited_s:.0f} s to end and did not")
                # Reported as lost from now on; should that be lost on its way too, it is ended once more.
                stop.asked_at_s = now
            elif now >= stop.ask_again_at_s:
                self._ask(attempt_id, now)

    def forget(self, attempt_id: str) -> None:
        """The attempt has ended."""
        self._stops.pop(attempt_id, None)

    def _ask(self, attempt_id: str, now: float) -> None:
        self._stops[attempt_id].ask_again_at_s = now + _ASK_EVERY_S
        self._backend.stop(attempt_id)
