"""Processes that decode for a loader: the batches of threads, whatever happens to the processes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.data_jobs import DataPlane, decoding_in_processes, encoded, plane, tar_of, undecodable_png
from tests.photographs import jpeg, photograph
from tests.slow_augmentation import NAME, write_slow_augmentation
from tests.waiting import wait_until
from workloads.data import loader, pipeline
from workloads.data.augment import Augment, AugmentSpec
from workloads.data.cache import ObjectCache
from workloads.data.decode import DecoderName
from workloads.data.decode_pool import DecodePool
from workloads.data.index import BadSamplePolicy, BadSamples, SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader
from workloads.data.order import SampleOrder
from workloads.data.pixels import PixelSpec
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

__all__ = ["plane"]

NUM_WORKERS, NUM_STEPS, BATCH_SIZE, TASK_SAMPLES, IMAGE_SIZE = 2, 24, 50, 20, 32
BAD = 6
AUGMENT = AugmentSpec(augment=Augment.RANDOM_RESIZED_CROP_FLIP, color_jitter=0.4)


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    """Photographs and PNGs in three shards; one cannot be decoded."""
    photographs = [jpeg(photograph(seed, width=60, height=40)) for seed in range(4)]
    shards_of = {}
    for number in range(3):
        images = [photographs[row % 4] if row % 3 else encoded(size=(20, 30), seed=row) for row in range(60)]
        images[BAD] = undecodable_png() if number == 1 else images[BAD]
        suffixes = ["jpg" if row % 3 else "png" for row in range(60)]
        shards_of[f"train-{number}.tar"] = tar_of(
            [
                member
                for row, (image, suffix) in enumerate(zip(images, suffixes, strict=True))
                for member in ((f"{number}-{row}.{suffix}", image), (f"{number}-{row}.cls", b"0"))
            ]
        )
    return plane.index(plane.foreign(shards_of))


@pytest.fixture
def num_filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Decode in processes, three tasks to a batch, of which the last one is smaller; the samples of all tasks that
    processes did."""
    filled: list[int] = []
    fill = DecodePool.fill

    def counting(pool: DecodePool, find: Any, start: int, squares: NDArray[np.uint8]) -> list[int] | None:
        left = fill(pool, find, start, squares)
        filled.extend([len(squares)] * (left is not None))
        return left

    monkeypatch.setattr(DecodePool, "fill", counting)
    monkeypatch.setattr(loader, "_PROCESS_CHUNK_BYTES", TASK_SAMPLES * 3 * IMAGE_SIZE**2)
    with decoding_in_processes():
        yield filled
    assert filled


def batches_of(
    plane: DataPlane, index: SampleIndex, augment: AugmentSpec = AUGMENT, *, cache: str = "cache", **options: Any
) -> TrainLoader:
    pixels = PixelSpec(image_size=IMAGE_SIZE, decoder=DecoderName.TURBO)
    index = replace(index, bad_samples=BadSamples(policy=BadSamplePolicy.REPLACE, budget=0.1))
    source = SampleSource(plane.store, index, "train", cache_dir=plane.folder / cache, pixels=pixels, cache_bytes=0)
    return TrainLoader(
        source,
        SampleOrder(source.split.shard_sizes, 5, 2),
        SplitTargets.of(source.split.leaves, 2),
        batch_size=BATCH_SIZE,
        start_step=0,
        total_steps=NUM_STEPS,
        seed=5,
        stage=Stage.PRETRAIN,
        augment=augment,
        num_workers=NUM_WORKERS,
        **options,
    )


def in_threads(batches: Iterable[Batch]) -> list[Batch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "decodes_in_processes", lambda _device: False)
        return list(batches)


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.images_BCHW, right.images_BCHW)
        assert np.array_equal(left.ordinals_B, right.ordinals_B)


@pytest.fixture(scope="module")
def expected(plane: DataPlane, index: SampleIndex) -> list[Batch]:
    """What threads make."""
    return list(batches_of(plane, index))


def test_processes_make_the_batches_of_threads(
    plane: DataPlane, index: SampleIndex, expected: list[Batch], num_filled: list[int]
) -> None:
    batches = batches_of(plane, index)
    assert_same(list(batches), expected)
    assert max(num_filled) <= TASK_SAMPLES
    assert len(num_filled) == NUM_STEPS * -(-BATCH_SIZE // TASK_SAMPLES)
    assert sum(num_filled) == NUM_STEPS * BATCH_SIZE  # those with a bad sample, too
    counted = batches.stats.snapshot()
    assert counted["bad_samples"] == 1
    assert NUM_STEPS * BATCH_SIZE <= counted["cache_hits"] + counted["cache_misses"] <= NUM_STEPS * BATCH_SIZE + 20


@pytest.mark.parametrize("augment", [Augment.CROP_FLIP, Augment.NONE])
def test_processes_make_the_share_of_a_rank(
    plane: DataPlane, index: SampleIndex, num_filled: list[int], augment: Augment
) -> None:
    rank: dict[str, Any] = {"rank": 1, "world_size": 2, "augment": AugmentSpec(augment=augment, color_jitter=0.2)}
    assert_same(list(batches_of(plane, index, **rank)), in_threads(batches_of(plane, index, **rank)))


def test_processes_evaluate_as_threads(plane: DataPlane, index: SampleIndex, num_filled: list[int]) -> None:
    source = batches_of(plane, index).source
    labels = SplitTargets.of(source.split.leaves, 2)
    evaluated = EvalLoader(source, labels, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    found = list(evaluated)
    assert evaluated.num_bad == 1
    assert_same(found, in_threads(EvalLoader(source, labels, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)))


def test_processes_read_files_of_a_cache_that_somebody_empties(
    plane: DataPlane, index: SampleIndex, expected: list[Batch], num_filled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_S", 0.0)
    found = []
    for batch in batches_of(plane, index, cache="emptied"):
        if batch.step == 2:
            shutil.rmtree(plane.folder / "emptied")
        found.append(batch)
    assert_same(found, expected)
    assert len(num_filled) == 3 * NUM_STEPS


def test_processes_start_with_a_large_environment(
    plane: DataPlane, index: SampleIndex, expected: list[Batch], num_filled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    list(batches_of(plane, index))  # the server, which gets it as the kernel allows, is there
    for number in range(20):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    assert_same(list(batches_of(plane, index)), expected)


def test_processes_use_augmentations_of_packages_that_came_later(
    plane: DataPlane, index: SampleIndex, num_filled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(batches_of(plane, index))  # the server is there
    write_slow_augmentation(tmp_path)
    code = (tmp_path / "slow_augmentation.py").read_text().replace("return image\n", "return 255 - image\n")
    (tmp_path / "slow_augmentation.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_augmentation", raising=False)  # another test may have planned with its own
    spec = AugmentSpec(augment=Augment.RANDOM_CROP, plugin=f"slow-augmentation==1.0:{NAME}")
    num_filled.clear()
    found = list(batches_of(plane, index, spec))
    assert_same(found, in_threads(batches_of(plane, index, spec)))
    plain = in_threads(batches_of(plane, index, AugmentSpec(augment=Augment.RANDOM_CROP)))
    assert torch.equal(found[0].images_BCHW, 255 - plain[0].images_BCHW)


def test_samples_that_are_read_by_ranges_are_decoded_in_processes(
    plane: DataPlane, index: SampleIndex, expected: list[Batch], num_filled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectCache, "pin_ahead", lambda *_args, **_options: None)
    batches = batches_of(plane, index, cache="without-room")
    assert_same(list(batches), expected)
    assert batches.stats.snapshot()["cache_hits"] == 0


def test_killed_processes_are_replaced(
    plane: DataPlane,
    index: SampleIndex,
    expected: list[Batch],
    num_filled: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_S", 0.0)  # or all batches would be ready before
    before = set(processes_of(os.getpid()))
    found = []
    for batch in batches_of(plane, index):
        if batch.step == 2:
            wait_until(lambda: len(set(processes_of(os.getpid())) - before) == NUM_WORKERS)
            victims = set(processes_of(os.getpid())) - before
            os.kill(victims.pop(), signal.SIGKILL)
        if batch.step == NUM_STEPS - 4:
            wait_until(lambda: len(set(processes_of(os.getpid())) - before) == NUM_WORKERS)
        found.append(batch)
    assert_same(found, expected)
    assert caplog.text.count("its process has ended") == 1


def processes_of(owner: int) -> list[int]:
    """Those that the server of a process has forked."""
    servers = children(owner)
    return [pid for server in servers if "decode_pool" in command(server) for pid in children(server)]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread may have ended
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def lives(pid: int) -> bool:
    """Whether a process is there; one that has ended and that nobody waits for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


_LOADS = """
import os, signal, sys
from pathlib import Path
from tests.unit import test_decode_pool as cases
from tests.data_jobs import DataPlane
from tests.waiting import wait_until
from workloads.data import loader
from workloads.data.index import SampleIndex

loader.decodes_in_processes = lambda _device: True
plane = DataPlane(folder=Path(sys.argv[1]))
batches = iter(cases.batches_of(plane, SampleIndex.open(plane.store, sys.argv[2], plane.cache)))
next(batches)
[loads] = cases.children(os.getpid())
wait_until(lambda: len(cases.processes_of(loads)) == cases.NUM_WORKERS)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.slow  # four processes load torch; that processes end with their sockets is seen below, too
def test_processes_end_with_a_killed_loader(plane: DataPlane, index: SampleIndex) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LOADS, str(plane.folder), index.key],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"ready\n"
            [loads] = children(owner.pid)
            family = [loads, *children(loads), *processes_of(loads)]
            assert len(family) == 2 + NUM_WORKERS
        finally:
            owner.kill()
    wait_until(lambda: not any(map(lives, family)))


def test_processes_end_with_the_iteration(plane: DataPlane, index: SampleIndex, num_filled: list[int]) -> None:
    before = set(processes_of(os.getpid()))
    batches = iter(batches_of(plane, index))
    next(batches)
    wait_until(lambda: len(set(processes_of(os.getpid())) - before) == NUM_WORKERS)
    batches.close()  # type: ignore[attr-defined]
    wait_until(lambda: set(processes_of(os.getpid())) <= before)
