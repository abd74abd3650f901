"""Sweeps that were submitted again with another plan, as a real MLflow on sqlite shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from mlflow import MlflowClient

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.tracking.facts import factors_in
from orchestrator.tracking.links import find_run_links, run_url, share_key
from orchestrator.tracking.memory import MemoryFile
from orchestrator.tracking.provenance import Provenance, save
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingRefusedError
from tests.gc_store import with_own_key
from tests.mlflow_servers import new_database
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import BASELINE, sample_plan
from tests.tracking_sweeps import runs_by_job


@pytest.fixture
def tracking_uri(tmp_path) -> str:
    return new_database(tmp_path / "mlflow.db")


@pytest.fixture
def client(tracking_uri) -> MlflowClient:
    return MlflowClient(tracking_uri=tracking_uri)


@pytest.fixture
def plan(store) -> Plan:
    return sample_plan(store.uri, spaces=(BASELINE,), seeds=(0,), transfers=("superclass",))


def _publish_all(publisher: Publisher, plan: Plan) -> None:
    """A pass that finds runs of earlier revisions leaves them to the next."""
    passes = (publisher.publish_once(plan.sweep) for _ in range(3))
    assert any(passes)


def _history(client: MlflowClient, run: Any, metric: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]


def test_revision_finished_run_of_an_earlier_one_is_marked_and_leaves_the_view(client, store, plan, tracking_uri):
    journal = SampleJournal(store, plan)
    job = next(job for job in plan.jobs if "transfer" in job.facets)
    write_segment(store, job.key, 1, 0, [3.0, 2.0])
    journal.run(job)
    Publisher(store, tracking_uri).publish_once(plan.sweep)
    experiment = client.get_experiment_by_name(plan.sweep)
    (before,) = client.search_runs([experiment.experiment_id], f"tags.key = '{job.key}'")
    history = _history(client, before, "train_loss")
    for stat in list(store.list_objects(f"sweeps/{plan.sweep}/tracking/")):
        store.delete(stat.name)  # nor does it need what was remembered
    renewed = with_own_key(replace(job, identity={**job.identity, "code_version": 2}, needs=()))
    journal.accept(replace(plan, revision=2, jobs=(renewed,)))
    journal.run(renewed)
    later = Publisher(store, tracking_uri)
    _publish_all(later, plan)

    after = client.get_run(before.info.run_id)
    assert after.data.tags == before.data.tags | {"state": "superseded"}
    assert after.info.status == "FINISHED"
    assert (after.info.start_time, after.info.end_time) == (before.info.start_time, before.info.end_time)
    assert _history(client, after, "train_loss") == history
    experiment = client.get_experiment_by_name(plan.sweep)
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{share_key(plan.sweep)}"])
    shown = client.search_runs([experiment.experiment_id], view["searchFilter"])
    # Beside the sweep's own run, which has the curve.
    assert {run.data.tags["key"] for run in shown} == {renewed.key, ""}

    journal.accept(replace(plan, revision=3))
    journal.reuse(job)
    _publish_all(later, plan)
    assert client.get_run(before.info.run_id).data.tags["state"] == "reused"
    linked = find_run_links(store, plan, tracking_uri, "http://host")
    assert linked[job.name] == run_url("http://host", experiment.experiment_id, before.info.run_id)


def test_revision_is_told_once_whoever_publishes(client, store, plan, tracking_uri):
    journal = SampleJournal(store, plan)
    journal.run(plan.jobs[0])
    journal.launch(plan.jobs[1])
    first = Publisher(store, tracking_uri)
    _publish_all(first, plan)
    for revision in (2, 3):
        other = with_own_key(replace(plan.jobs[0], identity={**plan.jobs[0].identity, "code_version": 10 + revision}))
        journal.accept(replace(plan, revision=revision, jobs=(other,)))
        _publish_all(first, plan)
    for publisher in (first, Publisher(store, tracking_uri)):
        num_written = publisher.num_written
        assert publisher.publish_once(plan.sweep)
        assert publisher.num_written == num_written
    experiment = client.get_experiment_by_name(plan.sweep)
    found = client.search_runs([experiment.experiment_id], "tags.state = 'superseded'")
    assert {run.data.tags["job"]: run.info.status for run in found} == {
        plan.jobs[0].name: "FINISHED",
        plan.jobs[1].name: "KILLED",
    }


def test_revision_with_other_factors_tells_them_of_runs_that_are_published(client, store, plan, tracking_uri):
    ended, running, plain = plan.jobs[:3]

    def with_factors(revision, **factors):
        facets = {f"factor.{name}": value for name, value in factors.items()}
        jobs = [replace(job, facets={**job.facets, **facets}) if job is not plain else job for job in plan.jobs]
        return replace(plan, revision=revision, jobs=tuple(jobs))

    journal, publisher = SampleJournal(store, with_factors(1, optimizer="adamw")), Publisher(store, tracking_uri)
    journal.run(ended)
    journal.launch(running)
    journal.run(plain)
    assert publisher.publish_once(plan.sweep)
    before, num_written = runs_by_job(client, plan), publisher.num_written
    journal.accept(with_factors(2, optimizer="old", epochs="5"))
    assert publisher.publish_once(plan.sweep)
    assert publisher.num_written == num_written + 3, "without factors a run is not told anew"
    after = runs_by_job(client, plan)
    for job in (ended, running):
        assert after[job.name].info.run_id == before[job.name].info.run_id
        told = after[job.name].data
        assert (told.tags["factor.optimizer"], told.tags["factor.epochs"]) == ("old", "5")
        assert (told.params["factor.optimizer"], told.params["factor.epochs"]) == ("adamw", "5"), "which stay"

    for revision, factors in ((3, {"epochs": "5"}), (4, {})):
        journal.accept(with_factors(revision, **factors))
        assert publisher.publish_once(plan.sweep)
        told = runs_by_job(client, plan)
        for job in (ended, running):
            assert factors_in(told[job.name].data.tags) == {f"factor.{name}": text for name, text in factors.items()}

    facets = {**plain.facets, "factor.mixing (strong)": "yes"}
    jobs = tuple(replace(job, facets=facets) if job is plain else job for job in plan.jobs)
    save(store, plan.sweep, "message-5", Provenance(package_digest="p"))
    journal.accept(replace(plan, revision=5, jobs=jobs))
    for _ in range(2):
        with pytest.raises(TrackingRefusedError, match=r"mixing \(strong\)"):
            publisher.publish_once(plan.sweep)


def test_runs_with_factors_of_an_earlier_version_keep_their_curves_when_their_metrics_are_collected(
    client, store, plan, tracking_uri, monkeypatch
):
    """Fingerprints of that version are without factors."""

    def with_optimizer(name, revision):
        jobs = (replace(job, facets={**job.facets, "factor.optimizer": name}) for job in plan.jobs)
        return replace(plan, revision=revision, jobs=tuple(jobs))

    backbone = next(job for job in plan.jobs if job.kind is JobKind.PRETRAIN)

    def run_and_curve():
        run = runs_by_job(client, plan)[backbone.name]
        return run.info.run_id, run.data.tags["factor.optimizer"], set(_history(client, run, "train_loss"))

    write_segment(store, backbone.key, 1, 0, [3.0, 2.0])
    journal = SampleJournal(store, with_optimizer("sgd", 1))
    save(store, plan.sweep, "message-1", Provenance(package_digest="p"))
    journal.run_all()
    with monkeypatch.context() as patched:
        patched.setattr("orchestrator.tracking.facts.factors_in", lambda _: {})
        patched.setattr("orchestrator.tracking.content.artifact_tags", lambda *_: {"factor.optimizer": "sgd"})
        assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    run_id, _, curve = run_and_curve()
    for stat in [*store.list_objects("metrics/"), *store.list_objects("artifacts/")]:
        store.delete(stat.name)
    publisher = Publisher(store, tracking_uri)
    assert publisher.publish_once(plan.sweep)
    assert publisher.num_written == 0
    journal.accept(with_optimizer("adamw", 2))
    assert publisher.publish_once(plan.sweep)
    assert run_and_curve() == (run_id, "adamw", curve)

    journal.accept(replace(plan, revision=3, jobs=plan.jobs[:1]))
    journal.accept(with_optimizer("adamw", 4))
    journal.launch(backbone)
    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    assert run_and_curve() == (run_id, "adamw", curve)
    write_segment(store, backbone.key, 2, 0, [6.0])
    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    anew, _, curve = run_and_curve()
    assert (anew != run_id, curve) == (True, {(1, 6.0)})


def _jobs_in(client: MlflowClient, experiment: str) -> list[str]:
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else sorted(run.data.tags["job"] for run in client.search_runs([found.experiment_id]))


@pytest.mark.parametrize("is_noted", [True, False], ids=["noted", "earlier_version"])
def test_revision_with_another_experiment_has_all_runs_there(client, store, plan, tracking_uri, is_noted):
    plan = replace(plan, experiment="first")
    journal, publisher = SampleJournal(store, plan), Publisher(store, tracking_uri)
    journal.run(plan.jobs[0])
    assert publisher.publish_once(plan.sweep)
    if not is_noted:
        file = MemoryFile(store, plan.sweep, tracking_uri)
        memory = file.load()
        memory.experiment = ""
        file.save(memory)
    journal.accept(replace(plan, experiment="second", revision=2))
    journal.run(plan.jobs[1])
    expected = ["(sweep)", *sorted(job.name for job in plan.jobs[:2])]
    for one in (publisher, Publisher(store, tracking_uri)):
        assert one.publish_once(plan.sweep)
        assert _jobs_in(client, "second") == expected
    assert _jobs_in(client, "first") == ["(sweep)", plan.jobs[0].name]
    second = client.get_experiment_by_name("second").experiment_id
    links = find_run_links(store, plan, tracking_uri, "http://host")
    assert sorted(links) == expected
    runs = {run.info.run_id for run in client.search_runs([second])}
    assert {link.rpartition("/")[2] for link in links.values()} == runs

    journal.accept(replace(plan, revision=3))
    assert publisher.publish_once(plan.sweep)
    assert _jobs_in(client, "first") == expected, "those that were there are found again"


def test_revision_after_its_experiment_was_renamed_on_the_server_goes_on_there(client, store, plan, tracking_uri):
    plan = replace(plan, experiment="first")
    journal, publisher = SampleJournal(store, plan), Publisher(store, tracking_uri)
    journal.run(plan.jobs[0])
    assert publisher.publish_once(plan.sweep)
    client.rename_experiment(client.get_experiment_by_name("first").experiment_id, "ours, of July")
    journal.accept(replace(plan, revision=2))
    journal.run(plan.jobs[1])
    assert publisher.publish_once(plan.sweep)
    expected = ["(sweep)", *sorted(job.name for job in plan.jobs[:2])]
    assert _jobs_in(client, "ours, of July") == expected
    assert client.get_experiment_by_name("first") is None

    journal.accept(replace(plan, experiment="second", revision=3))
    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    assert _jobs_in(client, "second") == _jobs_in(client, "ours, of July") == expected
