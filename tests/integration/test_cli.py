"""The commands as a user types them, in processes of their own, without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.settings import Settings
from orchestrator.storage import open_store
from orchestrator.sweepfile import load_sweep

ROOT = Path(__file__).parents[2]
RECIPE = "{epochs: 1, batch_size: 32, lr: 0.05}"
SWEEP = f"""\
version: 1
name: tiny
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2], num_train: 64, num_val: 32}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["levels/*"]
  recipe: {RECIPE}
transfer:
  - {{name: top, target: levels/depth1, protocol: finetune, recipe: {RECIPE}}}
report: {{baseline: levels/depth1}}
"""


def orchestrator(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project directory whose store holds the finished sweep."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "sweep.yaml").write_text(SWEEP)
    home = Settings(directory=folder / ".orchestrator")
    sweep, text = load_sweep(str(folder / "sweep.yaml"))
    plan = build_plan(sweep, store_uri=home.store_uri(sweep))
    run_sweep_inprocess(open_store(plan.store_uri), plan, text)
    return folder


def test_help_names_every_command(tmp_path: Path) -> None:
    result = orchestrator(tmp_path, "--help")
    assert result.returncode == 0
    commands = {"submit", "plan", "status", "logs", "report", "run", "cancel", "publish", "up", "down"}
    assert all(f"  {command} " in result.stdout for command in commands)


def test_plan_fresh_directory_shows_all_jobs_and_creates_nothing(folder: Path) -> None:
    result = orchestrator(folder, "plan", "sweep.yaml", "-o", "json")
    assert result.returncode == 0
    plan = json.loads(result.stdout)
    assert len(plan["jobs"]) == 8
    assert {job["disposition"] for job in plan["jobs"]} == {"new"}
    assert [path.name for path in folder.iterdir()] == ["sweep.yaml"]


def test_plan_of_a_finished_sweep_reuses_everything(finished: Path) -> None:
    result = orchestrator(finished, "plan", "sweep.yaml", "-o", "json")
    assert {job["disposition"] for job in json.loads(result.stdout)["jobs"]} <= {
        "reuse",
        "stale",
    }  # if edited meanwhile


def test_plan_without_torch_or_ray(folder: Path) -> None:
    script = (
        "import sys; from orchestrator.cli.commands.plan import PlanOptions, show_plan\n"
        "show_plan('sweep.yaml', PlanOptions())\n"
        "sys.exit(bool({'torch', 'ray', 'workloads', 'mlflow'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, check=False
    )
    assert result.returncode == 0


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_wrong_file_ends_with_code_2_and_creates_nothing(folder: Path, command: str) -> None:
    (folder / "sweep.yaml").write_text(SWEEP.replace("depth2]", "dept2]"))
    result = orchestrator(folder, command, "sweep.yaml")
    assert result.returncode == 2
    assert result.stderr.startswith("error: sweep.yaml:6:")
    assert "did you mean 'depth2'" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["sweep.yaml"]


def test_submit_without_a_terminal_or_yes_is_refused_and_creates_nothing(folder: Path) -> None:
    result = orchestrator(folder, "submit", "sweep.yaml")
    assert result.returncode == 3
    assert "pass -y" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["sweep.yaml"]


def test_commands_without_a_store_say_so_with_code_102(tmp_path: Path) -> None:
    for arguments in (("status",), ("status", "tiny"), ("report", "tiny"), ("logs", "tiny", "x"), ("cancel", "tiny")):
        result = orchestrator(tmp_path, *arguments)
        assert result.returncode == 102, arguments
        assert "there is no store" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_down_without_a_stack_is_no_error(tmp_path: Path) -> None:
    result = orchestrator(tmp_path, "down")
    assert result.returncode == 0
    assert "No stack" in result.stderr


def test_status_of_a_finished_sweep_lists_its_jobs(finished: Path) -> None:
    result = orchestrator(finished, "status", "tiny", "-o", "json")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert document["state"] == "succeeded"
    assert {job["state"] for job in document["jobs"]} == {"succeeded"}


def test_status_of_an_unknown_sweep_names_the_nearest(finished: Path) -> None:
    result = orchestrator(finished, "status", "tinny")
    assert result.returncode == 102
    assert "did you mean 'tiny'" in result.stderr


def test_report_prints_the_table_and_saves_every_form(finished: Path) -> None:
    result = orchestrator(finished, "report", "tiny")
    assert result.returncode == 0
    assert "levels/depth2" in result.stdout
    files = {path.name for path in (finished / ".orchestrator/store/sweeps/tiny/report").iterdir()}
    assert {"report.md", "results.csv", "curve.png", "curve.svg"} <= files


def test_run_inprocess_reproduces_the_committed_numbers_and_keeps_nothing(finished: Path) -> None:
    job = "finetune/top/levels/depth2/seed0/seed0"
    status = json.loads(orchestrator(finished, "status", "tiny", "-o", "json").stdout)
    committed = next(entry["metrics"] for entry in status["jobs"] if entry["job"] == job)
    before = sorted(path for path in (finished / ".orchestrator/store").rglob("*") if path.is_file())
    result = orchestrator(finished, "run", job, "--sweep", "tiny", "--inprocess")
    assert result.returncode == 0, result.stderr
    shown = dict(line.split() for line in result.stdout.splitlines())
    assert float(shown["val_error"]) == pytest.approx(committed["val_error"])
    assert sorted(path for path in (finished / ".orchestrator/store").rglob("*") if path.is_file()) == before


def test_run_of_an_unknown_job_names_the_nearest(finished: Path) -> None:
    result = orchestrator(finished, "run", "pretrain/levels/depth2/seed1", "--sweep", "tiny", "--inprocess")
    assert result.returncode == 102
    assert "did you mean 'pretrain/levels/depth2/seed0'" in result.stderr
