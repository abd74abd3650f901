"""Loaders: the right images with the right targets, from any step on."""

import gc
import shutil
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.errors import BadDataError, NotFoundError
from tests.data_jobs import TREE, DataPlane, encoded, tar_of
from workloads.data.augment import Augment, Augmenter
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader
from workloads.data.order import SampleOrder
from workloads.data.prefetch import Prefetcher
from workloads.data.source import decode_image
from workloads.data.streams import Stage
from workloads.labels.label_map import LabelMap

BATCH_SIZE = 50
NUM_STEPS = 30  # two and a half epochs of 600 samples


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> DataPlane:
    return DataPlane(folder=tmp_path_factory.mktemp("plane"))


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    return plane.builtin(TREE)


@pytest.fixture(scope="module")
def label_map(plane: DataPlane, index: SampleIndex) -> LabelMap:
    return plane.labels(index, {"hierarchy": "depth2"})


def source_of(plane: DataPlane, index: SampleIndex, split: str, **options: int) -> SampleSource:
    return SampleSource(plane.store, index, split, cache_dir=plane.cache, image_size=16, **options)


@pytest.fixture(scope="module")
def source(plane: DataPlane, index: SampleIndex) -> SampleSource:
    return source_of(plane, index, "train")


def loader_of(source: SampleSource, label_map: LabelMap, start_step: int = 0, augment: str = "none") -> TrainLoader:
    return TrainLoader(
        source,
        SampleOrder(source.split.shard_sizes, 5, 2),
        label_map,
        batch_size=BATCH_SIZE,
        start_step=start_step,
        total_steps=NUM_STEPS,
        seed=5,
        stage=Stage.PRETRAIN,
        augment=augment,
    )


def same(left: Batch, right: Batch) -> bool:
    return (
        left.step == right.step
        and torch.equal(left.images_BCHW, right.images_BCHW)
        and torch.equal(left.targets_B, right.targets_B)
        and np.array_equal(left.ordinals_B, right.ordinals_B)
    )


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_loader_batches_follow_the_order(source: SampleSource, label_map: LabelMap) -> None:
    batches = list(loader_of(source, label_map))
    order = SampleOrder(source.split.shard_sizes, 5, 2)
    assert [batch.step for batch in batches] == list(range(NUM_STEPS))
    for batch in batches:
        expected = order.ordinals(batch.step * BATCH_SIZE, (batch.step + 1) * BATCH_SIZE)
        assert np.array_equal(batch.ordinals_B, expected)
        assert np.array_equal(batch.images_BCHW.numpy(), source.images(expected).transpose(0, 3, 1, 2))
        assert np.array_equal(batch.targets_B.numpy(), source.split.leaves[expected] // 3)
    assert batches[0].images_BCHW.dtype == torch.uint8
    assert batches[0].images_BCHW.is_contiguous()
    assert batches[0].targets_B.dtype == torch.int64


def test_loader_started_at_any_step_continues_the_sequence(source: SampleSource, label_map: LabelMap) -> None:
    whole = list(loader_of(source, label_map, augment="crop_flip"))
    for start_step in range(NUM_STEPS + 1):
        resumed = list(loader_of(source, label_map, start_step, augment="crop_flip"))
        assert len(resumed) == NUM_STEPS - start_step
        assert all(same(left, right) for left, right in zip(resumed, whole[start_step:], strict=True))


def test_loader_other_label_space_shows_the_same_images(
    plane: DataPlane, index: SampleIndex, source: SampleSource, label_map: LabelMap
) -> None:
    other = plane.labels(index, {"random": {"num_classes": 9, "seed": 0}})
    pairs = zip(*(loader_of(source, one, augment="crop_flip") for one in (label_map, other)), strict=True)
    batches = list(pairs)
    assert all(torch.equal(left.images_BCHW, right.images_BCHW) for left, right in batches)
    assert not all(torch.equal(left.targets_B, right.targets_B) for left, right in batches)


def test_loader_abandoned_iteration_ends_its_thread(source: SampleSource, label_map: LabelMap) -> None:
    for batch in loader_of(source, label_map):
        assert prefetch_threads()
        if batch.step == 2:
            break
    gc.collect()
    assert not prefetch_threads()


def test_loader_finished_iteration_ends_its_thread(source: SampleSource, label_map: LabelMap) -> None:
    assert len(list(loader_of(source, label_map))) == NUM_STEPS
    assert not prefetch_threads()


def test_loader_evaluation_sees_each_sample_once_with_its_subset(
    plane: DataPlane, index: SampleIndex, label_map: LabelMap
) -> None:
    source = source_of(plane, index, "val")
    loader = EvalLoader(source, label_map, batch_size=50)
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    assert np.concatenate([batch.ordinals_B for batch in batches]).tolist() == list(range(72))
    assert np.array_equal(np.concatenate([batch.subset_ids_B for batch in batches]), source.split.subset_ids)
    assert np.array_equal(torch.cat([batch.targets_B for batch in batches]).numpy(), source.split.leaves // 3)
    images = torch.cat([batch.images_BCHW for batch in batches]).numpy()
    assert np.array_equal(images, source.images(np.arange(72)).transpose(0, 3, 1, 2))


def test_loader_decoded_split_is_shared_by_later_sources(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.builtin({**TREE, "num_train": 40, "seed": 1})
    everything = np.arange(40)
    first = source_of(plane, index, "train").images(everything)
    reopened = source_of(plane, index, "train")
    shutil.rmtree(plane.folder)
    assert np.array_equal(reopened.images(everything), first)


def test_loader_split_larger_than_the_cache_is_decoded_each_time(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.builtin({**TREE, "num_train": 40, "seed": 2})
    small = source_of(plane, index, "train", cache_bytes=1000)
    ordinals = np.array([39, 0, 7, 7])
    images = small.images(ordinals)
    assert np.array_equal(images, source_of(plane, index, "train").images(ordinals))
    shutil.rmtree(plane.folder)
    with pytest.raises(NotFoundError):
        small.images(ordinals)


def test_loader_undecodable_sample_is_named_and_reaches_the_consumer(tmp_path: Path) -> None:
    """Half a JPEG has a whole header: the index cannot see what decoding does."""
    photo = encoded("JPEG", size=(64, 64))
    members = [("good.jpg", photo), ("good.cls", b"0"), ("half.jpg", photo[: len(photo) // 2]), ("half.cls", b"1")]
    plane = DataPlane(folder=tmp_path)
    index = plane.index(plane.foreign({"train-0.tar": tar_of(members)}))
    source = source_of(plane, index, "train")
    loader = loader_of(source, plane.labels(index, {"modulo": 2}))
    with pytest.raises(BadDataError, match=r"train-0\.tar:half cannot be decoded"):
        list(loader)
    assert not prefetch_threads()
    assert source.images(np.array([0])).shape == (1, 16, 16, 3)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
@pytest.mark.parametrize("is_wide", [True, False])
def test_loader_other_sizes_keep_the_centre_square(mode: str, is_wide: bool) -> None:
    """White in the middle half, black towards both ends: the centre square is all white."""
    pixels = np.zeros((32, 96), dtype=np.uint8)
    pixels[:, 24:72] = 255
    image = Image.fromarray(pixels if is_wide else pixels.T).convert(mode)
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    decoded = decode_image(buffer.getvalue(), 16)
    assert decoded.shape == (16, 16, 3)
    assert np.all(decoded == 255)


def test_loader_image_of_the_asked_size_is_left_alone() -> None:
    content = encoded(size=(16, 16))
    assert np.array_equal(decode_image(content, 16), np.asarray(Image.open(BytesIO(content))))


def test_loader_flip_turns_about_half_of_the_images() -> None:
    words = Augmenter(Augment.FLIP, seed=0, stage=Stage.PRETRAIN).words(0, 1000)
    assert 400 < np.count_nonzero(words[:, 2] >> np.uint64(63)) < 600


def test_loader_prefetch_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("fourth")

    with Prefetcher(items(), depth=2) as prefetched:
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

    with Prefetcher(items(), depth=2):
        assert third.wait(timeout=30)
        # two are ready, the third waits for room: no fourth was asked for
        assert made == [0, 1, 2]
