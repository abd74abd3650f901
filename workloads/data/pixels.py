"""How encoded images become squares of a fixed size, by the recipe's fields of the same names.

Which pixels of an image become a sample is a pure function of its size and of uniform random numbers. Sizes are rounded
as torchvision rounds them, so that its transforms are the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.decode import DecoderName, Interpolation, decoder_of
from workloads.data.images import MAX_PIXELS
from workloads.data.reasons import BadSampleError, Reason

NUM_CROP_TRIES: Final = 10
NUM_CROP_UNIFORMS: Final = 2 * NUM_CROP_TRIES + 2
"""Uniform numbers that `random_resized_crop` may use: area and ratio of every try, then the two offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The box of the source that is resized to ``resized_*``, and the corner of the square window cut out of that."""

    top: int
    left: int
    height: int
    width: int
    resized_height: int
    resized_width: int
    window_top: int = 0
    window_left: int = 0


def center_view(height: int, width: int, *, resize: int, image_size: int) -> Placement:
    """Shorter side to ``resize``, then the centre square of ``image_size <= resize``.

    As torchvision's ``Resize`` and ``CenterCrop`` (torchvision/transforms/functional.py).
    """
    resized_height, resized_width = _with_shorter_side(height, width, resize)
    return Placement(
        top=0,
        left=0,
        height=height,
        width=width,
        resized_height=resized_height,
        resized_width=resized_width,
        window_top=round((resized_height - image_size) / 2),
        window_left=round((resized_width - image_size) / 2),
    )


def random_crop(height: int, width: int, uniforms: Sequence[float], *, resize: int, image_size: int) -> Placement:
    """Shorter side to ``resize``, then a square of ``image_size <= resize`` anywhere; 2 uniforms in [0, 1)."""
    resized_height, resized_width = _with_shorter_side(height, width, resize)
    return Placement(
        top=0,
        left=0,
        height=height,
        width=width,
        resized_height=resized_height,
        resized_width=resized_width,
        window_top=_below(uniforms[0], resized_height - image_size + 1),
        window_left=_below(uniforms[1], resized_width - image_size + 1),
    )


def random_resized_crop(
    height: int,
    width: int,
    uniforms: Sequence[float],
    *,
    image_size: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Placement:
    """A box of random area and aspect ratio, resized to the square ``image_size``.

    The area is uniform in ``scale`` times the image's, the ratio width / height log-uniform in ``ratio``; the first of
    ten boxes that fits is taken, else the largest centred box whose ratio is allowed. Inception's augmentation (Szegedy
    et al. 2015, arXiv:1409.4842, section 6) as torchvision's ``RandomResizedCrop.get_params`` defines it.

    ``uniforms`` are ``NUM_CROP_UNIFORMS`` numbers in [0, 1).
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(NUM_CROP_TRIES):
        area = height * width * _between(scale[0], scale[1], uniforms[2 * attempt])
        aspect = math.exp(_between(log_low, log_high, uniforms[2 * attempt + 1]))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = _below(uniforms[-2], height - box_height + 1), _below(uniforms[-1], width - box_width + 1)
            return _resized(top, left, box_height, box_width, image_size=image_size)
    return _largest_centred(height, width, ratio, image_size)


def _largest_centred(height: int, width: int, ratio: tuple[float, float], image_size: int) -> Placement:
    box_height, box_width = height, width
    if width / height < ratio[0]:
        box_height = max(round(width / ratio[0]), 1)
    elif width / height > ratio[1]:
        box_width = max(round(height * ratio[1]), 1)
    top, left = (height - box_height) // 2, (width - box_width) // 2
    return _resized(top, left, box_height, box_width, image_size=image_size)


def _resized(top: int, left: int, height: int, width: int, *, image_size: int) -> Placement:
    return Placement(
        top=top, left=left, height=height, width=width, resized_height=image_size, resized_width=image_size
    )


def _with_shorter_side(height: int, width: int, resize: int) -> tuple[int, int]:
    shorter, longer = sorted((height, width))
    longer = int(resize * longer / shorter)
    return (longer, resize) if height > width else (resize, longer)


def _between(low: float, high: float, uniform: float) -> float:
    return low + (high - low) * uniform


def _below(uniform: float, limit: int) -> int:
    return min(int(uniform * limit), limit - 1)


Place = Callable[[int, int], Placement]
"""From height and width of an image to the part of it that is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSpec:
    """Size, filter and decoder. Hashable: two equal ones make the same pixels.

    Raises ``UserError`` on construction if a field is wrong.
    """

    image_size: int
    """Side of the square in pixels."""
    resize: int | None = None
    """Shorter side before the centre square or a random one is cut out; None = ``image_size``."""
    interpolation: Interpolation = Interpolation.BILINEAR
    decoder: DecoderName = DecoderName.PILLOW

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < self.image_size:
            message = f"recipe.resize is {self.resize}, below the model's image_size {self.image_size}: no square of "
            raise UserError(message + f"that size could be cut out; use {self.image_size} or more, or null")

    def center(self, height: int, width: int) -> Placement:
        """The view of evaluation. Same for every position."""
        return center_view(height, width, resize=self.resize or self.image_size, image_size=self.image_size)

    def render(self, encoded: bytes, place: Place, square_HWC: NDArray[np.uint8]) -> None:
        """Decode an image and write the wanted part of it into ``square_HWC``.

        Raises ``BadSampleError``; ``square_HWC`` is then as it was.
        """
        decoder = decoder_of(self.decoder)
        image_HWC = decoder.decode(encoded)
        at = place(*image_HWC.shape[:2])
        box_HWC = image_HWC[at.top : at.top + at.height, at.left : at.left + at.width]
        if at.resized_height * at.resized_width > MAX_PIXELS:
            # One pixel by 60,000 is small until its shorter side is made 224.
            message = f"cannot be decoded: {image_HWC.shape[1]} x {image_HWC.shape[0]} pixels would become "
            message += f"{at.resized_width} x {at.resized_height}; at most {MAX_PIXELS} are made of an image"
            raise BadSampleError(Reason.TOO_MANY_PIXELS, message)
        size = (at.resized_height, at.resized_width, 3)
        if size == square_HWC.shape:
            decoder.resize(box_HWC, square_HWC, self.interpolation)
            return
        resized_HWC = np.empty(size, dtype=np.uint8)
        decoder.resize(box_HWC, resized_HWC, self.interpolation)
        bottom, right = at.window_top + self.image_size, at.window_left + self.image_size
        square_HWC[...] = resized_HWC[at.window_top : bottom, at.window_left : right]
