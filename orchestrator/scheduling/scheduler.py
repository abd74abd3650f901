"""From snapshots to commands. Pure: the controller carries the commands out and journals what happened.

Sweeps of higher priority go first; those of one priority share the cluster by weight; within a sweep the job with the
longest way to the sweep's end goes first. What does not fit is waited for with reserved room, and smaller jobs go ahead
as long as they delay nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.breaker import excluded_nodes, exclusions
from orchestrator.scheduling.fairness import Standing, aging, entitle
from orchestrator.scheduling.growth import growths
from orchestrator.scheduling.launching import Launching, UserCount
from orchestrator.scheduling.lifecycle import departures, follow_up
from orchestrator.scheduling.occupancy import Occupancy
from orchestrator.scheduling.site import Site
from orchestrator.scheduling.turns import Turn, World
from orchestrator.scheduling.withdrawal import withdrawals
from orchestrator.state.amounts import Amount
from orchestrator.state.budgets import Budget, Cap, time_left_s
from orchestrator.state.commands import (
    CancelJob,
    Command,
    ExcludeNode,
    FailJob,
    FinishSweep,
    LaunchJob,
    MarkReused,
    PreemptAttempt,
    SkipJob,
    StopAttempt,
    TripSweep,
)
from orchestrator.state.demand import Demands
from orchestrator.state.machines import Machines
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.sweep_index import SweepIndex
from orchestrator.state.transitions import JobState, SweepState

__all__ = [
    "CancelJob",
    "Cap",
    "Command",
    "ExcludeNode",
    "FailJob",
    "FinishSweep",
    "LaunchJob",
    "MarkReused",
    "Node",
    "PreemptAttempt",
    "Scheduler",
    "SkipJob",
    "StopAttempt",
    "TripSweep",
    "decide",
    "unlaunched",
]

ANYBODY = "*"
"""In ``user_caps``: the bounds of users who have none of their own."""


def decide(  # noqa: PLR0913 - the world, by name
    snapshots: Sequence[Snapshot],
    *,
    total: Resources,
    nodes: Sequence[Node | Resources],
    now: float,
    maximum: Sequence[Node] | None = None,
    committed: Collection[str] = (),
    claimed: Collection[str] = (),
    max_live_attempts: int | None = None,
    durations: Mapping[str, Mapping[str, float]] | None = None,
    remaining_s: Mapping[str, float] | None = None,
    whereabouts: Mapping[str, str] | None = None,
    user_caps: Mapping[str, Cap] | None = None,
    stepping: Collection[str] | None = None,
    former: Sequence[Snapshot] = (),
) -> list[Command]:
    """What a new `Scheduler` decides; see there."""
    return Scheduler().decide(
        snapshots,
        total=total,
        nodes=nodes,
        now=now,
        maximum=maximum,
        committed=committed,
        claimed=claimed,
        max_live_attempts=max_live_attempts,
        durations=durations,
        remaining_s=remaining_s,
        whereabouts=whereabouts,
        user_caps=user_caps,
        stepping=stepping,
        former=former,
    )


def unlaunched(snapshot: Snapshot) -> Iterator[Job]:
    """Jobs of a running sweep that wait for nothing but room, time or a look into the store."""
    if snapshot.plan is None or snapshot.state is not SweepState.RUNNING:
        return
    for job in snapshot.plan.jobs:
        if snapshot.jobs[job.name].state is JobState.PENDING and snapshot.needs_are_done(job):
            yield job


class Scheduler:
    """Decides again and again, and remembers only what it would find out anew: a new one decides the same."""

    def __init__(self) -> None:
        self._demands = Demands()
        self._indexes: dict[str, SweepIndex] = {}
        self._machines: tuple[tuple[Node | Resources, ...], Resources, Machines] | None = None
        self._site: tuple[Collection[str], Sequence[Node] | None, Site] | None = None
        """Of these machines: which of them suit whom changes only with what is excluded."""
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

    def unlaunched(self, snapshot: Snapshot) -> Iterator[Job]:
        """Jobs of a running sweep that wait for nothing but room, time or a look into the store, in plan order."""
        if snapshot.state is SweepState.RUNNING:
            index = self._follow(snapshot, None)
            yield from () if index is None else index.unlaunched()

    def decide(  # noqa: PLR0913 - the world, by name
        self,
        snapshots: Sequence[Snapshot],
        *,
        total: Resources,
        nodes: Sequence[Node | Resources],
        now: float,
        maximum: Sequence[Node] | None = None,
        committed: Collection[str] = (),
        claimed: Collection[str] = (),
        max_live_attempts: int | None = None,
        durations: Mapping[str, Mapping[str, float]] | None = None,
        remaining_s: Mapping[str, float] | None = None,
        whereabouts: Mapping[str, str] | None = None,
        user_caps: Mapping[str, Cap] | None = None,
        stepping: Collection[str] | None = None,
        former: Sequence[Snapshot] = (),
        steps: Mapping[str, int] | None = None,
    ) -> list[Command]:
        """Commands that follow from where the sweeps stand.

        Args:
            snapshots: all sweeps that have not ended, and those with live attempts.
            total: what the cluster has, used or not.
            nodes: its nodes; where they have no names, their different shapes, and room is counted over ``total``.
            now: unix seconds.
            maximum: kinds of nodes that an autoscaler would add; ``None`` = the cluster does not grow.
            committed: keys known to have a record in the store.
            claimed: keys that other clusters work on.
            max_live_attempts: how many attempts run at once, whatever fits.
            durations: by sweep and job, the seconds that a job was estimated to take at full size.
            remaining_s: by attempt, the seconds that it says it will still take.
            whereabouts: by attempt, the node that it is on.
            user_caps: bounds by owner, ``*`` for those without their own.
            stepping: attempts that have trained a few steps; ``None`` = nobody tells, and there is no preflight.
            former: sweeps that have ended; what they found out about nodes still holds.
            steps: by attempt, the training step that it has reached.
        """
        self.waits, self.behind, self.warnings = {}, {}, {}
        indexes = self._follow_all(snapshots, durations or {})
        machines, excluded = self._laid_out(tuple(nodes), total), excluded_nodes([*snapshots, *former], now).keys()
        commands: list[Command] = [*departures(snapshots), *exclusions(indexes, machines, excluded, now, steps)]
        commands += withdrawals(snapshots, nodes, remaining_s=remaining_s or {}, whereabouts=whereabouts or {}, now=now)
        site = self._suited(machines, total, maximum, excluded)
        commands += [*_readmissions(indexes, site), *_follow_ups(indexes, committed, now)]
        occupancy = Occupancy(site, indexes, remaining_s=remaining_s or {}, now=now)
        keys = set(claimed).union(*_live_keys(indexes))
        world = World(now=now, live_keys=keys, committed=committed, stepping=stepping)
        turns = [_turn(index, occupancy, world, machines.whole) for index in _starting(indexes, commands)]
        launching = Launching(
            site=site,
            occupancy=occupancy,
            turns=_ranked(turns, now),
            world=world,
            users=_users(indexes, user_caps or {}),
            priorities={index.plan.sweep: _priority(index) for index in indexes},
            num_launches=_left_to_launch(max_live_attempts, indexes),
        )
        commands += _in_order(launching.run() or _growths(launching, turns, occupancy, site, now), indexes)
        return [*commands, *filter(None, (self._tell(turn, site, now) for turn in turns))]

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
            self._indexes[snapshot.sweep] = index
        index.update(snapshot)
        return index

    def _laid_out(self, nodes: tuple[Node | Resources, ...], total: Resources) -> Machines:
        if self._machines is None or self._machines[:2] != (nodes, total):
            self._machines, self._site = (nodes, total, Machines(nodes, total)), None
        return self._machines[2]

    def _suited(
        self, machines: Machines, total: Resources, maximum: Sequence[Node] | None, excluded: Collection[str]
    ) -> Site:
        if self._site is None or self._site[:2] != (excluded, maximum):
            self._site = excluded, maximum, Site(machines, total, maximum=maximum, excluded=excluded)
        return self._site[2]

    def _tell(self, turn: Turn, site: Site, now: float) -> TripSweep | None:
        """Publish why jobs wait, and end a sweep whose budget keeps all that is left of it from starting."""
        index = turn.index
        self.waits[turn.sweep], self.behind[turn.sweep] = turn.waits, turn.behind
        left_s = time_left_s(index.plan.policy, index.snapshot.accepted_at_s, now)
        longest_s = max((-queue[0][0] / 1000.0 for queue in index.queues.values()), default=0.0)
        warning = turn.budget.warning()
        if left_s is not None and longest_s > left_s:
            warning += "; " if warning else ""
            warning += f"nothing starts after {left_s:.0f} s more (policy.deadline), the rest needs {longest_s:.0f} s"
        if on_excluded := _on_excluded(index, site):
            warning += f"; {on_excluded}" if warning else on_excluded
        if warning:
            self.warnings[turn.sweep] = warning
        if turn.spent and not turn.num_live:
            reason = f"{turn.spent}; nothing runs any more. Raise the budget and resubmit the sweep to go on"
            return TripSweep(sweep=turn.sweep, reason=reason)
        return None


def _follow_ups(indexes: Sequence[SweepIndex], committed: Collection[str], now: float) -> Iterator[Command]:
    return (command for index in indexes for command in follow_up(index, committed, now))


def _readmissions(indexes: Sequence[SweepIndex], site: Site) -> Iterator[PreemptAttempt]:
    """Ends of waits for room that keep away from nodes which may be used by now: Ray cannot change a reservation."""
    for index in indexes:
        for held in index.holdings.live.values():
            attempt = held.attempt
            usable = set(attempt.exclude).intersection(site.machines.places).difference(site.avoided(held.demand))
            if attempt.awaits_room and usable and attempt.preempting_at_s is None:
                reason = f"waits for room again, on {min(usable)} too: the node is not left out any more"
                yield PreemptAttempt(sweep=index.plan.sweep, attempt_id=attempt.attempt_id, reason=reason)


def _on_excluded(index: SweepIndex, site: Site) -> str:
    """Which attempts use nodes that are left out, because the others are too few for them; empty if none does."""
    found: dict[str, set[str]] = {}
    for held in index.holdings.live.values():
        if used := {name for name, _ in held.nodes}.intersection(site.needed(held.demand)):
            found[held.attempt.job] = used
    if not found:
        return ""
    job = min(found)
    others = f" and {len(found) - 1} more jobs run" if len(found) > 1 else " runs"
    nodes = ", ".join(sorted(set().union(*found.values())))
    return f"{job}{others} on nodes that are left out ({nodes}): the others are too few for it"


def _growths(
    launching: Launching, turns: Sequence[Turn], occupancy: Occupancy, site: Site, now: float
) -> list[Command]:
    """Elastic jobs take what nothing else wants."""
    return [] if launching.is_blocked else [*growths(turns, occupancy, site, now)]


def _starting(indexes: Sequence[SweepIndex], commands: Sequence[Command]) -> list[SweepIndex]:
    """Those that may start jobs: they run, and no command ends them."""
    over = {command.sweep for command in commands if isinstance(command, TripSweep | FinishSweep)}
    return [one for one in indexes if one.snapshot.state is SweepState.RUNNING and one.plan.sweep not in over]


def _left_to_launch(max_live_attempts: int | None, indexes: Sequence[SweepIndex]) -> int | None:
    num_live = sum(len(index.holdings.live) for index in indexes)
    return None if max_live_attempts is None else max(0, max_live_attempts - num_live)


def _in_order(commands: list[Command], indexes: Sequence[SweepIndex]) -> list[Command]:
    """By sweep, in the order in which these are given."""
    order = {index.plan.sweep: number for number, index in enumerate(indexes)}
    return sorted(commands, key=lambda command: order[command.sweep])


def _priority(index: SweepIndex) -> int:
    own = index.snapshot.priority
    return index.plan.policy.priority if own is None else own


def _live_keys(indexes: Sequence[SweepIndex]) -> Iterator[Collection[str]]:
    return (index.holdings.keys for index in indexes)


def _turn(index: SweepIndex, occupancy: Occupancy, world: World, whole: Amount) -> Turn:
    policy = index.plan.policy
    is_bounded = policy.gpu_hour_budget is not None
    budget = Budget(
        policy=policy,
        used=occupancy.used_gpu_hours(index) if is_bounded else 0.0,
        promised=occupancy.promised_gpu_hours(index) if is_bounded else 0.0,
    )
    standing = Standing(
        weight=policy.weight,
        live=index.holdings.total,
        past=index.holdings.history.decayed_s(world.now),
        whole=whole,
    )
    return Turn(index, priority=_priority(index), standing=standing, budget=budget, world=world)


def _ranked(turns: Sequence[Turn], now: float) -> list[Turn]:
    """Those with something to start, aged, and entitled to their part of the cluster among their equals."""
    wanting = [turn for turn in turns if turn.rank() is not None]
    for turn in wanting:
        if turn.best is not None:
            turn.priority = turn.base_priority + aging(turn.index, turn.best[0][1], now)
    for priority in {turn.priority for turn in wanting}:
        entitle([turn.standing for turn in wanting if turn.priority == priority])
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
