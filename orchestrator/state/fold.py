"""From a journal's events to a snapshot. The fold of any prefix of a journal is a valid snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import singledispatchmethod
from typing import Any, TypeAlias

from orchestrator.contract import Resources
from orchestrator.errors import FailureKind, TransitionError
from orchestrator.plan.graph import Plan
from orchestrator.state import events
from orchestrator.state.reliability import DEADLY
from orchestrator.state.snapshot import Attempt, Failure, JobView, Snapshot
from orchestrator.state.transitions import next_job_state, next_sweep_state

PlanLookup: TypeAlias = Callable[[int], Plan]
"""From a revision to its plan."""


def fold(sweep: str, journal: Iterable[events.Event], plans: PlanLookup) -> Snapshot:
    """Snapshot after all events of a journal. Raises ``TransitionError`` if one cannot follow the others."""
    return apply(Snapshot(sweep=sweep), journal, plans)


def apply(snapshot: Snapshot, more: Iterable[events.Event], plans: PlanLookup) -> Snapshot:
    """Snapshot after some more events: ``apply(fold(a), b) == fold(a + b)``."""
    folding = _Folding(snapshot, plans)
    for event in more:
        folding.take(event)
    return folding.result()


class _Folding:
    """Copies the jobs once and then takes any number of events; ``result`` is the snapshot after them."""

    def __init__(self, snapshot: Snapshot, plans: PlanLookup) -> None:
        self._sweep = snapshot
        self._plans = plans
        self._jobs = dict(snapshot.jobs)
        self._leaving = dict(snapshot.leaving)
        self._num_taken = 0

    def take(self, event: events.Event) -> None:
        """Fold in one event. Raises ``TransitionError`` if it cannot follow."""
        self._num_taken += 1
        if isinstance(event, events.MessageEvent):
            self._sweep = replace(self._sweep, handled=self._sweep.handled | {event.message_id})
        self._take(event)

    def result(self) -> Snapshot:
        """The snapshot after all events taken so far."""
        num_events = self._sweep.num_events + self._num_taken
        return replace(self._sweep, jobs=dict(self._jobs), leaving=dict(self._leaving), num_events=num_events)

    @singledispatchmethod
    def _take(self, event: events.Event) -> None:
        message = f"no rule folds the event {events.event_type(event)}"
        raise TransitionError(message)

    # ------------------------------------------------------------------------------------------------------- the sweep
    @_take.register
    def _(self, event: events.SweepAdopted) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, cluster=event.cluster, epoch=event.epoch, holder=event.holder)

    @_take.register
    def _(self, event: events.PlanAccepted) -> None:
        plan = self._plans(event.revision)
        self._retire(plan)
        old = {(view.name, view.key): view for view in self._jobs.values()}
        self._jobs = {
            job.name: old.get((job.name, job.key)) or JobView(name=job.name, key=job.key) for job in plan.jobs
        }
        self._sweep = replace(self._sweep, plan=plan, revision=event.revision)
        self._reopen(event)

    @_take.register
    def _(self, event: events.SweepReopened) -> None:
        self._reopen(event)

    @_take.register
    def _(self, event: events.CancelRequested) -> None:
        self._move_sweep(event)

    @_take.register
    def _(self, event: events.MessageRefused) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, refusals={**self._sweep.refusals, event.message_id: event.reason})

    @_take.register
    def _(self, event: events.SweepFinished) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, finished_at_s=event.at_s)

    # ----------------------------------------------------------------------------------------------------------- jobs
    @_take.register
    def _(self, event: events.JobReused) -> None:
        self._change(event, ended_at_s=event.at_s, reason="")

    @_take.register
    def _(self, event: events.ArtifactMissed) -> None:
        self._change(event, failures={}, ended_at_s=None, metrics={}, timings=None)

    @_take.register
    def _(self, event: events.JobFailed) -> None:
        self._change(event, ended_at_s=event.at_s, reason=event.reason)

    @_take.register
    def _(self, event: events.JobSkipped) -> None:
        self._change(event, ended_at_s=event.at_s, reason=f"needs {event.because}")

    @_take.register
    def _(self, event: events.JobCancelled) -> None:
        self._change(event, ended_at_s=event.at_s)

    # ------------------------------------------------------------------------------------------------------- attempts
    @_take.register
    def _(self, event: events.AttemptLaunched) -> None:
        view = self._job(event)
        attempt = Attempt(
            attempt_id=event.attempt_id,
            job=event.job,
            key=event.key,
            number=event.number,
            epoch=event.epoch,
            launched_at_s=event.at_s,
            resources=self._resources(event.job),
        )
        self._change(
            event,
            attempt=attempt,
            num_attempts=view.num_attempts + 1,
            last_attempt_id=event.attempt_id,
            queued_s=self._queued_s(event) if view.num_attempts == 0 else view.queued_s,
            launched_at_s=event.at_s,
            ended_at_s=None,
        )

    @_take.register
    def _(self, event: events.AttemptSucceeded) -> None:
        self._end(event, metrics=event.metrics, timings=event.timings, resumed_from_step=event.resumed_from_step)

    @_take.register
    def _(self, event: events.AttemptFailed) -> None:
        self._fail(event, event.kind, event.message, event.traceback)

    @_take.register
    def _(self, event: events.AttemptLost) -> None:
        self._fail(event, FailureKind.NODE_LOST, event.reason)

    # -------------------------------------------------------------------------------------------------------- details
    def _move_sweep(self, event: events.Event) -> None:
        self._sweep = replace(self._sweep, state=next_sweep_state(self._sweep.sweep, self._sweep.state, event))

    def _reopen(self, event: events.Event) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, accepted_at_s=event.at_s, finished_at_s=None)
        for name, view in self._jobs.items():
            state = next_job_state(name, view.state, event)
            if state is not view.state:
                # A job that is still tried keeps its count: a resubmission of others must not renew its budget.
                self._jobs[name] = replace(view, state=state, reason="", ended_at_s=None, failures={})

    def _retire(self, plan: Plan) -> None:
        """Keep track of the live attempts at jobs that the new plan does not have."""
        kept = {(job.name, job.key) for job in plan.jobs}
        for view in self._jobs.values():
            if view.attempt is not None and (view.name, view.key) not in kept:
                self._leaving[view.attempt.attempt_id] = view.attempt

    def _job(self, event: events.JobEvent) -> JobView:
        if event.job not in self._jobs:
            message = (
                f"the journal of sweep {self._sweep.sweep} tells {events.event_type(event)} of {event.job}, which "
                f"revision {self._sweep.revision} of its plan does not have"
            )
            raise TransitionError(message)
        return self._jobs[event.job]

    def _change(self, event: events.JobEvent, **changes: Any) -> None:  # noqa: ANN401 - fields of JobView
        view = self._job(event)
        state = next_job_state(view.name, view.state, event)
        self._jobs[view.name] = replace(view, state=state, **changes)

    def _end(self, event: events.AttemptEvent, **changes: Any) -> None:  # noqa: ANN401 - fields of JobView
        if self._leaving.pop(event.attempt_id, None) is not None:
            return
        live = self._job(event).attempt
        if live is None or live.attempt_id != event.attempt_id:
            message = f"{event.attempt_id} of job {event.job} ended, but the live attempt is {live}"
            raise TransitionError(message)
        ran_s = self._job(event).ran_s + max(0.0, event.at_s - live.launched_at_s)
        self._change(event, attempt=None, ended_at_s=event.at_s, ran_s=ran_s, **changes)

    def _fail(self, event: events.AttemptEvent, kind: FailureKind, text: str, traceback: str = "") -> None:
        if event.attempt_id in self._leaving:
            self._end(event)
            return
        view = self._job(event)
        failure = Failure(attempt_id=event.attempt_id, kind=kind, message=text, at_s=event.at_s, traceback=traceback)
        failures = {**view.failures, kind: view.failures.get(kind, 0) + 1}
        num_deaths = view.num_deaths + (kind in DEADLY)
        self._end(event, failures=failures, last_failure=failure, num_deaths=num_deaths)

    def _resources(self, name: str) -> Resources:
        jobs = {} if self._sweep.plan is None else self._sweep.plan.by_name()
        return jobs[name].resources

    def _queued_s(self, event: events.JobEvent) -> float:
        if self._sweep.plan is None:
            return 0.0
        needs = self._sweep.plan.by_name()[event.job].needs
        ends = [self._jobs[need].ended_at_s or 0.0 for need in needs]
        return max(0.0, event.at_s - max([self._sweep.accepted_at_s, *ends]))
