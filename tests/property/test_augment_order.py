"""Augmentation parameters depend on the position alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workloads.data.augment import Augment, Augmenter
from workloads.runtime.streams import Stage

IMAGES = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
POSITIONS = st.integers(0, 2**40)


@given(POSITIONS, st.integers(1, 23), st.sampled_from(Augment))
def test_augment_any_batch_boundary_gives_the_same_images(start: int, cut: int, augment: Augment) -> None:
    augmenter = Augmenter(augment, seed=3, stage=Stage.PRETRAIN)
    whole = augmenter.apply(IMAGES, start)
    parts = [augmenter.apply(IMAGES[:cut], start), augmenter.apply(IMAGES[cut:], start + cut)]
    assert np.array_equal(np.concatenate(parts), whole)


@given(POSITIONS)
def test_augment_flip_mirrors_or_leaves_each_image(start: int) -> None:
    flipped = Augmenter(Augment.FLIP, seed=0, stage=Stage.PRETRAIN).apply(IMAGES, start).transpose(0, 2, 3, 1)
    for before, after in zip(IMAGES, flipped, strict=True):
        assert np.array_equal(after, before) or np.array_equal(after, before[:, ::-1])


@given(POSITIONS)
def test_augment_crop_is_a_window_of_the_padded_image(start: int) -> None:
    cropped = Augmenter(Augment.CROP_FLIP, seed=0, stage=Stage.PRETRAIN).apply(IMAGES[:2], start).transpose(0, 2, 3, 1)
    for before, after in zip(IMAGES[:2], cropped, strict=True):
        padded = np.pad(before, ((2, 2), (2, 2), (0, 0)), mode="reflect")
        windows = [padded[top : top + 16, left : left + 16] for top in range(5) for left in range(5)]
        assert any(np.array_equal(after, window) or np.array_equal(after, window[:, ::-1]) for window in windows)
