"""What a short job costs beyond its work: our jobs on warm runners, and the same work as trials of Ray Tune.

Both in one run, one after the other on one cluster, in turns. Prints; asserts no times. ``SHORT_JOBS`` sets the number.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller
from orchestrator.planning.graph.plan import Plan
from orchestrator.stack.attach import set_ray_environment
from orchestrator.stack.environment import child_environment, ensure_token
from orchestrator.state.transitions import SweepState
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import load_snapshot, submit
from tests.integration.ray_jobs import ENTRY_POINT, job

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]
NUM_JOBS = int(os.environ.get("SHORT_JOBS", "1000"))
SLOTS = 4
WORK_S = 0.5


@pytest.fixture
def cluster() -> Iterator[Any]:
    import ray

    home = Path(tempfile.mkdtemp(prefix="orc-b-"))
    ensure_token(home)
    set_ray_environment({**child_environment(home), "PYTHONPATH": str(Path(__file__).parents[2])})
    ray.init(
        address="local",
        num_cpus=SLOTS,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(home / "r"),
    )
    yield ray
    ray.shutdown()


def run_ours(folder: Path, namespace: str, num_jobs: int) -> float:
    """Seconds from the submit to the end of a sweep of short jobs."""
    store = LocalStore(folder / "store")
    link = ensure_controller(store.uri, namespace, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))
    sweep = f"short-{secrets.token_hex(3)}"
    jobs = tuple(job(f"{sweep}-{number}", work_s=WORK_S) for number in range(num_jobs))
    started_s = time.monotonic()
    submit(store, Plan(sweep=sweep, revision=0, store_uri=store.uri, jobs=jobs, baseline=""), "", namespace)
    link.wake(sweep)
    while not (snapshot := load_snapshot(store, sweep)).state.is_final:
        time.sleep(0.2)
    assert snapshot.state is SweepState.SUCCEEDED
    return time.monotonic() - started_s


def trial(_config: dict[str, Any]) -> dict[str, float]:
    """The same work as a trial."""
    time.sleep(WORK_S)
    return {"done": 1.0}


def run_tune(folder: Path, num_jobs: int) -> float:
    """Seconds that Ray Tune takes for as many trials."""
    from ray import tune

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        tune_config=tune.TuneConfig(num_samples=num_jobs, max_concurrent_trials=SLOTS, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
    )
    started_s = time.monotonic()
    results = tuner.fit()
    assert results.num_errors == 0
    return time.monotonic() - started_s


def overhead_s(spent_s: float, num_jobs: int) -> float:
    """Seconds of a slot per job, beyond its work."""
    return spent_s * SLOTS / num_jobs - WORK_S


def test_short_jobs_cost_little_beyond_their_work(cluster: Any, tmp_path: Path) -> None:
    namespace = f"bench-{secrets.token_hex(4)}"
    run_ours(tmp_path, namespace, 2 * SLOTS)  # runners are warm from here on
    cluster.kill(cluster.get_actor("watchdog", namespace=namespace), no_restart=True)
    ours_s = overhead_s(run_ours(tmp_path, namespace, NUM_JOBS), NUM_JOBS)
    for actor in cluster.util.list_named_actors(all_namespaces=True):  # their slots are Tune's now
        cluster.kill(cluster.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)
    tune_s = overhead_s(run_tune(tmp_path, NUM_JOBS), NUM_JOBS)
    sys.stdout.write(
        f"\n{NUM_JOBS} jobs of {WORK_S:g} s on {SLOTS} slots, overhead per job: ours {1e3 * ours_s:.0f} ms, "
        f"Ray Tune {1e3 * tune_s:.0f} ms; ours / Ray Tune {ours_s / tune_s:.2f}"
    )
