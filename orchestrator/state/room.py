"""What is left of the cluster while one round of decisions is made, and where the next attempt fits into it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from orchestrator.state.amounts import Amount, count_workers, minus, times, total_of
from orchestrator.state.demand import Demand
from orchestrator.state.machines import Machines

Spread = tuple[tuple[int, int], ...]
"""Places of nodes and how many workers each gets."""


@dataclass(slots=True, kw_only=True)
class Reserved:
    """A node kept for an attempt that is to start on it later."""

    until_s: float
    """Attempts that end by then may use it meanwhile."""
    spare: Amount
    """What it will have beside the one it is kept for: others may use that for as long as they like."""


class Room:
    """Free amounts of each node. A pool (see ``Machines``) is one node on which gangs may lie whole."""

    def __init__(self, machines: Machines, used: Iterable[tuple[int, Amount]], floating: Amount) -> None:
        self.machines = machines
        self.free = list(machines.totals)
        for place, amount in used:
            self.free[place] = minus(self.free[place], amount)
        self.left = minus(total_of(self.free), floating)
        """Of the whole cluster; less than the sum of its nodes where attempts run that were sent to none."""
        self.reserved: dict[int, Reserved] = {}
        self._levels: dict[int, list[int]] = {}
        for place, amount in enumerate(self.free):
            self._levels.setdefault(amount[1], []).append(place)
        self._gpus = sorted(self._levels)

    def place(self, demand: Demand, nodes: Collection[int], *, end_s: float) -> Spread | None:
        """Where an attempt that ends at ``end_s`` fits: on as few nodes as possible, the fullest of those."""
        if any(asked > left for asked, left in zip(demand.total, self.left, strict=True)):
            return None
        if demand.num_workers == 1 or self.machines.is_pool:
            place = self._best(demand.total, nodes, end_s)
            return None if place is None else ((place, demand.num_workers),)
        return pack(demand.num_workers, {p: self._num_workers(demand.worker, p, end_s) for p in nodes})

    def take(self, demand: Demand, spread: Spread) -> None:
        """Use up the room of an attempt."""
        for place, num_workers in spread:
            amount = times(demand.worker, num_workers)
            self._set(place, minus(self.free[place], amount))
            kept = self.reserved.get(place)
            if kept is not None:
                kept.spare = minus(kept.spare, amount)
        self.left = minus(self.left, demand.total)

    def open_until_s(self, demand: Demand, nodes: Collection[int]) -> float:
        """Until when some reserved node may be used that has room for a worker now; minus infinity if none has."""
        return max(
            (
                kept.until_s
                for place, kept in self.reserved.items()
                if place in nodes and count_workers(demand.worker, self.free[place]) > 0
            ),
            default=float("-inf"),
        )

    def has(self, demand: Demand) -> bool:
        """Whether the whole cluster has so much left, wherever it is."""
        return all(asked <= left for asked, left in zip(demand.total, self.left, strict=True))

    def _best(self, asked: Amount, nodes: Collection[int], end_s: float) -> int | None:
        cpus, gpus, memory = asked
        levels, free, reserved = self._gpus, self.free, self.reserved
        for position in range(bisect_left(levels, gpus), len(levels)):
            for place in self._levels[levels[position]]:
                has = free[place]
                if has[0] < cpus or has[2] < memory or place not in nodes:
                    continue
                if place not in reserved or self._num_workers(asked, place, end_s):
                    return place
        return None

    def _num_workers(self, worker: Amount, place: int, end_s: float) -> int:
        kept, room = self.reserved.get(place), self.free[place]
        if kept is not None and end_s > kept.until_s:
            room = (min(room[0], kept.spare[0]), min(room[1], kept.spare[1]), min(room[2], kept.spare[2]))
        return count_workers(worker, room)

    def _set(self, place: int, amount: Amount) -> None:
        old = self.free[place][1]
        self.free[place] = amount
        if amount[1] == old:
            return
        self._levels[old].remove(place)
        if not self._levels[old]:
            del self._levels[old]
            self._gpus.remove(old)
        if amount[1] not in self._levels:
            self._levels[amount[1]] = []
            insort(self._gpus, amount[1])
        insort(self._levels[amount[1]], place)


def pack(num_workers: int, room: dict[int, int]) -> Spread | None:
    """Workers on as few nodes as possible, given how many each could take; the rest goes where it fits tightest."""
    by_room = sorted((count, place) for place, count in room.items() if count > 0)
    if sum(min(count, num_workers) for count, _ in by_room) < num_workers:
        return None
    chosen: list[tuple[int, int]] = []
    while num_workers:
        tightest = bisect_left(by_room, (num_workers, -1))
        # Where no node takes the whole rest, the roomiest takes what it can.
        count, place = by_room.pop(min(tightest, len(by_room) - 1))
        chosen.append((place, min(count, num_workers)))
        num_workers -= min(count, num_workers)
    return tuple(sorted(chosen))
