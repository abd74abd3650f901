"""Gangs on a real Ray cluster: real Ray Train, gloo, and processes killed for real."""

from __future__ import annotations

import os
import signal

import pytest

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.capacity import HEAD_RESOURCE
from orchestrator.backends.ray.gang.train import trainer_class
from orchestrator.backends.ray.placement_groups import orphaned_groups
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.metrics.machine import describe_machine
from orchestrator.storage.artifacts import is_committed, read_record
from orchestrator.storage.layout import log_name
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request, reservations, workers

TWO_CPUS = Resources(cpus=2.0)
SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)


def actors_known_to_ray(ray_cluster):
    """What Ray's head knows of each actor, living or dead."""
    from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

    found = ray_cluster._private.state.state._connect_and_get_accessor().get_actor_table(None, None)
    return [ActorTableData.FromString(one) for one in found]


@pytest.mark.ci
def test_gang_commits_once_and_every_rank_has_a_log(ray_cluster, backend, store, finish):
    attempt = request(store, job("gang"), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report
    assert read_record(store, attempt.key).metrics["rank_sum"] == 3
    for rank in range(2):
        log = store.get(log_name("scripted", "gang", 0, rank, key=attempt.key))
        assert log.count(b"hello from gang") == 1
        assert log.count(b"a word to the log") == 1
    actors = {actor["ActorClassName"] for actor in ray_cluster._private.state.actors().values()}  # dead ones, too
    assert "TrainController" in actors
    assert "PlacementGroupCleaner" not in actors, "a process per gang on the head, which may outlive it"
    assert "PreemptionWatcher" not in actors, "a process per gang on any node, which could not be removed meanwhile"
    coordinators = [one for one in actors_known_to_ray(ray_cluster) if one.name == "AutoscalingCoordinator"]
    assert [HEAD_RESOURCE in one.required_resources for one in coordinators] == [True], "it stays for good"


@pytest.mark.slow
def test_gang_whose_train_controller_is_killed_is_a_lost_node_and_its_runner_gives_back_the_reservation(
    ray_cluster, backend, store, gate, finish, running_pid, until
):
    attempt = request(store, job("headless", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    running_pid(backend, attempt.attempt_id)
    (pid,) = workers(ray_cluster, "ray::TrainController")
    os.kill(pid, signal.SIGKILL)
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.FAILED, report
    assert report.failure is not None
    assert report.failure.kind is FailureKind.NODE_LOST, report.failure
    until(lambda: not reservations(ray_cluster))  # before the attempt is released: no controller has to look


@pytest.mark.slow
def test_gang_differs_from_rays_own_in_its_cleaner_alone():
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    rays, ours = [
        {type(one).__name__ for one in trainer(print)._create_default_callbacks()}
        for trainer in (TorchTrainer, trainer_class())
    ]
    assert rays - ours == {"PlacementGroupCleanerCallback"}, "this Ray may need another way, or none"
    assert ours < rays


@pytest.mark.slow
def test_gang_worker_killed_is_a_lost_node_and_the_next_attempt_commits_once(
    ray_cluster, backend, store, gate, finish, running_pid, until
):
    killed = request(store, job("gang", gate=str(gate.path)), num_workers=2)
    backend.launch(killed, TWO_CPUS)
    os.kill(running_pid(backend, killed.attempt_id), signal.SIGKILL)
    report = finish(backend, killed.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.NODE_LOST, report.failure
    backend.release(killed.attempt_id)
    until(lambda: not reservations(ray_cluster))
    gate.open()
    again = request(store, job("gang", gate=str(gate.path)), 1, num_workers=2)
    backend.launch(again, TWO_CPUS)
    report = finish(backend, again.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report
    assert read_record(store, again.key).metrics["rank_sum"] == 3
    for rank in range(2):
        assert b"hello from gang" in store.get(log_name("scripted", "gang", 1, rank, key=again.key))


@pytest.mark.slow
def test_gang_stop_reaches_every_rank(backend, store, gate, finish, running_pid):
    attempt = request(store, job("stopped", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    running_pid(backend, attempt.attempt_id)
    backend.stop(attempt.attempt_id)
    report = finish(backend, attempt.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.PREEMPTED
    assert not is_committed(store, attempt.key)


@pytest.mark.slow
def test_gang_failure_of_one_rank_explains_the_end_of_all(backend, store, finish):
    attempt = request(store, job("explained", end="rank1_user_error"), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    report = finish(backend, attempt.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.USER_ERROR, report.failure
    assert report.failure.message == "no such model on rank 1"


@pytest.mark.slow
def test_gang_runner_killed_loses_the_attempt_and_frees_its_reservation(
    ray_cluster, namespace, backend, store, gate, running_pid, until
):
    attempt = request(store, job("orphan", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    running_pid(backend, attempt.attempt_id)
    (name,) = [
        actor["name"]
        for actor in ray_cluster.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace
    ]
    description = ray_cluster.get(ray_cluster.get_actor(name, namespace=namespace).describe.remote())
    os.kill(description["pid"], signal.SIGKILL)
    until(lambda: look(backend, attempt.attempt_id).status is AttemptStatus.LOST)
    until(lambda: backend.observe([attempt.attempt_id]) and not reservations(ray_cluster))


@pytest.mark.slow
def test_gang_is_found_again_by_the_next_controller_with_its_nodes_and_is_no_orphan(
    namespace, backend, store, gate, finish, running_pid, until
):
    attempt = request(store, job("adopted", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    running_pid(backend, attempt.attempt_id)
    backend.close()
    successor = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    successor.announce(2)
    running_pid(successor, attempt.attempt_id)
    until(lambda: look(successor, attempt.attempt_id).worker_nodes)
    report = look(successor, attempt.attempt_id)
    assert report.worker_nodes == (report.node, report.node)
    assert report.machines[report.node] == describe_machine()
    assert set(orphaned_groups(successor._is_runner)) == set()
    gate.open()
    assert finish(successor, attempt.attempt_id).status is AttemptStatus.SUCCEEDED
