"""How many jobs a bound holds back, and that no time left is told for what never starts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import Resources
from orchestrator.scheduling.budgets import Cap
from orchestrator.scheduling.queues import MAX_WAITS
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.services.status import load_status, present_document, status_lines
from orchestrator.sweeps import client
from orchestrator.sweeps.progress import read_progress
from orchestrator.testing import ScriptedBackend, Succeed
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import after, plan_of
from tests.scripted_sweep import CLUSTER, World, make_job, make_plan


def _counts(scheduler: Scheduler, sweep: str) -> dict[str, int]:
    """Jobs that are told to wait, by reason."""
    counts: dict[str, int] = {}
    for name, why in scheduler.waits[sweep].items():
        counts[why] = counts.get(why, 0) + 1 + scheduler.behind[sweep].get(name, 0)
    return counts


@pytest.mark.parametrize("num_shapes", [1, 3, MAX_WAITS + 5])
def test_every_ready_job_that_a_bound_holds_back_is_counted(num_shapes: int) -> None:
    shapes = [Resources(cpus=1.0 + number / 64, gpus=1.0) for number in range(num_shapes)]
    jobs = [
        replace(gpu_job(f"finetune/{shape.cpus}/{n}", gpus=1), resources=shape) for shape in shapes for n in range(4)
    ]
    scheduler = Scheduler()
    caps = {"ada": Cap(max_concurrent=0)}
    total, nodes = Resources(cpus=128.0, gpus=16.0), gpu_nodes(16)
    scheduler.decide(
        ClusterView(
            snapshots=[after(plan_of("s", *jobs, owner="ada"))], total=total, nodes=nodes, now=10.0, user_caps=caps
        )
    )
    assert _counts(scheduler, "s") == {"user ada runs 0 attempts, of max_concurrent=0": len(jobs)}


def test_jobs_that_started_are_not_counted_as_held_back() -> None:
    jobs = [gpu_job(f"finetune/{n}", gpus=1) for n in range(7)]
    scheduler = Scheduler()
    found = scheduler.decide(
        ClusterView(
            snapshots=[after(plan_of("s", *jobs, max_concurrent=1))],
            total=Resources(cpus=128.0, gpus=16.0),
            nodes=gpu_nodes(16),
            now=10.0,
        )
    )
    assert len(found) == 1
    assert _counts(scheduler, "s") == {"the sweep runs 1 attempt, of max_concurrent=1 (policy)": 6}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Five ready jobs of a user who may run none."""
    world = World(tmp_path / "store")
    names = [f"dataset/{number}" for number in range(5)]
    world.backend = ScriptedBackend(world.store, {name: [Succeed(after_observes=9)] for name in names})
    world.new_controller()
    client.write_quotas(world.store, CLUSTER, {"ada": Cap(max_concurrent=0)})
    plan = make_plan(*(make_job(name) for name in names), store_uri=world.store.uri)
    world.last_message["sweep"] = client.submit(world.store, plan, "name: sweep\n", CLUSTER, sender="ada", now=1.0)
    return world


def test_status_counts_all_that_a_quota_of_nothing_holds_back_and_tells_no_time_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tick_until(lambda: bool(read_progress(world.store, "sweep")))
    monkeypatch.setattr(time, "time", world.clock)  # its lease is of the world's clock
    standing = load_status(world.store, world.snapshot())
    told = "\n".join(status_lines(standing))
    assert standing.is_served
    assert "5 jobs wait: user ada runs 0 attempts, of max_concurrent=0 (dataset/" in told
    assert "The time left cannot be estimated: user ada may run no attempts (max_concurrent=0)" in told
    assert standing.left is None
    document = present_document(standing)
    assert document["time_left_s"] is None
    assert sum(document["waits_behind"].values()) == 4
    client.write_quotas(world.store, CLUSTER, {})
    assert load_status(world.store, world.snapshot()).shut == ""
