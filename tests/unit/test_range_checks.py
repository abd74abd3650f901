"""Samples that are read by ranges: another content of the same size is noticed, damage on the way is not blamed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.errors import CorruptObjectError
from tests.data_jobs import DataPlane, encoded, tar_of
from tests.shard_cases import NUM_SAMPLES, SAMPLE_BYTES, CountingStore, sample, write_shards
from workloads.data.cache import ShardCache
from workloads.data.cache.folder import CacheSettings
from workloads.data.images import check_of

CHECKS = np.array([check_of(sample(0, row)) for row in range(NUM_SAMPLES)], dtype=np.uint32)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.fixture
def cache(store: CountingStore, tmp_path: Path) -> Iterator[ShardCache]:
    """Without room for a shard: every sample is read by a range."""
    shards = write_shards(store, 1)
    with ShardCache(store, tmp_path / "cache", shards, settings=CacheSettings(bytes=0)) as cache:
        yield cache


def read_all(cache: ShardCache, checks: np.ndarray | None = CHECKS) -> list[bytes]:
    offsets, lengths = np.arange(NUM_SAMPLES) * SAMPLE_BYTES, np.full(NUM_SAMPLES, SAMPLE_BYTES)
    return cache.read_batch(np.zeros(NUM_SAMPLES, dtype=np.int64), offsets, lengths, checks)


def test_check_is_the_lower_half_of_xxh3() -> None:
    assert check_of(b"") == 0x38D394C2  # of 2D06800538D394C2, which the specification's tests have for no input


def test_ranges_that_are_as_they_were_indexed_are_read_once(store: CountingStore, cache: ShardCache) -> None:
    assert read_all(cache) == [sample(0, row) for row in range(NUM_SAMPLES)]
    assert len(store.ranges) == 1


def test_shard_replaced_by_another_of_its_size_is_noticed(store: CountingStore, cache: ShardCache) -> None:
    content = bytearray(store.get("shards/000000.tar"))
    content[5 * SAMPLE_BYTES] ^= 1
    store.put("shards/000000.tar", bytes(content))
    with pytest.raises(CorruptObjectError, match=r"has other bytes at 5000-6000 than were indexed.*index the data set"):
        read_all(cache)
    assert cache.stats.snapshot()["damaged"] == 1


def test_range_damaged_on_its_way_is_read_again(store: CountingStore, cache: ShardCache) -> None:
    def once(found: bytes) -> bytes:
        store.change = lambda content: content
        return b"\0" + found[1:]

    store.change = once
    assert read_all(cache) == [sample(0, row) for row in range(NUM_SAMPLES)]
    assert len(store.ranges) == 2
    assert cache.stats.snapshot()["damaged"] == 1


def test_samples_of_an_index_without_checks_are_taken_as_they_are(store: CountingStore, cache: ShardCache) -> None:
    store.change = lambda found: b"\0" + found[1:]
    assert read_all(cache, None)[0][:1] == b"\0"


def test_index_has_the_check_of_every_image(tmp_path: Path) -> None:
    images = [encoded("JPEG", seed=seed) for seed in range(4)]
    members = [
        (f"{row}.{extension}", content)
        for row in range(4)
        for extension, content in (("cls", b"0"), ("jpg", images[row]))
    ]
    plane = DataPlane(folder=tmp_path)
    split = plane.index(plane.foreign({"train-0.tar": tar_of(members)})).split("train")
    assert split.checks is not None
    assert split.checks.tolist() == [check_of(image) for image in images]
