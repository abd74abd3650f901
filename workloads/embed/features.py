"""The artifact of an ``embed`` job: features of every sample of a split, by ordinal.

Parts: ``features.json`` and, for runs of rows, ``features-<start>-<stop>.npy`` (float16, memory-mapped from the node's
cache) with ``missing-<start>-<stop>.npy`` (ordinals that could not be decoded, whose features are 0).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import Record, part_object, read_part, read_record
from workloads.data.arrays import from_npy_bytes
from workloads.data.cache import ObjectCache

FEATURES_PART: Final = "features.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureTable:
    """Features (num_samples, dim) of a split; ``parts`` are runs of its rows, from ``starts``."""

    key: str
    split: str
    index_key: str
    dataset_digest: str
    """Of the data set's shards; empty where its index has none."""
    dim: int
    starts: NDArray[np.int64]
    parts: tuple[NDArray[np.float16], ...]
    missing: NDArray[np.int64]
    """Ordinals without features, ascending."""

    @classmethod
    def open(cls, store: ObjectStore, key: str, cache_dir: Path) -> Self:
        """Open a committed artifact; its arrays are memory-mapped.

        Raises:
            NotFoundError: it is not committed.
            CorruptObjectError: a part is not what the record says.
        """
        record, cache = read_record(store, key), ObjectCache(store, cache_dir)
        document: dict[str, Any] = json.loads(read_part(store, record, FEATURES_PART))
        missing = [from_npy_bytes(read_part(store, record, part["missing"])) for part in document["parts"]]
        return cls(
            key=key,
            split=document["split"],
            index_key=document["index"],
            dataset_digest=document["dataset_digest"],
            dim=document["dim"],
            starts=np.array([part["start"] for part in document["parts"]], dtype=np.int64),
            parts=tuple(_mapped(cache, record, part["features"]) for part in document["parts"]),
            missing=np.concatenate(missing) if missing else np.empty(0, dtype=np.int64),
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return sum(map(len, self.parts))

    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.float16]:
        """Features (B, dim) of samples, by ascending ordinals.

        Raises:
            BadDataError: one is NaN or infinite; the first is named.
        """
        taken_BD = np.empty((len(ordinals_B), self.dim), dtype=np.float16)
        bounds = np.searchsorted(ordinals_B, np.append(self.starts, self.num_samples))
        for number, part in enumerate(self.parts):
            chosen = slice(int(bounds[number]), int(bounds[number + 1]))
            if chosen.stop > chosen.start:
                taken_BD[chosen] = part[ordinals_B[chosen] - self.starts[number]]
        is_finite = np.isfinite(taken_BD).all(axis=1)
        if not is_finite.all():
            first = int(ordinals_B[np.argmin(is_finite)])
            message = f"features {self.key} of split {self.split!r} are not finite at ordinal {first}: nothing can be "
            raise BadDataError(message + "made of them; delete the artifact and embed again, in fp32 if it was fp16")
        return taken_BD


def _mapped(cache: ObjectCache, record: Record, part: str) -> NDArray[np.float16]:
    stored = record.parts[part]
    path = cache.path(part_object(record, part), size_bytes=stored.size_bytes, digests=stored.digests)
    features_PD: NDArray[np.float16] = np.load(path, mmap_mode="r", allow_pickle=False)
    return features_PD
