"""Shards and large objects from a real S3 server, through a proxy that damages what a test tells it to."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from urllib3.connectionpool import HTTPConnectionPool

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.storage.bulk import fetch
from orchestrator.storage.s3.store import S3Store
from tests.s3_proxy import Damage, Faults
from tests.s3_server import SMALL_PARTS_BYTES, faults, proxy, s3_server, s3_store, store
from tests.shard_cases import NUM_SAMPLES, sample, write_shards
from workloads.data.cache import ShardCache
from workloads.data.cache.folder import CacheSettings

__all__ = ["faults", "proxy", "s3_server", "store"]

SAMPLE_BYTES = 270_000
SHARD_BYTES = NUM_SAMPLES * SAMPLE_BYTES
"""Two parts: the smallest that shows ranges in parallel."""
LARGE_BYTES = 4 * SMALL_PARTS_BYTES - 7


@pytest.fixture
def descriptor() -> Iterator[int]:
    found = os.memfd_create("target")
    yield found
    os.close(found)


def read_everything(cache: ShardCache, num_shards: int) -> None:
    """All samples in batches over all shards, and see that they are right."""
    shard_ids, rows = np.divmod(np.random.default_rng(0).permutation(num_shards * NUM_SAMPLES), NUM_SAMPLES)
    for start in range(0, len(rows), 16):
        batch = slice(start, start + 16)
        lengths = np.full(len(rows[batch]), SAMPLE_BYTES)
        found = cache.read_batch(shard_ids[batch], rows[batch] * SAMPLE_BYTES, lengths)
        places = zip(shard_ids[batch].tolist(), rows[batch].tolist(), strict=True)
        assert found == [sample(shard_id, row, SAMPLE_BYTES) for shard_id, row in places]


@pytest.mark.parametrize("room", [10, 2, 0])
def test_shard_cache_of_any_size_reads_s3_right_while_requests_fail(
    room: int, store: S3Store, faults: Faults, tmp_path: Path
) -> None:
    shards = write_shards(store, 3, SAMPLE_BYTES)
    seen = itertools.count()
    kinds = (Damage.THROTTLED, Damage.RESET, Damage.ANSWER_TRUNCATED)
    faults.schedule = lambda method, _path: (
        kinds[n // 5 % 3] if method == "GET" and (n := next(seen)) % 5 == 1 else None
    )
    limit = CacheSettings(bytes=room * SHARD_BYTES)
    with ShardCache(store, tmp_path / "cache", shards, settings=limit) as cache:
        cache.prefetch(range(3))
        read_everything(cache, 3)
        found = cache.stats.snapshot()
        assert found["downloads"] >= min(room, 3)
        assert (found["ranged_reads"] == 0) == (room == 10)


def test_shard_cache_bits_flipped_on_the_way_are_fetched_again(store: S3Store, faults: Faults, tmp_path: Path) -> None:
    shards = write_shards(store, 1, SAMPLE_BYTES)
    faults.damage_next("GET", Damage.ANSWER_FLIPPED)
    with ShardCache(store, tmp_path / "cache", shards, settings=CacheSettings(bytes=10**9)) as cache:
        assert cache.read_samples(0, [0], [SAMPLE_BYTES]) == [sample(0, 0, SAMPLE_BYTES)]
        assert cache.stats.snapshot()["bytes_from_store"] == 2 * SHARD_BYTES
        faults.damage_all("GET", Damage.ANSWER_FLIPPED)
        (path,) = (tmp_path / "cache" / "objects").iterdir()
        path.unlink()
        cache.prefetch([])
        with pytest.raises(CorruptObjectError, match=shards[0].object_name):
            cache.pin(0)


def test_fetch_of_a_large_object_is_whole_whatever_is_lost(store: S3Store, faults: Faults, descriptor: int) -> None:
    content = random.Random(0).randbytes(LARGE_BYTES)  # noqa: S311 - no secret
    store.put("large", content)
    faults.damage_next("GET", Damage.ANSWER_TRUNCATED, Damage.THROTTLED, Damage.RESET, Damage.ANSWER_TRUNCATED)
    found = fetch(store, "large", descriptor, size_bytes=LARGE_BYTES)
    assert found == sha256(content).hexdigest()
    assert os.pread(descriptor, LARGE_BYTES + 1, 0) == content


def test_fetch_after_a_lost_connection_asks_only_for_what_is_missing(
    store: S3Store, faults: Faults, descriptor: int, monkeypatch
) -> None:
    store.put("large", bytes(LARGE_BYTES))
    asked: list[str] = []
    bucket = store._bucket
    read_once = type(bucket).read_once

    def note(self, operation, key, read, **parameters):
        asked.append(str(parameters.get("Range")))
        return read_once(self, operation, key, read, **parameters)

    monkeypatch.setattr(type(bucket), "read_once", note)
    faults.damage_next("GET", Damage.ANSWER_TRUNCATED)
    fetch(store, "large", descriptor, size_bytes=LARGE_BYTES)
    starts = sorted(int(found.removeprefix("bytes=").split("-")[0]) for found in asked if found.startswith("bytes="))
    whole = [start for start in starts if start % SMALL_PARTS_BYTES == 0]
    (resumed,) = set(starts) - set(whole)
    assert len(whole) == len(set(whole)) == 4
    assert resumed % SMALL_PARTS_BYTES >= SMALL_PARTS_BYTES // 2 - 300_000


def test_fetch_of_an_object_that_is_not_what_it_was_is_refused(
    store: S3Store, faults: Faults, descriptor: int, tmp_path: Path
) -> None:
    store.put("large", bytes(LARGE_BYTES))
    with pytest.raises(CorruptObjectError, match=rf"large.*{LARGE_BYTES} bytes"):
        fetch(store, "large", descriptor, size_bytes=LARGE_BYTES - 1)
    with pytest.raises(NotFoundError):
        fetch(store, "larger", descriptor, size_bytes=1)
    seen = itertools.count()

    def replace_after_the_first_range(method: str, _path: str) -> None:
        if method == "GET" and next(seen) == 1:
            s3_store(tmp_path).put("large", b"1" * LARGE_BYTES)

    faults.schedule = replace_after_the_first_range
    with pytest.raises(CorruptObjectError, match="large was replaced"):
        fetch(store, "large", descriptor, size_bytes=LARGE_BYTES)


def test_fetch_that_is_given_up_ends_and_frees_its_connections(store: S3Store, faults: Faults, descriptor: int) -> None:
    class LeftError(Exception):
        pass

    def leave(_: int) -> None:
        raise LeftError

    store.put("large", bytes(LARGE_BYTES))
    for _ in range(12):  # of 32 connections in all
        with pytest.raises(LeftError):
            fetch(store, "large", descriptor, size_bytes=LARGE_BYTES, arrived=leave)
    assert fetch(store, "large", descriptor, size_bytes=LARGE_BYTES) == sha256(bytes(LARGE_BYTES)).hexdigest()


def test_fetch_uses_its_connections_again(store: S3Store, faults: Faults, descriptor: int, monkeypatch) -> None:
    made: list[object] = []
    make = HTTPConnectionPool._new_conn

    def note(pool: HTTPConnectionPool) -> object:
        made.append(pool)
        return make(pool)

    monkeypatch.setattr(HTTPConnectionPool, "_new_conn", note)
    store.put("large", bytes(LARGE_BYTES))
    for _ in range(5):
        fetch(store, "large", descriptor, size_bytes=LARGE_BYTES)
    assert len(made) <= 5  # four at once; a fifth where one is given back a moment too late
