"""Samples from S3 through the node's cache, against raw requests for the same shards that throw the bytes away."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server
from orchestrator.storage.digests import digests_of
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.store import S3Store
from tests.benchmarks.s3_arms import MIB, NUM_ROUNDS, Arm, in_parallel, open_server, raw_get, run
from tests.s3_proxy import Damage, Faults, faulty_proxy
from tests.shard_cases import Fleet, Run, write_shards
from workloads.data.cache import ShardCache
from workloads.data.cache.folder import CacheSettings
from workloads.data.index import Shard

pytestmark = pytest.mark.bench

NUM_SHARDS = 8
SHARD_BYTES = 64 * MIB
SAMPLE_BYTES = 128 * 1024
BLOCK_SHARDS = 2
BATCH_SIZE = 64
DATA_BYTES = NUM_SHARDS * SHARD_BYTES
SMALL_BYTES = 100_000


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[S3Server]:
    with open_server(tmp_path / "server", monkeypatch) as found:
        yield found


@pytest.fixture
def proxy(server) -> Iterator[tuple[str, Faults]]:
    with faulty_proxy(server.endpoint_url) as found:
        yield found


@pytest.fixture
def shards(server) -> list[Shard]:
    store, found = S3Store(BUCKET, "ours"), []
    for shard_id in range(NUM_SHARDS):
        content, name = os.urandom(SHARD_BYTES), f"shards/{shard_id:06d}.tar"
        store.put(name, content)
        digests = digests_of(content)
        found.append(
            Shard(
                name=name,
                object_name=name,
                size_bytes=SHARD_BYTES,
                sha256=digests.sha256,
                num_samples=SHARD_BYTES,
                blake3=digests.blake3,
            )
        )
    return found


def test_shard_cache_streaming_rate_against_raw_requests(
    server: S3Server, proxy: tuple[str, Faults], shards: list[Shard], tmp_path: Path
) -> None:
    """Asked: >= 0.85 of ``raw``; with 5 % of 503s (``proxy, 503s``) >= 0.8 of what the same way carries without."""
    url, faults = proxy
    direct, through = S3Store(BUCKET, "ours"), S3Store(BUCKET, "ours", S3Settings(endpoint_url=url))
    folder, rng = tmp_path / "cache", random.Random(0)  # noqa: S311 - faults, no secrets

    def fault(method: str, _path: str) -> Damage | None:
        return Damage.THROTTLED if method == "GET" and rng.random() < 0.05 else None

    def streamed(store: S3Store, schedule: Callable[[str, str], Damage | None]) -> Callable[[], None]:
        def stream() -> None:
            faults.schedule = schedule
            read_epoch(store, folder, shards)

        return stream

    def clean(_method: str, _path: str) -> None:
        return None

    moves = {
        "raw": lambda: in_parallel(lambda shard_id: raw_get(server, key(shards, shard_id), ignore), range(NUM_SHARDS)),
        "raw ranges": lambda: in_parallel(lambda part: raw_range(server, shards, part), range(4 * NUM_SHARDS)),
        "ours": streamed(direct, clean),
        "proxy": streamed(through, clean),
        "proxy, 503s": streamed(through, fault),
    }
    arms = {
        name: Arm(move, DATA_BYTES, before=lambda: shutil.rmtree(folder, ignore_errors=True))
        for name, move in moves.items()
    }
    run(arms, server, ["raw", "raw ranges", "proxy"])


def read_epoch(store: S3Store, folder: Path, shards: list[Shard]) -> None:
    """All samples once, fully shuffled within blocks of shards, as training asks for them."""
    rng, per_shard = np.random.default_rng(0), SHARD_BYTES // SAMPLE_BYTES
    order = rng.permutation(len(shards))
    with ShardCache(store, folder, shards, settings=CacheSettings(bytes=10 * DATA_BYTES)) as cache:
        for first in range(0, len(shards), BLOCK_SHARDS):
            cache.prefetch(order[first : first + 2 * BLOCK_SHARDS])
            block = order[first : first + BLOCK_SHARDS]
            places = rng.permutation(len(block) * per_shard)
            for start in range(0, len(places), BATCH_SIZE):
                batch = places[start : start + BATCH_SIZE]
                offsets = batch % per_shard * SAMPLE_BYTES
                found = cache.read_batch(block[batch // per_shard], offsets, np.full(len(batch), SAMPLE_BYTES))
                assert len(found) == len(batch)
        assert cache.stats.snapshot()["bytes_served"] == DATA_BYTES


def test_shard_cache_eight_runs_fetch_each_shard_once(server: S3Server, tmp_path: Path) -> None:
    """Asked: bytes from the store <= 1.02 of the data set per epoch."""
    store = S3Store(BUCKET, "eight")
    shards = write_shards(store, 16, SMALL_BYTES)
    data_bytes = sum(shard.size_bytes for shard in shards)
    for number in range(NUM_ROUNDS):
        work = Run(
            store_uri=store.uri,
            cache=str(tmp_path / f"cache{number}"),
            num_shards=len(shards),
            sample_bytes=SMALL_BYTES,
            num_processes=8,
        )
        counters = Fleet(work).counters()
        from_store, served = (sum(each[name] for each in counters) for name in ("bytes_from_store", "bytes_served"))
        print(f"bytes from the store {from_store / data_bytes:.3f} of the data set, served {served / data_bytes:.0f}")  # noqa: T201 - a benchmark's result
        assert from_store <= 1.02 * data_bytes


def key(shards: list[Shard], shard_id: int) -> str:
    return f"ours/{shards[shard_id].object_name}"


def raw_range(server: S3Server, shards: list[Shard], part: int) -> None:
    start = part % 4 * SHARD_BYTES // 4
    raw_get(server, key(shards, part // 4), ignore, (start, start + SHARD_BYTES // 4))


def ignore(_: object) -> None:
    """Drop a chunk."""
