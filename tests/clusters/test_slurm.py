"""The batch script in a real Slurm: a sweep whose allocation is preempted and queued again ends as if undisturbed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.state.transitions import SweepState
from orchestrator.storage.local import LocalStore
from tests.clusters.private_net import PrivateNet, need_namespaces
from tests.clusters.slurm_site import SlurmSite, need_slurm
from tests.clusters.small_sweep import (
    find_snapshot,
    has_ended,
    pretrains_past,
    undisturbed_weights,
    weights,
    write_sweep,
)
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "clusters" / "slurm" / "ray.sbatch"
until = partial(wait_until, deadline_s=300.0)
NUM_EPOCHS = 100
RESTED = "no job runs any more"


@pytest.fixture
def site() -> Iterator[SlurmSite]:
    need_namespaces()
    need_slurm()
    folder = Path(tempfile.mkdtemp(prefix="orc-s-"))  # a short path: sockets may have 107 characters
    net = PrivateNet()
    try:
        found = SlurmSite(folder, net.add_host(), num_nodes=2)
        found.start()
        yield found
    finally:
        net.end()
        shutil.rmtree(folder)


class Lab:
    """What a user of the site has: a checkout, a store, a sweep."""

    def __init__(self, site: SlurmSite, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.store = LocalStore(folder / "store")
        self.sweep_file = write_sweep(folder / "sweep.yaml", num_epochs=NUM_EPOCHS)
        self.variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_worker_niceness": "0",  # other tests run beside it, and would starve it
            "ORCHESTRATOR_DIRECTORY": str(folder / "project"),
            "ORCHESTRATOR_STORE": self.store.uri,
            "ORCHESTRATOR_STORE_SHARED": "true",
            "ORCHESTRATOR_CLUSTER": "lab",
            "ORCHESTRATOR_SHARED": str(folder / "shared"),
            "ORCHESTRATOR_IDLE_S": "5",
            "ORCHESTRATOR_GRACE_S": "60",
            "ORCHESTRATOR_OBJECT_STORE_BYTES": str(100 * 2**20),
            "ORCHESTRATOR_NODE_SCRIPT": str(ROOT / "clusters" / "node.sh"),
        }

    def submit_sweep(self) -> None:
        """From the login node, into the inbox of the store."""
        words = (sys.executable, "-m", "orchestrator.cli", "submit", str(self.sweep_file), "-y", "--no-wait")
        self.site.run(*words, **self.variables)

    def submit_allocation(self, *options: str) -> str:
        """Queue the script; the job's id."""
        told = self.site.run("sbatch", "--parsable", "--cpus-per-task=2", *options, str(SCRIPT), **self.variables)
        return told.strip()

    def tell(self) -> str:
        """For a failing test."""
        return f"{find_snapshot(self.store)}\n{self.site.logs()}"


@pytest.fixture
def lab(site: SlurmSite, tmp_path: Path) -> Lab:
    return Lab(site, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sweep_of_a_preempted_allocation_goes_on_when_it_is_back(lab: Lab, tmp_path: Path) -> None:
    lab.submit_sweep()
    job = lab.submit_allocation("--nodes=2")
    until(lambda: pretrains_past(lab.store, 20), "a pretrain works", tell=lab.tell)
    lab.site.run("sbatch", "--partition=high", "--nodes=2", "--cpus-per-task=4", "--wrap", "sleep 2")
    until(lambda: lab.site.restarts_of(job) > 0, "it is queued again", tell=lab.tell)
    rested = find_snapshot(lab.store)
    assert rested is not None
    assert not rested.state.is_final, "the sweep ended before it was disturbed"
    until(lambda: has_ended(lab.store), "the sweep ends", tell=lab.tell)
    until(lambda: lab.site.state_of(job) == "COMPLETED", "the allocation ends", tell=lab.tell)
    snapshot = find_snapshot(lab.store)
    assert snapshot is not None
    assert snapshot.state is SweepState.SUCCEEDED
    log = lab.site.logs("pretraining-*.log", num_characters=10**6)
    assert RESTED in log, f"no time was given for checkpoints\n{log}"
    assert any(view.resumed_from_step for view in snapshot.jobs.values()), "nothing was resumed"
    assert weights(lab.store, snapshot) == undisturbed_weights(tmp_path, lab.sweep_file)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [(), ("--array=3-4",)], ids=["job", "array"])
def test_cancelled_allocation_does_not_come_back(lab: Lab, options: tuple[str, ...]) -> None:
    node_script = lab.folder / "node.sh"
    node_script.write_text(f"touch {lab.folder}/started.$SLURM_JOB_ID; exec sleep 300\n")
    lab.variables["ORCHESTRATOR_NODE_SCRIPT"] = str(node_script)
    job = lab.submit_allocation("--nodes=1", *options)
    num_tasks = 2 if options else 1
    until(lambda: len(list(lab.folder.glob("started.*"))) == num_tasks, "it runs", tell=lab.tell)
    lab.site.run("scancel", job)
    until(lambda: not {"RUNNING", "COMPLETING"} & set(lab.site.state_of(job).split()), "it ends", tell=lab.tell)
    assert lab.site.state_of(job) == " ".join(["CANCELLED"] * num_tasks), lab.tell()
    assert lab.site.restarts_of(job) == 0
