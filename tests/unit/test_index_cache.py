"""The node's object cache."""

import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.errors import CorruptObjectError, NotFoundError
from orchestrator.storage.local import LocalStore
from workloads.data.cache import ObjectCache

CONTENT = b"shard" * 1000
DIGEST = sha256(CONTENT).hexdigest()


class CountingStore(LocalStore):
    """Counts downloads and lets the first one wait until the others have asked."""

    def __init__(self, root: Path, num_readers: int) -> None:
        super().__init__(root)
        self.num_downloads = 0
        self.readers = threading.Barrier(num_readers)

    def download(self, name: str, path: Path) -> None:
        self.num_downloads += 1
        super().download(name, path)


def test_index_cache_concurrent_readers_share_one_download(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "store", 8)
    store.put("a.tar", CONTENT)

    def read(_: int) -> bytes:
        cache = ObjectCache(store, tmp_path / "cache")
        store.readers.wait(timeout=30)
        return cache.path("a.tar", size_bytes=len(CONTENT), sha256=DIGEST).read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [CONTENT] * 8
    assert store.num_downloads == 1


def test_index_cache_altered_object_is_refused_and_not_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT[:-1] + b"?")
    with pytest.raises(CorruptObjectError, match=r"a\.tar .* has sha256"):
        ObjectCache(store, tmp_path / "cache").path("a.tar", size_bytes=len(CONTENT), sha256=DIGEST)
    assert not list((tmp_path / "cache" / "objects" / DIGEST[:2]).iterdir())


def test_index_cache_torn_file_is_downloaded_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT)
    cache = ObjectCache(store, tmp_path / "cache")
    cache.path("a.tar", size_bytes=len(CONTENT), sha256=DIGEST).write_bytes(b"")
    assert cache.path("a.tar", size_bytes=len(CONTENT), sha256=DIGEST).read_bytes() == CONTENT


def test_index_cache_hit_needs_no_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a.tar", CONTENT)
    cache = ObjectCache(store, tmp_path / "cache")
    cache.path("a.tar", size_bytes=len(CONTENT), sha256=DIGEST)
    store.delete("a.tar")
    assert cache.path("renamed.tar", size_bytes=len(CONTENT), sha256=DIGEST).read_bytes() == CONTENT


def test_index_cache_missing_object_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ObjectCache(LocalStore(tmp_path / "store"), tmp_path / "cache").path("a.tar", size_bytes=1, sha256=DIGEST)
