"""Elastic attempts that would gain from starting again on more GPUs, where nothing else wants these. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.scheduling.occupancy import Occupancy
from orchestrator.scheduling.site import Site
from orchestrator.scheduling.turns import Turn
from orchestrator.state.amounts import count_workers, plus, times
from orchestrator.state.commands import PreemptAttempt
from orchestrator.state.durations import RESTART_S
from orchestrator.state.reservations import Ending
from orchestrator.state.room import pack

MIN_RUN_S = 900.0
MIN_GROWTH = 1.5
MIN_GAIN = 4.0
"""Seconds that a larger size must save for each second that the restart costs."""


def growths(turns: Sequence[Turn], occupancy: Occupancy, site: Site, now: float) -> Iterator[PreemptAttempt]:
    """The attempt that saves most time by growing, at most one in a round: what it frees shows in the next."""
    by_id = {ending.attempt_id: ending for ending in occupancy.endings}
    found: list[tuple[float, str, PreemptAttempt]] = []
    for turn in turns:
        for held in turn.index.holdings.live.values():
            ending = by_id.get(held.attempt.attempt_id)
            is_old = held.attempt.ran_s(now) >= MIN_RUN_S and held.attempt.preempting_at_s is None
            if ending is not None and is_old:
                command, saved_s = _growth(turn, ending, occupancy, site, now)
                if command is not None:
                    found.append((-saved_s, held.attempt.attempt_id, command))
    yield from (command for _, _, command in sorted(found, key=lambda one: one[:2])[:1])


def _growth(
    turn: Turn, ending: Ending, occupancy: Occupancy, site: Site, now: float
) -> tuple[PreemptAttempt | None, float]:
    place = turn.index.places.get(turn.index.holdings.live[ending.attempt_id].attempt.job)
    if place is None:
        return None, 0.0
    full, present = turn.index.demands[place], ending.demand
    room, left_s = occupancy.room, ending.end_s - now
    free = {where: room.free[where] for where in site.nodes(full)}
    for where, count in ending.spread:
        if where in free:
            free[where] = plus(free[where], times(present.worker, count))
    for size in (full, *full.smaller):
        if size.num_workers < MIN_GROWTH * present.num_workers:
            break
        if site.needed(size):
            continue  # it would grow onto nodes that are left out
        allowed = not turn.cap.refusal("", turn.num_gpus - present.gpus, turn.num_live - 1, size.gpus)
        fits = pack(size.num_workers, {where: count_workers(size.worker, has) for where, has in free.items()})
        saved_s = left_s * (1.0 - present.num_workers / size.num_workers)
        if allowed and fits is not None and saved_s > MIN_GAIN * RESTART_S:
            reason = (
                f"grows from {present.gpus:g} to {size.gpus:g} GPUs, which nothing else asks for: saves about "
                f"{saved_s:.0f} s of {left_s:.0f} s, the restart costs {RESTART_S:.0f} s"
            )
            return PreemptAttempt(sweep=turn.sweep, attempt_id=ending.attempt_id, reason=reason), saved_s
    return None, 0.0
