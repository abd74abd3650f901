"""A search as its log tells of it: whatever a crash cuts off, the next attempt goes on from there."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from orchestrator.core.contract import Evaluation, JobFailure, JobResult, Outcome
from orchestrator.core.errors import FailureKind, UserError
from orchestrator.core.job_kinds import KINDS, JobKind
from orchestrator.search.log import (
    SearchFencedError,
    SearchLog,
    TrialStopped,
    decode_search_event,
    encode_search_event,
    fold_search,
    kept_trials,
)
from orchestrator.search.outcome import commit_search, risks_of
from orchestrator.search.study import MOST_LOSSES, Study, TrialsLostError, TrialTask
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.layout import search_log_folder, search_log_head, search_log_segment
from orchestrator.storage.local import LocalStore
from orchestrator.storage.trials import TrialState, encode_head, find_folder, read_trials
from orchestrator.testing.memory_store import MemoryStore
from tests.integration.search_jobs import SWEEP, error_after, search_request

ASHA = "{asha: {}, space: {lr: {uniform: [0.01, 0.8]}}, trials: 6}"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


class CrashError(Exception):
    pass


class Runner:
    """Runs the trials of a study in turn, epoch by epoch, until it crashes before event number ``budget``."""

    def __init__(self, store, request, budget=10**9):
        self.epochs: dict[int, list[int]] = {}
        clock = itertools.count(1.0)
        self.study = Study(request, store, lambda: next(clock))
        self.budget = budget

    def tick(self):
        self.budget -= 1
        if self.budget < 0:
            raise CrashError

    def run(self):
        while (task := self.study.next_task()) is not None:
            self.tick()
            self.study.end(task.number, self.train(task), 1.0)
        return self.study

    def train(self, task):
        lr = task.request.parameters["recipe"]["lr"]
        for epoch in range(1, 10):
            self.tick()
            self.epochs.setdefault(task.number, []).append(epoch)
            metrics = {"select_error": error_after(lr, epoch)}
            told = Evaluation(step=epoch, epoch=float(epoch), metrics=metrics, spent_s=float(epoch))
            if epoch in task.rungs and not self.study.tell(task.number, told):
                return failure(task.request, FailureKind.PREEMPTED)
        return JobResult(attempt_id="", key=task.request.key, outcome=Outcome.COMMITTED, metrics=metrics)


def next_of(study: Study) -> TrialTask:
    task = study.next_task()
    assert task is not None
    return task


def failure(request, kind, message="it broke"):
    return JobFailure(attempt_id=request.attempt_id, key=request.key, kind=kind, message=message)


def verdicts(study):
    return [(view.params, view.state, view.epoch, view.value) for view in study.trials]


def test_study_completes_the_best_and_stops_the_rest(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, ASHA)).run()
    states = [view.state for view in study.trials]
    assert len(states) == 6
    assert TrialState.STOPPED in states
    assert study.best().value == min(view.value for view in study.trials if view.state is TrialState.COMPLETED)
    assert [trial.state for trial in read_trials(store, study.request.key)] == states


@pytest.mark.parametrize("budget", range(1, 36, 4))
def test_study_that_crashes_anywhere_ends_as_one_that_did_not(store, tmp_path, budget):
    whole = Runner(LocalStore(tmp_path / "other"), search_request(store, tmp_path, ASHA)).run()
    with pytest.raises(CrashError):
        Runner(store, search_request(store, tmp_path, ASHA), budget).run()
    over = {view.number for view in fold_search(SearchLog(store, whole.request.key).read()).values() if view.ended_at_s}
    resumed = Runner(store, search_request(store, tmp_path, ASHA, attempt=2))
    assert verdicts(resumed.run()) == verdicts(whole)
    assert over.isdisjoint(resumed.epochs), "a trial that had ended ran again"


def test_log_folds_to_the_state_that_its_writer_had(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, ASHA)).run()
    events = SearchLog(store, study.request.key).read()
    assert [fold_search(events)[view.number] for view in study.trials] == list(study.trials)
    assert [decode_search_event(encode_search_event(event)) for event in events] == events


@pytest.mark.parametrize(("num_before", "why"), [(0, "begun by another attempt"), (1, "of another attempt")])
def test_log_of_two_writers_ends_the_one_that_is_behind(store, tmp_path, num_before, why):
    request = search_request(store, tmp_path, ASHA)
    for _ in range(num_before):
        Runner(store, request).study.next_task()
    zombie, heir = Runner(store, request).study, Runner(store, request).study
    heir.next_task()
    with pytest.raises(SearchFencedError, match=why):
        zombie.next_task()
    assert len(fold_search(SearchLog(store, request.key).read())) == 1


def test_log_of_a_newer_version_is_refused(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    store.put(search_log_head(request.key), encode_head(request.key, "folder"))
    store.put(search_log_segment(request.key, "folder", 0), b'{"version": 2}\n')
    with pytest.raises(ValueError, match="version 2, this program reads 1"):
        SearchLog(store, request.key).read()


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"{", "Expecting|EOF"),
        (b'{"version": 2, "folder": "a"}', "version 2, this program reads 1"),
        (b'{"version": 1}', "damaged"),
        (b'{"version": 1, "folder": "../a"}', "not a folder"),
        (b'{"version": 1, "folder": ""}', "not a folder"),
        (b"[]", "damaged"),
    ],
)
def test_log_whose_head_is_damaged_or_newer_is_refused(store, tmp_path, head, why):
    request = search_request(store, tmp_path, ASHA)
    store.put(search_log_head(request.key), head)
    with pytest.raises(ValueError, match=why):
        SearchLog(store, request.key).read()
    with pytest.raises(ValueError, match=why):
        kept_trials(store, request.key)


def test_log_that_lost_a_segment_is_refused(store, tmp_path):
    """Its attempt would write the next segment there, and a collection would take the trials that the rest names."""
    study = Runner(store, search_request(store, tmp_path, ASHA)).run()
    key = study.request.key
    store.delete(search_log_segment(key, find_folder(store, key), 1))
    with pytest.raises(ValueError, match=r"00000001\.jsonl is missing, and later segments exist"):
        kept_trials(store, key)


def test_log_whose_writer_died_behind_its_head_goes_on(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    store.put(search_log_head(request.key), encode_head(request.key, "folder"))
    study = Runner(store, request).run()
    assert len(study.trials) == 6
    assert store.exists(search_log_segment(request.key, "folder", 0))


def test_log_that_was_begun_anew_has_other_names(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    Runner(store, request).run()
    before = {stat.name for stat in store.list_objects(search_log_folder(request.key))}
    store.delete(search_log_head(request.key))
    Runner(store, request).run()
    after = {stat.name for stat in store.list_objects(search_log_folder(request.key))}
    assert before <= after
    assert len(after) == 2 * len(before) - 1, "all but the head"


@pytest.mark.parametrize("part", ["search", "trial", "probe"])
def test_search_that_another_release_planned_asks_for_no_trial(store, tmp_path, part):
    """Its trials are planned where they run, by the release that is installed there."""
    request = search_request(store, tmp_path, ASHA)
    versions = {**request.parameters, "probe": {"code_version": KINDS[JobKind.PROBE].code_version}}
    if part != "search":
        versions[part] = {**versions[part], "code_version": 99}
    other = {"parameters": versions, **({"code_version": 99} if part == "search" else {})}
    with pytest.raises(UserError, match=r" 99 \(here .*submit the sweep again"):
        Study(replace(request, identity={**request.identity, **other}), store, lambda: 1.0)


def test_trials_whose_values_are_no_recipe_are_answered_in_any_number(store, tmp_path, monkeypatch):
    """More of them than Python calls functions within each other."""
    space = "{random: {}, space: {lr: {uniform: [0.01, 0.8]}}, trials: 1200}"
    study = Study(search_request(store, tmp_path, space), MemoryStore(), lambda: 1.0)

    def refuse(plan, params):
        raise UserError("no recipe")

    monkeypatch.setattr(type(study.plan), "key_of", refuse)
    monkeypatch.setattr(study, "_sampler", SimpleNamespace(ask=lambda number, tried, answered: {"lr": 0.1}))
    monkeypatch.setattr(study, "_show", lambda numbers: None)  # an object each, which is not what is asked here
    assert study.next_task() is None
    assert study.is_over
    assert {view.state for view in study.trials} == {TrialState.FAILED}
    assert len(study.trials) == 1200


def test_value_that_was_told_before_a_crash_is_not_told_twice(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    first = Runner(store, request).study
    task = next_of(first)
    told = Evaluation(step=1, epoch=1.0, metrics={"select_error": 0.5}, spent_s=1.0)
    assert first.tell(task.number, told)
    again = Runner(store, request).study
    assert next_of(again).number == task.number
    before = len(SearchLog(store, request.key).read())
    assert again.tell(task.number, told)
    assert len(SearchLog(store, request.key).read()) == before


def test_trial_that_is_shorter_than_others_is_complete_at_its_own_end(store, tmp_path, monkeypatch):
    silent = SWEEP.replace("recipe: {epochs: 9, batch_size: 16}", "recipe: {batch_size: 16, lr: 0.1}")
    monkeypatch.setattr("tests.integration.search_jobs.SWEEP", silent)
    runner = Runner(store, search_request(store, tmp_path, "{asha: {}, space: {epochs: [9, 27]}, trials: 2}"))
    study, tasks = runner.study, {}
    for task in (next_of(runner.study), next_of(runner.study)):
        tasks[task.request.parameters["recipe"]["epochs"]] = task

    def tell(epochs: int, value: float) -> bool:
        metrics = {"select_error": value}
        return study.tell(tasks[epochs].number, Evaluation(step=9, epoch=9.0, metrics=metrics, spent_s=9.0))

    assert tell(27, 0.1)
    assert tell(9, 0.5), "below the cut at a rung, which is its end"
    metrics = {"select_error": 0.5}
    ended = JobResult(attempt_id="", key=tasks[9].request.key, outcome=Outcome.COMMITTED, metrics=metrics)
    study.end(tasks[9].number, ended, 9.0)
    assert study.trials[tasks[9].number].state is TrialState.COMPLETED


def told(epoch: float, value: float) -> Evaluation:
    return Evaluation(step=int(epoch), epoch=epoch, metrics={"select_error": value}, spent_s=epoch)


@pytest.mark.parametrize("epoch", [9.0, 5.0])
def test_trial_that_was_trained_before_the_search_stands_at_no_rung_that_it_passed_then(store, tmp_path, epoch):
    """Its result existed, or it goes on from another job's checkpoint: 9 epochs, with rungs at 1 and 3."""
    request = search_request(store, tmp_path, ASHA)
    study = Runner(store, request).study
    known, other = next_of(study), next_of(study)
    assert study.tell(known.number, told(epoch, 0.05))
    metrics = {"select_error": 0.05}
    ended = JobResult(attempt_id="", key=known.request.key, outcome=Outcome.ALREADY_COMMITTED, metrics=metrics)
    study.end(known.number, ended, 1.0)
    assert study.tell(other.number, told(1.0, 0.5))
    assert study.tell(other.number, told(3.0, 0.4)), "in the middle of its training it was compared with a later epoch"
    rebuilt = Study(request, store, lambda: 1.0)
    assert rebuilt.ladder.values == study.ladder.values == {1.0: {other.number: 0.5}, 3.0: {other.number: 0.4}}
    assert all(risk.num_pairs == 0 for risk in risks_of(rebuilt.ladder.values, rebuilt.trials))


def test_trial_whose_value_at_a_rung_was_lost_is_compared_by_the_next_one(store, tmp_path):
    """Its search could not take the value: the store was away, and the attempt ended with a checkpoint behind it."""
    study = Runner(store, search_request(store, tmp_path, ASHA)).study
    first, second = next_of(study), next_of(study)
    assert study.tell(first.number, told(1.0, 0.5))
    assert study.tell(second.number, told(1.0, 0.4))
    assert study.tell(second.number, told(3.0, 0.1))
    assert not study.tell(first.number, told(4.0, 0.3)), "it escaped a rung"


def test_trial_that_is_validated_seldom_stands_at_the_rung_before_its_validation(store, tmp_path, monkeypatch):
    seldom = SWEEP.replace("epochs: 9, batch_size: 16}", "epochs: 9, batch_size: 16, eval_every_epochs: 2}")
    monkeypatch.setattr("tests.integration.search_jobs.SWEEP", seldom)
    study = Runner(store, search_request(store, tmp_path, ASHA.replace("{}", "{reduction: 1.5}"))).study
    rungs = (2.0, 3.0, 4.5, 6.75)
    assert tuple(study.ladder.values) == rungs
    task = next_of(study)
    for epoch in (2.0, 4.0, 6.0, 8.0):
        assert study.tell(task.number, told(epoch, 1 / epoch))
    assert {rung: study.ladder.values[rung][task.number] for rung in rungs} == dict(
        zip(rungs, (1 / 2, 1 / 4, 1 / 6, 1 / 8), strict=True)
    )


def test_decision_in_a_log_stands_though_another_would_be_made_today(store, tmp_path):
    """Earlier releases compared a trial with the result of one that had ended before the search."""
    request = search_request(store, tmp_path, ASHA)
    study = Runner(store, request).study
    known, other, third = (next_of(study) for _ in range(3))
    study.tell(known.number, told(9.0, 0.05))
    study.tell(other.number, told(3.0, 0.4))
    log = SearchLog(store, request.key)
    log.read()
    log.append([TrialStopped(trial=other.number, at_s=1.0, rung=3.0, cutoff=0.05, num_before=1)])
    rebuilt = Study(request, store, lambda: 1.0)
    assert rebuilt.trials[other.number].state is TrialState.STOPPED
    assert not rebuilt.tell(other.number, told(9.0, 0.01)), "a stopped trial goes on"
    assert next_of(rebuilt).number == known.number
    assert rebuilt.tell(third.number, told(3.0, 0.3)), "later trials are compared with trials of the same epoch"


def test_failure_that_would_come_again_is_the_trials_answer(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, ASHA)).study
    task = next_of(study)
    study.end(task.number, failure(task.request, FailureKind.NUMERICS, "the loss is NaN"), 1.0)
    (view,) = study.trials
    assert (view.state, view.reason, view.failure) == (TrialState.FAILED, "the loss is NaN", FailureKind.NUMERICS)
    assert next_of(study).number == 1


def test_trial_that_is_cut_off_runs_again_but_not_for_ever(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, ASHA)).study
    for _ in range(MOST_LOSSES - 1):
        task = next_of(study)
        assert task.number == 0
        study.lose(task.number, "its worker died")
    study.next_task()
    with pytest.raises(TrialsLostError, match="cut off 3 times, at last: its worker died") as caught:
        study.lose(0, "its worker died")
    assert caught.value.failure_kind is FailureKind.NODE_LOST


def test_preempted_trials_cost_no_tries(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, ASHA)).study
    for _ in range(2 * MOST_LOSSES):
        task = next_of(study)
        study.end(task.number, failure(task.request, FailureKind.PREEMPTED), 1.0)
    assert study.trials[0].num_lost == 2 * MOST_LOSSES


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_trial_whose_value_is_no_number_fails_and_the_search_goes_on(store, tmp_path, value):
    request = search_request(store, tmp_path, ASHA)
    study = Runner(store, request).study
    told, ended = next_of(study), next_of(study)
    metrics = {"select_error": value}
    assert not study.tell(told.number, Evaluation(step=1, epoch=1.0, metrics=metrics, spent_s=1.0))
    study.end(told.number, failure(told.request, FailureKind.PREEMPTED), 1.0)
    study.end(ended.number, JobResult(attempt_id="", key="", outcome=Outcome.COMMITTED, metrics=metrics), 1.0)
    assert [view.state for view in study.trials] == [TrialState.FAILED] * 2
    assert {view.failure for view in study.trials} == {FailureKind.NUMERICS}
    assert study.trials[0].reason.startswith(f"select_error is {value}")
    assert verdicts(Study(request, store, lambda: 9.0)) == verdicts(study)
    assert next_of(study).number == 2


def test_trial_of_the_smaller_loss_is_the_best_of_those_with_equal_errors(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, "{random: {}, space: {lr: [0.1, 0.2, 0.3]}}")).study
    for loss in (0.9, 0.4, 0.4):
        task, metrics = next_of(study), {"select_error": 0.25, "select_loss": loss}
        study.tell(task.number, Evaluation(step=9, epoch=9.0, metrics=metrics, spent_s=1.0))
        study.end(task.number, JobResult(attempt_id="", key="", outcome=Outcome.COMMITTED, metrics=metrics), 1.0)
    assert study.best().number == 1


def test_trials_without_the_metric_end_the_search_with_what_they_tell(store, tmp_path):
    study = Runner(store, search_request(store, tmp_path, ASHA)).study
    task = next_of(study)
    with pytest.raises(UserError, match=r"tell \['val_error'\], but not select_error"):
        study.tell(task.number, Evaluation(step=1, epoch=1.0, metrics={"val_error": 0.5}, spent_s=1.0))


def test_search_without_a_completed_trial_has_no_answer(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    study = Runner(store, request).study
    while (task := study.next_task()) is not None:
        study.end(task.number, failure(task.request, FailureKind.OUT_OF_MEMORY, "16 GiB is too small"), 1.0)
    with pytest.raises(UserError, match=r"no trial .* 6 that failed: 16 GiB is too small"):
        commit_search(study, request, store, 0.0)


def test_record_says_what_was_saved_and_at_what_risk(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    study = Runner(store, request).run()
    result = commit_search(study, request, store, 0.0)
    record = read_record(store, request.key, identity=request.identity)
    saving, risk = record.summary["search"]["saving"], record.summary["search"]["risk"]
    stopped = [view for view in study.trials if view.state is TrialState.STOPPED]
    assert saving["num_stopped"] == len(stopped) == sum(rung["num_stopped"] for rung in risk)
    assert saving["full_epochs"] == 54
    assert saving["epochs"] == sum(view.epoch for view in study.trials)
    assert 0 < saving["share"] < 1
    assert result.metrics["saved_share"] == saving["share"]
    chosen = record.summary["chosen"]["parameters"]["recipe"]
    assert chosen["lr"] == study.best().params["lr"]
    assert "select_holdout" not in chosen, "what is held out for the search alone is trained on afterwards"


def test_kept_trials_are_those_that_something_needs(store, tmp_path):
    request = search_request(store, tmp_path, ASHA)
    with pytest.raises(CrashError):
        Runner(store, request, 25).run()
    running = {view.key for view in fold_search(SearchLog(store, request.key).read()).values()}
    assert kept_trials(store, request.key) == running
    study = Runner(store, request).run()
    commit_search(study, request, store, 0.0)
    completed = {view.key for view in study.trials if view.state is TrialState.COMPLETED}
    assert kept_trials(store, request.key) == completed
    assert kept_trials(store, "search-nothing-0") == set()
