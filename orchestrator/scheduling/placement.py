"""Where an attempt fits: the nodes, their free resources, and reservations for attempts that do not fit yet. Pure.

Invariants:

- Free amounts only decrease within one round of decisions (ended attempts appear in the next snapshot).
- An attempt is placed on as few nodes as possible, the fullest of those; the same state gives the same nodes.
- No attempt that ends after a reservation begins uses resources of the reserved attempt.

Source of the reservations: Lifka, The ANL/IBM SP Scheduling System (1995): EASY backfilling. Others may use the nodes
of a reservation if, by estimate, they end before it begins; resources that it does not need can be used without limit.
So smaller attempts cannot delay a large one without end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from orchestrator.core.contract import Resources
from orchestrator.scheduling.demand import Amount, AttemptDemand, amount_of, count_workers, minus, times, total_of
from orchestrator.state.nodes import Node

Spread = tuple[tuple[int, int], ...]
"""Places of nodes and how many workers each gets."""
STARVING_AFTER_S = 6 * 3600.0
"""A shape of which no attempt has started for so long gets nodes of its own, whatever the estimates are."""


# ------------------------------------------------------------------------------------------------------------ the nodes


@dataclass(slots=True, init=False)
class Machines:
    """The nodes of a cluster as columns, those with the fewest GPUs first; or the whole cluster as one pool.

    It is a pool if the nodes have no names: then only sizes are known, and free resources are counted over the whole
    cluster.
    """

    nodes: tuple[Node, ...]
    is_pool: bool
    names: tuple[str, ...]
    places: dict[str, int]
    totals: list[Amount]
    whole: Amount
    """Sum over all nodes."""
    leaving: tuple[Node, ...]
    """Places of nodes that are being drained: no attempt is placed there."""
    lost: tuple[Node, ...]
    """Places of nodes that are lost and may come back."""

    def __init__(self, nodes: tuple[Node | Resources, ...], total: Resources) -> None:
        known = [node if isinstance(node, Node) else Node(resources=node) for node in nodes]
        staying = [node for node in known if node.is_alive and node.leaves_at_s is None]
        self.leaving = tuple(node for node in known if node.is_alive and node.leaves_at_s is not None)
        self.lost = tuple(node for node in known if not node.is_alive)
        alive = [node for node in staying if node.resources.cpus > 0 or node.resources.gpus > 0]
        self.is_pool = not alive or any(not node.name for node in alive)
        self.whole = amount_of(total)
        if self.is_pool:
            self.nodes = tuple(alive)
            self.names, self.totals = ("",), [self.whole]
        else:
            # Spot nodes first: on-demand nodes are kept for attempts that must not run on spot nodes.
            alive.sort(key=lambda node: (node.resources.gpus, not node.is_spot, node.name))
            self.nodes = tuple(alive)
            self.names = tuple(node.name for node in alive)
            self.totals = [amount_of(node.resources) for node in alive]
            self.whole = total_of(self.totals)
        self.places = {name: place for place, name in enumerate(self.names)}

    def suitable(self, requested: Resources) -> list[int]:
        """Places of the nodes that meet the conditions."""
        if self.is_pool:
            return [0] if not self.nodes or any(node.suits(requested) for node in self.nodes) else []
        return [place for place, node in enumerate(self.nodes) if node.suits(requested)]


# --------------------------------------------------------------------------------------------------------- what is free


@dataclass(slots=True, kw_only=True)
class Reserved:
    """A node kept for an attempt that is to start on it later."""

    until_s: float
    """Attempts that end by then may use it until then."""
    spare: Amount
    """Resources that the reserved attempt does not need: others may use them without a time limit."""


class FreeCapacity:
    """Free amounts of each node. A pool (see ``Machines``) is one node that may take whole gangs."""

    def __init__(self, machines: Machines, used: Iterable[tuple[int, Amount]], floating: Amount) -> None:
        self.machines = machines
        self.free = list(machines.totals)
        for place, amount in used:
            self.free[place] = minus(self.free[place], amount)
        self.left = minus(total_of(self.free), floating)
        """Free in the whole cluster; less than the sum of its nodes if attempts run on unknown nodes."""
        self.reserved: dict[int, Reserved] = {}
        self._levels: dict[int, list[int]] = {}
        for place, amount in enumerate(self.free):
            self._levels.setdefault(amount[1], []).append(place)
        self._gpus = sorted(self._levels)

    def place(self, demand: AttemptDemand, nodes: Collection[int], *, end_s: float) -> Spread | None:
        """Where an attempt that ends at ``end_s`` fits: on as few nodes as possible, the fullest of those."""
        if any(requested > left for requested, left in zip(demand.total, self.left, strict=True)):
            return None
        if demand.num_workers == 1 or self.machines.is_pool:
            place = self._best(demand.total, nodes, end_s)
            return None if place is None else ((place, demand.num_workers),)
        return pack(demand.num_workers, {p: self._num_workers(demand.worker, p, end_s) for p in nodes})

    def free_workers(self, demand: AttemptDemand, nodes: Iterable[int], *, end_s: float) -> dict[int, int]:
        """How many workers of an attempt that ends at ``end_s`` fit now, by place."""
        return {place: self._num_workers(demand.worker, place, end_s) for place in nodes}

    def take(self, demand: AttemptDemand, spread: Spread) -> None:
        """Subtract the resources of an attempt."""
        for place, num_workers in spread:
            amount = times(demand.worker, num_workers)
            self._set(place, minus(self.free[place], amount))
            kept = self.reserved.get(place)
            if kept is not None:
                kept.spare = minus(kept.spare, amount)
        self.left = minus(self.left, demand.total)

    def open_until_s(self, demand: AttemptDemand, nodes: Collection[int]) -> float:
        """Latest time until which a reserved node with room for a worker may be used; minus infinity without one."""
        return max(
            (
                kept.until_s
                for place, kept in self.reserved.items()
                if place in nodes and count_workers(demand.worker, self.free[place]) > 0
            ),
            default=float("-inf"),
        )

    def has(self, demand: AttemptDemand) -> bool:
        """Whether the whole cluster has so much free, on any nodes."""
        return all(requested <= left for requested, left in zip(demand.total, self.left, strict=True))

    def _best(self, requested: Amount, nodes: Collection[int], end_s: float) -> int | None:
        cpus, gpus, memory = requested
        levels, free, reserved = self._gpus, self.free, self.reserved
        for position in range(bisect_left(levels, gpus), len(levels)):
            for place in self._levels[levels[position]]:
                has = free[place]
                if has[0] < cpus or has[2] < memory or place not in nodes:
                    continue
                if place not in reserved or self._num_workers(requested, place, end_s):
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
        # If no node takes the whole rest, the node with most free resources takes as much as it can.
        count, place = by_room.pop(min(tightest, len(by_room) - 1))
        chosen.append((place, min(count, num_workers)))
        num_workers -= min(count, num_workers)
    return tuple(sorted(chosen))


# --------------------------------------------------------------------------------------------------------- reservations


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEnd:
    """A live attempt, its nodes, and its expected end."""

    attempt_id: str
    demand: AttemptDemand
    spread: Spread
    launched_at_s: float
    end_s: float
    """Expected end for the choice of nodes."""
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
    """Resources of its nodes that it does not need."""


def reserve(
    room: FreeCapacity,
    demand: AttemptDemand,
    nodes: Collection[int],
    endings: Iterable[ExpectedEnd],
    *,
    now: float,
    is_starving: bool,
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


def keep(room: FreeCapacity, reservation: Reservation) -> None:
    """Let others use the nodes of a reservation only as far as it allows."""
    for place, _ in reservation.spread:
        room.reserved[place] = Reserved(until_s=reservation.until_s, spare=reservation.spare[place])


class _Future:
    """Free amounts of the usable nodes as attempts end, and how many workers each could take."""

    def __init__(self, room: FreeCapacity, demand: AttemptDemand, usable: frozenset[int]) -> None:
        self.free = {place: room.free[place] for place in usable}
        self._demand = demand
        self._counts = {place: self._count(place) for place in usable}
        self._num_workers = sum(self._counts.values())

    @property
    def is_enough(self) -> bool:
        return self._num_workers >= self._demand.num_workers

    def release(self, ending: ExpectedEnd) -> bool:
        """Free the resources of an attempt; returns whether a usable node gained any."""
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


def _longest_untouched(
    room: FreeCapacity, demand: AttemptDemand, usable: frozenset[int], endings: list[ExpectedEnd]
) -> frozenset[int]:
    """As many nodes as the attempt needs when they are empty; first those on which no attempt started for longest."""
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
