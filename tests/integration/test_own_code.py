"""docs/howto/own-code.md: its package is installed, its sweep runs, and wrong arguments are told by their place."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from tests.howto.pages import FOLDER, ROOT, blocks

TEXT = next(block.text for block in blocks(FOLDER / "own-code.md") if block.file == "sweep.yaml")
REFERENCE = "tinyplugins==0.1.0"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put the package; its folder is copied first, because building writes beside the sources."""
    folder = tmp_path_factory.mktemp("own-code")
    shutil.copytree(FOLDER / "own-code", folder / "tinyplugins")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index", "--no-build-isolation"]
    command = [*pip, "--no-deps", "--target", str(folder / "site"), str(folder / "tinyplugins")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "site"


@pytest.fixture
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.setenv("PYTHONPATH", f"{target}:{ROOT}")


def problems_of(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_sweep(str(file))
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]


@pytest.mark.slow
def test_sweep_of_the_page_runs_with_a_plugin_of_each_kind(installed: None, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(TEXT)
    sweep, text = load_sweep(str(tmp_path / "sweep.yaml"))
    assert "tinyplugins" not in sys.modules, "reading a sweep imports none of its plug-ins"
    store = LocalStore(tmp_path / "store")
    plan = build_plan(sweep, store_uri=store.uri)
    _check_identities(plan)
    snapshot = run_sweep_inprocess(store, plan, text, directory=tmp_path / "node")
    assert snapshot.state is SweepState.SUCCEEDED, snapshot.counts
    jobs = plan.by_name()
    assert read_record(store, jobs["labels/coarse"].key).metrics["num_classes"] > 1
    measured = read_record(store, jobs["analyze/means/leaves/leaf/seed0"].key).metrics
    assert measured.keys() == {"nearest-mean_accuracy"}
    assert 0.5 <= measured["nearest-mean_accuracy"] <= 1  # of two classes, the means are those of the same samples


def _check_identities(plan: Plan) -> None:
    jobs = plan.by_name()
    rule = jobs["labels/coarse"].identity["parameters"]["space"]["plugin"]
    assert rule == {"name": f"{REFERENCE}:by-initial", "arguments": {"letters": 2}}
    measure = jobs["analyze/means/coarse/seed0"].identity["parameters"]["measures"]["plugin"]
    assert measure == {"name": f"{REFERENCE}:nearest-mean", "arguments": {"level": "depth1"}}
    job = jobs["pretrain/coarse/seed0"]
    assert job.key.startswith("pretrain-small-mixer-by-initial-seed0-")
    parameters = job.identity["parameters"]
    assert parameters["model"]["name"] == f"{REFERENCE}:small-mixer"
    recipe = parameters["recipe"]
    assert (recipe["loss"], recipe["loss_arguments"]) == (f"{REFERENCE}:focal", {"gamma": 1.5})
    assert (recipe["augment_plugin"], recipe["augment_arguments"]) == (f"{REFERENCE}:erase", {"side": 4})


@pytest.mark.slow
def test_wrong_arguments_of_each_kind_are_refused_at_their_place(installed: None, tmp_path: Path) -> None:
    text = TEXT.replace("letters: 2", "letters: 0").replace("width: 16", "width: sixteen")
    text = text.replace("gamma: 1.5", "gama: 1.5").replace("side: 4", "share: 2")
    text = text.replace("level: depth1", "levels: depth1")
    told = problems_of(tmp_path, text)
    for wrong, why in (
        ("letters: 0", "0 is refused: "),
        ("width: sixteen", "'sixteen' is refused: "),
        ("gama: 1.5", "there is no parameter 'gama': did you mean 'gamma'?"),
        ("share: 2", "2 is refused: "),
        ("levels: depth1", "there is no parameter 'levels': did you mean 'level'?"),
    ):
        line = next(number for number, one in enumerate(text.splitlines(), 1) if wrong in one)
        column = text.splitlines()[line - 1].index(wrong) + 1
        assert any(one.startswith(f"sweep.yaml:{line}:{column}: ") and why in one for one in told), (wrong, told)


def test_plugins_that_are_not_installed_are_refused_with_their_places(tmp_path: Path) -> None:
    told = "\n".join(problems_of(tmp_path, TEXT))
    for name in ("by-initial", "small-mixer", "focal", "erase", "nearest-mean"):
        assert f"'{name}'" in told
