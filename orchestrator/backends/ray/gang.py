"""Runs one attempt as a gang through Ray Train, and keeps what its workers say.

Ray Train starts the workers, places them and joins them into one process group. It never retries: what a failure means
is decided by our own policy alone, so every limit of its own is finite and zero where it can be.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.deaths import Death, Ended, death_of
from orchestrator.backends.ray.digest import current_digests
from orchestrator.backends.ray.gang_shape import NODE_LABEL, GangShape
from orchestrator.backends.ray.hangs import HeardRank
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.ray.stacks import LoggedProcess
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.security.redaction import redacted
from orchestrator.core.units import GIB
from orchestrator.state.failure_policy import signature_of

if TYPE_CHECKING:
    from ray.train.v2.api.exceptions import TrainingFailedError

PLACING = "placing workers"
"""Phase of a gang whose workers are not all up."""
_JOIN_TIMEOUT_S = 300
"""Ranks that do not find each other in this time fail."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""NCCL's and gloo's own limit, once ranks have joined; a rank that died is noticed at once. Far above the limits of
``hangs`` and of the controller, which know who is waited for, and that a rank may wait for the store."""
_START_TIMEOUT_S = 1e8
"""Three years: how long a gang waits for room is the runner's to decide, with one reservation, which stays pending."""
_START_ATTEMPTS = 3
_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # so that the dashboard's interface tells of gangs
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{_START_TIMEOUT_S:g}",
}
# Who names a cause explains the gang's end, a known one before an unknown one; who only lost sight of others does not.
_DISTANCE = {FailureKind.UNKNOWN: 2, FailureKind.NODE_LOST: 3}
_NAMES_NOBODY = frozenset({FailureKind.NODE_LOST, FailureKind.PREEMPTED, FailureKind.NUMERICS})
"""Failures that each rank sees alike, whoever is at fault, unless the text blames a node or names a rank."""


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
        self.digest = ""
        """Of the code that all workers run; empty = none has been admitted."""
        self._failures: list[JobFailure] = []
        self._places: dict[int, _Place] = {}
        self._processes: dict[int, LoggedProcess] = {}
        self._machines: dict[str, Mapping[str, Any]] = {}
        self._ranks: dict[int, HeardRank] = {}
        self._records: dict[int, Mapping[str, Any]] = {}
        self.wants_records = False
        """Whether each rank shall store its flight record."""
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
            if "place" in news:
                self._places[rank] = _Place(node_id=news["place"]["node_id"], gpus=tuple(news["place"]["gpus"]))
            if "activity" in news:
                place = self._processes.get(rank)
                node_id = "" if place is None else place.node_id
                self._ranks[rank] = HeardRank.of(rank, node_id, news["activity"], time.monotonic())
            if "flight_record" in news:
                self._records[rank] = news["flight_record"]
        if "failure" in news:
            self.fail(rank, JobFailure.from_json(news["failure"]))

    def fail(self, rank: int, failure: JobFailure) -> None:
        """Keep why a worker ended, or must not begin."""
        with self._lock:
            self._failures.append(self._blamed(rank, failure))

    def admits(self, digest: str, own: str) -> bool:
        """Whether a worker's code is that of the others; ``own`` is the runner's. The first worker decides."""
        with self._lock:
            if not self.digest and (digest == own or digest in current_digests(own)):
                self.digest = digest
            return bool(self.digest) and digest == self.digest

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
        """The first failure that blames a node; else the first that names a cause; else what was told first."""
        with self._lock:
            return min(self._failures, key=_distance, default=None)

    def known_cause(self) -> JobFailure | None:
        """What a worker has said of why the gang ends, where that is more than the loss of another one."""
        told = self.primary_failure()
        return None if told is None or (told.kind is FailureKind.NODE_LOST and not _blames_node(told)) else told

    def node_of(self, rank: int) -> str:
        """Ray's id of a worker's node, also once it is gone; empty for one that has not said where it is."""
        place = self._places.get(rank)
        return place.node_id if place else ""

    def located(self, failure: JobFailure, rank: int) -> JobFailure:
        """The failure with the place of the rank that is at fault."""
        place = self._places.get(rank, _Place())
        return replace(failure, rank=rank, node_id=place.node_id, gpus=place.gpus)

    def _blamed(self, teller: int, failure: JobFailure) -> JobFailure:
        if failure.rank is not None:
            return self.located(failure, failure.rank)
        if failure.kind in _NAMES_NOBODY and not _blames_node(failure):
            return failure
        return self.located(failure, teller)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a worker runs."""

    node_id: str = ""
    gpus: tuple[str, ...] = ()


def _blames_node(failure: JobFailure) -> bool:
    found = signature_of(failure.message)
    return found is not None and found.blames_node


def _distance(failure: JobFailure) -> int:
    """How far a failure is from the cause of the gang's end."""
    return 0 if _blames_node(failure) else _DISTANCE.get(failure.kind, 1)


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
    told, cause, lost = gang.primary_failure(), gang.known_cause(), _lost_workers(error)
    # A node that died, or a process without memory, explains what survivors fail of afterwards, whatever they call it.
    is_explained = any(death.ended is Ended.NODE or death.kind is FailureKind.OUT_OF_MEMORY for death in lost.values())
    if cause is not None and not (cause.kind is FailureKind.UNKNOWN and is_explained):
        return cause
    if not lost and told is None and gang.placed_for_s is None:
        why = str(error).strip().partition("\n")[0]
        return no_room(request, gang.shape, f"Ray gave up its reservation: {redacted(why)}")
    if lost or gang.progress.phase == PLACING:
        what = (
            f"lost {', '.join(f'worker {rank} ({death.told})' for rank, death in lost.items())}"
            if lost
            else f"could not place its workers ({gang.shape.num_workers} x {gang.shape.worker})"
        )
        message = f"the gang of {request.job} {what}; it starts again from its newest checkpoint"
        rank = _dead_rank(lost, gang)
        is_memory = rank is not None and lost[rank].kind is FailureKind.OUT_OF_MEMORY
        failure = JobFailure(
            attempt_id=request.attempt_id,
            key=request.key,
            kind=FailureKind.OUT_OF_MEMORY if is_memory else FailureKind.NODE_LOST,
            message=message,
            traceback=redacted(str(error)),
        )
        return failure if rank is None else gang.located(failure, rank)
    return told or failure_from(error, request)


def no_room(request: JobRequest, shape: GangShape, why: str) -> JobFailure:
    """The end of a gang that never had room; nothing of it ran."""
    return JobFailure(
        attempt_id=request.attempt_id,
        key=request.key,
        kind=FailureKind.NO_ROOM,
        message=f"the gang of {request.job} had no room for its workers ({shape.num_workers} x {shape.worker}): {why}",
    )


def _lost_workers(error: TrainingFailedError) -> dict[int, Death]:
    """Workers whose process or node went away, by rank; empty if all of them ended by themselves."""
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

    found: dict[int, Death] = {}
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    for rank, one in sorted(failures.items()):
        cause = one.health_check_failure if isinstance(one, WorkerHealthCheckFailedError) else one
        if isinstance(cause, RayActorError):
            found[rank] = death_of(cause)
        elif isinstance(one, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError):
            found[rank] = Death(told=str(one).strip().partition("\n")[0])
    return found


def _dead_rank(lost: Mapping[int, Death], gang: Gang) -> int | None:
    """The rank whose node explains why workers were lost; None where those of several nodes went in the same way.

    One that ran out of memory, or whose whole node died, comes before the others: NCCL ends the processes of all ranks
    that wait for a dead one, on innocent nodes too.
    """
    causes: tuple[Callable[[Death], bool], ...] = (
        lambda death: death.kind is FailureKind.OUT_OF_MEMORY,
        lambda death: death.ended is Ended.NODE,
        lambda death: death.ended is Ended.PROCESS,
        lambda _: True,
    )
    for is_cause in causes:
        ranks = [rank for rank, death in lost.items() if is_cause(death)]
        if ranks:
            return min(ranks) if len({gang.node_of(rank) for rank in ranks}) == 1 else None
    return None
