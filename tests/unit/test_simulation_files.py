"""``run: ./file.py:function``: what its jobs are keyed by, what they run, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.inprocess import InprocessBackend
from orchestrator.backends.ray import simulation_packages as kept_packages
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.cli.accept import brought_simulations
from orchestrator.controller.attempt_requests import make_request
from orchestrator.controller.controller import Controller
from orchestrator.controller.run_inprocess import drive, run_sweep_inprocess
from orchestrator.core.errors import ControllerError, SpecError, StorageDeniedError, UserError
from orchestrator.core.simulation_files import SimulationCode
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.remote.job import simulation_name
from orchestrator.services.submit import simulation_packages
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.digests import digests_of
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load, load_sweep
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Ownership
from workloads.commands.simulations import check
from workloads.data.cache.objects import ObjectCache
from workloads.jobs.theory import SavedObjects
from workloads.runtime.device import pick_device
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


UNCALLED = "the simulation 'mysim.py:simulate' cannot be called with parameters, seeds and context"


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


def test_file_is_read_as_python_reads_it_without_imports_from_the_future_of_others(tmp_path: Path) -> None:
    plain = CODE.replace("from __future__ import annotations\n", "").replace(": Parameters,", ": model(),")
    code = plain.replace("\ndef simulate", "\ndef model():\n    return Parameters\n\ndef simulate")
    sweep = SWEEP.replace("scale: [1, 2]", "scale: [1, one]")
    assert "factors.scale[1]: the simulation './mysim.py:simulate' refuses it" in problem(
        write(tmp_path / "a", code=code, sweep=sweep)
    )


def test_keys_hold_contents_and_no_places(tmp_path: Path) -> None:
    first = keys(write(tmp_path / "a"))
    moved = write(tmp_path / "b", sweep=SWEEP.replace("mysim", "renamed").replace("name: s", "name: other"))
    shutil.move(tmp_path / "b" / "mysim.py", tmp_path / "b" / "renamed.py")
    assert keys(moved) == first
    assert not keys(write(tmp_path / "c", code=CODE + "\n# edited\n")) & first
    assert not keys(write(tmp_path / "d", helper="def width(): return 4.0\n")) & first


def test_failure_names_the_file_and_not_its_digest(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = plan_of(write(tmp_path / "a", helper="def width(): return 1 / 0\n"), store.uri)
    failure = run_sweep_inprocess(store, plan).jobs[plan.jobs[0].name].last_failure
    assert failure is not None
    assert failure.message.startswith("the simulation 'mysim.py:simulate' failed at seed 0: ZeroDivisionError")


def test_changed_absent_and_stored_files_are_not_run(tmp_path: Path) -> None:
    file = write(tmp_path / "a")
    plan = plan_of(file)
    name, path = plan.jobs[0].identity["parameters"]["simulation"], plan.jobs[0].execution.label_files["simulation"]
    store = LocalStore(tmp_path / "a")  # around the file
    ended = run_sweep_inprocess(store, replace(plan, store_uri=store.uri))
    assert ended.state is SweepState.FAILED
    (tmp_path / "a" / "steps.py").write_text("raise SystemExit\n")
    with pytest.raises(UserError, match="is not what was planned"):
        Simulation.load(name, path)
    (tmp_path / "a" / "mysim.py").unlink()
    with pytest.raises(UserError, match="is not on this node"):
        Simulation.load(name, path)


def test_object_of_a_store_in_the_cache_of_a_node_is_not_run(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    code = b"def simulate(parameters, seeds, context):\n    raise SystemExit\n"
    store.put("shards/0.tar", code)
    wanted = digests_of(code)
    cached = ObjectCache(store, tmp_path / "cache").path("shards/0.tar", size_bytes=len(code), digests=wanted)
    digest = SimulationCode.read(cached).digest
    with pytest.raises(UserError, match="is no file"):
        Simulation.load(f"{digest}.py:simulate", str(cached))


def test_package_holds_the_file_and_what_it_imports_and_nothing_else(tmp_path: Path) -> None:
    plan = plan_of(write(tmp_path / "a"))
    ((digest, package),) = simulation_packages(plan).items()
    assert simulation_packages(plan_of(write(tmp_path / "elsewhere"))) == {digest: package}
    (tmp_path / "node").mkdir()
    file = SimulationCode.from_package(package, digest).write(tmp_path / "node")
    assert sorted(one.name for one in file.parent.iterdir()) == ["mysim.py", "steps.py"]
    simulation = Simulation.load(plan.jobs[0].identity["parameters"]["simulation"], str(file))
    given = simulation.checked({"scale": 2.0})
    assert [row["end"] for row in simulation.function(given, [0, 1], SavedObjects(device=pick_device()))] == [0.0, 6.0]


def test_submit_brings_what_was_planned_or_is_refused(tmp_path: Path) -> None:
    plan, came = plan_of(write(tmp_path / "a")), tmp_path / "job"
    ((digest, package),) = simulation_packages(plan).items()
    with pytest.raises(UserError, match=r"did not bring the simulation mysim\.py \(sha256 "):
        brought_simulations(plan, came)
    path = came / simulation_name(digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(package)
    assert brought_simulations(plan, came) == {digest: package}
    ((_, other),) = simulation_packages(plan_of(write(tmp_path / "b", helper="def width(): return 4.0\n"))).items()
    for content, said in ((other, "are not what was planned"), (package[:-30], "is damaged"), (b"", "is damaged")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            brought_simulations(plan, came)
    (tmp_path / "a" / "steps.py").write_text("def width(): return 5.0\n")
    with pytest.raises(UserError, match="has changed since it was planned"):
        simulation_packages(plan)


def test_package_writes_modules_alone_and_into_its_folder(tmp_path: Path) -> None:
    for name in ("../out.py", "/out.py", "a/../../out.py", "steps.pth"):
        sources = SimulationCode(path=Path("mysim.py"), main=b"", modules={name: b""})
        opened = SimulationCode.from_package(sources.to_package(), sources.digest)
        with pytest.raises(UserError, match="which is not a module"):
            opened.write(tmp_path)
    assert not list(tmp_path.parent.glob("out.py"))
    huge = SimulationCode(path=Path("mysim.py"), main=b"", modules={"a.py": bytes(1 << 25)})
    with pytest.raises(UserError, match="more than 16777216 bytes"):
        huge.to_package()


class Tables(dict[bytes, bytes]):
    """Of Ray's head, as ``simulation_packages`` uses them."""

    @classmethod
    def at(cls, monkeypatch: pytest.MonkeyPatch) -> Tables:
        tables = cls()
        for name in ("exists", "get", "put"):
            monkeypatch.setattr(kept_packages, f"_internal_kv_{name}", getattr(tables, f"call_{name}"))
        return tables

    def call_exists(self, key: bytes, *, namespace: bytes) -> bool:
        return namespace + key in self

    def call_get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.get(namespace + key)

    def call_put(self, key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert overwrite
        self[namespace + key] = value


def test_runner_takes_the_package_and_not_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, file = Tables.at(monkeypatch), write(tmp_path / "a")
    store = LocalStore(tmp_path / "store")
    plan = plan_of(file, store.uri)
    ((digest, package),) = simulation_packages(plan).items()
    request = make_request(plan, plan.jobs[0], 1)
    assert kept_packages.with_unpacked(request, tmp_path) == request
    kept_packages.keep_packages({digest: package})
    (tmp_path / "a" / "mysim.py").write_text("raise SystemExit\n")
    (tmp_path / "scratch").mkdir()
    unpacked = kept_packages.with_unpacked(request, tmp_path / "scratch")
    assert unpacked.execution.label_files == {"simulation": str(tmp_path / "scratch" / "mysim.py")}
    assert replace(unpacked, execution=request.execution) == request
    (key,) = tables
    tables[key] = SimulationCode(path=Path("mysim.py"), main=b"raise SystemExit", modules={}).to_package()
    with pytest.raises(UserError, match="are not what was planned"):
        kept_packages.with_unpacked(request, tmp_path / "scratch")


def test_controller_refuses_a_plain_file_that_only_the_store_told_it_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tables.at(monkeypatch)
    file, store = write(tmp_path / "a"), LocalStore(tmp_path / "store")
    plan = plan_of(file, store.uri)
    packages = simulation_packages(plan)
    (tmp_path / "a").rename(tmp_path / "on-another-machine")

    def submitted() -> Snapshot:
        backend = InprocessBackend(store, tmp_path / "cache")
        monkeypatch.setattr(backend, "why_not", RayBackend("namespace").why_not)
        controller = Controller(store, backend, "c", "holder")
        message_id = client.submit(store, plan, "", "c", ownership=Ownership.TAKE)
        return drive(controller, store, plan.sweep, message_id)

    with pytest.raises(ControllerError, match=r"no package of the simulation mysim\.py \(sha256 [0-9a-f]{12}\) came"):
        submitted()
    kept_packages.keep_packages(packages)
    assert submitted().state is SweepState.FAILED  # accepted; this backend knows no packages


def test_controller_refuses_a_plain_file_where_it_may_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tables.at(monkeypatch)
    plan = plan_of(write(tmp_path / "a"))
    # As of a closed home folder; the tests' user may look into any.
    file = f"/{'x' * 300}/mysim.py"
    jobs = [replace(job, execution=replace(job.execution, label_files={"simulation": file})) for job in plan.jobs]
    assert "no package of the simulation mysim.py" in kept_packages.why_absent(replace(plan, jobs=tuple(jobs)))


def test_files_outside_the_allowed_places_are_neither_read_nor_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a")
    plan = plan_of(file)
    Tables.at(monkeypatch)
    monkeypatch.setenv("ORCHESTRATOR_ALLOWED_URIS", f"file://{tmp_path}/other")
    with pytest.raises(StorageDeniedError, match="not below any of the allowed URIs"):
        kept_packages.with_unpacked(make_request(plan, plan.jobs[0], 1), tmp_path)
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
        (
            {"code": CODE.replace(", context)", ")")},
            f"4:9: simulate.one.run: {UNCALLED}: too many positional arguments",
        ),
        (
            {"code": CODE.replace("seeds, ", "seeds, k, ")},
            f"{UNCALLED}: missing a required argument: 'context'; define",
        ),
        (
            {"sweep": SWEEP.replace(":simulate", ":Parameters")},
            f"{UNCALLED.replace('simulate', 'Parameters')}: too many",
        ),
        ({"code": "class simulate:\n    def __init__(self, *given): ...\n"}, "is a class, whose objects yield nothing"),
    ],
)
def test_what_is_wrong_is_refused_at_its_place(tmp_path: Path, change: dict[str, str], said: str) -> None:
    assert said in problem(write(tmp_path / "a", **change))


@pytest.mark.parametrize(
    "code",
    [
        CODE.replace("context)", "context, *, step=1)"),
        CODE.replace("\ndef simulate", "\nimport functools\n@functools.cache\ndef simulate"),
        CODE.replace("\ndef simulate(", "\nclass Walk:\n  def walk(self, ") + "\nsimulate = Walk().walk\n",
        "class simulate:\n    def __init__(self, *given): ...\n    def __iter__(self): ...\n",
    ],
    ids=["with an option", "cached", "method", "iterable class"],
)
def test_whatever_takes_parameters_seeds_and_context_is_a_simulation(tmp_path: Path, code: str) -> None:
    assert len(plan_of(write(tmp_path / "a", code=code)).jobs) == 2


HELPER = """
from functools import wraps
from pydantic import BaseModel

class Settings(BaseModel, extra="forbid"):
    scale: float = 1.0

def width():
    return 3.0

def logged(function):
    @wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call
"""


@pytest.mark.parametrize(
    "code",
    [
        CODE.replace("from steps", "import steps\nfrom steps").replace(": Parameters,", ": steps.Settings,"),
        CODE.replace("import width", "import logged, width").replace("def simulate", "@logged\ndef simulate"),
    ],
    ids=["in another module", "behind a decorator"],
)
def test_parameters_are_checked_by_the_model_wherever_it_is(tmp_path: Path, code: str) -> None:
    file = write(tmp_path / "a", code=code, helper=HELPER, sweep=SWEEP.replace("[1, 2]", "[1, x]"))
    assert "4:58: simulate.one.factors.scale[1]: the simulation" in problem(file)


def test_module_that_hides_an_installed_one_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a", code="import numpy\n" + CODE)
    (tmp_path / "a" / "numpy.py").write_text("")
    assert "numpy.py has the name of an installed module; rename it" in problem(file)
