"""Large objects to and from S3: uploads in parts, and downloads as ranges of one version, several at once.

Measured per GB received on one core: 0.2 s in the kernel for receiving, 0.2 s for the copy into the page cache. Our
code should add almost nothing: one small buffer per range is used again and again (new memory for every chunk costs
0.15 s in page faults; a mapping of the file instead of ``pwrite`` 0.8 s), and a range is long enough to pay for its
request, 1.4 ms.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from botocore.response import StreamingBody

from orchestrator.core.errors import CorruptObjectError, NoSpaceError, NotFoundError, StorageError, StorageTimeoutError
from orchestrator.storage.bulk import Piece, write_at
from orchestrator.storage.files import replaced_file
from orchestrator.storage.protocol import ObjectStat
from orchestrator.storage.s3.client import Bucket
from orchestrator.storage.s3.responses import Response

Item = TypeVar("Item")
_MAX_PARTS = 10_000  # of one upload, by the S3 API
_SEPARATOR = " "
"""Of upload id and key in the name of an unfinished upload; neither holds a space."""
_BUFFER_BYTES = 256 * 1024  # stays in the processor's cache between the socket and the file; measured
_MAX_RANGE_BYTES = 32 * 1024**2
_FULL = {errno.ENOSPC, errno.EDQUOT}
Read = Callable[[memoryview], int]


class UploadSource(Protocol):
    """Something of known size that can be read from any place, by several threads."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, start: int, length: int) -> bytes:
        """Exactly these bytes."""


class Bytes:
    """A source in memory."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size_bytes = len(content)

    def read(self, start: int, length: int) -> bytes:
        """See ``UploadSource``."""
        return self._content[start : start + length]  # the whole of it is no copy


class File:
    """A source on the local disk; open within a ``with`` block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, start: int, length: int) -> bytes:
        """See ``UploadSource``. Raises ``StorageError`` if the file has become shorter."""
        content = os.pread(self._descriptor, length, start)
        if len(content) != length:
            message = f"{self._path} ends at {start + len(content)} and had {self.size_bytes} bytes: it was changed"
            raise StorageError(message + " while it was uploaded; upload it again")
        return content


def upload(bucket: Bucket, key: str, source: UploadSource) -> None:
    """Write an object from its parts; on any error the uploaded parts are discarded.

    Raises:
        StorageError: the object is not written, or (``StorageTimeoutError``) may or may not be.
    """
    bucket.retry_until_deadline(lambda: _try_upload(bucket, key, source))


def _try_upload(bucket: Bucket, key: str, source: UploadSource) -> None:
    upload_id = bucket.repeat("create_multipart_upload", key)["UploadId"]
    part_bytes = max(bucket.settings.part_bytes, -(-source.size_bytes // _MAX_PARTS))

    def send(start: int) -> Response:
        content = source.read(start, min(part_bytes, source.size_bytes - start))
        number = start // part_bytes + 1
        response = bucket.repeat("upload_part", key, UploadId=upload_id, PartNumber=number, Body=content)
        return {"PartNumber": number, "ETag": response["ETag"], **_checksums(response)}

    try:
        parts = _in_parallel(bucket, send, range(0, source.size_bytes, part_bytes))
        bucket.repeat("complete_multipart_upload", key, UploadId=upload_id, MultipartUpload={"Parts": parts})
    except NotFoundError as error:
        # Completed by a try whose answer was lost, or discarded by the server: from outside these look the same, and an
        # older object of this size may be there. Only another upload is sure to end with our bytes.
        raise StorageTimeoutError(f"{error}; the upload is gone") from error
    except BaseException:
        # Parts of an upload that was never completed cost space and are in no listing of objects.
        with suppress(StorageError):
            bucket.once("abort_multipart_upload", key, UploadId=upload_id)
        raise


def _checksums(response: Response) -> Response:
    """The server's checksums of a part, to be repeated when the upload is completed."""
    return {name: response[name] for name in ("ChecksumCRC32", "ChecksumCRC64NVME") if name in response}


def unfinished_uploads(
    bucket: Bucket, prefix: str, until_s: float, is_ours: Callable[[str], bool]
) -> Iterator[ObjectStat]:
    """Uploads to keys below a prefix that are neither completed nor discarded, those at work included; without those
    that began after ``until_s`` (unix seconds): the size of each takes a request.

    ``is_ours`` takes the rest of a key: others may use the bucket, too, and their uploads are left out.
    """
    marker: Response = {}
    while True:
        page = bucket.repeat("list_multipart_uploads", Prefix=prefix, **marker)
        for entry in page.get("Uploads", []):
            if entry["Initiated"].timestamp() <= until_s and is_ours(entry["Key"].removeprefix(prefix)):
                with suppress(NotFoundError):  # completed or discarded meanwhile
                    yield _unfinished_upload(bucket, entry)
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _unfinished_upload(bucket: Bucket, entry: Response) -> ObjectStat:
    parts = bucket.repeat("list_parts", entry["Key"], UploadId=entry["UploadId"]).get("Parts", [])
    return ObjectStat(
        name=f"{entry['UploadId']}{_SEPARATOR}{entry['Key']}",
        size_bytes=sum(part["Size"] for part in parts),  # of its first thousand parts
        etag=entry["UploadId"],
        modified_at_s=entry["Initiated"].timestamp(),
    )


def discard_upload(bucket: Bucket, name: str) -> None:
    """Discard an unfinished upload by the name that ``unfinished_uploads`` gave it, unless it is gone already."""
    upload_id, _, key = name.partition(_SEPARATOR)
    with suppress(NotFoundError):
        bucket.repeat("abort_multipart_upload", key, UploadId=upload_id)


def _in_parallel(bucket: Bucket, work: Callable[[int], Item], starts: range) -> list[Item]:
    """Results in order; after the first error no further part begins, and those under way are waited for."""
    if len(starts) == 1:
        return [work(starts[0])]
    with ThreadPoolExecutor(bucket.settings.num_parallel_parts, thread_name_prefix="s3-part") as pool:
        return list(pool.map(work, starts))


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

    Closing the iterator early waits at most for one answer of the server.

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
        """One piece; after a lost connection only the missing bytes are requested again."""
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

        self._bucket.retry_until_deadline(lambda: self._checked(attempt), lambda: position)
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
    try:
        with replaced_file(path) as file:
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)  # a full disk shows before the first byte is sent
            yield file.fileno()
    except OSError as error:
        kind = NoSpaceError if error.errno in _FULL else StorageError
        raise kind(f"writing {path} failed: {error}; check free space and permissions") from error
