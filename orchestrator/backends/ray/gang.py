"""Runs one attempt as a gang through Ray Train, and keeps what its workers say.

Ray Train starts the workers, places them and joins them into one process group. It never retries: what a failure means
is decided by our own policy alone, so every limit of its own is finite and zero where it can be.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.gang_shape import NODE_LABEL, GangShape
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
_COLLECTIVE_TIMEOUT_S = 600
"""A collective operation that waits longer for another rank fails; a rank that died is noticed at once."""
_START_TIMEOUT_S = 1e8
"""Three years: how long a gang waits for room is the runner's to decide, with one reservation, which stays pending."""
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
        self.room_node_ids: tuple[str, ...] = ()
        """Ray's ids of the nodes of its reservation, one per worker, once there is room."""
        self._room_at_s: float | None = None
        self._failures: list[JobFailure] = []
        self._processes: dict[int, LoggedProcess] = {}
        self._machines: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()

    def hear(self, rank: int, news: Mapping[str, Any]) -> None:
        """Take what a worker says: its progress, where it is, and why it failed."""
        self.got_room()
        with self._lock:
            if rank == 0 and "progress" in news:
                self.progress = Progress.from_json(news["progress"])
            self.placement_group = news.get("placement_group") or self.placement_group
            if "process" in news:
                self._processes[rank] = LoggedProcess.from_json(news["process"])
                self._machines[self._processes[rank].node_id] = news.get("machine", {})
            if "failure" in news:
                self._failures.append(JobFailure.from_json(news["failure"]))

    def got_room(self, node_ids: Sequence[str] = ()) -> None:
        """There is room for its workers now; where, if that is known. A later call may add where."""
        if self._room_at_s is None:
            self._room_at_s = time.monotonic()
        self.room_node_ids = self.room_node_ids or tuple(node_ids)

    @property
    def placed_for_s(self) -> float | None:
        """For how long there has been room for its workers; none = there has been none yet."""
        return None if self._room_at_s is None else time.monotonic() - self._room_at_s

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
        torch_config=TorchConfig(backend=settings.collectives or collectives(worker), timeout_s=_COLLECTIVE_TIMEOUT_S),
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
    if not lost and told is None and gang.placed_for_s is None:
        why = str(error).strip().partition("\n")[0]
        return no_room(request, gang.shape, f"Ray gave up its reservation: {redacted(why)}")
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


def no_room(request: JobRequest, shape: GangShape, why: str) -> JobFailure:
    """The end of a gang that never had room; nothing of it ran."""
    return JobFailure(
        attempt_id=request.attempt_id,
        key=request.key,
        kind=FailureKind.NO_ROOM,
        message=f"the gang of {request.job} had no room for its workers ({shape.num_workers} x {shape.worker}): {why}",
    )


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
