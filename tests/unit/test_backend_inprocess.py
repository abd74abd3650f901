"""Classification of exceptions, and whole sweeps inside this process."""

import errno
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.backends.classify import classify, failure_from
from orchestrator.backends.inprocess import InprocessBackend
from orchestrator.controller.attempt_requests import make_request
from orchestrator.controller.controller import Controller
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress, Resources, Spot
from orchestrator.core.errors import ControllerError, FailureKind, NotFoundError, NumericsError, PreemptedError
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import lease as lease_module
from orchestrator.sweeps.client import load_plan, load_snapshot, submit
from orchestrator.sweeps.lease import LEASE_DURATION_S, RENEW_EVERY_S
from orchestrator.testing import FakeClock, Hang, ScriptedBackend
from tests.scripted_sweep import CLUSTER, diamond, make_job, make_plan

ENTRY_POINT = f"{__name__}:execute"
JOB = make_job("dataset/tree")
seen: list[Path] = []


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    (context.scratch / "left-over").write_text("x")
    seen.append(context.scratch)
    context.report(Progress(phase="write", step=1, total_steps=1))
    writer = ArtifactWriter(context.store, request)
    writer.add("payload", b"x")
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=writer.commit(now=0.0))


def interrupted(request: JobRequest, context: ExecutionContext) -> JobResult:
    raise KeyboardInterrupt


def caused(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NumericsError("nan"), FailureKind.NUMERICS),
        (PreemptedError("stopped"), FailureKind.PREEMPTED),
        (NotFoundError("gone"), FailureKind.BAD_DATA),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), FailureKind.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), FailureKind.STORAGE),
        (OSError(errno.ENOENT, "missing"), FailureKind.UNKNOWN),
        (ValueError("x"), FailureKind.UNKNOWN),
        (caused(RuntimeError("worker"), MemoryError()), FailureKind.OUT_OF_MEMORY),
    ],
    ids=repr,
)
def test_classify_exception_gives_its_kind(error: Exception, kind: FailureKind) -> None:
    assert classify(error) is kind


def test_failure_names_the_exception_and_carries_its_traceback() -> None:
    request = make_request(make_plan(JOB), JOB, 1)
    try:
        int("seven")
    except ValueError as error:
        failure = failure_from(error, request)
    assert failure.message.startswith("ValueError: invalid literal")
    assert "test_failure_names_the_exception" in failure.traceback
    assert failure.attempt_id == request.attempt_id


def test_sweep_in_this_process_ends_with_all_jobs_done(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = make_plan(*diamond(), store_uri=store.uri)
    states = []
    snapshot = run_sweep_inprocess(
        store,
        plan,
        "spec",
        directory=tmp_path / "node",
        entry_point=ENTRY_POINT,
        on_change=lambda seen: states.append(seen.state),
    )
    assert snapshot.state is SweepState.SUCCEEDED
    assert snapshot.counts == {JobState.SUCCEEDED: 5}
    assert states[-1] is SweepState.SUCCEEDED
    assert len(load_plan(store, "sweep").jobs) == 5
    assert not any(scratch.exists() for scratch in seen)
    assert (tmp_path / "node" / "cache").is_dir()


def test_second_run_of_a_sweep_in_this_process_launches_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = make_plan(*diamond(), store_uri=store.uri)
    run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    before = len(seen)
    snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    assert snapshot.state is SweepState.SUCCEEDED
    assert len(seen) == before


def test_job_for_another_sort_of_node_runs_in_this_process(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    resources = Resources(cpus=1.0, gpus=8.0, accelerator="H100", spot=Spot.REQUIRE, labels=(("zone", "a"),))
    plan = make_plan(replace(JOB, resources=resources), store_uri=store.uri)
    snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    assert snapshot.state is SweepState.SUCCEEDED


def test_run_after_an_interrupt_takes_the_sweep_up_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = make_plan(*diamond(), store_uri=store.uri)
    with pytest.raises(KeyboardInterrupt):
        run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=f"{__name__}:interrupted")
    snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    assert snapshot.state is SweepState.SUCCEEDED
    assert snapshot.jobs["dataset/tree"].num_attempts == 2


def test_run_of_one_sweep_leaves_another_one_that_was_interrupted_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    left, other = (make_plan(make_job(f"dataset/{name}"), sweep=name, store_uri=store.uri) for name in ("a", "b"))
    with pytest.raises(KeyboardInterrupt):
        run_sweep_inprocess(store, left, directory=tmp_path / "node", entry_point=f"{__name__}:interrupted")
    before = load_snapshot(store, "a")
    snapshot = run_sweep_inprocess(store, other, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    assert snapshot.state is SweepState.SUCCEEDED
    assert load_snapshot(store, "a") == before


def test_sweep_that_the_controller_of_a_cluster_runs_is_not_taken_over_by_a_run_in_this_process(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = make_plan(JOB, store_uri=store.uri)
    backend = ScriptedBackend(store, {JOB.name: [Hang()]})
    controller = Controller(store, backend, CLUSTER, "elsewhere-7-0123abcd")
    submit(store, plan, "", CLUSTER)
    controller.tick()
    before = load_snapshot(store, "sweep")
    assert (before.cluster, before.state) == (CLUSTER, SweepState.RUNNING)
    with pytest.raises(ControllerError, match=f"on cluster '{CLUSTER}'"):
        run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    assert load_snapshot(store, "sweep") == before


@pytest.mark.parametrize("is_alive", [True, False])
def test_sweep_of_a_cluster_whose_clock_is_behind_is_taken_over_only_if_its_lease_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """Its lease looks expired here while its controller runs."""
    store = LocalStore(tmp_path / "store")
    plan = make_plan(JOB, store_uri=store.uri)
    backend = ScriptedBackend(store, {JOB.name: [Hang()]})
    behind, waited = FakeClock(time.time() - 20.0), FakeClock()
    controller = Controller(store, backend, CLUSTER, "elsewhere-7-0123abcd", behind)
    submit(store, plan, "", CLUSTER)
    controller.tick()

    def sleep(wait_s: float) -> None:
        waited.advance(wait_s)
        behind.advance(wait_s)
        if is_alive:
            controller.tick()

    monkeypatch.setattr(lease_module, "time", SimpleNamespace(time=time.time, monotonic=waited, sleep=sleep))
    before_s = waited()
    if is_alive:
        with pytest.raises(ControllerError, match=f"on cluster '{CLUSTER}'"):
            run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
        assert waited() - before_s <= RENEW_EVERY_S + 1.0
    else:
        snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=ENTRY_POINT)
        assert snapshot.state is SweepState.SUCCEEDED
        assert waited() - before_s >= LEASE_DURATION_S


def test_missing_entry_point_fails_the_attempt_with_its_name(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    backend = InprocessBackend(store, tmp_path / "node", entry_point="no_such_module:execute")
    request = make_request(make_plan(JOB, store_uri=store.uri), JOB, 1)
    backend.launch(request, Resources())
    (report,) = backend.observe([request.attempt_id])
    assert report.failure is not None
    assert "no_such_module" in report.failure.message


def test_progress_of_an_attempt_reaches_the_listener(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    heard: list[tuple[str, str]] = []
    backend = InprocessBackend(
        store,
        tmp_path / "node",
        entry_point=ENTRY_POINT,
        on_progress=lambda request, progress: heard.append((request.job, progress.phase)),
    )
    backend.launch(make_request(make_plan(JOB, store_uri=store.uri), JOB, 1), Resources())
    assert heard == [("dataset/tree", "write")]
