"""The short form: a runner, a controller and a zombie controller, on the cluster that all tests share."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ControllerLink, ensure_controller
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.sweeps.client import submit
from orchestrator.sweeps.lease import read_lease
from tests.chaos.chain_jobs import ENTRY_POINT, chain_job, read_traces
from tests.chaos.kills import controller_pid, find_snapshot, has_ended, kill, running_pids, start_zombie
from tests.chaos.verdict import journal_events, judge
from tests.chaos.zombie import LEASE_LOST

CLUSTER = "chaos-cluster"
SWEEP = "chaos"
GATE = "gates/long"
LEASE_S = 3.0
"""Of the zombie; waking it before its lease has expired would show nothing."""
DEADLINE_S = 100.0  # for one step of the story, on a machine that does many other things


def make_jobs() -> tuple[Job, ...]:
    """Two backbones after a data set, one of which ends once its gate is open; two short jobs from each."""
    data = chain_job("dataset/tree", num_steps=2, step_s=0.01)
    long = chain_job("pretrain/long", data, num_steps=70, step_s=0.05, gate=GATE)
    backbones = [long, chain_job("pretrain/other", data, num_steps=40, step_s=0.05)]
    transfers = [
        chain_job(f"finetune/{backbone.name.partition('/')[2]}/{seed}", backbone, num_steps=3, step_s=0.05)
        for backbone in backbones
        for seed in range(2)
    ]
    return (data, *backbones, *transfers)


@pytest.fixture
def ensure(store, namespace):
    def ensured() -> ControllerLink:
        return ensure_controller(store.uri, CLUSTER, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))

    return ensured


@pytest.fixture
def zombie(ray_cluster, store, namespace, tmp_path):
    """The sweep's first controller, which will sleep past its lease."""
    child = start_zombie(ray_cluster, store, CLUSTER, namespace, tmp_path / "zombie.log", lease_s=LEASE_S)
    yield child
    kill(child.pid)
    child.wait()


def submit_jobs(store, jobs: tuple[Job, ...]) -> None:
    submit(store, Plan(sweep=SWEEP, revision=0, store_uri=store.uri, jobs=jobs, baseline=""), "", CLUSTER)


def epoch_of(store) -> int:
    found = find_snapshot(store, SWEEP)
    return found.epoch if found else 0


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_sweep_survives_kills_of_runner_and_controller_and_a_zombie_that_wakes(
    ray_cluster, store, namespace, zombie, ensure, until, tmp_path
):
    seed = secrets.randbelow(2**32)
    print(f"chaos drawn with seed {seed}")  # noqa: T201 - to repeat a failure
    draw = random.Random(seed)  # noqa: S311 - no secret
    jobs = make_jobs()
    submit_jobs(store, jobs)
    until(lambda: running_pids(store, SWEEP, is_long), DEADLINE_S)
    slept_at_epoch = epoch_of(store)
    os.kill(zombie.pid, signal.SIGSTOP)
    lease = read_lease(store, CLUSTER)
    assert lease is not None
    ensure()
    until(lambda: epoch_of(store) > slept_at_epoch, DEADLINE_S)
    targets = ["runner", "controller"]
    draw.shuffle(targets)
    for target in targets:
        step = draw.randint(5, 60)
        until(lambda step=step: running_pids(store, SWEEP, is_long, past_step=step), DEADLINE_S)
        pids = running_pids(store, SWEEP, is_long)
        kill(controller_pid(ray_cluster, namespace) if target == "controller" else pids[0])
    store.put(GATE, b"")
    until(lambda: time.time() > lease.expires_at_s, DEADLINE_S)
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.wait(DEADLINE_S) == LEASE_LOST, (tmp_path / "zombie.log").read_text()
    until(lambda: has_ended(store, SWEEP), DEADLINE_S)
    audit = judge(store, SWEEP, jobs)
    # The zombie wrote nothing after it slept: its segments all stand before those of the next controller.
    writers = [event["holder_of_segment"] for event in journal_events(store, SWEEP)]
    first = audit.holders[CLUSTER, slept_at_epoch]
    assert writers == [first] * writers.count(first) + writers[writers.count(first) :]
    assert any(trace.first_step for trace in read_traces(store, jobs[1].key)), "the killed runner's work was resumed"


def is_long(job: str) -> bool:
    return job == "pretrain/long"
