"""The live attempts of all sweeps, laid out on the nodes of the cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from orchestrator.core.contract import Resources
from orchestrator.scheduling.budgets import Budget, overdue
from orchestrator.scheduling.demand import NOTHING, Amount, AttemptDemand, minus, plus, times, total_of
from orchestrator.scheduling.durations import RESTART_S, expected_end_s
from orchestrator.scheduling.fairness import Held
from orchestrator.scheduling.node_filter import NodeFilter
from orchestrator.scheduling.placement import ExpectedEnd, FreeCapacity, Spread
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state.snapshot import JobView
from orchestrator.state.transitions import SweepState

ROOM_KEPT_S = 1800.0
"""For how long free nodes are kept for an attempt that waits for further nodes: clouds add nodes in minutes, or not
for hours. Afterwards other attempts use the free nodes, and request nodes of other shapes.
"""


class Occupancy:
    """The live attempts that hold the cluster's resources, until when, and which of them may be preempted."""

    def __init__(
        self,
        node_filter: NodeFilter,
        indexes: Sequence[SweepIndex],
        *,
        remaining_s: Mapping[str, float],
        stopped: Collection[str],
        now: float,
    ) -> None:
        self._node_filter, self._indexes, self._remaining_s, self.now = node_filter, indexes, remaining_s, now
        self._stopped = stopped
        """Attempts that this round asks to end before it starts any: stopped, or preempted for other than room."""
        self._floating: dict[str, Spread] = {}
        """Assumed nodes of attempts whose nodes are not known yet."""
        self.missing: set[tuple[Resources, int]] = set()
        """Shapes (resources and number of workers) for which the autoscaler has added no node for long."""
        self.waiting: list[AttemptDemand] = []
        """Attempts for which the autoscaler is to add nodes."""
        self._budgets: dict[str, Budget] = {}
        self.room = self._make_room()

    @cached_property
    def endings(self) -> list[ExpectedEnd]:
        """All live attempts on present nodes."""
        found: list[ExpectedEnd] = []
        for index in self._indexes:
            found += self._endings(index)
        return found

    def leaving(self) -> list[ExpectedEnd]:
        """Those of them that are ending already."""
        return [self._ending(index, held, spread) for index, held, spread in self.laid_out() if self.is_leaving(held)]

    def is_leaving(self, held: Held) -> bool:
        """Whether an attempt is ending already."""
        return held.attempt.preempting_at_s is not None or held.attempt.attempt_id in self._stopped

    def lowest_priority(self, priorities: Mapping[str, int]) -> int | None:
        """Of the attempts of sweeps with a priority here."""
        indexes = [one for one in self._indexes if one.plan.sweep in priorities]
        held = [
            priorities[one.plan.sweep] + live.attempt.aging for one in indexes for live in one.holdings.live.values()
        ]
        return min(held, default=None)

    def budget(self, index: SweepIndex) -> Budget:
        """What a sweep may still use, as of this round."""
        found = self._budgets.get(index.plan.sweep)
        if found is None:
            is_bounded = index.plan.policy.gpu_hour_budget is not None
            live = index.holdings.live.values() if is_bounded else ()
            found = self._budgets[index.plan.sweep] = Budget(
                policy=index.plan.policy,
                used=self._used_gpu_hours(index) if is_bounded else 0.0,
                promised=sum(self._expected_gpu_hours(index, held) for held in live),
            )
        return found

    def may_continue(self, index: SweepIndex, held: Held) -> bool:
        """Whether a job's next attempt may start once this one ends: not if its sweep ends, nor after its deadline or
        beyond its budget.
        """
        snapshot, policy = index.snapshot, index.plan.policy
        if snapshot.state in {SweepState.STOPPING, SweepState.CANCELLING} or view_of(index, held) is None:
            return False
        if overdue(policy, snapshot.accepted_at_s, self.now + RESTART_S):
            return False
        if policy.gpu_hour_budget is None:
            return True
        return self.budget(index).allows(self.next_gpu_hours(index, held), instead_of=self.left_gpu_hours(index, held))

    def next_gpu_hours(self, index: SweepIndex, held: Held) -> float:
        """GPU-hours of a job's next attempt if its live one ends now."""
        place = index.places[held.attempt.job]
        full = index.demands[place]
        ran_s = held.attempt.ran_s(self.now) / held.demand.slowdown(full)
        return full.gpus * index.left_s(place, stopped_after_s=ran_s) / 3600.0

    def left_gpu_hours(self, index: SweepIndex, held: Held) -> float:
        """The expected further use of a live attempt."""
        gpus = held.demand.gpus
        return gpus * (self._ending(index, held, ()).end_s - self.now) / 3600.0 if gpus else 0.0

    def _expected_gpu_hours(self, index: SweepIndex, held: Held) -> float:
        """The same; of one that is ending, that of its job's next attempt, so that nothing else uses it up."""
        goes_on = self.is_leaving(held) and view_of(index, held) is not None
        return self.next_gpu_hours(index, held) if goes_on else self.left_gpu_hours(index, held)

    def _used_gpu_hours(self, index: SweepIndex) -> float:
        """The use of a sweep's attempts so far, live and ended, also of earlier revisions."""
        live_s = [
            held.demand.gpus * held.attempt.ran_s(self.now) for held in index.holdings.live.values() if held.demand.gpus
        ]
        return index.holdings.history.gpu_hours + (index.snapshot.spent_gpu_s + sum(live_s)) / 3600.0

    def _make_room(self) -> FreeCapacity:
        machines = self._node_filter.machines
        used: dict[int, Amount] = {}
        floating: list[Held] = []
        for index in self._indexes:
            if machines.is_pool:
                used[0] = plus(used.get(0, NOTHING), self._held_in_pool(index))
                continue
            for name, amount in index.holdings.by_node.items():
                if name in machines.places:
                    place = machines.places[name]
                    used[place] = plus(used.get(place, NOTHING), amount)
            if index.holdings.floating != NOTHING:
                floating += [held for held in index.holdings.live.values() if not held.nodes]
        room = FreeCapacity(machines, used.items(), NOTHING)
        for held in sorted(floating, key=lambda one: (one.attempt.launched_at_s, one.attempt.attempt_id)):
            self._lay(room, held)
        return room

    def _lay(self, room: FreeCapacity, held: Held) -> None:
        demand = held.demand
        spread = room.place(demand, self._node_filter.nodes(demand), end_s=self.now)
        if spread is None and self._waits_long(held):
            self.missing.add((demand.resources, demand.num_workers))
        elif spread is None:
            # On a cluster that grows, it waits for its node; otherwise nodes were lost, and it is about to be.
            room.left = plus(room.left, times(demand.total, -1))
            self.waiting.append(demand)
        else:
            room.take(demand, spread)
            self._floating[held.attempt.attempt_id] = spread

    def _held_in_pool(self, index: SweepIndex) -> Amount:
        """Resources of a sweep's attempts where room is counted over the whole cluster.

        A cluster that grows is counted so while all of its nodes leave, or none is there: attempts on leaving nodes
        hold nothing of what is to come, nor do those that have waited long.
        """
        if not self._node_filter.can_grow or self._node_filter.machines.nodes:
            return index.holdings.total
        waiting = [held.demand for held in index.holdings.live.values() if self._waits_long(held)]
        self.missing.update((demand.resources, demand.num_workers) for demand in waiting)
        return minus(index.holdings.floating, total_of(demand.total for demand in waiting))

    def _waits_long(self, held: Held) -> bool:
        return held.attempt.awaits_room and self.now - held.attempt.launched_at_s > ROOM_KEPT_S

    def laid_out(self) -> Iterator[tuple[SweepIndex, Held, Spread]]:
        """All live attempts on present nodes, and their nodes."""
        for index in self._indexes:
            for held in index.holdings.live.values():
                spread = self._spread(held)
                if spread is not None:
                    yield index, held, spread

    def _spread(self, held: Held) -> Spread | None:
        """The nodes of an attempt; ``None`` if they are unknown, or if it has none yet."""
        machines = self._node_filter.machines
        if machines.is_pool:
            # Where ``missing`` has shapes although no node is known, such attempts hold nothing.
            return None if self.missing and self._waits_long(held) else ((0, held.demand.num_workers),)
        if held.nodes:
            return tuple((machines.places[name], count) for name, count in held.nodes if name in machines.places)
        return self._floating.get(held.attempt.attempt_id)

    def _endings(self, index: SweepIndex) -> Iterator[ExpectedEnd]:
        """Those of one sweep; one that has not overrun its estimate ends when it did in the round before."""
        machines, remembered = self._node_filter.machines, index.endings
        if remembered.machines is not machines or len(remembered.by_id) > 2 * len(index.holdings.live) + 100:
            remembered.machines, remembered.by_id = machines, {}
        for attempt_id, held in index.holdings.live.items():
            ending = remembered.by_id.get(attempt_id)
            is_leaving = held.attempt.preempting_at_s is not None or attempt_id in self._stopped
            is_sure = not is_leaving and attempt_id not in self._remaining_s
            if ending is None or ending.end_s <= self.now or not is_sure:
                spread = self._spread(held)
                if spread is None:
                    continue
                ending = self._ending(index, held, spread)
                if is_sure and held.nodes and ending.end_s == ending.sure_end_s:
                    remembered.by_id[attempt_id] = ending
            yield ending

    def _ending(self, index: SweepIndex, held: Held, spread: Spread) -> ExpectedEnd:
        attempt, view = held.attempt, view_of(index, held)
        if attempt.attempt_id in self._stopped:
            end_s, sure_end_s = self.now + RESTART_S, self.now
        else:
            total_s = 0.0  # of a job that the plan has no more, which goes on because another one waits for its key
            if view is not None:
                place = index.places[attempt.job]
                total_s = index.left_s(place) * held.demand.slowdown(index.demands[place])
            remaining_s = self._remaining_s.get(attempt.attempt_id)
            end_s, sure_end_s = expected_end_s(attempt, total_s, remaining_s=remaining_s, now=self.now)
        return ExpectedEnd(
            attempt_id=attempt.attempt_id,
            demand=held.demand,
            spread=spread,
            launched_at_s=attempt.launched_at_s,
            end_s=end_s,
            sure_end_s=sure_end_s,
        )


def view_of(index: SweepIndex, held: Held) -> JobView | None:
    """The job of an attempt, if it is still wanted."""
    place = index.places.get(held.attempt.job)
    view = None if place is None else index.views[place]
    return view if view is not None and view.attempt is held.attempt else None
