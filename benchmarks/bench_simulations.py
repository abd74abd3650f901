"""Which share of the time short seeds of a simulation spend in its function, on two workers; how long plans take.

Both in one run, one after the other: a sweep on a cluster with two slots, whose runners are up, and two bare processes
that call the same function for the same seeds. Prints; asserts no times. ``SHORT_SEEDS`` sets the number of seeds,
``SEED_STEPS`` their length (100,000 steps of a random walk take about 1.5 ms), ``SEEDS_PER_JOB`` those of a job.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller
from orchestrator.planning.graph.build import build_plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import load_snapshot, submit

NUM_SEEDS = int(os.environ.get("SHORT_SEEDS", "100000"))
STEPS = int(os.environ.get("SEED_STEPS", "100000"))
PER_JOB = int(os.environ.get("SEEDS_PER_JOB", "5000"))
SLOTS = 2
CODE = """
import time
import numpy as np

def simulate(parameters, seeds, context):
    for seed in seeds:
        began_s = time.perf_counter()
        walk = np.random.default_rng(seed).normal(size=parameters["steps"]).cumsum()
        found = {"highest": float(walk.max()), "lowest": float(walk.min())}
        yield {**found, "inside_s": time.perf_counter() - began_s}
"""
SWEEP = """
version: 1
name: {name}
simulate:
  walks:
    run: ./walks.py:simulate
    parameters: {{steps: {steps}}}
    seeds: {{count: {count}, per_job: {per_job}}}
    metric: highest
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of one arm."""

    wall_s: float
    inside_s: float
    """In the simulation's function, over both workers."""

    @property
    def share(self) -> float:
        """Of the time of both workers."""
        return self.inside_s / (SLOTS * self.wall_s)


def run_ours(folder: Path, namespace: str, *, count: int, per_job: int, steps: int) -> Spent:
    """From the submit to the end of the sweep."""
    store, name = LocalStore(folder / "store"), f"short-{secrets.token_hex(3)}"
    (folder / "walks.py").write_text(CODE)
    file = folder / f"{name}.yaml"
    file.write_text(SWEEP.format(name=name, steps=steps, count=count, per_job=per_job))
    link = ensure_controller(store.uri, namespace, namespace, runners=RunnerSettings())
    plan = build_plan(load_sweep(str(file))[0], store_uri=store.uri)
    began_s = time.monotonic()
    submit(store, plan, "", namespace)
    link.wake(name)
    while not (snapshot := load_snapshot(store, name)).state.is_final:
        time.sleep(0.2)
    wall_s = time.monotonic() - began_s
    assert snapshot.state is SweepState.SUCCEEDED
    records = [read_record(store, job.key).metrics for job in plan.jobs]
    return Spent(wall_s=wall_s, inside_s=sum(one["inside_s"] * one["num_seeds"] for one in records))


def run_half(file: str, seeds: range, steps: int) -> float:
    """Seconds inside of the function, of one bare process."""
    spec = spec_from_file_location("walks", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return float(sum(row["inside_s"] for row in module.simulate({"steps": steps}, seeds, None)))


def run_bare(folder: Path, *, count: int, steps: int) -> Spent:
    """Two processes, half of the seeds each; they are up before the clock starts."""
    file = str(folder / "walks.py")
    with ProcessPoolExecutor(SLOTS, mp_context=get_context("spawn")) as pool:
        list(pool.map(run_half, [file] * SLOTS, [range(1)] * SLOTS, [steps] * SLOTS))
        began_s = time.monotonic()
        halves = [range(slot, count, SLOTS) for slot in range(SLOTS)]
        inside_s = sum(pool.map(run_half, [file] * SLOTS, halves, [steps] * SLOTS))
        return Spent(wall_s=time.monotonic() - began_s, inside_s=inside_s)


def test_short_seeds_spend_their_time_in_the_simulation(cluster: Any, tmp_path: Path) -> None:
    namespace = f"bench-{secrets.token_hex(4)}"
    run_ours(tmp_path, namespace, count=2 * SLOTS, per_job=1, steps=10)  # runners are warm from here on
    ours = run_ours(tmp_path, namespace, count=NUM_SEEDS, per_job=PER_JOB, steps=STEPS)
    for actor in cluster.util.list_named_actors(all_namespaces=True):
        cluster.kill(cluster.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)
    bare = run_bare(tmp_path, count=NUM_SEEDS, steps=STEPS)
    length_ms = 1e3 * bare.inside_s / NUM_SEEDS
    sys.stdout.write(
        f"\n{NUM_SEEDS:,} seeds of {length_ms:.2f} ms, {PER_JOB:,} per job, {SLOTS} workers: in the function "
        f"{ours.share:.1%} of {ours.wall_s:.1f} s; two bare processes {bare.share:.1%} of {bare.wall_s:.1f} s\n"
    )


@pytest.mark.parametrize("per_job", [1, 25])
def test_plans_of_8000_seeds(tmp_path: Path, per_job: int) -> None:
    (tmp_path / "walks.py").write_text(CODE)
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP.format(name="many", steps=10, count=8_000, per_job=per_job))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    jobs = build_plan(load_sweep(str(file))[0], store_uri="file:///s").jobs
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    sys.stdout.write(
        f"\n8,000 seeds in {len(jobs):,} jobs: planned in {wall_s:.2f} s, {cpu_s:.2f} of them CPU time here\n"
    )
