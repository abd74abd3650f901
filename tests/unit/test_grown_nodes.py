"""What a controller knows of attempts that it sent to no node, because the cluster was to grow for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from orchestrator.backends.protocol import AttemptReport, Capacity
from orchestrator.core.contract import Resources
from orchestrator.state.nodes import Node
from orchestrator.storage.local import LocalStore
from orchestrator.testing import ScriptedBackend, Succeed
from tests.scripted_sweep import World, make_job


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
