"""Carries out the scheduler's commands: each becomes an event first and an effect afterwards.

Invariants:

- Intent before effect: no attempt runs that is not in the journal.
- A launch takes the key's claim first and an attempt number then, so that a crash in between leaves nothing that
  another controller cannot take over. Launches of several jobs do so side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

from orchestrator.backends.protocol import ANYWHERE, Backend, Placement
from orchestrator.controller.attempt_requests import Claimant, allocate_attempt, make_request
from orchestrator.controller.attempt_tracker import ATTEMPT_STOP_GRACE_S, StopRequests
from orchestrator.controller.key_cache import KeyCache
from orchestrator.controller.node_pricing import NodePricing
from orchestrator.controller.owned_sweeps import OwnedSweep, OwnedSweeps
from orchestrator.core.contract import JobRequest, Progress, Resources
from orchestrator.core.errors import (
    ControllerError,
    FailureKind,
    OrchestratorError,
)
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import (
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
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.failure_policy import observed_mtbf_s
from orchestrator.state.snapshot import Attempt, JobView, Snapshot
from orchestrator.storage.claims import Claim
from orchestrator.storage.protocol import ObjectStore

MAX_BATCH = 64
"""Commands between two rounds of journal segments. Each launch asks the store three times: a thousand in one go would
be lost, all of them, with a controller that dies before they are on record.
"""
_LOG = logging.getLogger(__name__)
_Plain: TypeAlias = MarkReused | FailJob | SkipJob | CancelJob | FinishSweep | TripSweep | ExcludeNode


@dataclass(slots=True, kw_only=True)
class _Launch:
    request: JobRequest
    resources: Resources
    placement: Placement = ANYWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class _StopOrder:
    attempt_id: str
    reason: str


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What one sweep's commands come to: events for one segment, then effects."""

    owned_sweep: OwnedSweep
    events: list[Event] = field(default_factory=list)
    launches: list[_Launch] = field(default_factory=list)
    stops: list[_StopOrder] = field(default_factory=list)


class Executor:
    """Executes commands: of launches, stops and preemptions the effects, of all others the events."""

    def __init__(
        self,
        store: ObjectStore,
        backend: Backend,
        keys: KeyCache,
        stops: StopRequests,
        pricing: NodePricing,
        *,
        grace_s: float = ATTEMPT_STOP_GRACE_S,
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._on_alive = on_alive
        self._backend = backend
        self._keys = keys
        self._stops = stops
        self._pricing = pricing
        self._pool = keys.pool
        self._grace_s = grace_s

    def without_repeats(self, commands: Sequence[Command]) -> list[Command]:
        """Commands less the stops that were given before; a new controller gives them once more."""
        return [c for c in commands if not (isinstance(c, StopAttempt) and c.attempt_id in self._stops)]

    def execute(self, owned: OwnedSweeps, commands: Sequence[Command], clock: Callable[[], float]) -> None:
        """Carry out commands, those of a sweep one after the other; use outside of ``OwnedSweeps.guard``. What is left
        of a sweep that fails is dropped.
        """
        failed: set[str] = set()
        for start in range(0, len(commands), MAX_BATCH):
            some = [command for command in commands[start : start + MAX_BATCH] if command.sweep not in failed]
            now = clock()
            batches = self._prepare(owned, some, now)
            done = self._carry_out(batches, owned, now)
            failed |= {command.sweep for command in some} - done

    def _prepare(self, owned: OwnedSweeps, commands: Sequence[Command], now: float) -> list[_Batch]:
        """Batches of the sweeps that could be prepared, one each. All launches ask for their claims and numbers side by
        side.
        """
        batches: list[_Batch] = []
        # Once for each expected value in a batch: all jobs of all sweeps tell it.
        snapshots = [owned_sweep.snapshot for owned_sweep in owned.all()]
        former = owned.former_deaths()
        mtbf_s = cache(lambda prior_s: observed_mtbf_s(snapshots, prior_s=prior_s, now=now, former=former))
        with self._pool.batch(self._on_alive) as requests:
            numbers = [
                requests.start(self._claim, one.snapshot, command, now)
                if isinstance(command, LaunchJob) and (one := owned.get(command.sweep)) is not None
                else None
                for command in commands
            ]
            # One batch per sweep, wherever its commands are: two would be appended to one journal at the same time.
            asked: dict[str, list[tuple[Command, Callable[[], Claim | int] | None]]] = {}
            for command, number in zip(commands, numbers, strict=True):
                asked.setdefault(command.sweep, []).append((command, number))
            for sweep, pairs in asked.items():
                owned_sweep = owned.get(sweep)
                if owned_sweep is None:
                    continue
                with owned.guard(sweep):
                    batch = _Batch(owned_sweep=owned_sweep)
                    for command, number in pairs:
                        self._on_alive()
                        self._add(batch, mtbf_s, command, number, now)
                    batches.append(batch)
        return batches

    def _carry_out(self, batches: Sequence[_Batch], owned: OwnedSweeps, now: float) -> set[str]:
        """Sweeps whose batch is on record and had its effects."""
        # Intent before effect: an attempt that the journal does not know would run unseen after a crash here. One
        # that is in the journal and was never launched is reported as lost, and tried again.
        durable = owned.append_each([(batch.owned_sweep, batch.events) for batch in batches if batch.events])
        done: set[str] = set()
        for batch in batches:
            sweep = batch.owned_sweep.snapshot.sweep
            if batch.events and sweep not in durable:
                continue
            with owned.guard(sweep):
                for launch in batch.launches:
                    self._launch(launch)
                for stop in batch.stops:
                    self._stops.ask(stop.attempt_id, stop.reason, now, self._grace_s)
                done.add(sweep)
        return done

    def preempt(
        self, owned: OwnedSweeps, owned_sweep: OwnedSweep, reason: str, now: float, *, unplaced_only: bool = False
    ) -> None:
        """Ask all attempts of a sweep, or those that wait for their resources, for a checkpoint and their room; use
        outside of ``OwnedSweeps.guard``.
        """
        batch = _Batch(owned_sweep=owned_sweep)
        for attempt in owned_sweep.snapshot.live_attempts:
            if unplaced_only and not attempt.awaits_room:
                continue
            self._add_preemption(batch, attempt, reason, now)
        self._carry_out([batch], owned, now)

    def _launch(self, launch: _Launch) -> None:
        try:
            self._backend.launch(launch.request, launch.resources, launch.placement)
        except OrchestratorError as error:
            # The next observation finds the attempt lost, which journals it and counts it.
            _LOG.warning("attempt %s was not launched: %s", launch.request.attempt_id, error)

    def _claim(self, snapshot: Snapshot, command: LaunchJob, now: float) -> Claim | int:
        """The claim that stands in the way of a launch, or the number of its attempt. Called by several threads."""
        _, job = _planned(snapshot, command.job)
        # Before the attempt has a number: a crash in between leaves a claim of ours, which the next controller takes.
        obstacle = self._keys.claim(job.key, snapshot.sweep, now)
        if obstacle is not None:
            return obstacle
        claimant = Claimant(sweep=snapshot.sweep, cluster=snapshot.cluster, epoch=snapshot.epoch)
        has_run = snapshot.jobs[job.name].num_attempts > 0
        return allocate_attempt(self._store, job, claimant, has_run=has_run)

    def _add(
        self,
        batch: _Batch,
        mtbf_s: Callable[[float], float],
        command: Command,
        number: Callable[[], Claim | int] | None,
        now: float,
    ) -> None:
        owned_sweep = batch.owned_sweep
        if isinstance(command, LaunchJob):
            if number is not None:
                self._add_launch(batch, mtbf_s, command, number(), now)
        elif isinstance(command, StopAttempt):
            batch.stops.append(_StopOrder(attempt_id=command.attempt_id, reason="nobody wants its outcome any more"))
        elif isinstance(command, PreemptAttempt):
            for attempt in owned_sweep.snapshot.live_attempts:
                if attempt.attempt_id == command.attempt_id:
                    self._add_preemption(batch, attempt, command.reason, now)
        else:
            batch.events.append(_event_of(command, owned_sweep.snapshot, now))
            if isinstance(command, MarkReused | FailJob | SkipJob | CancelJob):
                owned_sweep.board.remove(command.job)

    def _add_preemption(self, batch: _Batch, attempt: Attempt, reason: str, now: float) -> None:
        if attempt.preempting_at_s is not None:
            return
        batch.stops.append(_StopOrder(attempt_id=attempt.attempt_id, reason=reason))
        batch.events.append(
            events.AttemptPreempting(
                at_s=now, job=attempt.job, attempt_id=attempt.attempt_id, reason=reason, grace_s=self._grace_s
            )
        )

    def _add_launch(
        self, batch: _Batch, mtbf_s: Callable[[float], float], command: LaunchJob, number: Claim | int, now: float
    ) -> None:
        owned_sweep = batch.owned_sweep
        snapshot = owned_sweep.snapshot
        plan, job = _planned(snapshot, command.job)
        if isinstance(number, Claim):
            reason = f"waits: sweep {number.sweep} works on {job.key} on cluster {number.cluster}"
            owned_sweep.board.show(job.name, "", Progress(phase=reason))
            return
        owned_sweep.board.remove(job.name)
        given = _as_given(_with_history(job, snapshot.jobs[job.name], mtbf_s), command)
        request = make_request(plan, given, number)
        placement = Placement(nodes=command.nodes, exclude=command.exclude)
        batch.launches.append(_Launch(request=request, resources=given.resources, placement=placement))
        lots = self._pricing.allocations(command.nodes, given.resources, given.execution.num_workers)
        batch.events.append(
            events.AttemptLaunched(
                at_s=now,
                job=job.name,
                key=job.key,
                attempt_id=request.attempt_id,
                number=number,
                epoch=snapshot.epoch,
                nodes=command.nodes,
                resources=command.resources,
                num_workers=command.num_workers,
                reason=command.reason,
                lots=lots,
                awaits_room=command.awaits_room,
                exclude=command.exclude,
                aging=command.aging,
            )
        )


def _as_given(job: Job, command: LaunchJob) -> Job:
    """The job as this attempt runs it, which may be smaller than it would like."""
    workers = command.num_workers or job.execution.num_workers
    return replace(
        job,
        resources=command.resources or job.resources,
        execution=replace(job.execution, num_workers=workers),
    )


def _event_of(command: _Plain, snapshot: Snapshot, now: float) -> Event:
    match command:
        case MarkReused():
            return events.JobReused(at_s=now, job=command.job, key=snapshot.jobs[command.job].key)
        case FailJob():
            return events.JobFailed(at_s=now, job=command.job, reason=command.reason)
        case SkipJob():
            return events.JobSkipped(at_s=now, job=command.job, because=command.because)
        case CancelJob():
            return events.JobCancelled(at_s=now, job=command.job)
        case _:
            return _sweep_event_of(command, now)


def _sweep_event_of(command: FinishSweep | TripSweep | ExcludeNode, now: float) -> Event:
    match command:
        case FinishSweep():
            return events.SweepFinished(at_s=now, status=command.status)
        case TripSweep():
            return events.SweepTripped(at_s=now, reason=command.reason)
        case ExcludeNode():
            return events.NodeExcluded(at_s=now, node=command.node, reason=command.reason, until_s=command.until_s)


def _with_history(job: Job, view: JobView, mtbf_s: Callable[[float], float]) -> Job:
    """A job whose execution knows how attempts ended so far, which the plan cannot."""
    execution = replace(job.execution, memory_retries=view.failures.get(FailureKind.OUT_OF_MEMORY, 0))
    if execution.checkpoint_mtbf_s:
        # The plan says only where to start from.
        execution = replace(execution, checkpoint_mtbf_s=mtbf_s(execution.checkpoint_mtbf_s))
    return replace(job, execution=execution)


def _planned(snapshot: Snapshot, name: str) -> tuple[Plan, Job]:
    if snapshot.plan is None:
        message = f"sweep {snapshot.sweep} has no plan and a command for its job {name}: this is a bug, report it"
        raise ControllerError(message)
    return snapshot.plan, snapshot.plan.by_name()[name]
