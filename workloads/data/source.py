"""Samples of one split as squares of pixels, by ordinal; a warm runner keeps decoded splits between jobs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError
from orchestrator.core.units import MIB
from orchestrator.storage import ObjectStore
from workloads.data.bad_samples import BadSampleTally, BadSlot
from workloads.data.cache import FilePart, ShardCache
from workloads.data.cache.objects import opened_store
from workloads.data.decode import decoder_of
from workloads.data.index import SampleIndex
from workloads.data.pixels import PixelSpec, Place
from workloads.data.reasons import BadSampleError

DEFAULT_CACHE_BYTES: Final = 512 * MIB
_EAGER_READS: Final = 8
"""Samples that do not wait for whole shards after a start: a few workers begin at once."""
SplitId = tuple[str, str, PixelSpec]
"""(index key, split, how its pixels are made)."""


class SampleSource:
    """Images of one split, decoded to uint8 [image_size, image_size, 3]. May be used from many threads.

    Args:
        store: the sweep's store; shards of external data sets are read from their own.
        cache_dir: the node's cache folder.
        image_size: side of the squares, if ``pixels`` is not given.
        pixels: how images become squares.
        cache_bytes: what decoded splits may occupy in this process; a split that does not fit is decoded every time.
    """

    def __init__(
        self,
        store: ObjectStore,
        index: SampleIndex,
        split: str,
        *,
        cache_dir: Path,
        image_size: int = 0,
        pixels: PixelSpec | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.split = index.split(split)
        self.pixels = pixels or PixelSpec(image_size=image_size)
        decoder_of(self.pixels.decoder)  # one that cannot work here says so now, not from a worker in mid-epoch
        self.image_size = self.pixels.image_size
        self.shards = ShardCache(store, cache_dir, self.split.shards, num_eager_reads=_EAGER_READS)
        # Runners outlive jobs: what downloads ahead ends and lets go of its shards with the job that forgets us.
        self._finalize = weakref.finalize(self, self.shards.close)
        self.damaged: dict[int, bool] = {}
        """Of the shards that were hashed, because a sample of them failed: whether the local copy was bad."""
        self._recheck_lock = threading.Lock()
        self.bad_samples = BadSampleTally(self.split, index.bad_samples)
        self._split_id, self._cache_bytes = (index.key, split, self.pixels), cache_bytes
        self._store, self._cache_dir, self._bad_samples = store, cache_dir, index.bad_samples

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process of the node: the same samples, from a store that is opened there."""
        key, name, _ = self._split_id
        index = SampleIndex(
            key=key, classes=(), subset_names=(), splits={name: self.split}, bad_samples=self._bad_samples
        )
        place = (self._store.uri, self._cache_dir)
        return _source_of, (place, index, name, self.pixels, self._cache_bytes), {"damaged": dict(self.damaged)}

    @property
    def square_bytes(self) -> int:
        """Bytes of one image in a batch."""
        return 3 * self.image_size**2

    def images(self, ordinals: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Centre views [B, H, W, 3] of the samples, in the order asked for.

        Raises:
            BadDataError: a sample cannot be decoded; it is named ``shard:key``.
            CorruptObjectError: a shard is not the one that was indexed.
        """
        squares_BHWC = np.empty((len(ordinals), self.image_size, self.image_size, 3), dtype=np.uint8)
        for found in self.fill(ordinals, squares_BHWC):
            message = f"{self.split.place(found.ordinal)} {found.error.message}"
            raise BadDataError(f"{message}; replace or remove the sample and index the data set again") from found.error
        return squares_BHWC

    def fill(
        self, ordinals: NDArray[np.int64], squares_BHWC: NDArray[np.uint8], places: Sequence[Place] | None = None
    ) -> list[BadSlot]:
        """Write one view of every sample, the centre view without ``places``; returns those without pixels.

        Raises:
            CorruptObjectError: a shard is not the one that was indexed.
            StorageError: a shard cannot be read.
        """
        if places is not None:
            return self._decode(ordinals, squares_BHWC, places)
        if self._decoded is not None:
            return self._fill_from_memory(self._decoded, ordinals, squares_BHWC)
        return self._decode(ordinals, squares_BHWC, [self.pixels.center] * len(ordinals))

    def find(self, ordinals: NDArray[np.int64]) -> list[FilePart | Future[bytes]]:
        """Where the samples' bytes are. Raises as ``ShardCache.find_batch``."""
        return self.shards.find_batch(*self._locations(ordinals))

    def reads_memory(self, *, is_placed: bool) -> bool:
        """Whether views are decoded once and then read from memory; those that are placed never are."""
        return not is_placed and self._decoded is not None

    def close(self) -> None:
        """End the thread that downloads ahead, and let go of the shards."""
        self._finalize()

    @cached_property
    def _decoded(self) -> DecodedSplit | None:
        """Only for those who look at centre views: others would push out what these need."""
        return decoded_split(self._split_id, self.split.num_samples, self._cache_bytes)

    def _fill_from_memory(
        self, decoded: DecodedSplit, ordinals: NDArray[np.int64], squares_BHWC: NDArray[np.uint8]
    ) -> list[BadSlot]:
        bad: dict[int, BadSlot] = {}
        missing = np.unique(ordinals[~decoded.is_decoded[ordinals]])
        if missing.size:
            images = np.empty((len(missing), *squares_BHWC.shape[1:]), dtype=np.uint8)
            bad = {found.ordinal: found for found in self._decode(missing, images, [self.pixels.center] * len(missing))}
            is_good = np.array([ordinal not in bad for ordinal in missing.tolist()])
            # Pixels first, then the mark: a sample that fails to decode leaves nothing that looks decoded. No lock:
            # threads that decode the same sample write the same bytes.
            decoded.images_NHWC[missing[is_good]] = images[is_good]
            decoded.is_decoded[missing[is_good]] = True
        np.take(decoded.images_NHWC, ordinals, axis=0, out=squares_BHWC)
        return [
            BadSlot(slot=slot, ordinal=ordinal, error=bad[ordinal].error)
            for slot, ordinal in enumerate(ordinals.tolist() if bad else [])
            if ordinal in bad
        ]

    def _decode(
        self, ordinals: NDArray[np.int64], squares_BHWC: NDArray[np.uint8], places: Sequence[Place]
    ) -> list[BadSlot]:
        bad = []
        for slot, encoded in enumerate(self._encoded(ordinals)):
            try:
                self._render(encoded, int(ordinals[slot]), places[slot], squares_BHWC[slot])
            except BadSampleError as error:
                bad.append(BadSlot(slot=slot, ordinal=int(ordinals[slot]), error=error))
        return bad

    def _render(self, encoded: bytes, ordinal: int, place: Place, square_HWC: NDArray[np.uint8]) -> None:
        try:
            self.pixels.render(encoded, place, square_HWC)
        except BadSampleError:
            # Perhaps this node's copy is bad and the sample is not.
            ordinals = np.array([ordinal])
            if not self._was_damaged(int(self.split.shard_of(ordinals)[0])):
                raise
            self.pixels.render(self._encoded(ordinals)[0], place, square_HWC)

    def _was_damaged(self, shard_id: int) -> bool:
        """Whether a shard's local copy was bad when a sample of it first failed; hashed once, others wait for that."""
        with self._recheck_lock:
            if shard_id not in self.damaged:
                self.damaged[shard_id] = self.shards.recheck(shard_id)
            return self.damaged[shard_id]

    def _encoded(self, ordinals: NDArray[np.int64]) -> list[bytes]:
        """The samples' bytes as they stand in the shards."""
        return self.shards.read_batch(*self._locations(ordinals))

    def _locations(
        self, ordinals: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32] | None]:
        split = self.split
        lengths = split.lengths[ordinals].astype(np.int64)
        checks = None if split.checks is None else split.checks[ordinals]
        return split.shard_of(ordinals), split.offsets[ordinals], lengths, checks


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


def _source_of(
    place: tuple[str, Path], index: SampleIndex, split: str, pixels: PixelSpec, cache_bytes: int
) -> SampleSource:
    uri, cache_dir = place
    return SampleSource(opened_store(uri), index, split, cache_dir=cache_dir, pixels=pixels, cache_bytes=cache_bytes)
