"""The controller as a detached actor, killed and stopped while its runners go on."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.attempt_tracker import AttemptLimits, HangLimits
from orchestrator.controller.connect import WATCHDOG_NAME, ControllerLink, ensure_controller
from orchestrator.core.errors import ControllerError, FailureKind, NotFoundError
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import log_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import read_log
from orchestrator.sweeps.client import load_snapshot, read_progress, submit
from tests.integration.ray_jobs import ENTRY_POINT, job

CLUSTER = "test-cluster"
SWEEP = "scripted"


@pytest.fixture
def ensure(store, namespace):
    def ensured() -> ControllerLink:
        return ensure_controller(store.uri, CLUSTER, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))

    return ensured


@pytest.fixture
def sweep_with_a_gate(store, gate, ensure, until):
    """A sweep whose first job runs and waits at its gate."""
    first, second = job("first", gate=str(gate.path)), job("second", needs=("first",))
    link = ensure()
    submit_plan(store, first, second)
    link.wake(SWEEP)
    until(lambda: runner_pid(store, "first"))
    return link


def submit_plan(store: LocalStore, *jobs: Job) -> None:
    plan = Plan(sweep=SWEEP, revision=0, store_uri=store.uri, jobs=jobs, baseline="")
    submit(store, plan, "", CLUSTER)


def runner_pid(store: LocalStore, name: str) -> float | None:
    progress = read_progress(store, SWEEP).get(name)
    return progress.progress.metrics.get("pid") if progress else None


def snapshot(store: LocalStore) -> Snapshot | None:
    with suppress(NotFoundError):
        return load_snapshot(store, SWEEP)
    return None


def has_finished(store: LocalStore) -> bool:
    found = snapshot(store)
    return found is not None and found.state.is_final


def assert_each_job_ran_once(store: LocalStore) -> None:
    found = snapshot(store)
    assert found is not None
    assert found.state is SweepState.SUCCEEDED
    assert [view.num_attempts for view in found.jobs.values()] == [1, 1]
    assert all(is_committed(store, view.key) for view in found.jobs.values())


def test_controller_runs_a_sweep_in_order(store, gate, sweep_with_a_gate, until):
    assert not is_committed(store, job("second", needs=("first",)).key)
    gate.open()
    until(lambda: has_finished(store))
    assert_each_job_ran_once(store)


def test_controller_asked_for_twice_is_the_same_and_has_one_store(ensure, tmp_path, namespace):
    first, second = ensure(), ensure()
    assert (second.pid, second.epoch) == (first.pid, first.epoch)
    with pytest.raises(ControllerError, match="a controller has one store"):
        ensure_controller(LocalStore(tmp_path / "other").uri, CLUSTER, namespace)


def test_controller_of_other_code_is_replaced_when_idle(ensure, monkeypatch, namespace, ray_cluster):
    first = ensure()
    before = watchdog_pid(ray_cluster, namespace)
    monkeypatch.setattr("orchestrator.controller.connect.code_digest", lambda: "other code")
    second = ensure()
    assert second.pid != first.pid
    assert second.epoch > first.epoch
    assert watchdog_pid(ray_cluster, namespace) != before


def watchdog_pid(ray_cluster, namespace):
    handle = ray_cluster.get_actor(WATCHDOG_NAME, namespace=namespace)
    return ray_cluster.get(handle.ping.remote(), timeout=60)["pid"]


def test_controller_of_other_code_is_kept_while_it_has_work(sweep_with_a_gate, ensure, monkeypatch):
    monkeypatch.setattr("orchestrator.controller.connect.code_digest", lambda: "other code")
    again = ensure()
    assert again.pid == sweep_with_a_gate.pid
    assert "runs other code" in again.notice


def test_controller_killed_while_an_attempt_runs_comes_back_and_the_attempt_goes_on(
    store, gate, sweep_with_a_gate, until, ensure
):
    pid = runner_pid(store, "first")
    os.kill(sweep_with_a_gate.pid, signal.SIGKILL)
    # Ray brings it back by itself: its new epoch shows in the journal without any client.
    until(lambda: (found := snapshot(store)) is not None and found.epoch > sweep_with_a_gate.epoch)
    gate.open()
    until(lambda: has_finished(store))
    assert_each_job_ran_once(store)
    assert runner_pid(store, "first") in {None, pid}
    assert ensure().pid != sweep_with_a_gate.pid


@pytest.mark.slow
def test_controller_stopped_by_a_signal_is_replaced_by_the_watchdog(store, gate, sweep_with_a_gate, until):
    os.kill(sweep_with_a_gate.pid, signal.SIGSTOP)
    gate.open()
    until(lambda: has_finished(store))
    assert_each_job_ran_once(store)


def test_attempt_that_hangs_is_found_by_the_controller_and_tried_again(store, gate, namespace, until):
    limits = AttemptLimits(hangs=HangLimits(floors_s={"train": 1.0}, multiple=1.0))
    runners = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)
    link = ensure_controller(store.uri, CLUSTER, namespace, runners=runners, limits=limits)
    submit_plan(store, job("first", hangs=str(gate.path), hangs_once=True))
    link.wake(SWEEP)
    until(lambda: runner_pid(store, "first"))
    gate.open()
    until(lambda: has_finished(store))
    found = snapshot(store)
    assert found is not None
    assert found.state is SweepState.SUCCEEDED
    view = found.jobs["first"]
    assert view.failures == {FailureKind.HANG: 1}
    assert view.last_failure is not None
    assert view.last_failure.node, "the scheduler must know where it hung"
    assert "in hang_until" in read_log(store, log_name(SWEEP, "first", 1, key=view.key)).decode()


@pytest.fixture
def no_watchdog(sweep_with_a_gate, ray_cluster, namespace):
    ray_cluster.kill(ray_cluster.get_actor(WATCHDOG_NAME, namespace=namespace), no_restart=True)


@pytest.mark.slow
@pytest.mark.usefixtures("no_watchdog")
def test_controller_stopped_by_a_signal_is_replaced_by_the_next_client(store, gate, sweep_with_a_gate, until, ensure):
    os.kill(sweep_with_a_gate.pid, signal.SIGSTOP)
    replacement = ensure()
    assert replacement.pid != sweep_with_a_gate.pid
    assert replacement.epoch > sweep_with_a_gate.epoch
    gate.open()
    until(lambda: has_finished(store))
    assert_each_job_ran_once(store)
