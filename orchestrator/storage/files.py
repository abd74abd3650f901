"""Files on local disks: safe reading, atomic replacement, and scratch folders that do not outlive their process.

A name may be anything: opening a named pipe waits for a writer without end; a device may have no end; a link may lead
anywhere. So a file is opened without waiting (``O_NONBLOCK``) and its kind is checked before anything is read. A link
as the last part of the path may lead to a device that acts when it is opened: it is first resolved to a handle
(``O_PATH``), which opens nothing. The file that is read is the one that was checked, also if the file or a folder above
it is exchanged meanwhile.

``tempfile`` removes a scratch folder when its process ends in order; one that is killed leaves it. So each folder is
locked (``flock(2)``) by its process: the kernel releases the lock however the process ends, and the process that makes
the next folder removes unlocked ones. Locks, unlike process ids, mean the same in all containers that share ``/tmp``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_PREFIX = "orc-scratch-"
"""Prefix of scratch folders, used by no other program: unlocked folders with it are removed."""


class NotRegularFileError(OSError):
    """The path is not a regular file: a directory, pipe, socket, device or a loop of links."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", path)


def kind_of(mode: int) -> str:
    """The kind of a file that is not regular, in words, from its mode."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def stat_and_real_path(path: Path) -> tuple[os.stat_result, str]:
    """The ``stat`` and real path of a file, links followed; does not open it.

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
    """The real path of a folder, links followed. Raises ``OSError``: there is none, or it is not a folder."""
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
    """Remove the folders of processes that were killed. Others are left for the next time."""
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
    """Descriptor that holds the folder's lock; ``None`` if another process has it, or the folder is not ours."""
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
    with suppress(OSError):  # in a folder of all users, another user may have created anything under this name
        folder.with_suffix(".log").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replaced_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of ``path`` when the block ends; after an error nothing has changed.

    ``mode`` is its mode from the first moment on, less the process's umask.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        partial.replace(path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only the user may read; it is never open to others, not even for a moment."""
    with replaced_file(path, 0o600) as file:
        file.write(text.encode())


def rewrite_text(path: Path, text: str) -> None:
    """Write a file of the user: all of it, or after an error (a full disk) nothing of it.

    A file that is there keeps its mode, and its owner if this process may give it away; a link stays, and the file that
    it leads to is replaced. A device, a pipe and a file on which a container has mounted another are written in place.

    Raises:
        OSError: it cannot be written, or is write-protected; with ``path`` as its name.
    """
    real = Path(os.path.realpath(path))
    try:
        found = real.stat() if real.exists() else None
        if found is not None and not os.access(real, os.W_OK):  # else it would be replaced all the same
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if found is not None and not stat.S_ISREG(found.st_mode):
            real.write_text(text, encoding="utf-8")
            return
        with replaced_file(real, 0o666 if found is None else stat.S_IMODE(found.st_mode)) as file:
            if found is not None:
                with suppress(OSError):
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))  # the umask does not count
            file.write(text.encode())
    except OSError as error:
        if error.errno == errno.EBUSY:  # a mount
            real.write_text(text, encoding="utf-8")
            return
        error.filename = str(path)  # not that of the new file
        raise
