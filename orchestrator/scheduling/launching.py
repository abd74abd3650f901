"""One round of starting attempts: in which order, where, at which size, and why others wait. Pure.

Invariants:

- A started attempt takes its resources at once, so that nothing later in the round uses them.
- A sweep is ranked again after each of its starts, by its new share.
- An attempt that passes a blocked job ends before that job's reservation begins, or leaves the resources it needs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.scheduling.budgets import UserCount
from orchestrator.scheduling.commands import Command, FailJob, LaunchJob, PreemptAttempt
from orchestrator.scheduling.demand import NOTHING, AttemptDemand, dominant, minus, plus, times
from orchestrator.scheduling.durations import RESTART_S
from orchestrator.scheduling.node_filter import NodeFilter
from orchestrator.scheduling.occupancy import Occupancy
from orchestrator.scheduling.placement import ExpectedEnd, Reservation, Spread, keep, reserve
from orchestrator.scheduling.preemption import candidates, choose_victims
from orchestrator.scheduling.queues import Rank, RoundState, SweepQueue

MAX_RESERVATIONS = 4
"""Different sets of nodes that have a reservation for their first waiting job in one round."""
MAX_PREEMPTING = 4
"""Gangs for which attempts are preempted in one round."""
MAX_BUNDLE = 64
"""One-worker jobs of a shape for which attempts are preempted together, so that few nodes are affected."""
SOON_S = 60.0
"""Resources that become free within so many seconds need no preemption."""
PENDING_SHARE = 0.25
"""Part of the present cluster that an autoscaler may be asked for at a time, and at least one attempt."""


class Launching:
    """Starts what may start, best first, until nothing more fits."""

    def __init__(
        self,
        *,
        node_filter: NodeFilter,
        occupancy: Occupancy,
        queues: Sequence[SweepQueue],
        round_state: RoundState,
        users: Mapping[str, UserCount],
        priorities: Mapping[str, int],
        num_launches: int | None,
        is_settled: bool,
    ) -> None:
        self._node_filter, self._occupancy, self._room = node_filter, occupancy, occupancy.room
        self._queues, self._round, self._users = queues, round_state, users
        self._priorities, self._now = priorities, round_state.now
        self._left_to_launch, self._is_settled = num_launches, is_settled
        self._reserved_node_sets: set[frozenset[int]] = set()
        self._num_preempting = 0
        self._stop_requested: set[str] = set()
        """Attempts that this round asks to end."""
        self._started: list[ExpectedEnd] = []
        self._lowest = occupancy.lowest_priority(priorities)
        self._commands: list[Command] = []
        self._shapes = {demand for queue in queues for demand in queue.index.queues}
        self.is_blocked = False
        """Whether a job did not fit."""
        self._let_preempt_above: float = math.inf

    def run(self) -> list[Command]:
        """All commands of this round."""
        line: list[tuple[Rank, SweepQueue]] = []
        for queue in self._queues:
            self._enqueue(line, queue)
        while line and self._left_to_launch != 0:
            queue = heapq.heappop(line)[1]
            # Ranked before others were served: what it would start may have been closed, or started elsewhere, since.
            rank = queue.rank()
            if rank is None:
                continue
            if line and line[0][0] < rank:
                heapq.heappush(line, (rank, queue))
                continue
            self._serve(queue)
            self._enqueue(line, queue)
        return self._commands

    def _enqueue(self, line: list[tuple[Rank, SweepQueue]], queue: SweepQueue) -> None:
        rank = queue.rank()
        if rank is not None:
            heapq.heappush(line, (rank, queue))

    def _serve(self, queue: SweepQueue) -> None:
        place, demand = queue.drop_best()
        sizes = self._sizes(demand)
        if not sizes:
            self._wait_or_fail(queue, place, demand)
            return
        allowed = [size for size in sizes if not self._cap_refusal(queue, size)]
        if not allowed:
            queue.block(place, demand, self._cap_refusal(queue, sizes[-1]))
            return
        refusal = queue.budget.refusal(queue.gpu_hours(place, demand))
        if refusal:
            queue.refuse(place, demand, refusal)
        elif not self._start(queue, place, allowed[0]):
            self._block(queue, place, demand, allowed)

    def _sizes(self, demand: AttemptDemand) -> list[AttemptDemand]:
        """Sizes that the nodes could hold; a smaller one on good nodes is better than the full one on excluded ones."""
        sizes = [size for size in (demand, *demand.smaller) if self._node_filter.could_hold(size)]
        return [size for size in sizes if not self._node_filter.needed(size)] or sizes

    def _wait_or_fail(self, queue: SweepQueue, place: int, demand: AttemptDemand) -> None:
        """The present nodes can never hold a job: it fails unless others are expected."""
        job = queue.index.jobs[place]
        reason = self._node_filter.refusal(demand, job.kind)
        if demand in queue.index.proven:  # it ran here before: its node is lost for now
            queue.block(place, demand, f"waits for a node that it ran on to come back: {reason}")
        elif self._node_filter.may_come_back(demand):
            queue.block(place, demand, f"waits for a node that was lost to come back: {reason}")
        elif not self._is_settled:
            queue.block(place, demand, f"waits for nodes to join: {reason}")
        else:
            self._commands.append(FailJob(sweep=queue.sweep, job=job.name, reason=reason))

    def _start(self, queue: SweepQueue, place: int, size: AttemptDemand, *, why: str = "") -> bool:
        """Start an attempt if it fits now."""
        end_s = self._now + self._length_s(queue, place, size)
        spread = self._find(queue, place, size, end_s)
        if spread is None:
            return False
        self._room.take(size, spread)
        names = self._node_filter.machines.names
        nodes = tuple(names[where] for where, count in spread for _ in range(count) if names[where])
        self._launch(queue, place, size, nodes=nodes, why=why)
        self._started.append(_ending_of(queue, place, size, spread, now=self._now, end_s=end_s))
        return True

    def _find(self, queue: SweepQueue, place: int, size: AttemptDemand, end_s: float) -> Spread | None:
        nodes = self._node_filter.nodes(size)
        failure = queue.index.views[place].last_failure
        if failure is not None and failure.node in self._node_filter.machines.places:
            elsewhere = nodes - {self._node_filter.machines.places[failure.node]}
            spread = self._room.place(size, elsewhere, end_s=end_s)
            if spread is not None:
                return spread
        spreads = (self._room.place(size, zone, end_s=end_s) for zone in (nodes, *self._node_filter.other_zones(size)))
        return next((spread for spread in spreads if spread is not None), None)

    def _launch(
        self,
        queue: SweepQueue,
        place: int,
        size: AttemptDemand,
        *,
        nodes: tuple[str, ...],
        why: str,
        awaits_room: bool = False,
    ) -> None:
        job, demand = queue.index.jobs[place], queue.index.demands[place]
        is_full = size is demand
        left_out = self._left_out(size, demand, nodes)
        command = LaunchJob(
            sweep=queue.sweep,
            job=job.name,
            resources=None if is_full else size.resources,
            num_workers=0 if is_full else size.num_workers,
            nodes=nodes,
            exclude=() if nodes else self._node_filter.avoided(size),
            awaits_room=awaits_room,
            aging=0 if queue.num_live else queue.aging,  # what runs nothing has waited
            reason="; ".join(part for part in (queue.index.retries.get(place, ""), why, left_out) if part),
        )
        self._commands.append(command)
        queue.priority = queue.base_priority  # the sweep runs something: its waiting raises one attempt, not all
        self._round.live_keys.add(job.key)
        queue.started(place, size, queue.gpu_hours(place, demand))
        user = self._users.get(queue.index.plan.owner)
        if user is not None:
            user.gpus, user.num_live = user.gpus + size.gpus, user.num_live + 1
        if self._left_to_launch is not None:
            self._left_to_launch -= 1

    def _left_out(self, size: AttemptDemand, full: AttemptDemand, nodes: Sequence[str] = ()) -> str:
        """How excluded nodes affect an attempt; empty if they do not. ``nodes``: its placement."""
        needed = [name for name in self._node_filter.needed(size) if not nodes or name in nodes]
        if needed:
            return f"the excluded nodes count ({', '.join(needed)}): the others are too few for it"
        if size is not full and (lost := self._node_filter.needed(full)):
            return f"at full size it would need excluded nodes ({', '.join(lost)})"
        return ""

    def _block(self, queue: SweepQueue, place: int, demand: AttemptDemand, sizes: Sequence[AttemptDemand]) -> None:
        """The job at the head of a queue does not fit now."""
        full, left_s = sizes[0], queue.index.left_s(place)
        self.is_blocked = True
        if queue.priority > queue.base_priority and queue.base_priority < self._let_preempt_above:
            self._let_preempt(queue.base_priority)
        reservation = self._reservation(queue, place, full)
        if self._start_smaller(queue, place, sizes, reservation):
            return
        made_room, is_asked = self._make_room(queue, place, full, reservation)
        if is_asked:  # the room that is made is for this job: a lower one must not start in a free part of it
            reservation = self._reserve(queue, place, full, is_made=True)
        if not made_room and self._ask_for_nodes(queue, place, full):
            return
        nodes = self._node_filter.nodes(full)
        if reservation is not None and (made_room or is_asked or self._may_reserve(nodes)):
            keep(self._room, reservation)
            if not made_room:
                self._reserved_node_sets.add(nodes)
            queue.wait(place, self._waits_for(full, reservation))
        else:
            left_out = self._left_out(full, demand)
            queue.wait(place, f"waits for {full.resources}: {self._free()}{f'; {left_out}' if left_out else ''}")
        if not made_room or full.num_workers == 1:
            # From now on, only jobs that end before the reservation begins may use its nodes.
            window_s = self._room.open_until_s(full, nodes) - self._now
            self._round.closed.close(demand, min(left_s, window_s) if self._room.has(full) else 0.0)

    def _reservation(self, queue: SweepQueue, place: int, size: AttemptDemand) -> Reservation | None:
        nodes = self._node_filter.nodes(size)
        if len(self._shapes) == 1 and not queue.index.demands[place].smaller and not self._may_preempt(queue):
            return None  # no job of another shape could pass it
        if not (self._may_reserve(nodes) or queue.index.demands[place].smaller or self._may_preempt(queue)):
            return None
        return self._reserve(queue, place, size)

    def _reserve(
        self, queue: SweepQueue, place: int, size: AttemptDemand, *, is_made: bool = False
    ) -> Reservation | None:
        """``is_made``: attempts leave for it, whose nodes a starving job takes in place of those untouched longest."""
        return reserve(
            self._room,
            size,
            self._node_filter.nodes(size),
            [*self._endings(), *self._started],
            now=self._now,
            is_starving=not is_made and queue.is_starving(place, queue.index.demands[place]),
        )

    def _endings(self) -> Iterator[ExpectedEnd]:
        """Of the live attempts; those that this round asks to end leave within the time of a restart, or at once."""
        soon_s = self._now + RESTART_S
        for one in self._occupancy.endings:
            is_asked = one.attempt_id in self._stop_requested
            yield replace(one, end_s=min(one.end_s, soon_s), sure_end_s=self._now) if is_asked else one

    def _may_reserve(self, nodes: frozenset[int]) -> bool:
        return nodes not in self._reserved_node_sets and len(self._reserved_node_sets) < MAX_RESERVATIONS

    def _start_smaller(
        self, queue: SweepQueue, place: int, sizes: Sequence[AttemptDemand], reservation: Reservation | None
    ) -> bool:
        """Start an elastic job at a smaller size if it then ends earlier, or if no other job waits."""
        for size, wait_s in self._worthwhile(queue, place, sizes, reservation):
            why = f"on {size.gpus:g} of {sizes[0].gpus:g} GPUs: all of them are free in {wait_s:.0f} s"
            if self._start(queue, place, size, why=why):
                return True
        return False

    def _worthwhile(
        self, queue: SweepQueue, place: int, sizes: Sequence[AttemptDemand], reservation: Reservation | None
    ) -> Iterator[tuple[AttemptDemand, float]]:
        """Sizes below the first one at which to start rather than wait for all GPUs, and how long that wait is."""
        wait_s = float("inf") if reservation is None else reservation.start_s - self._now
        is_alone = sum(len(queue) for one in self._queues for queue in one.index.queues.values()) == 1
        for size in sizes[1:]:
            slowdown = size.slowdown(sizes[0])
            longer_s = queue.index.left_s(place) * (slowdown - 1.0)
            if wait_s >= longer_s or (is_alone and wait_s / slowdown > 2.0 * RESTART_S):
                yield size, wait_s

    def _let_preempt(self, above: int) -> None:
        """Sweeps of priorities above one make room before what comes first by its waiting, which must not preempt,
        closes its shape and reserves nodes. They start nothing here, and each tries for its first job only.
        """
        self._let_preempt_above = above
        ranks = {queue: queue.rank() for queue in self._queues if queue.base_priority > above}
        for _, queue in sorted((rank, queue) for queue, rank in ranks.items() if rank is not None):
            if not self._may_preempt(queue):
                continue
            place, demand = queue.drop_best()
            is_asked = False
            sizes = self._sizes(demand) if queue.budget.allows(queue.gpu_hours(place, demand)) else []
            sizes = [size for size in sizes if not self._cap_refusal(queue, size)]
            if sizes:
                reservation = self._reservation(queue, place, sizes[0])
                starts = [sizes[0], *(size for size, _ in self._worthwhile(queue, place, sizes, reservation))]
                ends_s = {size: self._now + self._length_s(queue, place, size) for size in starts}
                if all(self._find(queue, place, size, ends_s[size]) is None for size in starts):
                    _, is_asked = self._make_room(queue, place, sizes[0], reservation)
            if is_asked:
                made = self._reserve(queue, place, sizes[0], is_made=True)
                if made is not None:
                    keep(self._room, made)
                queue.block(place, demand, f"waits for {sizes[0].resources}: {self._free()}")
            else:
                queue.put_back(demand)

    def _may_preempt(self, queue: SweepQueue) -> bool:
        lowest = self._lowest
        return lowest is not None and lowest < queue.base_priority and self._num_preempting < MAX_PREEMPTING

    def _make_room(
        self, queue: SweepQueue, place: int, size: AttemptDemand, reservation: Reservation | None
    ) -> tuple[bool, bool]:
        """Preempt attempts of lower priority, unless resources become free soon.

        Returns:
            Whether room for a gang will be free, and whether attempts that leave make it, asked now or before.
        """
        if not self._may_preempt(queue):
            return False, False
        if reservation is not None and reservation.start_s <= self._now + SOON_S:
            self._num_preempting += size.num_workers > 1
            return size.num_workers > 1, False
        movable = [
            one
            for one in candidates(self._occupancy, queue.base_priority, self._priorities)
            if one.attempt_id not in self._stop_requested
        ]
        leaving = [one for one in self._occupancy.endings if one.attempt_id in self._stop_requested]
        leaving += self._occupancy.leaving()
        bundle = size if size.num_workers > 1 else _bundle(size, self._num_alike(queue, size))
        victims = None
        while victims is None:
            victims = choose_victims(self._room, bundle, self._node_filter.nodes(size), leaving, movable)
            if bundle.num_workers <= size.num_workers:
                break
            bundle = _bundle(size, bundle.num_workers // 2)
        for victim in victims or ():
            reason = (
                f"makes room for {queue.index.jobs[place].name} of sweep {queue.sweep}: priority {queue.base_priority} "
                f"against {victim.priority}, {size.resources} asked for, {self._free()}"
            )
            self._stop_requested.add(victim.attempt_id)
            victim.budget.add(victim.more_gpu_hours)
            self._commands.append(PreemptAttempt(sweep=victim.sweep, attempt_id=victim.attempt_id, reason=reason))
        self._num_preempting += bool(victims)
        return bool(victims) and size.num_workers > 1, victims is not None

    def _num_alike(self, queue: SweepQueue, size: AttemptDemand) -> int:
        """One-worker jobs of a shape that wait only for resources, those that may start together."""
        most = min(MAX_BUNDLE, queue.cap.num_more(queue.num_gpus, queue.num_live, size.gpus))
        user = self._users.get(queue.index.plan.owner)
        if user is not None:
            most = min(most, user.cap.num_more(user.gpus, user.num_live, size.gpus))
        return max(1, queue.count_startable(size, int(most)))

    def _ask_for_nodes(self, queue: SweepQueue, place: int, size: AttemptDemand) -> bool:
        """On a cluster that grows: launch an attempt that waits for a new node, to show the autoscaler its demand."""
        if not self._node_filter.can_grow or (size.resources, size.num_workers) in self._occupancy.missing:
            return False
        nodes = self._node_filter.nodes(size).union(*self._node_filter.other_zones(size))
        free = self._room.free_workers(size, nodes, end_s=self._now + self._length_s(queue, place, size))
        if not self._node_filter.may_ask(size, free, self._occupancy.waiting):
            return False
        pending = minus(NOTHING, self._room.left)
        pending = max(0, pending[0]), max(0, pending[1]), max(0, pending[2])
        whole = self._node_filter.growth_base
        share = dominant(plus(pending, size.total), whole)
        unknown = [waits for waits, asked, has in zip(pending, size.total, whole, strict=True) if asked and not has]
        # Where nobody knows how much of a resource there may be, one attempt asks for it.
        if pending != NOTHING and (share > PENDING_SHARE or any(unknown)):
            return False
        self._room.left = minus(self._room.left, size.total)
        self._occupancy.waiting.append(size)
        what = "no present node has what it needs" if unknown else f"{share:.0%} of it is asked for beyond what it has"
        why = f"the cluster is to grow for it: {what}"
        self._launch(queue, place, size, nodes=(), why=why, awaits_room=True)
        return True

    def _cap_refusal(self, queue: SweepQueue, size: AttemptDemand) -> str:
        own = queue.cap.refusal("the sweep", queue.num_gpus, queue.num_live, size.gpus)
        user = self._users.get(queue.index.plan.owner)
        if own or user is None:
            return f"{own} (policy)" if own else ""
        return user.cap.refusal(f"user {queue.index.plan.owner}", user.gpus, user.num_live, size.gpus)

    def _length_s(self, queue: SweepQueue, place: int, size: AttemptDemand) -> float:
        return queue.index.left_s(place) * size.slowdown(queue.index.demands[place])

    def _waits_for(self, size: AttemptDemand, reservation: Reservation) -> str:
        names = [self._node_filter.machines.names[place] for place, _ in reservation.spread]
        where = f" on {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names[0] else ""
        return f"waits for {size.resources}{where}, expected in {reservation.start_s - self._now:.0f} s; {self._free()}"

    def _free(self) -> str:
        left, whole = self._room.left, self._node_filter.machines.whole
        gpus = f"{max(0, left[1]) / 10_000:g} of {whole[1] / 10_000:g} GPUs and " if whole[1] else ""
        return f"{gpus}{max(0, left[0]) / 10_000:g} of {whole[0] / 10_000:g} CPUs are free"


def _bundle(size: AttemptDemand, num_workers: int) -> AttemptDemand:
    return AttemptDemand(
        resources=size.resources.scaled(num_workers),
        num_workers=num_workers,
        worker=size.worker,
        total=times(size.worker, num_workers),
    )


def _ending_of(
    queue: SweepQueue, place: int, size: AttemptDemand, spread: Spread, *, now: float, end_s: float
) -> ExpectedEnd:
    return ExpectedEnd(
        attempt_id=f"{queue.sweep}/{queue.index.jobs[place].name}",
        demand=size,
        spread=spread,
        launched_at_s=now,
        end_s=end_s,
        sure_end_s=end_s,
    )
