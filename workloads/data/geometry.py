"""Which pixels of an image become a sample: pure functions of its size and of uniform random numbers.

Sizes are rounded as torchvision rounds them, so that its transforms are the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
