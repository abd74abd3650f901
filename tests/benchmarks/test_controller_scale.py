"""What large sweeps cost the controller and those who ask how a sweep stands. Prints; asserts no times.

Measured on 2 shared cores: an event folds in 13 us with 1,000 or 10,000 jobs and in 24 us with 100,000.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.controller.controller import Controller
from orchestrator.core.contract import Outcome, Resources
from orchestrator.planning.graph.plan import Plan
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import snapshots_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client, ledger
from orchestrator.sweeps.ledger import SweepLedger
from orchestrator.testing import ScriptedBackend
from tests.makespan_dag import paper_dag

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
TICK_EVENTS = 5
"""Events that a controller appends at once."""


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}")


def plan_of(num_jobs: int, store_uri: str = "") -> Plan:
    made, _ = paper_dag(1, num_pretrains=num_jobs // 50, num_transfers=49)
    return Plan(sweep="paper", revision=0, store_uri=store_uri, jobs=made.jobs, baseline="")


def life_of(plan: Plan, num_jobs: int) -> Iterator[list[Event]]:
    """Launch and success of the first jobs."""
    for number in range(0, num_jobs, TICK_EVENTS):
        jobs = plan.jobs[number : number + TICK_EVENTS]
        yield [
            events.AttemptLaunched(at_s=1.0, job=job.name, attempt_id=job.key, key=job.key, number=1, epoch=1)
            for job in jobs
        ]
        yield [
            events.AttemptSucceeded(
                at_s=2.0, job=job.name, attempt_id=job.key, outcome=Outcome.COMMITTED, metrics={"val_error": 0.5}
            )
            for job in jobs
        ]


def test_event_folds_as_fast_in_a_large_sweep_as_in_a_small_one() -> None:
    spent_us = {}
    for num_jobs in (1_000, 10_000, 100_000):
        plan = plan_of(num_jobs)
        accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
        snapshot = apply(Snapshot(sweep="paper"), [accepted], lambda _, plan=plan: plan)  # type: ignore[misc]
        segments = list(life_of(plan, 1_000))
        started_s = time.process_time()
        for segment in segments:
            snapshot = apply(snapshot, segment, lambda _, plan=plan: plan)  # type: ignore[misc]
        spent_us[num_jobs] = (time.process_time() - started_s) / 2_000 * 1e6
    say(", ".join(f"{n} jobs: {us:.1f} us per event" for n, us in spent_us.items()))
    say(f"100,000 jobs / 1,000 jobs: {spent_us[100_000] / spent_us[1_000]:.2f}")


def test_status_of_a_large_sweep_is_read_from_its_newest_snapshot(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = plan_of(10_000, store.uri)
    writer = SweepLedger(store, "paper", holder="bench")
    revision, documents = writer.add_revision(plan.to_json(), "")
    writer.append([events.SweepAdopted(at_s=0.0, cluster="c", epoch=1, holder="bench")])
    writer.append([events.PlanAccepted(at_s=0.0, message_id="m", revision=revision, documents=documents)])
    started_s = time.process_time()
    for segment in life_of(plan, 10_000):
        writer.append(segment)
    every = ledger._snapshot_distance(writer.snapshot)
    say(f"4,000 appends with snapshots every {every}: {time.process_time() - started_s:.1f} s of CPU")
    spent_s = _time_reads(store, ["with snapshots"])
    for name in store.list_children(snapshots_folder("paper")):
        store.delete(f"{snapshots_folder('paper')}{name}")
    spent_s |= _time_reads(store, ["journal alone"])
    say(", ".join(f"{arm}: {seconds:.2f} s" for arm, seconds in spent_s.items()))


def _time_reads(store: LocalStore, arms: Sequence[str]) -> dict[str, float]:
    spent_s = {}
    for arm in arms:
        started_s = time.perf_counter()
        snapshot = client.load_snapshot(store, "paper")
        spent_s[arm] = time.perf_counter() - started_s
        assert snapshot.num_events == 20_002
    return spent_s


def test_memory_of_a_controller_with_a_hundred_thousand_jobs(tmp_path: Path) -> None:
    for num_jobs in (0, 100_000):
        command = [sys.executable, "-m", "tests.benchmarks.test_controller_scale", str(tmp_path), str(num_jobs)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        say(f"{num_jobs} jobs: {told.stdout.strip()}")


def _serve(folder: Path, num_jobs: int) -> None:
    """A controller that has accepted a sweep and has room for 1,000 attempts; prints what its process holds."""
    store = LocalStore(folder / str(num_jobs))
    if num_jobs and os.fork() == 0:  # the plan is made elsewhere: here it only counts as what the controller reads
        client.submit(store, plan_of(num_jobs, store.uri), "", "c")
        os._exit(0)
    if num_jobs:
        os.wait()
    controller = Controller(store, ScriptedBackend(store, total=Resources(cpus=0.0)), "c", "bench")
    spent_s = []
    for _ in range(20):
        started_s = time.process_time()
        controller.tick()
        spent_s.append(time.process_time() - started_s)
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    say(f"{held.split()[1]} kB held, {peak.split()[1]} kB at its peak; idle tick {1e3 * sorted(spent_s)[10]:.1f} ms")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
