"""Whether the shards that a sweep reads are where it says, and are tars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.core.errors import BadDataError
from orchestrator.storage.dataset_files import read_dataset_file
from orchestrator.storage.listing import list_shards
from orchestrator.storage.open import open_store
from orchestrator.sweepfile.values import Dataset, ResolvedSweep

_HEADER_BYTES = 512
_MAGIC = slice(257, 262)
"""Where a tar header says so (POSIX ustar)."""
_NUM_SAMPLES = 3


def sample_shards(sweep: ResolvedSweep) -> list[tuple[str, str]]:
    """Store and name of the first, middle and last shard of every split of every external data set.

    Raises:
        StorageError: shards are missing, or a store does not answer.
        BadDataError: a ``dataset.json`` is damaged.
    """
    return [shard for dataset in sweep.datasets.values() for shard in _of_dataset(dataset)]


def read_beginnings(samples: Iterable[Sequence[str]]) -> str:
    """Read the first header of some shards; says in one line what was read.

    Raises:
        StorageError: one cannot be read.
        BadDataError: one is no tar.
    """
    number = 0
    for store_uri, name in samples:
        header = open_store(store_uri).get_range(name, 0, _HEADER_BYTES)
        if header[_MAGIC] != b"ustar":
            raise BadDataError(f"{store_uri}/{name} does not begin as a tar does; write it again, or correct its URI")
        number += 1
    return f"{number} shards read"


def _of_dataset(dataset: Dataset) -> Iterator[tuple[str, str]]:
    location = dataset.location
    if folder := location.get("dataset"):
        for entries in read_dataset_file(folder).splits.values():
            yield from _some([(folder.rstrip("/"), entry.name) for entry in entries])
    splits: Mapping[str, Sequence[str]] = location.get("splits", {})
    for patterns in splits.values():
        yield from _some([(shard.store_uri, shard.object_name) for shard in list_shards(list(patterns))])


def _some(shards: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    places = {round(place * (len(shards) - 1) / (_NUM_SAMPLES - 1)) for place in range(_NUM_SAMPLES)} if shards else ()
    return (shards[place] for place in sorted(places))
