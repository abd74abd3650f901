"""The actor of a trial: runs the data plane in a thread, which waits at every rung until Tune calls again."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

from ray.tune import Trainable

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.attempt import DEVICE_ERROR, EntryPoint
from orchestrator.backends.ray.gang_worker import RunnerLine
from orchestrator.backends.ray.log import AttemptLog
from orchestrator.backends.ray.settings import RunnerSettings, make_cache
from orchestrator.backends.ray.stacks import logged_process
from orchestrator.core.contract import (
    Evaluation,
    ExecutionContext,
    JobFailure,
    JobRequest,
    JobResult,
    Watch,
)
from orchestrator.core.errors import FailureKind
from orchestrator.storage.layout import log_name
from orchestrator.storage.open import open_store
from orchestrator.storage.scratch import scratch_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetting:
    """What the actor of a trial is told."""

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
class News:
    """What one call of a trial's actor brings: an evaluation, or the end."""

    evaluation: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """A ``JobResult`` or ``JobFailure`` as JSON."""
    spent_s: float = 0.0

    def to_result(self) -> dict[str, Any]:
        """As Tune carries it: one text, which it does not look into."""
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
        self._run = _TrialRun(TrialSetting.from_json(json.loads(config["setting"])))

    def step(self) -> dict[str, Any]:
        """Go on to the next rung, or to the end."""
        return self._run.go_on().to_result()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take another trial, unless the last one may have broken this process."""
        self._run.end()
        if self._run.is_poison:
            return False
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """See ``ray.tune.Trainable``."""
        self._run.end()


class _TrialRun:
    """One attempt at a trial."""

    def __init__(self, setting: TrialSetting) -> None:
        self._setting = setting
        self._request = JobRequest.from_json(setting.request)
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[_Permit] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcome: JobResult | JobFailure | None = None

    @property
    def is_poison(self) -> bool:
        """Whether this process must not run another trial."""
        outcome = self._outcome
        if not isinstance(outcome, JobFailure):
            return False
        told = f"{outcome.message}\n{outcome.traceback}"
        return outcome.kind is FailureKind.OUT_OF_MEMORY or bool(DEVICE_ERROR.search(told))

    def go_on(self) -> News:
        """Let the trial go on, and wait for what it says next."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trial", daemon=True)
            self._thread.start()
        else:
            self._permits.put(_Permit.GO_ON)
        return self._news.get()

    def end(self) -> None:
        """Have it write a checkpoint and end, if it has not."""
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
        self._news.put(News(outcome=self._outcome.to_json(), spent_s=time.monotonic() - started_s))

    def _execute(self, line: RunnerLine) -> JobResult:
        request, setting = self._request, self._setting
        settings = RunnerSettings.from_json(setting.settings)
        store = open_store(request.store_uri)
        # Beside the logs of the search itself, whose rank is 0.
        rank = setting.number + 1
        name = log_name(request.sweep, setting.search, setting.attempt_number, rank, key=setting.search_key)
        cache = make_cache()
        with scratch_folder("trial") as scratch:
            context = ExecutionContext(
                store=store,
                scratch=scratch,
                cache=cache,
                report=line.show,
                should_stop=lambda: self._stop.is_set() or line.must_stop.is_set(),
                watch=Watch(rungs=setting.rungs, tell=self._tell, probe=setting.probe),
            )
            log_path = scratch.with_suffix(".log")
            with AttemptLog(store, name, log_path, every_s=settings.log_every_s):
                line.tell({"process": logged_process(log_path, name).to_json()})
                try:
                    return EntryPoint(settings.entry_point).load()(request, context)
                except BaseException:
                    traceback.print_exc(file=sys.stderr)  # into the trial's log
                    raise

    def _tell(self, evaluation: Evaluation) -> None:
        """Say it, and wait until it is decided whether to go on; a trial that must not is asked to stop."""
        self._news.put(News(evaluation=asdict(evaluation), spent_s=evaluation.spent_s))
        if self._permits.get() is _Permit.END:
            self._stop.set()
