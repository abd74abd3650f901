"""Samples through the node's cache: what is here, what is waited for, what is read by ranges, and what is counted."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import CorruptObjectError, NotFoundError, UserError
from tests.shard_cases import (
    DEADLINE_S,
    NUM_SAMPLES,
    SAMPLE_BYTES,
    SHARD_BYTES,
    CountingStore,
    Gate,
    content,
    eventually,
    read,
    sample,
    shard_of,
    write_shards,
)
from workloads.data.cache import CacheStats, ShardCache
from workloads.data.cache.folder import NUM_FETCHERS, CacheFolder, CacheSettings
from workloads.data.cache.shards import RangedReader, spans


@pytest.fixture
def store(tmp_path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.fixture
def caches(store, tmp_path):
    """Opens caches of so many shards' room in one folder, and closes them."""
    opened: list[ShardCache] = []

    def open_cache(num_shards: int, room: float = 100, **options) -> ShardCache:
        shards = write_shards(store, num_shards) if not store.exists("shards/000000.tar") else None
        shards = shards or [shard for cache in opened for shard in cache._shards][:num_shards]
        limit = CacheSettings(bytes=int(room * SHARD_BYTES))
        cache = ShardCache(store, tmp_path / "cache", shards, settings=limit, **options)
        opened.append(cache)
        store.ranges.clear()
        store.stats.clear()
        return cache

    yield open_cache
    for cache in opened:
        cache.close()


def files(tmp_path: Path, folder: str = "objects") -> int:
    return len(list((tmp_path / "cache" / folder).iterdir()))


def test_shard_cache_sample_of_an_absent_shard_brings_all_of_it(caches, store: CountingStore, tmp_path: Path) -> None:
    cache = caches(1)
    assert read(cache, 0, 3) == sample(0, 3)
    store.delete("shards/000000.tar")
    assert [read(cache, 0, row) for row in range(NUM_SAMPLES)] == [sample(0, row) for row in range(NUM_SAMPLES)]
    found = cache.stats.snapshot()
    assert (found["hits"], found["misses"], found["downloads"], found["ranged_reads"]) == (NUM_SAMPLES, 1, 1, 0)
    assert (found["bytes_from_store"], found["bytes_served"]) == (SHARD_BYTES, (NUM_SAMPLES + 1) * SAMPLE_BYTES)
    assert found["hit_rate"] == NUM_SAMPLES / (NUM_SAMPLES + 1)
    assert files(tmp_path) == 1


def test_shard_cache_batch_over_shards_comes_in_the_order_asked_for(caches) -> None:
    cache = caches(5, room=2)
    shard_ids, rows = np.random.default_rng(0).integers(0, [[5], [NUM_SAMPLES]], (2, 64))
    found = cache.read_batch(shard_ids, rows * SAMPLE_BYTES, np.full(64, SAMPLE_BYTES))
    assert found == [sample(*place) for place in zip(shard_ids.tolist(), rows.tolist(), strict=True)]


def test_shard_cache_many_readers_of_one_shard_fetch_it_once(caches) -> None:
    all_caches = [caches(1) for _ in range(4)]
    together = threading.Barrier(16)

    def ask(number: int) -> bytes:
        together.wait(timeout=DEADLINE_S)
        return read(all_caches[number % 4], 0, number)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [sample(0, row) for row in range(16)]
    assert sum(cache.stats.snapshot()["downloads"] for cache in all_caches) == 1


def test_shard_cache_waiting_reader_goes_on_while_the_first_one_keeps_the_shard(caches, store: CountingStore) -> None:
    first, second, gate = caches(1), caches(1), Gate()
    store.before = lambda _name: gate.pass_through()
    with ThreadPoolExecutor(2) as pool:
        pins = [pool.submit(first.pin, 0)]
        assert gate.reached.wait(timeout=DEADLINE_S)
        waited = threading.Event()
        pins.append(pool.submit(second._objects.pin, second._wanted(0), check=waited.set))
        assert waited.wait(timeout=DEADLINE_S)
        gate.opened.set()
        found = [pin.result(timeout=DEADLINE_S) for pin in pins]
    assert [pin.read(0, SHARD_BYTES) for pin in found] == [content(0)] * 2
    assert len(store.ranges) == 1


def test_shard_cache_damaged_once_on_the_way_is_read_again(caches, store: CountingStore) -> None:
    cache = caches(1)
    answers = iter([bytes(SHARD_BYTES)])
    store.change = lambda found: next(answers, found)
    assert read(cache, 0, 0) == sample(0, 0)
    assert cache.stats.snapshot()["bytes_from_store"] == 2 * SHARD_BYTES


def test_shard_cache_altered_shard_is_refused_by_name_and_not_kept(
    caches, store: CountingStore, tmp_path: Path
) -> None:
    cache = caches(1)
    store.put("shards/000000.tar", content(0)[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(CorruptObjectError, match=r"shards/000000\.tar .* has blake3 .* also when read again"):
            read(cache, 0, 0)
    assert files(tmp_path) == files(tmp_path, "partial") == 0


def test_shard_cache_shard_of_another_size_is_refused_by_name(caches, store: CountingStore) -> None:
    whole, by_ranges = caches(2), caches(2, room=0)
    store.put("shards/000001.tar", content(1) + b"?")
    for cache in (whole, by_ranges):
        with pytest.raises(CorruptObjectError, match=rf"shards/000001\.tar .*{SHARD_BYTES + 1} bytes"):
            read(cache, 1, 0)


def test_ranged_reader_asks_for_the_size_of_both_of_two_shards_of_one_name(tmp_path: Path) -> None:
    stores = {name: CountingStore(tmp_path / name) for name in ("one", "other")}
    for store, more in zip(stores.values(), (b"", b"?"), strict=True):
        store.put("shards/000000.tar", content(0) + more)
    one, other = (replace(shard_of(0), store_uri=name) for name in stores)
    with closing(RangedReader(lambda shard: stores[shard.store_uri], CacheStats())) as reader:
        (found,) = reader.start(one, [0], [SAMPLE_BYTES])
        assert found.result(DEADLINE_S) == sample(0, 0)
        (found,) = reader.start(other, [0], [SAMPLE_BYTES])
        with pytest.raises(CorruptObjectError, match=rf"shards/000000\.tar .*{SHARD_BYTES + 1} bytes"):
            found.result(DEADLINE_S)


def test_shard_cache_shard_that_is_gone_is_not_found_until_it_is_back(caches, store: CountingStore) -> None:
    cache = caches(1)
    store.delete("shards/000000.tar")
    with pytest.raises(NotFoundError, match=r"shards/000000\.tar"):
        read(cache, 0, 0)
    store.put("shards/000000.tar", content(0))
    assert read(cache, 0, 0) == sample(0, 0)


def test_shard_cache_without_room_reads_only_what_is_asked_for(caches, tmp_path: Path) -> None:
    cache = caches(1, room=0.9)
    assert cache.read_samples(0, [5000, 1000], [1000, 1000]) == [sample(0, 5), sample(0, 1)]
    assert files(tmp_path) == files(tmp_path, "partial") == 0
    found = cache.stats.snapshot()
    assert (found["bytes_from_store"], found["ranged_reads"], found["misses"]) == (5000, 1, 2)


def test_shard_cache_full_of_pinned_shards_serves_the_others_by_ranges(caches, tmp_path: Path) -> None:
    other, mine = caches(4, room=2), caches(4, room=2)
    for shard_id in (0, 1):
        other.pin(shard_id).close()
    pins = [other.pin(0), other.pin(1)]  # of files that were there already
    assert all(pins)
    assert mine.pin(2) is None
    assert read(mine, 2, 7) == sample(2, 7)
    assert mine.stats.snapshot()["ranged_reads"] == 1
    assert files(tmp_path) == 2
    pins[0].close()
    with mine.pin(2) as pin:
        assert pin.path.read_bytes() == content(2)
    assert mine.stats.snapshot()["evictions"] == 1
    assert pins[1].read(0, 5) == content(1)[:5]


def test_shard_cache_evicts_what_was_unused_for_the_longest_time(caches, tmp_path: Path) -> None:
    cache = caches(3, room=2)
    for shard_id in (0, 1, 0, 2):
        cache.pin(shard_id).close()
    kept = {path.name for path in (tmp_path / "cache" / "objects").iterdir()}
    assert kept == {cache._shards[0].sha256, cache._shards[2].sha256}


def test_shard_cache_pin_stays_readable_when_its_file_is_deleted_by_hand(caches, tmp_path: Path) -> None:
    cache = caches(1)
    pin = cache.pin(0)
    for path in (tmp_path / "cache" / "objects").iterdir():
        path.unlink()
    assert pin.read(0, SHARD_BYTES) == content(0)
    assert cache.pin(0).path.read_bytes() == content(0)


def test_shard_cache_fetches_ahead_in_the_declared_order(caches, store: CountingStore) -> None:
    cache = caches(NUM_FETCHERS + 2)
    gate = Gate()
    store.before = lambda _name: gate.pass_through()
    declared = [4, *reversed([shard_id for shard_id in range(NUM_FETCHERS + 2) if shard_id != 4])]
    cache.prefetch(declared)
    eventually(lambda: len(store.ranges) == NUM_FETCHERS)
    assert set(store.ranges) == {f"shards/{shard_id:06d}.tar" for shard_id in declared[:NUM_FETCHERS]}
    gate.opened.set()
    eventually(lambda: all(cache._ahead.held(shard_id) for shard_id in declared))
    assert read(cache, 5, 2) == sample(5, 2)
    assert cache.stats.snapshot()["hit_rate"] == 1.0


def test_shard_cache_declaration_after_next_lets_shards_go(caches) -> None:
    cache, other = caches(4, room=2), caches(4, room=2)
    cache.prefetch(np.array([0, 1]))
    eventually(lambda: cache._ahead.held(0) and cache._ahead.held(1))
    assert other.pin(2) is None
    cache.prefetch([1])
    assert other.pin(2) is None  # stragglers of the batches before may still be read
    assert read(cache, 0, 0) == sample(0, 0)
    cache.prefetch([1, 1])
    assert other.pin(2) is not None
    assert cache._ahead.held(1) is not None


def test_shard_cache_former_declaration_makes_room_for_the_next(caches) -> None:
    cache = caches(4, room=2)
    for first in (0, 2):
        cache.prefetch([first, first + 1])
        for shard_id in (first, first + 1):
            eventually(partial(cache._ahead.held, shard_id))
    assert read(cache, 0, 5) == sample(0, 5)
    found = cache.stats.snapshot()
    assert (found["downloads"], found["ranged_reads"]) == (4, 1)


def test_shard_cache_reader_waits_for_a_shard_within_its_patience_and_else_reads_a_range(
    caches, store: CountingStore
) -> None:
    cache = caches(NUM_FETCHERS + 4, patience_bytes=2 * SHARD_BYTES)
    gate = Gate()
    store.before = lambda name: gate.pass_through() if name < f"shards/{NUM_FETCHERS:06d}.tar" else None
    cache.prefetch(range(NUM_FETCHERS + 4))
    assert gate.reached.wait(timeout=DEADLINE_S)
    eventually(lambda: len(store.ranges) == NUM_FETCHERS)  # these are on their way, one more is next
    last = NUM_FETCHERS + 3
    assert read(cache, last, 0) == sample(last, 0)  # it comes after three others
    assert cache.stats.snapshot()["ranged_reads"] == 1
    gate.opened.set()
    assert read(cache, 0, 0) == sample(0, 0)


def test_shard_cache_first_samples_cost_one_request_each(caches, store: CountingStore) -> None:
    cache = caches(3, num_eager_reads=2)
    gate = Gate()
    store.before = lambda name: gate.pass_through() if threading.current_thread().name == "shard-fetch" else None
    assert read(cache, 0, 1) == sample(0, 1)
    assert read(cache, 1, 1) == sample(1, 1)
    assert cache.stats.snapshot()["bytes_from_store"] == 2 * SAMPLE_BYTES
    assert not [asked for asked in store.stats if asked.startswith("ranged-read")]
    gate.opened.set()
    assert read(cache, 2, 0) == sample(2, 0)
    assert cache.stats.snapshot()["ranged_reads"] == 2


def test_shard_cache_closed_while_it_fetches_leaves_nothing_half_done(
    caches, store: CountingStore, tmp_path: Path
) -> None:
    cache, gate = caches(1), Gate()
    store.before = lambda _name: gate.pass_through()
    cache.prefetch([0])
    assert gate.reached.wait(timeout=DEADLINE_S)
    threading.Timer(0, gate.opened.set).start()
    cache.close()
    eventually(lambda: files(tmp_path, "partial") == 0)
    assert read(caches(1), 0, 0) == sample(0, 0)


def test_shard_cache_damaged_local_copy_is_found_by_a_recheck_and_replaced(caches, tmp_path: Path) -> None:
    cache = caches(1)
    assert read(cache, 0, 0) == sample(0, 0)
    assert not cache.recheck(0)
    (path,) = (tmp_path / "cache" / "objects").iterdir()
    path.chmod(0o600)
    path.write_bytes(bytes(SHARD_BYTES))
    assert read(cache, 0, 0) == bytes(SAMPLE_BYTES)
    assert cache.recheck(0)
    assert read(cache, 0, 0) == sample(0, 0)
    assert cache.stats.snapshot()["damaged"] == 1


def test_shard_cache_that_holds_a_damaged_copy_which_another_replaced_reads_the_new_one(caches, tmp_path: Path) -> None:
    finder, holder = caches(1), caches(1)
    assert [read(cache, 0, 0) for cache in (finder, holder)] == [sample(0, 0)] * 2
    (path,) = (tmp_path / "cache" / "objects").iterdir()
    path.chmod(0o600)
    path.write_bytes(bytes(SHARD_BYTES))
    assert finder.recheck(0)
    assert read(finder, 0, 0) == sample(0, 0)
    assert read(holder, 0, 0) == bytes(SAMPLE_BYTES)
    assert holder.recheck(0)
    assert read(holder, 0, 0) == sample(0, 0)
    assert not holder.recheck(0)


@pytest.mark.parametrize("room", [2, 0])
def test_shard_cache_in_a_forked_child_has_threads_of_its_own(room: int, caches) -> None:
    cache = caches(2, room=room)
    assert read(cache, 0, 0) == sample(0, 0)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if read(cache, 1, 0) == sample(1, 0) and read(cache, 0, 1) == sample(0, 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    room=st.sampled_from([0, 1, 2.5, 4, 10]),
    acts=st.lists(
        st.one_of(
            st.lists(st.integers(0, 5), max_size=6, unique=True),
            st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, NUM_SAMPLES - 1)),
        ),
        max_size=12,
    ),
)
def test_shard_cache_any_declarations_and_reads_give_the_right_bytes_within_the_limit(
    room, acts, store: CountingStore, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    limit = CacheSettings(bytes=int(room * SHARD_BYTES))
    shards = write_shards(store, 6)
    with (
        ShardCache(store, folder, shards, settings=limit) as one,
        ShardCache(store, folder, shards, settings=limit) as two,
    ):
        for act in acts:
            if isinstance(act, list):
                one.prefetch(act)
            else:
                reader, shard_id, row = act
                assert read((one, two)[reader], shard_id, row) == sample(shard_id, row)
            assert used_bytes(folder) <= room * SHARD_BYTES


def used_bytes(folder: Path) -> int:
    """Counted as the cache counts: without its lock, a file that goes from one folder to the other is seen in both."""
    with CacheFolder(folder).admission():
        return sum(size for name in ("objects", "partial") for size in _sizes(folder / name))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.iterdir():
        try:
            yield path.stat().st_size
        except FileNotFoundError:
            continue


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 500))), st.integers(0, 300), st.integers(1, 2000))
def test_spans_of_any_samples_hold_each_once_and_join_neighbours(places, gap: int, most: int) -> None:
    offsets, lengths = [place[0] for place in places], [place[1] for place in places]
    found = list(spans(offsets, lengths, gap_bytes=gap, max_bytes=most))
    assert sorted(member for span in found for member in span.members) == list(range(len(places)))
    for span in found:
        assert span.start == min(offsets[member] for member in span.members)
        assert span.stop == max(offsets[member] + lengths[member] for member in span.members)
        assert span.stop - span.start <= most or len(span.members) == 1
    for before, after in pairwise(found):
        joined_bytes = max(before.stop, offsets[after.members[0]] + lengths[after.members[0]]) - before.start
        assert after.start > before.stop + gap or joined_bytes > most


@pytest.mark.parametrize(("given_size", "found"), [("1000", 1000), ("2GB", 2 * 10**9), ("1.5TiB", 3 * 2**39)])
def test_cache_settings_of_a_size_are_the_limit(given_size: str, found: int, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CACHE_BYTES", given_size)
    assert CacheSettings.read().limit_bytes(tmp_path, 5) == found


def test_cache_settings_without_a_size_are_half_of_what_is_free_and_used(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((4096, 4096, 10, 9, 8, 0, 0, 0, 0, 255)))
    assert CacheSettings.read().limit_bytes(tmp_path, 1000) == (8 * 4096 + 1000) // 2


@pytest.mark.parametrize("wrong", ["much", "-1", "5 parsecs"])
def test_cache_settings_of_no_size_are_refused(wrong: str, monkeypatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CACHE_BYTES", wrong)
    with pytest.raises(UserError, match="ORCHESTRATOR_CACHE_BYTES is"):
        CacheSettings.read()
