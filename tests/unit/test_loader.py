"""Loaders: the right images with the right targets, from any step on, for any layout."""

import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_jobs import TREE, DataPlane, encoded, plane, tar_of
from workloads.data import pipeline
from workloads.data.augment import Augment
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader
from workloads.data.order import DataGroups, SampleOrder
from workloads.data.pipeline import PlannedBatch, Prefetcher, Window, batches_ahead
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

__all__ = ["plane"]

BATCH_SIZE = 50
NUM_STEPS = 12  # two and a half epochs of 240 samples
AUGMENTS = [Augment.CROP_FLIP, Augment.RANDOM_RESIZED_CROP_FLIP]


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    return plane.builtin({**TREE, "num_train": 240})


def source_of(plane: DataPlane, index: SampleIndex, split: str, **options: Any) -> SampleSource:
    return SampleSource(plane.store, index, split, cache_dir=plane.cache, image_size=16, **options)


@pytest.fixture(scope="module")
def source(plane: DataPlane, index: SampleIndex) -> SampleSource:
    return source_of(plane, index, "train")


@pytest.fixture(scope="module")
def labels(plane: DataPlane, index: SampleIndex, source: SampleSource) -> SplitTargets:
    return plane.labels(index, {"hierarchy": "depth2"}).resolve_targets(source.split)


def loader_of(source: SampleSource, labels: SplitTargets, start_step: int = 0, **options: Any) -> TrainLoader:
    fixed: dict[str, Any] = {"batch_size": BATCH_SIZE, "total_steps": NUM_STEPS, "seed": 5, "stage": Stage.PRETRAIN}
    order = SampleOrder(source.split.shard_sizes, 5, 2)
    return TrainLoader(source, order, labels, start_step=start_step, **{**fixed, **options})


def same(left: Batch, right: Batch) -> bool:
    return (
        (left.step, left.positions) == (right.step, right.positions)
        and torch.equal(left.images_BCHW, right.images_BCHW)
        and torch.equal(left.targets, right.targets)
        and np.array_equal(left.ordinals_B, right.ordinals_B)
    )


@pytest.mark.parametrize(("data_groups", "num_shards_each"), [(1, 8), (2, 4), (24, 4)])
def test_loader_nodes_fetch_the_shards_of_their_data_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_groups: int, num_shards_each: int
) -> None:
    plane = DataPlane(folder=tmp_path)
    members = [
        (f"{row}.{suffix}", content) for row in range(12) for suffix, content in (("png", encoded()), ("cls", b"0"))
    ]
    index = plane.index(plane.foreign({f"train-{number}.tar": _renamed(members, number) for number in range(8)}))
    fetched: list[set[int]] = []
    for rank in range(2):
        source = SampleSource(plane.store, index, "train", cache_dir=tmp_path / f"node{rank}", image_size=16)
        own: set[int] = set()
        monkeypatch.setattr(source.shards, "prefetch", lambda shard_ids, own=own: own.update(shard_ids.tolist()))
        order = SampleOrder(source.split.shard_sizes, 5, 2, groups=DataGroups.of(data_groups, 24))
        loader = TrainLoader(
            source,
            order,
            SplitTargets.of(source.split.leaves, 2),
            batch_size=24,
            start_step=0,
            total_steps=4,
            seed=5,
            stage=Stage.PRETRAIN,
            rank=rank,
            world_size=2,
        )
        seen = {shard for batch in loader for shard in source.split.shard_of(batch.ordinals_B).tolist()}
        assert seen == own  # also in the last batches: no epoch follows
        fetched.append(own)
        source.close()
    assert [len(own) for own in fetched] == [num_shards_each] * 2
    assert fetched[0] | fetched[1] == set(range(8))


def _renamed(members: list[tuple[str, bytes]], number: int) -> bytes:
    return tar_of([(f"{number}-{name}", content) for name, content in members])


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("prefetch", "decode"))]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_loader_batches_follow_the_order(source: SampleSource, labels: SplitTargets, num_workers: int) -> None:
    batches = list(loader_of(source, labels, num_workers=num_workers))
    order = SampleOrder(source.split.shard_sizes, 5, 2)
    assert [batch.step for batch in batches] == list(range(NUM_STEPS))
    for batch in batches:
        start, stop = batch.positions
        assert (start, stop) == (batch.step * BATCH_SIZE, (batch.step + 1) * BATCH_SIZE)
        expected = order.ordinals(start, stop)
        assert np.array_equal(batch.ordinals_B, expected)
        assert np.array_equal(batch.images_BCHW.numpy(), source.images(expected).transpose(0, 3, 1, 2))
        assert np.array_equal(batch.targets.numpy(), source.split.leaves[expected] // 3)
    assert batches[0].images_BCHW.dtype == torch.uint8
    assert batches[0].images_BCHW.is_contiguous(memory_format=torch.channels_last)
    assert batches[0].targets.dtype == torch.int64


@pytest.mark.parametrize("augment", AUGMENTS)
def test_loader_any_number_of_workers_makes_the_same_batches(
    source: SampleSource, labels: SplitTargets, augment: Augment
) -> None:
    arms = [loader_of(source, labels, augment=augment, num_workers=number) for number in (0, 1, 2, 5)]
    for first, *others in zip(*arms, strict=True):
        assert all(same(first, other) for other in others)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_loader_started_at_any_step_continues_the_sequence(
    source: SampleSource, labels: SplitTargets, augment: Augment
) -> None:
    whole = list(loader_of(source, labels, augment=augment))
    for start_step in range(NUM_STEPS + 1):
        resumed = list(loader_of(source, labels, start_step, augment=augment, num_workers=start_step % 3))
        assert len(resumed) == NUM_STEPS - start_step
        assert all(same(left, right) for left, right in zip(resumed, whole[start_step:], strict=True))


@settings(max_examples=20)
@given(st.integers(1, 7), st.sampled_from([1, 2, 5]), st.integers(0, NUM_STEPS - 1))
def test_loader_ranks_share_each_global_batch(
    source: SampleSource, labels: SplitTargets, world_size: int, group_size: int, step: int
) -> None:
    """Also numbers of ranks that do not divide the batch; together they are the batch of a single rank."""
    options = {"augment": "random_resized_crop_flip", "total_steps": step + 1, "num_workers": 0}
    (whole,) = loader_of(source, labels, step, **options)
    layout = {"world_size": world_size, "group_size": group_size}
    shares = [next(iter(loader_of(source, labels, step, rank=rank, **layout, **options))) for rank in range(world_size)]
    bounds = [share.positions for share in shares]
    assert [bounds[0][0], *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), whole.positions[1]]
    assert all((stop - start) % group_size == 0 for start, stop in bounds)
    assert torch.equal(torch.cat([share.images_BCHW for share in shares]), whole.images_BCHW)
    assert torch.equal(torch.cat([share.targets for share in shares]), whole.targets)
    assert np.array_equal(np.concatenate([share.ordinals_B for share in shares]), whole.ordinals_B)


def test_loader_other_label_space_shows_the_same_images(
    plane: DataPlane, index: SampleIndex, source: SampleSource, labels: SplitTargets
) -> None:
    other = plane.labels(index, {"random": {"num_classes": 9, "seed": 0}}).resolve_targets(source.split)
    for augment in AUGMENTS:
        batches = list(zip(*(loader_of(source, one, augment=augment) for one in (labels, other)), strict=True))
        assert all(torch.equal(left.images_BCHW, right.images_BCHW) for left, right in batches)
        assert not all(torch.equal(left.targets, right.targets) for left, right in batches)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_loader_abandoned_iteration_ends_its_threads(
    source: SampleSource, labels: SplitTargets, num_workers: int
) -> None:
    # More steps than are ever read ahead, or the threads may have ended by themselves.
    for batch in loader_of(source, labels, num_workers=num_workers, total_steps=200):
        assert loader_threads()
        if batch.step == 2:
            break
    gc.collect()
    assert not loader_threads()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_loader_finished_iteration_ends_its_threads(
    source: SampleSource, labels: SplitTargets, num_workers: int
) -> None:
    assert len(list(loader_of(source, labels, num_workers=num_workers))) == NUM_STEPS
    assert not loader_threads()


def test_loader_without_workers_starts_no_thread(source: SampleSource, labels: SplitTargets) -> None:
    batches = iter(loader_of(source, labels, num_workers=0))
    next(batches)
    assert not loader_threads()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_loader_evaluation_sees_each_sample_once_with_its_subset(
    plane: DataPlane, index: SampleIndex, world_size: int
) -> None:
    source = source_of(plane, index, "val")
    labels = plane.labels(index, {"hierarchy": "depth2"}).resolve_targets(source.split)
    ranks = [EvalLoader(source, labels, batch_size=20, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [batch for loader in ranks for batch in loader]  # ranks have runs of batches, in their order
    lengths = [len(loader) for loader in ranks]
    assert lengths[0] == max(lengths) <= min(lengths) + 1
    assert [len(batch.targets) for batch in batches] == [20, 20, 20, 12]  # the same batches on any layout
    assert np.concatenate([batch.ordinals_B for batch in batches]).tolist() == list(range(72))
    assert np.array_equal(np.concatenate([batch.subset_ids_B for batch in batches]), source.split.subset_ids)
    assert np.array_equal(torch.cat([batch.targets for batch in batches]).numpy(), source.split.leaves // 3)
    images = torch.cat([batch.images_BCHW for batch in batches]).numpy()
    assert np.array_equal(images, source.images(np.arange(72)).transpose(0, 3, 1, 2))


def test_loader_evaluation_of_a_part_keeps_its_order(plane: DataPlane, index: SampleIndex) -> None:
    source = source_of(plane, index, "val")
    labels, part = SplitTargets.of(source.split.leaves, 12), np.array([5, 3, 70, 3], dtype=np.int64)
    batches = list(EvalLoader(source, labels, batch_size=3, ordinals=part))
    assert np.concatenate([batch.ordinals_B for batch in batches]).tolist() == part.tolist()
    assert [batch.positions for batch in batches] == [(0, 3), (3, 4)]


def test_loader_multi_label_targets_are_rows(source: SampleSource) -> None:
    class Pairs(SplitTargets):
        def take(self, ordinals_B: np.ndarray) -> np.ndarray:
            return np.stack([ordinals_B % 5, np.full(len(ordinals_B), -1)], axis=1)

    labels = Pairs(num_classes=5, num_samples=240, max_targets=2, is_multi_label=True)
    batch = next(iter(loader_of(source, labels)))
    assert batch.targets.shape == (BATCH_SIZE, 2)
    assert np.array_equal(batch.targets[:, 0].numpy(), batch.ordinals_B % 5)


def test_loader_decoded_split_is_shared_by_later_sources(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.builtin({**TREE, "num_train": 40, "seed": 1})
    everything = np.arange(40)
    first = source_of(plane, index, "train").images(everything)
    reopened = source_of(plane, index, "train")
    shutil.rmtree(plane.folder)
    assert np.array_equal(reopened.images(everything), first)


@pytest.mark.parametrize(("cache_bytes", "num_reads"), [(1000, 2), (10**6, 1)])
def test_loader_split_larger_than_the_cache_is_decoded_each_time(
    tmp_path: Path, cache_bytes: int, num_reads: int
) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.builtin({**TREE, "num_train": 40, "seed": 2 + num_reads})
    ordinals = np.array([39, 0, 7, 5])
    source = source_of(plane, index, "train", cache_bytes=cache_bytes)
    first, second = source.images(ordinals), source.images(ordinals)
    assert np.array_equal(first, second)
    assert source.shards.stats.snapshot()["bytes_served"] == num_reads * source.split.lengths[ordinals].sum()


def test_loader_stats_count_what_was_handed_out(source: SampleSource, labels: SplitTargets) -> None:
    loader = loader_of(source, labels)
    assert loader.stats.snapshot()["images_per_s"] == 0
    list(islice(loader, 4))
    snapshot = loader.stats.snapshot()
    assert snapshot["images"] == 4 * BATCH_SIZE
    assert snapshot["wait_s"] == pytest.approx(4 * snapshot["wait_s_per_step"])
    assert snapshot["images_per_s"] > 0
    assert snapshot["bad_samples"] == 0
    assert {"cache_hit_rate", "bytes_from_store"} <= snapshot.keys()


def planned(step: int) -> PlannedBatch:
    squares = torch.zeros((16, 4, 4, 3), dtype=torch.uint8)
    return PlannedBatch(step=step, start=16 * step, ordinals_B=np.zeros(16, dtype=np.int64), squares_BHWC=squares)


@pytest.mark.parametrize(
    ("seconds_per_step", "batch_bytes", "memory_bytes", "depth"),
    [
        (0.2, 128 * 2**20, 2**40, 10),  # 2 s of training
        (0.2, 128 * 2**20, 2**30, 8),  # what the memory holds
        (0.2, 2**30, 2**20, 1),
        (5.0, 50 * 2**20, 2**40, 2),  # what fits into 128 MiB, as before a step is known
        (0.001, 1, 2**40, 64),
    ],
)
def test_loader_window_holds_two_seconds_of_training_within_the_memory(
    seconds_per_step: float, batch_bytes: int, memory_bytes: int, depth: int
) -> None:
    window = Window(batch_bytes, memory_bytes)
    assert window.depth <= 4
    for _ in range(100):
        window.note(seconds_per_step)
    assert window.depth == depth
    window.note(600.0)  # an evaluation came after the step
    assert window.depth == depth


def test_loader_window_follows_the_steps_and_has_a_sixteenth_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    noted: list[float] = []

    class Noted(Window):
        def __init__(self, batch_bytes: int, memory_bytes: int) -> None:
            super().__init__(batch_bytes, memory_bytes)
            made.append((batch_bytes, memory_bytes))

        def note(self, step_s: float) -> None:
            noted.append(step_s)

    monkeypatch.setattr(pipeline, "Window", Noted)
    monkeypatch.setattr(pipeline, "free_memory_bytes", lambda: 1600)
    assert len(list(batches_ahead(planned, lambda _batch, _part: None, range(3), batch_bytes=7, num_workers=1))) == 3
    assert made == [(7, 100)]
    assert len(noted) == 3
    batches = batches_ahead(planned, lambda _batch, _part: None, range(3), batch_bytes=7, num_workers=1)
    next(batches)
    noted.clear()
    batches.send(0.0)  # of another consumer, whose steps are not known yet
    batches.send(12.5)
    assert noted == [12.5]


GROUP = "job_7/step_0"


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({}, None),  # what the machine has
        ({"": "max"}, None),
        ({"": "1000000"}, 300_000),  # 900,000 are used, of which files hold 200,000
        ({GROUP: "max", "job_7": "900000", "": "1000000"}, 200_000),
        ({GROUP: "100000"}, 0),
        ({GROUP: f"{2**60}"}, None),
    ],
)
def test_loader_free_memory_is_that_of_its_container_or_group_without_what_it_read_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], free: int | None
) -> None:
    monkeypatch.setattr(pipeline, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(pipeline, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text(f"1:name=systemd:/x\n0::/{GROUP}\n")
    for group, limit in limits.items():
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("900000\n")
        (folder / "memory.stat").write_text("anon 700000\ninactive_file 150000\nactive_file 50000\n")
    found = pipeline.free_memory_bytes()
    assert found == free if free is not None else found > 1_000_000


@pytest.mark.parametrize(("batch_bytes", "depth"), [(10**9, 1), (50 * 2**20, 2), (1, 4)])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_loader_keeps_its_memory_bound(batch_bytes: int, depth: int, num_workers: int) -> None:
    """Never more than depth + 3 batches, counting the one in the consumer's hands and the next, which replaces it."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, full = 0, threading.Event()

    def plan(step: int) -> PlannedBatch:
        nonlocal most
        batch = planned(step)
        alive.add(batch.squares_BHWC)
        most = max(most, len(alive))
        if len(alive) == depth + 2:
            full.set()
        return batch

    def fill(batch: PlannedBatch, part: slice) -> None:
        batch.squares_BHWC[part] += 1

    batches = batches_ahead(
        plan, fill, range(20), batch_bytes=batch_bytes, num_workers=num_workers, memory_bytes=depth * batch_bytes
    )
    current = next(batches)
    assert full.wait(timeout=30)
    for number in range(1, 20):
        current = next(batches)
        assert current.step == number
        assert bool((current.squares_BHWC == 1).all())
    assert depth + 2 <= most <= depth + 3


def test_loader_tasks_leave_work_for_all_workers() -> None:
    """At first four batches of 64 are ahead; then so many that each is one task. Two batches are all that there is."""
    parts: dict[int, list[int]] = {}
    lock = threading.Lock()

    def plan(step: int) -> PlannedBatch:
        return replace(planned(step), ordinals_B=np.arange(64), squares_BHWC=torch.zeros(64, 1))

    def fill(batch: PlannedBatch, part: slice) -> None:
        with lock:
            parts.setdefault(batch.step, []).append(part.stop - part.start)

    def make(num_steps: int) -> None:
        parts.clear()
        batches = batches_ahead(plan, fill, range(num_steps), batch_bytes=1, num_workers=12, chunk_samples=64)
        assert [batch.step for batch in batches] == list(range(num_steps))

    make(80)
    assert sorted(parts[0]) == [20, 22, 22]
    assert min(map(len, parts.values())) == 1
    make(2)
    assert sorted(parts[0]) == [9, 11, 11, 11, 11, 11]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_loader_worker_that_dies_is_reported_at_its_turn(error: BaseException, num_workers: int) -> None:
    def fill(batch: PlannedBatch, part: slice) -> None:
        if batch.step == 2:
            raise error

    batches = batches_ahead(planned, fill, range(9), batch_bytes=1, num_workers=num_workers)
    assert [next(batches).step for _ in range(2)] == [0, 1]
    with pytest.raises(type(error)):
        next(batches)
    assert not loader_threads()


def test_loader_prefetch_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("fourth")

    with Prefetcher(items(), depth=lambda: 2) as prefetched:
        assert [next(prefetched) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="fourth"):
            next(prefetched)


def test_loader_prefetch_stays_within_its_depth() -> None:
    made = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                third.set()
            yield number

    with Prefetcher(items(), depth=lambda: 2):
        assert third.wait(timeout=30)
        # two are ready, the third waits for room: no fourth was asked for
        assert made == [0, 1, 2]
