"""The node's object cache."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.contract import Execution, ExecutionContext
from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.bulk import fetch
from orchestrator.storage.digests import digests_of
from orchestrator.storage.local import LocalStore
from tests.data_jobs import DataPlane
from workloads.data.cache import ObjectCache
from workloads.data.cache.folder import CacheSettings
from workloads.data.scan_splits import most_queued
from workloads.jobs.index import _artifact_shards

CONTENT = b"shard" * 1000
DIGEST = digests_of(CONTENT)


class CountingStore(LocalStore):
    """Counts ranged reads."""

    num_reads = 0

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self.num_reads += 1
        return super().get_range(name, start, length)


def test_index_cache_concurrent_readers_share_one_download(tmp_path: Path) -> None:
    store, readers = CountingStore(tmp_path / "store"), threading.Barrier(8)
    store.put("a.tar", CONTENT)

    def read(_: int) -> bytes:
        cache = ObjectCache(store, tmp_path / "cache")
        readers.wait(timeout=30)
        return cache.path("a.tar", size_bytes=len(CONTENT), digests=DIGEST).read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [CONTENT] * 8
    assert store.num_reads == 1


def test_index_cache_altered_object_is_refused_and_not_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT[:-1] + b"?")
    with pytest.raises(CorruptObjectError, match=r"a\.tar .* has blake3"):
        ObjectCache(store, tmp_path / "cache").path("a.tar", size_bytes=len(CONTENT), digests=DIGEST)
    assert not list((tmp_path / "cache" / "objects").iterdir())


def test_index_cache_torn_file_is_downloaded_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT)
    cache = ObjectCache(store, tmp_path / "cache")
    torn = cache.path("a.tar", size_bytes=len(CONTENT), digests=DIGEST)
    torn.chmod(0o600)
    torn.write_bytes(b"")
    assert cache.path("a.tar", size_bytes=len(CONTENT), digests=DIGEST).read_bytes() == CONTENT


def test_index_cache_hit_needs_no_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT)
    cache = ObjectCache(store, tmp_path / "cache")
    cache.path("a.tar", size_bytes=len(CONTENT), digests=DIGEST)
    store.delete("a.tar")
    assert cache.path("renamed.tar", size_bytes=len(CONTENT), digests=DIGEST).read_bytes() == CONTENT


def test_index_cache_missing_object_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ObjectCache(LocalStore(tmp_path / "store"), tmp_path / "cache").path("a.tar", size_bytes=1, digests=DIGEST)


def test_index_cache_mapped_column_outlives_its_eviction(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT)
    cache = ObjectCache(store, tmp_path / "cache")
    path = cache.path("a.tar", size_bytes=len(CONTENT), digests=DIGEST)
    column = np.memmap(path, dtype=np.uint8, mode="r")
    path.unlink()
    assert column.tobytes() == CONTENT


def test_index_cache_keeps_the_last_paths_and_no_more(tmp_path: Path) -> None:
    store, contents = LocalStore(tmp_path / "store"), [f"{number:04d}".encode() for number in range(40)]
    cache = ObjectCache(store, tmp_path / "cache", settings=CacheSettings(bytes=0))
    paths = []
    for number, content in enumerate(contents):
        store.put(f"{number}", content)
        paths.append(cache.path(f"{number}", size_bytes=4, digests=digests_of(content)))
    assert [path.exists() for path in paths] == [False] * 7 + [True] * 33


def test_index_job_keeps_all_shards_that_its_processes_have_not_scanned_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 processes have 40 shards in their queue; the cache has room for none."""
    monkeypatch.setenv("ORCHESTRATOR_CACHE_BYTES", "0")
    plane = DataPlane(folder=tmp_path)
    shards = {f"train-{number:06d}.tar": f"{number:04d}".encode() for number in range(41)}
    request = plane.request(JobKind.INDEX, {}, {"dataset": plane.foreign(shards)})
    request = replace(request, execution=Execution(num_threads=20))
    context, paths = ExecutionContext(store=plane.store, scratch=tmp_path, cache=plane.cache), list[Path]()
    for source in islice(_artifact_shards(request, context).sources, most_queued(20)):
        assert source.path is not None
        paths.append(source.path)
    assert [path.exists() for path in paths] == [True] * 40


@pytest.mark.parametrize("size_bytes", [0, 1, 4 * 1024**2, 10 * 1024**2 + 1])
def test_fetch_into_a_file_in_memory_gives_the_sha256_of_what_arrived(size_bytes: int, tmp_path: Path) -> None:
    store, content = LocalStore(tmp_path / "store"), random.Random(0).randbytes(size_bytes)  # noqa: S311 - no secret
    store.put("a", content)
    descriptor, arrived = os.memfd_create("a"), list[int]()
    found = fetch(store, "a", descriptor, size_bytes=size_bytes, arrived=arrived.append)
    assert found == sha256(content).hexdigest()
    assert os.pread(descriptor, size_bytes + 1, 0) == content
    assert sum(arrived) == size_bytes
    with pytest.raises(CorruptObjectError, match="its record says"):
        fetch(store, "a", descriptor, size_bytes=size_bytes + 1)
    os.close(descriptor)
