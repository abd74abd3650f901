"""Real processes that share a node's cache: killed, stopped, too many for the room there is."""

import fcntl
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.storage.local import LocalStore
from tests.shard_cases import NUM_SAMPLES, SHARD_BYTES, Fleet, Run, content, write_shards
from tests.unit.test_shard_cache import used_bytes
from tests.waiting import wait_until


@pytest.fixture
def fleet(tmp_path) -> Iterator[Callable[..., Fleet]]:
    """Starts processes; what is left of them at the end is killed."""
    started: list[Fleet] = []

    def start(num_shards: int, *, cache_bytes: int | None = None, **options) -> Fleet:
        store = LocalStore(tmp_path / "store")
        if not started:
            write_shards(store, num_shards)
        run = Run(store_uri=store.uri, cache=str(tmp_path / "cache"), num_shards=num_shards, **options)
        started.append(Fleet(run, cache_bytes=cache_bytes))
        return started[-1]

    yield start
    for each in started:
        each.child.kill()
        each.child.wait()
        each.lines.close()


def test_eight_runs_on_a_node_fetch_every_shard_once(fleet, tmp_path: Path) -> None:
    counters = fleet(12, num_processes=8).counters()
    assert len(counters) == 8
    assert sum(found["bytes_from_store"] for found in counters) == 12 * SHARD_BYTES
    assert sum(found["bytes_served"] for found in counters) == 8 * 12 * SHARD_BYTES
    assert sum(found["ranged_reads"] for found in counters) == 0
    assert len(list((tmp_path / "cache" / "objects").iterdir())) == 12


@pytest.mark.slow
def test_sixteen_runs_over_forty_shards_share_room_for_ten(fleet, tmp_path: Path) -> None:
    started = fleet(40, num_processes=16, cache_bytes=10 * SHARD_BYTES)
    for _ in range(60):
        started.wait_for("batch")
        assert used_bytes(tmp_path / "cache") <= 10 * SHARD_BYTES
    counters = started.counters()
    assert sum(found["hits"] + found["misses"] for found in counters) == 16 * 40 * NUM_SAMPLES
    assert sum(found["ranged_reads"] for found in counters) > 0
    assert used_bytes(tmp_path / "cache") <= 10 * SHARD_BYTES


def test_killed_download_is_taken_over_at_once(fleet, tmp_path: Path) -> None:
    first = fleet(3, stop_after=0)
    first.wait_for("in the middle")
    second = fleet(3)  # waits for the first one's shard for as long as that one lives
    first.child.kill()
    (found,) = second.counters()
    assert found["downloads"] == 3
    assert list((tmp_path / "cache" / "partial").iterdir()) == []


def states_of(pid: int) -> set[str]:
    """Of the threads of a process, as in ``ps``."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_stopped_download_is_taken_over_and_does_no_harm_when_it_goes_on(fleet, tmp_path: Path) -> None:
    first = fleet(3, stop_after=1)
    first.wait_for("in the middle")
    with (tmp_path / "cache" / "admission.lock").open() as admission:
        # Not to be stopped in the milliseconds in which its other thread counts: others would wait a minute for it.
        fcntl.flock(admission, fcntl.LOCK_EX)
        first.child.send_signal(signal.SIGSTOP)
        # On a busy machine its threads go on for a while, and one of them could take the lock.
        wait_until(lambda: states_of(first.child.pid) == {"T"})
    (found,) = fleet(3, stalled_s=0.2).counters()
    assert found["downloads"] == 3
    first.child.send_signal(signal.SIGCONT)
    kept = sorted(path.read_bytes() for path in (tmp_path / "cache" / "objects").iterdir())
    assert kept == sorted(content(shard_id) for shard_id in range(3))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_readers_killed_at_random_points_never_hurt_the_others(seed: int, fleet, tmp_path: Path) -> None:
    rng = random.Random(seed)  # noqa: S311 - moments, no secret
    survivor = fleet(24, block_shards=2, cache_bytes=8 * SHARD_BYTES)
    for _ in range(2):
        victim = fleet(24, block_shards=2, cache_bytes=8 * SHARD_BYTES, stop_after=rng.choice([-1, 0, 3]))
        for _ in range(rng.randrange(1, 8)):
            if victim.lines.readline().strip() == "in the middle":
                break
        victim.child.kill()
    (found,) = survivor.counters()
    assert found["hits"] + found["misses"] == 24 * NUM_SAMPLES
    (found,) = fleet(24, block_shards=2, cache_bytes=8 * SHARD_BYTES).counters()
    assert used_bytes(tmp_path / "cache") <= 8 * SHARD_BYTES
    assert list((tmp_path / "cache" / "partial").iterdir()) == []
