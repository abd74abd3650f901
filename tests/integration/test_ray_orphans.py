"""Reservations of gangs that die before anybody has heard of them; the cluster has no dashboard."""

from __future__ import annotations

import os
import signal

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.util.placement_group import placement_group

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray import placement_groups
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.placement_groups import orphaned_groups
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request, reservations

SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)
TWO_CPUS = Resources(cpus=2.0)


def kill_runner(ray_cluster, namespace) -> None:
    actors = ray_cluster.util.list_named_actors(all_namespaces=True)
    (name,) = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    described = ray_cluster.get(ray_cluster.get_actor(name, namespace=namespace).describe.remote())
    os.kill(described["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_gang_killed_before_anybody_heard_of_its_reservation_gives_it_back(
    ray_cluster, namespace, store, gate, until
) -> None:
    backend = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    backend.announce(1)
    before = reservations(ray_cluster)
    attempt = request(store, job("orphan", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, TWO_CPUS)
    # The backend is not asked anything until the runner is dead: it cannot have learned of the group.
    until(lambda: reservations(ray_cluster) - before)
    kill_runner(ray_cluster, namespace)
    until(lambda: look(backend, attempt.attempt_id).status is AttemptStatus.LOST)
    until(lambda: look(backend, attempt.attempt_id).lost_reason and reservations(ray_cluster) == before)


@pytest.mark.slow
def test_gang_killed_while_there_is_no_controller_is_cleared_up_by_the_next_one(
    ray_cluster, namespace, store, gate, until
) -> None:
    first = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    first.announce(1)
    before = reservations(ray_cluster)
    attempt = request(store, job("unseen", gate=str(gate.path)), num_workers=2)
    first.launch(attempt, TWO_CPUS)
    until(lambda: reservations(ray_cluster) - before)
    first.close()
    kill_runner(ray_cluster, namespace)
    until(lambda: set(orphaned_groups(first._is_runner)))
    successor = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    successor.announce(2)
    until(lambda: look(successor, attempt.attempt_id).status is AttemptStatus.LOST)
    until(lambda: look(successor, attempt.attempt_id).lost_reason and reservations(ray_cluster) == before)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two gangs, one after the other; 40 s on two quiet cores
def test_reservation_that_ray_gives_up_late_is_found_by_the_gang_that_waits_for_it(
    ray_cluster, namespace, store, gate, until, finish, monkeypatch
) -> None:
    monkeypatch.setattr(placement_groups, "SCANS_AFTER_S", ())  # as if Ray took longer to notice than all of them
    backend = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    backend.announce(1)
    before = reservations(ray_cluster)
    whole_cluster = Resources(cpus=ray_cluster.cluster_resources()["CPU"])
    attempt = request(store, job("late", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, whole_cluster)
    until(lambda: reservations(ray_cluster) - before)
    kill_runner(ray_cluster, namespace)
    until(lambda: look(backend, attempt.attempt_id).status is AttemptStatus.LOST)
    assert reservations(ray_cluster) - before, "nothing is held, so nothing is shown"
    backend.release(attempt.attempt_id)
    second = request(store, job("waits"), num_workers=2)
    backend.launch(second, whole_cluster)
    report = finish(backend, second.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report


class Runner:
    """Somebody else's actor, of a class that is called as ours."""

    def reserve(self) -> str:
        return str(placement_group([{"CPU": 1}]).id.hex())


@pytest.mark.slow
def test_reservation_of_somebody_elses_dead_actor_is_left_alone(ray_cluster, namespace, until) -> None:
    backend = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    backend.announce(1)
    actor = ray_cluster.remote(Runner).options(name="their-runner", namespace=namespace, num_cpus=0).remote()
    group_id = ray_cluster.get(actor.reserve.remote())
    ray_cluster.kill(actor)

    def is_dead() -> bool:
        row = placement_groups._actor(actor._actor_id.binary())
        return row is not None and bool(row.state == ActorTableData.DEAD)

    try:
        until(is_dead)
        assert set(orphaned_groups(backend._is_runner)) == set()
        backend.observe(())  # the scans of a controller that has just started
        assert group_id in reservations(ray_cluster)
    finally:
        placement_groups.remove_reservation(group_id)
