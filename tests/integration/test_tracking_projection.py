"""What a run says beyond its state: where it came from, its data, its place in the store, trials, the registry."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from orchestrator.cli.commands.report import compute
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.render.files import save_report
from orchestrator.storage.artifacts import ArtifactWriter, part_object, read_record
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.trials import Trial, TrialPoint, TrialState, trials_folder, write_trial
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from orchestrator.tracking.links import compare_url, find_compare_link, find_run_links, run_url, share_key
from orchestrator.tracking.provenance import Provenance, capture, save
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingError, TrackingRefusedError, TrackingServer
from tests.builders import request_of
from tests.gc_store import with_own_key
from tests.mlflow_servers import new_database
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import BASELINE, START_S, commit, sample_metrics, sample_plan
from tests.tracking_sweeps import runs_by_job

SPACES = (BASELINE, "levels/depth3")


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return new_database(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture(scope="module")
def client(uri):
    return TrackingServer(uri).client


@pytest.fixture
def plan(store, request) -> Plan:
    sweep = request.node.name.replace("[", "-").replace("]", "")
    return sample_plan(store.uri, sweep=sweep, spaces=SPACES, seeds=(0, 1), transfers=("superclass",))


def _job(plan: Plan, kind: JobKind) -> Job:
    return next(job for job in plan.jobs if job.kind is kind)


def test_publisher_run_of_a_backbone_leads_to_its_artifact_and_its_data(client, store, plan, uri):
    index, backbone = _job(plan, JobKind.INDEX), _job(plan, JobKind.PRETRAIN)
    journal = SampleJournal(store, plan)
    for job in plan.jobs[: plan.jobs.index(backbone) + 1]:
        journal.run(job)
    assert Publisher(store, uri).publish_once(plan.sweep)

    run = runs_by_job(client, plan)[backbone.name]
    folder = f"{store.uri}/artifacts/pretrain/{backbone.key}"
    assert run.data.tags["artifact"] == folder
    assert run.data.tags["checkpoints"] == f"{folder}/checkpoints"
    assert run.data.tags["attempt_states"] == "1 succeeded"
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("tree", run.data.params["dataset_digest"][:32])
    assert json.loads(used.dataset.source) == {"uri": f"{store.uri}/artifacts/dataset/{plan.jobs[0].key}"}
    assert runs_by_job(client, plan)[index.name].inputs.dataset_inputs == []
    labels = runs_by_job(client, plan)[f"labels/{BASELINE}"]
    assert (labels.data.params["level"], labels.data.params["granularity"]) == ("depth1", "2")


def test_publisher_attempts_are_told_by_how_they_ended(client, store, plan, uri):
    journal, job = SampleJournal(store, plan), plan.jobs[0]
    for kind in (FailureKind.OUT_OF_MEMORY, FailureKind.OUT_OF_MEMORY, FailureKind.NODE_LOST):
        journal.launch(job)
        journal.fail(job, kind=kind)
    journal.run(job)
    assert Publisher(store, uri).publish_once(plan.sweep)
    assert (
        runs_by_job(client, plan)[job.name].data.tags["attempt_states"] == "1 node_lost, 2 out_of_memory, 1 succeeded"
    )


def test_publisher_metrics_of_the_machine_are_system_metrics(client, store, plan, uri):
    job = plan.jobs[0]
    metrics = {"train_loss": 1.0, "images_per_s": 100.0, "data_wait": 0.25}
    line = json.dumps({"step": 5, "epoch": 1.0, "at_s": START_S, "metrics": metrics})
    store.put(metrics_segment(job.key, 1, 0, 5), line.encode())
    SampleJournal(store, plan).run(job)
    assert Publisher(store, uri).publish_once(plan.sweep)
    found = runs_by_job(client, plan)[job.name].data.metrics
    assert {name: found[name] for name in ("train_loss", "system/images_per_s", "system/data_wait")} == {
        "train_loss": 1.0,
        "system/images_per_s": 100.0,
        "system/data_wait": 0.25,
    }
    assert "images_per_s" not in found


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_provenance_repository_with_changes_is_told_with_its_diff_and_no_password(tmp_path):
    _git(tmp_path, "init", "-q", "-b", "topic")
    (tmp_path / "a.txt").write_text("one\n")
    _git(tmp_path, "add", "a.txt")
    _git(tmp_path, "commit", "-q", "-m", "first")
    _git(tmp_path, "remote", "add", "origin", "https://me:secret@example.org/lab.git")
    assert capture(tmp_path).diff == ""
    assert capture(tmp_path).tags()["git_dirty"] == "no"

    (tmp_path / "a.txt").write_text("two\n")
    found = capture(tmp_path)
    assert found.tags() == {
        "mlflow.source.git.commit": _git(tmp_path, "rev-parse", "HEAD"),
        "mlflow.source.git.branch": "topic",
        "mlflow.source.git.repoURL": "https://example.org/lab.git",
        "git_dirty": "yes",
    }
    assert "-one\n+two\n" in found.diff


def test_provenance_outside_of_a_repository_is_empty(tmp_path):
    assert capture(tmp_path) == Provenance()
    assert capture(tmp_path / "absent") == Provenance()


def test_publisher_sweep_tells_its_commit_even_if_it_learns_it_late(client, store, plan, uri):
    SampleJournal(store, plan).run(plan.jobs[0])
    publisher = Publisher(store, uri)
    assert publisher.publish_once(plan.sweep)
    assert "mlflow.source.git.commit" not in runs_by_job(client, plan)["(sweep)"].data.tags

    save(store, plan.sweep, "message-1", Provenance(commit="c" * 40, branch="main", diff="-one\n+two\n"))
    assert publisher.publish_once(plan.sweep)
    run = runs_by_job(client, plan)["(sweep)"]
    assert run.data.tags["mlflow.source.git.commit"] == "c" * 40
    assert _diff(client, run) == "-one\n+two\n"


def _diff(client: MlflowClient, run: Run) -> str:
    return Path(client.download_artifacts(run.info.run_id, "uncommitted.diff")).read_text()


def test_publisher_sweep_shows_nothing_of_an_earlier_revisions_commit(client, store, plan, uri):
    journal, publisher = SampleJournal(store, plan), Publisher(store, uri)
    origins = [
        Provenance(commit="c" * 40, branch="topic", repository="https://example.org/lab.git", diff="-one\n+two\n"),
        Provenance(commit="d" * 40, branch="main", package_digest="p"),
        Provenance(package_digest="p"),  # from outside of a repository
    ]
    for revision, origin in enumerate(origins, start=1):
        if revision > 1:
            journal.accept(replace(plan, revision=revision))
        save(store, plan.sweep, f"message-{revision}", origin)
        assert publisher.publish_once(plan.sweep)
        run = runs_by_job(client, plan)["(sweep)"]
        assert {name: run.data.tags[name] for name in origin.tags()} == origin.tags()
        assert ("-one" in _diff(client, run)) == bool(origin.diff)


def test_publisher_report_is_the_description_of_the_sweeps_run(client, store, plan, uri):
    """It knows no prices, and leaves a saved report alone that has costs."""
    SampleJournal(store, plan).run_all()
    prices = PriceTable.parse("{currency: USD, cpu: {hour: 1.0}}", "prices.yaml")
    saved = save_report(store, plan.sweep, compute(store, plan.sweep, prices)[1])
    contents = [store.get(name) for name in saved]
    assert b"cost [USD]" in contents[0]
    assert Publisher(store, uri).publish_once(plan.sweep)
    assert [store.get(name) for name in saved] == contents
    note = runs_by_job(client, plan)["(sweep)"].data.tags["mlflow.note.content"]
    assert "levels/depth3" in note
    assert len(note) < 8000


# ---------------------------------------------------------------------------------------------------------------- links
def test_links_compare_url_names_experiment_and_view():
    url = compare_url("http://host:5000/", "7", "my-study")
    assert (
        url == f"http://host:5000/#/experiments/7/runs?viewStateShareKey={share_key('my-study')}&compareRunsMode=CHART"
    )
    assert share_key("my-study") != share_key("other")


def test_links_are_found_in_the_store_once_published(client, store, plan, uri):
    assert find_compare_link(store, plan.sweep, uri, "http://host") == ""
    assert find_run_links(store, plan, uri, "http://host") == {}
    SampleJournal(store, plan).run(plan.jobs[0])
    assert Publisher(store, uri).publish_once(plan.sweep)

    experiment = client.get_experiment_by_name(plan.sweep)
    assert find_compare_link(store, plan.sweep, uri, "http://host").startswith(
        f"http://host/#/experiments/{experiment.experiment_id}/runs?"
    )
    assert find_compare_link(store, plan.sweep, uri, "") == ""
    run_id = runs_by_job(client, plan)[plan.jobs[0].name].info.run_id
    links = find_run_links(store, plan, uri, "http://host")
    assert links[plan.jobs[0].name] == run_url("http://host", experiment.experiment_id, run_id)
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{share_key(plan.sweep)}"])
    parallel = next(chart for chart in view["compareRunCharts"] if chart["type"] == "PARALLEL")
    assert (parallel["selectedParams"], parallel["selectedMetrics"]) == (["label_space", "granularity"], ["val_error"])
    assert plan.sweep in view["searchFilter"]


# ------------------------------------------------------------------------------------------------------------- registry
def test_registry_best_backbone_of_a_sweep_is_registered_once(client, store, plan, uri):
    plan = replace(plan, register="best")
    journal = SampleJournal(store, plan)
    for job in plan.jobs:
        journal.run(job)
    assert Publisher(store, uri).publish_once(plan.sweep)
    assert client.search_model_versions(f"name = '{plan.sweep}'") == []  # not before the sweep has ended

    journal.finish()
    publisher = Publisher(store, uri)
    assert publisher.publish_once(plan.sweep)
    for stat in list(store.list_objects(f"sweeps/{plan.sweep}/tracking/")):
        store.delete(stat.name)
    assert Publisher(store, uri).publish_once(plan.sweep)

    (version,) = client.search_model_versions(f"name = '{plan.sweep}'")
    # Of depth3, which is best, seed 1 has the lower error: see ``tests/sample_sweep.py``.
    backbone = plan.by_name()["pretrain/levels/depth3/seed1"]
    assert version.tags["label_space"] == "levels/depth3"
    assert (version.tags["key"], version.tags["val_error"]) == (backbone.key, "0.06")
    assert version.description.startswith(
        "Best seed (of 2, chosen by val_error) of the label space with the lowest mean"
    )
    assert version.run_id == runs_by_job(client, plan)[backbone.name].info.run_id
    assert client.get_model_version_by_alias(plan.sweep, "best").version == version.version
    third = Publisher(store, uri)
    assert third.publish_once(plan.sweep)
    assert third.num_written == 0  # nothing is left to do, and nothing is done


def test_registry_better_backbone_of_a_later_submit_is_registered_too(client, store, plan, uri, monkeypatch):
    small, large = (
        sample_plan(store.uri, sweep=plan.sweep, spaces=spaces, seeds=(0, 1), transfers=("superclass",))
        for spaces in ((BASELINE, "levels/depth4"), (BASELINE, "levels/depth4", "levels/depth3"))
    )
    journal = SampleJournal(store, replace(small, register="best"))
    journal.run_all()
    publisher = Publisher(store, uri)
    assert publisher.publish_once(plan.sweep)
    journal.accept(replace(large, register="best", revision=2))
    for job in large.jobs:
        if job.name not in small.by_name():
            journal.run(job)
    journal.finish()

    def fail(*_: object) -> None:
        raise ConnectionError("the server went away")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_registered_model_alias", fail)
        with pytest.raises(TrackingError, match="went away"):
            publisher.publish_once(plan.sweep)

    def best() -> str:
        return str(client.get_model_version_by_alias(plan.sweep, "best").tags["label_space"])

    assert best() == "levels/depth4"
    assert publisher.publish_once(plan.sweep)
    assert best() == "levels/depth3", "its version was made before, and not named the best"
    journal.accept(replace(small, register="best", revision=3))
    journal.finish()
    assert publisher.publish_once(plan.sweep)
    assert best() == "levels/depth4", "it is the best once more"
    versions = client.search_model_versions(f"name = '{plan.sweep}'")
    assert sorted(version.tags["label_space"] for version in versions) == ["levels/depth3", "levels/depth4"]


@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_registry_best_backbone_whose_run_was_deleted_gets_another(client, store, plan, uri, is_noticed):
    plan = replace(plan, register="best")
    journal = SampleJournal(store, plan)
    backbone = plan.by_name()["pretrain/levels/depth3/seed1"]
    for job in plan.jobs:
        if job is not backbone or not is_noticed:
            journal.run(job)
    if is_noticed:
        journal.launch(backbone)
    publisher = Publisher(store, uri)
    assert publisher.publish_once(plan.sweep)
    deleted = runs_by_job(client, plan)[backbone.name].info.run_id
    client.delete_run(deleted)
    if is_noticed:  # by the pass that writes its end
        journal.succeed(backbone)
    journal.finish()

    assert not publisher.publish_once(plan.sweep)
    assert publisher.publish_once(plan.sweep)

    (version,) = client.search_model_versions(f"name = '{plan.sweep}'")
    assert version.run_id == runs_by_job(client, plan)[backbone.name].info.run_id != deleted


def test_registry_backbone_of_two_attempts_keeps_its_run_when_the_memory_is_lost(client, store, plan, uri):
    plan = replace(plan, register="best")
    journal = SampleJournal(store, plan)
    backbone = plan.by_name()["pretrain/levels/depth3/seed1"]
    for job in plan.jobs:
        if job is backbone:
            journal.launch(job)
            write_segment(store, job.key, 1, 0, [5.0, 9.0])
            journal.fail(job)
            write_segment(store, job.key, 2, 1, [4.0])
        journal.run(job)
    journal.finish()
    assert Publisher(store, uri).publish_once(plan.sweep)
    before = runs_by_job(client, plan)[backbone.name].info.run_id
    for stat in list(store.list_objects(f"sweeps/{plan.sweep}/tracking/")):
        store.delete(stat.name)

    assert Publisher(store, uri).publish_once(plan.sweep)
    assert runs_by_job(client, plan)[backbone.name].info.run_id == before
    (version,) = client.search_model_versions(f"name = '{plan.sweep}'")
    assert version.run_id == before
    history = client.get_metric_history(before, "train_loss")
    assert [(point.step, point.value) for point in history][:2] == [(1, 5.0), (2, 4.0)]


def test_registry_backbone_that_is_trained_anew_keeps_the_run_with_its_files(client, store, plan, uri):
    """As after a collection of a forgotten sweep that is submitted again: attempts go on to be counted."""
    plan = replace(plan, register="best")
    journal, publisher = SampleJournal(store, plan), Publisher(store, uri)
    backbones = [plan.by_name()[f"pretrain/levels/depth3/seed{seed}"] for seed in (0, 1)]
    for backbone in backbones:
        write_segment(store, backbone.key, 1, 0, [5.0, 4.0])
    journal.run_all()
    assert publisher.publish_once(plan.sweep)
    before = runs_by_job(client, plan)
    journal.accept(replace(plan, revision=2, jobs=plan.jobs[:1]))
    journal.accept(replace(plan, revision=3))
    for backbone in backbones:
        store.delete(metrics_segment(backbone.key, 1, 0, 2))
        journal.launch(backbone)
        write_segment(store, backbone.key, 2, 0, [6.0])
    assert publisher.publish_once(plan.sweep)
    after = runs_by_job(client, plan)
    (version,) = client.search_model_versions(f"name = '{plan.sweep}'")
    assert [after[one.name].info.run_id == before[one.name].info.run_id for one in backbones] == [False, True]
    assert version.run_id == after[backbones[1].name].info.run_id


@pytest.mark.parametrize("is_lost", [False, True], ids=["altered", "lost"])
def test_registry_damaged_backbone_is_reported_once_and_registered_when_it_was_made_anew(
    client, store, plan, uri, is_lost, caplog
):
    plan = replace(plan, register="best")
    journal, best = SampleJournal(store, plan), plan.by_name()["pretrain/levels/depth3/seed1"]
    writer = ArtifactWriter(store, request_of(best, store.uri, sweep=plan.sweep))
    writer.add("backbone.safetensors", b"right weights")
    writer.commit(now=START_S, metrics=sample_metrics(best))
    for job in plan.jobs:
        journal.reuse(job) if job is best else journal.run(job)
    journal.finish()
    part = part_object(read_record(store, best.key), "backbone.safetensors")
    store.delete(part) if is_lost else store.put(part, b"wrong weights")
    for publisher in (Publisher(store, uri), Publisher(store, uri)):
        assert publisher.publish_once(plan.sweep)
    assert caplog.text.count(f"the best backbone of sweep {plan.sweep} is not registered") == 1
    assert client.search_model_versions(f"name = '{plan.sweep}'") == []
    store.put(part, b"right weights")  # made anew, after a submit of the same file
    journal.reopen()
    journal.finish()
    assert Publisher(store, uri).publish_once(plan.sweep)
    (version,) = client.search_model_versions(f"name = '{plan.sweep}'")
    assert version.tags["key"] == best.key


def test_registry_sweep_that_does_not_ask_registers_nothing(client, store, plan, uri):
    SampleJournal(store, plan).run_all()
    assert Publisher(store, uri).publish_once(plan.sweep)
    assert client.search_model_versions(f"name = '{plan.sweep}'") == []


# ------------------------------------------------------------------------------------------------------------- analyses
ANALYSED = """\
version: 1
name: curves-of-analyses
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*"]
  recipe: {epochs: 10, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
  checkpoints: {keep: {epochs: [2, 5]}}
analyze:
  - {name: structure, from_checkpoints: [2, 5, 10], measures: [collapse]}
  - {name: last, measures: [rank]}
  - {name: alike, between: [seeds], measures: [cka]}
"""


def test_publisher_analyses_are_curves_by_epoch_on_the_run_of_their_backbone(client, store, uri):
    plan = build_plan(parse_sweep(ANALYSED, "s.yaml", shipped_recipes()), store_uri=store.uri)
    journal = SampleJournal(store, plan)
    analyses = [job for job in plan.jobs if job.kind is JobKind.ANALYZE]
    early = [job for job in analyses if job.facets.get("checkpoint") == "epoch2"]
    for job in (*(job for job in plan.jobs if job.kind is not JobKind.ANALYZE), *early):
        journal.run(job)
    publisher = Publisher(store, uri)
    assert publisher.publish_once(plan.sweep)
    for job in analyses:
        if job not in early:
            journal.run(job)
    journal.finish()
    assert publisher.publish_once(plan.sweep)

    def history(job: str, metric: str) -> list[tuple[int, float]]:
        found = client.get_metric_history(runs_by_job(client, plan)[job].info.run_id, metric)
        return [(point.step, point.value) for point in found]

    for seed in (0, 1):
        backbone = f"pretrain/levels/depth1/seed{seed}"
        assert history(backbone, "structure/nc1") == [(2, 0.5), (5, 0.2), (10, 0.1)]
        assert history(backbone, "last/nc1") == [(10, 1.0)]
        assert history(f"analyze/structure/levels/depth1/seed{seed}/epoch5", "nc1") == [(5, 0.2)]
    assert not any("alike" in name for run in runs_by_job(client, plan).values() for name in run.data.metrics)


def test_publisher_analysis_that_was_changed_leaves_nothing_on_the_run_of_its_backbone(client, store, uri, monkeypatch):
    text = ANALYSED.replace("curves-of-analyses", "changed-analyses")
    plan, changed = (
        build_plan(parse_sweep(one, "s.yaml", shipped_recipes()), store_uri=store.uri)
        for one in (text, text.replace("name: structure,", "name: structure, split: train,"))
    )
    keys, backbone = {job.key for job in plan.jobs}, plan.by_name()["pretrain/levels/depth1/seed0"]
    journal, publisher = SampleJournal(store, plan), Publisher(store, uri)
    journal.run_all()
    assert publisher.publish_once(plan.sweep)
    runs = [runs_by_job(client, plan)[backbone.name]]

    def submit(plan: Plan, revision: int) -> list[tuple[int, float]]:
        done = {job.key for job in journal.plan.jobs}
        journal.accept(replace(plan, revision=revision))
        for job in plan.jobs:
            if job.key not in keys:
                commit(store, job, {"nc1": 9.0}, sweep=plan.sweep)
                keys.add(job.key)
            if job.key not in done:
                journal.reuse(job)
        assert publisher.publish_once(plan.sweep)
        runs.append(client.search_runs([runs[0].info.experiment_id], f"tags.key = '{backbone.key}'")[0])
        return [(point.step, point.value) for point in client.get_metric_history(runs[-1].info.run_id, "structure/nc1")]

    found = [(2, 0.5), (5, 0.2), (10, 0.1)]
    assert submit(changed, 2) == [(2, 9.0), (5, 9.0), (10, 9.0)]
    assert submit(plan, 3) == found
    assert submit(plan, 4) == found
    monkeypatch.setattr(TrackingServer, "registered_runs", lambda *_: {runs[-1].info.run_id})
    submit(changed, 5)
    ids = [run.info.run_id for run in runs]
    assert ids[2] == ids[3] == ids[4], "nothing was changed, and then the model registry has its files"
    assert len(set(ids)) == 3


def test_publisher_levels_with_characters_that_mlflow_refuses_have_metrics(client, store, uri):
    text = ANALYSED.replace("curves-of-analyses", "levels-of-tables")
    plan = build_plan(parse_sweep(text, "s.yaml", shipped_recipes()), store_uri=store.uri)
    backbone, analysis = _job(plan, JobKind.PRETRAIN), _job(plan, JobKind.ANALYZE)
    values = {"val_level_error_Family (Latin)": 0.5, "val_level_error_Family [Latin]": 0.25}
    line = {"step": 5, "epoch": 1.0, "at_s": START_S, "metrics": values}
    store.put(metrics_segment(backbone.key, 1, 0, 5), json.dumps(line).encode())
    commit(store, analysis, {"distance_Family (Latin)": 2.0}, sweep=plan.sweep)
    journal = SampleJournal(store, plan)
    for job in plan.jobs:
        journal.reuse(job) if job is analysis else journal.run(job)
    assert Publisher(store, uri).publish_once(plan.sweep)
    runs = runs_by_job(client, plan)
    assert [runs[job.name].info.status for job in (backbone, analysis)] == ["FINISHED", "FINISHED"]
    assert runs[backbone.name].data.metrics["val_level_error_Family _Latin_"] == 0.5
    assert runs[backbone.name].data.metrics["val_level_error_Family _Latin__7e1296"] == 0.25
    for name, shown in ((analysis.name, ""), (backbone.name, f"{analysis.facets['analysis']}/")):
        assert runs[name].data.metrics[f"{shown}distance_Family _Latin_"] == 2.0


# --------------------------------------------------------------------------------------------------------------- trials
def _trial(number: int, *errors: float, state: TrialState = TrialState.RUNNING) -> Trial:
    points = tuple(
        TrialPoint(step=10 * step, at_s=START_S + step, metrics={"val_error": error})
        for step, error in enumerate(errors, start=1)
    )
    ended_s = None if state is TrialState.RUNNING else START_S + 100
    return Trial(number=number, params={"lr": 0.1}, state=state, started_s=START_S, ended_s=ended_s, points=points)


def _with_search(plan: Plan) -> tuple[Plan, Job]:
    search = with_own_key(
        replace(
            plan.jobs[0],
            name="search/lr",
            kind=JobKind.SEARCH,
            identity={**plan.jobs[0].identity, "kind": "search"},
            needs=(),
        )
    )
    return replace(plan, jobs=(*plan.jobs, search)), search


def test_publisher_trials_are_runs_below_their_search(client, store, plan, uri, monkeypatch):
    plan, search = _with_search(plan)
    journal = SampleJournal(store, plan)
    publisher = Publisher(store, uri)
    journal.launch(search)
    write_trial(store, search.key, _trial(0, 0.5))
    write_trial(store, search.key, _trial(1, 0.4, state=TrialState.STOPPED))
    assert publisher.publish_once(plan.sweep)
    runs = runs_by_job(client, plan)
    assert runs["search/lr#0"].data.tags["mlflow.parentRunId"] == runs["search/lr"].info.run_id
    assert [runs[f"search/lr#{number}"].info.status for number in (0, 1)] == ["RUNNING", "KILLED"]

    sent: list[tuple[str, int]] = []
    log_batch = SqlAlchemyStore.log_batch

    def recorded(store, run_id, metrics, params, tags):
        sent.extend((run_id, metric.step) for metric in metrics)
        log_batch(store, run_id, metrics, params, tags)

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", recorded)
    write_trial(store, search.key, _trial(0, 0.5, 0.3, state=TrialState.COMPLETED))
    assert Publisher(store, uri).publish_once(plan.sweep)
    assert sent == [(runs["search/lr#0"].info.run_id, 20)]  # and not what the run says already
    run = runs_by_job(client, plan)["search/lr#0"]
    assert (run.info.status, run.data.params["lr"]) == ("FINISHED", "0.1")
    history = client.get_metric_history(run.info.run_id, "val_error")
    assert [(point.step, point.value) for point in history] == [(10, 0.5), (20, 0.3)]


def test_publisher_trial_of_a_search_that_began_anew_has_a_run_of_its_own(client, store, plan, uri):
    plan, search = _with_search(plan)
    journal, publisher = SampleJournal(store, plan), Publisher(store, uri)
    journal.launch(search)
    write_trial(store, search.key, _trial(0, 0.5, 0.4, state=TrialState.COMPLETED))
    write_trial(store, search.key, _trial(1, 0.6))
    assert publisher.publish_once(plan.sweep)
    before = {name: run.info.run_id for name, run in runs_by_job(client, plan).items()}
    anew = replace(_trial(0, 0.9), params={"lr": 0.2}, started_s=START_S + 500)
    write_trial(store, search.key, anew)
    assert publisher.publish_once(plan.sweep)
    runs = runs_by_job(client, plan)
    assert {name for name, run in runs.items() if run.info.run_id != before[name]} == {"search/lr#0"}
    run = runs["search/lr#0"]
    assert (run.data.params["lr"], run.info.status) == ("0.2", "RUNNING")
    assert [point.value for point in client.get_metric_history(run.info.run_id, "val_error")] == [0.9]


def test_publisher_trial_of_a_search_that_failed_does_not_run_for_ever(client, store, plan, uri):
    plan, search = _with_search(plan)
    journal = SampleJournal(store, plan)
    journal.launch(search)
    write_trial(store, search.key, _trial(0, 0.5))
    publisher = Publisher(store, uri)
    assert publisher.publish_once(plan.sweep)
    journal.fail(search)
    journal.give_up(search)
    assert publisher.publish_once(plan.sweep)
    run = runs_by_job(client, plan)["search/lr#0"]
    assert (run.info.status, run.info.end_time) == ("KILLED", 1000 * (START_S + 1))


def test_publisher_trial_that_cannot_be_read_keeps_no_other(client, store, plan, uri):
    plan, search = _with_search(plan)
    SampleJournal(store, plan).launch(search)
    write_trial(store, search.key, _trial(0, 0.5))
    damaged = f"{trials_folder(search.key)}000001.json"
    store.put(damaged, b'{"number": 1}')
    publisher = Publisher(store, uri)
    for _ in range(2):
        with pytest.raises(TrackingRefusedError, match=f"search/lr is published without .*{damaged}.*'points'"):
            publisher.publish_once(plan.sweep)
    assert set(runs_by_job(client, plan)) == {"(sweep)", "search/lr", "search/lr#0"}
    store.delete(damaged)
    assert publisher.publish_once(plan.sweep)


def test_publisher_job_of_a_named_block_and_a_grid_says_so(client, store, plan, uri):
    facets = {"pretrain": "lr-0.4", "checkpoint": "epoch50", "cell": "lr=0.4,batch_size=512", "fraction": "0.01"}
    job = replace(plan.jobs[-1], facets={**plan.jobs[-1].facets, **facets}, needs=())
    plan = replace(plan, jobs=(job,))
    commit(store, job, sweep=plan.sweep)
    SampleJournal(store, plan).reuse(job)
    assert Publisher(store, uri).publish_once(plan.sweep)
    assert facets.items() <= runs_by_job(client, plan)[job.name].data.params.items()
