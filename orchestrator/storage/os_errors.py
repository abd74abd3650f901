"""From the operating system's errors to our own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.core.errors import NoSpaceError, StorageDeniedError, StorageError
from orchestrator.storage.error_counts import count_error


@contextmanager
def our_errors(what: str) -> Iterator[None]:
    """Errors of the operating system inside the block become ours; ``what`` names the operation, object and store."""
    try:
        yield
    except OSError as error:
        raise translated(error, what) from error


def translated(error: OSError, what: str) -> StorageError:
    """Our error for one of the operating system's, counted."""
    return count_error(named(error, what))


def named(error: OSError, what: str) -> StorageError:
    """Our error for one of the operating system's."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpaceError(f"{what} failed: {error}; free space there: orchestrator gc")
    if error.errno == errno.EROFS:
        return StorageDeniedError(f"{what} failed: {error}; mount it for writing, or use a store on another disk")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return StorageDeniedError(f"{what} failed: {error}; ask for read and write permissions there")
    if error.errno in {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}:
        return StorageError(f"{what} failed: {error}; an object cannot have the name of a folder: remove one of them")
    if error.errno == errno.ENAMETOOLONG:
        return StorageError(f"{what} failed: {error}; shorten it: between two '/' a disk takes 255 bytes")
    return StorageError(f"{what} failed: {error}; check the disk")
