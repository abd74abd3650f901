"""From a store URI to a store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from orchestrator.errors import StorageError
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore


def open_store(uri: str) -> ObjectStore:
    """Open the store at an absolute ``file://`` URI. Creates nothing until the first write.

    Raises:
        StorageError: the scheme is unknown or the path is not absolute.
    """
    return LocalStore(_local_path(uri))


def is_initialised(uri: str) -> bool:
    """Whether something can be in the store at all; asking creates nothing.

    Raises:
        StorageError: as ``open_store``.
    """
    return _local_path(uri).is_dir()


def _local_path(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.scheme != "file":
        message = f"store {uri!r} has the scheme {parts.scheme!r}; supported: file:///absolute/path"
        raise StorageError(message)
    path = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.is_absolute():
        message = f"store {uri!r} is not absolute; write file:///absolute/path"
        raise StorageError(message)
    return path
