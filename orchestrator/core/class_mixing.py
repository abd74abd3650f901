"""When batches hold too few classes, and which setting of the recipe repairs it: as plans and trainings judge it.

Plans compute the classes of a batch from what an index says of a whole split, trainings count them in batches of their
label space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_POOR: Final = 0.8
"""Share of a full shuffle's classes per batch below which a warning is printed."""
_REPAIRED: Final = 0.95
_CHUNKS: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Longer runs cost fewer reads, so the longest one that mixes well is advised."""


def is_poor(found: float, wanted: float) -> bool:
    """Whether batches of ``found`` classes are worth a warning, if those of a full shuffle have ``wanted``."""
    return found < _POOR * wanted


def repair_of(mixed_by: Callable[[int], float], wanted: float, *, num_shards: int, is_grouped: bool) -> str:
    """The setting that repairs it, as the end of a sentence.

    Args:
        mixed_by: classes per batch with a ``shuffle_chunk_samples``.
        wanted: classes per batch of a full shuffle.
        num_shards: of the split.
        is_grouped: whether there are data groups; groups of shards and runs of all exclude each other.
    """
    for chunk in () if is_grouped else _CHUNKS:
        if (mixed := mixed_by(chunk)) >= _REPAIRED * wanted:
            return f"`shuffle_chunk_samples: {chunk}` in the recipe makes it {mixed:.0f}"
    return f"`shuffle_block_shards: {num_shards}` in the recipe shuffles all of them"
