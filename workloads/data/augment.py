"""Augmentation whose randomness is a counter: position p's parameters depend on (seed, stage, p) alone.

So runs that differ in the label space only see the same crops, and a resumed run sees those it would have seen.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from workloads.data.streams import Purpose, Stage, seed_sequence

_WORDS_PER_POSITION = 4  # Philox4x64 yields four 64-bit words for each value of its counter
_VERTICAL, _HORIZONTAL, _FLIP, _ = range(_WORDS_PER_POSITION)


class Augment(StrEnum):
    """What happens to training images."""

    NONE = "none"
    FLIP = "flip"
    """Mirrored left to right with probability 1/2."""
    CROP_FLIP = "crop_flip"
    """Padded by an eighth of the side by reflection, cropped back at a random place, then ``flip``."""


class Augmenter:
    """Augments batches of consecutive positions."""

    def __init__(self, augment: Augment, *, seed: int, stage: Stage) -> None:
        self._augment = augment
        self._key = seed_sequence(seed, stage, Purpose.AUGMENT).generate_state(2, np.uint64)

    def words(self, start: int, num_positions: int) -> NDArray[np.uint64]:
        """Random words [num_positions, 4] of the positions from ``start`` on; a position has its words in any call."""
        philox = np.random.Philox(key=self._key, counter=start)
        return philox.random_raw(_WORDS_PER_POSITION * num_positions).reshape(-1, _WORDS_PER_POSITION)

    def apply(self, images_BHWC: NDArray[np.uint8], start: int) -> NDArray[np.uint8]:
        """Augment the images of positions ``start, start + 1, ...``; returns uint8 [B, C, H, W], contiguous."""
        if self._augment is Augment.NONE:
            return np.ascontiguousarray(images_BHWC.transpose(0, 3, 1, 2))
        words = self.words(start, len(images_BHWC))
        images_BCHW = _crop(images_BHWC, words) if self._augment is Augment.CROP_FLIP else _channels_first(images_BHWC)
        is_flipped = words[:, _FLIP] >> np.uint64(63) == 1
        images_BCHW[is_flipped] = images_BCHW[is_flipped, :, :, ::-1]
        return images_BCHW


def _channels_first(images_BHWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return images_BHWC.transpose(0, 3, 1, 2).copy(order="C")


def _crop(images_BHWC: NDArray[np.uint8], words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Random crops [B, C, H, W] of the padded images."""
    num_images, height, width, _ = images_BHWC.shape
    pad = max(height // 8, 1)
    padded = np.pad(images_BHWC, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    windows = sliding_window_view(padded, (height, width), axis=(1, 2))  # [B, 2 pad + 1, 2 pad + 1, C, H, W]
    top, left = (_below(words[:, column], 2 * pad + 1) for column in (_VERTICAL, _HORIZONTAL))
    return np.ascontiguousarray(windows[np.arange(num_images), top, left])


def _below(words: NDArray[np.uint64], limit: int) -> NDArray[np.int64]:
    """Integers in [0, limit) from the upper half of each word; the bias is below limit / 2**32."""
    return ((words >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)
