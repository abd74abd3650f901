"""Carries out the scheduler's commands: each becomes an event first and an effect afterwards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.backends.protocol import Backend
from orchestrator.contract import JobRequest, Resources
from orchestrator.controller.attempts import Claimant, allocate_attempt, make_request
from orchestrator.controller.fleet import Fleet, Holding
from orchestrator.errors import (
    ControllerError,
    CorruptObjectError,
    IdentityMismatchError,
    NotFoundError,
    OrchestratorError,
)
from orchestrator.plan.graph import Job, Plan
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.scheduler import (
    CancelJob,
    Command,
    FailJob,
    FinishSweep,
    LaunchJob,
    MarkReused,
    SkipJob,
    StopAttempt,
    unlaunched,
)
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.protocol import ObjectStore

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Launch:
    request: JobRequest
    resources: Resources


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What one sweep's commands come to: events for one segment, then effects."""

    events: list[Event] = field(default_factory=list)
    launches: list[_Launch] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)


class Executor:
    """Executes commands and remembers which keys the store has."""

    def __init__(self, store: ObjectStore, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._absent: set[str] = set()
        self._stopped: set[str] = set()
        self.committed: set[str] = set()
        """Keys whose record was read, identity included."""

    def look_up(self, fleet: Fleet, holding: Holding, now: float) -> None:
        """Find out which jobs that are ready have been committed already; each key is looked up once."""
        refused: list[Event] = []
        for job in unlaunched(holding.snapshot):
            if job.key in self.committed or job.key in self._absent:
                continue
            try:
                read_record(self._store, job.key, identity=job.identity)
                self.committed.add(job.key)
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
        return [c for c in commands if not (isinstance(c, StopAttempt) and c.attempt_id in self._stopped)]

    def execute(self, fleet: Fleet, holding: Holding, commands: Sequence[Command], now: float) -> None:
        """Carry out commands of one sweep; use inside ``Fleet.guard``."""
        batch = _Batch()
        for command in commands:
            self._add(batch, holding.snapshot, command, now)
        if batch.events:
            # Intent before effect: an attempt that the journal does not know would run unseen after a crash here. One
            # that is in the journal and was never launched is reported as lost, and tried again.
            fleet.append(holding, batch.events)
        for launch in batch.launches:
            self._launch(launch)
        for attempt_id in batch.stops:
            self._stopped.add(attempt_id)
            self._backend.stop(attempt_id)

    def _launch(self, launch: _Launch) -> None:
        try:
            self._backend.launch(launch.request, launch.resources)
        except OrchestratorError as error:
            # The next observation finds the attempt lost, which journals it and counts it.
            _LOG.warning("attempt %s was not launched: %s", launch.request.attempt_id, error)

    def _add(self, batch: _Batch, snapshot: Snapshot, command: Command, now: float) -> None:
        if isinstance(command, LaunchJob):
            self._add_launch(batch, snapshot, command, now)
        elif isinstance(command, StopAttempt):
            batch.stops.append(command.attempt_id)
        else:
            batch.events.append(_event_of(command, snapshot, now))

    def _add_launch(self, batch: _Batch, snapshot: Snapshot, command: LaunchJob, now: float) -> None:
        plan, job = _planned(snapshot, command.job)
        claimant = Claimant(sweep=snapshot.sweep, cluster=snapshot.cluster, epoch=snapshot.epoch)
        number = allocate_attempt(self._store, job, claimant)
        request = make_request(plan, job, number)
        batch.launches.append(_Launch(request=request, resources=job.resources))
        batch.events.append(
            events.AttemptLaunched(
                at_s=now,
                job=job.name,
                key=job.key,
                attempt_id=request.attempt_id,
                number=number,
                epoch=snapshot.epoch,
            )
        )


def _event_of(
    command: MarkReused | FailJob | SkipJob | CancelJob | FinishSweep, snapshot: Snapshot, now: float
) -> Event:
    match command:
        case MarkReused():
            return events.JobReused(at_s=now, job=command.job, key=snapshot.jobs[command.job].key)
        case FailJob():
            return events.JobFailed(at_s=now, job=command.job, reason=command.reason)
        case SkipJob():
            return events.JobSkipped(at_s=now, job=command.job, because=command.because)
        case CancelJob():
            return events.JobCancelled(at_s=now, job=command.job)
        case FinishSweep():
            return events.SweepFinished(at_s=now, status=command.status)


def _planned(snapshot: Snapshot, name: str) -> tuple[Plan, Job]:
    if snapshot.plan is None:
        message = f"sweep {snapshot.sweep} has no plan and a command for its job {name}: this is a bug, report it"
        raise ControllerError(message)
    return snapshot.plan, snapshot.plan.by_name()[name]
