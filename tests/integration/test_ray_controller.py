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
from orchestrator.metrics.machine import describe_machine
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import log_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import read_log
from orchestrator.sweeps.client import load_snapshot, read_progress, submit
from orchestrator.sweeps.progress import read_presence
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


@pytest.mark.ci
def test_controller_records_what_its_node_is_and_is_replaced_by_other_code_when_idle(
    store, ensure, until, monkeypatch, namespace, ray_cluster
):
    first = ensure()
    submit_plan(store, job("first"))
    first.wake(SWEEP)
    until(lambda: has_finished(store))
    assert_node_is_recorded(store, until)
    before = watchdog_pid(ray_cluster, namespace)
    assert ensure().pid == first.pid, "idle, and of the same code"
    monkeypatch.setattr("orchestrator.controller.connect.code_digest", lambda: "other code")
    second = ensure()
    assert second.pid != first.pid
    assert second.epoch > first.epoch
    assert watchdog_pid(ray_cluster, namespace) != before


def assert_node_is_recorded(store, until):
    """Terms, machine and idle runners of the one node."""
    found = snapshot(store)
    assert found is not None
    ((name, machine),) = found.nodes.items()
    assert machine == describe_machine()
    (use,) = found.jobs["first"].used
    assert use.is_spot is False  # its node was known: on this cluster, neither spot nor priced
    assert use.amount is None
    until(lambda: any(node.idle_runners for node in read_presence(store, CLUSTER)))
    (node,) = read_presence(store, CLUSTER)
    assert node.name == name
    assert node.cpus > 0


def watchdog_pid(ray_cluster, namespace):
    handle = ray_cluster.get_actor(WATCHDOG_NAME, namespace=namespace)
    return ray_cluster.get(handle.ping.remote(), timeout=60)["pid"]


def assert_kept_by_every_client(link, ensure, monkeypatch, namespace, folder):
    """It is one for all, has one store, and is not replaced while it has work."""
    again = ensure()
    assert (again.pid, again.epoch, again.notice) == (link.pid, link.epoch, "")
    with pytest.raises(ControllerError, match="a controller has one store"):
        ensure_controller(LocalStore(folder / "other").uri, CLUSTER, namespace)
    with monkeypatch.context() as patched:
        patched.setattr("orchestrator.controller.connect.code_digest", lambda: "other code")
        kept = ensure()
    assert (kept.pid, kept.epoch) == (link.pid, link.epoch)
    assert "runs other code" in kept.notice


def test_controller_with_work_is_kept_and_killed_comes_back_while_its_attempt_goes_on(
    store, gate, sweep_with_a_gate, until, ensure, monkeypatch, namespace, tmp_path
):
    # One story: every controller of its own costs seconds.
    assert_kept_by_every_client(sweep_with_a_gate, ensure, monkeypatch, namespace, tmp_path)
    pid = runner_pid(store, "first")
    assert not is_committed(store, job("second", needs=("first",)).key)
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


@pytest.mark.ci
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
