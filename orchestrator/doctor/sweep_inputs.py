"""Checks that a sweep's shards exist and are tars, and that a tracking server can be used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from orchestrator.core.errors import BadDataError, OrchestratorError
from orchestrator.storage.dataset_files import read_dataset_file
from orchestrator.storage.listing import list_shards
from orchestrator.storage.open import open_store
from orchestrator.sweepfile.values import Dataset, ResolvedSweep
from orchestrator.tracking.server import TrackingError, TrackingRefusedError, TrackingServer

_HEADER_BYTES = 512
_MAGIC = slice(257, 262)
"""Offset of the magic in a tar header (POSIX ustar)."""
_NUM_SAMPLES = 3
_TRACKING_URI = re.compile(r"(?:https?|sqlite|postgresql(?:\+\w+)?)://")


def sample_shards(sweep: ResolvedSweep) -> list[tuple[str, str]]:
    """Store and name of the first, middle and last shard of every split of every external data set.

    Raises:
        StorageError: shards are missing, or a store does not answer.
        BadDataError: a ``dataset.json`` is damaged.
    """
    return [shard for dataset in sweep.datasets.values() for shard in _of_dataset(dataset)]


def read_beginnings(samples: Iterable[Sequence[str]]) -> str:
    """Read the first header of some shards; returns in one line what was read.

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


def reach_tracking(uri: str) -> str:
    """Check that the publisher can use a tracking URI; returns one line.

    No message shows the URI, which may have a password. Nothing is written.

    Raises:
        OrchestratorError: it cannot, or the URI means nothing.
    """
    if _TRACKING_URI.match(uri) is None:
        raise OrchestratorError(
            f"the tracking URI has the scheme {urlsplit(uri).scheme!r}; write http(s)://host:port, "
            "sqlite:///absolute/path or postgresql://host/database"
        )
    server = TrackingServer(uri)
    if database := server.database:
        there = next(parent for parent in (database, *database.parents) if parent.exists())
        if not os.access(there, os.W_OK):
            raise OrchestratorError(f"{there} cannot be written to; choose another MLFLOW_TRACKING_URI")
        if there != database:
            return f"{database} is made at the first run"
    try:
        server.check()
    except TrackingRefusedError:
        raise
    except TrackingError as error:
        what = str(error).partition("; ")[0]  # behind it stands what this means for a sweep
        how = "check MLFLOW_TRACKING_URI" if database else "start the server, or check MLFLOW_TRACKING_URI and proxies"
        raise OrchestratorError(f"{what}; {how}") from None
    return f"{database} can be used" if database else f"MLflow at {server.shown} answers"
