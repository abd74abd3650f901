"""Which attempts of lower priority make room for one that waits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.state.amounts import count_workers, plus, times
from orchestrator.state.demand import Demand
from orchestrator.state.durations import RESTART_S
from orchestrator.state.holdings import Held
from orchestrator.state.reservations import Ending
from orchestrator.state.room import Room, Spread, pack

_NOBODY = -(10**9)  # below all priorities
MIN_RUN_S = 600.0
"""An attempt whose job made room before is left alone for so long, and twice as long after each time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """An attempt that could make room, and what that loses in GPU-seconds."""

    sweep: str
    attempt_id: str
    demand: Demand
    spread: Spread
    priority: int
    lost: float


def lost_work(held: Held, *, saves: bool, now: float) -> float:
    """Weighted seconds that are lost when an attempt makes room: its restart, or all of it if it saves nothing."""
    weight = held.demand.total[1] / 10_000 + held.demand.total[0] / 1_000_000
    seconds = RESTART_S if saves else RESTART_S + held.attempt.ran_s(now)
    return seconds * weight


def may_make_room(held: Held, num_preemptions: int, max_preemptions: int, *, now: float) -> bool:
    """Whether an attempt may be asked, so that none is moved again and again."""
    if held.attempt.preempting_at_s is not None or num_preemptions >= max_preemptions:
        return False
    rest_s = MIN_RUN_S * 2.0 ** (num_preemptions - 1) if num_preemptions else 0.0
    return now - held.attempt.launched_at_s >= rest_s


def choose_victims(
    room: Room, demand: Demand, nodes: Collection[int], leaving: Iterable[Ending], candidates: Sequence[Candidate]
) -> list[Candidate] | None:
    """Attempts whose end makes room: none if those that leave anyway do; ``None`` if even all of them would not.

    Per node the cheapest are taken first, lower priorities before higher ones; then as few nodes as give the most room
    for the least loss; last, whoever turns out not to be needed is let go again.
    """
    stage = _Stage(room, demand, frozenset(nodes) - room.reserved.keys())
    for ending in leaving:
        stage.end(ending)
    if stage.fits():
        return []
    if not stage.fits_without(candidates):
        return None
    order = sorted(candidates, key=lambda one: (one.priority, one.lost, one.attempt_id))
    on_node: dict[int, list[Candidate]] = {}
    for candidate in order:
        for place, _ in stage.spread(candidate):
            on_node.setdefault(place, []).append(candidate)
    chosen: dict[str, Candidate] = {}
    for place in _by_price(stage, on_node):
        for candidate in on_node.get(place, ()):
            attempt_id = candidate.attempt_id
            if attempt_id not in chosen and not stage.is_full(place):
                stage.end(candidate)
                chosen[attempt_id] = candidate
        if stage.fits():
            return _pruned(stage, list(chosen.values()))
    return None


class _Stage:
    """The room there would be if some attempts ended."""

    def __init__(self, room: Room, demand: Demand, usable: frozenset[int]) -> None:
        self.demand = demand
        self.free = {place: room.free[place] for place in usable}
        self._left = list(room.left)

    def end(self, one: Candidate | Ending, count: int = 1) -> None:
        """An attempt ends, or (``count`` -1) goes on after all."""
        for place, num_workers in self.spread(one):
            self.free[place] = plus(self.free[place], times(one.demand.worker, count * num_workers))
        self._left = [left + count * part for left, part in zip(self._left, one.demand.total, strict=True)]

    def fits(self) -> bool:
        """Whether the waiting attempt fits now."""
        if any(asked > left for asked, left in zip(self.demand.total, self._left, strict=True)):
            return False
        counts = {place: count_workers(self.demand.worker, free) for place, free in self.free.items()}
        return pack(self.demand.num_workers, counts) is not None

    def fits_without(self, candidates: Iterable[Candidate]) -> bool:
        """Whether it would fit if all of them ended."""
        every = list(candidates)
        for candidate in every:
            self.end(candidate)
        fits = self.fits()
        for candidate in every:
            self.end(candidate, -1)
        return fits

    def is_full(self, place: int) -> bool:
        """Whether a node takes all that still has to go somewhere."""
        return count_workers(self.demand.worker, self.free[place]) >= self.demand.num_workers

    def spread(self, one: Candidate | Ending) -> list[tuple[int, int]]:
        """Usable nodes that an attempt lies on, and with how many workers."""
        return [(place, count) for place, count in one.spread if place in self.free]


def _by_price(stage: _Stage, on_node: Mapping[int, Sequence[Candidate]]) -> list[int]:
    """Nodes, those first whose attempts have the lowest priority, then those that give the most room for their loss."""
    prices: list[tuple[int, float, int]] = []
    for place, free in stage.free.items():
        candidates, gain = on_node.get(place, ()), free
        for candidate in candidates:
            for where, count in stage.spread(candidate):
                gain = plus(gain, times(candidate.demand.worker, count)) if where == place else gain
        num_workers = count_workers(stage.demand.worker, gain)
        if num_workers > 0:
            highest = max((candidate.priority for candidate in candidates), default=_NOBODY)
            prices.append((highest, sum(one.lost for one in candidates) / num_workers, place))
    return [place for _, _, place in sorted(prices)]


def _pruned(stage: _Stage, chosen: list[Candidate]) -> list[Candidate]:
    """Without those whose room is not needed, the dearest first."""
    for candidate in sorted(chosen, key=lambda one: (-one.priority, -one.lost, one.attempt_id)):
        stage.end(candidate, -1)
        if stage.fits():
            chosen.remove(candidate)
        else:
            stage.end(candidate)
    return chosen
