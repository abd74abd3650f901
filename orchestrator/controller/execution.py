"""Carries out the scheduler's commands: each becomes an event first and an effect afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.backends.protocol import ANYWHERE, Backend, Placement
from orchestrator.controller.attempts import Claimant, allocate_attempt, make_request
from orchestrator.controller.fleet import Fleet, Holding
from orchestrator.controller.stops import Stops
from orchestrator.core.contract import JobRequest, Progress, Resources
from orchestrator.core.errors import (
    ControllerError,
    CorruptObjectError,
    FailureKind,
    IdentityMismatchError,
    NotFoundError,
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
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.claims import Claims
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.limits import GRACE_S
from orchestrator.sweeps.terms import Terms

MAX_BATCH = 64
"""Commands of a sweep per segment of its journal. Each launch asks the store four times: a thousand in one go would be
lost, all of them, with a controller that dies before they are on record.
"""
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Launch:
    request: JobRequest
    resources: Resources
    placement: Placement = ANYWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    attempt_id: str
    reason: str


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What one sweep's commands come to: events for one segment, then effects."""

    events: list[Event] = field(default_factory=list)
    launches: list[_Launch] = field(default_factory=list)
    stops: list[_Stop] = field(default_factory=list)


class Executor:
    """Executes commands, remembers which keys the store has, and holds the claims of those worked on."""

    def __init__(
        self,
        store: ObjectStore,
        backend: Backend,
        cluster: str,
        stops: Stops,
        terms: Terms,
        *,
        grace_s: float = GRACE_S,
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._on_alive = on_alive
        self._backend = backend
        self._stops = stops
        self._terms = terms
        self._grace_s = grace_s
        self._claims = Claims(store, cluster)
        self._absent: set[str] = set()
        self.committed: set[str] = set()
        """Keys whose record was read, identity included."""
        self.unknown: set[str] = set()
        """Keys of ready jobs that the latest looks had no time for: committed or not, nobody knows yet."""

    @property
    def claimed(self) -> set[str]:
        """Keys that other clusters work on."""
        return self._claims.waited_for()

    def end_waits(self, now: float) -> None:
        """Look again at keys that others work on, once it is time: they may have committed, or given up."""
        for key in self._claims.end_waits(now):
            self.forget_key(key)

    def keep_claims(self, fleet: Fleet, now: float) -> None:
        """Renew the claims of what runs, and let others have what nobody here wants any more."""
        snapshots = [holding.snapshot for holding in fleet.active()]
        live = {attempt.key: snapshot.sweep for snapshot in snapshots for attempt in snapshot.live_attempts}
        self._claims.keep(live, now)
        idle = set(self._claims.held) - live.keys()
        for key in sorted(idle - (_pending_keys(snapshots) if idle else set())):
            self._claims.release(key)

    def settle(self, key: str) -> None:
        """The key is committed."""
        self._claims.forget(key)
        self.forget_key(key)

    def look_up(
        self, fleet: Fleet, holding: Holding, ready: Iterable[Job], clock: Callable[[], float], until_s: float
    ) -> None:
        """Find out which jobs that are ready have been committed already; each key is looked up once.

        Ten thousand keys take minutes on a distant store: what is not looked up by ``until_s`` goes to ``unknown``.
        """
        refused: list[Event] = []
        for job in ready:
            if job.key in self.committed or job.key in self._absent:
                continue
            now = clock()
            if now > until_s:
                self.unknown.add(job.key)
                continue
            self._on_alive()
            try:
                read_record(self._store, job.key, identity=job.identity)
                self.committed.add(job.key)
                self._claims.forget(job.key)
            except NotFoundError:
                self._absent.add(job.key)
            except (CorruptObjectError, IdentityMismatchError) as error:
                # The same at every look: without an end of the job the sweep would be read again for ever.
                refused.append(events.JobFailed(at_s=now, job=job.name, reason=str(error)))
        if refused:
            fleet.append(holding, refused)

    def forget_key(self, key: str) -> None:
        """Look a key up again: an attempt at it has ended, or somebody may have deleted it."""
        self._absent.discard(key)
        self.committed.discard(key)

    def forget_keys(self, snapshot: Snapshot) -> None:
        """Look all keys of a (re)submitted sweep up again."""
        for view in snapshot.jobs.values():
            self.forget_key(view.key)

    def without_repeats(self, commands: Sequence[Command]) -> list[Command]:
        """Commands less the stops that were given before; a new controller gives them once more."""
        return [c for c in commands if not (isinstance(c, StopAttempt) and c.attempt_id in self._stops)]

    def execute(self, fleet: Fleet, holding: Holding, commands: Sequence[Command], now: float) -> None:
        """Carry out commands of one sweep; use inside ``Fleet.guard``."""
        for start in range(0, len(commands), MAX_BATCH):
            batch = _Batch()
            for command in commands[start : start + MAX_BATCH]:
                self._on_alive()
                self._add(batch, fleet, holding, command, now)
            self._carry_out(batch, fleet, holding, now)

    def _carry_out(self, batch: _Batch, fleet: Fleet, holding: Holding, now: float) -> None:
        if batch.events:
            # Intent before effect: an attempt that the journal does not know would run unseen after a crash here. One
            # that is in the journal and was never launched is reported as lost, and tried again.
            fleet.append(holding, batch.events)
        for launch in batch.launches:
            self._launch(launch)
        for stop in batch.stops:
            self._stops.ask(stop.attempt_id, stop.reason, now, self._grace_s)

    def preempt(self, fleet: Fleet, holding: Holding, reason: str, now: float) -> None:
        """Ask all running attempts of a sweep for a checkpoint and their room; use inside ``Fleet.guard``."""
        batch = _Batch()
        for attempt in holding.snapshot.live_attempts:
            self._add_preemption(batch, attempt, reason, now)
        self._carry_out(batch, fleet, holding, now)

    def _launch(self, launch: _Launch) -> None:
        try:
            self._backend.launch(launch.request, launch.resources, launch.placement)
        except OrchestratorError as error:
            # The next observation finds the attempt lost, which journals it and counts it.
            _LOG.warning("attempt %s was not launched: %s", launch.request.attempt_id, error)

    def _add(self, batch: _Batch, fleet: Fleet, holding: Holding, command: Command, now: float) -> None:
        if isinstance(command, LaunchJob):
            self._add_launch(batch, fleet, holding, command, now)
        elif isinstance(command, StopAttempt):
            batch.stops.append(_Stop(attempt_id=command.attempt_id, reason="nobody wants its outcome any more"))
        elif isinstance(command, PreemptAttempt):
            for attempt in holding.snapshot.live_attempts:
                if attempt.attempt_id == command.attempt_id:
                    self._add_preemption(batch, attempt, command.reason, now)
        else:
            batch.events.append(_event_of(command, holding.snapshot, now))
            if isinstance(command, MarkReused | FailJob | SkipJob | CancelJob):
                holding.board.remove(command.job)

    def _add_preemption(self, batch: _Batch, attempt: Attempt, reason: str, now: float) -> None:
        if attempt.preempting_at_s is not None:
            return
        batch.stops.append(_Stop(attempt_id=attempt.attempt_id, reason=reason))
        batch.events.append(
            events.AttemptPreempting(
                at_s=now, job=attempt.job, attempt_id=attempt.attempt_id, reason=reason, grace_s=self._grace_s
            )
        )

    def _add_launch(self, batch: _Batch, fleet: Fleet, holding: Holding, command: LaunchJob, now: float) -> None:
        snapshot = holding.snapshot
        plan, job = _planned(snapshot, command.job)
        # Before the attempt has a number: a crash in between leaves a claim of ours, which the next controller takes.
        obstacle = self._claims.take(job.key, snapshot.sweep, now)
        if obstacle is not None:
            reason = f"waits: sweep {obstacle.sweep} works on {job.key} on cluster {obstacle.cluster}"
            holding.board.show(job.name, "", Progress(phase=reason))
            return
        holding.board.remove(job.name)
        claimant = Claimant(sweep=snapshot.sweep, cluster=snapshot.cluster, epoch=snapshot.epoch)
        number = allocate_attempt(self._store, job, claimant)
        given = _as_given(_with_history(job, snapshot.jobs[job.name], fleet, now), command)
        request = make_request(plan, given, number)
        placement = Placement(nodes=command.nodes, exclude=command.exclude)
        batch.launches.append(_Launch(request=request, resources=given.resources, placement=placement))
        lots = self._terms.lots(command.nodes, given.resources, given.execution.num_workers)
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
            )
        )


_Plain: TypeAlias = MarkReused | FailJob | SkipJob | CancelJob | FinishSweep | TripSweep | ExcludeNode


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


def _pending_keys(snapshots: Sequence[Snapshot]) -> set[str]:
    running = [snapshot for snapshot in snapshots if snapshot.state is SweepState.RUNNING]
    return {view.key for snapshot in running for view in snapshot.jobs.values() if view.state is JobState.PENDING}


def _with_history(job: Job, view: JobView, fleet: Fleet, now: float) -> Job:
    """A job whose execution knows how attempts ended so far, which the plan cannot."""
    execution = replace(job.execution, memory_retries=view.failures.get(FailureKind.OUT_OF_MEMORY, 0))
    if execution.checkpoint_mtbf_s:
        # The plan says only where to start from.
        snapshots = [holding.snapshot for holding in fleet.holdings()]
        mtbf_s = observed_mtbf_s(snapshots, prior_s=execution.checkpoint_mtbf_s, now=now)
        execution = replace(execution, checkpoint_mtbf_s=mtbf_s)
    return replace(job, execution=execution)


def _planned(snapshot: Snapshot, name: str) -> tuple[Plan, Job]:
    if snapshot.plan is None:
        message = f"sweep {snapshot.sweep} has no plan and a command for its job {name}: this is a bug, report it"
        raise ControllerError(message)
    return snapshot.plan, snapshot.plan.by_name()[name]
