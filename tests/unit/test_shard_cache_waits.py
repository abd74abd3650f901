"""Readers that wait for shards: whatever is declared, fails or is closed meanwhile, each of them gets an answer."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from threading import Lock

import pytest

from orchestrator.core.errors import StorageError
from tests.shard_cases import DEADLINE_S, NUM_SAMPLES, SHARD_BYTES, CountingStore, Gate, eventually, read, write_shards
from workloads.data.cache import ShardCache
from workloads.data.cache.ahead import Ahead
from workloads.data.cache.folder import NUM_FETCHERS, CacheFolder, CacheSettings, Check, Hold, Pin, try_lock
from workloads.data.cache.objects import ObjectCache, Wanted


def some_pin() -> Pin:
    return Pin(Path(os.devnull), os.open(os.devnull, os.O_RDONLY))


def in_threads(call: Callable[[int], object], arguments: list[int]) -> list[Future[object]]:
    """Threads that nobody waits for here: one that hangs must fail its test, not stop the run."""
    readers = ThreadPoolExecutor(len(arguments))
    waiting = [readers.submit(call, argument) for argument in arguments]
    readers.shutdown(wait=False)
    return waiting


class Waits(Ahead):
    """Counts the readers that have come."""

    num_readers = 0

    def wait(self, shard_id: int) -> Pin | None:
        self.num_readers += 1
        return super().wait(shard_id)


def test_reader_of_a_shard_that_is_declared_no_more_is_sent_to_ranges() -> None:
    """The last batch of a block waits while the first one of the next block is planned already."""
    gate = Gate()

    def obtain(_shard_id: int, _check: Check) -> Pin | None:
        gate.pass_through()
        return some_pin()

    last = NUM_FETCHERS
    ahead = Waits([1] * (last + 3), obtain)
    ahead.declare(range(last + 1))
    (waiting,) = in_threads(ahead.wait, [last])
    eventually(lambda: ahead.num_readers == 1)
    ahead.declare([last + 1, last + 2])
    try:
        assert waiting.result(timeout=DEADLINE_S) is None
    finally:
        gate.opened.set()
        ahead.close()


def test_reader_of_a_shard_that_comes_after_another_declaration_gets_it() -> None:
    gate = Gate()

    def obtain(_shard_id: int, _check: Check) -> Pin | None:
        gate.pass_through()
        return some_pin()

    ahead = Waits([1] * 6, obtain)
    ahead.declare([0])
    waiting = in_threads(ahead.wait, [0, 0])
    eventually(lambda: ahead.num_readers == 2 and gate.reached.is_set())
    ahead.declare([3])
    gate.opened.set()
    ahead.declare([4])
    try:
        for found in waiting:
            found.result(timeout=DEADLINE_S)  # its pin, or None: to be read by ranges
    finally:
        ahead.close()


def test_all_readers_of_a_shard_that_cannot_be_fetched_are_told() -> None:
    gate = Gate()

    def obtain(_shard_id: int, _check: Check) -> Pin | None:
        gate.pass_through()
        raise StorageError("simulated: the store is away")

    ahead = Waits([1], obtain)
    waiting = in_threads(ahead.wait, [0] * 4)
    eventually(lambda: ahead.num_readers == 4)
    gate.opened.set()
    try:
        for found in waiting:
            with pytest.raises(StorageError, match="the store is away"):
                found.result(timeout=DEADLINE_S)
    finally:
        ahead.close()


def test_both_threads_get_the_room_of_the_former_declaration() -> None:
    """Each learns that there is no room before either of them lets the former pins go."""
    both = threading.Barrier(2, timeout=DEADLINE_S)
    first_tries = {2, 3}

    def obtain(shard_id: int, _check: Check) -> Pin | None:
        if shard_id in first_tries:
            first_tries.discard(shard_id)
            both.wait()
            if shard_id == 3:
                eventually(lambda: not ahead._former)
            return None
        return some_pin()

    ahead = Ahead([1] * 4, obtain)
    ahead.declare([0, 1])
    eventually(lambda: ahead.held(0) and ahead.held(1))
    ahead.declare([2, 3])
    try:
        eventually(lambda: ahead.held(2) and ahead.held(3))
    finally:
        ahead.close()


def test_cache_closed_under_its_readers_leaves_none_waiting(tmp_path: Path) -> None:
    store, gate = CountingStore(tmp_path / "store"), Gate()
    shards, settings = write_shards(store, 1), CacheSettings(bytes=SHARD_BYTES // 2)
    cache = ShardCache(store, tmp_path / "cache", shards, settings=settings)
    store.before = lambda _name: gate.pass_through()
    # More than there are requests at once.
    waiting = in_threads(lambda row: read(cache, 0, row), list(range(NUM_SAMPLES)))
    eventually(lambda: cache.stats.snapshot()["ranged_reads"] >= 1 and gate.reached.is_set())
    cache.close()
    gate.opened.set()
    for found in waiting:
        found.exception(timeout=DEADLINE_S)  # an answer, of whatever kind


def busy_object_cache(tmp_path: Path) -> tuple[ObjectCache, Wanted]:
    """A cache whose process has its own fetcher at work, and a shard that is not there."""
    store = CountingStore(tmp_path / "store")
    (shard,) = write_shards(store, 1)
    cache = ObjectCache(store, tmp_path / "cache", settings=CacheSettings(bytes=10 * SHARD_BYTES))
    assert cache._own_fetcher.acquire(blocking=False)
    return cache, Wanted(store=store, name=shard.object_name, size_bytes=shard.size_bytes, digests=shard.digests)


def test_shard_is_fetched_into_a_cache_that_was_emptied_by_hand(tmp_path: Path) -> None:
    cache, wanted = busy_object_cache(tmp_path)
    rmtree(tmp_path / "cache")
    pin = cache.pin_ahead(wanted)
    assert pin is not None
    assert len(pin.read(0, SHARD_BYTES)) == SHARD_BYTES


def test_lock_of_a_count_of_sizes_does_not_send_a_fetcher_to_another_shard(tmp_path: Path) -> None:
    """Whoever makes room looks for downloads of dead processes by locking each file for a moment."""
    cache, wanted = busy_object_cache(tmp_path)
    _path, counted = CacheFolder(tmp_path / "cache", settings=CacheSettings(bytes=10 * SHARD_BYTES)).open_partial(
        wanted.sha256
    )
    assert try_lock(counted, Hold.EXCLUSIVE)
    timer = threading.Timer(0.1, os.close, [counted])
    timer.start()
    assert cache.pin_ahead(wanted) is not None
    timer.join()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_that_takes_no_lock_of_a_fetcher_is_as_one_that_takes_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    cache, wanted = busy_object_cache(tmp_path)
    opened = os.open

    def refuse(path: Path, *arguments: int) -> int:
        if Path(path).name.startswith("fetcher-"):
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments)

    monkeypatch.setattr("workloads.data.cache.folder.os.open", refuse)
    if number == errno.EIO:
        with pytest.raises(StorageError, match="set ORCHESTRATOR_CACHE_DIR to another one"):
            cache.pin_ahead(wanted)
    else:
        assert cache.pin_ahead(wanted) is None


def test_process_fetches_one_shard_at_a_time_while_others_have_all_fetchers_of_the_node(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "store")
    shards, settings = write_shards(store, 4), CacheSettings(bytes=10 * SHARD_BYTES)
    others = CacheFolder(tmp_path / "cache", settings=settings)
    most, lock = [0, 0], Lock()

    def count(_name: str) -> None:
        with lock:
            most[0] += 1
            most[1] = max(most)
        time.sleep(0.02)  # longer than the pause of those that found no fetcher
        with lock:
            most[0] -= 1

    with ExitStack() as stack:
        for _ in range(NUM_FETCHERS - 1):
            stack.enter_context(others.fetcher())
        # Shard 0 is another's, which dies.
        path, descriptor = others.open_partial(shards[0].sha256)
        assert try_lock(descriptor, Hold.EXCLUSIVE)
        store.before = count
        cache = ShardCache(store, tmp_path / "cache", shards, settings=settings)
        stack.callback(cache.close)
        cache.prefetch(range(4))
        eventually(lambda: all(cache._ahead.held(shard_id) for shard_id in (1, 2, 3)))
        assert cache._ahead.held(0) is None
        assert most[1] == 1
        os.close(descriptor)
        eventually(lambda: cache._ahead.held(0))
        assert path.name == shards[0].sha256
