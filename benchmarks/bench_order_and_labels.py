"""The order of samples and label spaces at the scale of ImageNet-21k: time, memory, and how well sorted shards mix."""

import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import webdataset
from numpy.typing import NDArray

from workloads.data.index import LeafSets, SplitIndex
from workloads.data.order import SampleOrder
from workloads.data.subset import SampleView, Subset
from workloads.labels.label_map import ClassLabels
from workloads.labels.rules import make_label_map
from workloads.labels.wordnet import open_wordnet

# ---------------------------------------------------------------------------------------------------------------------
# The order at the scale of ImageNet-21k: time to the first batch, memory, and how well it mixes sorted classes.

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


# ---------------------------------------------------------------------------------------------------------------------
# Label spaces at the scale of ImageNet-21k: time and memory.

LABELS_NUM_SAMPLES, NUM_CLASSES, LABELS_BATCH_SIZE = 12_743_321, 21_843, 4096

RANDOM_IDS = """
import resource, sys, time
import numpy as np
from workloads.data.index import SplitIndex
from workloads.labels.label_map import RandomLabels
split = SplitIndex.in_memory(leaves=np.zeros(1))
split.first_ordinals = np.array([0, int(sys.argv[1])])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began_s = time.perf_counter()
bound = RandomLabels(num_classes=21_841, seed=0).resolve_targets(split)
taken_s = time.perf_counter() - began_s
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cpu_s = time.process_time()
print(f"{taken_s:.2f} s, peak {after / 1024:.0f} MiB ({(after - before) / 1024:.0f} MiB of it for the ids)")
"""


def test_labels_random_ids_of_imagenet21k() -> None:
    """Asked: <= 30 s and <= 500 MiB."""
    command = [sys.executable, "-c", RANDOM_IDS, str(LABELS_NUM_SAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(f"\nrandom ids for {LABELS_NUM_SAMPLES} samples: {done.stdout.strip()}")  # noqa: T201 - a benchmark's result


def test_labels_wordnet_levels_of_imagenet21k() -> None:
    """Asked: <= 5 s, the file included."""
    timm = find_spec("timm")
    assert timm is not None
    assert timm.origin is not None
    synsets = (Path(timm.origin).parent / "data/_info/imagenet21k_goog_synsets.txt").read_text().split()
    classes = [{"class": number, "name": synset, "synset": synset} for number, synset in enumerate(synsets)]
    began_s = time.perf_counter()
    digest = open_wordnet().digest
    read_s = time.perf_counter() - began_s
    for level in (0, 1, 2, 4, 6, 9):
        make_label_map({"wordnet": {"level": level, "key": "synset", "digest": digest}}, classes, num_train=0)
    taken_s = time.perf_counter() - began_s
    print(f"\nsix WordNet levels of {len(synsets)} classes: {taken_s:.2f} s, of which {read_s:.2f} s to read the file")  # noqa: T201


@pytest.mark.parametrize("form", ["one target", "several targets", "samples with several classes"])
def test_labels_lookup_in_batches(form: str) -> None:
    """Asked: <= 1 us per sample."""
    rng = np.random.default_rng(0)
    leaves = rng.integers(0, NUM_CLASSES, 2_000_000).astype(np.int32)
    width = 1 if form == "one target" else 5
    sets = [sorted(set(rng.integers(0, 500, rng.integers(1, width + 1)).tolist())) for _ in range(NUM_CLASSES)]
    label_map = ClassLabels.of_sets(sets, [str(target) for target in range(500)])
    leaf_sets = None
    if form == "samples with several classes":
        offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 4, len(leaves)))])
        leaf_sets = LeafSets(offsets=offsets, values=rng.integers(0, NUM_CLASSES, offsets[-1]).astype(np.int32))
    bound = label_map.resolve_targets(
        SplitIndex.in_memory(leaves=leaves, keys=("",) * len(leaves), leaf_sets=leaf_sets)
    )
    times_us = []
    for _ in range(200):
        ordinals = rng.integers(0, len(leaves), LABELS_BATCH_SIZE)
        began_s = time.thread_time()
        bound.take(ordinals)
        times_us.append(1e6 * (time.thread_time() - began_s) / LABELS_BATCH_SIZE)
    print(f"\nlookup, {form}: {statistics.median(times_us):.3f} us of CPU per sample (M = {bound.max_targets})")  # noqa: T201
