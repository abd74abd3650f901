"""From a journal's events to a snapshot.

Invariants:

- The fold of any prefix of a journal is a valid snapshot, and ``apply(fold(a), b) == fold(a + b)``.
- It depends only on the events: not on a clock, a store or the order of keys.
- Texts of failures are as ``printable`` makes them: journals of earlier versions hold what UTF-8 and databases refuse.
- An event that the table of transitions does not list raises; the snapshot given is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import singledispatchmethod
from typing import Any, TypeAlias

from orchestrator.core.errors import FailureKind, TransitionError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import printable
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state import events
from orchestrator.state.failure_policy import POLICY
from orchestrator.state.snapshot import KEPT_NUMERICS, Attempt, Exclusion, Failure, JobTable, JobView, Snapshot
from orchestrator.state.spending import ResourceUse, added
from orchestrator.state.transitions import JobState, SweepState, next_job_state, next_sweep_state

PlanLookup: TypeAlias = Callable[[events.PlanAccepted], Plan]
"""Loads the plan of the event that accepted its revision."""
_ANEW: Mapping[str, Any] = {"reason": "", "ended_at_s": None, "failures": {}, "counts_for_breaker": True}
"""Changes of a job that a client reopens."""


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
    """Takes any number of events; ``result`` is the snapshot after them. Unchanged parts are shared."""

    def __init__(self, snapshot: Snapshot, plans: PlanLookup) -> None:
        self._sweep = snapshot
        self._plans = plans
        self._changed: dict[str, JobView] = {}
        """Changed jobs, which override ``self._sweep.jobs``."""
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
        return replace(
            self._sweep,
            jobs=self._sweep.jobs.with_changes(self._changed) if self._changed else self._sweep.jobs,
            leaving=dict(self._leaving),
            num_events=self._sweep.num_events + self._num_taken,
        )

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
        plan = self._plans(event)
        self._retire(plan)
        old = {(view.name, view.key): view for view in self._views()}
        jobs = JobTable(old.get((job.name, job.key)) or JobView(name=job.name, key=job.key) for job in plan.jobs)
        self._changed = {}
        documents = {**self._sweep.documents, **event.documents}
        self._sweep = replace(
            self._sweep, plan=plan, revision=event.revision, jobs=jobs, priority=None, documents=documents
        )
        self._reopen(event)

    @_take.register
    def _(self, event: events.SweepReopened) -> None:
        self._reopen(event)

    @_take.register
    def _(self, event: events.CancelRequested) -> None:
        self._move_sweep(event)

    @_take.register
    def _(self, event: events.SweepPaused) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, pause=event.running)

    @_take.register
    def _(self, event: events.SweepResumed) -> None:
        self._move_sweep(event)

    @_take.register
    def _(self, event: events.SweepStopping) -> None:
        self._move_sweep(event)

    @_take.register
    def _(self, event: events.SweepTripped) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, tripped=printable(event.reason))

    @_take.register
    def _(self, event: events.NodeExcluded) -> None:
        self._move_sweep(event)
        exclusion = Exclusion(node=event.node, reason=event.reason, until_s=event.until_s)
        self._sweep = replace(self._sweep, excluded={**self._sweep.excluded, event.node: exclusion})

    @_take.register
    def _(self, event: events.NodeDescribed) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, nodes={**self._sweep.nodes, event.node: event.machine})

    @_take.register
    def _(self, event: events.PriorityChanged) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, priority=event.priority)

    @_take.register
    def _(self, event: events.JobsCancelled) -> None:
        self._move_sweep(event)
        for name in event.jobs:
            view = self._view(name, event)
            if view.attempt is not None:
                self._leaving[view.attempt.attempt_id] = view.attempt
            self._put(view, event, attempt=None, ended_at_s=event.at_s, reason=_by(event.sender))

    @_take.register
    def _(self, event: events.JobsRetried) -> None:
        was_over = self._sweep.state.is_final
        if was_over:
            self._sweep = replace(self._sweep, accepted_at_s=event.at_s, finished_at_s=None, tripped="", pauses=())
        self._move_sweep(event)
        for name in event.jobs:
            self._put(self._view(name, event), event, **_ANEW)
        if was_over:
            # Otherwise the breaker would stop the sweep again at once, for the very failures that stopped it before.
            for view in self._views():
                if view.state is JobState.FAILED:
                    self._changed[view.name] = replace(view, counts_for_breaker=False)

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
        self._change(event, failures={}, ended_at_s=None, metrics={}, timings=None, quarantined=())

    @_take.register
    def _(self, event: events.JobFailed) -> None:
        self._change(event, ended_at_s=event.at_s, reason=printable(event.reason))

    @_take.register
    def _(self, event: events.JobSkipped) -> None:
        self._change(event, ended_at_s=event.at_s, reason=f"needs {event.because}")

    @_take.register
    def _(self, event: events.JobCancelled) -> None:
        self._change(event, ended_at_s=event.at_s)

    # ------------------------------------------------------------------------------------------------------- attempts
    @_take.register
    def _(self, event: events.AttemptLaunched) -> None:
        view, job = self._job(event), self._planned(event)
        attempt = Attempt(
            attempt_id=event.attempt_id,
            job=event.job,
            key=event.key,
            number=event.number,
            epoch=event.epoch,
            launched_at_s=event.at_s,
            resources=event.resources or job.resources,
            num_workers=event.num_workers or job.execution.num_workers,
            nodes=event.nodes,
            lots=event.lots,
            awaits_room=event.awaits_room,
            exclude=event.exclude,
            aging=event.aging,
        )
        self._change(
            event,
            attempt=attempt,
            room_s=0.0,
            num_attempts=view.num_attempts + 1,
            last_attempt_id=event.attempt_id,
            queued_s=self._queued_s(event) if view.num_attempts == 0 else view.queued_s,
            launched_at_s=event.at_s,
            ended_at_s=None,
        )

    @_take.register
    def _(self, event: events.AttemptPlaced) -> None:
        live = self._leaving.get(event.attempt_id) or self._live(event)
        nodes = _nodes_of(live, event)
        if not live.awaits_room:
            self._update_attempt(event, lots=event.lots, nodes=nodes)
            return
        placed_at_s = max(live.launched_at_s, event.at_s - event.since_s)
        if event.attempt_id not in self._leaving:
            self._change(event, room_s=placed_at_s - live.launched_at_s)
        self._update_attempt(event, lots=event.lots, nodes=nodes, awaits_room=False, placed_at_s=placed_at_s)

    @_take.register
    def _(self, event: events.AttemptPreempting) -> None:
        self._update_attempt(event, preempting_at_s=event.at_s, grace_s=event.grace_s)

    @_take.register
    def _(self, event: events.AttemptSucceeded) -> None:
        self._end(
            event,
            metrics=event.metrics,
            timings=event.timings,
            resumed_from_step=event.resumed_from_step,
            quarantined=event.quarantined,
        )

    @_take.register
    def _(self, event: events.AttemptFailed) -> None:
        failure = Failure(
            attempt_id=event.attempt_id,
            kind=event.effective_kind,
            message=printable(event.message),
            at_s=event.at_s,
            traceback=printable(event.traceback),
            node=event.node,
            rank=event.rank,
            gpus=event.gpus,
            step=event.step,
        )
        self._fail(event, failure)

    @_take.register
    def _(self, event: events.AttemptLost) -> None:
        kind = FailureKind.NODE_LOST
        failure = Failure(
            attempt_id=event.attempt_id, kind=kind, message=printable(event.reason), at_s=event.at_s, node=event.node
        )
        self._fail(event, failure)

    # -------------------------------------------------------------------------------------------------------- details
    def _move_sweep(self, event: events.Event) -> None:
        state = next_sweep_state(self._sweep.sweep, self._sweep.state, event)
        # A pause ends with its state: otherwise it would stop attempts that a later retry starts.
        pause = self._sweep.pause if state is SweepState.PAUSED else None
        has_turned = (state is SweepState.PAUSED) != (self._sweep.state is SweepState.PAUSED)
        pauses = (*self._sweep.pauses, event.at_s) if has_turned else self._sweep.pauses
        self._sweep = replace(self._sweep, state=state, pause=pause, pauses=pauses)

    def _reopen(self, event: events.Event) -> None:
        self._move_sweep(event)
        self._sweep = replace(self._sweep, accepted_at_s=event.at_s, finished_at_s=None, tripped="", pauses=())
        for view in self._views():
            if next_job_state(view.name, view.state, event) is not view.state:
                # A job that is still retried keeps its count: a resubmission must not renew its limits.
                self._put(view, event, **_ANEW)

    def _retire(self, plan: Plan) -> None:
        """Keep track of the live attempts at jobs that the new plan does not have."""
        kept = {(job.name, job.key) for job in plan.jobs}
        for view in self._views():
            if (view.name, view.key) in kept:
                continue
            if view.attempt is not None:
                self._leaving[view.attempt.attempt_id] = view.attempt
            self._spend(view.used)

    def _spend(self, uses: Sequence[ResourceUse]) -> None:
        gpu_s = self._sweep.spent_gpu_s + sum(use.gpu_s for use in uses)
        cpu_s = self._sweep.spent_cpu_s + sum(use.cpu_s for use in uses)
        spent = added(self._sweep.spent, uses)
        self._sweep = replace(self._sweep, spent_gpu_s=gpu_s, spent_cpu_s=cpu_s, spent=spent)

    def _views(self) -> list[JobView]:
        return [self._changed.get(view.name, view) for view in self._sweep.jobs.values()]

    def _job(self, event: events.JobEvent) -> JobView:
        return self._view(event.job, event)

    def _view(self, name: str, event: events.Event) -> JobView:
        view = self._changed.get(name) or self._sweep.jobs.get(name)
        if view is None:
            message = (
                f"the journal of sweep {self._sweep.sweep} tells {events.event_type(event)} of {name}, which "
                f"revision {self._sweep.revision} of its plan does not have"
            )
            raise TransitionError(message)
        return view

    def _change(self, event: events.JobEvent, **changes: Any) -> None:  # noqa: ANN401 - fields of JobView
        self._put(self._job(event), event, **changes)

    def _put(self, view: JobView, event: events.Event, **changes: Any) -> None:  # noqa: ANN401 - fields of JobView
        state = next_job_state(view.name, view.state, event)
        self._changed[view.name] = replace(view, state=state, **changes)

    def _live(self, event: events.AttemptEvent) -> Attempt:
        live = self._job(event).attempt
        if live is None or live.attempt_id != event.attempt_id:
            what = events.event_type(event)
            message = f"the journal tells {what} of {event.attempt_id} of job {event.job}; the live attempt is {live}"
            raise TransitionError(message)
        return live

    def _update_attempt(self, event: events.AttemptEvent, **changes: Any) -> None:  # noqa: ANN401 - fields of Attempt
        live = replace(self._leaving.get(event.attempt_id) or self._live(event), **changes)
        if event.attempt_id in self._leaving:
            self._leaving[event.attempt_id] = live
        else:
            self._change(event, attempt=live)

    def _end(self, event: events.AttemptEvent, **changes: Any) -> None:  # noqa: ANN401 - fields of JobView
        left = self._leaving.pop(event.attempt_id, None)
        if left is not None:
            left = replace(left, awaits_room=left.awaits_room or _had_no_room(event))
            self._spend(left.uses(event.at_s))
            return
        view, live = self._job(event), self._live(event)
        live = replace(live, awaits_room=live.awaits_room or _had_no_room(event))
        ran_s = view.ran_s + live.ran_s(event.at_s)
        used = added(view.used, live.uses(event.at_s))
        self._change(event, attempt=None, ended_at_s=event.at_s, ran_s=ran_s, used=used, **changes)

    def _fail(self, event: events.AttemptEvent, failure: Failure) -> None:
        if event.attempt_id in self._leaving:
            self._end(event)
            return
        view, kind = self._job(event), failure.kind
        if kind is FailureKind.NO_ROOM and view.last_failure is not None:
            # A node that may be at fault stays the one to avoid, before one that had no room; a lost one is gone.
            went_wrong = any(POLICY[one].may_blame_node and one is not FailureKind.NODE_LOST for one in view.failures)
            failure = replace(failure, node=(not went_wrong and failure.node) or view.last_failure.node)
        failures = {**view.failures, kind: view.failures.get(kind, 0) + 1}
        num_deaths = view.num_deaths + (POLICY[kind].is_deadly)
        numerics = view.numerics
        if kind is FailureKind.NUMERICS:
            # The comparison needs no traceback, which snapshots would keep for the life of the sweep.
            numerics = (*numerics, replace(failure, traceback=""))[-KEPT_NUMERICS:]
        self._end(event, failures=failures, last_failure=failure, num_deaths=num_deaths, numerics=numerics)

    def _planned(self, event: events.JobEvent) -> Job:
        """The job as the plan has it. Raises ``TransitionError`` without a plan."""
        if self._sweep.plan is None:
            message = f"the journal of sweep {self._sweep.sweep} launches {event.job} before it accepts a plan"
            raise TransitionError(message)
        return self._sweep.plan.by_name()[event.job]

    def _queued_s(self, event: events.JobEvent) -> float:
        ends = [self._view(need, event).ended_at_s or 0.0 for need in self._planned(event).needs]
        return max(0.0, event.at_s - max([self._sweep.accepted_at_s, *ends]))


def _nodes_of(attempt: Attempt, event: events.AttemptPlaced) -> tuple[str, ...]:
    """The nodes that the scheduler chose, by which it counts resources whatever is reported; where it chose none, those
    on which the attempt was placed, if all of them are known: without them it counted a free node as used. Trials of a
    search move from node to node.
    """
    is_known = len(event.nodes) == attempt.num_workers and all(event.nodes)
    stays = is_known and not attempt.key.startswith(f"{JobKind.SEARCH.value}-")
    return attempt.nodes or (event.nodes if stays else ())


def _had_no_room(event: events.AttemptEvent) -> bool:
    return isinstance(event, events.AttemptFailed) and event.had_no_room


def _by(sender: str) -> str:
    return f"cancelled by {sender}" if sender else "cancelled"
