"""What the nodes of a gang read from the store with and without data groups, and how well each order mixes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.data_jobs import DataPlane, encoded, tar_of
from workloads.data.index import SampleIndex
from workloads.data.loader import SampleSource, TrainLoader
from workloads.data.order import DataGroups, SampleOrder, rank_slice
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

# ---------------------------------------------------------------------------------------------------------------------
# Counted: 200 shards, 64 ranks. A node reads the shards that its ranks name whole, and single samples of others.

NUM_SHARDS, BATCH_SIZE, NORM_GROUP, NUM_RANKS = 200, 4096, 64, 64
EQUAL = (5000,) * NUM_SHARDS
UNEQUAL = tuple(np.random.default_rng(0).integers(2500, 7500, NUM_SHARDS).tolist())


def order_of(sizes: tuple[int, ...], data_groups: int, block_shards: int) -> SampleOrder:
    return SampleOrder(sizes, 0, block_shards, groups=DataGroups.of(data_groups, BATCH_SIZE, NORM_GROUP))


def read_in_epoch(order: SampleOrder, sizes: tuple[int, ...], num_nodes: int, epoch: int) -> list[tuple[int, int, int]]:
    """Of each node: shards read whole, samples read one by one, and samples of both together."""
    shard_of, total = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    begin, end = epoch * total, (epoch + 1) * total
    found = []
    for node in range(num_nodes):
        whole: set[int] = set()
        seen = []
        for batch in range(begin // BATCH_SIZE, -(-end // BATCH_SIZE)):
            start, stop = batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE
            start, stop = rank_slice(start, stop, rank=node, world_size=num_nodes, group_size=NORM_GROUP)
            start, stop = max(start, begin), min(stop, end)
            if start < stop:
                whole.update(order.shards_ahead(start, stop, num_later=0).tolist())
                seen.append(shard_of[order.ordinals(start, stop)])
        singles = int((~np.isin(np.concatenate(seen), list(whole))).sum())
        found.append((len(whole), singles, singles + sum(sizes[shard] for shard in whole)))
    return found


def test_reads_of_a_gang_counted() -> None:
    """Asked: <= 1.05 of the data set per epoch, all nodes together, where their number divides that of the groups."""
    assert NUM_RANKS % 8 == 0  # ranks of a node take consecutive slots: a node is one large rank here
    for name, sizes in (("equal shards", EQUAL), ("unequal shards", UNEQUAL)):
        for num_nodes, data_groups in ((8, 1), (8, 8), (4, 8), (8, 16), (8, 64), (3, 8), (16, 8)):
            order, ratios, shards, singles = order_of(sizes, data_groups, 16), [], [], []
            for epoch in (0, 1, 2):
                nodes = read_in_epoch(order, sizes, num_nodes, epoch)
                ratios.append(sum(samples for *_, samples in nodes) / sum(sizes))
                shards += [whole for whole, *_ in nodes]
                singles.append(sum(single for _, single, _ in nodes) / sum(sizes))
            print(  # noqa: T201 - a benchmark's result
                f"\n{name}, {num_nodes:2} nodes, data_groups {data_groups:2}: {np.mean(ratios):.4f} of the data set "
                f"per epoch ({max(ratios):.4f} at most), {min(shards)}-{max(shards)} shards per node, "
                f"{100 * np.mean(singles):.2f} % of the samples one by one",
                end="",
            )
    print()  # noqa: T201


# ---------------------------------------------------------------------------------------------------------------------
# Read: real loaders, two ranks on each of eight nodes, each node with a cache of its own; bytes that the store gave.

READ_SHARDS, READ_SIZE, READ_BATCH, READ_NODES, NUM_EPOCHS = 200, 64, 256, 8, 2


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataPlane, SampleIndex]:
    """PNGs of noise, 12 KB each, so that ranges of neighbours are not read together."""
    plane = DataPlane(folder=tmp_path_factory.mktemp("plane"))
    images = [encoded(size=(64, 64), seed=seed) for seed in range(16)]
    shards = {}
    for number in range(READ_SHARDS):
        members = []
        for row in range(READ_SIZE):
            members += [(f"{number}-{row}.png", images[row % 16]), (f"{number}-{row}.cls", b"0")]
        shards[f"train-{number:04}.tar"] = tar_of(members)
    return plane, plane.index(plane.foreign(shards))


def bytes_read(plane: DataPlane, index: SampleIndex, caches: Path, data_groups: int) -> list[float]:
    """Bytes that each node got from the store."""
    with ExitStack() as stack:
        sources, batches = [], []
        for rank in range(2 * READ_NODES):
            cache = caches / f"node{rank // 2}"
            source = SampleSource(plane.store, index, "train", cache_dir=cache, image_size=16, cache_bytes=0)
            stack.callback(source.close)
            loader = TrainLoader(
                source,
                SampleOrder(source.split.shard_sizes, 0, 8, groups=DataGroups.of(data_groups, READ_BATCH)),
                SplitTargets.of(source.split.leaves, 2),
                batch_size=READ_BATCH,
                start_step=0,
                total_steps=NUM_EPOCHS * READ_SHARDS * READ_SIZE // READ_BATCH,
                seed=0,
                stage=Stage.PRETRAIN,
                rank=rank,
                world_size=2 * READ_NODES,
                num_workers=0,
            )
            sources.append(source)
            batches.append(stack.enter_context(closing(generator_of(loader))))
        for _ in zip(*batches, strict=True):  # all ranks take a step, then the next one
            pass
        counted = [source.shards.stats.snapshot()["bytes_from_store"] for source in sources]
    return [counted[2 * node] + counted[2 * node + 1] for node in range(READ_NODES)]


def generator_of(loader: TrainLoader) -> Generator[object, None, None]:
    yield from loader


@pytest.mark.parametrize("share", [1.5, 0.4], ids=["the cache holds all", "the cache holds 40 %"])
def test_reads_of_a_gang_in_bytes(
    index: tuple[DataPlane, SampleIndex], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Asked: <= 1.05 of the data set per epoch."""
    plane, opened = index
    total = sum(shard.size_bytes for shard in opened.split("train").shards)
    monkeypatch.setenv("ORCHESTRATOR_CACHE_BYTES", str(int(share * total)))
    for data_groups in (1, 8):
        read = bytes_read(plane, opened, tmp_path / str(data_groups), data_groups)
        print(  # noqa: T201 - a benchmark's result
            f"\ncache of {share:.0%} of {total / 1e6:.0f} MB, data_groups {data_groups}: {NUM_EPOCHS} epochs read "
            f"{sum(read) / total / NUM_EPOCHS:.3f} of the data set per epoch, {min(read) / total / NUM_EPOCHS:.3f} to "
            f"{max(read) / total / NUM_EPOCHS:.3f} per node",
            end="",
        )
    print()  # noqa: T201


# ---------------------------------------------------------------------------------------------------------------------
# How well samples are mixed, relative to a full shuffle: pairs of one class or shard, in batches and in norm groups.

NUM_CLASSES = 1000
TOTAL = sum(EQUAL)
SHARD_OF = np.repeat(np.arange(NUM_SHARDS), EQUAL)


def pairs(marks: NDArray[np.int64], size: int) -> float:
    """Share of the pairs within ``size`` consecutive samples that have one mark, mean over all of them."""
    rows = np.sort(marks[: len(marks) // size * size].reshape(-1, size), axis=1)
    ends = np.flatnonzero(np.diff(rows, axis=1, append=-1).ravel())
    counts = np.diff(ends, prepend=-1)
    return float((counts * (counts - 1)).sum()) / (rows.size * (size - 1))


def distinct(marks: NDArray[np.int64], size: int) -> float:
    """Different marks in ``size`` consecutive samples, mean over all of them."""
    rows = np.sort(marks[: len(marks) // size * size].reshape(-1, size), axis=1)
    return float((np.diff(rows, axis=1) != 0).sum() / len(rows)) + 1


def test_quality_of_the_shuffle() -> None:
    """Asked: within 5 % of the full shuffle."""
    arms = {
        "full shuffle": order_of(EQUAL, 1, NUM_SHARDS),
        "full shuffle, other seed": SampleOrder(EQUAL, 1, NUM_SHARDS),
        "blocks of 16 shards": order_of(EQUAL, 1, 16),
        "8 groups, blocks of 16 shards": order_of(EQUAL, 8, 16),
        "8 groups, blocks of all their shards": order_of(EQUAL, 8, NUM_SHARDS),
        "64 groups, blocks of all their shards": order_of(EQUAL, 64, NUM_SHARDS),
    }
    sorted_leaves = np.arange(TOTAL) * NUM_CLASSES // TOTAL
    classes = {"random": np.random.default_rng(0).permutation(sorted_leaves), "sorted": sorted_leaves}
    base: dict[tuple[str, int], float] = {}
    for name, order in arms.items():
        ordinals = order.ordinals(0, 2 * TOTAL)
        told = []
        for what, marks in (*classes.items(), ("shard", SHARD_OF)):
            seen = marks[ordinals]
            for size in (BATCH_SIZE, NORM_GROUP):
                base.setdefault((what, size), pairs(seen, size))
                told.append(f"{what} {size}: {pairs(seen, size) / base[what, size]:6.3f}")
            if what != "shard":
                told[-1] += f", distinct {distinct(seen, BATCH_SIZE):.1f}"
        print(f"\n{name:38} {'; '.join(told)}", end="")  # noqa: T201 - a benchmark's result
    print()  # noqa: T201
