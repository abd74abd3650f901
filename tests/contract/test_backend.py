"""What every backend must do, as far as it can be seen without a cluster."""

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.backends.inprocess import InprocessBackend
from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Backend
from orchestrator.controller.attempt_requests import make_request
from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Outcome, Resources
from orchestrator.core.errors import FailureKind, UserError
from orchestrator.storage.artifacts import ArtifactWriter, is_committed
from orchestrator.storage.local import LocalStore
from orchestrator.testing import Fail, ScriptedBackend
from tests.scripted_sweep import make_job, make_plan

ENTRY_POINT = f"{__name__}:execute"
GOOD, BAD = make_job("dataset/good"), make_job("dataset/bad")


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Stands for the data plane: commits a record, or fails as a workload would."""
    if request.job == BAD.name:
        message = "no such model"
        raise UserError(message)
    writer = ArtifactWriter(context.store, request)
    writer.add("payload", b"x")
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=writer.commit(now=0.0))


def _inprocess(store: LocalStore, folder: Path) -> Backend:
    return InprocessBackend(store, folder, entry_point=ENTRY_POINT)


def _scripted(store: LocalStore, folder: Path) -> Backend:
    failure = Fail(kind=FailureKind.USER_ERROR, message="no such model")
    return ScriptedBackend(store, {BAD.name: [failure]})


BACKENDS: dict[str, Callable[[LocalStore, Path], Backend]] = {"inprocess": _inprocess, "scripted": _scripted}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, store: LocalStore, tmp_path: Path) -> Backend:
    chosen = BACKENDS[request.param](store, tmp_path / "node")
    chosen.announce(1)
    return chosen


def attempt(store: LocalStore, name: str, number: int = 1) -> JobRequest:
    job = GOOD if name == GOOD.name else BAD
    return make_request(make_plan(job, store_uri=store.uri), job, number)


def wait(backend: Backend, attempt_id: str) -> AttemptReport:
    for _ in range(20):
        (report,) = backend.observe([attempt_id])
        if report.status is not AttemptStatus.RUNNING:
            return report
    message = f"{attempt_id} does not end"
    raise AssertionError(message)


def test_attempt_that_succeeds_is_committed_and_reported(backend: Backend, store: LocalStore) -> None:
    request = attempt(store, GOOD.name)
    backend.launch(request, Resources())
    report = wait(backend, request.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED
    assert report.result is not None
    assert report.result.outcome is Outcome.COMMITTED
    assert is_committed(store, request.key)


def test_attempt_that_fails_is_reported_with_kind_and_message(backend: Backend, store: LocalStore) -> None:
    request = attempt(store, BAD.name)
    backend.launch(request, Resources())
    report = wait(backend, request.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.USER_ERROR
    assert "no such model" in report.failure.message


def test_end_of_an_attempt_is_reported_until_its_release(backend: Backend, store: LocalStore) -> None:
    request = attempt(store, GOOD.name)
    backend.launch(request, Resources())
    first = wait(backend, request.attempt_id)
    assert backend.observe([request.attempt_id]) == [first]


def test_second_launch_of_an_attempt_changes_nothing(backend: Backend, store: LocalStore) -> None:
    request = attempt(store, GOOD.name)
    backend.launch(request, Resources())
    backend.launch(request, Resources())
    report = wait(backend, request.attempt_id)
    assert report.result is not None
    assert report.result.outcome is Outcome.COMMITTED


def test_unknown_attempt_is_lost_and_may_be_stopped_and_released(backend: Backend) -> None:
    backend.stop("nobody.1")
    backend.release("nobody.1")
    (report,) = backend.observe(["nobody.1"])
    assert report.status is AttemptStatus.LOST
    assert report.lost_reason


def test_nodes_are_within_the_cluster(backend: Backend) -> None:
    """A backend without nodes takes attempts for any sort of them."""
    capacity = backend.capacity()
    assert all(0 < node.cpus <= capacity.total.cpus for node in capacity.nodes)
    assert capacity.total.cpus > 0
