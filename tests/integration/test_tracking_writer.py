"""Runs written through MLflow's client: how many requests they take, and what repeated and late requests leave."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.tracking.dbmodels.models import SqlDataset
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import event
from sqlalchemy.orm import Session

from orchestrator.core.errors import StorageTimeoutError
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.tracking.content import RecordCache
from orchestrator.tracking.draft import DatasetUse, MetricPoint, RunDraft
from orchestrator.tracking.facts import RunFacts, RunStatus, factors_in
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.run_writer import RunWriter
from orchestrator.tracking.server import TrackingError, TrackingServer
from tests.builders import SweepJournal, launched, make_job, make_plan
from tests.mlflow_servers import new_database
from tests.tracking_sweeps import BigSweep, big_sweep, problems

START_S = 1_800_000_000.0
DATASET = DatasetUse(name="tree", digest="d" * 64, source="s3://bucket/tree", num_samples=4096)
TABLES = ("runs", "tags", "params", "metrics", "latest_metrics", "inputs", "datasets")
REQUESTS = ("create_run", "log_batch", "log_inputs", "update_run_info", "get_run")


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    """Every test has an experiment of its own."""
    path: Path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    new_database(path)
    return path


@pytest.fixture
def server(database) -> TrackingServer:
    return TrackingServer(f"sqlite:///{database}")


@pytest.fixture
def requests(server, monkeypatch) -> Counter[str]:
    """Requests about runs, by name."""
    store, counts = server.client._tracking_client.store, Counter[str]()

    def counted(name: str):
        original = getattr(store, name)

        def call(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        return call

    for name in REQUESTS:
        monkeypatch.setattr(store, name, counted(name))
    return counts


def _facts(job: str, status: RunStatus = RunStatus.FINISHED, **tags: str) -> RunFacts:
    end_s = START_S + 9 if status.is_final else None
    identity = {"sweep": "s", "job": job, "key": job}
    return RunFacts(job=job, key=job, status=status, start_s=START_S, end_s=end_s, tags={**identity, **tags})


def _points(*values: float, name: str = "val_error") -> tuple[MetricPoint, ...]:
    return tuple(MetricPoint(name=name, value=v, step=s, at_s=START_S + s) for s, v in enumerate(values, start=1))


def _first_drafts() -> list[RunDraft]:
    return [
        RunDraft(name="running", facts=_facts("running", RunStatus.RUNNING), params={"lr": "0.1"}, points=_points(0.5)),
        RunDraft(
            name="done",
            facts=_facts("done", state="succeeded"),
            parent_run_id="f" * 32,
            params={"lr": "0.1", "model": "resnet18"},
            tags={"artifact": "s3://bucket/x"},
            points=(*_points(0.5, 0.25, 0.125), *_points(3.0, 2.0, name="train_loss")),
            datasets=(DATASET,),
        ),
        RunDraft(name="bare", facts=_facts("bare", RunStatus.KILLED)),
    ]


def _rows(database: Path) -> dict[str, list[tuple[object, ...]]]:
    """All of them. An end of 0 is none, see ``run_writer``."""
    with sqlite3.connect(database) as connection:
        found = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES}  # noqa: S608
    return {name: sorted((tuple(v or None for v in row) for row in rows), key=repr) for name, rows in found.items()}


def test_writer_run_takes_three_requests_and_one_per_further_thousand_values(server, requests):
    experiment_id = server.make_experiment("requests", {})
    many = tuple(MetricPoint(name="loss", value=1.0, step=step, at_s=START_S) for step in range(2990))
    draft = RunDraft(name="long", facts=_facts("long"), params={f"p{n}": "1" for n in range(10)}, points=many[:990])
    ((_, run_id),) = server.write(experiment_id, [draft])
    assert requests == {"create_run": 1, "log_batch": 1, "update_run_info": 1}

    requests.clear()
    list(server.write(experiment_id, [replace(draft, name="longer", points=many)]))
    assert requests == {"create_run": 1, "log_batch": 3, "update_run_info": 1}

    requests.clear()
    list(server.write(experiment_id, [replace(draft, run_id=run_id, params={}, points=many[990:], only_points=True)]))
    assert requests == {"log_batch": 2}
    history = server.client.get_metric_history(run_id, "loss")
    assert sorted(point.step for point in history) == list(range(2990))


@pytest.mark.parametrize(
    ("said", "factors", "num_read"),
    [({}, {"factor.size"}, 1), ({"is_revised": False}, {"factor.size", "factor.way"}, 0)],
    ids=["revised", "as-before"],
)
def test_writer_run_of_a_later_revision_loses_tags_of_factors_that_are_gone(server, requests, said, factors, num_read):
    experiment_id = server.make_experiment(f"revised {num_read}", {})
    first = RunDraft(name="a", facts=replace(_facts("a"), tags={"factor.size": "1", "factor.way": "up"}))
    ((_, run_id),) = server.write(experiment_id, [first])
    requests.clear()
    later = replace(first, run_id=run_id, facts=replace(_facts("a"), tags={"factor.size": "2"}), is_revised=True)
    list(server.write(experiment_id, [replace(later, **said)]))
    assert requests == Counter({"log_batch": 1, "update_run_info": 1}) + Counter(get_run=num_read)
    gone = replace(later, facts=_facts("a", state="superseded"))
    list(server.write(experiment_id, [gone]))
    assert factors_in(server.client.get_run(run_id).data.tags).keys() == factors, "a superseded run keeps the others"


def test_writer_same_batch_twice_changes_nothing(server, database):
    experiment_id = server.make_experiment("twice", {})
    ids = [run_id for _, run_id in server.write(experiment_id, _first_drafts())]
    before = _rows(database)
    again = [replace(draft, run_id=run_id) for draft, run_id in zip(_first_drafts(), ids, strict=True)]
    assert [run_id for _, run_id in server.write(experiment_id, again)] == ids
    assert _rows(database) == before


def test_writer_older_value_does_not_become_the_latest(server):
    experiment_id = server.make_experiment("latest", {})
    ((_, run_id),) = server.write(experiment_id, [replace(_first_drafts()[0], points=_points(0.5, 0.25))])
    late = replace(_first_drafts()[0], run_id=run_id, points=_points(0.5))
    assert [told for _, told in server.write(experiment_id, [late])] == [run_id]
    assert server.client.get_run(run_id).data.metrics == {"val_error": 0.25}


def test_writer_deleted_run_is_told_and_the_others_are_written(server):
    experiment_id = server.make_experiment("gone", {})
    ids = [run_id for _, run_id in server.write(experiment_id, _first_drafts())]
    server.client.delete_run(ids[0])
    ended = [
        RunDraft(name="running", facts=_facts("running", state="ended"), run_id=ids[0], datasets=(DATASET,)),
        replace(_first_drafts()[1], run_id=ids[1], points=_points(0.5, 0.25, 0.125, 0.0625)),
    ]
    assert [run_id for _, run_id in server.write(experiment_id, ended)] == ["", ids[1]]
    assert server.client.get_run(ids[0]).info.status == "RUNNING"
    assert server.client.get_run(ids[1]).data.metrics["val_error"] == 0.0625


def test_writer_reopened_run_has_no_end(server):
    experiment_id = server.make_experiment("reopened", {})
    ((_, run_id),) = server.write(experiment_id, [_first_drafts()[2]])
    assert server.client.get_run(run_id).info.end_time == 1000 * (START_S + 9)
    list(server.write(experiment_id, [RunDraft(name="b", facts=_facts("bare", RunStatus.RUNNING), run_id=run_id)]))
    info = server.client.get_run(run_id).info
    assert (info.status, info.end_time or None) == ("RUNNING", None)
    assert info.to_proto().end_time == 0  # what a page is told: none


def test_writer_data_set_that_two_runs_name_at_once_is_named_by_both(server):
    """Both have looked for it before either writes it: one is refused by the database, and says it again."""
    both_looked = threading.Barrier(2)
    names: list[str] = []

    def wait_for_the_other(session, *_):
        named = [str(row.name) for row in session.new if isinstance(row, SqlDataset)]
        if named and len(names) < 2:
            names.extend(named)
            both_looked.wait(timeout=60)

    experiment_id = server.make_experiment("at once", {})
    drafts = [RunDraft(name=job, facts=_facts(job), datasets=(DATASET,)) for job in ("first", "second")]
    event.listen(Session, "before_flush", wait_for_the_other)
    try:
        written = RunWriter(server.client, num_threads=2).write(experiment_id, drafts)
        ids = [str(answer.result()) for _, answer in written]
    finally:
        event.remove(Session, "before_flush", wait_for_the_other)
    assert names == ["tree", "tree"]
    runs = [server.client.get_run(run_id) for run_id in ids]
    assert [[use.dataset.name for use in run.inputs.dataset_inputs] for run in runs] == [["tree"], ["tree"]]


def test_writer_goes_on_with_other_runs_while_one_takes_long(server, monkeypatch):
    """The one begun first ends last; the others are not kept, and answers come in the order of the drafts."""
    experiment_id, others, end = server.make_experiment("long", {}), threading.Semaphore(0), RunWriter._end

    def end_late(writer: RunWriter, run_id: str, draft: RunDraft) -> None:
        if draft.name == "0":
            assert all(others.acquire(timeout=60) for _ in range(9))
        end(writer, run_id, draft)
        others.release()

    monkeypatch.setattr(RunWriter, "_end", end_late)
    drafts = [RunDraft(name=str(number), facts=_facts(str(number))) for number in range(10)]
    written = RunWriter(server.client, num_threads=2).write(experiment_id, iter(drafts))
    assert [draft.name for draft, answer in written if answer.result()] == [draft.name for draft in drafts]


def test_writer_has_given_every_answer_before_it_asks_for_more_than_a_pause(server):
    experiment_id, answered, at_pause = server.make_experiment("pause", {}), list[str](), list[str]()

    def drafts():
        yield from _first_drafts()
        yield None
        at_pause.extend(answered)
        yield RunDraft(name="late", facts=_facts("late"))

    for draft, _ in server.write(experiment_id, drafts()):
        answered.append(draft.name)
    assert at_pause == [draft.name for draft in _first_drafts()]
    assert answered == [*at_pause, "late"]


def test_writer_has_given_every_answer_before_an_error_of_the_drafts(server):
    experiment_id, answered = server.make_experiment("damaged", {}), list[str]()

    def drafts():
        yield from _first_drafts()
        raise StorageTimeoutError("the store does not answer")

    def write() -> None:
        for draft, run_id in server.write(experiment_id, drafts()):
            assert run_id
            answered.append(draft.name)

    with pytest.raises(StorageTimeoutError):
        write()
    assert answered == [draft.name for draft in _first_drafts()]


def test_publisher_reads_what_is_next_while_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.tracking.run_writer._MAX_WAITING", 0)
    monkeypatch.setattr("orchestrator.tracking.publication._BATCH", 2)
    big, last_is_read, create = big_sweep(4), threading.Event(), RunWriter._create
    read = RecordCache.read

    def note(cache: RecordCache, key: str):
        if key == big.plan.jobs[3].key:
            last_is_read.set()
        return read(cache, key)

    def create_late(writer: RunWriter, experiment_id: str, draft: RunDraft) -> str:
        assert draft.name == "big" or last_is_read.wait(60)
        return create(writer, experiment_id, draft)

    monkeypatch.setattr(RecordCache, "read", note)
    monkeypatch.setattr(RunWriter, "_create", create_late)
    assert Publisher(big.store, new_database(tmp_path / "mlflow.db")).publish_once("big")


def test_publisher_first_pass_asks_for_little_besides_its_runs(tmp_path, monkeypatch):
    big, asked, inside = big_sweep(5, is_over=False), Counter[str](), threading.local()

    def counted(name: str):
        original = getattr(SqlAlchemyStore, name)

        def call(*arguments, **options):
            if getattr(inside, "a_request", False):  # which MLflow's store makes of itself
                return original(*arguments, **options)
            inside.a_request = True
            asked[name] += 1
            try:
                return original(*arguments, **options)
            finally:
                inside.a_request = False

        return call

    uri = new_database(tmp_path / "mlflow.db")
    client: Any = TrackingServer(uri).client
    assert client._tracking_client.store, "connected"
    about_experiments = ("get_experiment_by_name", "create_experiment", "get_experiment", "set_experiment_tag")
    for name in (*about_experiments, *REQUESTS, "search_runs"):
        monkeypatch.setattr(SqlAlchemyStore, name, counted(name))
    assert Publisher(big.store, uri).publish_once("big")
    of_jobs = {"create_run": 5, "log_batch": 5, "update_run_info": 5}
    besides = {"get_experiment_by_name": 1, "create_experiment": 1, "create_run": 1, "log_batch": 1}
    assert asked == Counter(of_jobs) + Counter(besides)
    assert {name for name in client.get_experiment_by_name("big").tags if name.startswith("mlflow.sharedViewState.")}


def test_client_does_not_look_for_a_service_that_no_uri_leads_to(server):
    from mlflow.tracking.request_header import registry

    assert server.client is not None
    names = [type(one).__name__ for one in registry._request_header_provider_registry]
    assert names == ["DefaultRequestHeaderProvider"]


def test_publisher_many_jobs_are_all_there_once(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.tracking.publication._BATCH", 16)
    big = big_sweep(40)
    assert Publisher(big.store, new_database(tmp_path / "mlflow.db")).publish_once("big")
    assert problems(tmp_path / "mlflow.db", big) == []


def test_publisher_request_that_lands_after_its_publisher_died_leaves_no_second_run(tmp_path):
    """Nobody has its answer, and the search of the next publisher came too early: its run is found at the sweep's end.

    A run of the same names below another sweep's run is another store's, and stays.
    """
    database = tmp_path / "mlflow.db"
    running, over = big_sweep(4, is_over=False), big_sweep(4)
    assert Publisher(running.store, new_database(database)).publish_once("big")
    client: Any = TrackingServer(f"sqlite:///{database}").client
    experiment_id = client.get_experiment_by_name("big").experiment_id
    first = client.search_runs([experiment_id], "tags.job = 'probe/top/00002'")[0]
    own = {name: value for name, value in first.data.tags.items() if not name.startswith("mlflow.run")}
    late = client.create_run(experiment_id, tags=own).info.run_id
    other = client.create_run(experiment_id, tags={**own, "mlflow.parentRunId": "f" * 32}).info.run_id
    client.delete_run(client.create_run(experiment_id, tags=own).info.run_id)  # somebody's own cleaning is no news

    for stat in list(running.store.list_objects("sweeps/big/tracking/")):
        over.store.put(stat.name, running.store.get(stat.name))
    assert Publisher(over.store, f"sqlite:///{database}").publish_once("big")

    assert client.get_run(late).info.lifecycle_stage == "deleted"
    assert client.get_run(other).info.lifecycle_stage == "active"
    assert client.get_run(first.info.run_id).info.lifecycle_stage == "active"
    client.delete_run(other)
    assert problems(database, over) == []


def _forget(big: BigSweep) -> None:
    for stat in list(big.store.list_objects("sweeps/big/tracking/")):
        big.store.delete(stat.name)


def _shown(client: Any, experiment_id: str) -> dict[str, tuple[str, str, str]]:
    """Job, state and parent of every run."""
    tags = {run.info.run_id: run.data.tags for run in client.search_runs([experiment_id])}
    return {
        run_id: (told["job"], told["state"], told.get("mlflow.parentRunId", ""))
        for run_id, told in sorted(tags.items())
    }


@pytest.mark.parametrize("is_former", [False, True], ids=["this_version", "former_version"])
def test_publisher_sweep_of_this_name_in_another_store_has_runs_of_its_own(tmp_path, is_former):
    """Of an earlier version, a run of a sweep says in a parameter alone from which store it is."""
    uri = new_database(tmp_path / "mlflow.db")
    first, second = big_sweep(3), big_sweep(4)
    assert Publisher(first.store, uri).publish_once("big")
    client: Any = TrackingServer(uri).client
    experiment_id = client.get_experiment_by_name("big").experiment_id
    before = _shown(client, experiment_id)
    (parent,) = (run_id for run_id, shown in before.items() if shown[0] == "(sweep)")
    if is_former:
        client.delete_tag(parent, "store")

    assert Publisher(second.store, uri).publish_once("big")
    _forget(first)
    assert Publisher(first.store, uri).publish_once("big")

    after = _shown(client, experiment_id)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 5
    assert {state for _, state, _ in after.values()} == {"succeeded"}

    client.delete_run(parent)  # those below it stay, and are found again
    _forget(first)
    assert Publisher(first.store, uri).publish_once("big")
    last = _shown(client, experiment_id)
    assert last.keys() & before.keys() == before.keys() - {parent}
    assert len(last) == len(after)


def test_publisher_asks_for_all_runs_once_and_again_where_one_may_be_unknown(tmp_path, monkeypatch):
    uri, store, searches = new_database(tmp_path / "mlflow.db"), MemoryStore(), Counter[str]()
    jobs = [make_job(f"probe/top/{number}") for number in range(7)]
    plan = make_plan(*jobs, sweep="few", revision=1, store_uri=store.uri)
    journal = SweepJournal(store, "few")
    journal.accept(plan)
    find_runs = TrackingServer.find_runs

    def counted(server: TrackingServer, experiment_id: str, sweep: str):
        searches[sweep] += 1
        return find_runs(server, experiment_id, sweep)

    monkeypatch.setattr(TrackingServer, "find_runs", counted)
    publisher = Publisher(store, uri)
    for job in jobs[:3]:
        journal.tell(launched(job))
        assert publisher.publish_once("few")
    assert searches["few"] == 0, "it has made the experiment"

    create_run = SqlAlchemyStore.create_run

    def without_an_answer(*arguments, **options):
        create_run(*arguments, **options)
        raise ConnectionError("the answer is lost")

    journal.tell(launched(jobs[3]))
    with monkeypatch.context() as patch:
        patch.setattr(SqlAlchemyStore, "create_run", without_an_answer)
        with pytest.raises(TrackingError, match="the answer is lost"):
            publisher.publish_once("few")
    assert publisher.publish_once("few")
    journal.tell(launched(jobs[4]))
    assert publisher.publish_once("few")
    assert searches["few"] == 1

    for one in (Publisher(store, uri), publisher):  # a new process, and what it wrote as the other one sees it
        journal.tell(launched(jobs[sum(searches.values()) + 4]))
        assert one.publish_once("few")
    assert searches["few"] == 3
    client: Any = TrackingServer(uri).client
    told = client.search_runs([client.get_experiment_by_name("few").experiment_id])
    assert sorted(run.data.tags["job"] for run in told) == ["(sweep)", *(job.name for job in jobs)]


class _KilledError(BaseException):
    """Not an Exception, as SIGKILL is not: nothing may catch it and go on."""


@pytest.mark.ci
@pytest.mark.parametrize("has_effect", [False, True], ids=["before", "after"])
def test_publisher_that_dies_at_any_request_leaves_every_run_once(tmp_path, monkeypatch, has_effect):
    """Each publisher gets one request further than the one before, and remembers nothing of it in the store."""
    big = big_sweep(5)
    uri, left = new_database(tmp_path / "mlflow.db"), 0

    def mortal(original):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                if has_effect:
                    original(*arguments, **options)
                raise _KilledError
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("create_run", "log_batch", "update_run_info"):
            patch.setattr(SqlAlchemyStore, name, mortal(getattr(SqlAlchemyStore, name)))
        for num_requests in range(1, 12):
            left = num_requests
            with pytest.raises(_KilledError):
                Publisher(big.store, uri).publish_once("big")
    assert Publisher(big.store, uri).publish_once("big")
    assert problems(tmp_path / "mlflow.db", big) == []
