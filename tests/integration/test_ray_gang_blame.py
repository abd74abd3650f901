"""Gangs over several raylets on a real Ray cluster: who is at fault, and where the coordinator lives."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from orchestrator.backends.protocol import AttemptStatus, Placement
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.gang import worker
from orchestrator.backends.ray.gang.worker import RunnerLine
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.state.failure_policy import signature_of
from tests.integration.ray_jobs import ENTRY_POINT, job, look, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1, collectives="gloo")
TWO_GPUS = Resources(cpus=2.0, gpus=2.0)


def test_killed_or_broken_second_rank_is_blamed_and_not_the_coordinators_node(
    nodes, backend, store, gate, finish, running_pid
) -> None:
    first, second = (nodes.start(cpus=2, gpus=1) for _ in range(2))
    killed = request(store, job("gang", gate=str(gate.path)), num_workers=2)
    backend.launch(killed, TWO_GPUS, Placement(nodes=(first, second)))
    running_pid(backend, killed.attempt_id)
    link = backend._attempts[killed.attempt_id]
    report = look(backend, killed.attempt_id)
    assert (report.node, report.worker_nodes) == (first, (first, second))
    os.kill(link.report["processes"][1]["pid"], signal.SIGKILL)
    report = finish(backend, killed.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.NODE_LOST
    assert "lost worker 1" in report.failure.message
    assert (report.failure.rank, report.node) == (1, second)
    assert report.failure.gpus == ("0",)  # invented: a real one has a UUID
    backend.release(killed.attempt_id)
    broken = request(store, job("broken", end="rank1_ecc"), num_workers=2)
    backend.launch(broken, TWO_GPUS, Placement(nodes=(second, first)))  # an idle coordinator is on the other node
    report = finish(backend, broken.attempt_id)
    assert backend._attempts[broken.attempt_id].node == second
    assert report.failure is not None
    found = signature_of(report.failure.message)
    assert found is not None
    assert found.blames_node
    assert (report.failure.rank, report.node) == (1, first)


def test_runner_of_other_code_gets_no_attempt_and_its_node_is_blamed(
    ray_cluster, namespace, monkeypatch, store, until
) -> None:
    for place in ("backend", "code_digest"):
        monkeypatch.setattr(f"orchestrator.backends.ray.{place}.code_digest", lambda: "0123456789abcdef")
    backend = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    backend.announce(1)
    attempt = request(store, job("mixed"))
    backend.launch(attempt, Resources(cpus=1.0))
    until(lambda: look(backend, attempt.attempt_id).status is not AttemptStatus.RUNNING)
    report = look(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.LOST
    found = signature_of(report.lost_reason)
    assert found is not None
    assert found.blames_node
    assert report.node
    assert not store.list_children("artifacts/")


class Desk:
    """Stands for a gang's runner: hears, and may be stopped, woken and killed."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def exchange(self, _attempt_id: str, _rank: int, news: dict[str, Any]) -> dict[str, Any]:
        self.heard.append(news)
        return {"stop": False}

    def state(self) -> tuple[int, list[dict[str, Any]]]:
        return os.getpid(), self.heard


def test_runner_that_stands_still_for_a_while_stops_no_rank_and_a_dead_one_does_at_once(
    ray_cluster, namespace, monkeypatch, until
) -> None:
    monkeypatch.setattr(worker, "_EXCHANGE_TIMEOUT_S", 1.0)
    actor_class: Any = ray_cluster.remote(Desk).options(name="desk", namespace=namespace, num_cpus=0)
    desk = actor_class.remote()
    pid, _ = ray_cluster.get(desk.state.remote())
    with RunnerLine("desk", namespace, "k.1", 3, every_s=60.0) as line:
        os.kill(pid, signal.SIGSTOP)
        assert not line.send({"process": "here"})
        assert not line.must_stop.is_set()
        os.kill(pid, signal.SIGCONT)
        until(lambda: line.send({"progress": 1}))
        assert {"process": "here", "progress": 1} in ray_cluster.get(desk.state.remote())[1]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not line.send({"progress": 2}) and line.must_stop.is_set())
