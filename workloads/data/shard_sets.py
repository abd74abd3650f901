"""What a data set's shards are and how each is written, before any of them is: so that jobs can share the work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.storage.dataset_files import ClassRows
from workloads.data.builtin import BuiltinDataset
from workloads.data.shards import SAMPLES_PER_SHARD, shard_name, write_samples


class ShardSet(Protocol):
    """The shards of a data set by number; their bytes depend on the data set and the number alone."""

    @property
    def names(self) -> Sequence[str]:
        """Basenames, ``<split>-<number>.tar``."""

    @property
    def classes(self) -> ClassRows:
        """The class table."""

    def write(self, number: int, path: Path) -> None:
        """Write one shard to a file; may be called from many threads."""


class BuiltinShards:
    """Shards of a built-in data set, ``SAMPLES_PER_SHARD`` samples each."""

    def __init__(self, dataset: BuiltinDataset) -> None:
        self._dataset = dataset
        self._places = [
            (split, first)
            for split, found in dataset.splits.items()
            for first in range(0, found.num_samples, SAMPLES_PER_SHARD)
        ]
        self._names = [shard_name(split, first // SAMPLES_PER_SHARD) for split, first in self._places]

    @property
    def names(self) -> Sequence[str]:
        """See `ShardSet`."""
        return self._names

    @property
    def classes(self) -> ClassRows:
        """See `ShardSet`."""
        return [dict(sorted(row.items())) for row in self._dataset.classes]  # as they were always written

    def write(self, number: int, path: Path) -> None:
        """See `ShardSet`."""
        split, first = self._places[number]
        found = self._dataset.splits[split]
        write_samples(found.samples(first, min(first + SAMPLES_PER_SHARD, found.num_samples)), path)
