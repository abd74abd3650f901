"""A study under Ray Tune, and the actor of a trial. Only this module imports ``ray.tune``, when it is used.

A trial's actor runs the data plane in a thread, which waits at every rung until Tune calls again.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

from ray import tune as ray_tune
from ray.tune import CheckpointConfig, FailureConfig, PlacementGroupFactory, RunConfig, Trainable, TuneConfig, Tuner
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.attempt_process import EntryPoint, attempt_place, retire_reason
from orchestrator.backends.ray.gang.mailbox import NODE_LABEL, GangHome, GangShape
from orchestrator.backends.ray.gang.worker import RunnerLine
from orchestrator.backends.ray.search.mailbox import TrialMailbox
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import (
    Evaluation,
    ExecutionContext,
    JobFailure,
    JobRequest,
    JobResult,
    Watch,
)
from orchestrator.core.units import GIB
from orchestrator.search.study import Study
from orchestrator.storage.layout import log_name

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Inputs of the actor of a trial."""

    number: int
    search: str
    """Name of the search job."""
    search_key: str
    search_attempt: str
    attempt_number: int
    """Of the search."""
    request: Mapping[str, Any]
    """Of the trial."""
    rungs: tuple[float, ...]
    probe: Mapping[str, Any]
    settings: Mapping[str, Any]
    runner: str
    namespace: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**{**document, "rungs": tuple(document["rungs"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialNews:
    """Result of one call of a trial's actor: an evaluation, or the end."""

    evaluation: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """A ``JobResult`` or ``JobFailure`` as JSON."""
    spent_s: float = 0.0

    def to_result(self) -> dict[str, Any]:
        """In the form that Tune passes on: one text, which Tune does not read."""
        return {"news": json.dumps(asdict(self)), "done": bool(self.outcome)}

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Self:
        """Inverse of ``to_result``."""
        return cls(**json.loads(result["news"]))


class _Permit(Enum):
    GO_ON = "go on"
    END = "end"


class TrialActor(Trainable):
    """One process that runs trials, one after the other."""

    def setup(self, config: dict[str, Any]) -> None:
        """See ``ray.tune.Trainable``."""
        self._run = _TrialRun(TrialRequest.from_json(json.loads(config["setting"])))

    def step(self) -> dict[str, Any]:
        """Go on to the next rung, or to the end."""
        return self._run.go_on().to_result()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take another trial, unless the last one may have broken this process."""
        self._run.end()
        if self._run.must_retire:
            return False
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """See ``ray.tune.Trainable``."""
        self._run.end()


class _TrialRun:
    """One attempt at a trial."""

    def __init__(self, setting: TrialRequest) -> None:
        self._setting = setting
        self._request = JobRequest.from_json(setting.request)
        self._news: queue.SimpleQueue[TrialNews] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[_Permit] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcome: JobResult | JobFailure | None = None

    @property
    def must_retire(self) -> bool:
        """Whether this process must not run another trial."""
        return isinstance(self._outcome, JobFailure) and bool(retire_reason(self._outcome))

    def go_on(self) -> TrialNews:
        """Let the trial continue, and wait for its next evaluation or its end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trial", daemon=True)
            self._thread.start()
        else:
            self._permits.put(_Permit.GO_ON)
        return self._news.get()

    def end(self) -> None:
        """Ask it to write a checkpoint and end, if it has not ended."""
        self._stop.set()
        self._permits.put(_Permit.END)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        started_s = time.monotonic()
        setting = self._setting
        try:
            with RunnerLine(setting.runner, setting.namespace, setting.search_attempt, setting.number) as line:
                self._outcome = self._execute(line)
        except BaseException as error:  # noqa: BLE001 - even SystemExit of a library is how a trial ended
            self._outcome = failure_from(error, self._request)
        self._news.put(TrialNews(outcome=self._outcome.to_json(), spent_s=time.monotonic() - started_s))

    def _execute(self, line: RunnerLine) -> JobResult:
        request, setting = self._request, self._setting
        settings = RunnerSettings.from_json(setting.settings)
        # Beside the logs of the search itself, whose rank is 0.
        rank = setting.number + 1
        name = log_name(request.sweep, setting.search, setting.attempt_number, rank, key=setting.search_key)
        with attempt_place(request, name, settings, folder="trial") as place:
            context = ExecutionContext(
                store=place.store,
                scratch=place.scratch,
                cache=place.cache,
                gpu_share=place.gpu_share,
                has_gpu=place.has_gpu,
                report=line.show,
                should_stop=lambda: self._stop.is_set() or line.must_stop.is_set(),
                watch=Watch(rungs=setting.rungs, tell=self._report, probe=setting.probe),
                activity=line.activity,
            )
            line.send({"process": place.process.to_json()})
            return EntryPoint(settings.entry_point).load()(request, context)

    def _report(self, evaluation: Evaluation) -> None:
        """Report an evaluation, and wait for the decision whether the trial continues; if not, it is asked to stop."""
        self._news.put(TrialNews(evaluation=asdict(evaluation), spent_s=evaluation.spent_s))
        if self._permits.get() is _Permit.END:
            self._stop.set()


def tune(study: Study, mailbox: TrialMailbox, settings: RunnerSettings, home: GangHome, stop: threading.Event) -> None:
    """Run trials until the study is over, or ``stop`` is set and all of them have ended.

    Raises:
        OrchestratorError: what the study raised; its trials have ended.
    """
    driver = _Driver(study, mailbox, settings, home, stop)
    tuner = Tuner(
        ray_tune.with_resources(TrialActor, _reservation(mailbox.shape)),
        tune_config=TuneConfig(
            search_alg=_Searcher(driver),
            scheduler=_Scheduler(driver),
            num_samples=-1,  # the searcher ends the search
            max_concurrent_trials=mailbox.shape.num_workers,
            reuse_actors=True,  # loading the data plane takes longer than many a trial
            trial_dirname_creator=lambda trial: str(trial.trial_id),
        ),
        run_config=RunConfig(
            name=study.request.attempt_id,
            storage_path=str(home.scratch),
            failure_config=FailureConfig(max_failures=0),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            verbose=0,
        ),
    )
    tuner.fit()
    if driver.error is not None:
        raise driver.error


def _reservation(shape: GangShape) -> PlacementGroupFactory:
    """Resources of a trial, on one of the nodes with which the scheduler planned, or on one of those that may come."""
    worker = shape.worker
    amounts = {"CPU": worker.cpus, "GPU": worker.gpus, "memory": worker.memory_gib * GIB}
    bundle = {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}
    if shape.node_ids:
        selector = {NODE_LABEL: f"in({','.join(sorted(set(shape.node_ids)))})"}
    else:
        avoided = {NODE_LABEL: f"!in({','.join(shape.excluded_ids)})"} if shape.excluded_ids else {}
        selector = {**shape.selector, **avoided}
    if not selector:
        return PlacementGroupFactory([bundle])
    return PlacementGroupFactory([bundle], bundle_label_selector=[selector])


class _Driver:
    """Connects Tune, which calls one callback at a time, with the study."""

    def __init__(
        self, study: Study, mailbox: TrialMailbox, settings: RunnerSettings, home: GangHome, stop: threading.Event
    ) -> None:
        self._study, self._mailbox = study, mailbox
        self._settings, self._home, self._stop = settings, home, stop
        self._numbers: dict[str, int] = {}
        """Numbers of the running trials by Tune's ids."""
        self.error: Exception | None = None
        self._show()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial: None while none can start, ``FINISHED`` when the study is over."""
        if self._stop.is_set() or self._study.is_over:
            return str(Searcher.FINISHED)
        try:
            task = self._study.next_task()
        except Exception as error:  # noqa: BLE001 - raised again once the trials have ended
            self._give_up(error)
            return str(Searcher.FINISHED)
        if task is None:
            return None
        self._numbers[trial_id] = task.number
        self._mailbox.expect(task.number)
        setting = TrialRequest(
            number=task.number,
            search=self._study.request.job,
            search_attempt=self._study.request.attempt_id,
            attempt_number=self._study.request.attempt_number,
            search_key=self._study.request.key,
            request=task.request.to_json(),
            rungs=task.rungs,
            probe=self._study.plan.watched_probe(self._study.request),
            settings=self._settings.to_json(),
            runner=self._home.runner,
            namespace=self._home.namespace,
        )
        return {"setting": json.dumps(setting.to_json())}

    def on_result(self, trial_id: str, result: Mapping[str, Any]) -> str:
        """Take an evaluation; returns whether the trial continues."""
        try:
            evaluation = Evaluation(**TrialNews.of(result).evaluation)
            goes_on = self._study.tell(self._numbers[trial_id], evaluation)
        except Exception as error:  # noqa: BLE001 - see suggest
            self._give_up(error)
            goes_on = False
        self._show()
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def end(self, trial_id: str, result: Mapping[str, Any] | None) -> None:
        """Take the end of an attempt at a trial; without a result the attempt was interrupted."""
        number = self._numbers.pop(trial_id, None)
        if number is None:
            return
        self._mailbox.forget(number)
        news = TrialNews.of(result) if result is not None else None
        try:
            if news is None:
                self._study.lose(number, "its worker died", is_fault=not self._stop.is_set())
            elif news.outcome:
                self._study.end(number, _outcome_of(news), news.spent_s)
            else:  # the study stopped it at a rung
                self._study.end_stopped(number)
        except Exception as error:  # noqa: BLE001 - see suggest
            self._give_up(error)
        self._show()

    def _give_up(self, error: Exception) -> None:
        """Keep the first error, and ask the trials to stop with their next report."""
        _LOG.error("the search %s ends: %s", self._study.request.job, error)
        self.error = self.error or error
        self._stop.set()

    def _show(self) -> None:
        ended = [view for view in self._study.trials if view.ended_at_s is not None]
        self._mailbox.num_ended, self._mailbox.num_trials = len(ended), self._study.num_trials


class _Searcher(Searcher):
    """Tune's searcher, which asks the driver. Never pickled: we do not use Tune's own snapshots."""

    def __init__(self, driver: _Driver) -> None:
        super().__init__()
        self._driver = driver

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def suggest(self, trial_id: str) -> Any:  # noqa: ANN401 - Tune's
        return self._driver.suggest(trial_id)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:  # noqa: FBT001, FBT002 - Tune's signature
        self._driver.end(trial_id, None if error else result)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: see above."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: see above."""


class _Scheduler(FIFOScheduler):
    """Tune's scheduler: trials run in the order in which they were created; the driver decides which continue."""

    def __init__(self, driver: _Driver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._driver = driver

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:  # noqa: ANN401
        return self._driver.on_result(trial.trial_id, result)


def _outcome_of(news: TrialNews) -> JobResult | JobFailure:
    document = dict(news.outcome)
    return JobResult.from_json(document) if "outcome" in document else JobFailure.from_json(document)
