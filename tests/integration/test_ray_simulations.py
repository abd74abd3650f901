"""Simulations on a cluster: side by side and after a kill they give the bits of one process that runs them in turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import is_committed, read_part, read_record
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import load_snapshot, submit

CODE = """
import os
import time
from pathlib import Path

import numpy as np

def simulate(parameters, seeds, context):
    folder = Path(__file__).parent
    (folder / f"pid-{os.getpid()}").touch()
    for seed in seeds:
        time.sleep(0.3 if (folder / "slow").exists() else 0)
        yield {"end": np.random.default_rng(seed).normal(parameters["drift"], 1, 1000).sum()}
"""
SWEEP = """
version: 1
name: walks
simulate:
  walks:
    run: ./walks.py:simulate
    factors: {drift: [0, 0.1]}
    seeds: {count: 60, per_job: 30}
    metric: end
"""


def plan_in(folder: Path) -> tuple[Plan, LocalStore]:
    """The same sweep, with its own copy of the code and its own store."""
    folder.mkdir()
    (folder / "walks.py").write_text(CODE)
    (folder / "sweep.yaml").write_text(SWEEP)
    store = LocalStore(folder / "store")
    return build_plan(load_sweep(str(folder / "sweep.yaml"))[0], store_uri=store.uri), store


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_runners_and_parallel_jobs_give_the_bits_of_one_process(
    namespace: str, tmp_path: Path, until: Callable[..., None]
) -> None:
    plan, store = plan_in(tmp_path / "cluster")
    (tmp_path / "cluster" / "slow").touch()
    submit(store, plan, "", namespace)
    ensure_controller(store.uri, namespace, namespace, runners=RunnerSettings()).wake(plan.sweep)
    pids: set[int] = set()

    def is_written() -> bool:
        """Two runners are at work, and a job that has not ended has written seeds."""
        pids.update(int(file.name.removeprefix("pid-")) for file in (tmp_path / "cluster").glob("pid-*"))
        running = [job for job in plan.jobs if not is_committed(store, job.key)]
        folders = [f"{checkpoints_folder(job.key)}/" for job in running]
        names = (one.name for folder in folders for one in store.list_objects(folder))
        return len(pids) > 1 and any(name.endswith("/manifest.json") for name in names)

    until(is_written, 110.0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: load_snapshot(store, plan.sweep).state.is_final, 170.0)
    assert load_snapshot(store, plan.sweep).state is SweepState.SUCCEEDED
    records = [read_record(store, job.key) for job in plan.jobs]
    assert sum(record.summary["rows_of_earlier_attempts"] for record in records) > 0

    serial, other_store = plan_in(tmp_path / "serial")
    assert run_sweep_inprocess(other_store, serial).state is SweepState.SUCCEEDED
    for job, record in zip(serial.jobs, records, strict=True):
        alone = read_part(other_store, read_record(other_store, job.key), "runs.parquet")
        assert alone == read_part(store, record, "runs.parquet")
