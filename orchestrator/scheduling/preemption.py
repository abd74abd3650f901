"""Which live attempts are asked to write a checkpoint and end: for attempts of higher priority, because their node
leaves, or to grow. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import KINDS
from orchestrator.scheduling.budgets import Budget, UserCount
from orchestrator.scheduling.commands import PreemptAttempt
from orchestrator.scheduling.demand import AttemptDemand, count_workers, plus, times
from orchestrator.scheduling.durations import RESTART_S
from orchestrator.scheduling.fairness import Held
from orchestrator.scheduling.node_filter import NodeFilter
from orchestrator.scheduling.occupancy import Occupancy, view_of
from orchestrator.scheduling.placement import ExpectedEnd, FreeCapacity, Machines, Spread, pack
from orchestrator.scheduling.queues import SweepQueue
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState

_NOBODY = -(10**9)  # below all priorities
MIN_RUN_S = 600.0
"""An attempt whose job was preempted before is spared for so long, and twice as long after each time."""
GROWS_AFTER_S = 900.0
"""An attempt that started later is not moved again to grow."""
MIN_GROWTH = 1.5
MIN_GAIN = 4.0
"""Seconds that a larger size must save for each second that the restart costs."""
MADE_ROOM_S = 60.0
"""For so long after the end of a preempted attempt, its room is for who may have preempted it."""
MARGIN_S = 15.0
"""An attempt that reports to end at least so long before its node is not preempted: a commit takes seconds."""


# ---------------------------------------------------------------------------------------- for others of higher priority


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """An attempt that could be preempted, the loss in GPU-seconds, and what its sweep's budget must have left."""

    sweep: str
    attempt_id: str
    demand: AttemptDemand
    spread: Spread
    priority: int
    lost: float
    budget: Budget
    next_gpu_hours: float = 0.0
    """Of its job's next attempt; 0 where there is no budget."""
    left_gpu_hours: float = 0.0
    """What it would still use itself."""

    @property
    def more_gpu_hours(self) -> float:
        """By how much its end raises what its sweep uses."""
        return self.next_gpu_hours - self.left_gpu_hours

    def may_continue(self, others_gpu_hours: float) -> bool:
        """Whether the budget allows its job's next attempt if the ends of others raise the use by so much."""
        return self.budget.allows(others_gpu_hours + self.next_gpu_hours, instead_of=self.left_gpu_hours)


def candidates(occupancy: Occupancy, below: int, priorities: Mapping[str, int]) -> Iterator[Candidate]:
    """Attempts of lower priority that may be preempted: of sweeps with a priority here, which are those served now."""
    now = occupancy.now
    for index, held, spread in occupancy.laid_out():
        base, view = priorities.get(index.plan.sweep), view_of(index, held)
        if base is None or view is None:
            continue
        # What started because it had waited would else make room at once, and wait again.
        priority = base + held.attempt.aging
        if priority >= below:
            continue
        num_before = view.failures.get(FailureKind.PREEMPTED, 0)
        is_spared = not may_be_preempted(held, num_before, index.plan.policy.max_preemptions, now=now)
        if not is_spared and not occupancy.is_leaving(held) and occupancy.may_continue(index, held):
            kind, is_bounded = index.jobs[index.places[view.name]].kind, index.plan.policy.gpu_hour_budget is not None
            yield Candidate(
                sweep=index.plan.sweep,
                attempt_id=held.attempt.attempt_id,
                demand=held.demand,
                spread=spread,
                priority=priority,
                lost=lost_work(held, saves=KINDS[kind].saves, now=now),
                budget=occupancy.budget(index),
                next_gpu_hours=occupancy.next_gpu_hours(index, held) if is_bounded else 0.0,
                left_gpu_hours=occupancy.left_gpu_hours(index, held) if is_bounded else 0.0,
            )


def making_room(
    indexes: Iterable[SweepIndex], priorities: Mapping[str, int], machines: Machines, now: float
) -> int | None:
    """Lowest priority of the attempts that are asked to end, or just have, and leave room on nodes that stay."""
    found: list[int] = []
    for index in indexes:
        base = priorities.get(index.plan.sweep)
        if base is None:
            continue
        for held in index.holdings.live.values():
            is_leaving = held.attempt.preempting_at_s is not None and not held.attempt.awaits_room
            if is_leaving and all(name in machines.places for name, _ in held.nodes):
                found.append(base + held.attempt.aging)
        failures = (index.views[place].last_failure for place in index.not_before_s)
        found += [
            base
            for one in failures
            if one is not None and one.kind is FailureKind.PREEMPTED and 0.0 <= now - one.at_s < MADE_ROOM_S
            if not one.node or one.node in machines.places
        ]
    return min(found, default=None)


def lost_work(held: Held, *, saves: bool, now: float) -> float:
    """Weighted seconds that are lost when an attempt makes room: its restart, or all of it if it saves nothing."""
    weight = held.demand.total[1] / 10_000 + held.demand.total[0] / 1_000_000
    seconds = RESTART_S if saves else RESTART_S + held.attempt.ran_s(now)
    return seconds * weight


def may_be_preempted(held: Held, num_preemptions: int, max_preemptions: int, *, now: float) -> bool:
    """Whether an attempt may be preempted; limited, so that none is moved again and again."""
    if num_preemptions >= max_preemptions:
        return False
    rest_s = MIN_RUN_S * 2.0 ** (num_preemptions - 1) if num_preemptions else 0.0
    return now - held.attempt.launched_at_s >= rest_s


def choose_victims(
    room: FreeCapacity,
    demand: AttemptDemand,
    nodes: Collection[int],
    leaving: Iterable[ExpectedEnd],
    candidates: Sequence[Candidate],
) -> list[Candidate] | None:
    """Attempts whose end makes room: none if those that leave anyway do; ``None`` if even all of them would not, or no
    more than the budgets of their sweeps let continue.

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
    victims = _victims(stage, on_node, within_budgets=False)
    if victims is None or _are_within_budgets(victims):
        return victims
    for victim in victims:
        stage.end(victim, -1)
    return _victims(stage, on_node, within_budgets=True)


def _victims(
    stage: _Stage, on_node: Mapping[int, Sequence[Candidate]], *, within_budgets: bool
) -> list[Candidate] | None:
    """Ends attempts on the stage, node by node, until the waiting one fits; ``None`` if it does not."""
    chosen: dict[str, Candidate] = {}
    more_gpu_hours: dict[str, float] = {}
    for place in _by_price(stage, on_node):
        num_before = len(chosen)
        for candidate in on_node.get(place, ()):
            attempt_id, raised = candidate.attempt_id, more_gpu_hours.get(candidate.sweep, 0.0)
            if attempt_id in chosen or stage.is_full(place):
                continue
            if within_budgets and not candidate.may_continue(raised):
                continue
            stage.end(candidate)
            chosen[attempt_id] = candidate
            # One that lowers the use may be let go again, so it makes no room for others.
            more_gpu_hours[candidate.sweep] = raised + max(0.0, candidate.more_gpu_hours)
        if len(chosen) > num_before and stage.fits():
            return _pruned(stage, list(chosen.values()))
    return None


def _are_within_budgets(victims: Iterable[Candidate]) -> bool:
    """Whether the jobs of all of them may continue."""
    more_gpu_hours: dict[str, float] = {}
    for victim in victims:
        raised = more_gpu_hours.get(victim.sweep, 0.0)
        if not victim.may_continue(raised):
            return False
        more_gpu_hours[victim.sweep] = raised + max(0.0, victim.more_gpu_hours)
    return True


class _Stage:
    """The free resources if some attempts ended."""

    def __init__(self, room: FreeCapacity, demand: AttemptDemand, usable: frozenset[int]) -> None:
        self.demand = demand
        self.free = {place: room.free[place] for place in usable}
        self._left = list(room.left)

    def end(self, one: Candidate | ExpectedEnd, count: int = 1) -> None:
        """Add an ended attempt's resources, or (``count`` -1) take them back."""
        for place, num_workers in self.spread(one):
            self.free[place] = plus(self.free[place], times(one.demand.worker, count * num_workers))
        self._left = [left + count * part for left, part in zip(self._left, one.demand.total, strict=True)]

    def fits(self) -> bool:
        """Whether the waiting attempt fits now."""
        if any(requested > left for requested, left in zip(self.demand.total, self._left, strict=True)):
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
        """Whether a node takes all workers that are not placed yet."""
        return count_workers(self.demand.worker, self.free[place]) >= self.demand.num_workers

    def spread(self, one: Candidate | ExpectedEnd) -> list[tuple[int, int]]:
        """Usable nodes of an attempt, and its number of workers on each."""
        return [(place, count) for place, count in one.spread if place in self.free]


def _by_price(stage: _Stage, on_node: Mapping[int, Sequence[Candidate]]) -> list[int]:
    """Nodes in order: lowest priority of their attempts first, then most freed resources for the loss."""
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
    """Without attempts whose resources are not needed; the most expensive ones are dropped first."""
    for candidate in sorted(chosen, key=lambda one: (-one.priority, -one.lost, one.attempt_id)):
        stage.end(candidate, -1)
        if stage.fits():
            chosen.remove(candidate)
        else:
            stage.end(candidate)
    return chosen


# -------------------------------------------------------------------------------------------------------------- to grow


def growths(
    queues: Sequence[SweepQueue], occupancy: Occupancy, node_filter: NodeFilter, users: Mapping[str, UserCount]
) -> Iterator[PreemptAttempt]:
    """The attempt that saves most time by growing, at most one in a round: what it frees shows in the next."""
    by_id = {ending.attempt_id: ending for ending in occupancy.endings}
    found: list[tuple[float, str, PreemptAttempt]] = []
    for queue in queues:
        for held in queue.index.holdings.live.values():
            ending = by_id.get(held.attempt.attempt_id)
            is_old = held.attempt.ran_s(occupancy.now) >= GROWS_AFTER_S and not occupancy.is_leaving(held)
            if ending is not None and is_old and occupancy.may_continue(queue.index, held):
                command, saved_s = _growth(queue, ending, occupancy, node_filter, users)
                if command is not None:
                    found.append((-saved_s, held.attempt.attempt_id, command))
    yield from (command for _, _, command in sorted(found, key=lambda one: one[:2])[:1])


def _growth(
    queue: SweepQueue,
    ending: ExpectedEnd,
    occupancy: Occupancy,
    node_filter: NodeFilter,
    users: Mapping[str, UserCount],
) -> tuple[PreemptAttempt | None, float]:
    place = queue.index.places.get(queue.index.holdings.live[ending.attempt_id].attempt.job)
    if place is None:
        return None, 0.0
    full, present = queue.index.demands[place], ending.demand
    room, left_s = occupancy.room, ending.end_s - occupancy.now
    free = {where: room.free[where] for where in node_filter.nodes(full)}
    for where, count in ending.spread:
        if where in free:
            free[where] = plus(free[where], times(present.worker, count))
    for size in (full, *full.smaller):
        if size.num_workers < MIN_GROWTH * present.num_workers:
            break
        if node_filter.needed(size):
            continue  # it would grow onto excluded nodes
        fits = pack(size.num_workers, {where: count_workers(size.worker, has) for where, has in free.items()})
        saved_s = left_s * (1.0 - present.num_workers / size.num_workers)
        if fits is not None and _may_hold(queue, present, size, users) and saved_s > MIN_GAIN * RESTART_S:
            reason = (
                f"grows from {present.gpus:g} to {size.gpus:g} GPUs, which nothing else asks for: saves about "
                f"{saved_s:.0f} s of {left_s:.0f} s, the restart costs {RESTART_S:.0f} s"
            )
            return PreemptAttempt(sweep=queue.sweep, attempt_id=ending.attempt_id, reason=reason), saved_s
    return None, 0.0


def _may_hold(queue: SweepQueue, present: AttemptDemand, size: AttemptDemand, users: Mapping[str, UserCount]) -> bool:
    """Whether the limits of the sweep and of its user allow an attempt at another size instead of the present one."""
    user = users.get(queue.index.plan.owner)
    bounds = [(queue.cap, queue.num_gpus, queue.num_live)]
    bounds += [] if user is None else [(user.cap, user.gpus, user.num_live)]
    return not any(cap.refusal("", gpus - present.gpus, num_live - 1, size.gpus) for cap, gpus, num_live in bounds)


# ---------------------------------------------------------------------------------------------------- off leaving nodes


def withdrawals(
    snapshots: Sequence[Snapshot],
    nodes: Sequence[Node | Resources],
    *,
    remaining_s: Mapping[str, float],
    node_by_attempt: Mapping[str, str],
    now: float,
) -> Iterator[PreemptAttempt]:
    """Preemptions of the attempts on leaving nodes, each once.

    Args:
        snapshots: sweeps with live attempts.
        nodes: of the cluster.
        remaining_s: seconds left by attempt, as it reports them.
        node_by_attempt: by attempt, the node of its runner, as far as it is known.
        now: unix seconds.
    """
    leaving = {one.name: one.leaves_at_s for one in nodes if isinstance(one, Node) and one.leaves_at_s is not None}
    if not leaving:
        return
    for snapshot in snapshots:
        if snapshot.state is SweepState.CANCELLING:
            continue  # they are ending already
        for attempt in snapshot.live_attempts:
            # Also a gang's coordinator, which may be beside no worker: its end is the gang's.
            places = (*attempt.nodes, node_by_attempt.get(attempt.attempt_id, ""))
            left_s, node = _time_left(places, leaving, now)
            if not node or attempt.preempting_at_s is not None or attempt.attempt_id in snapshot.leaving:
                continue
            if remaining_s.get(attempt.attempt_id, math.inf) + MARGIN_S > left_s or math.isinf(left_s):
                yield PreemptAttempt(
                    sweep=snapshot.sweep, attempt_id=attempt.attempt_id, reason=_leaving_reason(node, left_s)
                )


def _time_left(nodes: Sequence[str], leaving: Mapping[str, float], now: float) -> tuple[float, str]:
    """Time when the first of an attempt's nodes is gone, and its name; empty if none of them leaves."""
    ends = [(leaving[name] - now, name) for name in nodes if name in leaving]
    return min(ends, default=(math.inf, ""))


def _leaving_reason(node: str, left_s: float) -> str:
    when = "leaves the cluster" if math.isinf(left_s) else f"will be gone in {max(0.0, left_s):.0f} s"
    return f"node {node} {when}: its attempts write a checkpoint and go on elsewhere"


def readmissions(indexes: Sequence[SweepIndex], node_filter: NodeFilter) -> Iterator[PreemptAttempt]:
    """Restarts of waits for resources, because Ray cannot change a reservation: its job asks for others since its sweep
    was submitted again, or its excluded nodes may be used now.
    """
    for index in indexes:
        for held in index.holdings.live.values():
            attempt = held.attempt
            if not attempt.awaits_room or attempt.preempting_at_s is not None or view_of(index, held) is None:
                continue
            full = index.demands[index.places[attempt.job]]
            sizes = {(size.resources, size.num_workers) for size in (full, *full.smaller)}
            usable = (
                set(attempt.exclude)
                .intersection(node_filter.machines.places)
                .difference(node_filter.avoided(held.demand))
            )
            if (attempt.resources, attempt.num_workers) not in sizes:
                reason = (
                    f"waits for room again: the sweep was submitted again with other resources, now {full.resources}"
                )
            elif usable:
                reason = f"waits for room again, on {min(usable)} too: the node is not excluded any more"
            else:
                continue
            yield PreemptAttempt(sweep=index.plan.sweep, attempt_id=attempt.attempt_id, reason=reason)
