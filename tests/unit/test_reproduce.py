"""What a sweep was made from is kept with each revision, and plans to the same keys again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.code import package_digest
from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.reproduction import reproduce
from orchestrator.storage.layout import provenance_name, submission_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load, load_sweep
from orchestrator.sweeps.ledger import describe_plan, keys_digest
from orchestrator.testing.scripted import ScriptedBackend
from orchestrator.tracking import provenance
from orchestrator.tracking.provenance import Provenance, capture, capture_all, installed_packages, save
from workloads.commands.simulations import check

SWEEP = """
version: 1
name: again
vars: {image_size: 16}
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 64, num_val: 32}
labels:
  levels: {dataset: tree, hierarchy: [depth1]}
pretrain:
  model: {name: test_vit, image_size: "${vars.image_size}", kwargs: {patch_size: 4}}
  labels: ["levels/*"]
  seeds: [3, 4]
  recipe: {epochs: 2, batch_size: 16, lr: 0.1}
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "lab"
    folder.mkdir()
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        (folder / "model.py").write_text("width = 1\n")
        identity = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]
        subprocess.run(["git", "-C", folder, *identity, *command], check=True)
    (folder / "model.py").write_text("width = 2\n")
    (folder / "notes.txt").write_text("not known to git\n")
    return folder


def written(folder: Path) -> Path:
    file = folder / "again.yaml"
    file.write_text(SWEEP)
    return file


def submitted(store: LocalStore, checkout: Path, *overrides: str) -> Plan:
    sweep, text = load_sweep(str(written(checkout)), ("pretrain.recipe.lr=0.25", *overrides))
    plan = build_plan(sweep, store_uri=store.uri)
    origin = capture_all(checkout, package_digest())
    run_sweep_inprocess(store, plan, text, backend=ScriptedBackend(store), provenance=origin.to_json())
    return plan


def test_submit_revision_keeps_code_environment_machine_seeds_and_data(store: LocalStore, checkout: Path) -> None:
    plan = submitted(store, checkout)
    document = json.loads(store.get(provenance_name("again", 1)))
    origin = Provenance.from_json(document["submitted_from"])
    assert origin.commit == capture(checkout).commit != ""
    assert "-width = 1\n+width = 2\n" in origin.diff
    assert origin.untracked == ("again.yaml", "notes.txt")
    assert origin.packages == installed_packages()
    assert origin.packages["numpy"]
    assert origin.machine["cpu"]
    assert document["accepted_on"]["python"]
    assert document["seeds"]["pretrain_seed"] == [3, 4]
    assert document["datasets"]["dataset/tree"]["num_train"] == 64
    assert document["keys_sha256"] == keys_digest(plan)


def test_submit_another_plan_keeps_each_revision_apart(store: LocalStore, checkout: Path) -> None:
    first = submitted(store, checkout)
    second = submitted(store, checkout, "pretrain.seeds=[5]")
    seeds = [json.loads(store.get(provenance_name("again", revision)))["seeds"] for revision in (1, 2)]
    assert [found["pretrain_seed"] for found in seeds] == [[3, 4], [5]]
    assert reproduce(store, "again", 1).planned.jobs == first.jobs
    assert reproduce(store, "again", 2).planned.jobs == second.jobs


def test_reproduce_finished_sweep_plans_to_the_same_keys(
    store: LocalStore, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = submitted(store, checkout)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "again", "--store", store.uri, "-o", "json"])
    told = json.loads(result.stdout)
    assert result.exit_code == 0
    assert told["same_keys"]
    assert told["has_uncommitted_changes"]
    assert told["same_code"]
    assert told["other_packages"] == {}
    folder = tmp_path / "reproduce-again"
    assert set(told["files"]) == {path.name for path in folder.iterdir()}
    assert "numpy==" in (folder / "requirements.txt").read_text()
    assert "+width = 2" in (folder / "uncommitted.diff").read_text()
    again, _ = load_sweep(str(folder / "sweep.yaml"))
    replanned = build_plan(again, store_uri=store.uri)
    assert [(job.name, job.key) for job in replanned.jobs] == [(job.name, job.key) for job in plan.jobs]
    # Complete in itself: no recipe of the package, no override.
    assert yaml.safe_load((folder / "sweep.yaml").read_text())["pretrain"]["recipe"]["lr"] == 0.25


SIMULATED = """
version: 1
name: again
simulate:
  walk: {run: "walks.py:simulate", factors: {steps: [1, 2]}, seeds: {count: 2, per_job: 2}, metric: end}
"""


@pytest.mark.parametrize("is_earlier", [False, True], ids=["kept text", "text as earlier versions kept it"])
def test_reproduce_finds_the_file_of_a_simulation(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_earlier: bool
) -> None:
    monkeypatch.setattr(load, "check_simulations", lambda asked: check({"simulations": asked}))
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "walks.py").write_text("def simulate(parameters, seeds, context):\n    yield from ({} for _ in seeds)\n")
    (lab / "again.yaml").write_text(SIMULATED)
    monkeypatch.chdir(lab)
    sweep, text = load_sweep("again.yaml")
    text = SIMULATED if is_earlier else text
    run_sweep_inprocess(store, build_plan(sweep, store_uri=store.uri), text, backend=ScriptedBackend(store))
    monkeypatch.chdir(tmp_path)
    found = reproduce(store, "again", 1)
    assert found.is_exact
    assert f"{lab}/walks.py:simulate" in found.text


def test_reproduce_runs_no_python_file_outside_of_the_current_directory(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write the store chooses its path."""
    asked = []

    def counted(simulations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        asked.append(simulations)
        return check({"simulations": simulations})

    monkeypatch.setattr(load, "check_simulations", counted)
    lab, elsewhere = tmp_path / "lab", tmp_path / "elsewhere"
    lab.mkdir()
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(lab)
    (lab / "walks.py").write_text("def simulate(parameters, seeds, context):\n    yield from ({} for _ in seeds)\n")
    (lab / "again.yaml").write_text(SIMULATED)
    sweep, text = load_sweep(str(lab / "again.yaml"))
    asked.clear()
    monkeypatch.chdir(elsewhere)
    for path in (lab / "walks.py", elsewhere / "link" / "walks.py"):
        named = text.replace(f"{lab}/walks.py", str(path))
        kept = LocalStore(tmp_path / f"store-{path.parent.name}")
        run_sweep_inprocess(kept, build_plan(sweep, store_uri=kept.uri), named, backend=ScriptedBackend(kept))
        with pytest.raises(SpecError, match=r"walks\.py is outside of the current directory.*Read the file"):
            reproduce(kept, "again", 1)
    assert not asked


def test_reproduce_files_that_are_there_are_kept(
    store: LocalStore, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(store, checkout)
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/sweep.yaml").write_text("mine")
    arguments = ["reproduce", "again", "--store", store.uri, "--into", "mine"]
    refused = CliRunner().invoke(app, arguments)
    assert "sweep.yaml already" in str(refused.exception)
    assert Path("mine/sweep.yaml").read_text() == "mine"
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    assert "name: again" in Path("mine/sweep.yaml").read_text()


def test_reproduce_plan_that_differs_says_which_field_and_fails(
    store: LocalStore, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(store, checkout)
    found = reproduce(store, "again", 1)
    job = found.planned.jobs[-1]
    other = replace(job, key=job.key[:-1] + ("0" if job.key[-1] != "0" else "1"))
    altered = replace(found, planned=replace(found.planned, jobs=(*found.planned.jobs[:-1], other)))
    monkeypatch.setattr("orchestrator.services.reproduction.reproduce", lambda *_: altered)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "again", "--store", store.uri])
    assert result.exit_code == 1
    assert "is not what it was" in result.stdout
    assert job.name in result.stdout


def test_reproduce_sweep_of_an_earlier_version_says_what_is_not_known(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, text = load_sweep(str(written(tmp_path)))
    run_sweep_inprocess(store, build_plan(sweep, store_uri=store.uri), text, backend=ScriptedBackend(store))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "again", "--store", store.uri])
    assert result.exit_code == 0
    assert "Nothing is known of code and environment" in result.stdout
    assert [path.name for path in (tmp_path / "reproduce-again").iterdir()] == ["sweep.yaml"]


def test_provenance_of_another_version_is_read_as_far_as_it_is_known(store: LocalStore) -> None:
    save(store, "again", "m", Provenance(commit="abc", untracked=("a",)))
    assert provenance.load(store, "again", "m") == Provenance(commit="abc", untracked=("a",))
    store.put(submission_name("again", "old"), b'{"commit": "abc", "later": 1}')
    assert provenance.load(store, "again", "old") == Provenance(commit="abc")


def test_plan_description_names_seeds_data_and_code_versions(tmp_path: Path) -> None:
    sweep, _ = load_sweep(str(written(tmp_path)))
    told = describe_plan(build_plan(sweep, store_uri="file:///store"))
    assert told["seeds"] == {"dataset": [0], "pretrain": [3, 4], "pretrain_seed": [3, 4]}
    assert told["code_versions"]["pretrain"] >= 1
