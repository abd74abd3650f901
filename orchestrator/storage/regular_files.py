"""Files that others may have put there: only regular ones are read, and the caller learns where they really lie.

Opening a named pipe waits for a writer, for ever; a device may have no end; a link may lead anywhere. So a file is
opened without waiting (``O_NONBLOCK``) and its kind is looked at before anything is read. A link as the last part of
the path may lead to a device that acts when it is opened: it is first resolved to a handle (``O_PATH``), which opens
nothing. What is read is what was looked at, whoever exchanges the file or a folder above it meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_HUB_SNAPSHOT: Final = re.compile(r"(?P<repository>.*/(?:datasets|models|spaces)--[^/]+)/snapshots/[^/]+(?:/.*)?")


class NotRegularFileError(OSError):
    """There is something under this path that is not a file: a directory, pipe, socket, device or a loop of links."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", path)


def kind_of(mode: int) -> str:
    """What a file of this mode is, in words, if it is no regular one."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def look_at(path: Path) -> tuple[os.stat_result, str]:
    """State and real path of what a path leads to, links followed; opens nothing.

    Raises:
        NotRegularFileError: it is no regular file.
        OSError: as ``os.open``.
    """
    with _handle(path) as handle:
        return os.fstat(handle), _real_path(handle)


def open_regular(path: str | Path) -> tuple[BinaryIO, str]:
    """Open a file for reading, links followed; the file and its real path.

    Raises:
        NotRegularFileError: it is no regular file.
        OSError: as ``open``.
    """
    try:
        descriptor = os.open(path, _READ | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        descriptor = _open_by_handle(path)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularFileError(str(path), kind_of(mode))
        real = _real_path(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb"), real


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises as ``open_regular``."""
    with open_regular(path)[0] as file:
        return file.read()


def real_folder(path: Path) -> str:
    """Where a folder really lies, links followed. Raises ``OSError``: there is none, or it is no folder."""
    handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _real_path(handle)
    finally:
        os.close(handle)


def is_inside(real: str, folder: str) -> bool:
    """Whether a real path is a folder or below it.

    Of a snapshot in the cache of huggingface_hub (``.../datasets--x--y/snapshots/<revision>/``), whose files are links
    to ``../../blobs/<digest>``, the ``blobs`` of the same repository are a part.
    """
    snapshot = _HUB_SNAPSHOT.fullmatch(folder)
    places = [folder, *([f"{snapshot['repository']}/blobs"] if snapshot else [])]
    return any(real == place or real.startswith(f"{place.rstrip('/')}/") for place in places)


def _open_by_handle(path: str | Path) -> int:
    with _handle(path) as handle:
        try:
            return os.open(f"/proc/self/fd/{handle}", _READ)
        except OSError as error:
            error.filename = str(path)  # not the handle's
            raise


@contextmanager
def _handle(path: str | Path) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegularFileError(str(path), "a link that leads to itself") from error
        raise
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularFileError(str(path), kind_of(mode))
        yield handle
    finally:
        os.close(handle)


def _real_path(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115 - a string is all that is wanted, 5 us earlier
