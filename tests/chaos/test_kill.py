"""Kill -9 of the command line, a runner in mid-epoch and the controller, at random moments of a small real sweep."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.state.events import AttemptSucceeded, event_type
from orchestrator.state.transitions import SweepState
from orchestrator.storage.journal import Journal
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import load_snapshot, read_progress
from tests.clusters.small_sweep import SWEEP, find_snapshot, has_ended, undisturbed_weights, weights, write_sweep

ROOT = Path(__file__).parents[2]
SUCCESS = event_type(AttemptSucceeded)
FIRST_STEP, LAST_STEP = 7, 90  # an epoch has 6 steps and the pretrain 150: past a checkpoint, before the end


class Chaos:
    """One sweep on the cluster, and everything of it that can be killed."""

    def __init__(self, ray: Any, namespace: str, folder: Path) -> None:
        self._ray = ray
        self._namespace = namespace
        self.store = LocalStore(folder / "chaos")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "ORCHESTRATOR_NAMESPACE": namespace,
            "ORCHESTRATOR_DIRECTORY": str(folder / "project"),
            "ORCHESTRATOR_STORE": self.store.uri,
        }

    def submit(self, sweep_file: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "orchestrator.cli", "submit", str(sweep_file), "-y"]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def pretrains_running_past(self, step: int) -> list[str]:
        """Attempts that are in the middle of a pretrain."""
        progress = read_progress(self.store, SWEEP).items()
        return [p.attempt_id for job, p in progress if job.startswith("pretrain/") and p.progress.step >= step]

    def controller_pid(self) -> int:
        handle = self._ray.get_actor("controller", namespace=self._namespace)
        return int(self._ray.get(handle.ping.remote(), timeout=30)["pid"])

    def runner_pid(self, attempt_ids: list[str]) -> int | None:
        """Process that runs one of these attempts right now."""
        actors = self._ray.util.list_named_actors(all_namespaces=True)
        names = [a["name"] for a in actors if a["namespace"] == self._namespace and a["name"].startswith("runner/")]
        for name in names:
            handle = self._ray.get_actor(name, namespace=self._namespace)
            description = self._ray.get(handle.describe.remote(), timeout=30)
            if description["attempt_id"] in attempt_ids and not description["has_ended"]:
                return int(description["pid"])
        return None


@pytest.fixture
def sweep_file(tmp_path):
    return write_sweep(tmp_path / "sweep.yaml", num_epochs=25)


@pytest.fixture
def chaos(ray_cluster, namespace, tmp_path):
    return Chaos(ray_cluster, namespace, tmp_path)


def successes(store: LocalStore) -> Counter[str]:
    return Counter(event["job"] for event in Journal(store, SWEEP).read_new() if event["type"] == SUCCESS)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sweep_survives_kills_of_cli_runner_and_controller_bit_for_bit(chaos, sweep_file, tmp_path, until):
    seed = secrets.randbelow(2**32)
    print(f"kills drawn with seed {seed}")  # noqa: T201 - to repeat a failure
    draw = random.Random(seed)  # noqa: S311 - no secret
    targets = ["runner", "controller"]
    draw.shuffle(targets)
    command = chaos.submit(sweep_file)
    until(lambda: (found := find_snapshot(chaos.store)) is not None and found.plan is not None)
    command.kill()
    command.communicate()
    for target in targets:
        step = draw.randint(FIRST_STEP, LAST_STEP)
        until(lambda step=step: chaos.pretrains_running_past(step))
        running = chaos.pretrains_running_past(step)
        pid = chaos.controller_pid() if target == "controller" else chaos.runner_pid(running)
        assert pid is not None, f"none of {running} runs any more: train longer"
        os.kill(pid, signal.SIGKILL)
    until(lambda: has_ended(chaos.store), 150)
    snapshot = load_snapshot(chaos.store, SWEEP)
    assert snapshot.state is SweepState.SUCCEEDED
    assert weights(chaos.store, snapshot) == undisturbed_weights(tmp_path, sweep_file)
    # None lost, none twice: each job has one success in the journal.
    assert successes(chaos.store) == Counter(snapshot.jobs.keys())
    resumed = [view.resumed_from_step for view in snapshot.jobs.values() if view.resumed_from_step]
    assert resumed, "the killed runner's attempt was repeated from a checkpoint"
