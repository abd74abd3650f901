"""Where training samples came from, in the lines of metrics."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orchestrator.core.contract import Progress
from orchestrator.report.inputs import MetricLine
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.layout import metrics_folder
from orchestrator.storage.local import LocalStore
from orchestrator.tracking.content import _points
from tests.tiny_training import TinyTraining
from workloads.data.source import _EAGER_READS
from workloads.runtime.ranks import Ranks
from workloads.train.step_metrics import Clock, ReadStats

GIB = 1024**3
PLACED = {"augment": "random_resized_crop"}  # decoded anew in every epoch


def sums(hits: float, misses: float, gib: float) -> dict[str, float]:
    return {"cache_hits": hits, "cache_misses": misses, "bytes_from_store": gib * GIB}


def test_reads_between_two_lines_are_differences_and_bytes_are_told_at_the_end_of_an_epoch() -> None:
    reads = ReadStats(Ranks())
    assert reads.lap(sums(1, 3, 2), ends_epoch=False) == {"cache_hit_rate": 0.25}
    assert reads.of_last_epoch == {}
    assert reads.lap(sums(4, 4, 3), ends_epoch=True) == {"cache_hit_rate": 0.75, "store_gib_per_epoch": 3}
    assert reads.of_last_epoch == {"store_gib_per_epoch": 3}
    assert reads.lap(sums(4, 4, 3), ends_epoch=True) == {"store_gib_per_epoch": 0}
    assert reads.lap(sums(9, 4, 4), ends_epoch=True) == {"cache_hit_rate": 1, "store_gib_per_epoch": 1}


def test_reads_of_a_task_without_sums_are_not_told() -> None:
    assert ReadStats(Ranks()).lap({}, ends_epoch=True) == {}


def test_clock_tells_waiting_per_step() -> None:
    clock = Clock()
    assert clock.lap() == {}  # an attempt that goes on with an evaluation has none
    clock._lap_wait_s = 0.5
    for _ in range(4):
        clock.count(8)
    assert clock.lap()["data_wait_ms"] == 125
    clock.count(8)
    assert clock.lap()["data_wait_ms"] == 0


def test_reads_stand_among_the_system_metrics_of_mlflow() -> None:
    told = {"data_wait_ms": 2.0, "cache_hit_rate": 1.0, "store_gib_per_epoch": 0.5, "train_loss": 3.0}
    points = _points(MetricLine(step=6, epoch=1.0, at_s=0.0, metrics=told))
    assert {point.name for point in points} == {
        "system/data_wait_ms",
        "system/cache_hit_rate",
        "system/store_gib_per_epoch",
        "train_loss",
        "epoch",
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    folder = tmp_path_factory.mktemp("reads")
    return TinyTraining(LocalStore(folder / "store"), folder)


def trained(
    tiny: TinyTraining, seed: int, report: Callable[[Progress], None] = lambda _: None
) -> Sequence[dict[str, float]]:
    """Metrics of the lines of a run of two and a half epochs on a node that has nothing yet."""
    request = tiny.training(recipe=PLACED, seed=seed)
    shutil.rmtree(tiny.folder / "cache")
    tiny.run(request, report=report)
    names = sorted(
        (stat.name for stat in tiny.store.list_objects(metrics_folder(request.key))),
        key=lambda name: int(Path(name).stem.partition("-")[0]),
    )
    return [json.loads(line)["metrics"] for name in names for line in tiny.store.get(name).splitlines()]


def shard_bytes(tiny: TinyTraining) -> list[int]:
    parts = read_record(tiny.store, tiny.dataset).parts
    return [part.size_bytes for name, part in parts.items() if name.startswith("train")]


def train_bytes(tiny: TinyTraining) -> int:
    return sum(shard_bytes(tiny))


def test_reads_of_a_run_whose_cache_holds_the_data_are_once_the_data_set(tiny: TinyTraining) -> None:
    told: list[Progress] = []
    first, second, last = trained(tiny, seed=0, report=told.append)
    size_bytes = train_bytes(tiny)
    # The first reads do not wait for whole shards: they are ranges, each of at most a shard (these are small ones). How
    # many of them find no shard yet is a matter of time.
    ranges_bytes = _EAGER_READS * max(shard_bytes(tiny))
    assert size_bytes <= first["store_gib_per_epoch"] * GIB <= size_bytes + ranges_bytes
    assert (second["store_gib_per_epoch"], last["store_gib_per_epoch"]) == (0, 0)
    assert second.get("cache_hit_rate", 1) == 1  # batches that are made ahead may have read it all before
    assert first["data_wait_ms"] > 0
    shown = [progress.metrics.get("store_gib_per_epoch") for progress in told if progress.phase == "train"]
    assert set(shown) <= {None, first["store_gib_per_epoch"], 0}


def test_reads_of_a_run_without_a_cache_are_the_data_in_every_epoch(
    tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CACHE_BYTES", "0")
    lines = trained(tiny, seed=1)
    assert {line.get("cache_hit_rate", 0) for line in lines} == {0}
    # Batches that are made ahead count to the epoch in which they are read.
    assert sum(line["store_gib_per_epoch"] for line in lines) * GIB > 2 * train_bytes(tiny)
