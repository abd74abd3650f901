"""From a store URI to a store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from orchestrator.errors import StorageError
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore


def open_store(uri: str) -> ObjectStore:
    """Open the store at an absolute ``file://`` URI, creating its root.

    Raises:
        StorageError: the scheme is unknown or the path is not absolute.
    """
    parts = urlsplit(uri)
    if parts.scheme != "file":
        message = f"store {uri!r} has the scheme {parts.scheme!r}; supported: file:///absolute/path"
        raise StorageError(message)
    path = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.is_absolute():
        message = f"store {uri!r} is not absolute; write file:///absolute/path"
        raise StorageError(message)
    return LocalStore(path)
