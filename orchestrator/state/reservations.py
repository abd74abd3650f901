"""Room kept for an attempt that does not fit yet, so that smaller ones cannot keep it waiting for ever. Pure.

Source: Lifka, The ANL/IBM SP Scheduling System (1995): EASY backfilling. Others may use the nodes that the first in
line waits for as long as they end, by estimate, before it starts, and what it will leave free for as long as they like.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from orchestrator.state.amounts import Amount, count_workers, minus, times
from orchestrator.state.demand import Demand
from orchestrator.state.room import Reserved, Room, Spread, pack

STARVING_AFTER_S = 6 * 3600.0
"""A shape that nothing of it has started for so long gets nodes to itself, whatever the estimates say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A live attempt, where it lies, and when it is expected to end."""

    attempt_id: str
    demand: Demand
    spread: Spread
    launched_at_s: float
    end_s: float
    """To choose nodes by."""
    sure_end_s: float
    """Until when others may use them; see ``durations.expected_end_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Where and when an attempt is to start."""

    spread: Spread
    start_s: float
    until_s: float
    """Others may use its nodes until then."""
    spare: Mapping[int, Amount]
    """What its nodes will have beside it."""


def reserve(
    room: Room, demand: Demand, nodes: Collection[int], endings: Iterable[Ending], *, now: float, is_starving: bool
) -> Reservation | None:
    """The earliest start of an attempt, by when the live ones end; ``None`` if even their ends do not make room.

    A starving one takes the nodes on which nothing was started for longest, and nobody may use them meanwhile: as
    nothing starts there any more, it is the same nodes next time, until they are free.
    """
    usable = frozenset(place for place in nodes if place not in room.reserved)
    order = sorted(endings, key=lambda ending: (ending.end_s, ending.attempt_id))
    if is_starving:
        usable = _longest_untouched(room, demand, usable, order)
    future = _Future(room, demand, usable)
    start_s = until_s = now
    for ending in order:
        if future.is_enough:
            break
        if future.release(ending):
            start_s, until_s = max(start_s, ending.end_s), max(until_s, ending.sure_end_s)
    spread = future.spread()
    if spread is None:
        return None
    spare = {place: minus(future.free[place], times(demand.worker, count)) for place, count in spread}
    return Reservation(spread=spread, start_s=start_s, until_s=now if is_starving else until_s, spare=spare)


def keep(room: Room, reservation: Reservation) -> None:
    """Let others use the nodes of a reservation only as far as it allows."""
    for place, _ in reservation.spread:
        room.reserved[place] = Reserved(until_s=reservation.until_s, spare=reservation.spare[place])


class _Future:
    """Free amounts of the usable nodes as attempts end, and how many workers each could take."""

    def __init__(self, room: Room, demand: Demand, usable: frozenset[int]) -> None:
        self.free = {place: room.free[place] for place in usable}
        self._demand = demand
        self._counts = {place: self._count(place) for place in usable}
        self._num_workers = sum(self._counts.values())

    @property
    def is_enough(self) -> bool:
        return self._num_workers >= self._demand.num_workers

    def release(self, ending: Ending) -> bool:
        """An attempt ends; whether that makes any room on a usable node."""
        places = [(place, count) for place, count in ending.spread if place in self.free]
        for place, count in places:
            self._add(place, times(ending.demand.worker, count))
        return bool(places)

    def spread(self) -> Spread | None:
        """The workers on as few nodes as possible."""
        return pack(self._demand.num_workers, self._counts)

    def _add(self, place: int, amount: Amount) -> None:
        free = self.free[place]
        self.free[place] = (free[0] + amount[0], free[1] + amount[1], free[2] + amount[2])
        count, old = self._count(place), self._counts[place]
        self._counts[place] = count
        self._num_workers += count - old

    def _count(self, place: int) -> int:
        return max(0, min(self._demand.num_workers, count_workers(self._demand.worker, self.free[place])))


def _longest_untouched(room: Room, demand: Demand, usable: frozenset[int], endings: list[Ending]) -> frozenset[int]:
    """As many nodes as the attempt needs were they empty, those with the oldest youngest attempt first."""
    if room.machines.is_pool:
        return usable
    touched = dict.fromkeys(usable, float("-inf"))
    for ending in endings:
        for place, _ in ending.spread:
            if place in touched:
                touched[place] = max(touched[place], ending.launched_at_s)
    chosen: list[int] = []
    num_workers = 0
    for place in sorted(usable, key=lambda place: (touched[place], place)):
        if num_workers >= demand.num_workers:
            break
        count = count_workers(demand.worker, room.machines.totals[place])
        if count > 0:
            chosen.append(place)
            num_workers += count
    return frozenset(chosen)
