"""The order at the scale of ImageNet-21k: time to the first batch, memory, and how well it mixes sorted classes."""

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import webdataset
from numpy.typing import NDArray

from workloads.data.index import SplitIndex
from workloads.data.order import SampleOrder
from workloads.data.subset import SampleView, Subset

pytestmark = pytest.mark.bench

NUM_SAMPLES, NUM_SHARDS, BATCH_SIZE = 14_000_000, 1281, 4096
SIZES = tuple(
    (
        np.arange(1, NUM_SHARDS + 1) * NUM_SAMPLES // NUM_SHARDS - np.arange(NUM_SHARDS) * NUM_SAMPLES // NUM_SHARDS
    ).tolist()
)


@pytest.mark.parametrize(("block_shards", "chunk"), [(16, None), (64, None), (64, 256)])
def test_order_resume_anywhere_in_fourteen_million(block_shards: int, chunk: int | None) -> None:
    """Construct, first batch: asked <= 50 ms."""
    times_ms, cpu_ms = [], []
    rng = random.Random(0)  # noqa: S311 - a test's choice
    for _ in range(15):
        position = rng.randrange(100 * NUM_SAMPLES)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        SampleOrder(SIZES, 0, block_shards, chunk_samples=chunk).ordinals(position, position + BATCH_SIZE)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
        cpu_ms.append(1e3 * (time.process_time() - cpu_s))
    tracemalloc.start()
    order = SampleOrder(SIZES, 0, block_shards, chunk_samples=chunk)
    for step in range(4):
        order.ordinals(step * NUM_SAMPLES // 4, step * NUM_SAMPLES // 4 + BATCH_SIZE)
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    name = f"block of {block_shards} shards" + (f" in runs of {chunk}" if chunk else "")
    print(  # noqa: T201 - a benchmark's result
        f"\n{name}: resume {statistics.median(times_ms):.1f} ms (CPU {statistics.median(cpu_ms):.1f} ms), "
        f"kept {kept_bytes / 2**20:.1f} MiB, peak {peak_bytes / 2**20:.1f} MiB"
    )


def test_order_view_of_fourteen_million_is_one_pass() -> None:
    leaves = np.sort(np.random.default_rng(0).integers(0, 21_843, NUM_SAMPLES)).astype(np.int32)
    split = SplitIndex.in_memory(leaves=leaves[:1])
    split.leaves, split.first_ordinals = leaves, np.cumsum([0, *SIZES])
    began_s = time.perf_counter()
    view = SampleView.of(split, None, Subset(fraction=0.1))
    print(f"\n10 % of 14M samples, stratified: {time.perf_counter() - began_s:.1f} s, {view.num_samples} samples")  # noqa: T201


# ------------------------------------------------------------------------------------------ quality of the shuffle

SORTED_SHARDS, SORTED_SIZE, SORTED_CLASSES = 1280, 500, 1000
SORTED_N = SORTED_SHARDS * SORTED_SIZE
SORTED_LEAVES = np.arange(SORTED_N) * SORTED_CLASSES // SORTED_N
QUALITY_BATCH = 256


def same_class_pairs(leaves: NDArray[np.int64], num_classes: int) -> float:
    """Share of the pairs within a batch that are of one class, mean over batches."""
    rows = leaves[: len(leaves) // QUALITY_BATCH * QUALITY_BATCH].reshape(-1, QUALITY_BATCH)
    shares = []
    for row in rows:
        counts = np.bincount(row, minlength=num_classes)
        shares.append(float((counts * (counts - 1)).sum()) / (QUALITY_BATCH * (QUALITY_BATCH - 1)))
    return statistics.mean(shares)


def webdataset_order() -> NDArray[np.int64]:
    """Shards shuffled, then ``shuffle(1000)`` of webdataset over the stream of samples."""
    shards = np.random.default_rng(0).permutation(SORTED_SHARDS)
    stream: Iterator[int] = (int(shard) * SORTED_SIZE + row for shard in shards for row in range(SORTED_SIZE))
    shuffled = webdataset.filters.shuffle(1000, rng=random.Random(0))(stream)  # noqa: S311
    return np.fromiter(shuffled, dtype=np.int64)


def ours(block_shards: int, chunk: int | None) -> Callable[[], NDArray[np.int64]]:
    sizes = (SORTED_SIZE,) * SORTED_SHARDS
    return lambda: SampleOrder(sizes, 0, block_shards, chunk_samples=chunk).ordinals(0, SORTED_N)


def test_order_mixes_shards_that_are_sorted_by_class() -> None:
    """Same-class pairs per batch over those of a full shuffle; asked within 10 % with a block of 5 % of the data."""
    block = SORTED_SHARDS // 20
    arms = {
        "full shuffle": ours(SORTED_SHARDS, None),
        "block 5 %, runs of 4": ours(block, 4),
        "block 5 %, runs of 2": ours(block, 2),
        "block 5 %, runs of 16": ours(block, 16),
        "block 5 %, whole shards": ours(block, None),
        "webdataset shuffle(1000)": webdataset_order,
    }
    for num_classes in (1000, 10):
        leaves = SORTED_LEAVES * num_classes // SORTED_CLASSES
        shares = {name: same_class_pairs(leaves[arm()], num_classes) for name, arm in arms.items()}
        print(f"\n{num_classes} classes, sorted; same-class pairs relative to a full shuffle:")  # noqa: T201
        for name, share in shares.items():
            print(f"  {name:26s} {share / shares['full shuffle']:.3f}")  # noqa: T201
