"""Runs one attempt as a gang through Ray Train, and reports why it failed.

Ray Train starts the workers, places them and joins them into one process group. It never retries: only our own
failure policy decides, so all of Ray Train's limits are finite, and zero where possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from orchestrator.backends.classify import failure_from
from orchestrator.backends.protocol import PLACING_WORKERS
from orchestrator.backends.ray.capacity import HEAD_RESOURCE
from orchestrator.backends.ray.deaths import Death, Ended, death_of
from orchestrator.backends.ray.gang.mailbox import NODE_LABEL, GangHome, GangMailbox, GangShape
from orchestrator.backends.ray.gang.worker import work
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.security.redaction import redacted
from orchestrator.core.units import GIB

if TYPE_CHECKING:
    from ray.train.v2.api.callback import RayTrainCallback
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.torch.torch_trainer import TorchTrainer

_JOIN_TIMEOUT_S = 300
"""Ranks that have not joined their process group within this time fail."""
_START_TIMEOUT_S = 1e8
"""Three years: the runner decides how long a gang waits for resources; its one reservation stays pending."""
_START_ATTEMPTS = 3
_CLEANER = "PlacementGroupCleanerCallback"
_COORDINATOR = "AutoscalingCoordinator"
"""Ray's name and namespace of this actor."""
_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # so that the dashboard's API lists gangs
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{_START_TIMEOUT_S:g}",
    # It is a process of each gang on any node, which stays up for it; the controller follows nodes that leave.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


def run_gang(
    request: JobRequest, gang: GangMailbox, settings: RunnerSettings, home: GangHome
) -> JobResult | JobFailure:
    """Run an attempt on all its workers, to the end; blocks."""
    from ray.train.v2.api.exceptions import TrainingFailedError

    os.environ.update(_ENVIRONMENT)
    _start_coordinator()
    try:
        result = _trainer(request, gang.shape, settings, home).fit()
    except TrainingFailedError as error:
        return _failure(error, gang, request)
    return JobResult.from_json(result.return_value)


def _start_coordinator() -> None:
    """Start Ray's coordinator of requests for nodes on the head, for all gangs.

    Ray Train starts it where the first gang runs, for good: that node would never become idle, and so never be removed.
    """
    import ray
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator

    actor = getattr(coordinator, "_AutoscalingCoordinatorActor", None)
    if actor is None:  # a later Ray does it in another way
        return
    remote: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(actor)
    remote.options(
        name=_COORDINATOR,
        namespace=_COORDINATOR,
        get_if_exists=True,
        lifetime="detached",
        resources={HEAD_RESOURCE: 0.001},
    ).remote()


def collectives(worker: Resources) -> str:
    """The backend of ``torch.distributed``: NCCL for tensors on GPUs, and gloo for values on the hosts.

    Ray Train's own choice with GPUs is NCCL alone, which refuses every tensor that is not on one.
    """
    return "cpu:gloo,cuda:nccl" if worker.gpus else "gloo"


def _trainer(request: JobRequest, shape: GangShape, settings: RunnerSettings, home: GangHome) -> Any:  # noqa: ANN401
    from ray.train.torch import TorchConfig
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig  # ray.train's own, with types

    worker = shape.worker
    resources = {"CPU": worker.cpus, "memory": worker.memory_gib * GIB} | ({"GPU": worker.gpus} if worker.gpus else {})
    return trainer_class()(
        cast("Callable[[dict[Any, Any]], None]", work),  # Ray's type has no return value, but its Result has
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


def trainer_class() -> type[TorchTrainer]:
    """Ray Train's trainer without its placement group cleaner.

    The cleaner is a process on the head for each gang (https://github.com/ray-project/ray/issues/65443), and the gang
    waits for it at its start and at its end. Ray 2.60 leaves it there when the gang's Ray Train controller is killed.
    ``placement_groups`` gives back what a dead gang has reserved.
    """
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    class _Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[RayTrainCallback]:
            # By its name: where a later Ray has no such class, gangs still start.
            return [one for one in super()._create_default_callbacks() if type(one).__name__ != _CLEANER]

    return _Trainer


def _selectors(shape: GangShape) -> list[dict[str, str]] | dict[str, str] | None:
    """The node of each worker, or the nodes that all workers avoid."""
    if len(shape.node_ids) == shape.num_workers:
        return [{NODE_LABEL: node_id} for node_id in shape.node_ids]
    avoided = {NODE_LABEL: f"!in({','.join(shape.excluded_ids)})"} if shape.excluded_ids else {}
    return {**shape.selector, **avoided} or None


def _failure(error: TrainingFailedError, gang: GangMailbox, request: JobRequest) -> JobFailure:
    reported, cause, lost = gang.primary_failure(), gang.known_cause(), _lost_workers(error)
    # A node that died, or a process out of memory, explains later failures of the survivors, whatever their message.
    is_explained = any(death.ended is Ended.NODE or death.kind is FailureKind.OUT_OF_MEMORY for death in lost.values())
    if cause is not None and not (cause.kind is FailureKind.UNKNOWN and is_explained):
        return cause
    if not lost and reported is None and gang.placed_for_s is None:
        why = str(error).strip().partition("\n")[0]
        return no_room(request, gang.shape, f"Ray gave up its reservation: {redacted(why)}")
    if lost or gang.progress.phase == PLACING_WORKERS:
        what = (
            f"lost {', '.join(f'worker {rank} ({death.description})' for rank, death in lost.items())}"
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
    return reported or failure_from(error, request)


def no_room(request: JobRequest, shape: GangShape, why: str) -> JobFailure:
    """The failure of a gang that never got its resources; nothing of it ran."""
    return JobFailure(
        attempt_id=request.attempt_id,
        key=request.key,
        kind=FailureKind.NO_ROOM,
        message=f"the gang of {request.job} had no room for its workers ({shape.num_workers} x {shape.worker}): {why}",
    )


def _lost_workers(error: TrainingFailedError) -> dict[int, Death]:
    """Workers whose process or node died, by rank; empty if all of them ended by themselves."""
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

    found: dict[int, Death] = {}
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    for rank, one in sorted(failures.items()):
        cause = one.health_check_failure if isinstance(one, WorkerHealthCheckFailedError) else one
        if isinstance(cause, RayActorError):
            found[rank] = death_of(cause)
        elif isinstance(one, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError):
            found[rank] = Death(description=str(one).strip().partition("\n")[0])
    return found


def _dead_rank(lost: Mapping[int, Death], gang: GangMailbox) -> int | None:
    """The rank whose node explains why workers were lost; None if workers of several nodes died in the same way.

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
