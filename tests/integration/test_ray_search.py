"""Searches on a real Ray cluster: real Ray Tune, trials in actors of their own, and processes killed for real."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.gang.mailbox import NODE_LABEL, GangShape
from orchestrator.backends.ray.search.tune import _reservation
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.search.asha import AshaRule, Ladder
from orchestrator.search.log import SearchLog, fold_search
from orchestrator.storage.artifacts import is_committed, read_record
from orchestrator.storage.trials import TrialState, read_trials
from tests.integration.ray_jobs import look, reservations, workers
from tests.integration.search_jobs import ENTRY_POINT, epochs_done, search_request

SETTINGS = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1)
ASHA = "{asha: {}, space: {lr: {uniform: [0.01, 1.0]}}, trials: 6, concurrent: 2}"
RANDOM = "{random: {}, space: {lr: {uniform: [0.01, 0.8]}}, trials: 4, concurrent: 2}"
TWO_CPUS = Resources(cpus=2.0)


def runner_pid(ray_cluster, namespace) -> int:
    (name,) = [
        actor["name"]
        for actor in ray_cluster.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace
    ]
    description = ray_cluster.get(ray_cluster.get_actor(name, namespace=namespace).describe.remote())
    return int(description["pid"])


def ended(store, key) -> list[int]:
    return [view.number for view in fold_search(SearchLog(store, key).read()).values() if view.ended_at_s is not None]


@pytest.mark.parametrize("reduction", [2.0, 3.0, 4.0])
def test_ladder_decides_as_the_scheduler_of_ray_tune(reduction):
    from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

    rule = AshaRule(grace_epochs=1, reduction=reduction, max_epochs=40)
    ladder = Ladder(rule.rungs, reduction)
    theirs: Any = AsyncHyperBandScheduler(
        time_attr="epoch", metric="error", mode="min", max_t=40, reduction_factor=reduction, stop_last_trials=False
    )
    random, epochs = Random(int(reduction)), Counter[int]()  # noqa: S311 - no secret
    trials = [SimpleNamespace(trial_id=str(number)) for number in range(40)]
    running = list(range(40))
    for trial in trials:
        theirs.on_trial_add(None, trial)
    num_stopped = 0
    while running:
        number = random.choice(running)
        epochs[number] += 1
        value = random.random() / epochs[number]
        verdict = ladder.judge(number, float(epochs[number]), value)
        result = {"epoch": epochs[number], "error": value}
        action = theirs.on_trial_result(None, trials[number], result)
        stops = verdict is not None and not verdict.goes_on
        assert stops == (action == TrialScheduler.STOP), (number, epochs[number], verdict)
        num_stopped += stops
        if stops or epochs[number] == 39:
            running.remove(number)
    assert 5 < num_stopped < 40


@pytest.mark.ci
def test_search_on_ray_stops_what_falls_behind_and_commits_the_best(ray_cluster, backend, store, tmp_path, finish):
    attempt = search_request(store, tmp_path, ASHA)
    backend.launch(attempt, TWO_CPUS)
    report = finish(backend, attempt.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report
    found = read_record(store, attempt.key).summary["search"]
    assert len(found["trials"]) == 6
    lrs = {trial["trial"]: trial["params"]["lr"] for trial in found["trials"]}
    completed = [trial["trial"] for trial in found["trials"] if trial["state"] == "completed"]
    assert found["best"]["trial"] == min(completed, key=lambda number: abs(lrs[number] - 0.3))
    stopped = [trial for trial in found["trials"] if trial["state"] == "stopped"]
    assert stopped
    assert {trial["epoch"] for trial in stopped} <= {1.0, 3.0}
    assert {trial.state for trial in read_trials(store, attempt.key)} <= {
        TrialState.COMPLETED,
        TrialState.STOPPED,
        TrialState.FAILED,
    }
    assert not reservations(ray_cluster)


@pytest.mark.slow
def test_search_runner_killed_goes_on_from_the_log_and_redoes_no_trial_that_ended(
    ray_cluster, namespace, backend, store, tmp_path, gate, finish, until
):
    gated = search_request(store, tmp_path, RANDOM, gates={"5": str(gate.path)})
    # Trials wait before their fifth epoch until the gate opens: first for the first two only.
    backend.launch(gated, TWO_CPUS)
    until(lambda: len(epochs_done(tmp_path) if (tmp_path / "history").exists() else {}) == 2)
    until(lambda: (told := look(backend, gated.attempt_id).progress) is not None and told.done >= 2 * 5)
    gate.open()
    until(lambda: len(ended(store, gated.key)) >= 2)
    os.kill(runner_pid(ray_cluster, namespace), signal.SIGKILL)
    until(lambda: look(backend, gated.attempt_id).status is AttemptStatus.LOST)
    before = ended(store, gated.key)
    backend.release(gated.attempt_id)
    until(lambda: backend.observe([]) == [] and not reservations(ray_cluster))
    again = search_request(store, tmp_path, RANDOM, attempt=2)
    backend.launch(again, TWO_CPUS)
    report = finish(backend, again.attempt_id)
    assert report.status is AttemptStatus.SUCCEEDED, report
    state = fold_search(SearchLog(store, again.key).read())
    assert all(len(state[number].attempts) == 1 for number in before)
    assert all(epochs == [*range(1, 10)] for epochs in epochs_done(tmp_path).values())
    alone = search_request(store, tmp_path, RANDOM)
    assert [view.params for view in state.values()] == [
        view.params for view in fold_search(SearchLog(store, alone.key).read()).values()
    ]
    assert len(state) == 4


@pytest.mark.slow
def test_search_stopped_writes_checkpoints_and_resumes(backend, store, tmp_path, gate, finish, until):
    gated = search_request(store, tmp_path, RANDOM, gates={"5": str(gate.path)})
    backend.launch(gated, TWO_CPUS)
    until(lambda: (tmp_path / "history").exists() and all(len(done) == 4 for done in epochs_done(tmp_path).values()))
    backend.stop(gated.attempt_id)
    report = finish(backend, gated.attempt_id)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.PREEMPTED, report.failure
    assert not is_committed(store, gated.key)
    backend.release(gated.attempt_id)
    gate.open()
    again = search_request(store, tmp_path, RANDOM, attempt=2)
    backend.launch(again, TWO_CPUS)
    assert finish(backend, again.attempt_id).status is AttemptStatus.SUCCEEDED
    assert all(epochs == [*range(1, 10)] for epochs in epochs_done(tmp_path).values())


@pytest.mark.parametrize(
    ("shape", "selectors"),
    [
        ({}, None),
        ({"selector": {"market": "spot"}}, [{"market": "spot"}]),
        (
            {"selector": {"market": "spot"}, "excluded_ids": ("a", "b")},
            [{"market": "spot", NODE_LABEL: "!in(a,b)"}],
        ),
        ({"selector": {"market": "spot"}, "node_ids": ("b", "a", "a")}, [{NODE_LABEL: "in(a,b)"}]),
    ],
)
def test_trial_runs_where_its_search_may(shape: dict[str, Any], selectors: list[dict[str, str]] | None) -> None:
    """On a cluster that grows, no node is chosen yet, and trials ran on any."""
    found = _reservation(GangShape(num_workers=1, total=Resources(cpus=1.0), **shape))
    assert found._kwargs.get("bundle_label_selector") == selectors


@pytest.mark.slow
def test_search_whose_trial_ray_loses_is_lost_in_time_and_goes_on_from_its_log(
    ray_cluster, namespace, store, tmp_path, gate, finish, until
):
    settings = RunnerSettings(entry_point=ENTRY_POINT, log_every_s=0.1, gang_start_s=20.0)
    backend = RayBackend(namespace, settings=settings, spare_runners=0)
    backend.announce(1)
    gated = search_request(store, tmp_path, RANDOM, gates={"5": str(gate.path)})
    backend.launch(gated, TWO_CPUS)
    until(lambda: len(epochs_done(tmp_path) if (tmp_path / "history").exists() else {}) == 2)
    stopped = workers(ray_cluster, "Trainable")[0]
    os.kill(stopped, signal.SIGSTOP)  # to Ray it lives, and nobody will ever hear of it
    try:
        report = finish(backend, gated.attempt_id)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    assert report.failure is not None, report
    assert report.failure.kind is FailureKind.NODE_LOST
    assert "no report has come from trial" in report.failure.message
    until(lambda: not reservations(ray_cluster))
    backend.release(gated.attempt_id)
    gate.open()
    again = search_request(store, tmp_path, RANDOM, attempt=2)
    backend.launch(again, TWO_CPUS)
    assert finish(backend, again.attempt_id).status is AttemptStatus.SUCCEEDED
