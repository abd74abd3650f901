"""Errors of stores: maps those of the operating system to ours, and counts errors of a process, including retried ones.

Expected errors are not counted: a name that does not exist, a lost conditional write.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from orchestrator.core.errors import (
    CredentialsUnavailableError,
    NoSpaceError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
)

COUNTED: Final = ("timeout", "throttled", "denied", "no_space", "other")
_NAMES: Final[dict[type[StorageError], str]] = {
    StorageTimeoutError: "timeout",
    StorageThrottledError: "throttled",
    StorageDeniedError: "denied",
    CredentialsUnavailableError: "denied",
    NoSpaceError: "no_space",
    StorageError: "other",
}
"""Subclasses without a line here are answers, not failures."""
FREE_SPACE: Final = (
    "free space there; `orchestrator gc --apply` deletes what nothing needs, in two runs: one hides what is older than "
    "--grace, and one after --trash-grace deletes it (24h each by default)"
)
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count_error(error: StorageError) -> StorageError:
    """Count an error of a store that is about to be raised, and return it."""
    name = _NAMES.get(type(error))
    if name is not None:
        with _lock:
            _counts[name] += 1
    return error


def error_counts() -> dict[str, int]:
    """Errors by name, one of ``COUNTED``, since the process began."""
    with _lock:
        return dict(_counts)


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
        return NoSpaceError(f"{what} failed: {error}; {FREE_SPACE}")
    if error.errno == errno.EROFS:
        return StorageDeniedError(f"{what} failed: {error}; mount it for writing, or use a store on another disk")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return StorageDeniedError(f"{what} failed: {error}; ask for read and write permissions there")
    if error.errno in {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}:
        return StorageError(f"{what} failed: {error}; an object cannot have the name of a folder: remove one of them")
    if error.errno == errno.ENAMETOOLONG:
        return StorageError(f"{what} failed: {error}; shorten it: between two '/' a disk takes 255 bytes")
    return StorageError(f"{what} failed: {error}; check the disk")
