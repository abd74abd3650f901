"""Commands from one view of the cluster. Pure: the controller executes the commands and journals the results.

Sweeps of higher priority go first; those of one priority share the cluster by weight; within a sweep the job with the
longest path to the sweep's end goes first. A job that does not fit gets a reservation, and smaller jobs may start
before it if they do not delay it. Invariants:

- The same ``ClusterView`` gives the same commands, independent of earlier calls: a controller that takes over continues
  where the former one stopped.
- No two live attempts work on one key, and none starts whose key is committed or claimed elsewhere.
- The resources of all launches of a round are free now, or requested from an autoscaler; resources that a preemption
  will free do not count.
- A job starts only after all jobs that it needs are done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.budgets import ANYBODY, Cap, UserCount, time_left_s
from orchestrator.scheduling.commands import (
    Command,
    FailJob,
    FinishSweep,
    PreemptAttempt,
    StopAttempt,
    TripSweep,
)
from orchestrator.scheduling.demand import Amount, DemandTable
from orchestrator.scheduling.fairness import FairShare, entitle
from orchestrator.scheduling.launching import Launching
from orchestrator.scheduling.lifecycle import departures, follow_up
from orchestrator.scheduling.node_exclusion import excluded_nodes, exclusions
from orchestrator.scheduling.node_filter import NodeFilter
from orchestrator.scheduling.occupancy import Occupancy
from orchestrator.scheduling.placement import Machines
from orchestrator.scheduling.preemption import growths, making_room, readmissions, withdrawals
from orchestrator.scheduling.queues import RoundState, SweepQueue, aging
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The input of one round of decisions."""

    snapshots: Sequence[Snapshot]
    """All sweeps that have not ended, and those with live attempts."""
    total: Resources
    """Resources of the whole cluster, used or not."""
    nodes: Sequence[Node | Resources]
    """Its nodes; where they have no names, their different shapes, and room is counted over ``total``."""
    now: float
    """Unix seconds."""
    held: Collection[str] = ()
    """Sweeps that cannot be served now: what runs for them stays, because no command for them is carried out."""
    maximum: Sequence[Node] | None = None
    """Kinds of nodes that an autoscaler would add; ``None`` = the cluster does not grow."""
    is_settled: bool = True
    """Whether no other nodes are expected: until then no job fails because none is large enough."""
    committed: Collection[str] = ()
    """Keys known to have a record in the store."""
    claimed: Collection[str] = ()
    """Keys that other clusters work on."""
    may_start: bool = True
    """Whether attempts may start; if not, none makes room for another and none restarts to use more."""
    max_live_attempts: int | None = None
    """How many attempts run at once, whatever fits."""
    durations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By sweep and job, the seconds that a job was estimated to take at full size."""
    remaining_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds left by attempt, as it reports them."""
    node_by_attempt: Mapping[str, str] = field(default_factory=dict)
    """Node by attempt; for gangs that of the coordinator."""
    user_caps: Mapping[str, Cap] = field(default_factory=dict)
    """Limits by owner, ``*`` for users without their own."""
    stepping: Collection[str] | None = None
    """Attempts that have trained a few steps; ``None`` = nobody tells, and there is no preflight."""
    former: Sequence[Snapshot] = ()
    """Ended sweeps: their exclusions of nodes still apply."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """By attempt, the training step that it has reached."""


class Scheduler:
    """Decides round after round; it only caches derived values, so that a new scheduler decides the same."""

    def __init__(self) -> None:
        self._demands = DemandTable()
        self._indexes: dict[str, SweepIndex] = {}
        self._machines: tuple[tuple[Node | Resources, ...], Resources, Machines] | None = None
        self._node_filter: tuple[Collection[str], Sequence[Node] | None, NodeFilter] | None = None
        """Node filter of the present machines; it changes only with the exclusions."""
        self.waits: dict[str, Mapping[str, str]] = {}
        """After ``decide``, by sweep and job: why the first ones in line wait."""
        self.behind: dict[str, Mapping[str, int]] = {}
        """After ``decide``, by sweep and job of ``waits``: how many more ready jobs wait for the same."""
        self.warnings: dict[str, str] = {}
        """After ``decide``, by sweep: which of its bounds it comes close to."""

    @property
    def indexes(self) -> Mapping[str, SweepIndex]:
        """Of the sweeps of the latest ``decide``, by name."""
        return self._indexes

    def follow(self, snapshot: Snapshot, durations: Mapping[str, float] | None) -> None:
        """Bring a sweep's index up to date, as ``decide`` does: for a large sweep it takes seconds the first time."""
        self._follow(snapshot, durations)

    def forget(self) -> None:
        """Drop all indexes, which hold the sweeps' jobs: no sweep is active."""
        self._indexes = {}

    def unlaunched(self, snapshot: Snapshot) -> Iterator[Job]:
        """Jobs of a running sweep that wait for nothing but room, time or a look into the store, in plan order."""
        if snapshot.state is SweepState.RUNNING:
            index = self._follow(snapshot, None)
            yield from () if index is None else index.unlaunched()

    def check_alone(self, view: ClusterView, snapshot: Snapshot) -> None:
        """Decide for one sweep as if it were the only one, and raise whatever comes of it: after ``decide`` failed."""
        alone = Scheduler()
        alone._demands, alone._indexes = self._demands, dict(self._indexes)
        alone.decide(replace(view, snapshots=[snapshot], former=()))

    def decide(self, view: ClusterView) -> list[Command]:
        """Commands that follow from the states of the sweeps."""
        self.waits, self.behind, self.warnings = {}, {}, {}
        now, snapshots, committed = view.now, view.snapshots, view.committed
        indexes = self._follow_all(snapshots, view.durations)
        machines = self._laid_out(tuple(view.nodes), view.total)
        excluded = excluded_nodes([*snapshots, *view.former], now).keys()
        commands: list[Command] = [*departures(snapshots)]
        commands += exclusions(indexes, machines, excluded, now, steps=view.steps, former=view.former, held=view.held)
        commands += withdrawals(
            snapshots, view.nodes, remaining_s=view.remaining_s, node_by_attempt=view.node_by_attempt, now=now
        )
        node_filter = self._suited(machines, view.total, view.maximum, excluded)
        commands += readmissions(indexes, node_filter) if view.may_start else ()
        commands += _follow_ups([one for one in indexes if one.plan.sweep not in view.held], committed, now)
        commands = [*_asked_once(commands)]
        asked = [one for one in commands if isinstance(one, StopAttempt | PreemptAttempt)]
        stopped = {command.attempt_id for command in asked if command.sweep not in view.held}
        occupancy = Occupancy(node_filter, indexes, remaining_s=view.remaining_s, stopped=stopped, now=now)
        keys = set(view.claimed).union(*_live_keys(indexes))
        round_state = RoundState(now=now, live_keys=keys, committed=committed, stepping=view.stepping)
        queues = [_queue_of(index, occupancy, round_state, machines.whole) for index in _starting(indexes, commands)]
        users = _users(indexes, view.user_caps)
        priorities = {one.plan.sweep: _priority(one) for one in indexes if one.plan.sweep not in view.held}
        launching = Launching(
            node_filter=node_filter,
            occupancy=occupancy,
            queues=_ranked(queues, now, lambda: making_room(indexes, priorities, machines, now)),
            round_state=round_state,
            users=users,
            priorities=priorities,
            num_launches=_left_to_launch(view.max_live_attempts, indexes),
            is_settled=view.is_settled,
        )
        started = launching.run()
        if not started and not launching.is_blocked:  # no other job needs what is free
            started = [*growths(queues, occupancy, node_filter, users)]
        if not view.may_start:
            started = [command for command in started if isinstance(command, FailJob)]
        commands += _in_order(started, indexes)
        return [*commands, *filter(None, (self._report_waits(queue, node_filter, now) for queue in queues))]

    def _follow_all(
        self, snapshots: Sequence[Snapshot], durations: Mapping[str, Mapping[str, float]]
    ) -> list[SweepIndex]:
        followed = [self._follow(snapshot, durations.get(snapshot.sweep)) for snapshot in snapshots]
        indexes = [index for index in followed if index is not None]
        self._indexes = {index.plan.sweep: index for index in indexes}
        return indexes

    def _follow(self, snapshot: Snapshot, durations: Mapping[str, float] | None) -> SweepIndex | None:
        if snapshot.plan is None:
            return None
        index = self._indexes.get(snapshot.sweep)
        if index is None or index.plan is not snapshot.plan or (durations is not None and not index.uses(durations)):
            index = SweepIndex(snapshot.plan, self._demands, durations or {})
        # Without it while it changes: one that cannot follow is made anew, not used half-way.
        self._indexes.pop(snapshot.sweep, None)
        index.update(snapshot)
        self._indexes[snapshot.sweep] = index
        return index

    def _laid_out(self, nodes: tuple[Node | Resources, ...], total: Resources) -> Machines:
        if self._machines is None or self._machines[:2] != (nodes, total):
            self._machines, self._node_filter = (nodes, total, Machines(nodes, total)), None
        return self._machines[2]

    def _suited(
        self, machines: Machines, total: Resources, maximum: Sequence[Node] | None, excluded: Collection[str]
    ) -> NodeFilter:
        if self._node_filter is None or self._node_filter[:2] != (excluded, maximum):
            self._node_filter = excluded, maximum, NodeFilter(machines, total, maximum=maximum, excluded=excluded)
        return self._node_filter[2]

    def _report_waits(self, queue: SweepQueue, node_filter: NodeFilter, now: float) -> TripSweep | None:
        """Publish why jobs wait, and end a sweep whose budget prevents all remaining jobs from starting."""
        index = queue.index
        self.waits[queue.sweep], self.behind[queue.sweep] = queue.waits, queue.behind
        left_s = time_left_s(index.plan.policy, index.snapshot.accepted_at_s, now)
        longest_s = max((-queue[0][0] / 1000.0 for queue in index.queues.values()), default=0.0)
        warning = queue.budget.warning()
        if left_s is not None and longest_s > left_s:
            warning += "; " if warning else ""
            warning += f"nothing starts after {left_s:.0f} s more (policy.deadline), the rest needs {longest_s:.0f} s"
        if on_excluded := _on_excluded(index, node_filter):
            warning += f"; {on_excluded}" if warning else on_excluded
        if warning:
            self.warnings[queue.sweep] = warning
        spent = queue.spent()
        if not spent:
            return None
        reason = f"{spent}; nothing runs any more. Raise the budget and resubmit the sweep to go on"
        return TripSweep(sweep=queue.sweep, reason=reason)


def _follow_ups(indexes: Sequence[SweepIndex], committed: Collection[str], now: float) -> Iterator[Command]:
    return (command for index in indexes for command in follow_up(index, committed, now))


def _asked_once(commands: Sequence[Command]) -> Iterator[Command]:
    """Without further orders to end an attempt, which several rules may give: its sweep pauses, and its node leaves."""
    asked = {command.attempt_id for command in commands if isinstance(command, StopAttempt)}
    for command in commands:
        if isinstance(command, PreemptAttempt):
            if command.attempt_id in asked:
                continue
            asked.add(command.attempt_id)
        yield command


def _on_excluded(index: SweepIndex, node_filter: NodeFilter) -> str:
    """Which attempts use excluded nodes, because the others are too few for them; empty if none does."""
    if not node_filter.has_excluded:  # the usual case, and there may be thousands of attempts
        return ""
    found: dict[str, set[str]] = {}
    for held in index.holdings.live.values():
        if used := {name for name, _ in held.nodes}.intersection(node_filter.needed(held.demand)):
            found[held.attempt.job] = used
    if not found:
        return ""
    job = min(found)
    others = f" and {len(found) - 1} more jobs run" if len(found) > 1 else " runs"
    nodes = ", ".join(sorted(set().union(*found.values())))
    return f"{job}{others} on excluded nodes ({nodes}): the others are too few for it"


def _starting(indexes: Sequence[SweepIndex], commands: Sequence[Command]) -> list[SweepIndex]:
    """Those that may start jobs: they run, and no command ends them."""
    over = {command.sweep for command in commands if isinstance(command, TripSweep | FinishSweep)}
    return [one for one in indexes if one.snapshot.state is SweepState.RUNNING and one.plan.sweep not in over]


def _left_to_launch(max_live_attempts: int | None, indexes: Sequence[SweepIndex]) -> int | None:
    num_live = sum(len(index.holdings.live) for index in indexes)
    return None if max_live_attempts is None else max(0, max_live_attempts - num_live)


def _in_order(commands: list[Command], indexes: Sequence[SweepIndex]) -> list[Command]:
    """Fair shares by sweep, in the given order."""
    order = {index.plan.sweep: number for number, index in enumerate(indexes)}
    return sorted(commands, key=lambda command: order[command.sweep])


def _priority(index: SweepIndex) -> int:
    own = index.snapshot.priority
    return index.plan.policy.priority if own is None else own


def _live_keys(indexes: Sequence[SweepIndex]) -> Iterator[Collection[str]]:
    return (index.holdings.keys for index in indexes)


def _queue_of(index: SweepIndex, occupancy: Occupancy, round_state: RoundState, whole: Amount) -> SweepQueue:
    fair_share = FairShare(
        weight=index.plan.policy.weight,
        live=index.holdings.total,
        past=index.holdings.history.decayed_s(round_state.now),
        whole=whole,
    )
    return SweepQueue(
        index,
        priority=_priority(index),
        fair_share=fair_share,
        budget=occupancy.budget(index),
        round_state=round_state,
    )


def _ranked(queues: Sequence[SweepQueue], now: float, made_room: Callable[[], int | None]) -> list[SweepQueue]:
    """Queues of sweeps with ready jobs, with aged priorities and fair shares.

    ``made_room``: the lowest priority of attempts that make room now. Their room is for who may preempt, not for what
    comes first by its waiting.
    """
    wanting = [queue for queue in queues if queue.rank() is not None]
    for queue in wanting:
        if queue.best is not None:
            queue.priority = queue.base_priority + aging(queue, now)
            queue.aging = queue.priority - queue.base_priority
    bases = {queue.base_priority for queue in wanting}
    passing = [one for one in wanting if any(one.base_priority < base <= one.priority for base in bases)]
    if passing and (lowest := made_room()) is not None:
        for aged in passing:
            above = (base for base in bases if max(aged.base_priority, lowest) < base <= aged.priority)
            aged.priority = min([aged.priority, *(base - 1 for base in above)])
    for priority in {queue.priority for queue in wanting}:
        entitle([queue.fair_share for queue in wanting if queue.priority == priority])
    return wanting


def _users(indexes: Sequence[SweepIndex], caps: Mapping[str, Cap]) -> dict[str, UserCount]:
    users: dict[str, UserCount] = {}
    for index in indexes:
        owner = index.plan.owner
        cap = caps.get(owner, caps.get(ANYBODY)) if owner else None
        if cap is not None:
            count = users.setdefault(owner, UserCount(cap=cap))
            count.gpus += index.holdings.num_gpus
            count.num_live += len(index.holdings.live)
    return users
