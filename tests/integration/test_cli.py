"""The commands as a user types them, without a cluster: in this process, but for what only a fresh one shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.settings import Settings
from orchestrator.storage import open_store
from orchestrator.sweepfile import load_sweep
from tests.commands import Ended, run_command
from tests.planning_cases import TINY

ROOT = Path(__file__).parents[2]
Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in a directory."""
    monkeypatch.setenv("NO_COLOR", "1")

    def run_in(folder: Path, *arguments: str) -> Ended:
        monkeypatch.chdir(folder)
        return run_command(capsys, *arguments)

    return run_in


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sweep.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project directory whose store holds the finished sweep."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "sweep.yaml").write_text(TINY)
    home = Settings(directory=folder / ".orchestrator")
    sweep, text = load_sweep(str(folder / "sweep.yaml"))
    plan = build_plan(sweep, store_uri=home.store_uri(sweep))
    run_sweep_inprocess(open_store(plan.store_uri), plan, text)
    return folder


def test_help_names_every_command(tmp_path: Path) -> None:
    result = python(tmp_path, "-m", "orchestrator.cli", "--help")
    assert result.returncode == 0
    commands = {"submit", "plan", "status", "logs", "report", "run", "cancel", "publish", "up", "down"}
    assert all(f"  {command} " in result.stdout for command in commands)


def test_plan_fresh_directory_shows_all_jobs_and_creates_nothing(run: Run, folder: Path) -> None:
    result = run(folder, "plan", "sweep.yaml", "-o", "json")
    assert result.code == 0
    plan = result.document
    assert len(plan["jobs"]) == 8
    assert {job["disposition"] for job in plan["jobs"]} == {"new"}
    assert [path.name for path in folder.iterdir()] == ["sweep.yaml"]


def test_plan_of_a_finished_sweep_reuses_everything(run: Run, finished: Path) -> None:
    result = run(finished, "plan", "sweep.yaml", "-o", "json")
    assert {job["disposition"] for job in result.document["jobs"]} <= {
        "reuse",
        "stale",
    }  # if edited meanwhile


def test_plan_without_torch_or_ray(folder: Path) -> None:
    script = (
        "import sys; from orchestrator.cli.commands.plan import PlanOptions, show_plan\n"
        "show_plan('sweep.yaml', PlanOptions())\n"
        "sys.exit(bool({'torch', 'ray', 'workloads', 'mlflow'} & sys.modules.keys()))"
    )
    result = python(folder, "-c", script)
    assert result.returncode == 0


def test_submit_without_a_terminal_or_yes_is_refused_and_creates_nothing(run: Run, folder: Path) -> None:
    result = run(folder, "submit", "sweep.yaml")
    assert result.code == 3
    assert "pass -y" in result.err
    assert [path.name for path in folder.iterdir()] == ["sweep.yaml"]


def test_down_without_a_stack_is_no_error(run: Run, tmp_path: Path) -> None:
    result = run(tmp_path, "down")
    assert result.code == 0
    assert "No stack" in result.err


def test_status_of_a_finished_sweep_lists_its_jobs(run: Run, finished: Path) -> None:
    result = run(finished, "status", "tiny", "-o", "json")
    assert result.code == 0
    document = result.document
    assert document["state"] == "succeeded"
    assert {job["state"] for job in document["jobs"]} == {"succeeded"}


def test_report_prints_the_table_and_saves_every_form(run: Run, finished: Path) -> None:
    result = run(finished, "report", "tiny")
    assert result.code == 0
    assert "levels/depth2" in result.out
    files = {path.name for path in (finished / ".orchestrator/store/sweeps/tiny/report").iterdir()}
    assert {"report.md", "results.csv", "curve.png", "curve.svg"} <= files


def test_run_inprocess_reproduces_the_committed_numbers_and_keeps_nothing(run: Run, finished: Path) -> None:
    job = "finetune/top/levels/depth2/seed0/seed0"
    status = run(finished, "status", "tiny", "-o", "json").document
    committed = next(entry["metrics"] for entry in status["jobs"] if entry["job"] == job)
    before = sorted(path for path in (finished / ".orchestrator/store").rglob("*") if path.is_file())
    result = run(finished, "run", "tiny", job, "--inprocess")
    assert result.code == 0, result.err
    shown = dict(line.split() for line in result.out.splitlines())
    assert float(shown["val_error"]) == pytest.approx(committed["val_error"])
    assert sorted(path for path in (finished / ".orchestrator/store").rglob("*") if path.is_file()) == before
