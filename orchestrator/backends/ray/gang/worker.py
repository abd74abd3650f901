"""Code of each worker of a gang: it executes the attempt as one rank, and exchanges reports with the gang's runner."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.attempt_process import EntryPoint, attempt_place
from orchestrator.backends.ray.code_digest import own_digest
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.activity import RankActivity
from orchestrator.core.contract import ExecutionContext, JobFailure, JobRequest, Progress
from orchestrator.core.errors import FailureKind, OrchestratorError, StorageError
from orchestrator.core.security import redaction
from orchestrator.metrics.attempts import AttemptMetrics
from orchestrator.metrics.machine import describe_machine, gpu_uuids
from orchestrator.storage.layout import flight_record_name, log_name
from orchestrator.storage.protocol import ObjectStore

COLLECTIVE_TIMEOUT_S = 1800.0
"""NCCL's and gloo's own limit, once ranks have joined; a rank that died is noticed at once. Far above the limits of
``hangs`` and of the controller, which also know which rank is late, and whether it waits for the store."""


EXCHANGE_EVERY_S, OTHERS_EXCHANGE_EVERY_S = 0.5, 10.0
"""Seconds between reports of rank 0, which carries the gang's progress and learns of a stop; the other ranks learn of
it at their next vote."""
_EXCHANGE_TIMEOUT_S = 30.0
TOLERATED_S = 120.0
"""A runner that answers no call for so long counts as lost. Single calls may fail with the network."""
_AGAIN_AFTER_S = 1.0
_LOG = logging.getLogger(__name__)


def work(config: Mapping[str, Any]) -> dict[str, Any]:
    """One rank of the attempt in ``config``; returns its ``JobResult`` as JSON. Ray Train calls it in every worker."""
    from ray import train

    redaction.install()
    place = train.get_context()
    rank, world_size = place.get_world_rank(), place.get_world_size()
    request = JobRequest.from_json(config["request"])
    settings = RunnerSettings.from_json(config["settings"])
    every_s = exchange_every_s(rank)
    with RunnerLine(config["runner"], config["namespace"], request.attempt_id, rank, every_s=every_s) as line:
        try:
            return _execute(request, settings, line, rank, world_size)
        except Exception as error:
            line.report_failure(failure_from(error, request))
            raise


def exchange_every_s(rank: int) -> float:
    """Seconds between two calls of a rank to the gang's runner."""
    return OTHERS_EXCHANGE_EVERY_S if rank else EXCHANGE_EVERY_S


def _execute(
    request: JobRequest, settings: RunnerSettings, line: RunnerLine, rank: int, world_size: int
) -> dict[str, Any]:
    metrics = AttemptMetrics(request)

    def show(progress: Progress) -> None:
        line.show(metrics.complete(progress))
        metrics.show(progress)

    def report_failure(error: BaseException) -> None:
        # Reported at once, before the rank leaves its gang, its log is stored and Ray Train notices: the end of one
        # rank makes others fail too, and Ray Train then ends them all. A rank that is made to exit reports no failure.
        if isinstance(error, Exception):
            line.report_failure(failure_from(error, request))

    line.activity.on_failure = report_failure
    name = log_name(request.sweep, request.job, request.attempt_number, rank, key=request.key)
    with attempt_place(request, name, settings, on_error=report_failure) as place:
        context = ExecutionContext(
            store=place.store,
            scratch=place.scratch,
            cache=place.cache,
            gpu_share=place.gpu_share,
            has_gpu=place.has_gpu,
            report=show,
            should_stop=line.must_stop.is_set,
            rank=rank,
            world_size=world_size,
            activity=line.activity,
            collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        )
        line.store_record = partial(_store_record, place.store, name)
        line.send({"process": place.process.to_json(), "machine": describe_machine()})
        return EntryPoint(settings.entry_point).load()(request, context).to_json()


class OtherCodeError(OrchestratorError):
    """A worker runs other code than its gang; the runner keeps its report and blames the node."""

    failure_kind = FailureKind.NODE_LOST


class RunnerLine:
    """A thread that reports this rank's progress to the runner, and asks whether it must stop."""

    def __init__(
        self, runner: str, namespace: str, attempt_id: str, rank: int, *, every_s: float = EXCHANGE_EVERY_S
    ) -> None:
        self.must_stop = threading.Event()
        self._runner: Any = ray.get_actor(runner, namespace=namespace)
        self._attempt_id, self._rank, self._every_s = attempt_id, rank, every_s
        self._progress = Progress(phase="starting")
        self._unsent: dict[str, Any] = {}
        self._sending = threading.Lock()
        self._answered_at_s = time.monotonic()
        self._refusal = ""
        self._has_failed = False
        self.activity = RankActivity()
        self.store_record: Callable[[Mapping[str, Any]], None] | None = None
        """Stores a flight record beside the rank's log."""
        self._recorder: threading.Thread | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report_until_end, name="gang-line", daemon=True)

    def __enter__(self) -> Self:
        """Register this rank with the runner.

        Raises:
            OtherCodeError: this process runs other code than the others.
        """
        news = {"placement_group": _placement_group(), "digest": own_digest(), "place": _place()}
        while not self.send(news) and not self._is_given_up:
            time.sleep(_AGAIN_AFTER_S)  # nothing is trained before the answer: code of two versions must not mix
        if self._refusal:
            raise OtherCodeError(self._refusal)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None:
            self.activity.end()
            self.send({"activity": self.activity.to_json()})

    def show(self, progress: Progress) -> None:
        """Remember the newest progress; the next exchange reports it."""
        self._progress = progress

    def tell(self) -> None:
        """Report the newest progress, and what this rank does."""
        self.send({"progress": self._progress.to_json(), "activity": self.activity.to_json()})

    def send(self, news: Mapping[str, Any]) -> bool:
        """Report to the runner, and take its answer; lost reports are sent again with the next one.

        The rank must stop if the runner is dead, has not answered for ``TOLERATED_S`` or does not know this attempt.
        Returns whether the runner answered.
        """
        with self._sending:
            self._unsent.update(news)
            try:
                call = self._runner.exchange.remote(self._attempt_id, self._rank, dict(self._unsent))
                answer = ray.get(call, timeout=_EXCHANGE_TIMEOUT_S)
            except RayError as error:
                self._on_no_answer(error)
                return False
            self._unsent.clear()
            self._answered_at_s = time.monotonic()
        self._refusal = answer.get("refusal", "")
        if answer["stop"]:
            self.must_stop.set()
        if not answer.get("flight_record"):
            self._recorder = None
        elif self._recorder is None:
            # In a thread of its own: torch may block while a device hangs, and this thread must keep reporting.
            self._recorder = threading.Thread(target=self._record, name="flight-record", daemon=True)
            self._recorder.start()
        return True

    def report_failure(self, failure: JobFailure) -> None:
        """Report why this rank ends, once; repeat the call until the runner answers or counts as lost."""
        if self._has_failed:
            return
        self._has_failed = True
        while not self.send({"failure": failure.to_json()}) and not self._is_given_up:
            time.sleep(_AGAIN_AFTER_S)

    @property
    def _is_given_up(self) -> bool:
        return time.monotonic() - self._answered_at_s >= TOLERATED_S

    def _on_no_answer(self, error: RayError) -> None:
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            self._answered_at_s = -math.inf
        if self._is_given_up:
            _LOG.warning("the gang's runner is gone, so rank %d stops: %s", self._rank, error)
            self.must_stop.set()
        else:
            silent_s = time.monotonic() - self._answered_at_s
            message = "the gang's runner has not answered rank %d for %.0f s (%g s are tolerated): %s"
            _LOG.warning(message, self._rank, silent_s, TOLERATED_S, error)

    def _report_until_end(self) -> None:
        while not self._ended.wait(self._every_s):
            self.tell()

    def _record(self) -> None:
        """Store torch's record of this rank's collective operations, and report a summary to the runner."""
        read, store = self.activity.flight_record, self.store_record
        record = read() if read is not None else {}
        if record and store is not None:
            store(record)
            self.send({"flight_record": {"pg_status": record.get("pg_status", {})}})


def _store_record(store: ObjectStore, log: str, record: Mapping[str, Any]) -> None:
    try:
        store.put(flight_record_name(log), json.dumps(record, indent=1).encode())
    except StorageError as error:
        _LOG.warning("the flight record of this rank was not stored: %s", error)


def _place() -> dict[str, Any]:
    """The node and GPUs of this worker, which a failure has to name."""
    context = ray.get_runtime_context()
    return {"node_id": context.get_node_id(), "gpus": gpu_uuids(context.get_accelerator_ids().get("GPU", ()))}


def _placement_group() -> str:
    group = ray.util.get_current_placement_group()
    return group.id.hex() if group is not None else ""
