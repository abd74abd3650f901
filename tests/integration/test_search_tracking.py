"""A real search on a real Ray cluster as MLflow shows it: trials are runs below the job's run, told once."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller
from orchestrator.core.contract import Resources
from orchestrator.core.errors import NotFoundError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.local import LocalStore
from orchestrator.storage.trials import Trial, TrialState, read_trials
from orchestrator.sweepfile.load import load_sweep
from orchestrator.sweeps.client import load_snapshot, submit
from orchestrator.tracking.publisher import Publisher
from orchestrator.tracking.server import TrackingServer
from tests.integration.search_jobs import ENTRY_POINT, search_request
from tests.mlflow_servers import new_database

CLUSTER = "test-cluster"
NUM_TRIALS, NUM_CONCURRENT = 6, 2
ASHA = f"{{asha: {{}}, space: {{lr: {{uniform: [0.01, 1.0]}}}}, trials: {NUM_TRIALS}, concurrent: {NUM_CONCURRENT}}}"
STATUS = {TrialState.COMPLETED: "FINISHED", TrialState.STOPPED: "KILLED", TrialState.FAILED: "FAILED"}


def search_plan(store: LocalStore, folder: Path, gate: Path) -> Plan:
    """The one search of a sweep as a sweep of its own: its trials are arithmetic and read no inputs."""
    search_request(store, folder, ASHA, gates={"3": str(gate)})
    sweep, _ = load_sweep(str(folder / "sweep.yaml"))
    (search,) = [job for job in build_plan(sweep, store_uri=store.uri).jobs if job.kind == "search"]
    job = replace(search, needs=(), resources=Resources(cpus=2.0))
    return Plan(sweep=sweep.name, revision=0, store_uri=store.uri, jobs=(job,), baseline="")


class Shown:
    """What MLflow has of a sweep now."""

    def __init__(self, uri: str, plan: Plan) -> None:
        self.client = TrackingServer(uri).client
        experiment = self.client.get_experiment_by_name(plan.sweep)
        assert experiment is not None
        runs = self.client.search_runs([experiment.experiment_id])
        assert set(Counter(run.data.tags["job"] for run in runs).values()) == {1}, "a run per job and trial"
        self.runs = {run.data.tags["job"]: run for run in runs}
        self.search = plan.jobs[0].name

    def trials(self) -> dict[int, Any]:
        marked = {name.partition("#"): run for name, run in self.runs.items()}
        return {int(number): run for (job, mark, number), run in marked.items() if mark and job == self.search}

    def parent_of(self, run: Any) -> str:
        return next(job for job, one in self.runs.items() if one.info.run_id == run.data.tags["mlflow.parentRunId"])

    def history(self, run: Any, metric: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.client.get_metric_history(run.info.run_id, metric)]


def assert_told_once(shown: Shown, trials: list[Trial]) -> None:
    """Every trial is a run below the search's, with its values and every one of its points, none of them twice."""
    runs = shown.trials()
    assert sorted(runs) == [trial.number for trial in trials]
    for trial in trials:
        run = runs[trial.number]
        assert shown.parent_of(run) == shown.search
        assert float(run.data.params["lr"]) == pytest.approx(trial.params["lr"])
        points = [(point.step, point.metrics["select_error"]) for point in trial.points]
        assert shown.history(run, "select_error") == points
        assert run.info.status == STATUS.get(trial.state, "RUNNING")


@pytest.mark.slow
def test_search_on_ray_is_a_run_with_a_run_for_each_trial_and_stays_so_when_published_again(
    ray_cluster, namespace, store, tmp_path, gate, until
):
    plan = search_plan(store, tmp_path, gate.path)
    (search,) = plan.jobs
    uri = new_database(tmp_path / "mlflow.db")
    submit(store, plan, "", CLUSTER)
    link = ensure_controller(store.uri, CLUSTER, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))
    link.wake(plan.sweep)
    # Nothing is told until the gate opens: what MLflow is compared with stays as it was when that was told.
    until(lambda: are_at_the_gate(read_trials(store, search.key)))
    publisher = Publisher(store, uri)
    publisher.publish_once(plan.sweep)
    shown = Shown(uri, plan)
    assert_told_once(shown, read_trials(store, search.key))
    assert "RUNNING" in {run.info.status for run in shown.trials().values()}
    assert shown.parent_of(shown.runs[search.name]) not in {search.name, *shown.trials()}

    gate.open()
    until(lambda: has_ended(store, plan.sweep))
    assert load_snapshot(store, plan.sweep).state is SweepState.SUCCEEDED
    assert is_committed(store, search.key)
    assert publisher.publish_once(plan.sweep)
    trials = read_trials(store, search.key)
    shown = Shown(uri, plan)
    assert_told_once(shown, trials)
    assert len(trials) == NUM_TRIALS
    assert {trial.state for trial in trials} >= {TrialState.COMPLETED, TrialState.STOPPED}
    run = shown.runs[search.name]
    assert (run.info.status, run.data.metrics["num_stopped"]) == (
        "FINISHED",
        sum(trial.state is TrialState.STOPPED for trial in trials),
    )

    # One that was killed and started again remembers what it told; one whose memory is lost finds the runs.
    assert Publisher(store, uri).publish_once(plan.sweep)
    again = Shown(uri, plan)
    assert_told_once(again, trials)
    assert {name: one.info.run_id for name, one in again.runs.items()} == {
        name: one.info.run_id for name, one in shown.runs.items()
    }


def are_at_the_gate(trials: list[Trial]) -> bool:
    """Whether all that run have told of their first epoch (the next is their third), and no other can start."""
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    is_full = len(running) == NUM_CONCURRENT or len(trials) == NUM_TRIALS
    return bool(running) and is_full and all(trial.points for trial in running)


def has_ended(store: LocalStore, sweep: str) -> bool:
    with suppress(NotFoundError):
        return load_snapshot(store, sweep).state.is_final
    return False
