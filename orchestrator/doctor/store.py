"""Checks of the requirements of a store, one after the other: ``orchestrator doctor``."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import NoSpaceError, StorageDeniedError, StorageError, UnsupportedStoreError
from orchestrator.core.units import GIB, format_bytes
from orchestrator.storage.local import LocalStore
from orchestrator.storage.open import is_s3, open_store, split_s3
from orchestrator.storage.os_errors import our_errors
from orchestrator.storage.probe import probe_store
from orchestrator.storage.protocol import ObjectStore

FEW_BYTES, SCARCE_BYTES = 1 * GIB, 10 * GIB
"""Free space below which a check fails, and below which it warns."""
_CONTENT = b"orchestrator doctor " * 64
_CHECKSUM_HINT = "if the server refuses checksums, set ORCHESTRATOR_S3_CHECKSUMS=when_required"


def store_checks(uri: str) -> Iterator[Check]:
    """Checks of the store at a URI, in order. They write a few small objects under ``probes/`` and delete them."""
    yield Check(name="store URI", run=lambda: open_store(uri).uri, remedy="write file:///path or s3://bucket/prefix")
    try:
        store = open_store(uri)
    except StorageError:
        return  # the first check says why
    if is_s3(uri):
        from orchestrator.doctor.s3 import Impatient, s3_checks  # boto3 takes a third of a second to import

        bucket, prefix = split_s3(uri)
        impatient = Impatient(bucket, prefix)
        yield from s3_checks(impatient)
        yield from _object_checks(impatient.store, "bucket")
    elif isinstance(store, LocalStore):
        root = store.root
        yield Check(name="folder", run=lambda: _check_folder(root), needs=["store URI"])
        yield from _object_checks(store, "folder")
    else:
        yield from _object_checks(store, "store URI")


def check_free_space(folder: Path, purpose: str) -> str:
    """Check the free space at a folder, or where it would be created.

    Raises:
        NoSpaceError: next to nothing is free.
        ConcernError: little is free.
    """
    with our_errors(f"looking at {folder}"):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(there).free
    found = f"{format_bytes(free_bytes)} free in {there} for {purpose}"
    if free_bytes < FEW_BYTES:
        raise NoSpaceError(f"only {found}; free some space, or use a folder on another disk")
    if free_bytes < SCARCE_BYTES:
        raise ConcernError(f"only {found}; free some space, or use a folder on another disk")
    return found


def _check_folder(root: Path) -> str:
    with our_errors(f"looking at {root}"):
        there = next(parent for parent in (root, *root.parents) if parent.exists())
    if not there.is_dir():
        raise StorageDeniedError(f"{there} is not a directory; name another store, or move that file away")
    return check_free_space(root, "the store") + ("" if there == root else f"; {root} is made at the first write")


def _object_checks(store: ObjectStore, base: str) -> Iterator[Check]:
    objects = _Objects(store)
    writing = "read and write"
    yield Check(name=writing, run=objects.write_and_read, needs=[base], remedy=_CHECKSUM_HINT)
    yield Check(name="list", run=objects.list_it, needs=[writing])
    yield Check(name="delete", run=objects.delete_it, needs=[writing])
    yield Check(name="conditional writes", run=objects.probe, needs=[writing])


class _Objects:
    """Write, read, list and delete one object."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._folder = f"probes/doctor-{secrets.token_hex(8)}"
        self._name = f"{self._folder}/object"
        self._unmade = _missing_folders(store)

    def write_and_read(self) -> str:
        store = self._store
        store.put(self._name, _CONTENT)
        if store.get(self._name) != _CONTENT or store.get_range(self._name, 10, 20) != _CONTENT[10:30]:
            raise UnsupportedStoreError(f"{store.uri} does not return what was written; use another store")
        return f"{len(_CONTENT)} bytes written and read back, whole and in part"

    def list_it(self) -> str:
        names = {stat.name for stat in self._store.list_objects(f"{self._folder}/")}
        if names != {self._name}:
            raise UnsupportedStoreError(
                f"{self._store.uri} does not list an object that it has; use a store with consistent listings"
            )
        return "new objects are listed immediately"

    def delete_it(self) -> str:
        self._store.delete(self._name)
        if self._store.exists(self._name) or list(self._store.list_objects(f"{self._folder}/")):
            raise UnsupportedStoreError(
                f"{self._store.uri} still has an object that it deleted; use a store with consistent deletions"
            )
        return "deleted objects disappear immediately"

    def probe(self) -> str:
        probe_store(self._store)
        self._leave_no_trace()
        return "If-None-Match and If-Match are obeyed, also by four writers at once"

    def _leave_no_trace(self) -> None:
        """Remove a directory that the checks created."""
        for folder in self._unmade:
            if {path.name for path in folder.iterdir()} <= {".tmp", ".locks"}:
                with suppress(OSError):
                    shutil.rmtree(folder)


def _missing_folders(store: ObjectStore) -> list[Path]:
    """The directories that the first write would create, the innermost first."""
    if not isinstance(store, LocalStore):
        return []
    try:
        return [folder for folder in (store.root, *store.root.parents) if not folder.exists()]
    except OSError:  # the check of the folder reports it
        return []
