"""Several sweeps forecast as one study."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.core.errors import UserError
from orchestrator.simulation.forecast import join_plans
from tests.planning_cases import named_blocks
from tests.scripted_sweep import make_job, make_plan

DATA, SHARED = make_job("dataset/tree"), make_job("pretrain/shared", "dataset/tree")
FIRST = make_plan(DATA, SHARED, make_job("probe/a", "pretrain/shared", key="probe-a-1"), sweep="first")
SECOND = make_plan(
    DATA,
    replace(SHARED, name="pretrain/same"),
    make_job("probe/a", "pretrain/same", key="probe-a-2"),
    sweep="second",
)


def test_study_of_one_plan_is_that_plan():
    study = join_plans([FIRST])
    assert study.plan == FIRST
    assert study.names == ({job.name: job.name for job in FIRST.jobs},)


def test_study_has_common_jobs_once_and_all_others():
    study = join_plans([FIRST, SECOND])
    assert [job.name for job in study.plan.jobs] == [
        "first/dataset/tree",
        "first/pretrain/shared",
        "first/probe/a",
        "second/probe/a",
    ]
    assert study.plan.by_name()["second/probe/a"].needs == ("first/pretrain/shared",)
    assert study.names[1]["pretrain/same"] == "first/pretrain/shared"
    assert study.plan.sweep == "first+second"


def test_study_has_a_result_of_two_names_once():
    twin = replace(SHARED, name="pretrain/twin")
    probe, finetune = make_job("probe/a", SHARED.name), make_job("finetune/a", twin.name, SHARED.name)
    study = join_plans([make_plan(DATA, SHARED, twin, probe, finetune)])
    assert study.plan == make_plan(DATA, SHARED, probe, replace(finetune, needs=(SHARED.name,)))
    assert study.names[0][twin.name] == SHARED.name


def test_study_of_a_sweep_named_twice_is_refused():
    with pytest.raises(UserError, match="first, first; name each once"):
        join_plans([FIRST, FIRST])


def test_forecast_of_two_sweeps_takes_less_than_both_alone(tmp_path):
    texts = {name: _sweep(name, seeds) for name, seeds in (("left", "[0, 1]"), ("right", "[1, 2]"))}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    left, right, both = (_forecast(tmp_path, *names) for names in (["left"], ["right"], ["left", "right"]))
    assert both["state"] == "succeeded"
    assert both["num_jobs"] < left["num_jobs"] + right["num_jobs"]
    assert both["kept_bytes"] < left["kept_bytes"] + right["kept_bytes"]
    assert max(left["hours"]["work"], right["hours"]["work"]) < both["hours"]["work"]
    assert both["hours"]["work"] < left["hours"]["work"] + right["hours"]["work"]


def test_forecast_of_a_result_of_two_names_is_that_with_one_name(tmp_path):
    for name, blocks in (("once", ("a",)), ("twice", ("a", "b"))):
        (tmp_path / f"{name}.yaml").write_text(named_blocks(*blocks))
    once, twice = (_forecast(tmp_path, name) for name in ("once", "twice"))
    waits = [sorted(found.pop("waits_s").values()) for found in (once, twice)]
    assert waits[1] == pytest.approx(waits[0])
    assert twice == once


@pytest.mark.ci
def test_forecast_of_data_that_is_only_declared_runs(tmp_path):
    """As of the paper's sweeps before anybody has the images."""
    arguments = ["forecast", "paper-in1k-resnet50", "--gpus", "64", "-o", "json", "--store", (tmp_path / "s").as_uri()]
    done = CliRunner().invoke(app, [*arguments, "--accelerator", "H100"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["makespan_s"] > 3600.0


def _forecast(folder, *names):
    files = [str(folder / f"{name}.yaml") for name in names]
    arguments = ["forecast", *files, "--cpus", "8", "-o", "json", "--store", (folder / "store").as_uri()]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def _sweep(name, seeds):
    return f"""
version: 1
name: {name}
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2], num_train: 512, num_val: 64}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {{name: resnet18, image_size: 32}}
  labels: ["levels/*"]
  recipe: {{epochs: 2, batch_size: 64, lr: 0.1}}
  seeds: {seeds}
"""
