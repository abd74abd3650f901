"""Sweeps for tests of the publisher, and what MLflow holds of them; large ones are finished, and in memory."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state import events
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import Record
from orchestrator.storage.layout import record_name
from orchestrator.testing.memory_store import MemoryStore
from tests.builders import START_S, SweepJournal, done, launched, make_job, make_plan

if TYPE_CHECKING:
    from mlflow import MlflowClient

NUM_METRICS = 20
NUM_PARAMS = 20
"""Without the key, which makes one more."""
_EVENTS_PER_SEGMENT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BigSweep:
    """A finished sweep of many small jobs."""

    store: ObjectStore
    plan: Plan

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """By job name."""
        return {job.name: metrics_of(position) for position, job in enumerate(self.plan.jobs)}

    def metrics_of(self, job: str) -> dict[str, float]:
        """Of one job, by its name."""
        return metrics_of(int(job.rpartition("/")[2]))


def metrics_of(position: int) -> dict[str, float]:
    return {f"metric_{number}": position + number / NUM_METRICS for number in range(NUM_METRICS - 1)} | {
        "val_error": (position % 97) / 100
    }


def big_sweep(
    num_jobs: int,
    *,
    sweep: str = "big",
    store: ObjectStore | None = None,
    is_over: bool = True,
    tracking_uri: str = "",
) -> BigSweep:
    """All jobs succeeded, and the sweep with them if ``is_over``."""
    store = store or MemoryStore()
    jobs = tuple(_job(position) for position in range(num_jobs))
    plan = make_plan(*jobs, sweep=sweep, revision=1, store_uri=store.uri, tracking_uri=tracking_uri)
    journal = SweepJournal(store, sweep, num_per_segment=_EVENTS_PER_SEGMENT)
    journal.accept(plan)
    for position, job in enumerate(jobs):
        metrics = metrics_of(position)
        store.put(record_name(job.key), _record(job, sweep, metrics))
        journal.tell(launched(job, at_s=START_S + 1), done(job, START_S + 2, metrics=metrics))
    if is_over:
        journal.tell(events.SweepFinished(at_s=START_S + 3, status=events.SweepEnding.SUCCEEDED))
    journal.flush()
    return BigSweep(store=store, plan=plan)


def _job(position: int) -> Job:
    recipe = {f"param_{number}": number for number in range(NUM_PARAMS - 10)}
    parameters = {"model": {"name": "resnet18"}, "recipe": recipe, "seed": position}
    facets: dict[str, str | int] = {
        "label_space": f"levels/depth{position % 5}",
        "level": f"depth{position % 5}",
        "granularity": 2 ** (position % 5),
        "pretrain_seed": position // 5,
        "transfer": "top",
        "protocol": "probe",
        "target": "levels/depth0",
        "transfer_seed": 0,
    }
    return make_job(f"probe/top/{position:05d}", label="big", parameters=parameters, facets=facets)


def _record(job: Job, sweep: str, metrics: dict[str, float]) -> bytes:
    return Record(
        key=job.key,
        identity=job.identity,
        attempt_id=f"{job.key}.1",
        job=job.name,
        sweep=sweep,
        created_at_s=START_S + 2,
        parts={},
        metrics=metrics,
    ).to_bytes()


def problems(database: Path, big: BigSweep) -> list[str]:
    """Whatever of the sweep a SQLite database of MLflow lacks, has twice or has wrongly, read without MLflow."""
    found: list[str] = []
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "SELECT r.run_uuid, t.value, r.status, r.end_time FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid "
            "AND t.key = 'job' WHERE r.lifecycle_stage = 'active'"
        ).fetchall()
        by_id = {row[0]: row[1] for row in rows}
        expected = {job.name for job in big.plan.jobs} | {"(sweep)"}
        counts = Counter(by_id.values())
        found += [f"{name} has {count} runs" for name, count in counts.items() if count != 1]
        found += [f"{name} is missing" for name in expected - counts.keys()]
        found += [f"{row[1]} is {row[2]}" for row in rows if row[2] != "FINISHED" or row[3] is None]
        for table in ("metrics", "latest_metrics"):
            found += _wrong_metrics(connection, table, by_id, big.metrics)
        params = dict(connection.execute("SELECT run_uuid, count(*) FROM params GROUP BY run_uuid").fetchall())
        found += [
            f"{name} has {params.get(run_id)} parameters"
            for run_id, name in by_id.items()
            if name != "(sweep)" and params.get(run_id) != NUM_PARAMS + 1
        ]
    return found


def _wrong_metrics(
    connection: sqlite3.Connection, table: str, by_id: dict[str, str], expected: dict[str, dict[str, float]]
) -> list[str]:
    told: dict[str, list[tuple[str, float]]] = {name: [] for name in by_id.values()}
    for run_id, key, value in connection.execute(f"SELECT run_uuid, key, value FROM {table}"):  # noqa: S608 - ours
        if run_id in by_id:
            told[by_id[run_id]].append((key, value))
    return [
        f"{name} has other {table}"
        for name, metrics in expected.items()
        if sorted(told.get(name, [])) != sorted(metrics.items())
    ]


def runs_by_job(client: MlflowClient, plan: Plan) -> dict[str, Any]:
    """Active runs of a sweep by job name; fails if a job has two."""
    experiment = client.get_experiment_by_name(plan.experiment or plan.sweep)
    found = [] if experiment is None else client.search_runs([experiment.experiment_id])
    by_job = {run.data.tags["job"]: run for run in found}
    assert len(by_job) == len(found)
    return by_job
