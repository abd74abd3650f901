"""The files of the node's cache: whose they are, what a crash of the machine and a full disk do to them."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.errors import NoSpaceError, StorageDeniedError, StorageError
from orchestrator.storage.digests import digests_of
from orchestrator.storage.local import LocalStore
from tests.shard_cases import SHARD_BYTES, content, read, sample, shard_of, write_shards
from workloads.data.cache import ObjectCache, ShardCache
from workloads.data.cache.folder import CacheFolder, CacheSettings, Hold, LockTimeoutError, lock

LARGE = CacheSettings(bytes=10**9)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def path_of(cache: ObjectCache, shard_id: int) -> Path:
    shard = shard_of(shard_id)
    return cache.path(shard.object_name, size_bytes=shard.size_bytes, digests=shard.digests)


def test_cache_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    CacheFolder(root)
    assert {oct(path.stat().st_mode & 0o777) for path in (root, *root.iterdir()) if path.is_dir()} == {"0o700"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_cache_folder_of_another_user_is_refused(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        root.symlink_to(tmp_path / "theirs")
        os.chown(root, 12345, 12345, follow_symlinks=False)
    else:
        root.mkdir()
        os.chown(root, 12345, 12345)
    with pytest.raises(StorageDeniedError, match=r"belongs to user 12345.*ORCHESTRATOR_CACHE_DIR"):
        CacheFolder(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_cache_folder_file_of_another_user_is_not_used(store, tmp_path: Path) -> None:
    shards = write_shards(store, 1)
    with ShardCache(store, tmp_path / "cache", shards, settings=LARGE) as cache:
        planted = tmp_path / "cache" / "objects" / shards[0].sha256
        planted.write_bytes(bytes(SHARD_BYTES))
        os.chown(planted, 12345, 12345)
        assert read(cache, 0, 0) == sample(0, 0)


def test_cache_folder_link_in_place_of_an_object_is_not_followed(store, tmp_path: Path) -> None:
    shards = write_shards(store, 1)
    (tmp_path / "elsewhere").write_bytes(bytes(SHARD_BYTES))
    with ShardCache(store, tmp_path / "cache", shards, settings=LARGE) as cache:
        (tmp_path / "cache" / "objects" / shards[0].sha256).symlink_to(tmp_path / "elsewhere")
        assert read(cache, 0, 0) == sample(0, 0)


def test_cache_folder_after_a_restart_of_the_machine_trusts_what_is_still_whole(store, tmp_path: Path) -> None:
    write_shards(store, 2)
    before = ObjectCache(store, tmp_path / "cache", settings=LARGE)
    whole, torn = path_of(before, 0), path_of(before, 1)
    torn.chmod(0o600)
    torn.write_bytes(bytes(SHARD_BYTES))  # as a file system may leave what was never flushed
    (tmp_path / "cache" / "boot_id").write_text("another")
    store.delete("shards/000000.tar")
    after = ObjectCache(store, tmp_path / "cache", settings=LARGE)
    assert path_of(after, 0).read_bytes() == content(0)
    assert path_of(after, 1).read_bytes() == content(1)
    found = after.stats.snapshot()
    assert (found["downloads"], found["damaged"]) == (1, 1)
    assert whole.exists()
    assert path_of(ObjectCache(store, tmp_path / "cache", settings=LARGE), 0) == whole


def test_cache_folder_suspect_that_is_evicted_before_it_is_opened_is_fetched_again(
    store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(store, 1)
    path_of(ObjectCache(store, tmp_path / "cache", settings=LARGE), 0)
    (tmp_path / "cache" / "boot_id").write_text("another")
    after, find = ObjectCache(store, tmp_path / "cache", settings=LARGE), CacheFolder.suspect

    def found_and_evicted(folder: CacheFolder, digest: str, size_bytes: int) -> Path | None:
        former = find(folder, digest, size_bytes)
        assert former is not None
        former.unlink()
        return former

    monkeypatch.setattr(CacheFolder, "suspect", found_and_evicted)
    assert path_of(after, 0).read_bytes() == content(0)
    assert after.stats.snapshot()["downloads"] == 1


def test_cache_folder_suspects_count_and_are_evicted_first(store, tmp_path: Path) -> None:
    write_shards(store, 2)
    path_of(ObjectCache(store, tmp_path / "cache", settings=LARGE), 0)
    (tmp_path / "cache" / "boot_id").write_text("another")
    path_of(ObjectCache(store, tmp_path / "cache", settings=CacheSettings(bytes=SHARD_BYTES)), 1)
    assert list((tmp_path / "cache" / "suspect").iterdir()) == []


def test_cache_folder_leftover_of_a_dead_download_makes_room(store, tmp_path: Path) -> None:
    write_shards(store, 1)
    cache = ObjectCache(store, tmp_path / "cache", settings=CacheSettings(bytes=SHARD_BYTES))
    left = tmp_path / "cache" / "partial" / ("0" * 64)
    left.write_bytes(b"")
    os.truncate(left, 10 * SHARD_BYTES)
    assert path_of(cache, 0).exists()
    assert not left.exists()


def test_cache_folder_emptied_by_hand_is_filled_again(store, tmp_path: Path) -> None:
    write_shards(store, 1)
    cache = ObjectCache(store, tmp_path / "cache", settings=LARGE)
    path_of(cache, 0)
    subprocess.run(["rm", "-rf", tmp_path / "cache"], check=True)
    assert path_of(cache, 0).read_bytes() == content(0)


def test_cache_folder_path_is_given_even_beyond_the_limit(store, tmp_path: Path) -> None:
    write_shards(store, 1)
    cache = ObjectCache(store, tmp_path / "cache", settings=CacheSettings(bytes=0))
    assert path_of(cache, 0).read_bytes() == content(0)


def test_cache_folder_lock_that_nobody_gives_back_is_an_error(tmp_path: Path) -> None:
    held, wanted = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    lock(held, Hold.EXCLUSIVE)
    with pytest.raises(LockTimeoutError, match="SIGSTOP"):
        lock(wanted, Hold.EXCLUSIVE, timeout_s=0.01)
    os.close(held)
    lock(wanted, Hold.EXCLUSIVE, timeout_s=0)
    os.close(wanted)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own with room for three shards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size_bytes = 3 * SHARD_BYTES + 24 * 1024
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], check=False)
    if made.returncode:
        pytest.skip("a small file system needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_shard_cache_on_a_full_disk_evicts_and_then_reads_by_ranges(store, small_disk: Path) -> None:
    shards = write_shards(store, 8)
    with ShardCache(store, small_disk / "cache", shards, settings=LARGE) as cache:
        for shard_id in range(8):
            assert cache.pin(shard_id) is not None
        assert cache.stats.snapshot()["evictions"] >= 4
        pins = [cache.pin(shard_id) for shard_id in range(8)]
        assert 1 <= sum(pin is not None for pin in pins) <= 4
        assert [read(cache, shard_id, 4) for shard_id in range(8)] == [sample(shard_id, 4) for shard_id in range(8)]
        assert cache.stats.snapshot()["ranged_reads"] >= 4
        del pins


def test_shard_cache_on_a_disk_full_of_other_files_reads_by_ranges(store, small_disk: Path) -> None:
    shards = write_shards(store, 1)
    with ShardCache(store, small_disk / "cache", shards, settings=LARGE) as cache:
        fill(small_disk / "others")
        assert read(cache, 0, 4) == sample(0, 4)
        assert cache.stats.snapshot()["ranged_reads"] == 1
        with pytest.raises(NoSpaceError, match="ORCHESTRATOR_CACHE_DIR"):
            path_of(cache._objects, 0)
        (small_disk / "others").unlink()
        assert path_of(cache._objects, 0).read_bytes() == content(0)


def fill(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    free_bytes = os.fstatvfs(descriptor).f_bavail * 4096
    assert os.write(descriptor, bytes(free_bytes)) == free_bytes
    os.close(descriptor)


def test_shard_cache_whose_disk_fills_while_a_shard_arrives_reads_by_ranges(store, tmp_path: Path, monkeypatch) -> None:
    shards = write_shards(store, 1)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with ShardCache(store, tmp_path / "cache", shards, settings=LARGE) as cache:
        assert read(cache, 0, 4) == sample(0, 4)
    assert list((tmp_path / "cache" / "partial").iterdir()) == []


def test_object_cache_on_a_disk_that_became_read_only_says_so(store, small_disk: Path) -> None:
    content = bytes(1000)
    store.put("a", content)
    wanted = digests_of(content)
    assert ObjectCache(store, small_disk / "cache").path("a", size_bytes=1000, digests=wanted).read_bytes() == content
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageError, match=r"cache failed: .*Read-only.*ORCHESTRATOR_CACHE_DIR"):
        ObjectCache(store, small_disk / "cache").path("a", size_bytes=1000, digests=wanted)
