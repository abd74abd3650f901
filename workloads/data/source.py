"""Decoded images by ordinal, and a cache of decoded splits that a warm runner keeps between jobs."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from orchestrator.errors import BadDataError
from orchestrator.storage import ObjectStore
from orchestrator.units import MIB
from workloads.data.cache import ObjectCache
from workloads.data.index import SampleIndex
from workloads.data.scan import IMAGE_ERRORS

DEFAULT_CACHE_BYTES = 512 * MIB

_SplitId = tuple[str, str, int]
"""(index key, split, image size)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _DecodedSplit:
    """Images [N, H, W, 3] of a split, of which ``is_decoded`` [N] are there."""

    images_NHWC: NDArray[np.uint8]
    is_decoded: NDArray[np.bool_]
    lock: threading.Lock = field(default_factory=threading.Lock)


# Decoding is paid once per runner, not once per job: jobs of one sweep read the same split over and over.
_decoded: dict[_SplitId, _DecodedSplit] = {}
_decoded_lock = threading.Lock()


class SampleSource:
    """Images of one split, decoded to uint8 [image_size, image_size, 3].

    Args:
        cache_dir: the node's cache folder.
        cache_bytes: what decoded splits may occupy in this process; a split that does not fit is decoded every time.
    """

    def __init__(
        self,
        store: ObjectStore,
        index: SampleIndex,
        split: str,
        *,
        cache_dir: Path,
        image_size: int,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.split = index.split(split)
        self.image_size = image_size
        self._cache = ObjectCache(store, cache_dir)
        split_id = (index.key, split, image_size)
        self._decoded = _decoded_split(split_id, self.split.num_samples, cache_bytes)

    def images(self, ordinals: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Images [B, H, W, 3] of the samples, in the order asked for.

        Raises:
            BadDataError: a sample cannot be decoded; it is named ``shard:key``.
            CorruptObjectError: a shard is not the one that was indexed.
        """
        decoded = self._decoded
        if decoded is None:
            return self._decode(ordinals)
        with decoded.lock:
            missing = np.unique(ordinals[~decoded.is_decoded[ordinals]])
            if missing.size:
                # Pixels first, then the mark: a sample that fails to decode leaves nothing that looks decoded.
                decoded.images_NHWC[missing] = self._decode(missing)
                decoded.is_decoded[missing] = True
        return decoded.images_NHWC[ordinals]

    def _decode(self, ordinals: NDArray[np.int64]) -> NDArray[np.uint8]:
        images = np.empty((len(ordinals), self.image_size, self.image_size, 3), dtype=np.uint8)
        shard_ids = self.split.shard_ids[ordinals]
        for shard_id in np.unique(shard_ids).tolist():
            slots = np.flatnonzero(shard_ids == shard_id).tolist()
            self._decode_shard(shard_id, ordinals, slots, images)
        return images

    def _decode_shard(
        self, shard_id: int, ordinals: NDArray[np.int64], slots: list[int], images: NDArray[np.uint8]
    ) -> None:
        """Fill ``images[slots]`` with the samples ``ordinals[slots]``, all of one shard."""
        shard = self.split.shards[shard_id]
        path = self._cache.path(shard.object_name, size_bytes=shard.size_bytes, sha256=shard.sha256)
        with path.open("rb") as file:
            for slot in slots:
                ordinal = int(ordinals[slot])
                length, offset = int(self.split.lengths[ordinal]), int(self.split.offsets[ordinal])
                encoded = os.pread(file.fileno(), length, offset)
                images[slot] = self._decode_sample(encoded, ordinal)

    def _decode_sample(self, encoded: bytes, ordinal: int) -> NDArray[np.uint8]:
        try:
            return decode_image(encoded, self.image_size)
        except IMAGE_ERRORS as error:
            place = self.split.place(ordinal)
            message = f"{place} cannot be decoded: {error}; replace or remove the sample and index the data set again"
            raise BadDataError(message) from error


def decode_image(encoded: bytes, image_size: int) -> NDArray[np.uint8]:
    """Decode to RGB, resize the shorter side to ``image_size`` (bilinear, antialiased), cut out the centre square."""
    with Image.open(BytesIO(encoded)) as opened:
        image = opened.convert("RGB")
    shorter = min(image.size)
    if shorter != image_size:
        width, height = (max(round(side * image_size / shorter), image_size) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = ((side - image_size) // 2 for side in image.size)
    return np.asarray(image.crop((left, top, left + image_size, top + image_size)))


def _decoded_split(split_id: _SplitId, num_samples: int, limit_bytes: int) -> _DecodedSplit | None:
    """The process's decoded copy of a split, the oldest others making room; None if it alone is too large."""
    shape = (num_samples, split_id[2], split_id[2], 3)
    with _decoded_lock:
        found = _decoded.pop(split_id, None)
        size_bytes = int(np.prod(shape, dtype=np.int64))
        if found is None and size_bytes > limit_bytes:
            return None
        _make_room(limit_bytes - size_bytes)
        split = found or _DecodedSplit(
            images_NHWC=np.empty(shape, dtype=np.uint8), is_decoded=np.zeros(num_samples, dtype=np.bool_)
        )
        _decoded[split_id] = split  # last = most recently used
        return split


def _make_room(limit_bytes: int) -> None:
    while _decoded and sum(split.images_NHWC.nbytes for split in _decoded.values()) > limit_bytes:
        _decoded.pop(next(iter(_decoded)))
