"""The node's cache of immutable objects: shards and index columns, downloaded once for all attempts on the node."""

from __future__ import annotations

import secrets
from hashlib import file_digest
from pathlib import Path

from filelock import FileLock

from orchestrator.errors import CorruptObjectError
from orchestrator.storage import ObjectStore


class ObjectCache:
    """Files under the sha256 of their content, so that sweeps, data sets and stores can share one folder."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store = store
        self._objects = folder / "objects"
        self._locks = folder / "locks"

    def path(self, name: str, *, size_bytes: int, sha256: str) -> Path:
        """A local, verified copy of an object. Processes that ask at the same time share one download.

        Raises:
            NotFoundError: the store has no such object.
            CorruptObjectError: the object's bytes are not those that its record names.
        """
        path = self._objects / sha256[:2] / sha256
        if _is_whole(path, size_bytes):
            return path
        self._locks.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._locks / f"{sha256}.lock"):
            if not _is_whole(path, size_bytes):
                self._download(name, path, sha256)
        return path

    def _download(self, name: str, path: Path, sha256: str) -> None:
        unverified = path.with_name(f"{sha256}.{secrets.token_hex(4)}.unverified")
        try:
            self._store.download(name, unverified)
            with unverified.open("rb") as file:
                found = file_digest(file, "sha256").hexdigest()
            if found != sha256:
                raise CorruptObjectError(
                    f"{name} in {self._store.uri} has sha256 {found[:12]}..., its record says {sha256[:12]}...: "
                    "the store lost or changed it; delete its artifact's record to rebuild it"
                )
            # Verified before it gets its final name: whatever has that name may be read without another look.
            unverified.replace(path)
        finally:
            unverified.unlink(missing_ok=True)


def _is_whole(path: Path, size_bytes: int) -> bool:
    """False also for a file that a power failure cut after its rename."""
    return path.is_file() and path.stat().st_size == size_bytes
