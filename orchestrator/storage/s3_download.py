"""Downloads from S3: ranges of one version of an object, several at once, from the socket into an open file.

Measured per GB received on one core: 0.2 s in the kernel for receiving, 0.2 s for the copy into the page cache. What
comes on top should be nothing: one small buffer per range is used again and again (new memory for every chunk costs
0.15 s in page faults; a mapping of the file instead of ``pwrite`` 0.8 s), and a range is long enough to pay for its
request, 1.4 ms.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from botocore.response import StreamingBody

from orchestrator.core.errors import CorruptObjectError, NoSpaceError, StorageError, StorageTimeoutError
from orchestrator.storage.bulk import Piece, write_at
from orchestrator.storage.protocol import ObjectStat
from orchestrator.storage.s3_answers import Response
from orchestrator.storage.s3_client import Bucket

_BUFFER_BYTES = 256 * 1024  # stays in the processor's cache between the socket and the file; measured
_MAX_RANGE_BYTES = 32 * 1024**2
_FULL = {errno.ENOSPC, errno.EDQUOT}

Read = Callable[[memoryview], int]


def download(bucket: Bucket, key: str, stat: ObjectStat, path: Path) -> None:
    """Stream one version of an object into a file, which appears complete or not at all.

    Raises:
        PreconditionFailedError: the object was replaced meanwhile.
        NoSpaceError: the disk is full.
    """
    with _new_file(path, stat.size_bytes) as descriptor:
        for _ in arriving(bucket, key, stat, descriptor):
            pass


def arriving(bucket: Bucket, key: str, stat: ObjectStat, descriptor: int) -> Iterator[Piece]:
    """Write one version of an object into an open file, and yield its pieces in order, each once it is there.

    Whoever closes the iterator early waits at most for one answer of the server.

    Raises:
        PreconditionFailedError: the object was replaced meanwhile.
        OSError: of writing the file.
    """
    step = _range_bytes(bucket, stat.size_bytes)
    transfer = _Transfer(bucket, key, stat, descriptor)
    starts = range(0, stat.size_bytes, step)
    pieces = [(start, min(start + step, stat.size_bytes)) for start in starts]
    if len(pieces) <= 1:
        yield from map(transfer.fetch, pieces)
        return
    with ThreadPoolExecutor(bucket.settings.num_parallel_parts, thread_name_prefix="s3-part") as pool:
        try:
            with closing(pool.map(transfer.fetch, pieces)) as fetched:  # type: ignore[type-var] # it is a generator
                yield from fetched
        finally:
            transfer.abandoned.set()  # before the pool waits for the pieces under way


def _range_bytes(bucket: Bucket, size_bytes: int) -> int:
    """Every connection gets its share, in ranges that a reader of the file can follow closely."""
    share = -(-size_bytes // bucket.settings.num_parallel_parts)
    return max(bucket.settings.part_bytes, min(share, _MAX_RANGE_BYTES))


class _Transfer:
    """One object on its way into a file."""

    def __init__(self, bucket: Bucket, key: str, stat: ObjectStat, descriptor: int) -> None:
        self._bucket, self._key, self._stat, self._descriptor = bucket, key, stat, descriptor
        self.abandoned = threading.Event()

    def fetch(self, piece: Piece) -> Piece:
        """One piece; after a lost connection only what is missing is asked for again."""
        start, end = piece
        position = start

        def attempt() -> None:
            nonlocal position
            # Only of this version: parts of two versions would make a file that never was an object.
            given = {"IfMatch": self._stat.etag}
            if end - start == self._stat.size_bytes:
                position = start  # no range: the answer has the object's checksum, which counts from the beginning
            else:
                given["Range"] = f"bytes={position}-{end - 1}"
            self._bucket.read_once("get_object", self._key, receive, **given)

        def receive(response: Response) -> None:
            nonlocal position
            for chunk in _chunks(response):
                write_at(self._descriptor, chunk[: end - position], position)
                position += len(chunk)
                if position > end or self.abandoned.is_set():
                    break

        self._bucket.until_deadline(lambda: self._checked(attempt))
        if position != end and not self.abandoned.is_set():
            message = f"{self._key}: the server sent {position - start} bytes of a range of {end - start}"
            raise CorruptObjectError(f"{message}; try another server")
        return piece

    def _checked(self, attempt: Callable[[], None]) -> None:
        if not self.abandoned.is_set():
            attempt()


def _chunks(response: Response) -> Iterator[memoryview]:
    """The body piece by piece, each valid until the next one is asked for."""
    body: Any = response["Body"]
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with closing(body):
        connection = _direct(body)
        read = _reading(connection) if connection is not None else body.readinto
        left = int(response["ContentLength"])
        while count := read(buffer):
            left -= count
            yield buffer[:count]
        if left > 0:
            message = f"the connection ended {left} bytes before the end of the answer; try again"
            raise StorageTimeoutError(message)
        if connection is not None:
            body._raw_stream.release_conn()  # noqa: SLF001 - the response was read behind its back


def _direct(body: object) -> HTTPResponse | None:
    """The standard library's response below botocore's and urllib3's, where the bytes need no treatment by these.

    Both copy every byte once more, into memory that is new each time. None: they are needed (the body has a checksum
    or an encoding) or made otherwise than the release we know.
    """
    if type(body) is not StreamingBody:
        return None
    raw = getattr(body, "_raw_stream", None)
    response = getattr(raw, "_fp", None)
    plain = isinstance(response, HTTPResponse) and not response.chunked and not response.getheader("Content-Encoding")
    return response if plain else None


def _reading(response: HTTPResponse) -> Read:
    def read(buffer: memoryview) -> int:
        try:
            return response.readinto(buffer)
        except (OSError, HTTPException) as error:
            message = f"the connection was lost: {type(error).__name__}; try again"
            raise StorageTimeoutError(message) from None

    return read


@contextmanager
def _new_file(path: Path, size_bytes: int) -> Iterator[int]:
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if size_bytes:
                os.posix_fallocate(descriptor, 0, size_bytes)  # a full disk shows before the first byte is sent
            yield descriptor
        finally:
            os.close(descriptor)
        partial.replace(path)
    except OSError as error:
        kind = NoSpaceError if error.errno in _FULL else StorageError
        raise kind(f"writing {path} failed: {error}; check free space and permissions") from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
