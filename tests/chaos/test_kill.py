"""Kill -9 of the command line, a runner in mid-epoch and the controller, at random moments of a small real sweep."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.state.events import AttemptSucceeded, event_type
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.journal import Journal
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import load_snapshot, read_progress

ROOT = Path(__file__).parents[2]
SWEEP = """
version: 1
name: chaos
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: ["levels/*"]
  recipe: {epochs: 25, batch_size: 16, lr: 0.02}
transfer:
  - {name: tuned, target: levels/depth1, protocol: finetune, recipe: {epochs: 4, batch_size: 16, lr: 0.01}}
report: {baseline: levels/depth1}
"""
SUCCESS = event_type(AttemptSucceeded)
TRAINED = {JobKind.PRETRAIN, JobKind.FINETUNE}
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

    def snapshot(self) -> Snapshot | None:
        with suppress(NotFoundError):
            return load_snapshot(self.store, "chaos")
        return None

    def pretrains_running_past(self, step: int) -> list[str]:
        """Attempts that are in the middle of a pretrain."""
        progress = read_progress(self.store, "chaos").items()
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

    def has_ended(self) -> bool:
        snapshot = self.snapshot()
        return snapshot is not None and snapshot.state.is_final


@pytest.fixture
def sweep_file(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    return path


@pytest.fixture
def chaos(ray_cluster, namespace, tmp_path):
    return Chaos(ray_cluster, namespace, tmp_path)


def weights(store: ObjectStore, snapshot: Snapshot) -> dict[str, str]:
    views = [view for view in snapshot.jobs.values() if view.name.partition("/")[0] in TRAINED]
    return {view.name: read_record(store, view.key).summary["weights_sha256"] for view in views}


def successes(store: LocalStore) -> Counter[str]:
    return Counter(event["job"] for event in Journal(store, "chaos").read_new() if event["type"] == SUCCESS)


def undisturbed(tmp_path: Path, sweep_file: Path) -> dict[str, str]:
    store = LocalStore(tmp_path / "undisturbed")
    plan = build_plan(load_sweep(str(sweep_file))[0], store_uri=store.uri)
    return weights(store, run_sweep_inprocess(store, plan, directory=tmp_path / "node"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sweep_survives_kills_of_cli_runner_and_controller_bit_for_bit(chaos, sweep_file, tmp_path, until):
    seed = secrets.randbelow(2**32)
    print(f"kills drawn with seed {seed}")  # noqa: T201 - to repeat a failure
    draw = random.Random(seed)  # noqa: S311 - no secret
    targets = ["runner", "controller"]
    draw.shuffle(targets)
    command = chaos.submit(sweep_file)
    until(lambda: (found := chaos.snapshot()) is not None and found.plan is not None)
    command.kill()
    command.communicate()
    for target in targets:
        step = draw.randint(FIRST_STEP, LAST_STEP)
        until(lambda step=step: chaos.pretrains_running_past(step))
        running = chaos.pretrains_running_past(step)
        pid = chaos.controller_pid() if target == "controller" else chaos.runner_pid(running)
        assert pid is not None, f"none of {running} runs any more: train longer"
        os.kill(pid, signal.SIGKILL)
    until(chaos.has_ended, 150)
    snapshot = chaos.snapshot()
    assert snapshot.state is SweepState.SUCCEEDED
    assert weights(chaos.store, snapshot) == undisturbed(tmp_path, sweep_file)
    # None lost, none twice: each job has one success in the journal.
    assert successes(chaos.store) == Counter(snapshot.jobs.keys())
    resumed = [view.resumed_from_step for view in snapshot.jobs.values() if view.resumed_from_step]
    assert resumed, "the killed runner's attempt was repeated from a checkpoint"
