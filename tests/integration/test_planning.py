"""What planning says beside a real store: reuse over sweeps, history, reasons, and nothing touched."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import Sweep
from orchestrator.api import Where
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import InfeasibleError, NotFoundError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.history import EstimateSource
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import Change
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition
from orchestrator.services.artifact_lookup import (
    ArtifactSummary,
    ask_all,
    history_of,
    lookup_artifacts,
    read_artifact_summary,
)
from orchestrator.services.explain import Explanation, explain_job
from orchestrator.services.fleets import StatedCluster, stated_fleet, this_machine
from orchestrator.services.preview import Preview, make_preview
from orchestrator.services.stores import find_store
from orchestrator.state.transitions import JobState
from orchestrator.storage.layout import record_name
from orchestrator.storage.open import open_store
from orchestrator.sweepfile import load_sweep
from orchestrator.testing.memory_store import MemoryStore

ROOT = Path(__file__).parents[2]
RECIPE = "{epochs: 1, batch_size: 32, lr: 0.05}"
FIRST = f"""\
version: 1
name: first
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2], num_train: 64, num_val: 32}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
  random: {{dataset: tree, random: {{num_classes: [2, 4, 8]}}}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["levels/*", "random/*"]
  recipe: {RECIPE}
transfer:
  - {{name: top, target: levels/depth1, protocol: probe, recipe: {RECIPE}}}
report: {{baseline: levels/depth1}}
"""
SECOND = (
    FIRST.replace("name: first", "name: second")
    .replace("levels: {", "steps: {")
    .replace("levels/", "steps/")
    .replace("protocol: probe", "protocol: finetune")
)


def explain(job: str, plan: Plan | None, uri: str, *, against: str = "") -> Explanation:
    return explain_job(job, plan, uri, find_store(uri), against=against)


def planned(text: str, folder: Path, name: str = "sweep.yaml") -> tuple[Sweep, Plan]:
    path = folder / name
    path.write_text(text)
    resolved, _ = load_sweep(str(path))
    store_uri = (folder / "store").as_uri()
    return Sweep.from_yaml(path, store=store_uri), build_plan(resolved, store_uri=store_uri)


def outlook_of(text: str, folder: Path) -> Preview:
    path = folder / "other.yaml"
    path.write_text(text)
    resolved, _ = load_sweep(str(path))
    plan = build_plan(resolved, store_uri=(folder / "store").as_uri())
    return make_preview(resolved, plan, fleet=this_machine())


def tree_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that holds the finished first sweep."""
    folder = tmp_path_factory.mktemp("planning")
    sweep, _ = planned(FIRST, folder)
    status = sweep.submit(Where.INPROCESS, directory=folder / "cache")
    assert status.state == "succeeded"
    return folder


def test_second_sweep_that_shares_five_pretrains_runs_none_of_them(finished: Path) -> None:
    _, plan = planned(SECOND, finished, "second.yaml")
    counts = Counter((job.kind, lookup_artifacts(plan).dispositions[job.name].is_reused) for job in plan.jobs)
    assert counts[JobKind.PRETRAIN, True] == 5
    assert counts[JobKind.FINETUNE, False] == 5
    snapshot = run_sweep_inprocess(open_store(plan.store_uri), plan, SECOND, directory=finished / "cache")
    ran = Counter(view.name.partition("/")[0] for view in snapshot.jobs.values() if view.num_attempts)
    assert ran == {"finetune": 5}
    states = {view.state for name, view in snapshot.jobs.items() if name.startswith("pretrain/")}
    assert states == {JobState.REUSED}


def test_plan_of_a_finished_sweep_has_nothing_to_run(finished: Path) -> None:
    outlook = outlook_of(FIRST, finished)
    assert outlook.estimates.jobs == {}
    assert outlook.path.jobs == ()
    assert outlook.makespan is not None
    assert outlook.makespan.seconds == 0


def test_look_up_results_of_other_code_are_stale_and_reused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = planned(FIRST, finished)
    monkeypatch.setattr("orchestrator.services.artifact_lookup.package_digest", lambda: "another release")
    found = lookup_artifacts(plan)
    assert set(found.dispositions.values()) == {Disposition.STALE}
    assert found.reused == {job.name for job in plan.jobs}


def test_look_up_leaves_the_store_as_it_is(finished: Path) -> None:
    before = tree_of(finished / "store")
    outlook_of(FIRST, finished)
    outlook_of(SECOND, finished)
    explain("pretrain/levels/depth1/seed0", planned(FIRST, finished)[1], (finished / "store").as_uri())
    assert tree_of(finished / "store") == before


def test_look_up_without_a_store_creates_nothing(tmp_path: Path) -> None:
    _, plan = planned(FIRST, tmp_path)
    before = tree_of(tmp_path)
    found = lookup_artifacts(plan)
    assert set(found.dispositions.values()) == {Disposition.NEW}
    assert found.problems == ()
    assert tree_of(tmp_path) == before


def test_look_up_altered_record_is_a_problem_that_names_it(finished: Path, tmp_path: Path) -> None:
    _, plan = planned(FIRST, tmp_path)
    record = json.loads(open_store((finished / "store").as_uri()).get(record_name(plan.jobs[0].key)))
    record["identity"]["parameters"]["num_train"] = 65
    open_store(plan.store_uri).put(record_name(plan.jobs[0].key), json.dumps(record).encode())
    (problem,) = lookup_artifacts(plan).problems
    assert record_name(plan.jobs[0].key) in problem
    assert "fsck" in problem


def test_initial_weights_that_the_store_lacks_are_warned_of(finished: Path, tmp_path: Path) -> None:
    plan = build_plan(load_sweep(str(finished / "sweep.yaml"))[0], store_uri=(finished / "store").as_uri())
    there = next(job.key for job in plan.jobs if job.kind is JobKind.PRETRAIN)
    for key in (there, there[:-1] + ("1" if there[-1] == "0" else "0"), "pretrain-x:1"):
        text = FIRST.replace("  labels: [", f"  init: {{artifact: {key}}}\n  labels: [")
        warned = [warning for warning in outlook_of(text, finished).warnings if "init.artifact" in warning]
        assert [key in warning for warning in warned] == [True] * (key != there)
    assert lookup_artifacts(replace(outlook_of(text, finished).plan, store_uri=(tmp_path / "new").as_uri())).absent


def test_look_up_store_that_does_not_answer_is_given_up_in_time(silent: str, tmp_path: Path) -> None:
    _, plan = planned(FIRST, tmp_path)
    found = lookup_artifacts(replace(plan, store_uri=silent), silence_s=0.3)
    assert set(found.dispositions.values()) == {Disposition.NEW}
    (problem,) = found.problems
    assert "did not answer within 0.3 s" in problem


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket at an address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield "s3://bucket/prefix"


def test_look_up_many_keys_lists_instead_of_asking_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = planned(seeded(60), tmp_path)
    store = opened(CountingStore(), monkeypatch)
    assert set(lookup_artifacts(plan).dispositions.values()) == {Disposition.NEW}
    assert sorted({name.split("/")[1] for name in store.read}) == ["dataset", "index", "labels"]
    large = ["artifacts/pretrain/", "artifacts/probe/"]
    assert sorted(name for name in store.listed if name.count("/") == 2) == large, "once each"


def test_look_up_many_keys_asks_for_each_where_the_list_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OldStore(CountingStore):
        def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
            if prefix.count("/") == 2:
                raise TimeoutError(f"{prefix} has too many pages")
            return super().list_children(prefix, start_after=start_after)

    _, plan = planned(seeded(60), tmp_path)
    store = opened(OldStore(), monkeypatch)
    assert lookup_artifacts(plan).problems == ()
    assert set(store.read) == {record_name(job.key) for job in plan.jobs}


def test_look_up_waits_for_a_store_that_goes_on_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PunctualQueue(queue.SimpleQueue[Any]):
        """Gives nothing once the time is over, not even what is there."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout is not None and timeout <= 0.0:
                raise queue.Empty
            return super().get(block, timeout)

    _, plan = planned(seeded(10), tmp_path)
    clock = SimpleNamespace(monotonic=partial(next, count(0.0)))  # each look at it takes a second
    monkeypatch.setattr("orchestrator.services.artifact_lookup.time", clock)
    told = SimpleNamespace(SimpleQueue=PunctualQueue, Empty=queue.Empty)
    monkeypatch.setattr("orchestrator.services.artifact_lookup.queue", told)
    store = opened(CountingStore(), monkeypatch)
    assert lookup_artifacts(plan, silence_s=15.0).problems == ()
    assert len(store.read) == len(plan.jobs) > 100
    with pytest.raises(TimeoutError):
        ask_all(str, list(range(100)), deadline_s=clock.monotonic() + 15.0)


def seeded(number: int) -> str:
    """The first sweep with so many seeds: five pretrainings and probes of each."""
    return FIRST.replace("transfer:", f"  seeds: [{', '.join(map(str, range(number)))}]\ntransfer:")


class CountingStore(MemoryStore):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.listed: list[str] = []

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self.read.append(name)
        return super().get(name, max_bytes=max_bytes)

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        self.listed.append(prefix)
        return super().list_children(prefix, start_after=start_after)


def opened(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """Make it the store of every plan."""
    monkeypatch.setattr("orchestrator.services.artifact_lookup.open_store", lambda _: store)
    monkeypatch.setattr("orchestrator.services.artifact_lookup.is_initialised", lambda _: True)
    return store


def deadline_of(seconds: float) -> float:
    return time.monotonic() + seconds


def test_ask_all_error_of_a_question_is_raised() -> None:
    def ask(question: int) -> int:
        if question == 3:
            raise NotFoundError("no three")
        return question

    with pytest.raises(NotFoundError, match="no three"):
        ask_all(ask, list(range(100)), deadline_s=deadline_of(10))
    assert ask_all(ask, [1, 2], deadline_s=deadline_of(10)) == {1: 1, 2: 2}
    assert ask_all(ask, [], deadline_s=deadline_of(0)) == {}


def test_history_of_finished_sweep_serves_every_kind_and_gives_its_speeds_back(finished: Path) -> None:
    _, plan = planned(FIRST.replace("lr: 0.05", "lr: 0.04"), finished, "third.yaml")
    history = history_of(plan)
    kinds = {measurement.kind.value for measurement in history.measurements}
    assert kinds >= {"dataset", "index", "labels", "pretrain", "probe"}
    outlook = outlook_of(FIRST.replace("lr: 0.05", "lr: 0.04"), finished)
    by_kind = {job.kind: outlook.estimates.jobs[job.name] for job in plan.jobs if job.name in outlook.estimates.jobs}
    assert {kind: estimate.source for kind, estimate in by_kind.items()} == {
        JobKind.PRETRAIN: EstimateSource.HISTORY,
        JobKind.PROBE: EstimateSource.HISTORY,
    }
    store = open_store(plan.store_uri)
    _, first = planned(FIRST, finished)
    records = [
        seen for job in first.jobs if job.kind is JobKind.PRETRAIN and (seen := read_artifact_summary(store, job.key))
    ]
    took = sorted(_seconds(seen) for seen in records)
    assert took[0] * 0.99 <= by_kind[JobKind.PRETRAIN].seconds <= took[-1] * 1.01
    assert outlook.model_error is not None


def _seconds(seen: ArtifactSummary) -> float:
    measured = seen.summary["measured"]
    return float(measured["setup_s"] + 64 / measured["images_per_s"])


def test_explain_committed_job_says_who_made_it(finished: Path) -> None:
    _, plan = planned(FIRST, finished)
    found = explain("pretrain/levels/depth1/seed0", plan, plan.store_uri)
    assert (found.state, found.committed_by, found.fields) == ("committed", "first: pretrain/levels/depth1/seed0", ())


def test_explain_new_job_names_the_field_of_the_nearest_result_also_behind_its_inputs(finished: Path) -> None:
    longer = FIRST.replace(f"recipe: {RECIPE}\ntransfer", "recipe: {epochs: 2, batch_size: 32, lr: 0.05}\ntransfer")
    _, plan = planned(longer, finished, "more.yaml")
    pretrain = explain("pretrain/levels/depth2/seed0", plan, plan.store_uri)
    assert pretrain.state == "new"
    assert [str(field) for field in pretrain.fields] == ["parameters.recipe.epochs: 1.0 -> 2.0"]
    assert pretrain.compared_job == "first: pretrain/levels/depth2/seed0"
    probe = explain("probe/top/levels/depth2/seed0/seed0", plan, plan.store_uri)
    assert [str(field) for field in probe.fields] == ["backbone > parameters.recipe.epochs: 1.0 -> 2.0"]


def test_explain_two_keys_of_the_store_need_no_sweep(finished: Path) -> None:
    _, plan = planned(FIRST, finished)
    names = plan.by_name()
    old, new = names["pretrain/random/2/seed0"].key, names["pretrain/random/8/seed0"].key
    found = explain(new, None, plan.store_uri, against=old)
    assert [str(field) for field in found.fields] == ["labels > parameters.space.random.num_classes: 2 -> 8"]


@pytest.mark.parametrize(
    ("name", "against", "error", "says"),
    [
        ("pretrain/levels/depth9/seed0", "", NotFoundError, "depth2"),
        ("pretrain/levels/depth1/seed0", "pretrain-nothing", NotFoundError, "orchestrator ls"),
    ],
)
def test_explain_what_is_not_there_is_refused_with_a_way_on(
    finished: Path, name: str, against: str, error: type[Exception], says: str
) -> None:
    _, plan = planned(FIRST, finished)
    with pytest.raises(error) as refused:
        explain(name, plan, plan.store_uri, against=against)
    assert says in str(refused.value)


def test_explain_job_name_without_a_sweep_asks_for_it(finished: Path) -> None:
    with pytest.raises(UserError, match="before it"):
        explain("pretrain/levels/depth1/seed0", None, (finished / "store").as_uri())


def test_stated_cluster_is_cut_into_nodes() -> None:
    fleet = stated_fleet(StatedCluster(gpus=20))
    assert [node.gpus for node in fleet.nodes] == [8, 8, 4]
    assert fleet.cpus == 320
    assert stated_fleet(StatedCluster(cpus=7)).cpus == 7
    with pytest.raises(UserError, match="numbers from 1 up"):
        stated_fleet(StatedCluster(gpus=-1))


def test_api_plan_has_frames_and_html(finished: Path) -> None:
    sweep, plan = planned(FIRST, finished, "api.yaml")
    view = sweep.plan(cpus=4)
    assert list(view.jobs["job"]) == [job.name for job in plan.jobs]
    assert set(view.jobs["state"]) <= {"reuse", "stale"}
    assert view.summary["counts"]["new"] == 0
    assert view.groups["reuse"].sum() + view.groups["stale"].sum() == len(plan.jobs)
    assert "Plan of sweep first" in view._repr_html_()
    assert "Plan of sweep first: 17 jobs" in str(view)


def test_api_diff_of_two_plans(finished: Path) -> None:
    one, other = planned(FIRST, finished)[0].plan(), planned(SECOND, finished, "second.yaml")[0].plan()
    assert other.diff(one).counts[Change.RENAMED] == 4  # labels and pretrains of both levels


def test_api_results_are_one_row_per_committed_run(finished: Path) -> None:
    sweep, _ = planned(FIRST, finished)
    results = sweep.results()
    probes = results[results["kind"] == "probe"]
    assert len(probes) == 5
    assert set(probes["label_space"]) == {"levels/depth1", "levels/depth2", "random/2", "random/4", "random/8"}
    assert probes["val_error"].between(0, 1).all()
    again = Sweep.submitted("first", store=sweep.store_uri)
    assert again.results().equals(results)
    assert again.status().counts == {"succeeded": 17}
    assert "succeeded" in again.status()._repr_html_()
    assert {table.transfer for table in again.report().tables} == {"top"}
    assert again.wait(timeout_s=1).state == "succeeded"


def test_api_nothing_submitted_says_so(tmp_path: Path) -> None:
    sweep, _ = planned(FIRST, tmp_path)
    for ask in (sweep.status, sweep.report):
        with pytest.raises(NotFoundError, match="submit a sweep first"):
            ask()
    assert len(sweep.results()) == 0
    with pytest.raises(NotFoundError):
        Sweep.submitted("first", store=sweep.store_uri)


def test_api_submit_over_budget_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    text = FIRST + "resources: {pretrain: {gpus: 1}}\npolicy: {budget: {gpu_hours: 0.000001}}\n"
    sweep, _ = planned(text, tmp_path)
    with pytest.raises(InfeasibleError, match="GPU-hours"):
        sweep.submit(Where.INPROCESS)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


@pytest.mark.ci
def test_api_import_and_plan_load_no_framework(tmp_path: Path) -> None:
    script = (
        "import sys; from orchestrator import Sweep; Sweep.from_yaml('quickstart').plan(cpus=2);"
        "print(*{'torch', 'ray', 'workloads', 'mlflow', 'timm', 'pandas'} & sys.modules.keys())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == []
    assert list(tmp_path.iterdir()) == []
