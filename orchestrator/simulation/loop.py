"""Turns a controller on virtual time, as its actor does on real time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.backends.simulated import Alarm, VirtualClock
from orchestrator.controller.controller import Controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two rounds: ``busy_s`` after one that changed something, and longer and longer after others."""

    busy_s: float = 0.05
    """Also from news of the backend to the round that takes it."""
    idle_s: float = 1.0
    growth: float = 2.0

    def after(self, pause_s: float, *, has_changed: bool) -> float:
        """The pause after a round that followed a pause of ``pause_s``."""
        return self.busy_s if has_changed else min(self.idle_s, max(self.busy_s, pause_s * self.growth))


class ControllerLoop:
    """One controller and its rounds. Give ``news`` to the cluster as ``on_news``."""

    def __init__(
        self,
        clock: VirtualClock,
        controller: Controller,
        pace: Pace,
        *,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._controller = controller
        self._pace = pace
        self._on_round = on_round
        self._pause_s = pace.busy_s
        self._alarm: Alarm | None = None
        self.num_rounds = 0
        self._arm()

    def news(self) -> None:
        """Something happened: the next round comes soon."""
        self._pause_s = self._pace.busy_s
        if self._alarm is None or self._alarm.at_s > self._clock() + self._pause_s:
            self._arm()

    def stop(self) -> None:
        """No further rounds."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _arm(self) -> None:
        self.stop()
        self._alarm = self._clock.after(self._pause_s, self._turn)

    def _turn(self) -> None:
        self.num_rounds += 1
        has_changed = self._controller.tick()
        self._pause_s = self._pace.after(self._pause_s, has_changed=has_changed)
        self._arm()
        self._on_round()
