"""Listing and planning a garbage collection over 100,000 artifacts: seconds, and memory that does not grow with them.

Half of the artifacts belong to sweeps that are kept, half to sweeps that are forgotten. Two arms in one run: objects in
memory (what the collection itself costs) and files (what listing a disk adds).
"""

from __future__ import annotations

import gc
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import JobKind, JobRequest, Outcome
from orchestrator.core.ids import make_key
from orchestrator.core.units import MIB
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.retention.gc import Collector
from orchestrator.retention.gc_rules import GcAction, Tally
from orchestrator.retention.retention import RootReader, forget
from orchestrator.state import events
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import plan_name
from orchestrator.storage.local import LocalStore
from orchestrator.testing import FakeClock
from orchestrator.testing.memory_store import MemoryStore

JOBS_PER_SWEEP = 500
SEGMENT_EVENTS = 50
ALLOWED_S = 60.0
SIZES = (20_000, 100_000)


def make_jobs(sweep: int) -> Iterator[Job]:
    recipe = {"epochs": 90.0, "batch_size": 256, "optimizer": "sgd", "lr": 0.1, "betas": [0.9, 0.999], "warmup": 5}
    inputs = {"index": make_key("index", "i", {"n": sweep}), "labels": make_key("labels", "l", {"n": sweep})}
    for number in range(JOBS_PER_SWEEP):
        identity = {
            "kind": "pretrain",
            "code_version": 1,
            "parameters": {"model": {"name": "resnet50", "image_size": 224}, "recipe": recipe, "seed": [sweep, number]},
            "inputs": inputs,
        }
        key = make_key("pretrain", "resnet50", identity)
        yield Job(name=f"pretrain/l/{number}", kind=JobKind.PRETRAIN, key=key, identity=identity)


def write_sweep(store: ObjectStore, number: int, clock: FakeClock) -> None:
    """A finished sweep; every second one is forgotten."""
    sweep = f"sweep-{number:04d}"
    jobs = tuple(make_jobs(number))
    plan = Plan(sweep=sweep, revision=1, store_uri=store.uri, jobs=jobs, baseline="")
    store.put(plan_name(sweep, 1), json.dumps(plan.to_json()).encode())
    journal = Journal(store, sweep, holder="bench")
    told: list[events.Event] = [
        events.SweepAdopted(at_s=0.0, cluster="c", epoch=1, holder="h"),
        events.PlanAccepted(at_s=0.0, message_id="m", revision=1),
    ]
    for job in jobs:
        attempt = f"{job.key}.1"
        told += [
            events.AttemptLaunched(at_s=1.0, job=job.name, attempt_id=attempt, key=job.key, number=1, epoch=1),
            events.AttemptSucceeded(at_s=2.0, job=job.name, attempt_id=attempt, outcome=Outcome.COMMITTED),
        ]
        commit(store, job, sweep)
    told.append(events.SweepFinished(at_s=3.0, status=events.SweepStatus.SUCCEEDED))
    for start in range(0, len(told), SEGMENT_EVENTS):
        journal.append([events.encode_event(event) for event in told[start : start + SEGMENT_EVENTS]])
    if number % 2:
        forget(store, sweep, now=clock())


def commit(store: ObjectStore, job: Job, sweep: str) -> None:
    request = JobRequest(
        attempt_id=f"{job.key}.1",
        attempt_number=1,
        sweep=sweep,
        job=job.name,
        key=job.key,
        kind=job.kind,
        identity=job.identity,
        store_uri=store.uri,
    )
    writer = ArtifactWriter(store, request)
    writer.add("backbone.safetensors", b"weights")
    writer.add("model.json", b"{}")
    writer.commit(now=0.0)


class UnsyncedStore(LocalStore):
    """Plain files written without waiting for the disk: only reading them is measured."""

    def put(self, name: str, content: bytes):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (0.0, 0.0))
        return replace(self.stat(name), modified_at_s=0.0)

    def put_if_absent(self, name: str, content: bytes):
        return self.put(name, content)


def plan_collection(store: ObjectStore, clock: FakeClock) -> tuple[Tally, float]:
    gc.collect()
    start_s = time.perf_counter()
    tally = Collector(store, RootReader(store), now=clock).preview()
    return tally, time.perf_counter() - start_s


def peak_bytes(store: ObjectStore, clock: FakeClock) -> int:
    tracemalloc.start()
    plan_collection(store, clock)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.bench
def test_plan_collection_of_many_artifacts_is_fast_and_flat(tmp_path: Path) -> None:
    seconds: dict[tuple[str, int], float] = {}
    peaks: dict[int, int] = {}
    clock = FakeClock()
    stores: dict[str, ObjectStore] = {"memory": MemoryStore(clock), "files": UnsyncedStore(tmp_path)}
    num_sweeps = 0
    for size in SIZES:
        for number in range(num_sweeps, size // JOBS_PER_SWEEP):
            for store in stores.values():
                write_sweep(store, number, clock)
        num_sweeps = size // JOBS_PER_SWEEP
        clock.advance(200_000.0)
        for arm, store in stores.items():
            tally, seconds[arm, size] = plan_collection(store, clock)
            assert tally.total(GcAction.HIDE).num_objects == size // 2 * 3
        peaks[size] = peak_bytes(stores["memory"], clock)
    small, large = SIZES
    for (arm, size), taken_s in seconds.items():
        share = f"{taken_s / ALLOWED_S:.3f} of the allowed {ALLOWED_S:g} s"
        print(f"\n{arm:6} {size:7} artifacts planned in {taken_s:5.1f} s = {share}")  # noqa: T201 - a benchmark's result
    for size, peak in peaks.items():
        print(f"peak of a collection of {size:7} artifacts: {peak / MIB:.1f} MiB")  # noqa: T201 - a benchmark's result
    further = (peaks[large] - peaks[small]) / (large - small)
    print(f"{further:.0f} bytes per further artifact")  # noqa: T201 - a benchmark's result
