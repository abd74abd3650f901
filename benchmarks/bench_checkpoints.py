"""What saving costs training: the pause of the loop, its speed while a checkpoint is written, and memory."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from orchestrator.stack.description import BUCKET
from orchestrator.storage import ObjectStore, open_store
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from tests.checkpoint_cases import KEY, resident_bytes, save_at_once
from tests.s3_server import s3_server
from workloads.checkpoint.snapshot import Snapshot
from workloads.checkpoint.store import Checkpoint, CheckpointFolder
from workloads.checkpoint.writer import CheckpointWriter
from workloads.train.optim import optimizer_tensors
from workloads.train.saver import NodeCopies

# ---------------------------------------------------------------------------------------------------------------------
# What saving costs training: the pause of the loop, its speed while a checkpoint is written, and memory.

__all__ = ["s3_server"]


NUM_ROUNDS = 9
NUM_RATE_ROUNDS = 7
MIB = 1024**2
TRAINING_CORE, WRITING_CORE = 0, 1
WRITER_SCRIPT = """
import hashlib
import sys
from pathlib import Path
from orchestrator.storage import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    folder, *paths = line.split()
    for number, path in enumerate(map(Path, paths)):
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")
        store.put_file(f"{folder}/{number}", path)
    store.put(f"{folder}/manifest.json", b"{}")
    print("done", flush=True)
"""


class Trained:
    """A network of many small and a few large tensors with Adam's state: three numbers per weight."""

    def __init__(self, width: int = 320, depth: int = 10) -> None:
        layers = [nn.TransformerEncoderLayer(width, 5, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._inputs = torch.randn(2, 16, width)
        self.steps = 0
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def checkpoint(self) -> Checkpoint:
        optimizer = optimizer_tensors(self.optimizer, self.model)
        return Checkpoint(step=self.steps, model=self.model.state_dict(), optimizer=optimizer, state={})

    def tensors(self) -> dict[str, Tensor]:
        checkpoint = self.checkpoint()
        return {**checkpoint.model, **checkpoint.optimizer}


class PinnedStore:
    """Writes on the other core: every write of a checkpoint's thread puts that thread there."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, name: str, content: bytes) -> ObjectStat:
        os.sched_setaffinity(0, {WRITING_CORE})
        return self._store.put(name, content)


@pytest.fixture
def pinned() -> Iterator[None]:
    """This thread on one core with one thread of torch; two cores are needed."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    if not {TRAINING_CORE, WRITING_CORE} <= before:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, {TRAINING_CORE})
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, before)


def pinned_writer(store: ObjectStore) -> CheckpointWriter:
    return CheckpointWriter(CheckpointFolder(cast("ObjectStore", PinnedStore(store)), KEY))


def save(writer: CheckpointWriter, trained: Trained) -> None:
    """With a metrics segment, as in training: the write that comes first."""
    writer.save(trained.checkpoint(), before={"metrics/segment.jsonl": b"{}\n"})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoint_stall_beside_memcpy_and_synchronous_and_dcp(pinned: None, tmp_path: Path) -> None:
    """Asked: <= 1.25x a memcpy of the state, <= 1/15 of a synchronous torch.save + fsync + upload."""
    trained, store = Trained(), LocalStore(tmp_path / "store")
    writer = pinned_writer(store)
    size_bytes = sum(tensor.nbytes for tensor in trained.tensors().values())
    source, target = (torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2))
    arms: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes),
        "save()": lambda: save(writer, trained),
        "synchronous": lambda: save_synchronously(trained, store, tmp_path / "file.pt"),
        "dcp.async_save": lambda: save_with_dcp(trained, tmp_path / "dcp"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(NUM_ROUNDS + 1):
        for name, arm in arms.items():
            trained.step()
            started_s = time.perf_counter()
            unfinished = arm()
            if number:  # the first round makes memory
                seconds[name].append(time.perf_counter() - started_s)
            writer.drain()
            if isinstance(unfinished, Future):
                unfinished.result()
    writer.close()
    say("state", f"{size_bytes / MIB:.0f} MiB in {len(trained.tensors())} tensors")
    for name, values in seconds.items():
        ratios = [mine / plain for mine, plain in zip(seconds["save()"], values, strict=True)]
        say(name, f"{1000 * statistics.median(values):8.1f} ms   save() is {statistics.median(ratios):7.4f} of it")


def save_synchronously(trained: Trained, store: LocalStore, path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    store.put_file("synchronous", path)


def save_with_dcp(trained: Trained, folder: Path) -> object:
    return async_save(trained.tensors(), checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_checkpoint_step_rate_while_it_is_written(
    pinned: None, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Asked: >= 0.90 of the undisturbed rate. A process in place of the thread for comparison."""
    trained = Trained()
    store = open_store(_uri(kind, tmp_path, request))
    writer, snapshot = pinned_writer(store), Snapshot()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER_SCRIPT, store.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        os.sched_setaffinity(process.pid, {WRITING_CORE})
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        assert stdout.readline() == "ready\n"
        os.set_blocking(stdout.fileno(), False)

        def start_process() -> Callable[[], bool]:
            checkpoint = trained.checkpoint()
            snapshot.fit(checkpoint)
            snapshot.take(checkpoint)
            paths = [str(file.path).replace("self", str(os.getpid())) for file in snapshot.files.values()]
            print("bench", *paths, file=stdin, flush=True)
            return lambda: stdout.readline() == "done\n"

        def start_thread() -> Callable[[], bool]:
            save(writer, trained)
            return lambda: writer._settle(0.0)

        shares: dict[str, list[Shares]] = {"thread": [], "process": []}
        for number in range(NUM_RATE_ROUNDS + 1):
            for name, start in (("thread", start_thread), ("process", start_process)):
                before = Lap()
                steps(trained, 15)
                before.end()
                is_done = start()
                during = Lap()
                count = 0
                while not is_done():
                    trained.step()
                    count += 1
                during.end()
                after = Lap()
                steps(trained, 15)
                after.end()
                if number and count:
                    shares[name].append(Shares.of(before, during, after, count / 30))
        stdin.close()
    writer.close()
    for name, values in shares.items():
        wall, alone, write_s = (statistics.median(each) for each in zip(*map(astuple, values), strict=True))
        say(
            f"{kind} {name}",
            f"{wall:.3f} of the undisturbed rate, {alone:.3f} without waiting for a core that others had, "
            f"during {write_s:.2f} s (asked 0.90)",
        )


class Lap:
    """Seconds until ``end``, and those of them in which this thread could have run and something else did."""

    def __init__(self) -> None:
        self.wall_s, self.queued_s = -time.perf_counter(), -queued_s()

    def end(self) -> None:
        self.wall_s += time.perf_counter()
        self.queued_s += queued_s()

    @property
    def alone_s(self) -> float:
        return self.wall_s - self.queued_s


@dataclass(frozen=True)
class Shares:
    """Step rate while a checkpoint is written, relative to before and after."""

    wall: float
    alone: float
    write_s: float

    @classmethod
    def of(cls, before: Lap, during: Lap, after: Lap, factor: float) -> Shares:
        wall = factor * (before.wall_s + after.wall_s) / during.wall_s
        alone = factor * (before.alone_s + after.alone_s) / during.alone_s
        return cls(wall, alone, during.wall_s)


def queued_s() -> float:
    """How long this thread has waited for its core so far (see proc(5), schedstat)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _uri(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    if kind == "local":
        return (folder / "store").as_uri()
    os.sched_setaffinity(0, {WRITING_CORE})  # which the server inherits
    request.getfixturevalue("s3_server")
    os.sched_setaffinity(0, {TRAINING_CORE})
    return f"s3://{BUCKET}/bench"


def steps(trained: Trained, count: int) -> None:
    for _ in range(count):
        trained.step()


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_checkpoint_memory_beyond_one_copy(
    pinned: None, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Asked: at most one extra copy of the state plus 64 MiB, in saving and in loading."""
    trained, folder = Trained(), CheckpointFolder(open_store(_uri(kind, tmp_path, request)), KEY)
    size_bytes = sum(tensor.nbytes for tensor in trained.tensors().values())
    for name, work in (("saving", lambda: save_all(folder, trained)), ("loading", lambda: touch(folder))):
        resting = resident_bytes()
        with watch_resident() as peak:
            work()
        beyond = (max(peak) - resting - size_bytes) / MIB
        say(f"{kind} {name}", f"state of {size_bytes / MIB:.0f} MiB: one copy and {beyond:.0f} MiB (asked 64)")


class NarrowStore(LocalStore):
    """A store that sends a node 200 MB/s, however many ask."""

    line = Lock()

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self.line:
            time.sleep(length / 200e6)
        return super().get_range(name, start, length)


def test_checkpoint_load_by_eight_ranks_of_a_node(tmp_path: Path) -> None:
    """Asked: each object once per node. Ranks are threads here."""
    store = NarrowStore(tmp_path / "store")
    model = {f"layer{number}": torch.rand(1_000_000) for number in range(16)}
    save_at_once(CheckpointFolder(store, KEY), Checkpoint(step=1, model=model, optimizer={}, state={}))
    spent_s = {}
    for arm in ("each for itself", "once per node"):

        def load(_rank: int, arm: str = arm) -> None:
            copies = NodeCopies(store, tmp_path / "cache")
            copy = copies.copy if arm == "once per node" else None
            assert CheckpointFolder(store, KEY, copy=copy).load_newest() is not None

        started_s = time.perf_counter()
        with ThreadPoolExecutor(8) as ranks:
            list(ranks.map(load, range(8)))
        spent_s[arm] = time.perf_counter() - started_s
        say(f"64 MB by 8 ranks of a node at 200 MB/s, {arm}", f"{spent_s[arm]:.2f} s")
    before_s, after_s = spent_s.values()
    say("ratio", f"{before_s / after_s:.1f}")


@contextmanager
def watch_resident() -> Iterator[list[int]]:
    samples, done = [resident_bytes()], Event()

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(resident_bytes())

    thread = Thread(target=sample, daemon=True)
    thread.start()
    yield samples
    done.set()
    thread.join()


def save_all(folder: CheckpointFolder, trained: Trained) -> None:
    writer = CheckpointWriter(folder)
    for _ in range(3):
        save(writer, trained)
    writer.close()


def touch(folder: CheckpointFolder) -> None:
    checkpoint = folder.load_newest()
    assert checkpoint is not None
    json.dumps([float(t.sum()) for t in (*checkpoint.model.values(), *checkpoint.optimizer.values())])


def say(name: str, value: str) -> None:
    print(f"{name:16} {value}")  # noqa: T201 - a benchmark's result
