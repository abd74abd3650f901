"""Runs one attempt as a gang through Ray Train, and keeps what its workers say.

Ray Train starts the workers, places them and joins them into one process group. It never retries: what a failure means
is decided by our own policy alone, so every limit of its own is finite and zero where it can be.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.gang_shape import NODE_LABEL, GangShape
from orchestrator.backends.ray.hangs import HeardRank
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.ray.stacks import LoggedProcess
from orchestrator.contract import JobFailure, JobRequest, JobResult, Progress, Resources
from orchestrator.errors import FailureKind
from orchestrator.security.redaction import redacted
from orchestrator.units import GIB

if TYPE_CHECKING:
    from ray.train.v2.api.exceptions import TrainingFailedError

PLACING = "placing workers"
"""Phase of a gang whose workers are not all up."""
_JOIN_TIMEOUT_S = 300
"""Ranks that do not find each other in this time fail."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""NCCL's and gloo's own limit, once ranks have joined; a rank that died is noticed at once. Far above the limits of
``hangs`` and of the controller, which know who is waited for, and that a rank may wait for the store."""
_START_TIMEOUT_S = 60.0
_START_ATTEMPTS = 3
_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # so that the dashboard's interface tells of gangs
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{_START_TIMEOUT_S:g}",
}
# A worker that could name a cause explains the gang's end; one that only lost sight of the others does not.
_DISTANCE = {FailureKind.UNKNOWN: 1, FailureKind.NODE_LOST: 2}
_SECONDARY = frozenset(_DISTANCE)


class Gang:
    """Mailbox between the workers of one attempt and its runner; use from any thread."""

    def __init__(self, shape: GangShape) -> None:
        self.shape = shape
        self.progress = Progress(phase=PLACING)
        self.placement_group = ""
        """Id of the gang's reservation, hexadecimal, once its first worker is up."""
        self._failures: list[JobFailure] = []
        self._processes: dict[int, LoggedProcess] = {}
        self._machines: dict[str, Mapping[str, Any]] = {}
        self._ranks: dict[int, HeardRank] = {}
        self._records: dict[int, Mapping[str, Any]] = {}
        self.wants_records = False
        """Whether each rank shall store its flight record."""
        self._lock = threading.Lock()

    def hear(self, rank: int, news: Mapping[str, Any]) -> None:
        """Take what a worker says: its progress, where it is, and why it failed."""
        with self._lock:
            if rank == 0 and "progress" in news:
                self.progress = Progress.from_json(news["progress"])
            self.placement_group = news.get("placement_group") or self.placement_group
            if "process" in news:
                self._processes[rank] = LoggedProcess.from_json(news["process"])
                self._machines[self._processes[rank].node_id] = news.get("machine", {})
            if "activity" in news:
                place = self._processes.get(rank)
                node_id = "" if place is None else place.node_id
                self._ranks[rank] = HeardRank.of(rank, node_id, news["activity"], time.monotonic())
            if "flight_record" in news:
                self._records[rank] = news["flight_record"]
            if "failure" in news:
                self._failures.append(JobFailure.from_json(news["failure"]))

    @property
    def ranks(self) -> dict[int, HeardRank]:
        """What each rank has said last of what it does."""
        with self._lock:
            return dict(self._ranks)

    @property
    def flight_records(self) -> dict[int, Mapping[str, Any]]:
        """What is known of the flight records that ranks have stored."""
        with self._lock:
            return dict(self._records)

    @property
    def logged(self) -> list[LoggedProcess]:
        """The workers that are up, by rank."""
        with self._lock:
            return [process for _, process in sorted(self._processes.items())]

    @property
    def machines(self) -> dict[str, Mapping[str, Any]]:
        """What the workers' nodes are, by Ray's ids; those of workers that are gone included."""
        with self._lock:
            return dict(self._machines)

    def primary_failure(self) -> JobFailure | None:
        """The first failure that names a cause of its own; else the first that is not about another rank."""
        with self._lock:
            return min(self._failures, key=lambda failure: _DISTANCE.get(failure.kind, 0), default=None)


def run_gang(request: JobRequest, gang: Gang, settings: RunnerSettings, home: GangHome) -> JobResult | JobFailure:
    """Run an attempt on all its workers, to the end; blocks."""
    from ray.train.v2.api.exceptions import TrainingFailedError

    os.environ.update(_ENVIRONMENT)
    try:
        result = _trainer(request, gang.shape, settings, home).fit()
    except TrainingFailedError as error:
        return _failure(error, gang, request)
    return JobResult.from_json(result.return_value)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangHome:
    """Where a gang's workers find their runner, and a folder for what Ray Train wants to write."""

    runner: str
    namespace: str
    scratch: Path


def collectives(worker: Resources) -> str:
    """What joins the ranks: tensors on GPUs through NCCL, and numbers that the hosts agree on through gloo.

    Ray Train's own choice with GPUs is NCCL alone, which refuses every tensor that is not on one.
    """
    return "cpu:gloo,cuda:nccl" if worker.gpus else "gloo"


def _trainer(request: JobRequest, shape: GangShape, settings: RunnerSettings, home: GangHome) -> Any:  # noqa: ANN401
    from ray.train.torch import TorchConfig
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig  # ray.train's own, with types
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    from orchestrator.backends.ray.gang_worker import work

    worker = shape.worker
    resources = {"CPU": worker.cpus, "memory": worker.memory_gib * GIB} | ({"GPU": worker.gpus} if worker.gpus else {})
    return TorchTrainer(
        cast("Callable[[dict[Any, Any]], None]", work),  # Ray's type knows no return value, its Result does
        train_loop_config={
            "request": request.to_json(),
            "settings": settings.to_json(),
            "runner": home.runner,
            "namespace": home.namespace,
        },
        torch_config=TorchConfig(backend=settings.collectives or collectives(worker), timeout_s=_JOIN_TIMEOUT_S),
        scaling_config=ScalingConfig(
            num_workers=shape.num_workers,
            use_gpu=worker.gpus > 0,
            resources_per_worker={name: amount for name, amount in resources.items() if amount},
            placement_strategy="PACK",
            label_selector=_selectors(shape),
        ),
        run_config=RunConfig(
            name=request.attempt_id,
            storage_path=str(home.scratch),
            failure_config=FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=_START_ATTEMPTS
            ),
        ),
    )


def _selectors(shape: GangShape) -> list[dict[str, str]] | dict[str, str] | None:
    """Which node each worker goes to, or which ones all of them avoid."""
    if len(shape.node_ids) == shape.num_workers:
        return [{NODE_LABEL: node_id} for node_id in shape.node_ids]
    avoided = {NODE_LABEL: f"!in({','.join(shape.excluded_ids)})"} if shape.excluded_ids else {}
    return {**shape.selector, **avoided} or None


def _failure(error: TrainingFailedError, gang: Gang, request: JobRequest) -> JobFailure:
    told = gang.primary_failure()
    if told is not None and told.kind not in _SECONDARY:
        return told
    lost = _lost_workers(error)
    if lost or gang.progress.phase == PLACING:
        what = (
            f"lost {lost}" if lost else f"could not place its workers ({gang.shape.num_workers} x {gang.shape.worker})"
        )
        message = f"the gang of {request.job} {what}; it starts again from its newest checkpoint"
        return JobFailure(
            attempt_id=request.attempt_id,
            key=request.key,
            kind=FailureKind.NODE_LOST,
            message=message,
            traceback=redacted(str(error)),
        )
    return told or failure_from(error, request)


def _lost_workers(error: TrainingFailedError) -> str:
    """Workers whose process or node went away, as text; empty if all of them ended by themselves."""
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

    gone = (RayActorError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    lost = [
        f"worker {rank} ({str(one).strip().partition(chr(10))[0]})"
        for rank, one in sorted(failures.items())
        if isinstance(one, gone)
    ]
    return ", ".join(lost)
