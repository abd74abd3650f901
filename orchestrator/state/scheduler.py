"""From snapshots to commands. Pure: the controller carries the commands out and journals what happened.

Sweeps are served in the order given and jobs in plan order; every ready job that fits into what is left is launched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.contract import Resources
from orchestrator.plan.graph import Job
from orchestrator.state.events import SweepStatus
from orchestrator.state.policy import GiveUp, judge
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState

_TOLERANCE = 1e-6  # sums of fractional CPUs
_NOTHING = Resources(cpus=0.0)
_MAX_SHAPES_TOLD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """Start an attempt."""

    sweep: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReused:
    """The key of a ready job is committed already."""

    sweep: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailJob:
    """Give a job up."""

    sweep: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipJob:
    """A job that this one needs will never have an artifact."""

    sweep: str
    job: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob:
    """The sweep is being cancelled and the job has not started."""

    sweep: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt:
    """Nobody wants the attempt's outcome any more: let it write a checkpoint and end."""

    sweep: str
    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSweep:
    """Every job has ended."""

    sweep: str
    status: SweepStatus


Command: TypeAlias = LaunchJob | MarkReused | FailJob | SkipJob | CancelJob | StopAttempt | FinishSweep


@dataclass(slots=True, kw_only=True)
class Room:
    """What is left of the cluster while one round of decisions is made."""

    total: Resources
    nodes: tuple[Resources, ...]
    """Shapes of the cluster's nodes."""
    max_live_attempts: int | None = None
    live_keys: set[str] = field(default_factory=set)
    proven: set[Resources] = field(default_factory=set)
    """Shapes that ran before: a lost node does not make them infeasible."""
    cpus: float = 0.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    num_live: int = 0

    def occupy(self, key: str, shape: Resources) -> None:
        """Take the room of one attempt at a key."""
        self.live_keys.add(key)
        self.num_live += 1
        self.cpus += shape.cpus
        self.gpus += shape.gpus
        self.memory_gib += shape.memory_gib

    def has(self, shape: Resources) -> bool:
        """Whether one more attempt fits."""
        if self.max_live_attempts is not None and self.num_live >= self.max_live_attempts:
            return False
        used = Resources(cpus=self.cpus, gpus=self.gpus, memory_gib=self.memory_gib)
        return _within(shape, self.total, used)

    def could_ever_hold(self, job: Job) -> bool:
        """Whether some node is large enough for each worker of a job, and the cluster for all of them.

        A cluster without nodes is one that has not told yet.
        """
        known = [node for node in self.nodes if node.cpus > 0 or node.gpus > 0]
        if not known or job.resources in self.proven:
            return True
        worker = job.resources.share(job.execution.num_workers)
        is_gang = job.execution.num_workers > 1
        return any(_within(worker, node, _NOTHING) for node in known) and (
            not is_gang or _within(job.resources, self.total, _NOTHING)
        )


def decide(
    snapshots: Sequence[Snapshot],
    *,
    total: Resources,
    nodes: Sequence[Resources],
    now: float,
    committed: Collection[str] = (),
    claimed: Collection[str] = (),
    max_live_attempts: int | None = None,
) -> list[Command]:
    """Commands that follow from where the sweeps stand.

    ``committed`` are keys known to have a record in the store, ``claimed`` those that other clusters work on; ``total``
    is what the cluster has, used or not, and ``nodes`` are the shapes of its nodes.
    """
    room = Room(total=total, nodes=tuple(nodes), max_live_attempts=max_live_attempts, live_keys=set(claimed))
    for snapshot in snapshots:
        _enter(room, snapshot)
    commands = list(_departures(snapshots))
    for snapshot in snapshots:
        if snapshot.state is SweepState.RUNNING:
            commands += _Round(snapshot, room, now, committed).commands()
        elif snapshot.state is SweepState.CANCELLING:
            commands += _cancellation(snapshot)
    return commands


def unlaunched(snapshot: Snapshot) -> Iterator[Job]:
    """Jobs of a running sweep that wait for nothing but room, time or a look into the store."""
    if snapshot.plan is None or snapshot.state is not SweepState.RUNNING:
        return
    for job in snapshot.plan.jobs:
        if snapshot.jobs[job.name].state is JobState.PENDING and snapshot.needs_are_done(job):
            yield job


class _Round:
    """Decisions for one running sweep."""

    def __init__(self, snapshot: Snapshot, room: Room, now: float, committed: Collection[str]) -> None:
        self._snapshot = snapshot
        self._room = room
        self._now = now
        self._committed = committed
        self._hopeless = {
            name for name, view in snapshot.jobs.items() if view.state.is_final and not view.state.is_done
        }

    def commands(self) -> Iterator[Command]:
        jobs = () if self._snapshot.plan is None else self._snapshot.plan.jobs
        for job in jobs:
            view = self._snapshot.jobs[job.name]
            command = self._for_pending(job, view) if view.state is JobState.PENDING else None
            if isinstance(command, FailJob | SkipJob):
                self._hopeless.add(job.name)  # so that its descendants are skipped in this very round
            if command is not None:
                yield command
        yield from _ending(self._snapshot)

    def _for_pending(self, job: Job, view: JobView) -> Command | None:
        sweep = self._snapshot.sweep
        because = next((need for need in job.needs if need in self._hopeless), None)
        if because is not None:
            return SkipJob(sweep=sweep, job=job.name, because=because)
        if not self._snapshot.needs_are_done(job):
            return None
        if job.key in self._committed:
            return MarkReused(sweep=sweep, job=job.name)
        return self._launch(job, view)

    def _launch(self, job: Job, view: JobView) -> LaunchJob | FailJob | None:
        sweep, plan = self._snapshot.sweep, self._snapshot.plan
        verdict = judge(view, max_failures=1 if plan is None else plan.max_failures)
        if isinstance(verdict, GiveUp):
            return FailJob(sweep=sweep, job=job.name, reason=verdict.reason)
        if not self._room.could_ever_hold(job):
            return FailJob(sweep=sweep, job=job.name, reason=_infeasible(job, self._room))
        # A key that is live, here or in another sweep, is not worked on twice: its record will be found.
        if self._now < verdict.at_s or job.key in self._room.live_keys or not self._room.has(job.resources):
            return None
        self._room.occupy(job.key, job.resources)
        return LaunchJob(sweep=sweep, job=job.name)


def _enter(room: Room, snapshot: Snapshot) -> None:
    for attempt in snapshot.live_attempts:
        room.occupy(attempt.key, attempt.resources)
        room.proven.add(attempt.resources)
    for job in () if snapshot.plan is None else snapshot.plan.jobs:
        if snapshot.jobs[job.name].num_attempts:
            room.proven.add(job.resources)


def _departures(snapshots: Sequence[Snapshot]) -> Iterator[Command]:
    """Stops of attempts at jobs that a new revision dropped, unless a pending job waits for the very same key."""
    running = [snapshot for snapshot in snapshots if snapshot.state is SweepState.RUNNING]
    wanted = {view.key for snapshot in running for view in snapshot.jobs.values() if view.state is JobState.PENDING}
    for snapshot in running:
        for attempt in snapshot.leaving.values():
            if attempt.key not in wanted:
                yield StopAttempt(sweep=snapshot.sweep, attempt_id=attempt.attempt_id)


def _cancellation(snapshot: Snapshot) -> Iterator[Command]:
    for view in snapshot.jobs.values():
        if view.state is JobState.PENDING:
            yield CancelJob(sweep=snapshot.sweep, job=view.name)
    for attempt in snapshot.live_attempts:
        yield StopAttempt(sweep=snapshot.sweep, attempt_id=attempt.attempt_id)
    yield from _ending(snapshot)


def _ending(snapshot: Snapshot) -> Iterator[FinishSweep]:
    states = {view.state for view in snapshot.jobs.values()}
    if snapshot.leaving or not all(state.is_final for state in states):
        return
    if snapshot.state is SweepState.CANCELLING:
        status = SweepStatus.CANCELLED
    else:
        status = SweepStatus.SUCCEEDED if all(state.is_done for state in states) else SweepStatus.FAILED
    yield FinishSweep(sweep=snapshot.sweep, status=status)


def _within(shape: Resources, total: Resources, used: Resources) -> bool:
    return (
        shape.cpus <= total.cpus - used.cpus + _TOLERANCE
        and shape.gpus <= total.gpus - used.gpus + _TOLERANCE
        and shape.memory_gib <= total.memory_gib - used.memory_gib + _TOLERANCE
    )


def _infeasible(job: Job, room: Room) -> str:
    shapes = _largest(room.nodes)
    told = f"the largest node has {shapes[0]}"
    if len(shapes) > 1:
        told = "the largest nodes have " + " or ".join(str(shape) for shape in shapes[:_MAX_SHAPES_TOLD])
    num_workers = job.execution.num_workers
    asked = f"{job.resources}"
    if num_workers > 1:
        asked += f" for {num_workers} workers ({job.resources.share(num_workers)} each)"
        told += f", the cluster {room.total}"
    return (
        f"infeasible: it asks for {asked}, but {told}; lower `resources` of {job.kind} jobs in sweep.yaml, or "
        "add a larger node and resubmit"
    )


def _largest(nodes: Sequence[Resources]) -> list[Resources]:
    """Shapes that do not fit into another one, those with most GPUs first."""
    shapes = [
        node for node in nodes if not any(other != node and _within(node, other, _NOTHING) for other in nodes)
    ] or list(nodes)
    return sorted(set(shapes), key=lambda node: (node.gpus, node.cpus, node.memory_gib), reverse=True)
