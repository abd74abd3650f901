"""``kill -9`` of garbage collections at work: the next one finishes, and nothing that is needed goes."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.planning.graph.plan import Job
from orchestrator.retention.fsck import Depth, check_store
from orchestrator.retention.gc import Collector
from orchestrator.retention.gc_rules import Graces
from orchestrator.retention.inventory import LOCK, TRASH
from orchestrator.retention.roots import RootReader, forget
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.local import LocalStore
from tests.checkpoint_cases import HookedStore, kill_this
from tests.gc_store import Lab, make_job

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of its own is made there
AGE_S = 7200.0
DATASET = make_job(0)
KEPT = (DATASET, make_job(1, DATASET), make_job(3, DATASET))
GONE = (make_job(8, DATASET), make_job(13, DATASET))
NUM_GONE = 120
MAX_WRITES = 300
LONGEST_S = 0.2
"""A collection of so many takes about as long."""


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: a killed process leaves in it what it wrote, as on a disk, and copies of it cost little."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if Path(SHARED_MEMORY).is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def template(memory: Path) -> Path:
    """A store with a sweep that stays, one that is forgotten, and garbage of every kind, all of it two hours old."""
    return make_template(memory / "template", GONE)


@pytest.fixture(scope="module")
def large(memory: Path) -> Path:
    """The same with more to do, so that a kill meets a collection at work."""
    return make_template(memory / "large", tuple(make_job(5 * n + 8, DATASET) for n in range(NUM_GONE)))


def make_template(root: Path, gone: Sequence[Job]) -> Path:
    lab = Lab()
    lab.clock.now_s = time.time() - AGE_S
    lab.store = LocalStore(root)
    for sweep, jobs in (("kept", KEPT), ("gone", (DATASET, *gone))):
        lab.accept(sweep, jobs)
        for job in jobs:
            if not is_committed(lab.store, job.key):
                lab.commit(job)
                lab.write_metrics(job)
        lab.write_log(sweep, jobs[-1])
        lab.finish(sweep, jobs)
    lab.write_parts(DATASET)
    for job in (KEPT[-1], gone[0]):
        lab.write_checkpoint(job)
    lab.write_checkpoint(gone[-1], finished=False)
    forget(lab.store, "gone", now=lab.clock())
    for path in root.rglob("*"):
        os.utime(path, (time.time() - AGE_S,) * 2)
    return root


def collector(store: LocalStore, trash_s: float) -> Collector:
    return Collector(store, RootReader(store), graces=Graces(age_s=AGE_S / 2, trash_s=trash_s))


def let_the_lock_run_out(store: LocalStore) -> None:
    """What five minutes do."""
    if store.exists(LOCK):
        store.put(LOCK, json.dumps({**json.loads(store.get(LOCK)), "expires_at_s": 0.0}).encode())


def finish(store: LocalStore) -> None:
    """The next collections: one hides what is left to hide, one destroys."""
    let_the_lock_run_out(store)
    for trash_s in (AGE_S, 0.0):
        collector(store, trash_s).collect()


def check(store: LocalStore, *, is_finished: bool) -> None:
    """What is needed is there byte for byte; once finished, nothing else is."""
    assert [finding for finding in check_store(store, Depth.CONTENT) if finding.problem != "missing"] == []
    assert [job.key for job in KEPT if not is_committed(store, job.key)] == []
    lab = Lab()
    lab.store = store
    lab.check_intact(KEPT)
    if is_finished:
        assert list(check_store(store, Depth.CONTENT)) == []
        names = {stat.name for prefix in ("artifacts/", "metrics/", "logs/") for stat in store.list_objects(prefix)}
        assert len(names) == 3 * len(KEPT) + 1, "record, part and metrics of each, and a log"
        assert {stat.name for stat in store.list_objects(TRASH)} == {LOCK}


def dies_at_write(root: Path, nth: int, trash_s: float) -> bool:
    """Collect in a process that kills itself before its n-th write; false if it came to its end before."""
    child = os.fork()
    if child == 0:
        store, writes = HookedStore(root), iter(range(1, nth))
        store.before = lambda _: None if next(writes, 0) else kill_this()
        status = 1
        try:
            collector(store, trash_s).collect()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in {0, signal.SIGKILL}, status
    return status == signal.SIGKILL


@pytest.mark.ci
@pytest.mark.parametrize("phase", ["hide", "destroy"])
def test_gc_killed_at_each_write_is_finished_by_the_next(template: Path, memory: Path, phase: str) -> None:
    source, root = template, memory / "store"
    if phase == "destroy":
        source = Path(shutil.copytree(template, memory / "hidden"))
        collector(LocalStore(source), AGE_S).collect()
    for nth in range(1, MAX_WRITES):
        shutil.copytree(source, root)
        store = LocalStore(root)
        was_killed = dies_at_write(root, nth, AGE_S if phase == "hide" else 0.0)
        check(store, is_finished=False)
        finish(store)
        check(store, is_finished=True)
        shutil.rmtree(root)
        if not was_killed:
            break
    assert 8 < nth < MAX_WRITES - 1


@pytest.mark.ci
def test_gc_killed_at_each_write_gives_back_what_is_wanted_again(template: Path, memory: Path) -> None:
    root = memory / "wanted"
    for nth in range(1, MAX_WRITES):
        shutil.copytree(template, root)
        lab = Lab()
        lab.clock.now_s = time.time()
        lab.store = LocalStore(root)
        was_killed = dies_at_write(root, nth, AGE_S)
        lab.post("again", GONE)
        let_the_lock_run_out(LocalStore(root))
        collector(LocalStore(root), AGE_S).collect()
        assert [job.key for job in GONE if not is_committed(lab.store, job.key)] == [], f"killed at write {nth}"
        lab.check_intact((*KEPT, *GONE))
        shutil.rmtree(root)
        if not was_killed:
            break
    assert 8 < nth < MAX_WRITES - 1


def started(root: Path, trash_grace: str) -> subprocess.Popen[bytes]:
    """The command itself, once it holds the lock."""
    arguments = ["gc", "--apply", "--grace", "1h", "--trash-grace", trash_grace, "--store", root.as_uri()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def kill_at_work(store: LocalStore, trash_grace: str, delay_s: float) -> bool:
    """Kill a collection so long after it began; false if it was done by then."""
    let_the_lock_run_out(store)
    before = store.get(LOCK) if store.exists(LOCK) else b""
    process = started(store.root, trash_grace)
    deadline_s = time.monotonic() + 60
    while process.poll() is None and (store.get(LOCK) if store.exists(LOCK) else b"") == before:
        assert time.monotonic() < deadline_s, "it never began"
    start_s = time.monotonic()
    while process.poll() is None and time.monotonic() < start_s + delay_s:
        pass
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in {0, -signal.SIGKILL}, errors.decode()
    return process.returncode != 0


def kill_again_and_again(source: Path, root: Path, num_kills: int) -> int:
    """Number of collections that were at work when they were killed."""
    seed = secrets.randbelow(2**32)
    print(f"kills drawn with seed {seed}")  # noqa: T201 - to repeat a failure
    draw = random.Random(seed)  # noqa: S311 - no secret
    store, num_struck = LocalStore(root), 0
    for number in range(num_kills):
        if number % 3 == 0:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(source, root)
        trash_grace = ("24h", "0s", "0s")[number % 3]
        num_struck += kill_at_work(store, trash_grace, draw.uniform(0.0, LONGEST_S))
        check(store, is_finished=False)
        if number % 3 == 2 or number == num_kills - 1:
            finish(store)
            check(store, is_finished=True)
    return num_struck


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_gc_command_killed_twice_is_finished_by_the_next(large: Path, memory: Path) -> None:
    kill_again_and_again(large, memory / "store", 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gc_command_killed_twenty_times_is_finished_by_the_next(large: Path, memory: Path) -> None:
    assert kill_again_and_again(large, memory / "store", 20) > 5
