"""A changed sweep keeps what it has spent: a budget of GPU-hours does not start anew with each revision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job
from orchestrator.services.status import used_hours
from orchestrator.state.snapshot import decode_snapshot, encode_snapshot
from orchestrator.sweeps import client
from tests.scripted_sweep import CLUSTER, World, make_job, make_plan

HOUR_S = 3600.0


def trained(name: str, key: str = "", *, gpus: float = 2.0) -> Job:
    return replace(make_job(name, key=key), resources=Resources(cpus=4.0, gpus=gpus))


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.backend.total = Resources(cpus=64.0, gpus=16.0)
    return made


def submit(world: World, *jobs: Job) -> None:
    plan = make_plan(*jobs, store_uri=world.store.uri)
    world.last_message["sweep"] = client.submit(world.store, plan, "", CLUSTER, now=world.clock())


def gpu_hours(world: World) -> float:
    return used_hours(world.snapshot(), world.clock())[0]


def run_for_an_hour(world: World, *jobs: Job) -> None:
    submit(world, *jobs)
    world.tick_until(lambda: all(world.is_running(job.name) for job in jobs))
    world.clock.advance(HOUR_S)
    world.finish()


def test_revision_keeps_what_jobs_that_it_changes_and_drops_have_spent(world: World) -> None:
    run_for_an_hour(world, trained("pretrain/a"), trained("pretrain/b"), trained("pretrain/c"))
    spent = gpu_hours(world)
    assert spent == pytest.approx(6.0, abs=0.1)
    submit(world, trained("pretrain/a"), trained("pretrain/b", key="pretrain-other-0123"))
    world.finish()
    assert world.snapshot().revision == 2
    assert gpu_hours(world) == pytest.approx(spent, abs=0.1)
    assert used_hours(world.snapshot(), world.clock())[1] == pytest.approx(2 * spent, abs=0.2)


def test_attempt_that_a_revision_ends_counts_to_its_end(world: World) -> None:
    submit(world, trained("pretrain/a"))
    world.tick_until(lambda: world.is_running("pretrain/a"))
    world.clock.advance(HOUR_S)
    submit(world, trained("pretrain/b"))
    world.finish()
    assert world.snapshot().leaving == {}
    assert gpu_hours(world) == pytest.approx(2.0, abs=0.1)


def test_spent_hours_survive_a_stored_snapshot(world: World) -> None:
    run_for_an_hour(world, trained("pretrain/a"))
    submit(world, trained("pretrain/b"))
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.spent_gpu_s > HOUR_S
    assert decode_snapshot(encode_snapshot(snapshot), snapshot.plan) == snapshot


def test_spent_budget_stops_a_revision_that_would_go_on_spending(world: World) -> None:
    run_for_an_hour(world, trained("pretrain/a"))
    jobs = (trained("pretrain/b"),)
    plan = make_plan(*jobs, store_uri=world.store.uri)
    bounded = replace(plan, policy=replace(plan.policy, gpu_hours=2.0))
    client.submit(world.store, bounded, "", CLUSTER, now=world.clock())
    for _ in range(20):
        world.tick()
    assert world.snapshot().revision == 2
    assert "pretrain/b" not in world.launches()
    raised = replace(plan, policy=replace(plan.policy, gpu_hours=50.0))
    client.submit(world.store, raised, "", CLUSTER, now=world.clock())
    world.tick_until(lambda: "pretrain/b" in world.launches())
