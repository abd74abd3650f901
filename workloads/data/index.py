"""The index of a data set: for each sample its place in the shards and its leaf class, as columns.

The *ordinal* of a sample is its row of the index: shards ordered by basename, samples by their row in the shard.
Parts of the artifact: ``index.json`` (shards and subset names by split), ``classes.json`` and ``<split>/<column>.npy``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import Record, part_object, read_part, read_record
from workloads.data.cache import ObjectCache

INDEX_PART: Final = "index.json"
CLASSES_PART: Final = "classes.json"
NO_SUBSET: Final = -1
COLUMNS: Final = ("shard", "row", "offset", "length", "leaf", "subset", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar in the store."""

    name: str
    object_name: str
    size_bytes: int
    sha256: str
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitIndex:
    """Columns of one split, all of length N, by ordinal."""

    index_key: str
    name: str
    shards: tuple[Shard, ...]
    subset_names: tuple[str, ...]
    """Names that ``subset_ids`` count; the same for all splits."""
    shard_ids: NDArray[np.int32]
    rows: NDArray[np.int32]
    """Row within the shard."""
    offsets: NDArray[np.int64]
    """First byte of the image within the shard."""
    lengths: NDArray[np.int64]
    """Bytes of the image."""
    leaves: NDArray[np.int32]
    subset_ids: NDArray[np.int16]
    """Index into ``subset_names``; -1 = in none."""
    keys: NDArray[np.bytes_]

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.leaves)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Samples per shard."""
        return tuple(shard.num_samples for shard in self.shards)

    def key(self, ordinal: int) -> str:
        """The sample's key in its shard."""
        return bytes(self.keys[ordinal]).decode(errors="surrogateescape")

    def place(self, ordinal: int) -> str:
        """``shard:key``, as errors name a sample."""
        return f"{self.shards[self.shard_ids[ordinal]].name}:{self.key(ordinal)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleIndex:
    """An opened index artifact."""

    key: str
    classes: tuple[Mapping[str, Any], ...]
    """Class table: row c describes leaf class c with ``class``, ``name`` and one column per level."""
    subset_names: tuple[str, ...]
    splits: Mapping[str, SplitIndex]

    @classmethod
    def open(cls, store: ObjectStore, index_key: str, cache_dir: Path) -> SampleIndex:
        """Open a committed index; its columns are memory-mapped from the node's cache.

        Raises:
            NotFoundError: the index is not committed.
            CorruptObjectError: a part is not what the record says.
        """
        record = read_record(store, index_key)
        document = json.loads(read_part(store, record, INDEX_PART))
        cache, subset_names = ObjectCache(store, cache_dir), tuple(document["subset_names"])
        splits = {
            split: _open_split(cache, record, split, tuple(Shard(**shard) for shard in shards), subset_names)
            for split, shards in document["splits"].items()
        }
        classes = tuple(json.loads(read_part(store, record, CLASSES_PART)))
        return cls(key=index_key, classes=classes, subset_names=subset_names, splits=splits)

    @property
    def num_classes(self) -> int:
        """Number of leaf classes."""
        return len(self.classes)

    def split(self, name: str) -> SplitIndex:
        """The columns of a split. Raises ``UserError`` if the data set has none of this name."""
        if name not in self.splits:
            raise UserError(f"data set of {self.key} has no samples in split {name!r}; it has {sorted(self.splits)}")
        return self.splits[name]


def column_part(split: str, column: str) -> str:
    """Part name of a column."""
    return f"{split}/{column}.npy"


def _open_split(
    cache: ObjectCache, record: Record, split: str, shards: tuple[Shard, ...], subset_names: tuple[str, ...]
) -> SplitIndex:
    columns = {column: _open_column(cache, record, column_part(split, column)) for column in COLUMNS}
    return SplitIndex(
        index_key=record.key,
        name=split,
        shards=shards,
        subset_names=subset_names,
        shard_ids=columns["shard"],
        rows=columns["row"],
        offsets=columns["offset"],
        lengths=columns["length"],
        leaves=columns["leaf"],
        subset_ids=columns["subset"],
        keys=columns["key"],
    )


def _open_column(cache: ObjectCache, record: Record, part: str) -> NDArray[Any]:
    stored = record.parts[part]
    path = cache.path(part_object(record, part), size_bytes=stored.size_bytes, sha256=stored.sha256)
    column: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return column
