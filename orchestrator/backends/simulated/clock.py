"""Virtual time: it stops while code runs, and jumps to the next scheduled event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

START_S = 1_700_000_000.0


@dataclass(slots=True, order=True)
class Alarm:
    """One appointment; appointments of the same time are kept in the order in which they were made."""

    at_s: float
    number: int
    action: Callable[[], None] = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        """Let the moment pass without the action."""
        self.is_cancelled = True


class VirtualClock:
    """Call it for the time in unix seconds."""

    def __init__(self, start_s: float = START_S) -> None:
        self._now_s = start_s
        self._alarms: list[Alarm] = []
        self._numbers = count()
        self.num_steps = 0
        """Actions taken so far."""

    def __call__(self) -> float:
        return self._now_s

    def at(self, at_s: float, action: Callable[[], None]) -> Alarm:
        """Call ``action`` at a time; one that has passed is now."""
        alarm = Alarm(max(at_s, self._now_s), next(self._numbers), action)
        heapq.heappush(self._alarms, alarm)
        return alarm

    def after(self, delay_s: float, action: Callable[[], None]) -> Alarm:
        """Call ``action`` in ``delay_s`` seconds."""
        return self.at(self._now_s + delay_s, action)

    def step(self) -> bool:
        """Jump to the next appointment and run it; False if there is none."""
        while self._alarms:
            alarm = heapq.heappop(self._alarms)
            if alarm.is_cancelled:
                continue
            self._now_s = alarm.at_s
            self.num_steps += 1
            alarm.action()
            return True
        return False

    def jump(self, at_s: float) -> None:
        """Run all appointments before a time, and set the clock to it."""
        while self._alarms and self._alarms[0].at_s <= at_s:
            self.step()
        self._now_s = max(self._now_s, at_s)
