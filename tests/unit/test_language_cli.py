"""``init``, ``validate`` and ``schema``: sweeps to begin with, and whether a file is right."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.commands.init import Template
from orchestrator.core.errors import UserError
from orchestrator.planning.graph.build import build_plan
from orchestrator.sweepfile import load_sweep, templates
from orchestrator.sweepfile.load import load_all
from orchestrator.sweepfile.parse.document import SCALES, Changes
from orchestrator.sweepfile.reference import MARK, reference_text

ROOT = Path(__file__).parents[2]
SELF_CONTAINED = ("synthetic", "clusters", "blocks", "transfers")


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCHESTRATOR_DIRECTORY", raising=False)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_templates_are_those_of_the_command() -> None:
    assert {template.value for template in Template} == {
        path.stem for path in Path(templates.__file__).parent.glob("*.yaml")
    }


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("template", SELF_CONTAINED)
def test_init_writes_a_sweep_that_is_right_and_plans(template: str) -> None:
    run("init", "sweep.yaml", "--template", template)
    first = Path("sweep.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=.orchestrator/sweep.schema.json"
    assert json.loads(Path(".orchestrator/sweep.schema.json").read_text(encoding="utf-8"))["definitions"]
    answer = json.loads(run("validate", "sweep.yaml", "-o", "json"))
    assert answer["valid"]
    assert answer["scales"] == list(SCALES)
    assert answer["jobs"]["pretrain"] > 1


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("template", sorted(set(map(str, Template)) - set(SELF_CONTAINED)))
def test_init_writes_a_sweep_whose_data_can_be_replaced(template: str) -> None:
    """Their data are the user's: instead of them a generated tree, and its levels."""
    run("init", "sweep.yaml", "--template", template)
    overrides = [
        "datasets.photos={builtin: synthetic-hierarchy}",
        "labels.levels={dataset: photos, hierarchy: [depth1, leaf]}",
        "pretrain.labels=[levels/leaf, levels/depth1]",
        "transfer.0.target=levels/depth1",
        "report.baseline=levels/depth1",
        "pretrain.model.image_size=32",
    ]
    if template == "wordnet":  # whose rules ask for synsets
        overrides += ["labels.wordnet={modulo: 2}", "labels.animal={modulo: 2}"]
    sweep, _ = load_sweep("sweep.yaml", overrides, scale="tiny")
    assert len(build_plan(sweep, store_uri="file:///s").jobs) > 5


@pytest.mark.usefixtures("_here")
def test_init_keeps_a_file_that_is_there() -> None:
    Path("sweep.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="is there already and would be lost; name another file, or pass --force"):
        run("init")
    assert Path("sweep.yaml").read_text(encoding="utf-8") == "mine"
    run("init", "--force")
    assert "mine" not in Path("sweep.yaml").read_text(encoding="utf-8")


@pytest.mark.usefixtures("_here")
def test_init_that_cannot_write_leaves_the_file_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sweep.yaml").write_text("mine", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"schema\.json cannot be written: No space left on device; choose another"):
        run("init", "--force")
    assert Path("sweep.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.usefixtures("_here")
def test_init_in_another_folder_names_the_schema_from_there() -> None:
    run("init", "a/b/sweep.yaml")
    assert "$schema=../../.orchestrator/sweep.schema.json" in Path("a/b/sweep.yaml").read_text(encoding="utf-8")


def test_schema_prints_the_schema() -> None:
    assert json.loads(run("schema"))["$schema"] == "http://json-schema.org/draft-07/schema#"


def test_validate_takes_overrides() -> None:
    counts = json.loads(run("validate", "quickstart", "--set", "pretrain.seeds=0,1,2,3,4", "-o", "json"))["jobs"]
    assert counts["pretrain"] == 25


def test_validate_imports_no_data_plane_and_no_cluster() -> None:
    script = (
        "import sys; sys.argv = ['orchestrator', 'validate', 'quickstart']\n"
        "from orchestrator.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'timm', 'ray', 'mlflow', 'workloads', 'boto3', 'pandas', 'numpy', 'scipy', 'sklearn'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_reference_of_the_docs_is_current() -> None:
    text = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")
    assert MARK + text.partition(MARK)[2] == reference_text(), (
        "run: python -m orchestrator.sweepfile.reference docs/sweep.md"
    )


@pytest.mark.parametrize("name", ["quickstart", "digits", "clusters"])
def test_shipped_sweep_and_its_canonical_form_plan_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "canonical.yaml"
    path.write_text(load_all(name, Changes()).canonical, encoding="utf-8")
    first, again = (build_plan(load_sweep(one)[0], store_uri="file:///s") for one in (name, str(path)))
    assert again.to_json() == first.to_json()


def test_text_kept_with_a_sweep_is_its_file_unless_that_is_not_all_of_it(tmp_path: Path) -> None:
    own = (ROOT / "workloads" / "sweeps" / "quickstart.yaml").read_text(encoding="utf-8")
    assert load_sweep("quickstart")[1] == own
    changed = load_sweep("quickstart", ["pretrain.seeds=[7]"])[1]
    path = tmp_path / "kept.yaml"
    path.write_text(changed, encoding="utf-8")
    assert load_sweep(str(path))[0].pretrains[0].seeds == (7,)
    assert load_all(str(path), Changes()).scales == ()


def test_included_file_is_read_relative_to_its_includer(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    quickstart = (ROOT / "workloads" / "sweeps" / "quickstart.yaml").read_text(encoding="utf-8")
    (tmp_path / "parts" / "all.yaml").write_text(quickstart.replace("name: quickstart", ""), encoding="utf-8")
    (tmp_path / "sweep.yaml").write_text("version: 1\nname: mine\ninclude: parts/all.yaml\n", encoding="utf-8")
    sweep, text = load_sweep(str(tmp_path / "sweep.yaml"))
    assert (sweep.name, len(sweep.labels)) == ("mine", 5)
    assert "include" not in text
