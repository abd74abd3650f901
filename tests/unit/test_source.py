"""Samples that cannot be decoded: replaced or left out as the data set says, counted, and never a hang."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core.errors import BadDataError
from tests.data_jobs import DataPlane, encoded, plane, tar_of, undecodable_png
from workloads.data.augment import Augment
from workloads.data.cache import ShardCache
from workloads.data.index import BadSamplePolicy, BadSamples, SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader
from workloads.data.order import SampleOrder
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

__all__ = ["plane"]

NUM_SAMPLES = 40
BAD = (3, 4, 17, 38)
REPLACE = BadSamples(policy=BadSamplePolicy.REPLACE, budget=0.2)


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    """Two shards of 20 samples whose class is their number; four of them cannot be decoded."""
    shards = {}
    for number in range(2):
        members = []
        for sample in range(20 * number, 20 * (number + 1)):
            image = undecodable_png() if sample in BAD else encoded(size=(16, 16), seed=sample)
            members += [(f"{sample:02d}.png", image), (f"{sample:02d}.cls", str(sample).encode())]
        shards[f"train-{number}.tar"] = tar_of(members)
    return plane.index(plane.foreign(shards, num_classes=NUM_SAMPLES))


def source_of(plane: DataPlane, index: SampleIndex, policy: BadSamples, **options: Any) -> SampleSource:
    index = replace(index, bad_samples=policy)
    return SampleSource(plane.store, index, "train", cache_dir=plane.cache, image_size=16, **options)


def order_of(source: SampleSource) -> SampleOrder:
    return SampleOrder(source.split.shard_sizes, 1, 1)


def batches_of(source: SampleSource, **options: Any) -> list[Batch]:
    fixed: dict[str, Any] = {"batch_size": 8, "start_step": 0, "total_steps": 12, "seed": 1, "stage": Stage.PRETRAIN}
    labels = SplitTargets.of(source.split.leaves, NUM_SAMPLES)
    return list(TrainLoader(source, order_of(source), labels, **{**fixed, **options}))


@pytest.mark.parametrize("augment", [Augment.FLIP, Augment.RANDOM_RESIZED_CROP])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_source_bad_sample_is_replaced_at_its_position(
    plane: DataPlane, index: SampleIndex, augment: Augment, num_workers: int
) -> None:
    source = source_of(plane, index, REPLACE)
    order, batches = order_of(source), batches_of(source, augment=augment, num_workers=num_workers)
    for batch in batches:
        for position, ordinal in zip(range(*batch.positions), batch.ordinals_B.tolist(), strict=True):
            planned = int(order.ordinals(position, position + 1)[0])
            attempts = (order.replacement(position, attempt) for attempt in range(40))
            expected = planned if planned not in BAD else next(other for other in attempts if other not in BAD)
            assert ordinal == expected
        assert np.array_equal(batch.targets.numpy(), batch.ordinals_B)  # a replacement comes with its own label
    assert source.bad_samples.num_bad == len(BAD)
    summary = source.bad_samples.summary()
    assert summary["truncated"]["count"] + summary.get("undecodable", {"count": 0})["count"] == len(BAD)
    assert any(text.startswith("train-0.tar:03 cannot be decoded") for text in summary["truncated"]["first"])


def test_source_replaced_samples_are_the_same_after_a_resume(plane: DataPlane, index: SampleIndex) -> None:
    whole = batches_of(source_of(plane, index, REPLACE), augment="random_resized_crop_flip", num_workers=3)
    for step in (1, 5, 11):
        resumed = batches_of(source_of(plane, index, REPLACE), augment="random_resized_crop_flip", start_step=step)
        for left, right in zip(whole[step:], resumed, strict=True):
            assert torch.equal(left.images_BCHW, right.images_BCHW)
            assert np.array_equal(left.ordinals_B, right.ordinals_B)


@pytest.mark.parametrize("cache_bytes", [0, 10**9], ids=["decoded-each-time", "kept"])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_source_evaluation_leaves_bad_samples_out_and_counts_them(
    plane: DataPlane, index: SampleIndex, num_workers: int, cache_bytes: int
) -> None:
    source = source_of(plane, index, REPLACE, cache_bytes=cache_bytes)
    loader = EvalLoader(
        source, SplitTargets.of(source.split.leaves, NUM_SAMPLES), batch_size=16, num_workers=num_workers
    )
    for _ in range(2):  # each evaluation counts its own
        batches = list(loader)
        seen = np.concatenate([batch.ordinals_B for batch in batches])
        assert seen.tolist() == [sample for sample in range(NUM_SAMPLES) if sample not in BAD]
        assert torch.cat([batch.targets for batch in batches]).tolist() == seen.tolist()
        images = torch.cat([batch.images_BCHW for batch in batches]).numpy()
        assert np.array_equal(images, source.images(seen).transpose(0, 3, 1, 2))
        assert loader.num_bad == len(BAD)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_source_failing_policy_names_the_first_bad_sample(
    plane: DataPlane, index: SampleIndex, num_workers: int
) -> None:
    with pytest.raises(BadDataError, match=r"train-[01]\.tar:\d\d cannot be decoded: .*replace or remove the sample"):
        batches_of(source_of(plane, index, BadSamples()), num_workers=num_workers)


def test_source_spent_budget_ends_the_job_with_reasons(plane: DataPlane, index: SampleIndex) -> None:
    policy = replace(REPLACE, budget=0.075)  # three of forty
    with pytest.raises(BadDataError, match=r"more than 3 samples that cannot be decoded.*train-[01]\.tar:\d\d"):
        batches_of(source_of(plane, index, policy))


def test_source_without_any_good_sample_gives_up(
    plane: DataPlane, index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(plane, index, replace(REPLACE, budget=1.0))
    (bad,) = source.fill(np.array([3]), np.empty((1, 16, 16, 3), dtype=np.uint8))
    monkeypatch.setattr(source, "fill", lambda ordinals, *_: [replace(bad, ordinal=int(ordinals[0]))])
    with pytest.raises(BadDataError, match="none of the 16 samples that could replace it"):
        batches_of(source)


def test_source_image_asked_for_by_name_fails_by_name(plane: DataPlane, index: SampleIndex) -> None:
    source = source_of(plane, index, REPLACE)
    with pytest.raises(BadDataError, match=r"train-0\.tar:17 cannot be decoded"):
        source.images(np.array([16, 17]))
    assert source.images(np.array([16])).shape == (1, 16, 16, 3)


def test_source_damaged_local_shard_is_fetched_again_before_a_sample_is_judged(tmp_path: Path) -> None:
    """The store's copy is good: nothing is bad, nothing is replaced."""
    plane = DataPlane(folder=tmp_path)
    members = [
        (f"{n}.{kind}", content) for n in range(4) for kind, content in (("png", encoded(seed=n)), ("cls", b"0"))
    ]
    index = plane.index(plane.foreign({"train-0.tar": tar_of(members)}))
    wanted = source_of(plane, index, BadSamples(), cache_bytes=0).images(np.arange(4))
    shard = index.split("train").shards[0]
    (copy,) = [path for path in plane.cache.rglob(f"{shard.sha256}*") if path.stat().st_size == shard.size_bytes]
    copy.chmod(0o600)
    copy.write_bytes(b"\0" * shard.size_bytes)
    source = source_of(plane, index, BadSamples(), cache_bytes=0)
    assert np.array_equal(source.images(np.arange(4)), wanted)
    assert source.shards.stats.snapshot()["damaged"] == 1


def test_source_that_is_forgotten_lets_go_of_its_shards(
    plane: DataPlane, index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner outlives its jobs; what they downloaded ahead must neither go on nor stay pinned."""
    closed: list[ShardCache] = []

    def close(shards: ShardCache) -> None:
        closed.append(shards)

    monkeypatch.setattr(ShardCache, "close", close)
    source = source_of(plane, index, REPLACE)
    shards = source.shards
    del source
    assert closed == [shards]


def test_loader_batch_over_many_small_blocks_reads_no_shard_by_ranges_for_good(
    plane: DataPlane, tmp_path: Path
) -> None:
    shards = {}
    for number in range(12):
        keys = [f"{number:02d}{row}" for row in range(4)]
        members = [(f"{key}.png", encoded(size=(16, 16), seed=int(key))) for key in keys]
        shards[f"train-{number:02d}.tar"] = tar_of([*members, *((f"{key}.cls", b"0") for key in keys)])
    small = plane.index(plane.foreign(shards))
    source = SampleSource(plane.store, small, "train", cache_dir=tmp_path, image_size=16, cache_bytes=0)
    order = SampleOrder(source.split.shard_sizes, 0, 1)
    labels = SplitTargets.of(np.zeros(48, dtype=np.int64), 2)
    loader = TrainLoader(
        source, order, labels, batch_size=32, start_step=0, total_steps=6, seed=0, stage=Stage.PRETRAIN, num_workers=0
    )
    assert len(list(loader)) == 6
    found = source.shards.stats.snapshot()
    assert found["downloads"] == 12
    assert found["ranged_reads"] <= 8, "those of the beginning, which wait for no shard"
