"""Augmentation: the geometry of torchvision's transforms, from numbers that a position alone decides."""

from collections import Counter
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import ColorJitter, RandomResizedCrop, v2

from tests.photographs import jpeg, photograph
from workloads.data.augment import Augment, Augmenter, AugmentSpec, Jitter
from workloads.data.decode import DecoderName
from workloads.data.pixels import NUM_CROP_UNIFORMS, PixelSpec, Placement, center_view, random_crop, random_resized_crop
from workloads.runtime.streams import Stage

SIDES = st.integers(1, 600)
UNIFORM = st.floats(0, 1, exclude_max=True)
CROP = st.lists(UNIFORM, min_size=NUM_CROP_UNIFORMS, max_size=NUM_CROP_UNIFORMS)
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def augmenter_of(augment: Augment, *, seed: int = 0, color_jitter: float = 0.0) -> Augmenter:
    spec = AugmentSpec(augment=augment, color_jitter=color_jitter)
    return Augmenter(spec, seed=seed, stage=Stage.PRETRAIN, image_size=24, resize=32)


def check_inside(at: Placement, height: int, width: int, image_size: int) -> None:
    assert 0 <= at.top <= at.top + at.height <= height
    assert 0 <= at.left <= at.left + at.width <= width
    assert at.height > 0
    assert at.width > 0
    assert 0 <= at.window_top <= at.resized_height - image_size
    assert 0 <= at.window_left <= at.resized_width - image_size


@given(SIDES, SIDES, CROP)
def test_augment_resized_crop_lies_within_any_image(height: int, width: int, uniforms: list[float]) -> None:
    at = random_resized_crop(height, width, uniforms, image_size=32, scale=SCALE, ratio=RATIO)
    check_inside(at, height, width, 32)
    assert (at.resized_height, at.resized_width) == (32, 32)


@given(SIDES, SIDES, st.integers(1, 64), st.integers(0, 64), UNIFORM, UNIFORM)
def test_augment_other_views_lie_within_any_image(
    height: int, width: int, image_size: int, margin: int, vertical: float, horizontal: float
) -> None:
    resize = image_size + margin
    for at in (
        center_view(height, width, resize=resize, image_size=image_size),
        random_crop(height, width, [vertical, horizontal], resize=resize, image_size=image_size),
    ):
        check_inside(at, height, width, image_size)
        assert min(at.resized_height, at.resized_width) == resize


@given(st.integers(100, 600), st.integers(100, 600), CROP)
def test_augment_resized_crop_has_the_asked_area_and_ratio(height: int, width: int, uniforms: list[float]) -> None:
    at = random_resized_crop(height, width, uniforms, image_size=32, scale=(0.2, 0.3), ratio=(0.9, 1.1))
    if (at.height, at.width) != (height, width) and at.height * at.width < 0.5 * height * width:
        rounding = 1 / min(at.height, at.width)
        assert 0.2 - 2 * rounding <= at.height * at.width / (height * width) <= 0.3 + 2 * rounding
        assert 0.9 - 3 * rounding <= at.width / at.height <= 1.1 + 3 * rounding


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (300, 200)])
def test_augment_resized_crop_falls_back_like_torchvision(height: int, width: int) -> None:
    """Boxes of four times the area never fit: the largest centred box of an allowed ratio is left."""
    at = random_resized_crop(height, width, [0.5] * NUM_CROP_UNIFORMS, image_size=32, scale=(4.0, 4.0), ratio=RATIO)
    wanted = RandomResizedCrop.get_params(torch.zeros(3, height, width), [4.0, 4.0], list(RATIO))
    assert (at.top, at.left, at.height, at.width) == wanted


def test_augment_resized_crops_are_distributed_like_torchvisions() -> None:
    """Means over 4,000 boxes of an image of 375 x 500; the standard error is about 0.004 of each."""
    augmenter, number = augmenter_of(Augment.RANDOM_RESIZED_CROP), 4_000
    places = [augmenter.place(375, 500, row) for row in augmenter.uniforms(0, number).tolist()]
    ours = np.array([(at.height * at.width, at.width / at.height, at.top, at.left) for at in places]).mean(0)
    torch.manual_seed(0)
    image = torch.zeros(3, 375, 500)
    drawn = [RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(number)]
    theirs = np.array([(height * width, width / height, top, left) for top, left, height, width in drawn]).mean(0)
    assert ours == pytest.approx(theirs, rel=0.06)


@pytest.mark.parametrize("decoder", [DecoderName.PILLOW, DecoderName.TURBO])
def test_augment_resized_crop_has_torchvisions_pixels(decoder: DecoderName) -> None:
    encoded, spec = jpeg(photograph(1, width=200, height=150)), PixelSpec(image_size=64, decoder=decoder)
    augmenter = Augmenter(Augment.RANDOM_RESIZED_CROP, seed=0, stage=Stage.PRETRAIN, image_size=64)
    square, differences = np.zeros((64, 64, 3), dtype=np.uint8), []
    image = Image.open(BytesIO(encoded)).convert("RGB")
    for position in range(20):
        at = augmenter.parameters(position, 150, 200).placement
        spec.render(encoded, lambda height, width, at=at: at, square)  # type: ignore[misc]
        wanted = np.asarray(v2.functional.resized_crop(image, at.top, at.left, at.height, at.width, [64, 64]))
        differences.append(np.abs(square.astype(np.int64) - wanted).mean())
    assert np.mean(differences) <= (0 if decoder is DecoderName.PILLOW else 0.05)


@given(st.integers(0, 2**40), st.integers(1, 23), st.sampled_from(Augment), st.sampled_from([0.0, 0.4]))
def test_augment_parameters_depend_on_the_position_alone(
    start: int, offset: int, augment: Augment, color_jitter: float
) -> None:
    """Whatever batch a position comes in; and `parameters` says what the batch's methods do."""
    augmenter = augmenter_of(augment, color_jitter=color_jitter)
    rows = augmenter.uniforms(start, 24)
    assert np.array_equal(rows[offset:], augmenter.uniforms(start + offset, 24 - offset))
    told = augmenter.parameters(start + offset, 100, 80)
    assert told.placement == augmenter.place(100, 80, rows[offset].tolist())
    assert told.jitter == augmenter.jitter(rows[offset].tolist())
    ramp = np.arange(24, dtype=np.uint8)[None, None, :, None].repeat(24, 1).repeat(3, 3)
    if augment is not Augment.CROP_FLIP:
        finished = augmenter.apply(ramp, start + offset)[0, 0, 0]
        assert told.is_flipped == (finished[0] > finished[-1])


def test_augment_neighbouring_positions_differ() -> None:
    augmenter = augmenter_of(Augment.RANDOM_RESIZED_CROP_FLIP, color_jitter=0.4)
    drawn = [augmenter.parameters(position, 375, 500) for position in range(100)]
    assert all(left.placement != right.placement and left.jitter != right.jitter for left, right in pairwise(drawn))
    assert drawn[0] != augmenter_of(Augment.RANDOM_RESIZED_CROP_FLIP, seed=1).parameters(0, 375, 500)


def test_augment_random_crops_reach_every_offset_alike() -> None:
    augmenter = augmenter_of(Augment.RANDOM_CROP)
    places = [augmenter.place(32, 32, row) for row in augmenter.uniforms(0, 3_600).tolist()]
    counts = Counter(at.window_top for at in places)
    assert set(counts) == set(range(9))
    assert min(counts.values()) > 300  # 400 are expected, with a standard deviation of 19


@pytest.mark.parametrize("size", [8, 224])
def test_augment_flip_mirrors_images_of_any_size(size: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, size, size, 3), dtype=np.uint8)
    augmenter = Augmenter(Augment.RANDOM_RESIZED_CROP_FLIP, seed=0, stage=Stage.PRETRAIN, image_size=size)
    flipped = [augmenter.parameters(position, size, size).is_flipped for position in range(6)]
    assert len(set(flipped)) == 2
    for before, after, is_flipped in zip(images, augmenter.apply(images, 0), flipped, strict=True):
        assert np.array_equal(after.transpose(1, 2, 0), before[:, ::-1] if is_flipped else before)


def test_augment_jitter_equals_torchvisions_functions() -> None:
    image = np.asarray(photograph(2, width=40, height=30))
    jitter = Jitter(factors=(0.7, 1.3, 0.5), order=(2, 0, 1))
    wanted = v2.functional.adjust_saturation(Image.fromarray(image), 0.5)
    wanted = v2.functional.adjust_contrast(v2.functional.adjust_brightness(wanted, 0.7), 1.3)
    assert np.array_equal(jitter.apply(image), np.asarray(wanted))


def test_augment_jitter_factors_fill_torchvisions_range() -> None:
    transform = ColorJitter(0.4, 0.4, 0.4)
    drawn = [Jitter.draw(0.4, row) for row in np.random.default_rng(0).random((2_000, 4)).tolist()]
    for number, bounds in enumerate((transform.brightness, transform.contrast, transform.saturation)):
        values = [jitter.factors[number] for jitter in drawn]
        assert (min(values), max(values)) == pytest.approx(bounds, abs=0.01)
    assert len({jitter.order for jitter in drawn}) == 6
