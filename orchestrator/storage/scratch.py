"""Folders for one process's temporary files, which do not outlive it for long, even if it is killed.

``tempfile`` removes a folder when its process ends in order; one that is killed leaves it. So each folder is locked
(``flock(2)``) by its process: the kernel frees the lock however the process ends, and whoever makes the next folder
removes those that nobody locks. Locks, unlike process ids, mean the same in all containers that share ``/tmp``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "orc-scratch-"
"""Of no other program: what is called so and locked by nobody is removed."""


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new, empty folder of the user's own in the temporary folder (``TMPDIR``), removed at the end of the block.

    Its sibling ``<folder>.log`` belongs to it, and is removed with it. ``purpose`` becomes part of the name.
    """
    sweep_scratch()
    folder, descriptor = _locked_folder(purpose)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(descriptor)


def sweep_scratch() -> None:
    """Remove the folders of processes that were killed. What cannot be removed now is left for the next time."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/"):
        descriptor = _lock(folder)
        if descriptor is not None:
            _remove(folder)
            os.close(descriptor)


def _locked_folder(purpose: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
        # A sweep may have found it in the moment before it was locked: then it is gone, and another one is made.
        descriptor = _lock(folder)
        if descriptor is None:
            continue
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Descriptor that holds the folder's lock; ``None`` if somebody else has it, or the folder is not ours."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove(folder: Path) -> None:
    with suppress(OSError):  # in a folder for all users somebody else may have put anything under this name
        folder.with_suffix(".log").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
