"""What a submit says and refuses before anything starts, without a cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.services.settings import Settings
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import current_user
from tests.commands import Ended, run_command
from tests.live_sweep import SWEEP, write_live_sweep

ROOT = Path(__file__).parents[2]
CHANGED = ("submit", "quickstart", "--set", f"name={SWEEP}", "--set", "pretrain.seeds=[0, 1, 9]")
PATIENCE_S = 60.0
"""For a process to start and a silent address to be given up."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "ORCHESTRATOR_STORE", "ORCHESTRATOR_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def known(project: Path) -> LocalStore:
    """A store of this project in which somebody's sweep runs."""
    store = LocalStore(Path(Settings().store_uri().removeprefix("file://")))
    write_live_sweep(store, num_transfers=400, now=time.time())
    return store


def submit(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    return run_command(capsys, *CHANGED, *arguments)


def test_changed_sweep_under_its_name_shows_what_comes_goes_and_stops(
    known: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    result = submit(capsys, "--force")
    assert result.code == 3  # nobody to ask
    assert f"Difference of plans: {SWEEP}, revision 1 -> this one" in result.message
    assert "removed: pretrain/levels/depth1/seed2" in result.message
    assert "running jobs are no longer part of the plan and end after a checkpoint" in result.message
    assert known.list_children(f"sweeps/{SWEEP}/inbox/") == []


def test_sweep_of_somebody_else_is_refused_before_anything_starts(
    known: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    result = submit(capsys, "-y")
    assert result.code == 3
    assert f"sweep '{SWEEP}' belongs to ann, and you are {current_user()}" in result.message
    assert known.list_children(f"sweeps/{SWEEP}/inbox/") == []


def test_budget_that_does_not_last_is_refused_even_with_yes_and_creates_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = "resources={pretrain: {gpus: 1}, transfer: {gpus: 1}}"
    result = run_command(
        capsys, "submit", "quickstart", "-y", "--set", resources, "--set", "policy.budget.gpu_hours=0.0001"
    )
    assert result.code == 3
    assert "policy.budget.gpu_hours allows" in result.message
    assert list(project.iterdir()) == []


def test_submit_takes_another_store_and_refuses_a_wrong_priority(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = (project / "elsewhere").as_uri()
    result = run_command(capsys, "submit", "quickstart", "--scale", "tiny", "--store", elsewhere)
    assert result.code == 2  # the quickstart has no block tiny
    result = run_command(capsys, "submit", "quickstart", "--store", elsewhere, "--priority", "high")
    assert result.code == 3
    assert f"(store {elsewhere})" in result.message
    assert run_command(capsys, "submit", "quickstart", "--priority", "hihg").code == 2
    assert list(project.iterdir()) == []


@pytest.fixture(params=["closed", "silent"])
def nobody(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address where nobody listens, or whoever listens says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if request.param == "silent":
            yield address
            return
    yield address


def test_status_needs_no_cluster_however_silent_it_is(
    known: LocalStore, nobody: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    began_s = time.monotonic()
    result = run_command(capsys, "status", SWEEP)
    assert result.code == 101
    assert SWEEP in result.out
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert known.list_children("controllers/") == []


def test_submit_to_a_closed_address_says_so_within_seconds_and_submits_nothing(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began_s = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "submit", "quickstart", "-y"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert f"nothing answers at Ray address {address}" in " ".join(result.stderr.split())
    assert "Nothing was submitted" in result.stderr
    assert time.monotonic() - began_s < PATIENCE_S
    assert LocalStore(project / ".orchestrator" / "store").list_children("sweeps/") == []
