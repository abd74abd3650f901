"""Large objects are uploaded in parts, several at once (multipart uploads)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from orchestrator.core.errors import NotFoundError, StorageError, StorageTimeoutError
from orchestrator.storage.protocol import ObjectStat
from orchestrator.storage.s3_answers import Response
from orchestrator.storage.s3_client import Bucket

Item = TypeVar("Item")
_MAX_PARTS = 10_000  # of one upload, by the S3 API
_SEPARATOR = " "
"""Of upload id and key in the name of an unfinished upload; neither holds a space."""


class Source(Protocol):
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
        """See ``Source``."""
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
        """See ``Source``. Raises ``StorageError`` if the file has become shorter."""
        content = os.pread(self._descriptor, length, start)
        if len(content) != length:
            message = f"{self._path} ends at {start + len(content)} and had {self.size_bytes} bytes: it was changed"
            raise StorageError(message + " while it was uploaded; upload it again")
        return content


def upload(bucket: Bucket, key: str, source: Source) -> None:
    """Write an object from its parts; on any error what was uploaded is discarded.

    Raises:
        StorageError: the object is not written, or (``StorageTimeoutError``) may or may not be.
    """
    bucket.until_deadline(lambda: _try_upload(bucket, key, source))


def _try_upload(bucket: Bucket, key: str, source: Source) -> None:
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


def unfinished_uploads(bucket: Bucket, prefix: str) -> Iterator[ObjectStat]:
    """Uploads to keys below a prefix that are neither completed nor discarded, those at work included."""
    marker: Response = {}
    while True:
        page = bucket.repeat("list_multipart_uploads", Prefix=prefix, **marker)
        for entry in page.get("Uploads", []):
            parts = bucket.repeat("list_parts", entry["Key"], UploadId=entry["UploadId"]).get("Parts", [])
            yield ObjectStat(
                name=f"{entry['UploadId']}{_SEPARATOR}{entry['Key']}",
                size_bytes=sum(part["Size"] for part in parts),  # of its first thousand parts
                etag=entry["UploadId"],
                modified_at_s=entry["Initiated"].timestamp(),
            )
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


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
