"""``plan``, ``explain`` and ``describe`` as a user types them."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from orchestrator.planning.graph.build import build_plan
from orchestrator.storage import open_store
from orchestrator.sweepfile import load_sweep
from tests.commands import Ended, run_captured
from tests.planning_cases import TINY, TINY_RECIPE
from tests.scripted_sweep import World

JOB = "pretrain/levels/depth1/seed0"


def orchestrator(folder: Path, *arguments: str, **environment: str) -> Ended:
    """Run a command here: a process of its own for each would take most of the tests' time."""
    with chdir(folder), patch.dict(os.environ, {"NO_COLOR": "1", **environment}):
        return run_captured(*arguments)


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose store holds the sweep, run to its end by a scripted backend: no training, real records."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "sweep.yaml").write_text(TINY)
    world = World(folder / ".orchestrator" / "store")
    sweep, _ = load_sweep(str(folder / "sweep.yaml"))
    world.submit(*build_plan(sweep, store_uri=world.store.uri).jobs, sweep="tiny")
    world.finish("tiny")
    return folder


def test_plan_table_tells_time_storage_and_where_estimates_come_from(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(TINY)
    result = orchestrator(tmp_path, "plan", "sweep.yaml", "--cpus", "4")
    assert result.code == 0
    assert "8 jobs: 8 new, 0 resume, 0 reuse, 0 stale" in result.out
    for label in ("to run", "wall clock", "critical", "storage", "estimates"):
        assert f"\n{label} " in result.out
    assert "on 4 CPUs" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_plan_jobs_lists_every_job_with_its_key(submitted: Path) -> None:
    result = orchestrator(submitted, "plan", "sweep.yaml", "--jobs", COLUMNS="400")
    sweep, _ = load_sweep(str(submitted / "sweep.yaml"))
    for job in build_plan(sweep, store_uri="file:///x").jobs:
        assert job.name in result.out
        assert job.key in result.out


def test_plan_yaml_is_the_json(submitted: Path) -> None:
    results = [
        orchestrator(submitted, "plan", "sweep.yaml", "--cpus", "4", "-o", form).out for form in ("json", "yaml")
    ]
    assert json.loads(results[0]) == yaml.safe_load(results[1])
    assert json.loads(results[0])["summary"]["cluster"] == "4 CPUs"


def test_plan_over_budget_ends_with_code_3_and_the_arithmetic(tmp_path: Path) -> None:
    text = TINY + "resources: {pretrain: {gpus: 1}}\npolicy: {budget: {gpu_hours: 0.000001}}\n"
    (tmp_path / "sweep.yaml").write_text(text)
    result = orchestrator(tmp_path, "plan", "sweep.yaml", "--gpus", "8", "--accelerator", "h100")
    assert result.code == 3
    assert "GPU-hours" in result.err
    assert "8 jobs: 8 new" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_plan_jobs_that_no_node_can_hold_are_named(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(TINY + "resources: {pretrain: {gpus: 4}}\n")
    result = orchestrator(tmp_path, "plan", "sweep.yaml", "--gpus", "2")
    assert "4 jobs can never run on 2 GPUs on 1 nodes: pretrain/levels/depth1/seed0" in result.out


def test_plan_prices_give_the_cost(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(TINY)
    (tmp_path / "prices.yaml").write_text("{currency: EUR, cpu: 1000}")
    assert "EUR" in orchestrator(tmp_path, "plan", "sweep.yaml", "--prices", "prices.yaml").out
    wrong = orchestrator(tmp_path, "plan", "sweep.yaml", "--prices", "none.yaml")
    assert wrong.code == 2
    assert "none.yaml" in wrong.err


def test_plan_of_a_bucket_that_does_not_answer_warns_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(TINY)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    closed = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "ORCHESTRATOR_S3_DEADLINE_S": "1", **keys}
    result = orchestrator(tmp_path, "plan", "sweep.yaml", "--store", "s3://bucket/x", **closed)
    assert result.code == 0
    assert "warning: store s3://bucket/x" in result.err
    assert "8 jobs: 8 new" in result.out


def test_plan_diff_with_a_submitted_sweep_names_the_field(submitted: Path) -> None:
    (submitted / "changed.yaml").write_text(
        TINY.replace(f"recipe: {TINY_RECIPE}\ntransfer", "recipe: {epochs: 3, batch_size: 32, lr: 0.05}\ntransfer")
    )
    result = orchestrator(submitted, "plan", "changed.yaml", "--diff", "tiny")
    assert result.code == 0
    assert "4 rekeyed by parameters.recipe.epochs: 1.0 -> 3.0" in result.out
    same = orchestrator(submitted, "plan", "sweep.yaml", "--diff", "tiny")
    assert "Nothing has to run again." in same.out


def test_explain_of_a_sweep_asks_for_one_of_its_jobs(submitted: Path) -> None:
    result = orchestrator(submitted, "explain", "tiny")
    assert result.code == 2
    assert "'tiny' is a sweep: name one of its jobs, too" in " ".join((result.out + result.err).split())


def test_explain_says_what_differs_from_the_nearest_result(submitted: Path) -> None:
    (submitted / "seeds.yaml").write_text(
        TINY.replace(f"recipe: {TINY_RECIPE}\ntransfer", f"recipe: {TINY_RECIPE}\n  seeds: [7]\ntransfer")
    )
    result = orchestrator(submitted, "explain", "seeds.yaml", "finetune/top/levels/depth2/seed7/seed0")
    assert result.code == 0
    assert "new; no result has this key" in result.out
    assert "backbone > parameters.seed: 0 -> 7" in result.out
    committed = orchestrator(submitted, "explain", "tiny", JOB, "-o", "json")
    assert json.loads(committed.out)["state"] == "committed"


def test_describe_tells_state_places_and_identity(submitted: Path) -> None:
    result = orchestrator(submitted, "describe", "tiny", JOB)
    assert result.code == 0
    assert result.out.startswith(f"{JOB} of sweep tiny: succeeded")
    document = json.loads(orchestrator(submitted, "describe", "tiny", JOB, "-o", "json").out)
    store = open_store((submitted / ".orchestrator" / "store").as_uri())
    assert store.exists(document["places"]["record"].removeprefix(f"{store.uri}/"))
    assert document["identity"]["parameters"]["seed"] == 0
    assert document["attempts"] == 1
