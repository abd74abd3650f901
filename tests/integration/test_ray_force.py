"""Attempts that do not end by themselves, on a real Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.backends.protocol import AttemptStatus, Placement
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.runner.runner import ANY_SITE, UNCALLED_S, create_runner
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.storage.layout import log_name
from orchestrator.storage.logs import read_log
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request

ONE_CPU = Resources(cpus=1.0)
SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)


class Idle:
    """Holds resources, as an actor of others does."""


@pytest.mark.ci
def test_attempt_that_hangs_is_ended_with_its_stacks_in_the_log(backend, store, gate, finish, running_pid):
    attempt = request(store, job("stuck", hangs=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    running_pid(backend, attempt.attempt_id)
    gate.open()
    backend.kill(attempt.attempt_id, "hangs: no progress", FailureKind.HANG)
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.FAILED
    assert report.failure is not None
    assert (report.failure.kind, report.failure.message) == (FailureKind.HANG, "hangs: no progress")
    log = read_log(store, log_name("scripted", "stuck", 0, key=attempt.key)).decode()
    assert log.count("hello from stuck") == 1
    assert "in hang_until" in log


@pytest.mark.ci
def test_attempt_that_must_end_is_lost_for_the_given_reason(backend, store, gate, finish, running_pid):
    attempt = request(store, job("unwanted", gate=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    running_pid(backend, attempt.attempt_id)
    backend.kill(attempt.attempt_id, "it had its grace")
    report = finish(backend, attempt.attempt_id)
    assert (report.status, report.lost_reason) == (AttemptStatus.LOST, "it had its grace")


@pytest.mark.ci
def test_runner_whose_process_ray_does_not_reach_is_ended_all_the_same(
    backend, store, gate, running_pid, until, monkeypatch
):
    # So it is with an actor during whose creation the head died: Ray has no lease of it to take back.
    monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
    attempt = request(store, job("ghost", gate=str(gate.path)))
    backend.launch(attempt, ONE_CPU)
    pid = running_pid(backend, attempt.attempt_id)
    backend.kill(attempt.attempt_id, "it had its grace")
    until(lambda: look(backend, attempt.attempt_id).status is AttemptStatus.LOST)
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.slow
def test_runner_that_no_controller_calls_leaves_long_before_its_idle_timeout(ray_cluster, namespace, until):
    settings = RunnerSettings(entry_point=ENTRY_POINT, namespace=namespace)
    create_runner("runner/unheard", namespace, ONE_CPU, settings, ANY_SITE)

    def is_there() -> bool:
        return any(actor["namespace"] == namespace for actor in ray_cluster.util.list_named_actors(all_namespaces=True))

    assert is_there()
    until(lambda: not is_there(), 2 * UNCALLED_S)


def test_attempt_goes_to_the_node_it_was_sent_to_and_says_so(backend, store, finish):
    (machine,) = backend.capacity().machines
    attempt = request(store, job("placed"))
    backend.launch(attempt, ONE_CPU, Placement(nodes=(machine.name,)))
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report
    assert report.node == machine.name


@pytest.mark.ci
def test_attempt_whose_node_others_use_gives_it_up(namespace, store, finish, monkeypatch):
    monkeypatch.setattr("orchestrator.backends.ray.backend.ROOM_AFTER_S", 0.0)
    backend = RayBackend(namespace, settings=RunnerSettings(entry_point=ENTRY_POINT, runner_s=1.0), spare_runners=0)
    backend.announce(1)
    (machine,) = backend.capacity().machines
    foreign: Any = ray.remote(num_cpus=1)(Idle).remote()
    ray.get(foreign.__ray_ready__.remote())
    whole = Resources(cpus=machine.resources.cpus)
    attempt = request(store, job("waits"))
    backend.launch(attempt, whole, Placement(nodes=(machine.name,)))
    report = finish(backend, attempt.attempt_id)
    ray.kill(foreign)
    assert report.failure is not None
    assert (report.failure.kind, report.node) == (FailureKind.NO_ROOM, machine.name)
    assert "had no room for its runner" in report.failure.message


@pytest.mark.slow
def test_attempt_sent_to_a_node_that_is_gone_goes_elsewhere(backend, store, finish):
    attempt = request(store, job("misplaced"))
    backend.launch(attempt, ONE_CPU, Placement(nodes=("gone/00000000",), exclude=("gone/00000000",)))
    assert finish(backend, attempt.attempt_id).status is AttemptStatus.SUCCEEDED


@pytest.mark.slow
def test_attempt_that_may_go_nowhere_goes_somewhere(backend, store, finish):
    (machine,) = backend.capacity().machines
    attempt = request(store, job("excluded"))
    backend.launch(attempt, ONE_CPU, Placement(exclude=(machine.name,)))
    assert finish(backend, attempt.attempt_id).status is AttemptStatus.SUCCEEDED


@pytest.mark.slow
def test_gang_that_hangs_is_ended_with_the_stacks_of_every_rank(
    ray_cluster, backend, store, gate, finish, running_pid, until
):
    attempt = request(store, job("stuck-gang", hangs=str(gate.path)), num_workers=2)
    (machine,) = backend.capacity().machines
    backend.launch(attempt, Resources(cpus=2.0), Placement(nodes=(machine.name, machine.name)))
    running_pid(backend, attempt.attempt_id)
    until(lambda: len(backend._attempts[attempt.attempt_id].report.get("processes", ())) == 2 or look_at(backend))
    gate.open()
    backend.kill(attempt.attempt_id, "hangs", FailureKind.HANG)
    report = finish(backend, attempt.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.HANG
    for rank in range(2):
        assert "in hang_until" in read_log(store, log_name("scripted", "stuck-gang", 0, rank, key=attempt.key)).decode()
    backend.release(attempt.attempt_id)
    table = ray_cluster.util.placement_group_table
    until(lambda: backend.observe(()) == [] and all(group["state"] == "REMOVED" for group in table().values()))


def look_at(backend) -> bool:
    """Take the newest answers."""
    look(backend, next(iter(backend._attempts)))
    return False
