"""A finished sweep of 10,000 transfers on disk, with records and metric segments of the usual size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orchestrator.core.contract import JobKind, Outcome
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state import events
from orchestrator.storage.artifacts import Part, Record
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import metrics_segment, plan_name, record_name
from orchestrator.storage.local import LocalStore
from tests.report_sweeps import StudyPlan

SWEEP = "big"
NUM_TRANSFERS = 10_000
_SPACES = {f"levels/depth{depth}": 2 * depth + 2 for depth in range(40)}
_SEGMENTS, _LINES = 2, 30
_EVENTS_PER_SEGMENT = 500
_START_S = 1_800_000_000.0


def write_big_sweep(folder: Path) -> Plan:
    """40 label spaces x 5 backbones x 10 transfers x 5 seeds; files are written plainly, as no fsync is measured."""
    store = LocalStore(folder)
    plan = StudyPlan(
        sweep=SWEEP,
        spaces=_SPACES,
        pretrain_seeds=range(5),
        transfer_seeds=range(5),
        transfers=[f"target{number}" for number in range(10)],
    ).plan(store.uri)
    store.put(plan_name(SWEEP, 1), json.dumps(plan.to_json()).encode())
    random = np.random.default_rng(0)
    for job in plan.jobs:
        _write(folder / record_name(job.key), _record(job, float(random.normal(0.2, 0.01))).to_bytes())
        if job.kind is not JobKind.LABELS:
            for segment in range(_SEGMENTS):
                name = metrics_segment(job.key, 1, segment * _LINES, (segment + 1) * _LINES)
                _write(folder / name, _segment_lines(segment * _LINES).encode())
    journal, told = Journal(store, SWEEP, holder="bench"), list(_story(plan))
    for start in range(0, len(told), _EVENTS_PER_SEGMENT):
        journal.append([events.encode_event(event) for event in told[start : start + _EVENTS_PER_SEGMENT]])
    return plan


def _story(plan: Plan) -> Iterator[events.Event]:
    yield events.SweepAdopted(at_s=_START_S, cluster="c", epoch=1, holder="h")
    yield events.PlanAccepted(at_s=_START_S, message_id="m", revision=1)
    for job in plan.jobs:
        attempt = f"{job.key}.1"
        yield events.AttemptLaunched(at_s=_START_S, job=job.name, attempt_id=attempt, key=job.key, number=1, epoch=1)
        yield events.AttemptSucceeded(at_s=_START_S + 600, job=job.name, attempt_id=attempt, outcome=Outcome.COMMITTED)
    yield events.SweepFinished(at_s=_START_S + 700, status=events.SweepStatus.SUCCEEDED)


def _record(job: Job, error: float) -> Record:
    recipe = {f"field_{number}": number / 7 for number in range(40)}
    metrics = {f"metric_{number}": error / (number + 1) for number in range(12)}
    metrics |= {"val_error": error, "best_val_error": error, "num_classes": 2.0}
    part = Part(path="parts/1-0123456789abcdef/backbone.safetensors", size_bytes=10**8, sha256="0" * 64)
    fingerprint = {f"library_{number}": f"1.{number}" for number in range(25)}
    return Record(
        key=job.key,
        identity={**job.identity, "parameters": {"recipe": recipe}},
        attempt_id=f"{job.key}.1",
        job=job.name,
        sweep=SWEEP,
        created_at_s=_START_S,
        parts=dict.fromkeys(("backbone.safetensors", "head.safetensors", "model.json"), part),
        metrics=metrics,
        summary={"fingerprint": fingerprint, "measured": {"setup_s": 3.0, "train_s": 500.0}},
    )


def _segment_lines(first: int) -> str:
    lines = [
        {
            "step": step,
            "epoch": step / 10,
            "at_s": _START_S + step,
            "metrics": {"train_loss": 1 / step, "val_error": 0.3},
        }
        for step in range(first + 1, first + _LINES + 1)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
