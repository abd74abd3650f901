"""``run: ./file.py:function``: what its jobs are keyed by, what they run, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import SpecError, StorageDeniedError, UserError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.submit import _absent_files
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load, load_sweep
from workloads.commands.simulations import check
from workloads.theory.loading import Simulation

CODE = """
from __future__ import annotations
from pydantic import BaseModel
from steps import width

class Parameters(BaseModel, extra="forbid"):
    scale: float = 1.0

def simulate(parameters: Parameters, seeds, context):
    for seed in seeds:
        yield {"end": parameters.scale * width() * seed}
"""
SWEEP = (
    "version: 1\nname: s\nsimulate:\n"
    "  one: {run: './mysim.py:simulate', factors: {scale: [1, 2]}, seeds: {count: 4, per_job: 4}, metric: end}\n"
)


@pytest.fixture(autouse=True)
def _answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data plane's own answer, without a process for each; ``test_simulate`` asks through one."""
    monkeypatch.setattr(load, "check_simulations", lambda asked: check({"simulations": asked}))


def write(folder: Path, *, code: str = CODE, helper: str = "def width(): return 3.0\n", sweep: str = SWEEP) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mysim.py").write_text(code)
    (folder / "steps.py").write_text(helper)
    (folder / "unused.py").write_text("raise SystemExit\n")
    (folder / "sweep.yaml").write_text(sweep)
    return folder / "sweep.yaml"


def plan_of(file: Path, store_uri: str = "file:///s") -> Plan:
    return build_plan(load_sweep(str(file))[0], store_uri=store_uri)


def keys(file: Path) -> set[str]:
    return {job.key for job in plan_of(file).jobs}


def problem(file: Path) -> str:
    with pytest.raises(SpecError) as refused:
        load_sweep(str(file))
    (line,) = refused.value.problems
    return line.removeprefix(f"{file}:")


def test_jobs_run_the_file_and_what_it_imports(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = plan_of(write(tmp_path / "a"), store.uri)
    assert run_sweep_inprocess(store, plan).state is SweepState.SUCCEEDED
    assert [read_record(store, job.key).metrics["end"] for job in plan.jobs] == [4.5, 9.0]


def test_keys_hold_contents_and_no_places(tmp_path: Path) -> None:
    first = keys(write(tmp_path / "a"))
    moved = write(tmp_path / "b", sweep=SWEEP.replace("mysim", "renamed").replace("name: s", "name: other"))
    shutil.move(tmp_path / "b" / "mysim.py", tmp_path / "b" / "renamed.py")
    assert keys(moved) == first
    assert not keys(write(tmp_path / "c", code=CODE + "\n# edited\n")) & first
    assert not keys(write(tmp_path / "d", helper="def width(): return 4.0\n")) & first


def test_changed_absent_and_stored_files_are_not_run(tmp_path: Path) -> None:
    file = write(tmp_path / "a")
    plan = plan_of(file)
    name, path = plan.jobs[0].identity["parameters"]["simulation"], plan.jobs[0].execution.label_files["simulation"]
    assert not list(_absent_files(plan))
    store = LocalStore(tmp_path / "a")  # around the file
    ended = run_sweep_inprocess(store, replace(plan, store_uri=store.uri))
    assert ended.state is SweepState.FAILED
    (tmp_path / "a" / "steps.py").write_text("raise SystemExit\n")
    with pytest.raises(UserError, match="is not what was planned"):
        Simulation.load(name, path)
    (tmp_path / "a" / "mysim.py").unlink()
    with pytest.raises(UserError, match="is not on this node"):
        Simulation.load(name, path)
    assert "is not on this machine" in "".join(_absent_files(plan))


def test_files_outside_the_allowed_places_are_neither_read_nor_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a")
    plan = plan_of(file)
    name, path = plan.jobs[0].identity["parameters"]["simulation"], plan.jobs[0].execution.label_files["simulation"]
    monkeypatch.setenv("ORCHESTRATOR_ALLOWED_URIS", f"file://{tmp_path}/other")
    with pytest.raises(StorageDeniedError, match="not below any of the allowed URIs"):
        Simulation.load(name, path)
    assert "4:9: simulate.one.run: file://" in problem(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sweep": SWEEP.replace("mysim", "gone")}, "4:9: simulate.one.run: there is no file gone.py; give its path"),
        (
            {"sweep": SWEEP.replace(":simulate'", ":simulat'")},
            "4:9: simulate.one.run: mysim.py has no function 'simulat'; it has Parameters, simulate",
        ),
        ({"code": "def simulate(:\n"}, "4:9: simulate.one.run: mysim.py:1:14: invalid syntax; correct the file"),
        ({"code": "raise SystemExit(3)\n"}, "mysim.py cannot be imported: SystemExit: 3; correct the file"),
        ({"code": "import notthere\n"}, "mysim.py cannot be imported: ModuleNotFoundError: No module named 'notthere'"),
        ({"sweep": SWEEP.replace("[1, 2]", "[1, x]")}, "4:58: simulate.one.factors.scale[1]: the simulation"),
    ],
)
def test_what_is_wrong_is_refused_at_its_place(tmp_path: Path, change: dict[str, str], said: str) -> None:
    assert said in problem(write(tmp_path / "a", **change))


def test_module_that_hides_an_installed_one_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a", code="import numpy\n" + CODE)
    (tmp_path / "a" / "numpy.py").write_text("")
    assert "numpy.py has the name of an installed module; rename it" in problem(file)
