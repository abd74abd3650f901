"""What a controller knows of attempts that it sent to no node, because the cluster was to grow for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from orchestrator.backends.protocol import AttemptReport, Capacity
from orchestrator.core.contract import Resources
from orchestrator.state.nodes import Node
from orchestrator.state.transitions import JobState
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.drain import drain, read_drain
from orchestrator.testing import Hang, Script, ScriptedBackend, Succeed
from tests.scripted_sweep import CLUSTER, World, make_job


class GrownBackend(ScriptedBackend):
    """Attempts come to lie on a node that was not there when they were launched, and that is taken back later."""

    leaves_at_s: float | None = None
    is_there = False

    def capacity(self) -> Capacity:
        """Only shapes at first: nobody is sent anywhere in particular."""
        new = Node(name="new", resources=self.total, leaves_at_s=self.leaves_at_s)
        staying = Resources(cpus=0.0) if self.leaves_at_s is not None else self.total
        machines = (new,) if self.is_there else ()
        return Capacity(total=staying, nodes=(self.total,), machines=machines, maximum=(Node(resources=self.total),))

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """As ever, with where they are."""
        return [replace(report, node="new") for report in super().observe(attempt_ids)]


def test_attempt_for_which_the_cluster_grew_writes_its_checkpoint_before_the_node_goes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    backend = GrownBackend(store, {"dataset/0": [Succeed(after_observes=1000), Succeed()]})
    world = World(tmp_path, backend, store=store)
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: world.is_running("dataset/0"))
    backend.is_there = True
    world.tick()
    attempt = world.job("dataset/0").attempt
    assert attempt is not None
    assert attempt.nodes == ("new",)
    assert backend.stopped == []
    backend.leaves_at_s = world.clock() + 120.0
    world.tick_until(lambda: bool(backend.stopped))
    assert world.clock() < backend.leaves_at_s


class FullBackend(ScriptedBackend):
    """One node, and others that are asked for and never come."""

    node = Node(name="node-1", resources=Resources(cpus=4.0))

    def capacity(self) -> Capacity:
        """The one node."""
        kind, shape = replace(self.node, name=""), self.node.resources
        return Capacity(total=shape, nodes=(shape,), machines=(self.node,), maximum=(kind,))

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """Those that were sent to no node have none."""
        told = super().observe(attempt_ids)
        return [one if self.placements[one.attempt_id].nodes else replace(one, placed_for_s=None) for one in told]


def test_drain_that_lets_running_attempts_finish_takes_back_those_that_wait_for_nodes(tmp_path: Path) -> None:
    """They would begin to run once the nodes come, and until then the cluster never counts as drained."""
    store, running, waiting = LocalStore(tmp_path), make_job("dataset/0", cpus=4.0), make_job("dataset/1", cpus=4.0)
    scripts: dict[str, list[Script]] = {running.name: [Succeed(after_observes=3)], waiting.name: [Hang()]}
    backend = FullBackend(store, scripts, total=Resources(cpus=8.0))
    world = World(tmp_path, backend, store=store)
    world.submit(running, waiting)
    world.tick_until(lambda: len(backend.live) == 2)
    attempt = world.job(waiting.name).attempt
    assert attempt is not None
    assert attempt.awaits_room
    drain(store, CLUSTER)
    world.tick_until(lambda: (found := read_drain(store, CLUSTER)) is not None and found.drained_at_s is not None)
    assert backend.stopped == [attempt.attempt_id]
    assert world.job(running.name).state is JobState.SUCCEEDED
    assert world.job(waiting.name).state is JobState.PENDING
