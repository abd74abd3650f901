"""How long people wait for commands: start-up, and the commands that read large sweeps."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.cli.commands.live_view import LiveView
from orchestrator.core.contract import JobRequest, Outcome
from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import GIB, MIB
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.retention.gc import Collector
from orchestrator.retention.gc_rules import GcAction, Tally
from orchestrator.retention.roots import RootReader, forget
from orchestrator.state import events
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Part, Record
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import log_name, metrics_segment, plan_name, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import (
    LogContext,
    LogQuery,
    LogRecord,
    encode,
    find_logs,
    finish_log,
    format_time,
    search_logs,
)
from orchestrator.testing import FakeClock
from orchestrator.testing.memory_store import MemoryStore
from tests.live_sweep import SWEEP, write_live_sweep
from tests.report_sweeps import StudyPlan

# ---------------------------------------------------------------------------------------------------------------------
# How long people wait for the commands that need no cluster, beside bare interpreters in the same run.

ROOT = Path(__file__).parents[1]
_ROUNDS = 10
_BARE = "python -c pass"
_LIBRARIES = "with pydantic and yaml"
_ARMS = {
    _BARE: ["-c", "pass"],
    _LIBRARIES: ["-c", "import pydantic.main, yaml"],
    "orchestrator --help": ["-m", "orchestrator.cli", "--help"],
    "orchestrator validate quickstart": ["-m", "orchestrator.cli", "validate", "quickstart"],
    "orchestrator plan quickstart": ["-m", "orchestrator.cli", "plan", "quickstart"],
}


def test_cli_startup_beside_a_bare_interpreter(tmp_path: Path) -> None:
    """Asked: --help <= 0.5 s, validate <= 0.5 s, plan <= 2 s. CPU seconds count where others use the machine."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", "orchestrator"], cwd=ROOT, check=True)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in _ARMS}
    for _ in range(_ROUNDS):
        for name, arguments in _ARMS.items():
            seconds[name].append(_run(arguments, tmp_path))
    cpu_s, wall_s = (
        {name: statistics.median(one[position] for one in ran) for name, ran in seconds.items()} for position in (0, 1)
    )
    print(f"{'':34} {'wall s':>7} {'CPU s':>7} {'x bare':>7} {'x libraries':>11}")  # noqa: T201 - a benchmark's result
    for name in _ARMS:
        ratios = f"{cpu_s[name] / cpu_s[_BARE]:7.1f} {cpu_s[name] / cpu_s[_LIBRARIES]:11.1f}"
        print(f"{name:34} {wall_s[name]:7.3f} {cpu_s[name]:7.3f} {ratios}")  # noqa: T201 - a benchmark's result


def _run(arguments: list[str], directory: Path) -> tuple[float, float]:
    """CPU and wall seconds of a fresh process."""
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=directory, env=known, check=True, capture_output=True)
    after, took_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started_s
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took_s


# ---------------------------------------------------------------------------------------------------------------------
# Looking at a sweep of 10,000 jobs: one `status`, and what a following display takes at each look.


@pytest.mark.parametrize("num_transfers", [1_000, 10_000])
def test_status_of_a_live_sweep_in_a_process_of_its_own(tmp_path: Path, num_transfers: int) -> None:
    store = LocalStore(tmp_path / "store")
    plan = write_live_sweep(store, num_transfers=num_transfers, now=time.time())
    took = {}
    for form in ("table", "json"):
        began_s, began = time.perf_counter(), os.times()
        command = [sys.executable, "-m", "orchestrator.cli", "status", SWEEP, "--store", store.uri, "-o", form]
        result = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        ended = os.times()
        assert result.returncode == 101, result.stderr
        cpu_s = ended.children_user + ended.children_system - began.children_user - began.children_system
        took[form] = (time.perf_counter() - began_s, cpu_s)
    told = ", ".join(f"-o {form} {wall_s:.2f} s ({cpu_s:.2f} s CPU)" for form, (wall_s, cpu_s) in took.items())
    sys.stdout.write(f"\nstatus of {len(plan.jobs)} jobs: {told}\n")


# ---------------------------------------------------------------------------------------------------------------------
# Searching the logs of 1,000 attempts, and a look of the live view at a sweep of 10,000 jobs.

NUM_ATTEMPTS, NUM_LINES = 1_000, 500
KEY = "finetune-x-0123456789abcdef"


def test_search_of_the_logs_of_a_thousand_attempts(tmp_path: Path) -> None:
    store, num_bytes = LocalStore(tmp_path), 0
    for number in range(NUM_ATTEMPTS):
        job = f"finetune/near/levels/depth{number % 4}/seed{number}"
        context = LogContext(sweep="s", job=job, attempt=1)
        lines = (
            LogRecord(
                context=context,
                time=format_time(1.7e9 + number + line / 1000),
                level="error" if line == 499 and number % 100 == 0 else "info",
                source="stdout",
                message="ValueError: no such model"
                if line == 499 and number % 100 == 0
                else f"step {line} loss 2.{line}",
            )
            for line in range(NUM_LINES)
        )
        content = "".join(map(encode, lines)).encode()
        num_bytes += len(content)
        finish_log(store, log_name("s", job, 1, key=KEY), content)
    queries = {
        "a word": LogQuery(pattern=re.compile("ValueError")),
        "an expression": LogQuery(pattern=re.compile(r"(Value|Key)Error: \w+")),
        "errors": LogQuery(level="error"),
        "the last seconds": LogQuery(since=format_time(1.7e9 + NUM_ATTEMPTS - 5)),
    }
    told = []
    for name, query in queries.items():
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        found = list(search_logs(store, find_logs(store, "s"), query))
        took = f"{time.perf_counter() - began_s:.2f} s ({time.process_time() - began_cpu_s:.2f} s CPU)"
        told.append(f"{name}: {len(found)} records in {took}")
        assert found
    sys.stdout.write(f"\n{NUM_ATTEMPTS} logs, {num_bytes / 1e6:.0f} MB: {'; '.join(told)}\n")


def test_look_of_the_live_view_at_a_large_sweep(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = write_live_sweep(store, num_transfers=10_000, now=time.time(), is_served=True)
    app = LiveView(store, SWEEP, every_s=3600.0)
    reads: list[float] = []
    shows: list[float] = []
    cpu: list[float] = []

    async def run() -> None:
        async with app.run_test(size=(160, 50)) as pilot:
            while not app.shown.jobs:
                await pilot.pause(0.05)
            for number in range(11):
                began_s = time.perf_counter()
                frame = app._reader.look(SWEEP, search="" if number % 2 else "finetune")
                reads.append(time.perf_counter() - began_s)
                began_s, began_cpu_s = time.perf_counter(), time.thread_time()
                app.show_frame(frame)
                await pilot.pause()
                shows.append(time.perf_counter() - began_s)
                cpu.append(time.thread_time() - began_cpu_s)

    asyncio.run(run())
    sys.stdout.write(
        f"\nlive view of {len(plan.jobs)} jobs: median look {1e3 * statistics.median(reads):.0f} ms, "
        f"median show {1e3 * statistics.median(shows):.0f} ms ({1e3 * statistics.median(cpu):.0f} ms CPU; all rows "
        f"anew), longest {1e3 * max(shows):.0f} ms\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Listing and planning a garbage collection over 100,000 artifacts: seconds, and memory that does not grow with them.
#
# Half of the artifacts belong to sweeps that are kept, half to sweeps that are forgotten. Two arms in one run: objects
# in memory (what the collection itself costs) and files (what listing a disk adds).

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
    told.append(events.SweepFinished(at_s=3.0, status=events.SweepEnding.SUCCEEDED))
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


# ---------------------------------------------------------------------------------------------------------------------
# A finished sweep of 10,000 transfers on disk, with records and metric segments of the usual size.

BIG_SWEEP = "big"
NUM_TRANSFERS = 10_000
_SPACES = {f"levels/depth{depth}": 2 * depth + 2 for depth in range(40)}
_SEGMENTS, _LINES = 2, 30
_EVENTS_PER_SEGMENT = 500
_START_S = 1_800_000_000.0


def write_big_sweep(folder: Path) -> Plan:
    """40 label spaces x 5 backbones x 10 transfers x 5 seeds; files are written plainly, as no fsync is measured."""
    store = LocalStore(folder)
    plan = StudyPlan(
        sweep=BIG_SWEEP,
        spaces=_SPACES,
        pretrain_seeds=range(5),
        transfer_seeds=range(5),
        transfers=[f"target{number}" for number in range(10)],
    ).plan(store.uri)
    store.put(plan_name(BIG_SWEEP, 1), json.dumps(plan.to_json()).encode())
    random = np.random.default_rng(0)
    for job in plan.jobs:
        _write(folder / record_name(job.key), _record(job, float(random.normal(0.2, 0.01))).to_bytes())
        if job.kind is not JobKind.LABELS:
            for segment in range(_SEGMENTS):
                name = metrics_segment(job.key, 1, segment * _LINES, (segment + 1) * _LINES)
                _write(folder / name, _segment_lines(segment * _LINES).encode())
    journal, told = Journal(store, BIG_SWEEP, holder="bench"), list(_story(plan))
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
    yield events.SweepFinished(at_s=_START_S + 700, status=events.SweepEnding.SUCCEEDED)


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
        sweep=BIG_SWEEP,
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


# ---------------------------------------------------------------------------------------------------------------------
# The report of a sweep of 10,000 transfers, as a command: asked for are 20 s and 1 GiB.

ASKED_S, ASKED_GIB = 20.0, 1.0
ARMS = {"report": (), "report --html": ("--html",)}


@dataclass(frozen=True, kw_only=True)
class Measured:
    wall_s: float
    cpu_s: float
    peak_gib: float


def run(folder: Path, arguments: tuple[str, ...]) -> Measured:
    """One command in a process of its own, whose peak memory the kernel tells at its end."""
    store = LocalStore(folder).uri
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "report",
        BIG_SWEEP,
        "--store",
        store,
        "-o",
        "csv",
        *arguments,
    ]
    started_s = time.perf_counter()
    with (folder / "out.txt").open("wb") as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    cpu_s = usage.ru_utime + usage.ru_stime
    return Measured(wall_s=time.perf_counter() - started_s, cpu_s=cpu_s, peak_gib=usage.ru_maxrss * 1024 / GIB)


def test_report_of_ten_thousand_transfers(tmp_path: Path) -> None:
    write_big_sweep(tmp_path)
    for name, arguments in [*ARMS.items(), *ARMS.items()]:
        found = run(tmp_path, arguments)
        took = f"{found.wall_s:.1f} s ({found.cpu_s:.1f} s CPU, asked {ASKED_S:.0f})"
        sys.stdout.write(
            f"{name}: {NUM_TRANSFERS} transfers in {took}, {found.peak_gib:.2f} GiB (asked {ASKED_GIB:.0f})\n"
        )
    page = tmp_path / "sweeps" / BIG_SWEEP / "report" / "report.html"
    sys.stdout.write(f"page: {page.stat().st_size / 1e6:.1f} MB\n")
