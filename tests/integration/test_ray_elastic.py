"""An elastic gang on a real Ray cluster that loses a node and gets another one: real raylets, Ray Train and gloo.

The GPUs are invented: nodes say that they have them, and the ranks talk through gloo. The controller runs in this
process, on the real backend; its clock is moved once, over the time for which a gang is left as it is before it grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.controller import Controller
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.preemption import GROWS_AFTER_S
from orchestrator.state.snapshot import Attempt
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_part, read_record
from orchestrator.sweeps.client import load_snapshot, submit
from tests.chaos.verdict import audit_journal, journal_events
from tests.integration.elastic_jobs import ENTRY_POINT, EVERY, digest_of_all, elastic_job, read_traces
from tests.integration.extra_nodes import UncheckedNodes
from tests.integration.ray_jobs import reservations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SWEEP, DEADLINE_S = "elastic", 150.0


@dataclass
class MovedClock:
    """The time, and what it was moved by."""

    moved_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.moved_s


@dataclass
class Served:
    """A controller that turns while somebody waits."""

    controller: Controller
    backend: RayBackend
    until: Callable[..., None]

    def live(self) -> Attempt | None:
        attempts = [attempt for one in self.controller.snapshots for attempt in one.live_attempts]
        return attempts[0] if attempts else None

    def wait_for(self, condition: Callable[[], object]) -> None:
        def turn() -> bool:
            self.controller.tick()
            if condition():
                return True
            self.backend.wait(0.2)
            return False

        self.until(turn, DEADLINE_S, pause_s=0.02)


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def served(store, namespace, clock, until) -> Served:
    settings = RunnerSettings(entry_point=ENTRY_POINT, collectives="gloo")
    backend = UncheckedNodes(namespace, settings=settings, spare_runners=0)
    return Served(
        controller=Controller(store, backend, "elastic-cluster", "holder", clock), backend=backend, until=until
    )


def test_gang_goes_on_smaller_when_its_node_dies_and_grows_when_another_comes(
    ray_cluster, store, gate, nodes, served, clock, until
) -> None:
    job = elastic_job(gpus=4, min_gpus=2, gate=gate.path)
    both = {nodes.start(cpus=1, gpus=2), nodes.start(cpus=1, gpus=2)}
    submit(store, Plan(sweep=SWEEP, revision=0, store_uri=store.uri, jobs=(job,), baseline=""), "", "elastic-cluster")

    def steps_of(number: int) -> int:
        attempt = served.live()
        is_it = attempt is not None and attempt.num_workers == (2 if number == 1 else 4)
        reports = served.backend.observe([attempt.attempt_id]) if attempt is not None and is_it else []
        step = reports[0].progress.step if reports and reports[0].progress else 0
        traces = read_traces(store, job.key)
        return step if len(traces) == number + 1 and step > traces[number]["first_step"] else 0

    served.wait_for(lambda: steps_of(0) > EVERY)
    first = served.live()
    assert first is not None
    assert (first.num_workers, set(first.nodes)) == (4, both)
    nodes.kill(first.nodes[-1])
    served.wait_for(lambda: steps_of(1))
    second = served.live()
    assert second is not None
    assert (second.num_workers, second.resources.gpus, set(second.nodes)) == (2, 2.0, {first.nodes[0]})
    come = nodes.start(cpus=1, gpus=2)
    served.wait_for(lambda: come in {machine.name for machine in served.backend.capacity().machines})
    still = served.live()
    assert still is not None
    assert still.attempt_id == second.attempt_id, "it is left as it is for a while"
    clock.moved_s += GROWS_AFTER_S
    served.wait_for(lambda: steps_of(2))
    third = served.live()
    assert third is not None
    assert (third.num_workers, set(third.nodes)) == (4, {first.nodes[0], come})
    gate.open()
    served.wait_for(lambda: load_snapshot(store, SWEEP).state is SweepState.SUCCEEDED)

    audit_journal(store, SWEEP, (job,))
    told = [event for event in journal_events(store, SWEEP) if event["type"].startswith("attempt_")]
    told = [event for event in told if event["type"] != "attempt_placed"]
    *until_smaller, growing, second_end, full_again, success = told
    losses = [event for event in until_smaller if event["type"] != "attempt_launched"]
    # Ray may take seconds to notice that the node is gone: until then one more attempt may be sent there.
    assert 1 <= len(losses) <= 2, losses
    assert all(event["type"] == "attempt_lost" or event["kind"] == "node_lost" for event in losses)
    assert [event["num_workers"] for event in told if event["type"] == "attempt_launched"][-2:] == [2, 0]
    assert (growing["type"], second_end["kind"]) == ("attempt_preempting", "preempted")
    assert "grows from 2 to 4 GPUs" in growing["reason"]
    assert (full_again["type"], success["type"]) == ("attempt_launched", "attempt_succeeded")
    begun, smaller, grown = read_traces(store, job.key)
    assert [trace["world_size"] for trace in (begun, smaller, grown)] == [4, 2, 4]
    assert smaller["first_step"] >= EVERY
    assert smaller["first_step"] % EVERY == 0, "from its newest checkpoint"
    assert grown["first_step"] == smaller["last_step"] > smaller["first_step"], "growing lost no step"
    assert read_part(store, read_record(store, job.key), "payload").decode() == digest_of_all()
    until(lambda: not reservations(ray_cluster))
