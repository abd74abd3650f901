"""Batches that another process loads: those of this process, whatever happens to the other one."""

import logging
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core.errors import BadDataError
from tests.data_jobs import DataPlane, encoded, loading_in_a_process, plane, tar_of, undecodable_png
from tests.unit.test_decode_pool import processes_of
from tests.waiting import wait_until
from workloads.data.augment import Augment, AugmentSpec
from workloads.data.index import BadSamplePolicy, BadSamples, SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader
from workloads.data.loader_process import _ENTRY, _Records
from workloads.data.order import DataGroups, MixtureOrder, Order, SampleOrder
from workloads.data.pixels import PixelSpec
from workloads.data.reasons import BadSampleError
from workloads.data.split_targets import SplitTargets
from workloads.data.subset import SampleView
from workloads.runtime.processes import helper
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.samples import BadSampleLedger, LabelledSplit

__all__ = ["plane"]

NUM_WORKERS, BATCH_SIZE, NUM_STEPS, IMAGE_SIZE = 2, 20, 30, 16
BAD = 6
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
AUGMENT = AugmentSpec(augment=Augment.RANDOM_RESIZED_CROP_FLIP, color_jitter=0.4)


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    """PNGs in three shards; one cannot be decoded."""
    shards_of = {}
    for number in range(3):
        images = [encoded(size=(20, 30), seed=row) for row in range(40)]
        images[BAD] = undecodable_png() if number == 1 else images[BAD]
        members = [
            member
            for row, image in enumerate(images)
            for member in ((f"{number}-{row}.png", image), (f"{number}-{row}.cls", b"0"))
        ]
        shards_of[f"train-{number}.tar"] = tar_of(members)
    return plane.index(plane.foreign(shards_of))


@pytest.fixture(autouse=True)
def _in_a_process() -> Iterator[None]:
    with loading_in_a_process():
        yield


def source_of(plane: DataPlane, index: SampleIndex, policy: BadSamplePolicy, budget: float = 0.1) -> SampleSource:
    index = SampleIndex(
        key=index.key,
        classes=index.classes,
        subset_names=index.subset_names,
        splits=index.splits,
        bad_samples=BadSamples(policy=policy, budget=budget),
    )
    pixels = PixelSpec(image_size=IMAGE_SIZE)
    return SampleSource(plane.store, index, "train", cache_dir=plane.cache, pixels=pixels, cache_bytes=0)


def batches_of(source: SampleSource, *, num_workers: int = NUM_WORKERS, **options: Any) -> TrainLoader:
    """With fewer than two workers this process loads."""
    return TrainLoader(
        source,
        SampleOrder(source.split.shard_sizes, 5, 2),
        SplitTargets.of(source.split.leaves, 2),
        batch_size=BATCH_SIZE,
        seed=5,
        stage=Stage.PRETRAIN,
        augment=AUGMENT,
        num_workers=num_workers,
        device=DEVICE,
        **{"start_step": 0, "total_steps": NUM_STEPS, **options},
    )


@pytest.fixture
def source(plane: DataPlane, index: SampleIndex) -> SampleSource:
    return source_of(plane, index, BadSamplePolicy.REPLACE)


@pytest.fixture(scope="module")
def expected(plane: DataPlane, index: SampleIndex) -> list[Batch]:
    return list(batches_of(source_of(plane, index, BadSamplePolicy.REPLACE), num_workers=1))


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.images_BCHW.cpu(), right.images_BCHW)
        assert left.images_BCHW.stride() == right.images_BCHW.stride()
        assert torch.equal(left.targets, right.targets)
        assert np.array_equal(left.ordinals_B, right.ordinals_B)
        assert (left.step, left.positions) == (right.step, right.positions)


def process_id() -> int:
    return helper(_ENTRY).process_id


def kill_the_process() -> None:
    os.kill(process_id(), signal.SIGKILL)
    helper(_ENTRY)._process.wait()


def test_batches_counters_and_bad_samples_are_those_of_this_process(
    source: SampleSource, expected: list[Batch]
) -> None:
    loader = batches_of(source)
    assert_same(list(loader), expected)  # each keeps its pixels when the next ones are there
    counted = loader.stats.snapshot()
    assert counted["bad_samples"] == 1
    assert NUM_STEPS * BATCH_SIZE <= counted["cache_hits"] + counted["cache_misses"] <= NUM_STEPS * BATCH_SIZE + 20
    assert [row[0] for row in source.bad_samples.take_news()] == [40 + BAD]  # for the other ranks


def test_run_continues_at_any_step_as_the_share_of_a_rank(source: SampleSource) -> None:
    layout: dict[str, Any] = {"rank": 1, "world_size": 2}
    assert_same(list(batches_of(source, start_step=7, **layout)), list(batches_of(source, num_workers=1, **layout))[7:])


def test_evaluation_leaves_the_same_samples_out(source: SampleSource) -> None:
    labels = SplitTargets.of(source.split.leaves, 2)
    found, own = (
        EvalLoader(source, labels, batch_size=BATCH_SIZE, num_workers=number, device=DEVICE)
        for number in (NUM_WORKERS, 1)
    )
    assert_same(list(found), list(own))
    assert found.num_bad == own.num_bad == 1


@pytest.mark.ci
def test_death_of_the_process_loses_no_batch(
    source: SampleSource, expected: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for batch in batches_of(source):
        found.append(batch)
        if batch.step == 3:
            kill_the_process()
    assert_same(found, expected)
    assert caplog.text.count("batches are loaded by threads of the process that trains") == 1
    caplog.clear()
    assert_same(list(batches_of(source)), expected)  # by a new one
    assert not caplog.text


def test_errors_are_raised_at_their_batch(plane: DataPlane, index: SampleIndex, expected: list[Batch]) -> None:
    source = source_of(plane, index, BadSamplePolicy.FAIL)
    order = SampleOrder(source.split.shard_sizes, 5, 2)
    first_bad = order.ordinals(0, NUM_STEPS * BATCH_SIZE).tolist().index(40 + BAD) // BATCH_SIZE
    batches = iter(batches_of(source))
    found = [next(batches) for _ in range(first_bad)]
    with pytest.raises(BadDataError, match=rf"train-1.tar:1-{BAD} .*set bad_samples.policy") as failure:
        next(batches)
    assert_same(found, expected[:first_bad])
    assert "in _send_batches" in "".join(failure.value.__notes__)
    assert isinstance(failure.value.__cause__, BadSampleError)


def test_tally_of_earlier_attempts_counts(plane: DataPlane, index: SampleIndex) -> None:
    source = source_of(plane, index, BadSamplePolicy.REPLACE, budget=1.5 / 120)
    source.bad_samples.recall([3])
    with pytest.raises(BadDataError, match="more than 1 samples"):
        list(batches_of(source))


@pytest.mark.slow  # it starts three processes
def test_log_of_the_process_is_that_of_this_one(source: SampleSource, caplog: pytest.LogCaptureFixture) -> None:
    """One of its processes that decode is killed, and its thread says so."""
    kill_the_process()  # the next one has this loader alone
    for batch in batches_of(source, total_steps=200):  # more than it has ready
        if batch.step == 0:
            wait_until(lambda: len(processes_of(process_id())) == NUM_WORKERS)
            os.kill(processes_of(process_id())[0], signal.SIGKILL)
    found = [record for record in caplog.records if "its process has ended" in record.message]
    assert [record.levelno for record in found] == [logging.WARNING]


@pytest.mark.parametrize(
    "order",
    [
        SampleOrder([20, 30, 10], 5, 2, groups=DataGroups.of(2, BATCH_SIZE)),
        SampleOrder([20, 30, 10], 5, 2, chunk_samples=4),
        MixtureOrder([SampleOrder([20, 30], 5, 1), SampleOrder([40], 5, 1)], [2, 1], [0.3, 0.7], seed=5),
    ],
    ids=["groups", "chunks", "mixture"],
)
def test_order_is_the_same_in_another_process(order: Order) -> None:
    expected = order.ordinals(30, 150)
    found = pickle.loads(pickle.dumps(order))  # noqa: S301 - it is our own
    assert np.array_equal(found.ordinals(30, 150), expected)
    assert found.replacement(31, 2) == order.replacement(31, 2)


def test_budget_holds_for_what_several_loaders_found_each(source: SampleSource) -> None:
    """Each compares what it knows; an evaluation compares all."""
    split = LabelledSplit(
        source=source, labels=SplitTargets.of(source.split.leaves, 2), view=SampleView.whole(source.split)
    )
    ledger = BadSampleLedger({"train": split}, Ranks())
    source.bad_samples.add_rows([[row, f"train-0.tar:{row}", "undecodable", ""] for row in range(12)])
    ledger.share()
    source.bad_samples.add_rows([[12, "train-0.tar:12", "undecodable", ""]])
    with pytest.raises(BadDataError, match="more than 12 samples"):
        ledger.share()


def test_lines_of_a_time_without_loaders_and_malformed_ones_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    records, logger = _Records(), logging.getLogger("package")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(records)
    logger.warning("of a loader that has ended")
    with records.of_a_loader():
        logger.warning("%d images", "no")
        logger.warning("%d images", 3)
        assert [(name, text) for name, *_, text in records.drain()] == [("package", "3 images")]
    logger.removeHandler(records)


class _Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("x",)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (lambda: None, "what it needs cannot be sent"),
        (_Unreadable(), "cannot open what it needs: ValueError: invalid literal for int()"),
    ],
)
def test_what_cannot_be_sent_or_opened_is_loaded_here(
    source: SampleSource, expected: list[Batch], caplog: pytest.LogCaptureFixture, part: Any, reason: str
) -> None:
    loader = batches_of(source)
    vars(loader)["part"] = part
    assert_same(list(loader), expected)
    assert caplog.text.count(reason) == 1


def test_two_loaders_at_once_make_their_own_batches(
    plane: DataPlane, index: SampleIndex, source: SampleSource, expected: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the environment in between reaches the process, and nothing of it is missing meanwhile."""
    labels = SplitTargets.of(source.split.leaves, 2)
    found = []
    for batch in batches_of(source):
        found.append(batch)
        if batch.step % 10 == 0:
            monkeypatch.setenv("SOMETHING_NEW", str(batch.step))
            evaluated = EvalLoader(source, labels, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, device=DEVICE)
            assert sum(len(part.targets) for part in evaluated) == 119
    assert_same(found, expected)


@pytest.mark.ci
def test_process_ends_with_its_owner_and_loaders_with_their_iteration(source: SampleSource) -> None:
    batches = iter(batches_of(source))
    next(batches)
    process = helper(_ENTRY)._process
    wait_until(lambda: processes_of(process_id()))
    batches.close()  # type: ignore[attr-defined]
    wait_until(lambda: not processes_of(process_id()))
    assert process.poll() is None
    helper(_ENTRY)._control.close()
    assert process.wait(timeout=60) == 0
