"""A study under Ray Tune. The only module of the control plane that imports ``ray.tune``, and only where it runs."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from ray import tune as ray_tune
from ray.tune import CheckpointConfig, FailureConfig, PlacementGroupFactory, RunConfig, TuneConfig, Tuner
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from orchestrator.backends.ray.gang import GangHome
from orchestrator.backends.ray.gang_shape import NODE_LABEL, GangShape
from orchestrator.backends.ray.search_desk import SearchDesk
from orchestrator.backends.ray.search_trial import News, TrialActor, TrialSetting
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Evaluation, JobFailure, JobResult
from orchestrator.core.units import GIB
from orchestrator.search.study import Study

_LOG = logging.getLogger(__name__)


def tune(study: Study, desk: SearchDesk, settings: RunnerSettings, home: GangHome, stop: threading.Event) -> None:
    """Run trials until the study is over, or ``stop`` is set and all of them have ended.

    Raises:
        OrchestratorError: what the study raised; its trials have ended.
    """
    driver = _Driver(study, desk, settings, home, stop)
    tuner = Tuner(
        ray_tune.with_resources(TrialActor, _reservation(desk.shape)),
        tune_config=TuneConfig(
            search_alg=_Searcher(driver),
            scheduler=_Scheduler(driver),
            num_samples=-1,  # the searcher says when there are no more
            max_concurrent_trials=desk.shape.num_workers,
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
    """What a trial holds, on one of the nodes that the scheduler counted on."""
    worker = shape.worker
    amounts = {"CPU": worker.cpus, "GPU": worker.gpus, "memory": worker.memory_gib * GIB}
    bundle = {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}
    if shape.node_ids:
        where = f"in({','.join(sorted(set(shape.node_ids)))})"
    elif shape.excluded_ids:
        where = f"!in({','.join(shape.excluded_ids)})"
    else:
        return PlacementGroupFactory([bundle])
    return PlacementGroupFactory([bundle], bundle_label_selector=[{NODE_LABEL: where}])


class _Driver:
    """Between Tune, whose callbacks come one at a time, and the study."""

    def __init__(
        self, study: Study, desk: SearchDesk, settings: RunnerSettings, home: GangHome, stop: threading.Event
    ) -> None:
        self._study, self._desk = study, desk
        self._settings, self._home, self._stop = settings, home, stop
        self._numbers: dict[str, int] = {}
        """Of the trials that run, by Tune's ids."""
        self.error: Exception | None = None
        self._show()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """What to run next: None while nothing can be asked for, ``FINISHED`` when nothing ever will."""
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
        self._desk.expect(task.number)
        setting = TrialSetting(
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

    def hear(self, trial_id: str, result: Mapping[str, Any]) -> str:
        """Take an evaluation; whether the trial goes on."""
        try:
            evaluation = Evaluation(**News.of(result).evaluation)
            goes_on = self._study.tell(self._numbers[trial_id], evaluation)
        except Exception as error:  # noqa: BLE001 - see suggest
            self._give_up(error)
            goes_on = False
        self._show()
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def end(self, trial_id: str, result: Mapping[str, Any] | None) -> None:
        """Take the end of an attempt at a trial; without a result it was cut off."""
        number = self._numbers.pop(trial_id, None)
        if number is None:
            return
        self._desk.forget(number)
        news = News.of(result) if result is not None else None
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
        """The first error counts; the trials are asked to stop, as the runner's line tells them."""
        _LOG.error("the search %s ends: %s", self._study.request.job, error)
        self.error = self.error or error
        self._stop.set()

    def _show(self) -> None:
        ended = [view for view in self._study.trials if view.ended_at_s is not None]
        self._desk.num_ended, self._desk.num_trials = len(ended), self._study.num_trials


class _Searcher(Searcher):
    """Tune's questions, answered by the driver. Never pickled: Tune's own snapshots are worth nothing to us."""

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
    """Trials in the order in which they were asked for; the driver says who goes on."""

    def __init__(self, driver: _Driver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._driver = driver

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:  # noqa: ANN401
        return self._driver.hear(trial.trial_id, result)


def _outcome_of(news: News) -> JobResult | JobFailure:
    document = dict(news.outcome)
    return JobResult.from_json(document) if "outcome" in document else JobFailure.from_json(document)
