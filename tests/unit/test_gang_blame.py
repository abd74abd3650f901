"""Who is at fault when a gang ends: of what its ranks say and of what Ray lost, with Ray's own exceptions and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2.api.exceptions import WorkerGroupError

from orchestrator.backends.classify import failure_from
from orchestrator.backends.protocol import AttemptReport, AttemptStatus
from orchestrator.backends.ray.gang import train as gang_module
from orchestrator.backends.ray.gang.mailbox import GangHome, GangMailbox, GangShape
from orchestrator.backends.ray.gang.train import run_gang
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.attempt_outcomes import judge_report
from orchestrator.core.contract import JobFailure, Resources
from orchestrator.core.errors import FailureKind, NumericsError, PreemptedError
from orchestrator.state.events import AttemptFailed
from orchestrator.state.failure_policy import signature_of
from orchestrator.state.snapshot import Attempt
from orchestrator.testing.memory_store import MemoryStore
from tests.integration.ray_jobs import job, request
from workloads.runtime.ranks import PeerLostError

NUM_RANKS = 16
"""On eight nodes, two each."""
_BEGINNING = "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n"
_CRASHED = _BEGINNING + (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed."
)
_NODE_DIED = _BEGINNING + (
    "The actor died because its node has died. Node Id: 8ba2c0ffee\n\tthe actor's node was terminated unexpectedly: "
    "health check failed due to missing too many heartbeats"
)
_MONITOR = _BEGINNING + "Task was killed due to the node running low on memory.\nMemory on the node was 62.1GB / 64.0GB"
ECC = dist.DistBackendError(
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.30.7\nncclUnhandledCudaError: Call "
    "to CUDA function failed.\nLast error:\nCuda failure 214 'uncorrectable ECC error encountered'"
)
PEER = PeerLostError("rank 0 of 16 lost another rank during a sum; the attempt cannot go on without it")
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def died(text: str = _CRASHED) -> WorkerHealthCheckFailedError:
    """As Ray Train tells of a worker that it could not ask any more."""
    error = ActorDiedError()
    error.error_msg = text
    return WorkerHealthCheckFailedError("A worker health check failed.", error)


class _Trainer:
    def __init__(self, error: WorkerGroupError) -> None:
        self._error = error

    def fit(self) -> None:
        raise self._error


def outcome_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    told: Mapping[int, Exception],
    lost: Mapping[int, Exception] | None = None,
) -> JobFailure:
    """What becomes of a gang whose ranks say and lose this, in the order of ``told``."""
    attempt = request(MemoryStore(), job("gang"), num_workers=NUM_RANKS)
    gang = GangMailbox(GangShape(num_workers=NUM_RANKS, total=Resources(cpus=16.0, gpus=16.0)))
    for rank in range(NUM_RANKS):
        gang.on_report(rank, {"place": {"node_id": f"node{rank // 2}", "gpus": [f"GPU-{rank:04d}"]}})
    gang.on_report(0, {"progress": {"phase": "train"}})
    for rank, error in told.items():
        gang.on_report(rank, {"failure": failure_from(error, attempt).to_json()})
    failures = {**told, **(lost or {})}
    monkeypatch.setattr(gang_module, "_trainer", lambda *_: _Trainer(WorkerGroupError("they failed", failures)))
    home = GangHome(runner="", namespace="", scratch=tmp_path)
    failure = run_gang(attempt, gang, RunnerSettings(), home)
    assert isinstance(failure, JobFailure)
    return failure


ALL_BUT_6 = {rank: PEER for rank in range(NUM_RANKS) if rank != 6}


def place(failure: JobFailure) -> tuple[int | None, str, tuple[str, ...]]:
    return failure.rank, failure.node_id, failure.gpus


@pytest.mark.parametrize("order", ["first", "last"])
def test_rank_with_a_broken_gpu_is_blamed_before_lost_workers_and_other_causes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, order: str
) -> None:
    others = {**ALL_BUT_6, 1: OOM}
    told = {6: ECC, **others} if order == "first" else {**others, 6: ECC}
    failure = outcome_of(monkeypatch, tmp_path, told, {12: died(), 13: died()})
    assert failure.kind is FailureKind.NODE_LOST
    assert place(failure) == (6, "node3", ("GPU-0006",))
    found = signature_of(failure.message)
    assert found is not None
    assert found.blames_node


@pytest.mark.parametrize(
    ("error", "kind"), [(OOM, FailureKind.OUT_OF_MEMORY), (KeyError("a bug"), FailureKind.UNKNOWN)]
)
def test_rank_that_names_a_cause_explains_the_processes_that_nccl_ends_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception, kind: FailureKind
) -> None:
    failure = outcome_of(monkeypatch, tmp_path, {**ALL_BUT_6, 6: error}, {12: died(), 13: died()})
    assert failure.kind is kind
    assert place(failure) == (6, "node3", ("GPU-0006",))


def test_node_that_died_explains_what_survivors_fail_of_in_a_way_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    strange = RuntimeError("CUDA error: unspecified launch failure")
    failure = outcome_of(monkeypatch, tmp_path, {**ALL_BUT_6, 9: strange}, {6: died(_NODE_DIED), 7: died(_NODE_DIED)})
    assert failure.kind is FailureKind.NODE_LOST
    assert place(failure) == (6, "node3", ("GPU-0006",))


def test_lost_worker_is_told_with_its_own_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    failure = outcome_of(monkeypatch, tmp_path, ALL_BUT_6, {6: died()})
    assert failure.kind is FailureKind.NODE_LOST
    assert "lost worker 6 (was killed (as by signal 9) or crashed" in failure.message
    assert place(failure) == (6, "node3", ("GPU-0006",))


@pytest.mark.parametrize(
    ("lost", "rank"),
    [
        ({4: died(), 5: died(), 10: died(_NODE_DIED), 11: died(_NODE_DIED)}, 10),
        ({4: died(), 10: WorkerHealthCheckTimeoutError("no answer")}, 4),
        ({4: died(), 5: died()}, 4),
        ({4: died(), 10: died()}, None),
    ],
)
def test_of_many_lost_workers_those_of_one_node_that_explain_the_others_are_named_or_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, lost: dict[int, Exception], rank: int | None
) -> None:
    failure = outcome_of(monkeypatch, tmp_path, {}, lost)
    assert failure.rank == rank
    assert failure.node_id == ("" if rank is None else f"node{rank // 2}")


def test_worker_that_ray_ends_for_want_of_memory_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    failure = outcome_of(monkeypatch, tmp_path, ALL_BUT_6, {6: died(_MONITOR), 9: died()})
    assert (failure.kind, failure.rank) == (FailureKind.OUT_OF_MEMORY, 6)


@pytest.mark.parametrize("error", [PEER, PreemptedError("stopped at step 1, as asked"), NumericsError("nan", 7)])
def test_what_all_ranks_see_alike_blames_no_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception
) -> None:
    failure = outcome_of(monkeypatch, tmp_path, dict.fromkeys(range(NUM_RANKS), error))
    assert place(failure) == (None, "", ())


def test_numerics_of_one_rank_alone_are_its_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    wrong = NumericsError("loss is nan at step 7", step=7, rank=6)
    failure = outcome_of(monkeypatch, tmp_path, dict.fromkeys(range(NUM_RANKS), wrong))
    assert (failure.step, *place(failure)) == (7, 6, "node3", ("GPU-0006",))


def test_journal_and_message_name_rank_node_and_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    failure = outcome_of(monkeypatch, tmp_path, {6: ECC})
    attempt = Attempt(
        attempt_id=failure.attempt_id, job="gang", key=failure.key, number=0, epoch=1, launched_at_s=0.0,
        resources=Resources(),
    )  # fmt: skip
    report = AttemptReport(
        attempt_id=failure.attempt_id, status=AttemptStatus.FAILED, failure=failure, node="gpu-3/5d2c1a7b"
    )
    event = judge_report(MemoryStore(), attempt, report, 1.0)
    assert isinstance(event, AttemptFailed)
    assert (event.node, event.rank, event.gpus) == ("gpu-3/5d2c1a7b", 6, ("GPU-0006",))
    assert event.message.endswith("\nat rank 6, on node gpu-3/5d2c1a7b, GPU GPU-0006")
