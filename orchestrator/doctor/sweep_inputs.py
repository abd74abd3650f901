"""Checks that a sweep's shards exist and are tars, and that a tracking server can be used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from orchestrator.core.errors import BadDataError, OrchestratorError
from orchestrator.storage.dataset_files import read_dataset_file
from orchestrator.storage.listing import list_shards
from orchestrator.storage.open import open_store
from orchestrator.sweepfile.values import Dataset, ResolvedSweep
from orchestrator.tracking.server import ask_database

_HEADER_BYTES = 512
_MAGIC = slice(257, 262)
"""Offset of the magic in a tar header (POSIX ustar)."""
_NUM_SAMPLES = 3
_TIMEOUT_S = 5.0


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
    """Check that MLflow answers; returns one line. No message shows the URI, which may have a password.

    Raises:
        OrchestratorError: it does not, or the URI means nothing.
    """
    parts = urlsplit(uri)
    if parts.scheme in {"http", "https"}:
        return _ask_server(f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}")
    if parts.scheme == "sqlite":
        return _check_database(Path(parts.path.removeprefix("/") if parts.path.startswith("//") else parts.path))
    if parts.scheme.partition("+")[0] == "postgresql":
        return ask_database(uri)
    raise OrchestratorError(
        f"the tracking URI has the scheme {parts.scheme!r}; write http(s)://host:port, sqlite:///absolute/path or "
        "postgresql://host/database"
    )


def _ask_server(address: str) -> str:
    request = Request(f"{address.rstrip('/')}/health")  # noqa: S310 - http and https only
    try:
        with urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
            return f"MLflow at {address} answers"
    except HTTPError as error:
        if error.code in {401, 403}:
            return f"MLflow at {address} answers, and requires a login"
        message = f"{address} answers with HTTP {error.code} and is no MLflow server; check MLFLOW_TRACKING_URI"
        raise OrchestratorError(message) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        message = f"{address} does not answer: {reason}; start the server, or check MLFLOW_TRACKING_URI and proxies"
        raise OrchestratorError(message) from None


def _check_database(path: Path) -> str:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        raise OrchestratorError(f"{there} cannot be written to; choose another MLFLOW_TRACKING_URI")
    return f"{path} {'is there' if path.exists() else 'is made at the first run'}"
