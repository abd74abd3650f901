"""What a controller on a real Ray cluster records of nodes: which attempts are where, what the nodes are, who waits."""

from __future__ import annotations

from contextlib import suppress

import pytest

from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller
from orchestrator.core.contract import Resources
from orchestrator.core.errors import NotFoundError
from orchestrator.metrics.machine import describe_machine
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import load_snapshot, submit
from orchestrator.sweeps.progress import read_presence
from tests.integration.ray_jobs import ENTRY_POINT, job, request

CLUSTER, SWEEP = "test-cluster", "scripted"
SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)


def snapshot(store: LocalStore) -> Snapshot:
    with suppress(NotFoundError):
        return load_snapshot(store, SWEEP)
    return Snapshot(sweep=SWEEP)


@pytest.mark.slow
def test_gang_tells_the_nodes_of_all_ranks_and_what_they_are(namespace, store, gate, finish, until):
    backend = RayBackend(namespace, settings=SETTINGS, spare_runners=0)
    backend.announce(1)
    attempt = request(store, job("gang", gate=str(gate.path)), num_workers=2)
    backend.launch(attempt, Resources(cpus=2.0))
    until(lambda: backend.observe([attempt.attempt_id])[0].worker_nodes)
    report = backend.observe([attempt.attempt_id])[0]
    assert report.worker_nodes == (report.node, report.node)
    assert report.machines[report.node] == describe_machine()
    gate.open()
    finish(backend, attempt.attempt_id)


def test_controller_records_terms_machine_and_idle_runners_of_its_node(namespace, store, until):
    link = ensure_controller(store.uri, CLUSTER, namespace, runners=SETTINGS)
    submit(store, Plan(sweep=SWEEP, revision=0, store_uri=store.uri, jobs=(job("first"),), baseline=""), "", CLUSTER)
    link.wake(SWEEP)
    until(lambda: snapshot(store).state.is_final)
    found = snapshot(store)
    ((name, machine),) = found.nodes.items()
    assert machine == describe_machine()
    (use,) = found.jobs["first"].used
    assert use.is_spot is False  # its node was known: on this cluster, neither spot nor priced
    assert use.amount is None
    until(lambda: any(node.idle_runners for node in read_presence(store, CLUSTER)))
    (node,) = read_presence(store, CLUSTER)
    assert node.name == name
    assert node.cpus > 0
