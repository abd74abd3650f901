"""What the ranks of a gang have read, as its lines of metrics tell it."""

from pathlib import Path

from tests.rank_processes import RankPool, raise_errors
from workloads.runtime.ranks import Ranks
from workloads.train.step_metrics import ReadStats

GIB = 1024**3


def _laps(rank: int, world_size: int) -> list[dict[str, float]]:
    reads = ReadStats(Ranks(rank=rank, world_size=world_size))
    first = {"cache_hits": 1.0 + rank, "cache_misses": 3.0, "bytes_from_store": rank * GIB}
    second = {name: 2 * value for name, value in first.items()}
    return [reads.lap(first, ends_epoch=False), reads.lap(second, ends_epoch=True)]


def test_reads_of_a_gang_are_those_of_all_its_ranks(pool: RankPool, tmp_path: Path) -> None:
    # Hits 1 + 2 + 3, misses 3 x 3, GiB 0 + 1 + 2, twice.
    expected = [{"cache_hit_rate": 0.4}, {"cache_hit_rate": 0.4, "store_gib_per_epoch": 6.0}]
    assert raise_errors(pool.run(tmp_path, 3, _laps)) == [expected] * 3
