"""When a plan ends: on an empty cluster, and for a running sweep, corrected by the durations of its own jobs. Pure.

The schedule is list scheduling by the longest path to the end: when resources become free, the ready jobs with the
longest chain of dependent jobs start first, and shorter ones use the rest. Graham's bound holds: never more than twice
the best schedule for one-GPU jobs (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
1969). Failures, other sweeps and waiting for nodes are not included; ``orchestrator forecast`` has them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orchestrator.core.contract import Resources
from orchestrator.planning.estimate.duration_ratios import DurationRatios
from orchestrator.planning.graph.plan import Job, Plan

_TOLERANCE = 1e-6
Duration = TypeVar("Duration", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Jobs in the order in which they run, and their seconds together."""

    jobs: tuple[str, ...]
    seconds: float


def longest_paths(durations: Sequence[Duration], children: Sequence[Sequence[int]]) -> list[Duration]:
    """From the start of each job to the end of all that depends on it, with unlimited resources.

    Jobs stand after those they need; ``children`` are the places of those that need a job.
    """
    paths = list(durations)
    for place in range(len(paths) - 1, -1, -1):
        paths[place] += max((paths[child] for child in children[place]), default=0)
    return paths


def seconds_to_end(plan: Plan, durations_s: Mapping[str, float]) -> dict[str, float]:
    """For each job the seconds of the longest chain from its start to the end of the plan.

    Jobs that ``durations_s`` does not name take no time.
    """
    places = {job.name: place for place, job in enumerate(plan.jobs)}
    children: list[list[int]] = [[] for _ in plan.jobs]
    for place, job in enumerate(plan.jobs):
        for need in job.needs:
            children[places[need]].append(place)
    paths = longest_paths([durations_s.get(name, 0.0) for name in places], children)
    return dict(zip(places, paths, strict=True))


def critical_path(plan: Plan, durations_s: Mapping[str, float]) -> CriticalPath:
    """The longest chain; of equal ones the one that the plan names first. Empty if nothing has to run."""
    to_end = seconds_to_end(plan, durations_s)
    waiting: dict[str, list[str]] = {}
    for job in plan.jobs:
        for need in job.needs:
            waiting.setdefault(need, []).append(job.name)
    chain: list[str] = []
    heads = [job.name for job in plan.jobs if not job.needs]
    while heads:
        name = max(heads, key=to_end.__getitem__)
        chain.append(name)
        heads = waiting.get(name, [])
    jobs = tuple(name for name in chain if durations_s.get(name, 0.0) > 0)
    return CriticalPath(jobs=jobs, seconds=to_end[chain[0]] if chain else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The nodes of a cluster; ``name`` is for people."""

    nodes: tuple[Resources, ...]
    name: str = ""
    is_fixed: bool = False
    """Whether it is known that no node is ever added."""

    @property
    def gpus(self) -> float:
        """Of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def cpus(self) -> float:
        """Of all nodes."""
        return sum(node.cpus for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Makespan:
    """From the first launch to the last commit."""

    seconds: float
    critical_s: float
    """The longest chain: more GPUs do not help below it."""
    busy_s: float
    """All work spread evenly over the cluster."""
    starts_s: Mapping[str, float] = field(default_factory=dict)
    """By job, of those that run."""
    never: tuple[str, ...] = ()
    """Jobs that need more than the cluster has, and the jobs that depend on them."""

    @property
    def bound_s(self) -> float:
        """No schedule is shorter."""
        return max(self.critical_s, self.busy_s)


def shortages(plan: Plan, never: Collection[str], fleet: Fleet) -> dict[str, tuple[str, ...]]:
    """Jobs that ask for more than a cluster has, by what is short: ``gpus``, ``cpus``, else ``room`` for all workers.

    Jobs that only need such jobs are left out.
    """
    found: dict[str, list[str]] = {}
    empty = _Room(fleet)
    for job in plan.jobs:
        if job.name not in never:
            continue
        taken = empty.take(job)
        if taken is not None:
            empty.give(taken)
            continue
        workers = job.execution.num_workers
        lacks = [
            resource
            for resource in ("gpus", "cpus")
            if getattr(job.resources, resource) / workers
            > max(getattr(node, resource) for node in fleet.nodes) + _TOLERANCE
        ]
        found.setdefault(lacks[0] if lacks else "room", []).append(job.name)
    return {resource: tuple(names) for resource, names in found.items()}


def list_schedule(
    plan: Plan,
    durations_s: Mapping[str, float],
    fleet: Fleet,
    *,
    running: Collection[str] = (),
    barred: Collection[str] = (),
) -> Makespan:
    """Schedule the jobs that ``durations_s`` names; others have their result already.

    Jobs of ``running`` have their resources from the start. Those of ``barred`` never start, for reasons other than
    GPUs and CPUs, which are all that the schedule counts.
    """
    schedule = _Schedule(plan, durations_s, fleet, running, barred)
    schedule.run()
    started = [job for job in plan.jobs if job.name in schedule.starts_s]
    gpu_s = sum(job.resources.gpus * durations_s[job.name] for job in started)
    cpu_s = sum(job.resources.cpus * durations_s[job.name] for job in started)
    busy_s = max(gpu_s / fleet.gpus if fleet.gpus else 0.0, cpu_s / fleet.cpus if fleet.cpus else 0.0)
    ran = {job.name: durations_s[job.name] for job in started}
    return Makespan(
        seconds=schedule.now_s,
        critical_s=critical_path(plan, ran).seconds,
        busy_s=busy_s,
        starts_s=schedule.starts_s,
        never=tuple(job.name for job in plan.jobs if job.name in durations_s and job.name not in ran),
    )


class _Room:
    """Free resources of each node; a gang may be on several nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self._free = [[node.gpus, node.cpus] for node in fleet.nodes]

    def take(self, job: Job) -> list[tuple[int, float, float]] | None:
        """Where each worker of a job gets its share: fullest nodes first. None, and nothing taken, if it does not fit.

        Memory is left out: what a node's jobs reserve of it is rarely what holds others up.
        """
        workers = job.execution.num_workers
        gpus, cpus = job.resources.gpus / workers, job.resources.cpus / workers
        taken: list[tuple[int, float, float]] = []
        left = workers
        for node, free in enumerate(self._free):
            while left and free[0] >= gpus - _TOLERANCE and free[1] >= cpus - _TOLERANCE:
                free[0], free[1], left = free[0] - gpus, free[1] - cpus, left - 1
                taken.append((node, gpus, cpus))
        if left:
            self.give(taken)
            return None
        return taken

    def give(self, taken: list[tuple[int, float, float]]) -> None:
        """Free the resources of a job."""
        for node, gpus, cpus in taken:
            self._free[node][0] += gpus
            self._free[node][1] += cpus


class _Schedule:
    def __init__(
        self,
        plan: Plan,
        durations_s: Mapping[str, float],
        fleet: Fleet,
        running: Collection[str],
        barred: Collection[str],
    ) -> None:
        self._durations_s, self._room, self._barred = durations_s, _Room(fleet), frozenset(barred)
        self._rank = seconds_to_end(plan, durations_s) | dict.fromkeys(running, math.inf)
        self._order = {job.name: number for number, job in enumerate(plan.jobs)}
        # Jobs that have their result take neither time nor room, but the controller, too, waits for what they need.
        self._jobs = plan.by_name()
        self._missing = {name: len(set(job.needs)) for name, job in self._jobs.items()}
        self._waiting: dict[str, list[str]] = {}
        for name, job in self._jobs.items():
            for need in set(job.needs):
                self._waiting.setdefault(need, []).append(name)
        # One heap per shape: once a job does not fit, no other of its shape does.
        self._ready: dict[tuple[Resources, int], list[tuple[float, int, str]]] = {}
        self._running: list[tuple[float, int, str, list[tuple[int, float, float]]]] = []
        self.now_s = 0.0
        self.starts_s: dict[str, float] = {}

    def run(self) -> None:
        for name, count in self._missing.items():
            if not count:
                self._queue(name)
        self._launch()
        while self._running:
            self.now_s = self._running[0][0]
            while self._running and self._running[0][0] <= self.now_s:
                _, _, name, taken = heapq.heappop(self._running)
                self._room.give(taken)
                for follower in self._waiting.get(name, ()):
                    self._missing[follower] -= 1
                    if not self._missing[follower]:
                        self._queue(follower)
            self._launch()

    def _queue(self, name: str) -> None:
        job = self._jobs[name]
        if name not in self._durations_s:
            heapq.heappush(self._running, (self.now_s, self._order[name], name, []))
            return
        if name in self._barred:
            return
        shape = (replace(job.resources, memory_gib=0.0), job.execution.num_workers)
        heapq.heappush(self._ready.setdefault(shape, []), (-self._rank[name], self._order[name], name))

    def _launch(self) -> None:
        """Start what fits, longest chains first over all shapes."""
        full: set[tuple[Resources, int]] = set()
        while True:
            heads = [(heap[0], shape) for shape, heap in self._ready.items() if heap and shape not in full]
            if not heads:
                return
            (_, order, name), shape = min(heads, key=lambda head: head[0])
            taken = self._room.take(self._jobs[name])
            if taken is None:
                full.add(shape)
                continue
            heapq.heappop(self._ready[shape])
            self.starts_s[name] = self.now_s
            heapq.heappush(self._running, (self.now_s + self._durations_s[name], order, name, taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Seconds until the last job commits, if nothing fails."""

    seconds: float
    left_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each job that has not ended still takes, a running one with the resources that it holds."""
    never: tuple[str, ...] = ()
    """Jobs that the cluster cannot run."""


def without_twins(plan: Plan, twins: Mapping[str, str]) -> Plan:
    """The plan in which other jobs need the one that makes a result in place of its twins, by name.

    A twin takes no time of its own: whoever needs it would seem to start at once.
    """
    if not twins:
        return plan
    needs = {job.name: tuple(dict.fromkeys(twins.get(need, need) for need in job.needs)) for job in plan.jobs}
    jobs = (job if needs[job.name] == job.needs else replace(job, needs=needs[job.name]) for job in plan.jobs)
    return replace(plan, jobs=tuple(jobs))


def time_left(
    plan: Plan,
    durations_s: Mapping[str, float],
    fleet: Fleet,
    *,
    done: Collection[str],
    running_left_s: Mapping[str, float],
    measured_s: Mapping[str, float],
    elapsed_s: Mapping[str, float] | None = None,
) -> TimeLeft:
    """Schedule the remaining jobs of a sweep from now on.

    Args:
        plan: the sweep's; running jobs with the resources that they hold.
        durations_s: estimates by job for these resources, those of ended jobs included.
        fleet: the nodes of the cluster.
        done: jobs that need not run (any more), also because they failed.
        running_left_s: seconds left of running jobs, as they report them.
        measured_s: seconds that ended jobs took at full size, from launch to end.
        elapsed_s: seconds since the launch of running jobs that do not report the time left.
    """
    elapsed = elapsed_s or {}
    ratios = DurationRatios()
    for job in plan.jobs:
        took_s, expected_s = measured_s.get(job.name, 0.0), durations_s.get(job.name, 0.0)
        if took_s > 0 and expected_s > 0:
            ratios.add(job.duration_class, took_s, expected_s)
    left, running = {}, {*running_left_s, *elapsed}
    waiting = [job for job in plan.jobs if job.name not in done]
    makes: dict[str, str] = {}  # of several jobs for one result, one runs
    for job in sorted(waiting, key=lambda job: job.name not in running):
        makes.setdefault(job.key, job.name)
    twins = {job.name: makes[job.key] for job in waiting if makes[job.key] != job.name}
    for job in waiting:
        if job.name in twins:
            continue
        expected_s = durations_s.get(job.name, 0.0) * ratios.ratio(job.duration_class)
        left[job.name] = max(0.0, running_left_s.get(job.name, expected_s - elapsed.get(job.name, 0.0)))
    makespan = list_schedule(without_twins(plan, twins), left, fleet, running=running)
    return TimeLeft(seconds=makespan.seconds, left_s=left, never=makespan.never)
