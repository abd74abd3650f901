"""How encoded images become squares of a fixed size: what the recipe's fields of the same names say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.decode import DecoderName, Interpolation, decoder_of
from workloads.data.geometry import Placement, center_view
from workloads.data.images import MAX_PIXELS
from workloads.data.reasons import BadSampleError, Reason

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
