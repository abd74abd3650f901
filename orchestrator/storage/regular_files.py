"""Files that others may have put there: looked at before they are opened, and opened only if they are regular.

Opening a named pipe waits for a writer, for ever; a device may have no end; a link may lead anywhere. So the path is
first resolved to a handle (``O_PATH``), which opens nothing. What is read afterwards is what was looked at, whoever
exchanges the file or a folder above it meanwhile.
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


def open_regular(path: Path) -> tuple[BinaryIO, str]:
    """Open a file for reading, links followed; the file and its real path.

    Raises:
        NotRegularFileError: it is no regular file.
        OSError: as ``open``.
    """
    with _handle(path) as handle:
        real = _real_path(handle)
        try:
            descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            error.filename = str(path)  # not the handle's
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


@contextmanager
def _handle(path: Path) -> Iterator[int]:
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
