"""Images inside uncompressed tars, and inside tars inside tars, found without extracting anything."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from orchestrator.core.errors import UserError
from orchestrator.storage.files import open_regular

_MAX_HEADER_BYTES = 16 * 1024**2
"""Names and notes of a member; a broken header claims terabytes, or less than nothing."""
TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, zlib.error)
"""What ``tarfile`` raises for archives that are none. ``ValueError``: numbers and encodings in notes."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TarEntry:
    """A plain file in a tar; ``offset_bytes`` counts from the beginning of the outermost file."""

    name: str
    offset_bytes: int
    length_bytes: int


def tar_entries(path: Path, within: TarEntry | None = None) -> Iterator[TarEntry]:
    """Plain files of a tar, or of a tar that is an entry ``within`` it, in the order of the archive.

    Raises:
        UserError: it is no tar, is compressed, or is cut off.
    """
    with _opened(path, within) as (file, start):
        try:
            with tarfile.open(fileobj=cast("BinaryIO", BoundedFile(file)), mode="r:") as tar:
                for member in forward(tar):
                    tar.members = []  # type: ignore[attr-defined] # tarfile would keep every header
                    if member.isreg() and not member.issparse():
                        offset = start + member.offset_data
                        yield TarEntry(name=member.name, offset_bytes=offset, length_bytes=member.size)
        except TAR_ERRORS as error:
            place = f"{path}:{within.name}" if within else str(path)
            raise UserError(f"{place} is not a whole tar ({error}); download it again") from error


class BoundedFile:
    """A file as ``tarfile`` may read it: no more than ``max_read_bytes`` at once, and not beyond ``size_bytes``."""

    def __init__(
        self, file: BinaryIO, *, max_read_bytes: int = _MAX_HEADER_BYTES, size_bytes: int | None = None
    ) -> None:
        self._file, self._max_read_bytes, self._size_bytes = file, max_read_bytes, size_bytes

    def read(self, size: int = -1) -> bytes:
        """Bytes from the position; a negative size would read everything, and is refused."""
        if not 0 <= size <= self._max_read_bytes:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return self._file.read(size)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Move; what is compressed is expanded up to there."""
        if self._size_bytes is not None and position > self._size_bytes:
            raise tarfile.ReadError(f"it expands to more than {self._size_bytes} bytes")
        return self._file.seek(position, whence)

    def tell(self) -> int:
        """The position."""
        return self._file.tell()


def forward(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Members in the order of the archive. A size below zero, which would lead in a circle, raises ``ReadError``."""
    for member in tar:
        if member.size < 0:
            raise tarfile.ReadError(f"{member.name!r} claims {member.size} bytes")
        yield member


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._start + self._position)
        wanted = max(0, min(len(buffer), self._size - self._position))
        content = self._file.read(wanted)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


@contextmanager
def _opened(path: Path, within: TarEntry | None) -> Iterator[tuple[BinaryIO, int]]:
    try:
        opened = open_regular(path)[0]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name a tar file that may be read") from error
    with opened as file:
        magic = _COMPRESSED.get(file.read(2))
        if magic is not None:
            message = f"{path} is compressed ({magic}): single images cannot be read from it; unpack it to a .tar first"
            raise UserError(message)
        file.seek(0)
        if within is None:
            yield file, 0
        else:
            window = _Window(file, within.offset_bytes, within.length_bytes)
            yield cast("BinaryIO", io.BufferedReader(window)), within.offset_bytes
