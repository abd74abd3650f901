"""The publisher against a real MLflow on sqlite, read back through a client of its own."""

from __future__ import annotations

import gc
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import ref

import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.render.files import PAGE
from orchestrator.state.events import SweepEnding
from orchestrator.storage.artifacts import part_object, read_record
from orchestrator.storage.layout import metrics_segment, record_name, report_name, tracking_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.ledger import read_plan
from orchestrator.tracking import facts
from orchestrator.tracking.memory import Memory, MemoryFile, RunMemory
from orchestrator.tracking.publication import LOOK_EVERY_S
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingError, TrackingRefusedError, TrackingServer
from tests.commands import run_command
from tests.gc_store import with_own_key
from tests.mlflow_servers import new_database
from tests.report_sweeps import REPORT_FILES
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import BASELINE, START_S, commit, sample_plan
from tests.tracking_sweeps import runs_by_job

SPACES = (BASELINE, "levels/depth3")


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory):
    """One database for all tests: every test has a sweep of its own."""
    return new_database(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture(scope="module")
def client(tracking_uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


@pytest.fixture
def plan(store, request) -> Plan:
    sweep = request.node.name.replace("[", "-").replace("]", "")
    return sample_plan(store.uri, sweep=sweep, spaces=SPACES, seeds=(0, 1), transfers=("superclass",))


@pytest.fixture
def publisher(store, tracking_uri) -> Publisher:
    return Publisher(store, tracking_uri)


def _job(plan: Plan, kind: JobKind) -> Job:
    return next(job for job in plan.jobs if job.kind is kind)


def _history(client, run, metric: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    store: LocalStore
    plan: Plan


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tracking_uri) -> Finished:
    """A sweep that ran to its end, published once; nobody may change it."""
    store = LocalStore(tmp_path_factory.mktemp("finished"))
    plan = sample_plan(store.uri, sweep="finished", spaces=SPACES, seeds=(0, 1), transfers=("superclass",))
    write_segment(store, _job(plan, JobKind.PRETRAIN).key, 1, 0, [3.0, 2.0])
    SampleJournal(store, plan).run_all()
    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    return Finished(store=store, plan=plan)


def test_publisher_finished_sweep_has_a_nested_run_per_job(client, finished):
    runs = runs_by_job(client, finished.plan)
    sweep_run = runs.pop("(sweep)")
    assert set(runs) == set(finished.plan.by_name())
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {sweep_run.info.run_id}
    assert {run.info.status for run in [sweep_run, *runs.values()]} == {"FINISHED"}
    assert sweep_run.info.run_name == "finished"


def test_publisher_transfer_run_says_what_people_compare_by(client, finished):
    job = finished.plan.by_name()["finetune/superclass/levels/depth3/seed1/seed0"]
    run = runs_by_job(client, finished.plan)[job.name]
    expected = {
        "dataset": "tree",
        "label_space": "levels/depth3",
        "level": "depth3",
        "granularity": "32",
        "pretrain_seed": "1",
        "transfer": "superclass",
        "protocol": "finetune",
        "target": BASELINE,
        "transfer_seed": "0",
        "seed": "0",
        "model": "test_resnet",
        "image_size": "32",
        "lr": "0.1",
        "batch_size": "64",
        "key": job.key,
    }
    assert expected.items() <= run.data.params.items()
    tags = {"sweep": "finished", "job": job.name, "kind": "finetune", "key": job.key, "state": "succeeded"}
    assert tags.items() <= run.data.tags.items()
    assert run.data.tags["attempts"] == "1"
    assert "reused_from" not in run.data.tags
    assert run.data.metrics == pytest.approx(dict(read_record(finished.store, job.key).metrics))


def test_publisher_finished_sweep_has_its_report_attached(client, finished, tracking_uri):
    run = runs_by_job(client, finished.plan)["(sweep)"]
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {*REPORT_FILES, PAGE, "images"}
    downloaded = Path(client.download_artifacts(run.info.run_id, "report.md"))
    assert downloaded.read_bytes() == finished.store.get(report_name("finished", "report.md"))
    # Beside the database, wherever the publisher happened to run.
    assert run.info.artifact_uri.startswith(Path(tracking_uri.removeprefix("sqlite:///")).parent.as_uri())


def test_publisher_second_pass_changes_nothing(client, finished, tracking_uri):
    job = _job(finished.plan, JobKind.PRETRAIN)
    before = {name: run.to_dictionary() for name, run in runs_by_job(client, finished.plan).items()}

    assert Publisher(finished.store, tracking_uri).publish_once("finished")

    after = runs_by_job(client, finished.plan)
    assert {name: run.to_dictionary() for name, run in after.items()} == before
    assert _history(client, after[job.name], "train_loss")[:2] == [(1, 3.0), (2, 2.0)]


def test_publisher_times_come_from_the_journal(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    launched_s = journal.now
    journal.fail(job)
    journal.run(job)
    publisher.publish_once(plan.sweep)

    runs = runs_by_job(client, plan)
    run = runs[job.name]
    assert run.info.start_time == 1000 * launched_s
    assert run.info.end_time == 1000 * journal.now
    assert run.data.tags["attempts"] == "2"
    assert run.data.tags["last_failure"] == "unknown: boom"
    assert runs["(sweep)"].info.start_time == 1000 * (START_S + 1)
    assert runs["(sweep)"].info.status == "RUNNING"


def test_publisher_failure_with_what_no_database_takes_is_told(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    journal.launch(plan.jobs[0])
    journal.fail(plan.jobs[0], "caf\udce9\0")
    assert publisher.publish_once(plan.sweep)
    tags = runs_by_job(client, plan)[plan.jobs[0].name].data.tags
    assert tags["last_failure"] == "unknown: caf\\udce9\\x00"


def test_publisher_every_end_has_its_status(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    dataset, index, labels = plan.jobs[:3]
    journal.run(dataset)
    journal.launch(index)
    publisher.publish_once(plan.sweep)
    assert runs_by_job(client, plan)[index.name].info.status == "RUNNING"
    assert labels.name not in runs_by_job(client, plan)

    journal.fail(index)
    publisher.publish_once(plan.sweep)
    assert runs_by_job(client, plan)[index.name].info.status == "SCHEDULED"

    journal.give_up(index)
    for job in plan.jobs[2:]:
        journal.skip(job, index)
    journal.finish(SweepEnding.FAILED)
    publisher.publish_once(plan.sweep)
    runs = runs_by_job(client, plan)
    found = [runs[name].info.status for name in (dataset.name, index.name, labels.name, "(sweep)")]
    assert found == ["FINISHED", "FAILED", "KILLED", "FAILED"]
    assert runs[labels.name].data.tags["reason"] == f"needs {index.name}"


def test_publisher_metric_segments_become_history(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    job = _job(plan, JobKind.PRETRAIN)
    for earlier in plan.jobs[: plan.jobs.index(job)]:
        journal.run(earlier)
    journal.launch(job)
    write_segment(store, job.key, 1, 0, [3.0, 2.0])
    publisher.publish_once(plan.sweep)
    assert _history(client, runs_by_job(client, plan)[job.name], "train_loss") == [(1, 3.0), (2, 2.0)]

    write_segment(store, job.key, 1, 2, [1.5])
    journal.succeed(job)
    publisher.publish_once(plan.sweep)

    run = runs_by_job(client, plan)[job.name]
    final = dict(read_record(store, job.key).metrics)
    assert _history(client, run, "train_loss") == [(1, 3.0), (2, 2.0), (3, 1.5), (3, final["train_loss"])]
    assert _history(client, run, "val_error") == [(3, final["val_error"])]
    times = [point.timestamp for point in client.get_metric_history(run.info.run_id, "train_loss")]
    assert times[:3] == [1000 * (START_S + step) for step in (1, 2, 3)]


def test_publisher_resumed_attempt_supersedes_later_steps(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    write_segment(store, job.key, 1, 0, [5.0, 4.0])
    write_segment(store, job.key, 1, 2, [9.0, 9.0])
    journal.fail(job)
    journal.launch(job)
    write_segment(store, job.key, 2, 2, [3.0, 2.0])
    publisher.publish_once(plan.sweep)

    history = _history(client, runs_by_job(client, plan)[job.name], "train_loss")
    assert history == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]


def test_publisher_steps_superseded_after_publishing_do_not_stay(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    write_segment(store, job.key, 1, 0, [5.0, 9.0])
    publisher.publish_once(plan.sweep)
    journal.fail(job)
    journal.launch(job)
    write_segment(store, job.key, 2, 1, [4.0])
    publisher.publish_once(plan.sweep)

    assert _history(client, runs_by_job(client, plan)[job.name], "train_loss") == [(1, 5.0), (2, 4.0)]


@pytest.mark.parametrize("then", ["nothing", "memory_lost", "memory_lost_and_runs_found"])
def test_publisher_superseded_steps_that_nobody_noted_do_not_stay(
    *, client, store, plan, tracking_uri, then, monkeypatch
):
    """They were sent by a publisher that died at once; then the memory was lost, and another one died, too."""
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    write_segment(store, job.key, 1, 0, [5.0])
    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    write_segment(store, job.key, 1, 1, [9.0])
    write = TrackingServer.write

    def publish_and_die(*, sends: bool) -> None:
        def write_and_die(*arguments):
            if sends:
                yield from write(*arguments)
            raise _CrashedError

        with monkeypatch.context() as patch:
            patch.setattr(TrackingServer, "write", write_and_die)
            with pytest.raises(_CrashedError):
                Publisher(store, tracking_uri).publish_once(plan.sweep)

    publish_and_die(sends=True)
    if then != "nothing":
        store.delete(_memory_of(store, plan))
    if then == "memory_lost_and_runs_found":
        publish_and_die(sends=False)
    assert _history(client, runs_by_job(client, plan)[job.name], "train_loss") == [(1, 5.0), (2, 9.0)]
    journal.fail(job)
    journal.launch(job)
    write_segment(store, job.key, 2, 1, [4.0], at_s=START_S + 100)
    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    assert _history(client, runs_by_job(client, plan)[job.name], "train_loss") == [(1, 5.0), (2, 4.0)]


def _memory_of(store: LocalStore, plan: Plan) -> str:
    (stat,) = store.list_objects(f"sweeps/{plan.sweep}/tracking/")
    return stat.name


def test_publisher_looks_at_running_jobs_now_and_then(client, store, plan, tracking_uri):
    journal, now = SampleJournal(store, plan), 0.0
    job = plan.jobs[0]
    journal.launch(job)
    publisher = Publisher(store, tracking_uri, clock=lambda: now)
    for step in range(2):
        write_segment(store, job.key, 1, step, [2.0 - step])
        assert publisher.publish_once(plan.sweep)  # at the second call, it looks for the first time
    found = []
    for now in (LOOK_EVERY_S / 2, LOOK_EVERY_S):  # noqa: B007 - the publisher reads it
        write_segment(store, job.key, 1, 2, [0.0])
        assert publisher.publish_once(plan.sweep)
        found.append(len(_history(client, runs_by_job(client, plan)[job.name], "train_loss")))
    assert found == [2, 3]


def test_publisher_refused_run_has_no_other_job_looked_at_more_often(client, store, plan, tracking_uri):
    journal, now = SampleJournal(store, plan), 0.0
    refused, other = plan.jobs[:2]
    for job in (refused, other):
        journal.launch(job)
    publisher = Publisher(store, tracking_uri, clock=lambda: now)
    assert publisher.publish_once(plan.sweep)
    line = {"step": 1, "epoch": 0.1, "at_s": START_S, "metrics": {"loss/": 1.0}}
    store.put(metrics_segment(refused.key, 1, 0, 1), json.dumps(line).encode())
    found = []
    for step, now in enumerate((0.0, LOOK_EVERY_S / 2, LOOK_EVERY_S)):  # noqa: B007 - the publisher reads it
        write_segment(store, other.key, 1, step, [2.0 - step])
        with pytest.raises(TrackingRefusedError, match=f"refuses the run of {refused.name}: "):
            publisher.publish_once(plan.sweep)
        found.append(len(_history(client, runs_by_job(client, plan)[other.name], "train_loss")))
    assert found == [1, 1, 3]


@pytest.mark.parametrize("survives", ["nothing", "sweep_run", "first_memory"])
def test_publisher_crash_before_the_memory_is_written_leaves_no_duplicate(
    *, client, store, plan, publisher, tracking_uri, survives, monkeypatch
):
    """The memory is written once the sweep has its run, and once more at the end."""
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    write_segment(store, job.key, 1, 0, [3.0, 2.0])
    if survives == "first_memory":
        journal.run(job)
        publisher.publish_once(plan.sweep)
    journal.run(plan.jobs[1])
    with monkeypatch.context() as patch:
        saves_left = 1 if survives == "sweep_run" else 0
        save = MemoryFile.save

        def save_or_crash(file: MemoryFile, memory: Memory) -> None:
            nonlocal saves_left
            saves_left -= 1
            if saves_left < 0:
                raise _CrashedError
            save(file, memory)

        patch.setattr(MemoryFile, "save", save_or_crash)
        with pytest.raises(_CrashedError):
            publisher.publish_once(plan.sweep)
    made = runs_by_job(client, plan)
    assert (plan.jobs[1].name in made) == (survives != "nothing")

    assert Publisher(store, tracking_uri).publish_once(plan.sweep)

    runs = runs_by_job(client, plan)
    assert {name: runs[name].info.run_id for name in made} == {name: run.info.run_id for name, run in made.items()}
    assert runs[plan.jobs[1].name].data.params["key"] == plan.jobs[1].key


def test_publisher_lost_memory_finds_its_runs_and_repeats_no_metric(client, store, plan, publisher, tracking_uri):
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    write_segment(store, job.key, 1, 0, [3.0, 2.0])
    journal.run(job)
    publisher.publish_once(plan.sweep)
    before = runs_by_job(client, plan)
    for stat in list(store.list_objects(tracking_name(plan.sweep, "x").rpartition("/")[0] + "/")):
        store.delete(stat.name)

    assert Publisher(store, tracking_uri).publish_once(plan.sweep)

    after = runs_by_job(client, plan)
    assert {run.info.run_id for run in after.values()} == {run.info.run_id for run in before.values()}
    assert _history(client, after[job.name], "train_loss") == [(1, 3.0), (2, 2.0)]


def test_publisher_reused_job_has_its_own_run_in_each_sweep(client, store, plan, publisher):
    first = plan.jobs[0]
    commit(store, first, sweep="earlier")
    SampleJournal(store, plan).reuse(first)
    publisher.publish_once(plan.sweep)

    run = runs_by_job(client, plan)[first.name]
    assert run.info.status == "FINISHED"
    assert run.data.tags["reused_from"] == f"earlier/{first.name}"
    assert run.data.metrics == {"num_samples": 4096.0}


def test_publisher_job_of_an_earlier_revision_is_killed(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    publisher.publish_once(plan.sweep)
    changed = with_own_key(replace(job, identity={**job.identity, "code_version": 2}))
    journal.accept(replace(plan, revision=2, jobs=(changed,)))
    publisher.publish_once(plan.sweep)

    run = runs_by_job(client, plan)[job.name]
    assert run.info.status == "KILLED"
    assert run.data.tags["state"] == "superseded"


def test_publisher_deleted_run_is_made_anew(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    job = plan.jobs[0]
    journal.launch(job)
    publisher.publish_once(plan.sweep)
    client.delete_run(runs_by_job(client, plan)[job.name].info.run_id)
    journal.succeed(job)

    assert not publisher.publish_once(plan.sweep)
    assert publisher.publish_once(plan.sweep)
    assert runs_by_job(client, plan)[job.name].info.status == "FINISHED"


def test_publisher_server_out_of_reach_raises_and_loses_nothing(client, store, plan, tracking_uri):
    SampleJournal(store, plan).run(plan.jobs[0])
    with pytest.raises(TrackingError, match="nothing is lost"):
        Publisher(store, "http://127.0.0.1:9").publish_once(plan.sweep)  # the discard port: nothing listens

    assert Publisher(store, tracking_uri).publish_once(plan.sweep)
    assert plan.jobs[0].name in runs_by_job(client, plan)


def test_publisher_artifact_gone_from_the_store_still_has_its_metrics(client, store, plan, publisher):
    SampleJournal(store, plan).run(plan.jobs[0])
    record = read_record(store, plan.jobs[0].key)
    store.delete(part_object(record, "weights.bin"))
    store.delete(record_name(record.key))

    assert publisher.publish_once(plan.sweep)
    assert runs_by_job(client, plan)[plan.jobs[0].name].data.metrics == {"num_samples": 4096.0}


def test_publisher_ended_sweep_that_is_reopened_is_published_again(client, store, plan, publisher):
    journal = SampleJournal(store, plan)
    for job in plan.jobs:
        journal.skip(job, plan.jobs[0])
    journal.finish(SweepEnding.FAILED)
    assert publisher.publish_once(plan.sweep)
    assert publisher.has_ended(plan.sweep)

    journal.accept(replace(plan, revision=2))
    journal.run(plan.jobs[0])
    assert publisher.publish_once(plan.sweep)

    runs = runs_by_job(client, plan)
    found = [(runs[name].info.status, runs[name].data.tags["state"]) for name in ("(sweep)", plan.jobs[0].name)]
    assert found == [("RUNNING", "running"), ("FINISHED", "succeeded")]
    assert runs[plan.jobs[0].name].data.tags["reason"] == ""


def test_publisher_reads_a_sweep_that_has_ended_and_is_published_no_more_and_keeps_no_plan_of_it(
    store, plan, publisher, monkeypatch
):
    plans = []

    def read(*arguments):
        found = read_plan(*arguments)
        plans.append(ref(found))
        return found

    monkeypatch.setattr(facts, "read_plan", read)
    SampleJournal(store, plan).run_all()
    for _ in range(2):
        assert publisher.publish_once(plan.sweep)
        assert publisher.has_ended(plan.sweep)
    gc.collect()
    assert [found() for found in plans] == [None]


def test_publisher_sweep_nobody_accepted_yet_publishes_nothing(client, store, plan, publisher):
    assert publisher.publish_once(plan.sweep)
    assert not publisher.has_ended(plan.sweep)
    assert runs_by_job(client, plan) == {}


def test_publish_by_hand_fills_a_server_that_lost_what_it_had(*, finished, tracking_uri, tmp_path, monkeypatch, capsys):
    uri, sweep = new_database(tmp_path / "mlflow.db"), finished.plan.sweep
    empty = TrackingServer(uri).client
    MemoryFile(finished.store, sweep, uri).save(MemoryFile(finished.store, sweep, tracking_uri).load())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert run_command(capsys, "publish", sweep, "--store", finished.store.uri).code == 0
    runs = runs_by_job(empty, finished.plan)
    assert set(runs) == {"(sweep)", *finished.plan.by_name()}
    assert PAGE in {file.path for file in empty.list_artifacts(runs["(sweep)"].info.run_id)}

    # Restored from a backup of before: one run is not there, one had not ended.
    deleted, running = (job.name for job in finished.plan.jobs[:2])
    empty.delete_run(runs[deleted].info.run_id)
    empty.update_run(runs[running].info.run_id, status="RUNNING")
    assert run_command(capsys, "publish", sweep, "--store", finished.store.uri).code == 0
    again = runs_by_job(empty, finished.plan)
    assert set(again) == set(runs)
    assert again[running].info.status == "FINISHED"
    kept = {name for name in runs if again[name].info.run_id == runs[name].info.run_id}
    assert kept == set(runs) - {deleted}


def test_publish_by_hand_fills_curves_after_an_older_backup_was_restored(store, plan, tmp_path):
    from mlflow import MlflowClient

    uri, backup = (new_database(tmp_path / name) for name in ("mlflow.db", "backup.db"))
    journal, (running, ended) = SampleJournal(store, plan), plan.jobs[:2]
    for job in (running, ended):  # each with two attempts
        journal.launch(job)
        write_segment(store, job.key, 1, 0, [3.0])
        journal.fail(job)
        journal.launch(job)
        write_segment(store, job.key, 2, 1, [2.0])
    assert Publisher(store, uri).publish_once(plan.sweep)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as of, closing(sqlite3.connect(tmp_path / "backup.db")) as to:
        of.backup(to)
    for job in (running, ended):
        write_segment(store, job.key, 2, 2, [1.0])
    journal.succeed(ended)
    assert Publisher(store, uri).publish_once(plan.sweep)
    MemoryFile(store, plan.sweep, backup).save(MemoryFile(store, plan.sweep, uri).load())

    assert Publisher(store, backup, compares=True).publish_once(plan.sweep)
    first, again = MlflowClient(tracking_uri=uri), MlflowClient(tracking_uri=backup)
    for job in (running, ended):
        before, after = runs_by_job(first, plan)[job.name], runs_by_job(again, plan)[job.name]
        assert (after.info.run_id, after.info.status) == (before.info.run_id, before.info.status)
        history = _history(again, after, "train_loss")
        assert history == _history(first, before, "train_loss")
        assert history[:3] == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_publish_by_hand_of_what_is_published_asks_the_server(finished, tracking_uri):
    sweep, away = finished.plan.sweep, "http://127.0.0.1:9"  # the discard port: nothing listens
    MemoryFile(finished.store, sweep, away).save(MemoryFile(finished.store, sweep, tracking_uri).load())
    with pytest.raises(TrackingError, match="nothing is lost"):
        Publisher(finished.store, away, compares=True).publish_once(finished.plan.sweep)


def test_memory_that_nothing_is_unfinished_in_is_read_by_earlier_versions(store):
    file = MemoryFile(store, "sample", "http://tracking")
    file.load()
    run = RunMemory(job="pretrain/a", key="k", run_id="r", analyses={"nc1-key": "structure"})
    file.save(Memory(runs=[run], experiment_id="7", experiment="first"))
    (stat,) = store.list_objects("sweeps/sample/tracking/")
    document = json.loads(store.get(stat.name))
    known = {"job", "key", "run_id", "status", "fingerprint", "described", "said"}
    assert set(document["memory"]["runs"][0]) == known
    assert "experiment" not in document["memory"]
    file.forget()
    assert file.load().experiment == "first"
    assert file.load().runs == [run]


class _CrashedError(BaseException):
    """Not an Exception, as SIGKILL is not: nothing may catch it and go on."""
