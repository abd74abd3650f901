"""Runners and the backend on a real Ray cluster, with jobs that need no torch."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.runner.runner import ANY_SITE, create_runner, new_runner_name
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Outcome, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.layout import log_name
from tests.integration.conftest import DEADLINE_S, fresh_namespace
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request

ONE_CPU = Resources(cpus=1.0)
SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)


@pytest.fixture
def make_backend(namespace):
    return backends(namespace)


@pytest.fixture(scope="module")
def shared_namespace(ray_cluster):
    """Its runners serve test after test: one of their own costs each a second. Who is done releases its attempt."""
    with fresh_namespace(ray_cluster) as name:
        yield name


@pytest.fixture(scope="module")
def next_backend(shared_namespace):
    """Makes backends that share runners, each with a later epoch than all before."""
    make, epochs = backends(shared_namespace), itertools.count(1)

    def made() -> RayBackend:
        backend = make(next(epochs))
        end_s = time.monotonic() + DEADLINE_S
        while look(backend, "labels-nobody-0.0").status is AttemptStatus.RUNNING:
            assert time.monotonic() < end_s, "runners do not acknowledge the backend"
            backend.wait(0.02)  # until all runners have acknowledged it, and it knows those that are idle
        return backend

    return made


def backends(namespace: str) -> Callable[..., RayBackend]:
    def make(epoch: int = 1, settings: RunnerSettings = SETTINGS) -> RayBackend:
        backend = RayBackend(namespace, settings=settings, spare_runners=0)
        backend.announce(epoch)
        return backend

    return make


@pytest.fixture
def runners(ray_cluster, namespace):
    """Names of the namespace's live runners."""
    return lambda: names_of_runners(ray_cluster, namespace)


@pytest.fixture
def shared_runners(ray_cluster, shared_namespace):
    return lambda: names_of_runners(ray_cluster, shared_namespace)


def names_of_runners(ray_cluster, namespace) -> list[str]:
    actors = ray_cluster.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == namespace]


def test_backend_jobs_of_a_shape_are_committed_and_logged_by_one_warm_runner(
    next_backend, store, finish, shared_runners
):
    backend = next_backend()
    pids = []
    for name in ("first", "second"):
        attempt = request(store, job(name))
        backend.launch(attempt, ONE_CPU)
        report = finish(backend, attempt.attempt_id)
        assert report.status is AttemptStatus.SUCCEEDED
        assert report.result is not None
        assert report.result.outcome is Outcome.COMMITTED
        assert read_record(store, attempt.key).attempt_id == attempt.attempt_id
        assert f"hello from {name}".encode() in store.get(log_name("scripted", name, 0, key=attempt.key))
        assert not report.result.metrics["sees_gpus"]
        assert not report.result.metrics["has_gpu"]
        pids.append(report.result.metrics["pid"])
        backend.release(attempt.attempt_id)
    assert pids[0] == pids[1]
    assert len(shared_runners()) == 1


def test_backend_launch_twice_runs_once(next_backend, store, gate, shared_runners, running_pid, finish):
    backend, attempt = next_backend(), request(store, job("once", gate=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    backend.launch(attempt, ONE_CPU)
    running_pid(backend, attempt.attempt_id)
    assert len(shared_runners()) == 1
    gate.open()
    finish(backend, attempt.attempt_id)
    backend.release(attempt.attempt_id)


def test_backend_unknown_attempt_is_lost(make_backend):
    assert look(make_backend(), "labels-nobody-0.0").status is AttemptStatus.LOST


def test_backend_failing_job_reports_kind_and_traceback(next_backend, store, finish):
    backend, attempt = next_backend(), request(store, job("fails", end="user_error"))
    backend.launch(attempt, ONE_CPU)
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.FAILED
    assert report.failure is not None
    assert report.failure.kind is FailureKind.USER_ERROR
    assert report.failure.message == "no such model"
    assert "ray_jobs.py" in report.failure.traceback
    assert b"UserError: no such model" in store.get(log_name("scripted", "fails", 0, key=attempt.key))
    backend.release(attempt.attempt_id)


@pytest.mark.ci
def test_backend_runner_after_memory_error_leaves_and_the_next_job_gets_another(
    next_backend, store, finish, until, shared_runners
):
    backend = next_backend()
    poisoned, healthy = request(store, job("poisoned", end="memory_error")), request(store, job("healthy"))
    backend.launch(poisoned, ONE_CPU)
    report = finish(backend, poisoned.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.OUT_OF_MEMORY
    (before,) = shared_runners()
    backend.release(poisoned.attempt_id)
    backend.launch(healthy, ONE_CPU)
    assert finish(backend, healthy.attempt_id).status is AttemptStatus.SUCCEEDED
    until(lambda: before not in shared_runners())
    backend.release(healthy.attempt_id)


def test_backend_stopped_attempt_ends_as_preempted(next_backend, store, gate, finish):
    backend, attempt = next_backend(), request(store, job("stopped", gate=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    backend.stop(attempt.attempt_id)  # before the runner can have accepted it
    report = finish(backend, attempt.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.PREEMPTED
    backend.release(attempt.attempt_id)


def test_backend_killed_runner_loses_its_attempt(next_backend, store, gate, running_pid, finish):
    backend, attempt = next_backend(), request(store, job("killed", gate=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    os.kill(running_pid(backend, attempt.attempt_id), signal.SIGKILL)
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.LOST
    assert report.lost_reason.startswith("its process was killed (as by signal 9) or crashed, while node "), report


def test_backend_new_controller_finds_the_running_attempt(next_backend, store, gate, running_pid, finish):
    first, attempt = next_backend(), request(store, job("adopted", gate=str(gate.path)))
    first.launch(attempt, ONE_CPU)
    pid = running_pid(first, attempt.attempt_id)
    second = next_backend()
    assert running_pid(second, attempt.attempt_id) == pid
    gate.open()
    assert finish(second, attempt.attempt_id).status is AttemptStatus.SUCCEEDED
    second.release(attempt.attempt_id)


def test_backend_new_controller_pulls_the_outcome_that_the_former_never_saw(next_backend, store, until, finish):
    first, attempt = next_backend(), request(store, job("unseen"))
    first.launch(attempt, ONE_CPU)
    until(lambda: store.exists(log_name("scripted", "unseen", 0, key=attempt.key)))
    second = next_backend()
    assert finish(second, attempt.attempt_id).status is AttemptStatus.SUCCEEDED
    second.release(attempt.attempt_id)


def test_backend_of_a_stale_epoch_is_refused(next_backend, store, gate, running_pid, finish):
    stale, busy = next_backend(), request(store, job("busy"))
    stale.launch(busy, ONE_CPU)
    finish(stale, busy.attempt_id)
    stale.release(busy.attempt_id)
    next_backend()
    late = request(store, job("late", gate=str(gate.path)))
    stale.launch(late, ONE_CPU)
    report = finish(stale, late.attempt_id)
    assert report.status is AttemptStatus.OVERTAKEN
    assert "later controller" in report.lost_reason


@pytest.mark.slow
def test_backend_idle_runner_leaves_after_its_time(make_backend, store, finish, until, runners):
    settings = RunnerSettings(entry_point=ENTRY_POINT, idle_timeout_s=0.2)
    backend, attempt = make_backend(settings=settings), request(store, job("last"))
    backend.launch(attempt, ONE_CPU)
    finish(backend, attempt.attempt_id)
    assert len(runners()) == 1  # with an outcome that nobody has released it stays
    backend.release(attempt.attempt_id)
    until(lambda: not runners())


@pytest.mark.ci
def test_backend_idle_runner_makes_room_for_another_shape(next_backend, store, finish):
    backend = next_backend()
    for name, cpus in (("wide", backend.capacity().total.cpus), ("narrow", 1.0)):
        attempt = request(store, job(name))
        backend.launch(attempt, Resources(cpus=cpus))
        assert finish(backend, attempt.attempt_id).status is AttemptStatus.SUCCEEDED
        backend.release(attempt.attempt_id)


def test_backend_capacity_is_the_whole_cluster(next_backend, ray_cluster):
    capacity = next_backend().capacity()
    assert capacity.total.cpus == ray_cluster.cluster_resources()["CPU"]
    assert capacity.nodes == (capacity.total,)


@pytest.mark.slow
def test_new_runner_removes_what_a_killed_one_has_left_before_it_has_an_attempt(
    make_backend, namespace, store, gate, running_pid, until
):
    backend, attempt = make_backend(), request(store, job("killed", gate=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    pid = running_pid(backend, attempt.attempt_id)
    opened = {link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()}
    (folder,) = [path for path in opened if path.name.startswith("orc-scratch-attempt-") and not path.suffix]
    os.kill(pid, signal.SIGKILL)
    until(lambda: look(backend, attempt.attempt_id).status is AttemptStatus.LOST)
    settings = replace(SETTINGS, namespace=namespace)
    runner: Any = create_runner(new_runner_name(ONE_CPU), namespace, ONE_CPU, settings, ANY_SITE)
    until(lambda: not folder.exists() and not folder.with_suffix(".log").exists())
    described: Any = ray.get(runner.describe.remote(), timeout=60.0)
    assert described["attempt_id"] == ""
