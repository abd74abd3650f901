"""A shard as a forward stream: read once, hashed on the way, never held as a whole.

``tarfile`` walks it; the few bytes behind the reading position are kept, because it looks back by one.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, Final, cast

from orchestrator.storage.digests import Digests, DoubleHasher

_KEPT_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 512
_PADDING_BYTES: Final = 1024**2
_MAX_READ_BYTES: Final = 512 * 1024**2
"""No member that a scan reads as a whole is as large; a broken header may claim any size."""


_COMPRESSIONS: Final = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
}
"""What the first bytes of a compressed file are, with the program that undoes it."""


class DamagedArchiveError(Exception):
    """The archive is no tar, is cut off, or has a broken header; what came before it is whole."""


class TrailingBytesError(DamagedArchiveError):
    """The archive is whole, but more follows its end: every member up to there can be used."""


class CompressedArchiveError(Exception):
    """The archive is compressed: its members have no place of their own in it."""


class ShardStream:
    """A file object over chunks of bytes that can seek forward, and back by a little.

    ``size_bytes`` is of all chunks taken so far; after `drain`, of the whole shard.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._window = b""
        self._window_start = 0
        self._position = 0
        self._hasher = DoubleHasher()
        self.size_bytes = 0

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from the position; fewer only at the end. A negative size is refused."""
        if not 0 <= size <= _MAX_READ_BYTES:
            raise DamagedArchiveError(f"a member claims {size} bytes")
        pieces: list[bytes] = []
        while size > 0 and self._reach(self._position):
            offset = self._position - self._window_start
            piece = self._window[offset : offset + size]
            pieces.append(piece)
            self._position += len(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, position: int, whence: int = 0) -> int:
        """Move; bytes in between are read and hashed when reading goes on."""
        if whence or position < self._window_start:
            raise DamagedArchiveError(f"its headers point back to byte {position}")
        self._position = position
        return position

    def tell(self) -> int:
        """The position."""
        return self._position

    def drain(self) -> Digests:
        """Take all that is left; returns the shard's digests."""
        while self._advance():
            pass
        return self._hasher.digests()

    def _reach(self, position: int) -> bool:
        """Whether there is a byte at a position; takes chunks up to it."""
        while position >= self._window_start + len(self._window):
            if not self._advance():
                return False
        return True

    def _advance(self) -> bool:
        chunk = next(self._chunks, b"")
        if not chunk:
            return False
        self._hasher.update(chunk)
        self.size_bytes += len(chunk)
        # What lies before the position is kept only as far as tarfile looks back.
        end = self._window_start + len(self._window)
        kept_from = max(self._window_start, min(self._position, end) - _KEPT_BYTES)
        self._window = self._window[kept_from - self._window_start :] + chunk
        self._window_start = kept_from
        return True


def walk(stream: ShardStream) -> Iterator[tarfile.TarInfo]:
    """Members in the order of the archive; a member's content may be read until the next one is asked for.

    Raises:
        DamagedArchiveError: after the last whole member.
        CompressedArchiveError: before the first one.
    """
    _check_plain(stream)
    try:
        tar = tarfile.open(fileobj=cast("BinaryIO", stream), mode="r:")  # noqa: SIM115 - nothing to close: not our file
        for member in tar:
            tar.members = []  # type: ignore[attr-defined] # tarfile would keep every header
            yield member
        _check_end(stream, tar.offset)
    except tarfile.TarError as error:
        raise DamagedArchiveError(f"it is not a whole, uncompressed tar ({error})") from error
    # Numbers and encodings in pax headers; tarfile calls itself for each long name that follows another.
    except (ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise DamagedArchiveError(f"a header of it cannot be read ({error})") from error


def content_of(stream: ShardStream, member: tarfile.TarInfo) -> bytes:
    """Raises ``DamagedArchiveError`` if the archive ends within the member."""
    stream.seek(member.offset_data)
    content = stream.read(member.size)
    if len(content) != member.size:
        raise DamagedArchiveError(f"it ends within {member.name}")
    return content


def _check_plain(stream: ShardStream) -> None:
    head = stream.read(max(map(len, _COMPRESSIONS)))
    stream.seek(0)
    for magic, (form, program) in _COMPRESSIONS.items():
        if head.startswith(magic):
            message = f"is compressed with {form}, so single samples cannot be read from it; decompress it with "
            raise CompressedArchiveError(message + f"`{program}` and store the plain tar in its place")


def _check_end(stream: ShardStream, end_bytes: int) -> None:
    """A broken header or a cut between members ends tarfile's listing in silence; a whole tar ends in zeros."""
    stream.seek(end_bytes)
    block = stream.read(_BLOCK_BYTES)
    if block.strip(b"\0"):
        raise DamagedArchiveError(f"it has a broken member header at byte {end_bytes}")
    if len(block) < _BLOCK_BYTES:
        raise DamagedArchiveError(f"it is cut off at byte {end_bytes}: the mark of its end is missing")
    _check_padding(stream, end_bytes)


def _check_padding(stream: ShardStream, end_bytes: int) -> None:
    """Writers pad a tar with zeros (GNU tar to 10,240 bytes); anything else there is what no reader would ever see."""
    position = end_bytes + _BLOCK_BYTES
    while content := stream.read(_PADDING_BYTES):
        if content.count(0) != len(content):
            position += len(content) - len(content.lstrip(b"\0"))
            message = f"its end is marked at byte {end_bytes}, but more follows at byte {position}, which no reader of "
            message += "tars sees: was it joined of several by `cat`? Join them by `tar --concatenate`, or split it "
            raise TrailingBytesError(message + "into one shard for each")
        position += len(content)
