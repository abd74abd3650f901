"""Each sweep's ready jobs in one round of decisions, best first, and how waiting raises a sweep's priority. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from orchestrator.core.clocks import is_time
from orchestrator.scheduling.budgets import Budget, Cap
from orchestrator.scheduling.demand import AttemptDemand
from orchestrator.scheduling.fairness import FairShare
from orchestrator.scheduling.placement import STARVING_AFTER_S
from orchestrator.scheduling.preflight import NUM_STEPS
from orchestrator.scheduling.sweep_index import SweepIndex, Ticket
from orchestrator.state.failure_policy import LONGEST_BACKOFF_S

AGING_S = 6 * 3600.0
"""A sweep with ready jobs that runs nothing rises by one priority class within this time, linearly."""
MAX_AGING = 20
"""Two classes: a low priority may reach high, but never urgent."""
_CLASS = 10

BACKFILL_DEPTH = 100
"""How many jobs of a shape are checked for a shorter one that fits, once the first does not fit."""
MAX_WAITS = 20
Rank = tuple[int, tuple[int, float, float], float, str]


class ClosedShapes:
    """Shapes that did not fit in this round, and the length of the attempts.

    Free resources only shrink within a round, so such a shape does not fit later, nor does a longer attempt.
    """

    __slots__ = ("limits_s",)

    def __init__(self) -> None:
        self.limits_s: dict[AttemptDemand, float] = {}

    def close(self, demand: AttemptDemand, limit_s: float) -> None:
        """No attempt of this shape that takes ``limit_s`` or longer fits any more."""
        self.limits_s[demand] = min(limit_s, self.limits_s.get(demand, limit_s))


@dataclass(slots=True, kw_only=True)
class RoundState:
    """State of one round of decisions that all sweeps share."""

    now: float
    live_keys: set[str]
    """Keys with a live attempt or a claim: no second attempt starts."""
    committed: Collection[str]
    """Committed keys."""
    closed: ClosedShapes = field(default_factory=ClosedShapes)
    stepping: Collection[str] | None = None
    """Attempts that have trained some steps; ``None`` = nobody tells, and no job waits for another's first steps."""


class SweepQueue:
    """Walks the queues of one sweep. Nothing is taken out of them: launches show in the next snapshot."""

    def __init__(
        self,
        index: SweepIndex,
        *,
        priority: int,
        fair_share: FairShare,
        budget: Budget,
        round_state: RoundState,
    ) -> None:
        self.index, self.fair_share, self.budget = index, fair_share, budget
        self.sweep = index.plan.sweep
        self.base_priority = self.priority = priority
        self.aging = 0
        """How much the sweep's next attempt is raised by its waiting."""
        policy = index.plan.policy
        self.cap = Cap(max_gpus=policy.max_gpus, max_concurrent=policy.max_concurrent)
        self.num_live, self.num_gpus = len(index.holdings.live), index.holdings.num_gpus
        self.waits: dict[str, str] = {}
        self.behind: dict[str, int] = {}
        """By job of ``waits``: how many more ready jobs wait for the same reason, without an entry of their own."""
        self._first_by_reason: dict[str, str] = {}
        self._refused: dict[AttemptDemand, tuple[str, str]] = {}
        """By shape, the first job that is beyond the budget, and why."""
        self._round = round_state
        self._at = dict.fromkeys(index.queues, 0)
        self._tries = dict.fromkeys(index.queues, 0)
        self._blocked: set[AttemptDemand] = set()
        self.best: tuple[Ticket, AttemptDemand] | None = None
        self._ahead: dict[int, str] | None = None
        """First jobs for which others of their class wait; ``None`` = none waits."""
        if round_state.stepping is not None:
            self._ahead = index.preflight.watch(
                index.holdings.live, index.places, stepping=round_state.stepping, now=round_state.now
            )

    def rank(self) -> Rank | None:
        """Its rank among the sweeps, by its best remaining job; ``None`` if none is left."""
        self.best = self._find()
        if self.best is None:
            return None
        (_, place), demand = self.best
        is_beyond, past, share = key = self.fair_share.key(demand.total)
        if is_beyond and self.fair_share.is_least_used and self.is_starving(place, demand) and not self._runs(demand):
            # Else it would wait as long as smaller jobs of others, each within its share, take what becomes free.
            key = -1, past, share
        return -self.priority, key, self.index.snapshot.accepted_at_s, self.sweep

    def is_starving(self, place: int, demand: AttemptDemand) -> bool:
        """Whether no job of a shape has started for so long, without the time of pauses, that nodes are reserved for
        this one of it.
        """
        since_s = max(self.index.ready_since_s(place), self.index.launched_s.get(demand, 0.0))
        return self.index.snapshot.unpaused_s(since_s, self._round.now) > STARVING_AFTER_S

    def _runs(self, demand: AttemptDemand) -> bool:
        """Whether an attempt of a shape is live, at any of its sizes; recent use counts only those that have ended."""
        sizes = (demand, *demand.smaller)
        return any(held.demand in sizes for held in self.index.holdings.live.values())

    def drop_best(self) -> tuple[int, AttemptDemand]:
        """Take the best job out of this round; its place in the plan."""
        if self.best is None:
            message = "rank() found no job; there is none to take"
            raise LookupError(message)
        (_, place), demand = self.best
        self._at[demand] += 1
        return place, demand

    def put_back(self, demand: AttemptDemand) -> None:
        """Undo ``drop_best``."""
        self._at[demand] -= 1

    def block(self, place: int, demand: AttemptDemand, why: str) -> None:
        """Skip this shape for this sweep in this round: the reason applies to all later jobs of the shape."""
        self._blocked.add(demand)
        self.wait(place, why)
        name = self.index.jobs[place].name
        representative = name if name in self.waits else self._first_by_reason.get(why, "")
        if representative:  # shapes without an entry count under the first one that waits for the same reason
            self._first_by_reason.setdefault(why, representative)
            num_behind = len(self.index.queues[demand]) - self._at[demand] + (representative != name)
            self.behind[representative] = self.behind.get(representative, 0) + num_behind

    def refuse(self, place: int, demand: AttemptDemand, why: str) -> None:
        """Skip, in this round, this job and the later ones of its shape that the budget does not allow either."""
        self._refused.setdefault(demand, (self.index.jobs[place].name, why))
        self.wait(place, why)

    def gpu_hours(self, place: int, demand: AttemptDemand) -> float:
        """GPU-hours of the next attempt at a job; an elastic job takes as many at every size."""
        return demand.gpus * self.index.left_s(place) / 3600.0 if demand.gpus else 0.0

    def spent(self) -> str:
        """Why the budget allows no ready job any more; empty while one may start or be reused, now or later."""
        if self.num_live or not self._refused:
            return ""
        may_go_on = any(
            self._is_taken(place) or self.budget.allows(self.gpu_hours(place, demand))
            for demand, queue in self.index.queues.items()
            for _, place in queue
        )
        return "" if may_go_on else next(iter(self._refused.values()))[1]

    def count_startable(self, demand: AttemptDemand, most: int) -> int:
        """How many of the next jobs of a shape could start together if there was room, at most so many."""
        found: set[int | str] = set()
        gpu_hours, at = 0.0, max(0, self._at.get(demand, 0) - 1)
        for _, place in self.index.queues.get(demand, [])[at : at + BACKFILL_DEPTH]:
            hours = self.gpu_hours(place, demand)
            if len(found) < most and self._may_start(place) and self.budget.allows(gpu_hours + hours):
                group = None if self._ahead is None else self.index.preflight.group_of(place)
                one = self.index.jobs[place].key if group is None else group  # of an open group, one goes ahead
                gpu_hours += 0.0 if one in found else hours
                found.add(one)
        return len(found)

    def waits_since_s(self) -> float:
        """Since when a sweep that runs nothing could have started one of the jobs that it could start now.

        Not the best one alone: that may have become ready a moment ago, by another sweep's result.
        """
        index = self.index
        free_s = max(index.last_launch_s, index.last_end_s, index.snapshot.accepted_at_s)
        since_s = self._round.now if self.best is None else max(free_s, index.ready_since_s(self.best[0][1]))
        for _, place in (ticket for queue in index.queues.values() for ticket in queue[:BACKFILL_DEPTH]):
            if since_s <= free_s:
                break
            if not self._is_taken(place):
                since_s = min(since_s, max(free_s, index.ready_since_s(place)))
        return since_s

    def wait(self, place: int, why: str) -> None:
        """Note why a job waits; the first ones of a round are enough."""
        if len(self.waits) < MAX_WAITS:
            self.waits.setdefault(self.index.jobs[place].name, why)

    def started(self, place: int, demand: AttemptDemand, gpu_hours: float) -> None:
        """An attempt was started: count it."""
        group = self.index.preflight.group_of(place)
        if self._ahead is not None and group is not None:
            self._ahead[group] = self.index.jobs[place].name
        self.num_live += 1
        self.num_gpus += demand.gpus
        self.fair_share.add(demand.total)
        self.budget.add(gpu_hours)

    def _find(self) -> tuple[Ticket, AttemptDemand] | None:
        best: tuple[Ticket, AttemptDemand] | None = None
        for demand, queue in self.index.queues.items():
            if demand in self._blocked:
                continue
            ticket = self._next(demand, queue)
            if ticket is not None and (best is None or ticket < best[0]):
                best = ticket, demand
        return best

    def _next(self, demand: AttemptDemand, queue: list[Ticket]) -> Ticket | None:
        """The first job of a queue that may start, and is short enough where only short ones are still allowed or
        find room.
        """
        index, limit_s = self.index, self._round.closed.limits_s.get(demand)
        has_refused = demand in self._refused
        if limit_s is not None and limit_s <= 0.0:
            return None
        at = self._at[demand]
        while at < len(queue):
            place = queue[at][1]
            may_start = self._may_start(place)
            if may_start and has_refused and not self.budget.allows(self.gpu_hours(place, demand)):
                self._count_refused(demand)
            elif may_start and (limit_s is None or index.left_s(place) <= limit_s):
                self._at[demand] = at
                return queue[at]
            at += 1
            if limit_s is not None:
                self._tries[demand] += 1
                if self._tries[demand] > BACKFILL_DEPTH:
                    at = len(queue)
        self._at[demand] = at
        return None

    def _count_refused(self, demand: AttemptDemand) -> None:
        """One more job of a shape waits for the reason of the first one."""
        first = self._refused[demand][0]
        if first in self.waits:
            self.behind[first] = self.behind.get(first, 0) + 1

    def _may_start(self, place: int) -> bool:
        index, round_state = self.index, self._round
        if not is_time(index.not_before_s.get(place, 0.0), round_state.now, LONGEST_BACKOFF_S):
            return False
        if self._ahead and (group := index.preflight.group_of(place)) is not None and group in self._ahead:
            self.wait(
                place, f"preflight: {self._ahead[group]}, which is of its sort, has not made {NUM_STEPS} steps yet"
            )
            return False
        return not self._is_taken(place)

    def _is_taken(self, place: int) -> bool:
        """Whether another attempt, here or elsewhere, works on the job's key or has committed it."""
        key = self.index.jobs[place].key
        return key in self._round.live_keys or key in self._round.committed


def aging(queue: SweepQueue, now: float) -> int:
    """How much waiting adds to a sweep's priority; the time of pauses is none. 0 while anything runs."""
    if queue.index.holdings.live:
        return 0
    waited_s = queue.index.snapshot.unpaused_s(queue.waits_since_s(), now)
    return min(MAX_AGING, max(0, int(waited_s / AGING_S * _CLASS)))
