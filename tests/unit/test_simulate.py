"""`simulate:`: jobs of a simulation, what survives of an attempt that was killed, and what is refused."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from matplotlib.figure import Figure
from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer, computed_field, field_validator
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from orchestrator.backends.classify import classify
from orchestrator.controller.attempt_requests import make_request
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.activity import RankActivity
from orchestrator.core.contract import ExecutionContext, Progress
from orchestrator.core.errors import (
    CorruptObjectError,
    FailureKind,
    PreemptedError,
    SpecError,
    StorageError,
    UserError,
)
from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import part_object, read_part, read_record
from orchestrator.storage.layout import checkpoints_folder, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.request_pool import RequestPool
from orchestrator.sweepfile.load import load_sweep, parse_sweep, shipped_recipes
from orchestrator.testing import Fault, FaultyStore, Moment
from orchestrator.testing.memory_store import MemoryStore
from workloads.jobs.theory import FinishedSeeds, pause_s
from workloads.run import execute
from workloads.theory.context import SimulationContext
from workloads.theory.loading import ParametersError, Simulation
from workloads.theory.shipped import SIMULATIONS

SWEEP = """\
version: 1
name: sims
simulate:
  walk:
    run: walk
    parameters: {length: 5}
    factors: {scale: [1, 2], kind: [a, b]}
    seeds: {count: 6, per_job: 3}
    metric: end
"""
ran: list[int] = []


def walk(parameters: Mapping[str, Any], seeds: Sequence[int], context: SimulationContext) -> Iterator[dict[str, float]]:
    for seed in seeds:
        ran.append(seed)
        steps = np.random.default_rng(seed).normal(size=parameters["length"])
        context.save_array("steps", steps)
        found = {"end": parameters["scale"] * float(steps.sum()), "length": float(parameters["length"])}
        yield found if seed % 2 else {**found, "even": 1.0}


def endless(
    parameters: Mapping[str, Any], seeds: Sequence[int], context: SimulationContext
) -> Iterator[dict[str, float]]:
    """Never ends with the last seed of a block, and takes a moment for each other one."""
    for seed in seeds:
        if seed == max(seeds):
            time.sleep(3600)
        time.sleep(0.02)
        yield {"end": float(seed)}


def threads(
    parameters: Mapping[str, Any], seeds: Sequence[int], context: SimulationContext
) -> Iterator[dict[str, float]]:
    """The most threads that a library of linear algebra uses here."""
    yield from ({"end": float(max(library["num_threads"] for library in threadpool_info()))} for _ in seeds)


NO_PATHS = ("a//b", "loss/", "a/./b", "a/..")


FAULTS: dict[str, Exception] = {
    "value": ValueError("steps is 0"),
    "memory": MemoryError("no room for 9 GiB"),
    "device": torch.OutOfMemoryError("CUDA out of memory"),
    "library": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "workers": RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that shared memory ran out."
    ),
    "disk": OSError(errno.ENOSPC, "no space left on device"),
    "data": CorruptObjectError("features.bin differs"),
}


def broken(parameters: Mapping[str, Any], seeds: Sequence[int], context: SimulationContext) -> Iterator[Any]:
    """Fails at the second seed, or before the first one."""
    if parameters["what"] == "none":
        raise KeyError("table")
    yield {"end": 0.0}
    raise FAULTS[parameters["what"]]


def bad(parameters: Mapping[str, Any], seeds: Sequence[int], context: SimulationContext) -> Iterator[Any]:
    kinds = {"nan": {"end": float("nan")}, "text": {"end": "x"}, "list": [1.0]}
    kinds |= {"huge": {"end": 10**400}}
    kinds |= {name: {name: 1.0} for name in ("seed", "num_seeds")}
    kinds |= {f"path{number}": {name: 1.0} for number, name in enumerate(NO_PATHS)}
    yield from (kinds[parameters["what"]] for _ in seeds) if parameters["what"] in kinds else ()


@pytest.fixture(autouse=True)
def _simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (walk, endless, threads, bad, broken):
        monkeypatch.setitem(SIMULATIONS, function.__name__, f"{__name__}:{function.__name__}")
    ran.clear()


def plan_of(text: str, store_uri: str = "file:///s") -> Plan:
    return build_plan(parse_sweep(text, "sweep.yaml", shipped_recipes()), store_uri=store_uri)


def context_of(folder: Path, **more: Any) -> ExecutionContext:
    return ExecutionContext(store=LocalStore(folder / "store"), scratch=folder, cache=folder, **more)


def run_job(job: Job, context: ExecutionContext) -> bytes:
    execute(make_request(plan_of(SWEEP, context.store.uri), job, 1), context)
    return read_part(context.store, read_record(context.store, job.key), "runs.parquet")


def test_sweep_of_simulations_alone_runs_to_rows_and_mean_metrics(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = plan_of(SWEEP, store.uri)
    assert [job.name for job in plan.jobs][:3] == [
        "theory/walk/kind=a,scale=1/seeds0-2",
        "theory/walk/kind=a,scale=1/seeds3-5",
        "theory/walk/kind=b,scale=1/seeds0-2",
    ]
    assert run_sweep_inprocess(store, plan).state is SweepState.SUCCEEDED
    record = read_record(store, plan.jobs[1].key)
    rows = pq.read_table(io.BytesIO(read_part(store, record, "runs.parquet"))).to_pydict()
    assert rows["seed"] == [3, 4, 5]
    assert rows["even"] == [None, 1.0, None]
    assert record.metrics["end"] == pytest.approx(np.mean(rows["end"]))
    assert record.metrics["num_seeds"] == 3
    steps = np.load(io.BytesIO(read_part(store, record, "arrays/4/steps.npy")))
    assert steps.sum() == rows["end"][1]


def test_linear_algebra_keeps_to_the_threads_of_the_job(tmp_path: Path) -> None:
    # Its sums differ with their number: with the cores of a node, two nodes would disagree.
    plan = plan_of(SWEEP.replace("run: walk", "run: threads"), LocalStore(tmp_path).uri)
    with threadpool_limits(limits=2):
        run_sweep_inprocess(LocalStore(tmp_path), plan)
    assert read_record(LocalStore(tmp_path), plan.jobs[0].key).metrics["end"] == 1


def test_more_seeds_run_no_full_block_again(tmp_path: Path) -> None:
    keys = {job.key for job in plan_of(SWEEP).jobs}
    more = {job.key for job in plan_of(SWEEP.replace("count: 6", "count: 600")).jobs}
    assert keys < more
    part = {job.key for job in plan_of(SWEEP.replace("count: 6", "count: 7")).jobs}
    assert keys < part
    assert not keys & {job.key for job in plan_of(SWEEP.replace("per_job: 3", "per_job: 2")).jobs}


def test_thousands_of_seeds_are_a_plan_of_blocks() -> None:
    plan = plan_of(SWEEP.replace("count: 6, per_job: 3", "count: 8000"))
    assert len(plan.jobs) == 4 * 320
    assert len({job.key for job in plan.jobs}) == len(plan.jobs)


def test_stopped_attempt_goes_on_from_its_finished_seeds_to_the_same_bits(tmp_path: Path) -> None:
    job = plan_of(SWEEP).jobs[0]
    whole = run_job(job, context_of(tmp_path / "a"))
    assert ran == [0, 1, 2]
    ran.clear()
    answers = iter([False, True])
    with pytest.raises(PreemptedError, match="finished seeds"):
        run_job(job, context_of(tmp_path / "b", should_stop=lambda: next(answers)))
    assert ran == [0, 1]
    assert run_job(job, context_of(tmp_path / "b")) == whole
    assert ran == [0, 1, 2]
    store = LocalStore(tmp_path / "b" / "store")
    record = read_record(store, job.key)
    assert {name for name in record.parts if name.startswith("arrays")} == {f"arrays/{n}/steps.npy" for n in range(3)}
    assert all(read_part(store, record, name) for name in record.parts)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_resuming_attempt_shows_that_it_reads_what_earlier_ones_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Thousands of folders on a distant store take longer to read than an attempt may without a sign of life."""
    monkeypatch.setattr(RequestPool, "of", lambda uri: RequestPool(num_threads))
    job = plan_of(SWEEP).jobs[0]
    for _ in range(2):
        with pytest.raises(PreemptedError):
            run_job(job, context_of(tmp_path, should_stop=lambda: True))
    names = [one.name for one in context_of(tmp_path).store.list_objects(f"{checkpoints_folder(job.key)}/")]
    folders = {name.rpartition("/checkpoints/")[2].partition("/")[0] for name in names}
    assert len(folders) == 2
    activity = RankActivity()
    run_job(job, context_of(tmp_path, activity=activity))
    assert ran == [0, 1, 2]
    assert activity.num_done >= len(names) + len(folders), "a folder was read without a sign of life"


def test_long_attempts_write_their_seeds_less_often() -> None:
    """So that a resuming one has no folder per half second to read."""
    assert [pause_s(elapsed_s) for elapsed_s in (0.0, 500.0, 36_000.0)] == [0.5, 0.5, 36.0]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a process of its own imports torch: minutes on a busy machine
def test_killed_process_leaves_the_seeds_that_it_had_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SWEEP.replace("run: walk", "run: endless").replace("count: 6, per_job: 3", "count: 20, per_job: 20")
    job, store = plan_of(text).jobs[0], context_of(tmp_path).store
    code = "from tests.unit import test_simulate; test_simulate.main()"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), text], cwd=Path(__file__).parents[2])
    try:
        written: list[str] = []
        folder = f"artifacts/theory/{job.key}/checkpoints/"
        # 18 is the last seed that ends; a manifest says that a folder counts.
        while not any("/000000000019-" in name and name.endswith("/manifest.json") for name in written):
            assert process.poll() is None
            written = [one.name for one in store.list_objects(folder)]
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    monkeypatch.setitem(SIMULATIONS, "endless", f"{__name__}:walk")
    rows = pq.read_table(io.BytesIO(run_job(job, context_of(tmp_path)))).to_pydict()
    assert rows["end"][:19] == list(range(19))
    assert ran == [19]


def main() -> None:
    """Run the first job of a sweep file until somebody kills this."""
    folder, text = Path(sys.argv[1]), sys.argv[2]
    SIMULATIONS["endless"] = "tests.unit.test_simulate:endless"  # type: ignore[index]
    run_job(plan_of(text).jobs[0], context_of(folder))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", "metric end of the simulation 'bad' is nan for seed 0"),
        ("text", "is 'x' for seed 0; yield numbers"),
        ("huge", "is 10{199} for seed 0; yield numbers"),
        ("list", "yielded list for seed 0"),
        ("seed", "calls a metric 'seed'"),
        ("num_seeds", "calls a metric 'num_seeds'"),
        *((f"path{number}", f"calls a metric '{name}'") for number, name in enumerate(NO_PATHS)),
        ("none", "ended before seed 0"),
    ],
)
def test_what_is_no_metric_of_a_seed_is_refused(tmp_path: Path, what: str, message: str) -> None:
    text = SWEEP.replace("run: walk", "run: bad").replace("{length: 5}", f"{{what: {what}}}")
    with pytest.raises(UserError, match=message):
        run_job(plan_of(text).jobs[0], context_of(tmp_path))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("none", FailureKind.USER_ERROR, "the simulation 'broken' failed at seed 0: KeyError('table')"),
        ("value", FailureKind.USER_ERROR, "the simulation 'broken' failed at seed 1: ValueError('steps is 0')"),
        ("memory", FailureKind.OUT_OF_MEMORY, "no room for 9 GiB"),
        ("device", FailureKind.OUT_OF_MEMORY, "CUDA out of memory"),
        ("library", FailureKind.UNKNOWN, "CUDNN_STATUS_EXECUTION_FAILED"),
        ("workers", FailureKind.OUT_OF_MEMORY, "Bus error"),
        ("disk", FailureKind.STORAGE, "no space left on device"),
        ("data", FailureKind.BAD_DATA, "features.bin differs"),
    ],
)
def test_exception_of_a_simulation_is_its_own_fault_unless_another_attempt_may_not_meet_it(
    tmp_path: Path, what: str, kind: FailureKind, message: str
) -> None:
    """Of an unknown kind it would be tried three times, and the node would be suspected."""
    text = SWEEP.replace("run: walk", "run: broken").replace("{length: 5}", f"{{what: {what}}}")
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        run_job(plan_of(text).jobs[0], context_of(tmp_path))
    assert classify(raised.value) is kind


def test_seed_that_ends_after_a_failed_write_is_kept_with_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    key, store = plan_of(SWEEP).jobs[0].key, MemoryStore()
    # The second acknowledgement is lost: then the next folder holds a seed of this one, too.
    faults = [Fault(moment=Moment.ERROR_BEFORE, within=key), Fault(moment=Moment.ERROR_AFTER, nth=2, within="manifest")]
    finished = FinishedSeeds(FaultyStore(store, faults), key, lambda: None)

    def write_once() -> None:
        turns = iter([False, True])
        monkeypatch.setattr(finished._ended, "wait", lambda _: next(turns))
        finished._write_regularly()

    finished.add(0, {"end": 0.0}, {})
    write_once()  # refused
    finished.add(1, {"end": 1.0}, {})  # writes both at once
    finished.add(2, {"end": 2.0}, {"arrays/2/steps.npy": b"2"})
    write_once()  # durable, but nobody knows
    finished.add(3, {"end": 3.0}, {})
    with FinishedSeeds(store, key, lambda: None) as next_attempt:
        assert next_attempt.rows == {seed: {"end": float(seed)} for seed in range(4)}
    refusing = FinishedSeeds(FaultyStore(store, [Fault(moment=Moment.ERROR_BEFORE)]), "k", lambda: None)
    refusing._has_failed = True
    with pytest.raises(StorageError):
        refusing.add(7, {"end": 7.0}, {})
    assert refusing.rows == {7: {"end": 7.0}}  # for the last write, at the end of the attempt


def test_simulation_that_yields_too_few_keeps_the_seeds_that_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, whole = plan_of(SWEEP).jobs[0], walk
    monkeypatch.setattr(sys.modules[__name__], "walk", lambda *given: itertools.islice(whole(*given), 2))
    with pytest.raises(UserError, match=r"ended before seed 2, after 2 of 3 seeds; yield one mapping for each"):
        run_job(job, context_of(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "walk", whole)
    ran.clear()
    finished = run_job(job, context_of(tmp_path))
    assert ran == [2]
    assert finished == run_job(job, context_of(tmp_path / "undisturbed"))


def test_simulation_that_yields_too_many_leaves_no_seed_to_later_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, whole, answers = plan_of(SWEEP).jobs[0], walk, iter([True])
    with pytest.raises(PreemptedError):
        run_job(job, context_of(tmp_path, should_stop=lambda: next(answers)))
    monkeypatch.setattr(
        sys.modules[__name__], "walk", lambda *given: itertools.chain(whole(*given), iter([{"end": 0.0}]))
    )
    with pytest.raises(UserError, match="yielded more than its 2 seeds"):
        run_job(job, context_of(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "walk", whole)
    ran.clear()
    run_job(job, context_of(tmp_path))
    assert ran == [0, 1, 2]


def test_damaged_array_of_a_simulation_is_made_anew_when_what_the_message_names_is_deleted(tmp_path: Path) -> None:
    job, context, answers = plan_of(SWEEP).jobs[0], context_of(tmp_path), iter([True])
    with pytest.raises(PreemptedError):
        run_job(job, context_of(tmp_path, should_stop=lambda: next(answers)))
    run_job(job, context)
    record = read_record(context.store, job.key)
    array, damaged = read_part(context.store, record, "arrays/0/steps.npy"), part_object(record, "arrays/0/steps.npy")
    context.store.put(damaged, array[:-1] + bytes([array[-1] ^ 1]))
    with pytest.raises(CorruptObjectError, match=f"^{damaged} .*; delete it and {record_name(job.key)}, then submit"):
        read_part(context.store, record, "arrays/0/steps.npy")
    for name in (damaged, record_name(job.key)):
        context.store.delete(name)
    ran.clear()
    run_job(job, context)
    assert 0 in ran
    assert read_part(context.store, read_record(context.store, job.key), "arrays/0/steps.npy") == array


def test_resumed_job_is_measured_by_the_seeds_of_its_last_attempt(tmp_path: Path) -> None:
    from orchestrator.planning.estimate.history import measure

    job, answers = plan_of(SWEEP).jobs[0], iter([True])
    reported: list[Progress] = []
    with pytest.raises(PreemptedError):
        run_job(job, context_of(tmp_path, should_stop=lambda: next(answers)))
    run_job(job, context_of(tmp_path, report=reported.append))
    told = [(one.step, one.eta_s > 0) for one in reported if one.phase == "simulate"]
    assert told == [(1, False), (2, True), (3, False)]
    record = read_record(context_of(tmp_path).store, job.key)
    summary = {**record.summary, "measured": {**record.summary["measured"], "work_s": 8.0}}
    assert summary["rows_of_earlier_attempts"] == 1
    found = measure(record.identity, record.metrics, summary)
    assert found is not None
    assert (found.ratio, found.seconds) == (4.0, 8.0)  # two seeds, of which the model assumes a second each
    assert measure(record.identity, record.metrics, {**summary, "rows_of_earlier_attempts": 3}) is None


def test_measured_seconds_tell_that_blocks_are_too_short(tmp_path: Path) -> None:
    from orchestrator.planning.estimate.history import SpeedHistory, measure

    plan = plan_of(SWEEP)
    context = context_of(tmp_path)
    run_job(plan.jobs[0], context)
    record = read_record(context.store, plan.jobs[0].key)
    summary = {**record.summary, "measured": {**record.summary["measured"], "work_s": 0.3}}  # whatever it took here
    measured = measure(record.identity, record.metrics, summary)
    assert measured is not None
    found = estimate(plan, history=SpeedHistory(measurements=[measured]))
    assert any("raise seeds.per_job" in note for note in found.notes)
    assert any("second is assumed" in note for note in estimate(plan).notes)


def test_figures_become_parts_of_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(parameters: Any, seeds: Sequence[int], context: SimulationContext) -> Iterator[dict[str, float]]:
        for seed in seeds:
            context.save_figure("empty", Figure(figsize=(1, 1)))
            yield {"end": float(seed)}

    monkeypatch.setattr(sys.modules[__name__], "walk", draw)
    context = context_of(tmp_path)
    job = plan_of(SWEEP).jobs[0]
    run_job(job, context)
    assert read_part(context.store, read_record(context.store, job.key), "figures/0/empty.png").startswith(b"\x89PNG")


def test_name_that_a_lenient_model_would_pass_over_is_refused() -> None:
    class Lenient(BaseModel):
        steps: int = 100

    simulation = Simulation(name="mine", function=walk, model=Lenient)
    assert simulation.complete({"steps": 7}) == {"steps": 7}
    with pytest.raises(ParametersError) as refused:
        simulation.complete({"step": 7})
    assert [path for path, _ in refused.value.problems] == [("step",)]


class Rate(BaseModel, extra="forbid"):
    rate: float = Field(0.1, alias="lr")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def per_mille(self) -> float:
        return 1000 * self.rate


class LenientRate(BaseModel):
    rate: float = Field(0.1, alias="lr")


class NamedRate(BaseModel, extra="forbid", populate_by_name=True):
    rate: float = Field(0.1, alias="lr")


class Doubled(BaseModel):
    angle: float = 0.0

    @field_validator("angle")
    @classmethod
    def _double(cls, value: float) -> float:
        return 2 * value


Vector = Annotated[np.ndarray, BeforeValidator(np.asarray), PlainSerializer(np.ndarray.tolist)]


class WithArray(BaseModel, arbitrary_types_allowed=True):
    weights: Vector
    lr: float = 0.1


class ReadOnly(BaseModel):
    rate: float = Field(0.1, validation_alias="lr")


@pytest.mark.parametrize(
    ("model", "expected"), [(Rate, {"lr": 0.3}), (LenientRate, {"lr": 0.3}), (NamedRate, {"rate": 0.3})]
)
def test_job_reads_the_parameters_that_were_planned(model: type[BaseModel], expected: dict[str, Any]) -> None:
    """By names that the model does not read, a job had the defaults, or failed without a reason."""
    simulation = Simulation(name="mine", function=walk, model=model)
    planned = simulation.complete({"lr": 0.3})
    assert planned == expected  # what a model reads by its names stays so, or keys would change
    assert simulation.checked(planned) == model(lr=0.3)


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        (Doubled, {"angle": 10}, "from {'angle': 20.0} it makes other values"),
        (ReadOnly, {"lr": 0.3}, "rate: there is no parameter 'rate': known: lr"),
        (LenientRate, {"rate": 0.3}, "rate: there is no parameter 'rate': known: lr"),
        (NamedRate, {"lr": 0.3, "rate": 0.4}, "rate: Extra inputs are not permitted"),
    ],
)
def test_parameters_of_which_a_job_would_make_others_are_refused(
    model: type[BaseModel], given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ParametersError, match=re.escape(why)):
        Simulation(name="mine", function=walk, model=model).complete(given)


def test_parameters_may_be_of_types_that_do_not_compare_to_one_truth() -> None:
    given = {"weights": [1.0, 2.0], "lr": 0.3}
    assert Simulation(name="mine", function=walk, model=WithArray).complete(given) == given


def test_wrong_parameters_are_refused_at_their_places(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "version: 1\nname: s\nsimulate:\n"
        "  one: {run: two-layer-granularity, parameters: {steps: -1, depth: 2}, factors: {k: [2, 0]}, metric: m}\n"
        "  two: {run: two-layer-granularty, metric: m}\n"
    )
    with pytest.raises(SpecError) as refused:
        load_sweep(str(file))
    simulation = "the simulation 'two-layer-granularity' refuses it: "
    found = {line.removeprefix(f"{file}:") for line in refused.value.problems}
    assert f"4:50: simulate.one.parameters.steps: {simulation}it must be at least 0" in found
    assert f"4:61: simulate.one.parameters.depth: {simulation}there is no parameter 'depth'" in "\n".join(found)
    assert f"4:37: simulate.one.parameters.labels: {simulation}it must be given" in found
    assert f"4:89: simulate.one.factors.k[1]: {simulation}it must be at least 1" in found
    assert any("two.run: 'two-layer-granularty' is not a simulation: did you mean" in line for line in found)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{slope: {of: b}, between: [0, 1]}", "'b' is not a factor of this simulation: known: scale, kind"),
        ("{slope: {of: kind}, between: [0, 1]}", "these are a, b; name another factor"),
        ("{slope: {of: scale}}", "slope is compared with an interval"),
        ("{threshold: {above: 1}, where: {kind: c}}", "'c' is not a level of the factor kind"),
        ("{between: [2, 1]}", "2 to 1 is not an interval"),
        ("{where: {kind: a}}", "needs exactly one of"),
        ("{monotone: {of: scale}, between: [0, 1]}", "it has no effect with 'monotone'"),
    ],
)
def test_expectations_of_what_is_not_there_are_refused(block: str, message: str) -> None:
    with pytest.raises(SpecError, match=r"sweep\.yaml:10:") as refused:
        plan_of(f"{SWEEP}    expect: [{block}]\n")
    assert message in str(refused.value)


def test_first_seed_must_begin_a_block() -> None:
    with pytest.raises(SpecError, match="begin at multiples of 3, not at 2"):
        plan_of(SWEEP.replace("per_job: 3", "per_job: 3, first: 2"))


def test_sweep_without_simulations_needs_its_other_blocks_as_before() -> None:
    with pytest.raises(SpecError, match="'datasets' is missing"):
        plan_of("version: 1\nname: s\n")


def test_plan_reads_back_what_it_wrote() -> None:
    plan = plan_of(f"{SWEEP}    expect: [{{threshold: {{above: 1}}, where: {{kind: [a, b]}}}}]\n")
    assert Plan.from_json(plan.to_json()) == plan
    assert "simulations" not in Plan(sweep="s", revision=0, store_uri="", jobs=(), baseline="").to_json()
