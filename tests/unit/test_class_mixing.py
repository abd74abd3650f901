"""The expected number of classes in a batch, against batches that the real order makes; and who warns of too few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.data_checks import SPREAD_FIELD, ClassSpread, Shuffle, cut_shards, sorted_shards
from orchestrator.storage.artifacts import read_record
from orchestrator.sweepfile.load import load_sweep
from tests.data_jobs import DataPlane, Member, encoded, tar_of
from tests.tiny_training import RECIPE
from tests.unit.test_external_shards import Outside
from workloads.data.order import DataGroups, SampleOrder
from workloads.data.reasons import BadCount
from workloads.data.scan_splits import ScannedSplit
from workloads.data.subset import SampleView
from workloads.runtime.streams import Stage
from workloads.train.recipe import Recipe
from workloads.train.samples import LabelledSamples, LabelledSplit, poor_mixing
from workloads.train.task import JobContext

CLASSES = 92
IMAGE = encoded()


def spread_of(leaves: NDArray[Any], shard_sizes: list[int]) -> ClassSpread:
    """As the index tells it."""
    ends = np.cumsum(shard_sizes)
    shards = [np.unique(leaves[end - size : end]) for end, size in zip(ends, shard_sizes, strict=True)]
    split = ScannedSplit(
        folder=Path(),
        columns=(),
        shards=tuple(shards),  # type: ignore[arg-type] # only counted
        num_samples=len(leaves),
        bad=BadCount(),
        class_counts=tuple(np.bincount(leaves, minlength=CLASSES).tolist()),
        class_shards=tuple(np.bincount(np.concatenate(shards), minlength=CLASSES).tolist()),
    )
    return ClassSpread.from_json(split.class_spread())


def measured(leaves: NDArray[Any], shard_sizes: list[int], shuffle: Shuffle) -> float:
    """Distinct classes per batch, over some epochs of the order itself."""
    groups = DataGroups.of(shuffle.data_groups, shuffle.batch_size)
    order = SampleOrder(shard_sizes, 0, shuffle.block_shards, chunk_samples=shuffle.chunk_samples, groups=groups)
    size, num_batches = shuffle.batch_size, len(leaves) // shuffle.batch_size
    batches = (leaves[order.ordinals(batch * size, (batch + 1) * size)] for batch in range(num_batches))
    return float(np.mean([len(np.unique(batch)) for batch in batches]))


def unequal_classes() -> NDArray[Any]:
    """16,000 samples sorted by class; the largest class has 20 times as many as the smallest."""
    shares = np.linspace(1, 20, CLASSES)
    leaves = np.repeat(np.arange(CLASSES), np.round(16_000 * shares / shares.sum()).astype(int))
    return np.resize(leaves, 16_000)


@pytest.mark.parametrize("chunk_samples", [None, 128, 16, 1])
@pytest.mark.parametrize("block_shards", [1, 4, 16, 160])
@pytest.mark.parametrize("batch_size", [32, 256])
def test_classes_per_batch_of_sorted_shards_are_those_of_the_order(
    block_shards: int, batch_size: int, chunk_samples: int | None
) -> None:
    leaves, sizes = unequal_classes(), 160 * [100]
    shuffle = Shuffle(batch_size=batch_size, block_shards=block_shards, chunk_samples=chunk_samples)
    expected, found = spread_of(leaves, sizes).classes_per_batch(shuffle), measured(leaves, sizes, shuffle)
    # Runs at the ends of shards are shorter, so there are more of them than the measure counts; a batch of several
    # blocks has parts of two more.
    assert 0.75 * found - 1 <= expected <= 1.15 * found + 1


@pytest.mark.parametrize("num_shards", [20, 25, 32, 40])
def test_few_sorted_shards_are_complained_of_with_a_setting_that_repairs_it(num_shards: int) -> None:
    """The last block of an epoch is smaller: of 20 shards, one batch of five draws on four of them."""
    leaves, sizes, shuffle = unequal_classes(), num_shards * [16_000 // num_shards], Shuffle(batch_size=256)
    spread = spread_of(leaves, sizes)
    expected, found = spread.classes_per_batch(shuffle), measured(leaves, sizes, shuffle)
    assert 0.75 * found - 1 <= expected <= 1.15 * found + 1
    complaint = spread.complaint(shuffle)
    chunk = int(complaint.partition("shuffle_chunk_samples: ")[2].partition("`")[0])
    repaired = measured(leaves, sizes, replace(shuffle, chunk_samples=chunk))
    assert repaired == pytest.approx(int(complaint.rpartition(" ")[2]), rel=0.15)
    assert repaired > 0.9 * measured(leaves, sizes, replace(shuffle, block_shards=num_shards))


@pytest.mark.parametrize("block_shards", [1, 4, 16, 160])
@pytest.mark.parametrize(("batch_size", "data_groups"), [(32, 8), (256, 2), (256, 8), (256, 7)])
def test_classes_per_batch_with_data_groups_are_those_of_the_order(
    batch_size: int, data_groups: int, block_shards: int
) -> None:
    leaves, sizes = unequal_classes(), 160 * [100]
    shuffle = Shuffle(batch_size=batch_size, block_shards=block_shards, data_groups=data_groups)
    expected, found = spread_of(leaves, sizes).classes_per_batch(shuffle), measured(leaves, sizes, shuffle)
    assert 0.75 * found - 1 <= expected <= 1.15 * found + 1


def view_of(leaves: NDArray[Any], shard_samples: int, kept: NDArray[np.bool_]) -> LabelledSplit:
    """Some samples of shards of equal size."""
    first_ordinals = np.arange(0, len(leaves) + 1, shard_samples)
    split = mock.Mock(leaves=leaves, num_samples=len(leaves), leaf_sets=None, shares=None)
    view = SampleView.selecting(first_ordinals, np.flatnonzero(kept))
    return LabelledSplit(source=mock.Mock(split=split), labels=mock.Mock(), view=view)


def complaint_of(split: LabelledSplit, **recipe: Any) -> str:
    fields = {**RECIPE, "batch_size": 32, "shuffle_block_shards": 16, **recipe}
    return poor_mixing(split, Recipe.from_mapping(fields), 0, Stage.PRETRAIN)


def test_label_space_of_few_classes_of_sorted_shards_is_complained_of_by_the_job() -> None:
    """A block of 16 shards holds one or two that have samples at all; the plan knows the whole split only."""
    leaves = np.repeat(np.arange(400), 400)
    split = view_of(leaves, 400, leaves % 10 == 0)
    complaint = complaint_of(split)
    assert complaint.startswith("of its 400 training shards 40 hold samples to train on, and these are sorted by class")
    told = int(complaint.partition("a batch of 32 holds ")[2].partition(" ")[0])
    assert told <= 3
    assert f"a batch of 32 holds {told} of the 40 classes, fully shuffled 22; `shuffle_chunk_samples: " in complaint
    chunk = int(complaint.partition("shuffle_chunk_samples: ")[2].partition("`")[0])
    assert complaint_of(split, shuffle_chunk_samples=chunk) == ""
    grouped = complaint_of(split, data_groups=2, shuffle_block_shards=2)
    assert grouped.endswith("; `shuffle_block_shards: 400` in the recipe shuffles all of them")
    assert complaint_of(split, shuffle_block_shards=400) == ""
    assert complaint_of(view_of(leaves, 400, leaves >= 0)) == ""  # of a whole split the plan says it


def test_few_samples_of_shuffled_shards_are_fine() -> None:
    """Most shards hold none of them, and a block fewer than a batch."""
    random = np.random.default_rng(0)
    leaves = random.permutation(np.repeat(np.arange(100), 400))
    assert complaint_of(view_of(leaves, 40, random.random(40_000) < 0.02)) == ""


def test_sorted_shards_of_data_groups_are_repaired_by_larger_blocks() -> None:
    complaint = spread_of(unequal_classes(), 160 * [100]).complaint(Shuffle(data_groups=2, block_shards=2))
    assert "with shuffle_block_shards: 2, data_groups: 2, a batch of 256 holds" in complaint
    assert complaint.endswith("`shuffle_block_shards: 160` in the recipe shuffles all of them")


def test_sorted_shards_are_complained_of_with_a_setting_that_repairs_them() -> None:
    leaves, sizes = unequal_classes(), 160 * [100]
    spread = spread_of(leaves, sizes)
    complaint = spread.complaint(Shuffle())
    full = measured(leaves, sizes, Shuffle(block_shards=160))
    told = int(complaint.partition("a batch of 256 holds ")[2].partition(" ")[0])
    assert told == pytest.approx(measured(leaves, sizes, Shuffle()), abs=2)
    assert f"with shuffle_block_shards: 16, a batch of 256 holds {told} of the {CLASSES} classes" in complaint
    chunk = int(complaint.partition("shuffle_chunk_samples: ")[2].partition("`")[0])
    assert measured(leaves, sizes, Shuffle(chunk_samples=chunk)) > 0.9 * full
    assert spread.complaint(Shuffle(chunk_samples=chunk)) == ""
    assert spread.complaint(Shuffle(block_shards=160)) == ""


@pytest.mark.parametrize("num_shards", [2, 160])
def test_shuffled_shards_are_fine(num_shards: int) -> None:
    leaves = np.random.default_rng(0).permutation(unequal_classes())
    assert spread_of(leaves, num_shards * [16_000 // num_shards]).complaint(Shuffle()) == ""


def test_spread_of_many_shards_has_few_rows() -> None:
    leaves = np.random.default_rng(0).permutation(unequal_classes())
    spread = spread_of(leaves, 4000 * [4])
    assert len(spread.rows) < 40
    assert sum(classes for _, classes, _ in spread.rows) == CLASSES
    assert sum(samples for _, _, samples in spread.rows) == 16_000


def sorted_tars(num_shards: int) -> dict[str, bytes]:
    """A shard for each class, but for the last one, which holds two; 4 samples each."""
    shards = {}
    for shard in range(num_shards):
        members: list[Member] = []
        for row in range(4):
            members += [(f"s{shard}r{row}.png", IMAGE), (f"s{shard}r{row}.cls", b"%d" % shard)]
        shards[f"train-{shard:06d}.tar"] = tar_of(members)
    return shards


def test_index_of_sorted_shards_records_how_classes_are_spread(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.index(plane.foreign(sorted_tars(40), num_classes=40))
    summary = read_record(plane.store, index.key).summary
    assert summary[SPREAD_FIELD] == {"train": {"num_shards": 40, "rows": [[1.0, 40, 160]]}}
    assert "warnings" not in summary


def test_training_on_a_label_space_of_sorted_shards_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane, shards = DataPlane(folder=tmp_path), sorted_tars(40)
    shards["val-000000.tar"] = tar_of([("v.png", IMAGE), ("v.cls", b"0")])
    index = plane.index(plane.foreign(shards, num_classes=40))
    space = {"hierarchy": "leaf", "classes": {"names": ["c0", "c9", "c23", "c31"]}}
    labels = plane.run(JobKind.LABELS, {"space": space}, {"index": index.key})
    recipe = {**RECIPE, "batch_size": 8, "shuffle_block_shards": 4}
    parameters = {"model": {"name": "resnet18", "image_size": 16}, "recipe": recipe, "seed": 0}
    request = plane.request(JobKind.PRETRAIN, parameters, {"index": index.key, "labels": labels.key})
    context = ExecutionContext(store=plane.store, scratch=plane.folder, cache=plane.cache)
    LabelledSamples.open(JobContext.of(request, context, Stage.PRETRAIN))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(
        "pretrain/job: of its 40 training shards 4 hold samples to train on, and these are sorted"
    )


def test_plan_of_sorted_shards_warns_once_per_data_set_and_shuffle(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    outside.plan({**outside.entry, "num_train": 40_000})
    path = tmp_path / "sweep.yaml"
    path.write_text(path.read_text().replace("batch_size: 2", "batch_size: 256"))
    plan = build_plan(load_sweep(str(path))[0], store_uri=outside.store.uri)
    index = next(job for job in plan.jobs if job.name == "index/photos")
    summaries: dict[str, Mapping[str, Any]] = {
        index.key: {SPREAD_FIELD: {"train": {"num_shards": 400, "rows": [[1.0, 400, 40_000]]}}}
    }
    (warning,) = sorted_shards(plan, summaries)
    assert warning.startswith("datasets.photos: the shards are sorted by class: with shuffle_block_shards: 16, a batch")
    assert "shuffle_chunk_samples:" in warning
    assert list(sorted_shards(plan, {})) == []


@pytest.mark.parametrize(("num_shards", "is_warned"), [(7, True), (8, False)])
def test_plan_of_more_data_groups_than_shards_warns_once(tmp_path: Path, num_shards: int, is_warned: bool) -> None:
    outside = Outside(tmp_path)
    outside.plan({**outside.entry, "num_train": 40_000})
    path = tmp_path / "sweep.yaml"
    path.write_text(path.read_text().replace("batch_size: 2", "batch_size: 256, data_groups: 8"))
    plan = build_plan(load_sweep(str(path))[0], store_uri=outside.store.uri)
    index = next(job for job in plan.jobs if job.name == "index/photos")
    spread = {"num_shards": num_shards, "rows": [[num_shards, 10, 40_000]]}
    warnings = list(cut_shards(plan, {index.key: {SPREAD_FIELD: {"train": spread}}}))
    assert len(warnings) == is_warned
    if is_warned:
        assert warnings[0].startswith("datasets.photos: data_groups: 8 cuts its 7 training shards into smaller parts; ")
        assert "use data_groups of at most 7" in warnings[0]
    assert list(cut_shards(plan, {})) == []


def test_shards_without_any_class_are_not_complained_of() -> None:
    assert ClassSpread(num_shards=2, rows=[]).complaint(Shuffle(batch_size=64, block_shards=16)) == ""
