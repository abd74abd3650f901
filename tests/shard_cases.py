"""Shards whose samples anybody can check, stores that count, and a process that reads them as a run does."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from pathlib import Path
from typing import IO, Any

import numpy as np

from orchestrator.storage import ObjectStore, bulk, open_store
from orchestrator.storage.digests import digests_of
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from tests.waiting import wait_until
from workloads.data.cache import ShardCache
from workloads.data.index import Shard

ROOT = Path(__file__).parents[1]
SAMPLE_BYTES = 1000
NUM_SAMPLES = 20
SHARD_BYTES = SAMPLE_BYTES * NUM_SAMPLES
DIED, DONE = -9, 0
DEADLINE_S = 30.0


def sample(shard_id: int, row: int, sample_bytes: int = SAMPLE_BYTES) -> bytes:
    """The bytes that a sample must have."""
    return shake_128(f"{shard_id}/{row}".encode()).digest(sample_bytes)


def content(shard_id: int, sample_bytes: int = SAMPLE_BYTES) -> bytes:
    """All samples of a shard, one after the other."""
    return b"".join(sample(shard_id, row, sample_bytes) for row in range(NUM_SAMPLES))


def shard_of(shard_id: int, sample_bytes: int = SAMPLE_BYTES) -> Shard:
    """A shard as the index names it."""
    found = content(shard_id, sample_bytes)
    digests = digests_of(found)
    return Shard(
        name=f"{shard_id:06d}.tar",
        object_name=f"shards/{shard_id:06d}.tar",
        size_bytes=len(found),
        sha256=digests.sha256,
        blake3=digests.blake3,
        num_samples=NUM_SAMPLES,
    )


def write_shards(store: ObjectStore, num_shards: int, sample_bytes: int = SAMPLE_BYTES) -> list[Shard]:
    """Put shards into a store."""
    for shard_id in range(num_shards):
        store.put(f"shards/{shard_id:06d}.tar", content(shard_id, sample_bytes))
    return [shard_of(shard_id, sample_bytes) for shard_id in range(num_shards)]


def read(cache: ShardCache, shard_id: int, row: int) -> bytes:
    """One sample."""
    return cache.read_samples(shard_id, [row * SAMPLE_BYTES], [SAMPLE_BYTES])[0]


def eventually(condition: Callable[[], object]) -> None:
    """Wait for what other threads do."""
    wait_until(condition, deadline_s=DEADLINE_S, pause_s=0.0)


@dataclass(slots=True)
class Gate:
    """Lets readers of a store through, or holds them; tells how many have come."""

    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(timeout=60)


class CountingStore(LocalStore):
    """Remembers every request; ``before`` is called with each ranged read's name, ``change`` with what it answers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[str] = []
        self.stats: list[str] = []
        self.before: Callable[[str], None] = lambda _: None
        self.change: Callable[[bytes], bytes] = lambda found: found

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self.ranges.append(name)
        self.before(name)
        return self.change(super().get_range(name, start, length))

    def stat(self, name: str) -> ObjectStat:
        self.stats.append(f"{threading.current_thread().name} {name}")
        return super().stat(name)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a process of a fleet does: read all samples of all shards in an order of its own, block by block."""

    store_uri: str
    cache: str
    num_shards: int
    sample_bytes: int = SAMPLE_BYTES
    block_shards: int = 4
    num_processes: int = 1
    stop_after: int = -1
    """Pieces of the first download after which the process says so and waits for ever; -1: none."""
    stalled_s: float = 150.0


class Fleet:
    """Processes of one run each; they print a line per shard read and at the end their counters."""

    def __init__(self, run: Run, *, cache_bytes: int | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if cache_bytes is not None:
            environment["ORCHESTRATOR_CACHE_BYTES"] = str(cache_bytes)
        command = [sys.executable, "-m", "tests.shard_cases", json.dumps(vars(run))]
        self.child = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    @property
    def lines(self) -> IO[str]:
        assert self.child.stdout is not None
        return self.child.stdout

    def counters(self) -> list[dict[str, float]]:
        """Of each process, once all have ended well."""
        found = [json.loads(line) for line in self.lines.read().splitlines() if line.startswith("{")]
        assert self.child.wait(timeout=100) == DONE
        return found

    def wait_for(self, line: str) -> None:
        """Until a process says so."""
        assert any(found.strip() == line for found in self.lines), f"ended before it said {line}"


def _read_all(run: Run, seed: int) -> None:
    store, rng = open_store(run.store_uri), random.Random(seed)  # noqa: S311 - an order, no secret
    if run.stop_after >= 0:
        _stop_in(run.stop_after)
    order = rng.sample(range(run.num_shards), run.num_shards)
    shards = [shard_of(shard_id, run.sample_bytes) for shard_id in range(run.num_shards)]
    with ShardCache(store, Path(run.cache), shards, stalled_s=run.stalled_s) as cache:
        for start in range(0, run.num_shards, run.block_shards):
            cache.prefetch(order[start : start + 2 * run.block_shards])
            _read_block(cache, order[start : start + run.block_shards], run.sample_bytes, rng)
        say(json.dumps(cache.stats.snapshot()))


def _read_block(cache: ShardCache, shard_ids: Sequence[int], sample_bytes: int, rng: random.Random) -> None:
    places = [(shard_id, row) for shard_id in shard_ids for row in range(NUM_SAMPLES)]
    rng.shuffle(places)
    for first in range(0, len(places), 16):
        batch = np.array(places[first : first + 16], dtype=np.int64)
        lengths = np.full(len(batch), sample_bytes)
        found = cache.read_batch(batch[:, 0], batch[:, 1] * sample_bytes, lengths)
        assert found == [sample(shard_id, row, sample_bytes) for shard_id, row in batch.tolist()]
        say("batch")


def _stop_in(num_pieces: int) -> None:
    """From now on the n-th piece that arrives is this process's last."""
    from workloads.data.cache import objects

    fetch, left = bulk.fetch, iter([*range(num_pieces), -1])

    def slow(*args: Any, arrived: Callable[[int], None], **given: Any) -> str:
        def stop(num_bytes: int) -> None:
            arrived(num_bytes)
            if next(left, -1) == -1:  # the other thread stops, too
                say("in the middle")
                threading.Event().wait()

        stop(0)
        return fetch(*args, arrived=stop, **given)

    vars(objects)["fetch"] = slow


def say(line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    os.write(1, f"{line}\n".encode())


def main(run: Run) -> int:
    """Fork the processes after all imports, which take longer than everything else; the worst exit code."""
    children = []
    for seed in range(run.num_processes):
        child = os.fork() if run.num_processes > 1 else 0
        if child == 0:
            _read_all(run, seed)
            if run.num_processes == 1:
                return DONE
            os._exit(DONE)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Run(**json.loads(sys.argv[1]))))
