"""Runs a scheduler on a virtual clock: attempts end when they should, and nothing ever fails."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.core.contract import Outcome, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.commands import Command, FinishSweep, LaunchJob, PreemptAttempt
from orchestrator.scheduling.demand import NOTHING, Amount, DemandTable
from orchestrator.scheduling.placement import FreeCapacity, Machines
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import apply
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot

SAVING_S = 10.0
"""What an attempt that is asked to stop takes for its checkpoint; it loses nothing."""


class Decides(Protocol):
    """``Scheduler.decide``, as far as a makespan needs it."""

    def __call__(
        self, snapshots: Sequence[Snapshot], *, total: Resources, nodes: Sequence[Node], now: float
    ) -> list[Command]: ...


def decides(scheduler: Scheduler, **options: Any) -> Decides:
    """A scheduler's decisions, with more of the view than a makespan needs."""

    def decide(snapshots: Sequence[Snapshot], **view: Any) -> list[Command]:
        return scheduler.decide(ClusterView(snapshots=snapshots, **options, **view))

    return decide


@dataclass(frozen=True, kw_only=True)
class Alive:
    """A live attempt: its job would take ``whole_s`` at its size from beginning to end."""

    job: str
    started_s: float
    whole_s: float
    gpus: float


@dataclass
class World:
    """Sweeps, a cluster, a clock, and how long each job takes on all of its GPUs."""

    plans: Mapping[str, Plan]
    nodes: tuple[Node, ...]
    durations: Mapping[str, Mapping[str, float]]
    decide: Decides
    on_decided: Callable[[World, list[Command]], None] = lambda _world, _commands: None
    now_s: float = 0.0
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    tick_s: list[float] = field(default_factory=list)
    tick_cpu_s: list[float] = field(default_factory=list)
    num_launches: int = 0
    num_preemptions: int = 0
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    _ends: list[tuple[float, int, str, str]] = field(default_factory=list)
    _done: dict[tuple[str, str], float] = field(default_factory=dict)
    """Part of each job that is done."""
    _alive: dict[str, Alive] = field(default_factory=dict)

    @property
    def total(self) -> Resources:
        return Resources(
            cpus=sum(node.resources.cpus for node in self.nodes),
            gpus=sum(node.resources.gpus for node in self.nodes),
            memory_gib=sum(node.resources.memory_gib for node in self.nodes),
        )

    def submit(self, sweep: str) -> None:
        self.append(sweep, events.PlanAccepted(at_s=self.now_s, message_id=f"m-{sweep}", revision=1))

    def append(self, sweep: str, *more: Event) -> None:
        before = self.snapshots.get(sweep) or Snapshot(sweep=sweep)
        self.snapshots[sweep] = apply(before, more, lambda _: self.plans[sweep])

    def run(self, until_s: float = float("inf")) -> float:
        """Until all sweeps have ended, or for so long; the time then."""
        while self.round() and self.now_s < until_s:
            self._advance()
        return self.now_s

    def round(self) -> bool:
        """Decide until nothing follows; whether anything still runs or will."""
        while True:
            active = [snapshot for snapshot in self.snapshots.values() if not snapshot.state.is_final]
            if not active:
                return False
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            commands = self.decide(active, total=self.total, nodes=self.nodes, now=self.now_s)
            self.tick_s.append(time.perf_counter() - started_s)
            self.tick_cpu_s.append(time.thread_time() - started_cpu_s)
            self._carry_out(commands)
            self.on_decided(self, commands)
            if not commands:
                return True

    def _carry_out(self, commands: list[Command]) -> None:
        more: dict[str, list[Event]] = {}
        for command in commands:
            event = self._event(command)
            more.setdefault(command.sweep, []).append(event)
        for sweep, some in more.items():
            self.append(sweep, *some)

    def _event(self, command: Command) -> Event:
        match command:
            case LaunchJob():
                return self._launch(command)
            case PreemptAttempt(sweep=sweep, attempt_id=attempt_id, reason=reason):
                self.num_preemptions += 1
                heapq.heappush(self._ends, (self.now_s + SAVING_S, -self.num_preemptions, sweep, attempt_id))
                return events.AttemptPreempting(
                    at_s=self.now_s,
                    job=self._alive[attempt_id].job,
                    attempt_id=attempt_id,
                    reason=reason,
                    grace_s=120.0,
                )
            case FinishSweep(status=status):
                return events.SweepFinished(at_s=self.now_s, status=status)
            case _:
                message = f"{command} at {self.now_s:.0f} s"
                raise AssertionError(message)

    def _launch(self, command: LaunchJob) -> Event:
        job = self.plans[command.sweep].by_name()[command.job]
        self.num_launches += 1
        attempt_id = f"{job.key}.{self.num_launches}"
        slowdown = job.execution.num_workers / (command.num_workers or job.execution.num_workers)
        whole_s = self.durations[command.sweep][job.name] * slowdown
        left_s = whole_s * (1.0 - self._done.get((command.sweep, job.name), 0.0))
        heapq.heappush(self._ends, (self.now_s + left_s, self.num_launches, command.sweep, attempt_id))
        gpus = (command.resources or job.resources).gpus
        self._alive[attempt_id] = Alive(job=job.name, started_s=self.now_s, whole_s=whole_s, gpus=gpus)
        return events.AttemptLaunched(
            at_s=self.now_s,
            job=job.name,
            key=job.key,
            attempt_id=attempt_id,
            number=self.num_launches,
            epoch=1,
            nodes=command.nodes,
            resources=command.resources,
            num_workers=command.num_workers,
            reason=command.reason,
        )

    def _advance(self) -> None:
        self.now_s = self._ends[0][0]
        more: dict[str, list[Event]] = {}
        while self._ends and self._ends[0][0] <= self.now_s:
            _, number, sweep, attempt_id = heapq.heappop(self._ends)
            if attempt_id in self._alive:
                more.setdefault(sweep, []).append(self._end(sweep, attempt_id, is_preempted=number < 0))
        for sweep, some in more.items():
            self.append(sweep, *some)

    def _end(self, sweep: str, attempt_id: str, *, is_preempted: bool) -> Event:
        alive = self._alive.pop(attempt_id)
        job, ran_s = alive.job, self.now_s - alive.started_s
        self.gpu_seconds[sweep] = self.gpu_seconds.get(sweep, 0.0) + alive.gpus * ran_s
        self._done[sweep, job] = self._done.get((sweep, job), 0.0) + ran_s / alive.whole_s
        if is_preempted:
            return events.AttemptFailed(
                at_s=self.now_s, job=job, attempt_id=attempt_id, kind=FailureKind.PREEMPTED, message="asked to"
            )
        return events.AttemptSucceeded(at_s=self.now_s, job=job, attempt_id=attempt_id, outcome=Outcome.COMMITTED)


class Fifo:
    """In the order in which jobs became ready; who does not fit holds up all behind it."""

    def __init__(self) -> None:
        self._line: dict[tuple[str, str], None] = {}
        self._seen: dict[str, set[str]] = {}
        self._demands = DemandTable()
        self._indexes: dict[str, SweepIndex] = {}

    def decide(
        self, snapshots: Sequence[Snapshot], *, total: Resources, nodes: Sequence[Node], now: float
    ) -> list[Command]:
        commands: list[Command] = []
        machines = Machines(tuple(nodes), total)
        used: list[tuple[int, Amount]] = []
        for snapshot in snapshots:
            index = self._follow(snapshot)
            used += [(machines.places[name], amount) for name, amount in index.holdings.by_node.items()]
            if all(state.is_final for state in snapshot.counts):
                commands.append(FinishSweep(sweep=snapshot.sweep, status=events.SweepEnding.SUCCEEDED))
        room, everywhere = FreeCapacity(machines, used, NOTHING), frozenset(range(len(machines.names)))
        for sweep, name in self._in_line():
            index = self._indexes[sweep]
            demand = index.demands[index.places[name]]
            spread = room.place(demand, everywhere, end_s=now)
            if spread is None:
                break
            del self._line[sweep, name]
            room.take(demand, spread)
            placed = tuple(machines.names[place] for place, count in spread for _ in range(count))
            commands.append(LaunchJob(sweep=sweep, job=name, nodes=placed))
        return commands

    def _in_line(self) -> list[tuple[str, str]]:
        return list(self._line)

    def _follow(self, snapshot: Snapshot) -> SweepIndex:
        assert snapshot.plan is not None
        if snapshot.sweep not in self._indexes:
            self._indexes[snapshot.sweep] = SweepIndex(snapshot.plan, self._demands, {})
        index = self._indexes[snapshot.sweep]
        index.update(snapshot)
        seen = self._seen.setdefault(snapshot.sweep, set())
        ready = [place for key in index.ready_keys.keys() - seen for place in index.ready_keys[key]]
        for place in sorted(ready):
            self._line[snapshot.sweep, index.jobs[place].name] = None
            seen.add(index.jobs[place].key)
        return index


class SubmissionFifo(Fifo):
    """As queues of clusters do it: in the order in which jobs were submitted, which is that of their plan.

    A job is held until what it needs is done, and then stands where it was submitted; the first that is not held and
    does not fit holds up all behind it.
    """

    def _in_line(self) -> list[tuple[str, str]]:
        return sorted(self._line, key=lambda one: (one[0], self._indexes[one[0]].places[one[1]]))
