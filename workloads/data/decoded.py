"""Decoded splits that a warm runner keeps between jobs."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.data.pixels import PixelSpec

SplitId = tuple[str, str, PixelSpec]
"""(index key, split, how its pixels are made)."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecodedSplit:
    """Centre views [N, H, W, 3] of a split, of which ``is_decoded`` [N] are there."""

    images_NHWC: NDArray[np.uint8]
    is_decoded: NDArray[np.bool_]


# Decoding is paid once per runner, not once per job: jobs of one sweep read the same split over and over.
_decoded: dict[SplitId, DecodedSplit] = {}
_decoded_lock = threading.Lock()


def decoded_split(split_id: SplitId, num_samples: int, limit_bytes: int) -> DecodedSplit | None:
    """The process's decoded copy of a split, the oldest others making room; None if it alone is too large."""
    image_size = split_id[2].image_size
    shape = (num_samples, image_size, image_size, 3)
    with _decoded_lock:
        found = _decoded.pop(split_id, None)
        size_bytes = int(np.prod(shape, dtype=np.int64))
        if found is None and size_bytes > limit_bytes:
            return None
        _make_room(limit_bytes - size_bytes)
        split = found or DecodedSplit(
            images_NHWC=np.empty(shape, dtype=np.uint8), is_decoded=np.zeros(num_samples, dtype=np.bool_)
        )
        _decoded[split_id] = split  # last = most recently used
        return split


def _make_room(limit_bytes: int) -> None:
    while _decoded and sum(split.images_NHWC.nbytes for split in _decoded.values()) > limit_bytes:
        _decoded.pop(next(iter(_decoded)))
