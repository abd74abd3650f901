"""Commands that would read, or leave a message in, a store that is not the cluster's say so instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from botocore.exceptions import ProfileNotFound

from orchestrator.core.contract import Resources
from orchestrator.state.brief_reasons import MAX_CHARACTERS, brief_reason
from orchestrator.storage.s3.responses import translate
from tests.commands import run_command
from tests.scripted_sweep import World, make_job

URL = "https://ray.lab:8265"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which nothing is set; what commands put into the environment does not outlive the test."""
    monkeypatch.chdir(tmp_path)
    own = {"HOME": str(tmp_path / "home"), "ORCHESTRATOR_DIRECTORY": str(tmp_path / "own")}
    with patch.dict(os.environ, own):
        for name in [*os.environ.keys() - own.keys()]:
            if name.startswith(("ORCHESTRATOR_", "RAY_", "MLFLOW_", "XDG_CONFIG")):
                del os.environ[name]
        yield tmp_path


def test_cluster_by_name_without_a_store_is_refused_and_nothing_is_written(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CLUSTER", "lab")
    result = run_command(capsys, "submit", "quickstart", "-y", "--no-wait")
    assert result.code == 2
    assert "cluster lab is reached through its store: set store=..." in result.message
    assert not (project / "own").exists()
    monkeypatch.setenv("ORCHESTRATOR_STORE_SHARED", "true")
    assert run_command(capsys, "submit", "quickstart", "-y", "--no-wait").code == 0


def test_context_by_name_without_a_store_is_warned_of(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "warning: cluster lab is reached through its store"
    assert told in run_command(capsys, "config", "set-context", "lab", "cluster=lab").message
    assert told not in run_command(capsys, "config", "set-context", "lab", f"store={project.as_uri()}").message


def test_plan_config_and_doctor_call_it_the_clusters_own(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", URL)
    assert "(store the cluster's own)" in " ".join(run_command(capsys, "plan", "quickstart").out.split())
    assert run_command(capsys, "config", "-o", "json").document["store"] is None
    assert "the cluster's own, not known here" in " ".join(run_command(capsys, "config").out.split())
    checks = run_command(capsys, "doctor", "--local", "-o", "json").document["checks"]
    assert (checks[0]["name"], checks[0]["verdict"]) == ("store", "skipped")
    assert not Path("/the-store-of-the-cluster").exists()
    assert list(project.iterdir()) == []


def test_profile_that_does_not_exist_is_named() -> None:
    told = str(translate(ProfileNotFound(profile="labb"), "list_objects_v2 s3://b/"))
    assert "the AWS profile 'labb' does not exist" in told


def test_remedy_of_a_failure_is_never_cut() -> None:
    remedy = "lower `resources` of pretrain jobs in sweep.yaml, or add a larger node and resubmit"
    told = brief_reason(f"infeasible: it asks for {'1 CPU, ' * 40}but no node has; {remedy} (1 of 1 failures)")
    assert told.endswith(f"...; {remedy} (1 of 1 failures)")
    assert len(brief_reason("x" * 100 + "; " + "y" * 10_000)) == MAX_CHARACTERS


def test_memory_is_told_with_one_decimal() -> None:
    assert str(Resources(cpus=4.0, memory_gib=15.27343)) == "4 CPU, 15.3 GiB"
    assert str(Resources(cpus=4.0, memory_gib=2048.0)) == "4 CPU, 2048 GiB"
    assert str(Resources(cpus=4.0, memory_gib=0.0078125)) == "4 CPU, 0.0078125 GiB"


def test_explain_of_a_failed_job_tells_its_state_and_reason(
    tmp_path: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "store")
    world.submit(make_job("pretrain/huge", cpus=1e6), make_job("probe/huge", "pretrain/huge"))
    world.finish()
    arguments = ["--store", world.store.uri]
    told = " ".join(run_command(capsys, "explain", "sweep", "pretrain/huge", *arguments).out.split())
    assert "in sweep sweep it is failed: infeasible: it asks for 1e+06 CPU" in told
    assert "or add a larger node and resubmit" in told
    assert "orchestrator describe sweep pretrain/huge" in told
    document = run_command(capsys, "explain", "sweep", "probe/huge", *arguments, "-o", "json").document
    assert document["job_state"] == "skipped"


def test_forecast_with_prices_of_other_machines_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = project / "prices.yaml"
    prices.write_text("{A100: 2.2}")
    arguments = ["forecast", "quickstart", "--gpus", "2", "--accelerator", "H200", "--prices", str(prices)]
    told = run_command(capsys, *arguments)
    assert told.code == 0, told.err
    assert "cost unknown: the table has no price of " in told.out
    prices.write_text("{H200: 3.0, cpu: 0.1}")
    assert "cost unknown" not in run_command(capsys, *arguments).out


def test_difference_of_plans_names_both_sides_and_what_a_submit_would_run(
    tmp_path: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run_command(capsys, "plan", "quickstart", "--diff", "quickstart", "--set", "pretrain.seeds=0,7").out
    assert "Difference of plans: quickstart -> quickstart with --set" in told
    assert "A submit of quickstart: 37 jobs: 37 new, 0 resume, 0 reuse, 0 stale" in told
    world = World(tmp_path / "store")
    world.submit(make_job("pretrain/a"))
    world.finish()
    told = run_command(capsys, "plan", "quickstart", "--diff", "sweep", "--store", world.store.uri).out
    assert "Difference of plans: sweep, revision 1 -> quickstart" in told


def test_pin_is_confirmed_on_stderr(tmp_path: Path, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path / "store")
    world.submit(make_job("pretrain/a"), make_job("probe/a", "pretrain/a"))
    world.finish()
    pinned = run_command(capsys, "gc", "--pin", "mine=sweep", "--store", world.store.uri)
    assert "Pin mine keeps 2 keys of sweep sweep.\n" in pinned.err
    assert "Pin" not in pinned.out
    assert "Pin mine is removed.\n" in run_command(capsys, "gc", "--unpin", "mine", "--store", world.store.uri).err
