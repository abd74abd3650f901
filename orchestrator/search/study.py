"""One search for its only driver: proposes trials, takes their reports, and decides.

Every decision is in the log before it takes effect; a study that is rebuilt from the log makes the same decisions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.contract import Evaluation, JobFailure, JobRequest, JobResult
from orchestrator.core.errors import FailureKind, StorageError, UserError
from orchestrator.core.job_kinds import require_own_versions
from orchestrator.search.asha import Ladder, RungVerdict
from orchestrator.search.log import (
    SearchEvent,
    SearchLog,
    TrialAsked,
    TrialCompleted,
    TrialFailed,
    TrialLost,
    TrialStarted,
    TrialStopped,
    TrialTold,
    TrialView,
    apply_search_event,
)
from orchestrator.search.samplers import Answered
from orchestrator.search.search_plan import SearchPlan
from orchestrator.storage.claims import take_attempt_number
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.trials import Trial, TrialState, write_trial

MOST_LOSSES = 3
"""How often attempts at one trial may be interrupted within one attempt at the search."""
_FINAL = frozenset({FailureKind.USER_ERROR, FailureKind.NUMERICS, FailureKind.OUT_OF_MEMORY, FailureKind.BAD_DATA})
"""Failures that would repeat, so that they are the trial's result. After others, another attempt may succeed."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """A trial to run now."""

    number: int
    request: JobRequest
    rungs: tuple[float, ...]
    """Rungs that it has not reached."""


class TrialsLostError(StorageError):
    """A trial was interrupted too often: the cluster has a fault, and the search is retried later."""

    failure_kind = FailureKind.NODE_LOST


class Study:
    """Use from one thread. ``clock`` gives seconds since the epoch.

    Raises:
        UserError: the search, its trials or their probe were planned by a release that computes other results.
    """

    def __init__(self, request: JobRequest, store: ObjectStore, clock: Callable[[], float]) -> None:
        require_own_versions(request.job, request.kind, request.identity)
        self.request, self.plan = request, SearchPlan.of(request)
        self._store, self._clock = store, clock
        self._sampler = self.plan.sampler()
        rule = self.plan.rule
        self._rungs = rule.rungs if rule is not None else ()
        self._ladder = Ladder(self._rungs, rule.reduction if rule is not None else 2.0)
        self._log = SearchLog(store, request.key, attempt_id=request.attempt_id)
        self._state: Mapping[int, TrialView] = {}
        self._running: set[int] = set()
        self._losses: dict[int, int] = {}
        for event in self._log.read():
            self._take(event)
        self._show(list(self._state))

    @property
    def trials(self) -> Sequence[TrialView]:
        """All trials so far, by number."""
        return [self._state[number] for number in sorted(self._state)]

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended."""
        return len(self._state) >= self.num_trials and not self._unfinished()

    def next_task(self) -> TrialTask | None:
        """A trial to run: one that was interrupted before, else a new one; None while there is none."""
        waiting = [view.number for view in self._unfinished() if view.number not in self._running]
        if not waiting:
            new_trial = self._ask()
            waiting = [new_trial] if new_trial is not None else []
        if not waiting:
            return None
        number = waiting[0]
        view = self._state[number]
        search = self.request
        # Trials are jobs like any other: over all searches and sweeps the numbers differ.
        document = {"sweep": search.sweep, "job": f"{search.job}#{number}", "search": search.attempt_id}
        attempt = take_attempt_number(self._store, view.key, document)
        self._write(TrialStarted(trial=number, at_s=self._clock(), attempt=attempt))
        self._running.add(number)
        request = self.plan.request_of(self.request, view.params, number, attempt)
        rungs = (*(rung for rung in self._rungs if rung > view.epoch), self.plan.max_epochs)
        return TrialTask(number=number, request=request, rungs=rungs)

    def tell(self, number: int, evaluation: Evaluation) -> bool:
        """Take a trial's evaluation; returns whether it continues. A repeated evaluation of a resumed attempt is
        ignored. A value that is no number ends the trial as failed.

        Raises:
            UserError: the evaluation lacks the minimised metric.
        """
        value = self._value_of(evaluation.metrics)
        view = self._state[number]
        if view.state is not TrialState.RUNNING:
            return False
        if evaluation.epoch in view.values:
            return True
        if not math.isfinite(value):
            self._fail_without_value(number, value)
            return False
        event = TrialTold(
            trial=number,
            at_s=self._clock(),
            step=evaluation.step,
            epoch=evaluation.epoch,
            value=value,
            metrics=_finite(evaluation.metrics),
            spent_s=evaluation.spent_s,
        )
        verdict = self._judged(event)
        events: list[SearchEvent] = [event]
        if verdict is not None:
            events.append(verdict)
        # One segment, so that no log has a value without its decision.
        self._write(*events)
        return verdict is None

    def end(self, number: int, outcome: JobResult | JobFailure, spent_s: float) -> None:
        """Take the end of an attempt at a trial.

        Raises:
            TrialsLostError: its attempts were interrupted too often.
        """
        self._running.discard(number)
        if self._state[number].state is not TrialState.RUNNING:
            return  # it was stopped, which ends it with this kind
        if isinstance(outcome, JobResult):
            self._complete(number, outcome, spent_s)
        elif outcome.kind in _FINAL or (outcome.kind is FailureKind.UNKNOWN and self._is_last_try(number)):
            self._write(TrialFailed(trial=number, at_s=self._clock(), kind=outcome.kind, message=outcome.message))
        else:
            self.lose(number, f"{outcome.kind}: {outcome.message}", is_fault=outcome.kind is not FailureKind.PREEMPTED)

    def end_stopped(self, number: int) -> None:
        """The attempt at a stopped trial has ended, or will end without a further report."""
        self._running.discard(number)

    def lose(self, number: int, reason: str, *, is_fault: bool = True) -> None:
        """An attempt at a trial was interrupted. Raises ``TrialsLostError`` if that happens too often."""
        self._running.discard(number)
        self._write(TrialLost(trial=number, at_s=self._clock(), reason=reason))
        self._losses[number] = self._losses.get(number, 0) + is_fault
        if self._losses[number] >= MOST_LOSSES:
            message = f"trial {number} of {self.request.job} was cut off {MOST_LOSSES} times, at last: {reason}; "
            raise TrialsLostError(message + "the search goes on from its log when it runs again")

    def best(self) -> TrialView:
        """The completed trial of the smallest value; of equals that of the smallest loss on the same samples.

        Raises:
            UserError: none completed.
        """
        completed = [view for view in self.trials if view.state is TrialState.COMPLETED and view.value is not None]
        if not completed:
            failed = [view for view in self.trials if view.state is TrialState.FAILED]
            why = f"; the first of {len(failed)} that failed: {failed[0].reason}" if failed else ""
            raise UserError(f"no trial of {self.request.job} came to its end{why}; change search.space")
        return min(completed, key=self._rank)

    @property
    def ladder(self) -> Ladder:
        """The values at each rung."""
        return self._ladder

    @property
    def num_trials(self) -> int:
        """The planned number of trials."""
        return int(min(self.plan.num_trials, self.plan.space.size))

    def _complete(self, number: int, result: JobResult, spent_s: float) -> None:
        """The trial's value; a pretraining does not know the target, so its probe's last value counts."""
        last_value = self._state[number].value
        value = last_value if self.plan.probe and last_value is not None else self._value_of(result.metrics)
        if not math.isfinite(value):
            self._fail_without_value(number, value)
            return
        metrics = _finite(result.metrics)
        self._write(TrialCompleted(trial=number, at_s=self._clock(), value=value, metrics=metrics, spent_s=spent_s))

    def _fail_without_value(self, number: int, value: float) -> None:
        """Neither the log nor a comparison takes NaN or infinity."""
        message = (
            f"{self.plan.metric} is {value:g}, which cannot be compared with other trials: the training diverged; "
        )
        message += "narrow search.space, for instance to a smaller lr"
        self._write(TrialFailed(trial=number, at_s=self._clock(), kind=FailureKind.NUMERICS, message=message))

    def _rank(self, view: TrialView) -> tuple[float, float, int]:
        """Errors of few samples are often equal, losses hardly ever."""
        told: Mapping[str, float] = view.points[-1].metrics if view.points else {}
        loss = told.get(f"{self.plan.metric.removesuffix('error')}loss", math.inf)
        return (math.inf if view.value is None else view.value, loss, view.number)

    def _is_last_try(self, number: int) -> bool:
        return self._losses.get(number, 0) + 1 >= MOST_LOSSES

    def _unfinished(self) -> list[TrialView]:
        return [view for view in self.trials if view.state is TrialState.RUNNING]

    def _ask(self) -> int | None:
        """Ask for new trials until one can run; returns its number. Trials with an invalid recipe count as failed."""
        while (number := len(self._state)) < self.num_trials:
            params = self._sampler.ask(number, [view.params for view in self.trials], self._answered())
            try:
                event = TrialAsked(trial=number, at_s=self._clock(), key=self.plan.key_of(params), params=params)
            except UserError as error:
                now = self._clock()
                refused = TrialFailed(trial=number, at_s=now, kind=FailureKind.USER_ERROR, message=str(error))
                self._write(TrialAsked(trial=number, at_s=now, key="", params=params), refused)
            else:
                self._write(event)
                return number
        return None

    def _answered(self) -> list[Answered]:
        """The ended trials, for the sampler."""
        return [
            Answered(params=view.params, value=view.value if view.state is not TrialState.FAILED else None)
            for view in self.trials
            if view.state is not TrialState.RUNNING
        ]

    def _judged(self, event: TrialTold) -> TrialStopped | None:
        verdict = self._climbed(event)
        is_at_end = event.epoch >= self.plan.epochs_of(self._state[event.trial].params)
        if verdict is None or verdict.goes_on or is_at_end:
            return None
        return TrialStopped(
            trial=event.trial,
            at_s=event.at_s,
            rung=event.epoch,
            cutoff=verdict.cutoff if verdict.cutoff is not None else math.inf,
            num_before=verdict.num_before,
        )

    def _climbed(self, event: TrialTold) -> RungVerdict | None:
        """What the ladder says of a value; None where the value says nothing of a rung, so that it is not kept there.

        A trial that was trained further before this search asked for it passed rungs without an evaluation. Its first
        value is of a later epoch, or of the end, and trials in the middle of their training would lose against it.
        """
        rung = max((rung for rung in self._rungs if rung <= event.epoch), default=math.inf)
        view = self._state[event.trial]
        first = min((*view.values, event.epoch))
        is_end = event.epoch >= self.plan.epochs_of(
            view.params
        )  # evaluated whenever it comes: before the next validation
        if first - rung >= self.plan.eval_every_of(view.params) or (is_end and event.epoch != rung):
            return None
        return self._ladder.judge(event.trial, event.epoch, event.value)

    def _value_of(self, metrics: Mapping[str, float]) -> float:
        value = metrics.get(self.plan.metric)
        if value is None:
            message = f"trials of {self.request.job} tell {sorted(metrics)}, but not {self.plan.metric}, which is "
            raise UserError(message + "minimised; choose another transfer.select_on")
        return value

    def _write(self, *events: SearchEvent) -> None:
        # First the log, then the state that follows from it: a crash in between loses nothing.
        self._log.append(events)
        for event in events:
            self._state = apply_search_event(self._state, event)
        self._show([event.trial for event in events])

    def _take(self, event: SearchEvent) -> None:
        """Apply an event of the log; the ladder takes the values of rungs. What was decided stands in the log."""
        self._state = apply_search_event(self._state, event)
        if isinstance(event, TrialTold):
            self._climbed(event)

    def _show(self, numbers: Sequence[int]) -> None:
        """Publish the trials for people and MLflow; an error must not end the search."""
        try:
            for number in dict.fromkeys(numbers):
                write_trial(self._store, self.request.key, _shown(self._state[number]), log=self._log.folder)
        except StorageError as error:
            _LOG.warning("trials of %s are not shown as they are: %s", self.request.job, error)


def _shown(view: TrialView) -> Trial:
    return Trial(
        number=view.number,
        params=view.params,
        state=view.state,
        started_s=view.asked_at_s,
        ended_s=view.ended_at_s,
        reason=view.reason,
        points=view.points,
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON knows no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
