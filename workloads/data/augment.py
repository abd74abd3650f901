"""Augmentation whose randomness is a counter: position p's parameters depend on (seed, stage, p) alone.

So runs that differ only in the label space see the same crops, and a resumed run sees the same crops as without the
interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import permutations
from typing import Any, Final

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from orchestrator.core.errors import UserError
from orchestrator.core.plugins import AUGMENTATIONS
from workloads.data.pixels import (
    NUM_CROP_UNIFORMS,
    Place,
    Placement,
    center_view,
    random_crop,
    random_resized_crop,
)
from workloads.runtime.plugin_arguments import open_plugin, takes_arguments
from workloads.runtime.streams import Purpose, Stage, integers_below, seed_sequence

_ENHANCERS: Final = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_ORDERS: Final = tuple(permutations(range(len(_ENHANCERS))))
NUM_JITTER_UNIFORMS: Final = len(_ENHANCERS) + 1

_WORDS_PER_POSITION = 4  # Philox4x64 yields four 64-bit words for each value of its counter
_VERTICAL, _HORIZONTAL, _FLIP, _ = range(_WORDS_PER_POSITION)
_VIEW_STREAM = 1  # detail of the stream that places crops and jitters colours
_PLUGIN_STREAM = 2  # of the one that augmentations of packages draw from
_COUNTERS_PER_POSITION = -(-(NUM_CROP_UNIFORMS + NUM_JITTER_UNIFORMS) // _WORDS_PER_POSITION)
_SERIAL_ELEMENTS = 32_000  # torch works on fewer than 32,768 elements without waking its thread pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Factors of brightness, contrast and saturation (1 = unchanged), and the order in which they are applied.

    Equal to torchvision's ``ColorJitter`` on PIL images.
    """

    factors: tuple[float, float, float]
    order: tuple[int, int, int]

    @classmethod
    def draw(cls, strength: float, uniforms: Sequence[float]) -> Jitter:
        """Factors uniform in [1 - strength, 1 + strength], from ``NUM_JITTER_UNIFORMS`` numbers in [0, 1)."""
        first, second, third, order = uniforms
        brightness, contrast, saturation = (1 + strength * (2 * uniform - 1) for uniform in (first, second, third))
        number = min(int(order * len(_ORDERS)), len(_ORDERS) - 1)
        one, two, three = _ORDERS[number]
        return cls(factors=(brightness, contrast, saturation), order=(one, two, three))

    def apply(self, image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The image [H, W, 3] with other colours."""
        image = Image.fromarray(image_HWC)
        for number in self.order:
            image = _ENHANCERS[number](image).enhance(self.factors[number])
        return np.asarray(image)


class Augment(StrEnum):
    """What happens to training images."""

    NONE = "none"
    """The centre view: shorter side to ``resize``, then the centre square. Evaluation always sees this one."""
    FLIP = "flip"
    """The centre view, mirrored left to right with probability 1/2."""
    CROP_FLIP = "crop_flip"
    """The centre view padded by an eighth of the side by reflection, cropped back at a random place, then ``flip``."""
    RANDOM_CROP = "random_crop"
    """Shorter side to ``resize``, then a square anywhere."""
    RANDOM_CROP_FLIP = "random_crop_flip"
    RANDOM_RESIZED_CROP = "random_resized_crop"
    """A box of random area and aspect ratio, resized to the square; ``resize`` then only concerns evaluation."""
    RANDOM_RESIZED_CROP_FLIP = "random_resized_crop_flip"

    @property
    def is_flipped(self) -> bool:
        """Whether half of the images are mirrored."""
        return self.value.endswith("flip")

    @property
    def is_placed(self) -> bool:
        """Whether each position looks at its sample in another way, so that no decoded view can be kept."""
        return self.value.startswith("random")


_RESIZED = {Augment.RANDOM_RESIZED_CROP, Augment.RANDOM_RESIZED_CROP_FLIP}


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentSpec:
    """An augmentation with its strengths; the recipe's fields of the same names."""

    augment: Augment = Augment.NONE
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Range of the area of a ``random_resized_crop``, fractions of the image's."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of its width / height."""
    color_jitter: float = 0.0
    """Largest change of brightness, contrast and saturation, in [0, 1]."""
    plugin: str | None = None
    """Reference of an installed augmentation."""
    arguments: Mapping[str, Any] | None = None
    """What it is given."""


ChangePixels = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]
"""An augmentation of a package: an image [H, W, 3] and what is random about its position become one of that size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationParameters:
    """All that is random about the image of one position."""

    placement: Placement
    is_flipped: bool
    jitter: Jitter | None
    shift: tuple[int, int] | None
    """Offsets of ``crop_flip`` into the padded image."""


class Augmenter:
    """Augments batches of consecutive positions.

    Args:
        resize: shorter side in pixels before a crop; None = ``image_size``.
        image_size: side of the square that comes out; only `parameters` and `placements` need it.
    """

    def __init__(
        self,
        augment: Augment | AugmentSpec,
        *,
        seed: int,
        stage: Stage,
        image_size: int = 0,
        resize: int | None = None,
    ) -> None:
        self.spec = augment if isinstance(augment, AugmentSpec) else AugmentSpec(augment=Augment(augment))
        self._augment = self.spec.augment
        self._image_size, self._resize = image_size, resize or image_size
        self._key = _philox_key(seed, stage)
        self._view_key = _philox_key(seed, stage, _VIEW_STREAM)
        self._plugin_key = _philox_key(seed, stage, _PLUGIN_STREAM)
        self._change_pixels = _open_plugin(self.spec)

    def words(self, start: int, num_positions: int) -> NDArray[np.uint64]:
        """Random words [num_positions, 4] of the positions from ``start`` on; a position has its words in any call."""
        philox = np.random.Philox(key=self._key, counter=start)
        return philox.random_raw(_WORDS_PER_POSITION * num_positions).reshape(-1, _WORDS_PER_POSITION)

    def uniforms(self, start: int, num_positions: int) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1) that place and colour the images, one row per position."""
        philox = np.random.Philox(key=self._view_key, counter=start * _COUNTERS_PER_POSITION)
        words_per_position = _COUNTERS_PER_POSITION * _WORDS_PER_POSITION
        words = philox.random_raw(words_per_position * num_positions).reshape(-1, words_per_position)
        uniforms: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return uniforms

    def parameters(self, position: int, height: int, width: int) -> AugmentationParameters:
        """What happens to an image of this size at a position."""
        uniforms, words = self.uniforms(position, 1)[0].tolist(), self.words(position, 1)
        shift = None
        if self._augment is Augment.CROP_FLIP:
            top, left = (integers_below(words[:, column], 2 * _pad(self._image_size) + 1)[0] for column in (0, 1))
            shift = (int(top), int(left))
        return AugmentationParameters(
            placement=self.place(height, width, uniforms),
            is_flipped=self._augment.is_flipped and bool(_is_flipped(words)[0]),
            jitter=self.jitter(uniforms),
            shift=shift,
        )

    def places(self, start: int, num_positions: int) -> list[Place] | None:
        """Which part of its sample each position sees, from ``start`` on; None = all see the centre view."""
        if not self._augment.is_placed:
            return None
        return [partial(self.place, uniforms=row) for row in self.uniforms(start, num_positions).tolist()]

    def place(self, height: int, width: int, uniforms: list[float]) -> Placement:
        """The part of an image of this size that is seen; ``uniforms``: a row of `uniforms`."""
        spec, image_size = self.spec, self._image_size
        if self._augment in _RESIZED:
            crop = uniforms[:NUM_CROP_UNIFORMS]
            return random_resized_crop(
                height, width, crop, image_size=image_size, scale=spec.crop_scale, ratio=spec.crop_ratio
            )
        if self._augment.is_placed:
            return random_crop(height, width, uniforms[:2], resize=self._resize, image_size=image_size)
        return center_view(height, width, resize=self._resize, image_size=image_size)

    def jitter(self, uniforms: list[float]) -> Jitter | None:
        """The change of colours, None without; ``uniforms``: a row of `uniforms`."""
        if not self.spec.color_jitter:
            return None
        return Jitter.draw(self.spec.color_jitter, uniforms[NUM_CROP_UNIFORMS:][:NUM_JITTER_UNIFORMS])

    def complete(self, squares_BHWC: NDArray[np.uint8], start: int) -> None:
        """Do in place all that is left to do for the images of positions ``start, start + 1, ...`` once they are
        placed: colours, the augmentation of a package, `finish`. Raises as `change`.
        """
        if self.spec.color_jitter:
            for square_HWC, row in zip(squares_BHWC, self.uniforms(start, len(squares_BHWC)).tolist(), strict=True):
                if jitter := self.jitter(row):
                    square_HWC[...] = jitter.apply(square_HWC)
        self.change(squares_BHWC, start)
        self.finish(squares_BHWC, start)

    def change(self, squares_BHWC: NDArray[np.uint8], start: int) -> None:
        """Let the augmentation of a package change the images of positions ``start, start + 1, ...`` in place.

        Each position has its own stream of random numbers, whatever others draw. Raises ``UserError``: it gives
        something else than an image of the same size.
        """
        if self._change_pixels is None:
            return
        for number, square_HWC in enumerate(squares_BHWC):
            # The second word of the counter: a position may draw 2**64 blocks before it meets the next one.
            philox = np.random.Philox(key=self._plugin_key, counter=[0, start + number, 0, 0])
            changed: object = self._change_pixels(square_HWC.copy(), np.random.Generator(philox))
            if not isinstance(changed, np.ndarray) or changed.shape != square_HWC.shape or changed.dtype != np.uint8:
                found = f"{getattr(changed, 'dtype', type(changed).__name__)} {list(getattr(changed, 'shape', ()))}"
                message = f"the augmentation {self.spec.plugin} gave {found} in place of an image uint8 "
                raise UserError(f"{message}{list(square_HWC.shape)}: it must keep the size")
            square_HWC[...] = changed

    def finish(self, squares_BHWC: NDArray[np.uint8], start: int) -> None:
        """Crop (``crop_flip``) and mirror the images of positions ``start, start + 1, ...`` in place."""
        if not self._augment.is_flipped:
            return
        words = self.words(start, len(squares_BHWC))
        if self._augment is Augment.CROP_FLIP:
            squares_BHWC[...] = _crop(squares_BHWC, words)
        _mirror(squares_BHWC, _is_flipped(words))

    def apply(self, images_BHWC: NDArray[np.uint8], start: int) -> NDArray[np.uint8]:
        """`finish` on a copy; returns uint8 [B, C, H, W] in channels-last memory."""
        squares_BHWC = images_BHWC.copy()
        self.finish(squares_BHWC, start)
        return squares_BHWC.transpose(0, 3, 1, 2)


def _open_plugin(spec: AugmentSpec) -> ChangePixels | None:
    if not spec.plugin:
        return None
    build, arguments = open_plugin(spec.plugin, AUGMENTATIONS, spec.arguments or {})
    made: ChangePixels = build(arguments) if takes_arguments(build, AUGMENTATIONS) else build()
    return made


def _philox_key(seed: int, stage: Stage, *details: int) -> NDArray[np.uint64]:
    key: NDArray[np.uint64] = seed_sequence(seed, stage, Purpose.AUGMENT, *details).generate_state(2, np.uint64)  # type: ignore[assignment] # numpy's stub forgets its argument
    return key


def _is_flipped(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    is_flipped: NDArray[np.bool_] = words[:, _FLIP] >> np.uint64(63) == 1
    return is_flipped


def _mirror(images_BHWC: NDArray[np.uint8], is_flipped: NDArray[np.bool_]) -> None:
    """Mirror some of the images in place. numpy needs 0.2 ms for one of 224 pixels a side, torch 0.02 ms."""
    _, height, width, channels = images_BHWC.shape
    mirrored = images_BHWC[is_flipped].reshape(-1, width, channels)
    step = max(_SERIAL_ELEMENTS // (width * channels), 1)
    for row in range(0, len(mirrored), step):
        rows = torch.from_numpy(mirrored[row : row + step])
        rows.copy_(torch.flip(rows, (1,)))
    images_BHWC[is_flipped] = mirrored.reshape(-1, height, width, channels)


def _pad(image_size: int) -> int:
    return max(image_size // 8, 1)


def _crop(images_BHWC: NDArray[np.uint8], words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Random crops [B, H, W, C] of the padded images."""
    num_images, height, width, _ = images_BHWC.shape
    pad = _pad(height)
    padded = np.pad(images_BHWC, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    windows = sliding_window_view(padded, (height, width), axis=(1, 2))  # [B, 2 pad + 1, 2 pad + 1, C, H, W]
    windows = windows.transpose(0, 1, 2, 4, 5, 3)
    top, left = (integers_below(words[:, column], 2 * pad + 1) for column in (_VERTICAL, _HORIZONTAL))
    cropped: NDArray[np.uint8] = windows[np.arange(num_images), top, left]
    return cropped
