"""Random brightness, contrast and saturation, in random order, as torchvision's ``ColorJitter`` on PIL images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

_ENHANCERS: Final = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_ORDERS: Final = tuple(permutations(range(len(_ENHANCERS))))
NUM_JITTER_UNIFORMS: Final = len(_ENHANCERS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Factors of brightness, contrast and saturation (1 = unchanged), and the order in which they are applied."""

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
