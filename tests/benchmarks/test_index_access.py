"""Scanning and indexed access, against webdataset's iteration over the very same shards in the same run."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data_jobs import encoded, tar_of
from workloads.commands.data import index
from workloads.data.index import BadSamples, Shard, SplitIndex
from workloads.data.index_writer import SplitColumns
from workloads.data.scan import ClassRule
from workloads.data.scan_splits import ShardSource, scan_sources

pytestmark = pytest.mark.bench

NUM_SHARDS, SAMPLES_PER_SHARD, NUM_ROUNDS = 6, 1500, 7
RULE = ClassRule(num_classes=10)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """JPEGs of about 4 KB: small ones, so that the overhead per sample is what is measured."""
    folder = tmp_path_factory.mktemp("shards")
    images = [encoded("JPEG", size=(64, 48), seed=seed) for seed in range(32)]
    paths = []
    for number in range(NUM_SHARDS):
        members = []
        for row in range(SAMPLES_PER_SHARD):
            key = f"n{number:08d}_{row:05d}"
            members += [(f"{key}.cls", b"3"), (f"{key}.jpg", images[row % 32])]
        paths.append(folder / f"train-{number:06d}.tar")
        paths[-1].write_bytes(tar_of(members))
    (folder / "classes.json").write_text(json.dumps([{"class": leaf, "name": str(leaf)} for leaf in range(10)]))
    return paths


def rounds(arms: dict[str, Callable[[], int]]) -> dict[str, tuple[float, float]]:
    """Median microseconds of wall and CPU time per sample of each arm; arms interleave."""
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(NUM_ROUNDS):
        for name, run in arms.items():
            started_s, cpu_s = time.perf_counter(), time.process_time()
            num_samples = run()
            wall[name].append((time.perf_counter() - started_s) / num_samples * 1e6)
            cpu[name].append((time.process_time() - cpu_s) / num_samples * 1e6)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in arms}


def show(title: str, found: dict[str, tuple[float, float]], base: str) -> None:
    print(f"\n{title} (median of {NUM_ROUNDS} interleaved rounds)")  # noqa: T201 - a benchmark's result
    for name, (wall_us, cpu_us) in found.items():
        ratio = found[base][0] / wall_us
        print(f"  {name:44} {wall_us:8.1f} us/sample, {cpu_us:8.1f} us CPU, {ratio:6.2f}x of {base}")  # noqa: T201 - a benchmark's result


def iterate_webdataset(paths: list[Path]) -> int:
    import webdataset

    pipeline = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False)
    return sum(1 for _ in pipeline)


def scan_all(paths: list[Path], num_processes: int) -> int:
    sources = [ShardSource(name=path.name, size_bytes=path.stat().st_size, path=path) for path in paths]
    total_bytes = 1 << 40 if num_processes > 1 else 0  # the pool, however small the shards
    tables = scan_sources(sources, RULE, num_processes=num_processes, total_bytes=total_bytes)
    return sum(table.num_samples for table in tables)


def test_scan_rate_beside_webdataset_iteration(shards: list[Path]) -> None:
    arms = {
        "webdataset (bytes only)": lambda: iterate_webdataset(shards),
        "scan (hash, check images, classes)": lambda: scan_all(shards, 1),
        "scan, 2 processes with their start": lambda: scan_all(shards, 2),
    }
    show("Scanning", rounds(arms), "webdataset (bytes only)")


def split_of(paths: list[Path], folder: Path) -> SplitIndex:
    sources = [ShardSource(name=path.name, size_bytes=path.stat().st_size, path=path) for path in paths]
    columns = SplitColumns(name="train", folder=folder, rule=RULE, policy=BadSamples())
    for table in scan_sources(sources, RULE, num_processes=1, total_bytes=0):
        columns.add(table)
    names = columns.finish(())
    shards = tuple(
        Shard(name=found.name, object_name="", size_bytes=0, sha256="", num_samples=found.num_samples)
        for found in columns.shards
    )
    return SplitIndex(
        index_key="",
        name="train",
        shards=shards,
        subset_names=(),
        columns=names,
        open_column=lambda column: np.load(folder / f"{column}.npy", mmap_mode="r"),
    )


def test_indexed_access_beside_webdataset_iteration(shards: list[Path], tmp_path: Path) -> None:
    split = split_of(shards, tmp_path)
    files = [os.open(path, os.O_RDONLY) for path in shards]
    order = np.random.default_rng(0).permutation(split.num_samples)

    def read(ordinals: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        owners = split.shard_of(ordinals).tolist()
        offsets, lengths = split.offsets[ordinals].tolist(), split.lengths[ordinals].tolist()
        for owner, offset, length in zip(owners, offsets, lengths, strict=True):
            os.pread(files[owner], length, offset)

    def in_batches() -> int:
        for start in range(0, len(order), 256):
            read(order[start : start + 256])
        return len(order)

    def one_by_one() -> int:
        for start in range(len(order)):
            read(order[start : start + 1])
        return len(order)

    arms = {
        "webdataset (bytes, in order)": lambda: iterate_webdataset(shards),
        "index, shuffled, batches of 256": in_batches,
        "index, shuffled, one by one": one_by_one,
    }
    show("Access", rounds(arms), "webdataset (bytes, in order)")
    for file in files:
        os.close(file)


def test_index_command_rate(shards: list[Path]) -> None:
    """The whole command on this machine's cores."""
    target = {"place": str(shards[0].parent), "splits": {}, "classes": str(shards[0].parent / "classes.json")}
    started_s = time.perf_counter()
    found = index(
        {
            "target": {**target, "num_classes": 0, "multi_label": False},
            "policy": "fail",
            "budget": 0.0,
            "write": False,
            "num_processes": 1,
        }
    )
    num_samples = found["splits"]["train"]["num_samples"]
    print(f"\ndata index: {num_samples / (time.perf_counter() - started_s):,.0f} samples/s on one core")  # noqa: T201 - a benchmark's result
