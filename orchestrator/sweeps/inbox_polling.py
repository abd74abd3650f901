"""Which inboxes a controller looks into, and when: where a marker tells of a message, and each one once a minute.

Clients leave a marker beside each message, ``inbox/<sweep>/<message>``, so that one list tells of all of them. Markers
decide nothing. Invariants:

- A message without a marker (of an earlier version, or of a client that died in between) is found within a minute.
- A sweep stays due until all of its messages were settled or are somebody else's.
- A marker is written after its message: one without a message has been settled, and goes a minute after it was first
  seen. Until then every controller of the store has seen it, so that one whose sweep was taken notices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from zlib import crc32

from orchestrator.core.clocks import is_time

EVERY_S = 60.0
"""Between two looks into one inbox without a marker."""
_RANGE = 1 << 32


class InboxPolling:
    """Sweeps by when to look into their inboxes."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        self._due: set[str] = set()
        self._seen_s: dict[tuple[str, str], float] = {}
        """Markers, by sweep and message, and when each was first seen."""
        self._settled: set[tuple[str, str]] = set()

    def follow_sweeps(self, sweeps: Collection[str]) -> set[str]:
        """All sweeps of the store; the new ones, which are due."""
        found = set(sweeps)
        new = found - self._next_s.keys()
        self._due |= new
        self._next_s = {sweep: at_s for sweep, at_s in self._next_s.items() if sweep in found}
        return new

    def follow_markers(self, markers: Iterable[tuple[str, str]], now: float) -> set[str]:
        """All markers that there are; the sweeps with new ones, which are due."""
        found = set(markers)
        new = {sweep for sweep, _ in found - self._seen_s.keys()}
        self._due |= new
        self._seen_s = {marker: self._seen_s.get(marker, now) for marker in found}
        return new

    def want(self, sweep: str) -> None:
        """Look into this one with the next ones."""
        self._due.add(sweep)

    def due(self, now: float) -> list[str]:
        """Sweeps to look at now."""
        return sorted(self._due | {sweep for sweep, at_s in self._next_s.items() if is_time(at_s, now, EVERY_S)})

    def done(self, sweep: str, messages: Collection[str], now: float) -> None:
        """A sweep's inbox held these messages, and each was settled, or is left to another controller."""
        self._due.discard(sweep)
        # Each at a time of its own, whenever it was first seen: of fifty sweeps about one a second.
        phase_s = EVERY_S * crc32(sweep.encode()) / _RANGE
        self._next_s[sweep] = now + EVERY_S - (now - phase_s) % EVERY_S
        self._settled |= {
            marker
            for marker, seen_s in self._seen_s.items()
            if marker[0] == sweep and marker[1] not in messages and now >= seen_s + EVERY_S
        }

    def forget_marker(self, sweep: str, message_id: str) -> None:
        """A message was settled: should its sender send the same again, that is another marker."""
        self._seen_s.pop((sweep, message_id), None)

    def take_settled(self) -> list[tuple[str, str]]:
        """Markers that may go."""
        settled, self._settled = sorted(self._settled), set()
        return settled
