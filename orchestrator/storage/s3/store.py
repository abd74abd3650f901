"""An object store in a bucket of any S3-compatible server.

Requirements: a single ``PutObject`` is atomic, and ``If-None-Match: *`` and ``If-Match`` on it are obeyed
(``probe_store`` asks). Not required: conditional ``CompleteMultipartUpload``, which servers ignore or let several
writers win, and any order of listings across ``/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import md5
from pathlib import Path
from typing import Any

from orchestrator.core.errors import (
    OUTAGES,
    CorruptObjectError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageThrottledError,
    TooLargeError,
    UnsupportedStoreError,
)
from orchestrator.storage.bounds import check_size
from orchestrator.storage.bulk import Piece, size_differs
from orchestrator.storage.layout import is_of_key, is_probe, is_shown, is_tombstones, log_beside
from orchestrator.storage.logs import is_log
from orchestrator.storage.protocol import ObjectStat, check_name, is_name
from orchestrator.storage.s3.client import Bucket
from orchestrator.storage.s3.responses import TRANSIENT, NoBucketError, OutOfRangeError, Response
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.transfers import (
    Bytes,
    File,
    UploadSource,
    arriving,
    discard_upload,
    download,
    unfinished_uploads,
    upload,
)

Read = tuple[bytes, ObjectStat]
ReadIfShort = tuple[bytes | None, ObjectStat]


class S3Store:
    """See ``ObjectStore``. ``prefix`` is a name within the bucket, or empty for all of it."""

    def __init__(self, bucket: str, prefix: str = "", settings: S3Settings | None = None) -> None:
        self._bucket = Bucket(bucket, settings or S3Settings())
        self._root = f"{check_name(prefix)}/" if prefix else ""

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``; the endpoint comes from the environment."""
        return f"s3://{self._bucket.name}/{self._root}".rstrip("/")

    @property
    def is_reachable(self) -> bool:
        """Whether the bucket exists. Raises ``StorageError`` if the server does not answer."""
        try:
            # Not HEAD, whose answer has no body: a listing has the bucket's name, or an error text.
            self._bucket.repeat("list_objects_v2", Prefix=self._root, MaxKeys=1)
        except NoBucketError:
            return False
        return True

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        return self._put(name, Bytes(content))

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """See ``ObjectStore.put_file``."""
        with File(path) as source:
            return self._put(name, source)

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put_if_absent``."""
        return self._bucket.retry_until_deadline(lambda: self._try_put_if_absent(name, content))

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        """See ``ObjectStore.put_if_match``."""
        return self._bucket.retry_until_deadline(lambda: self._try_put_if_match(name, content, etag))

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        return self.get_with_stat(name, max_bytes=max_bytes)[0]

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> Read:
        """See ``ObjectStore.get_with_stat``."""
        return self._bucket.retry_until_deadline(lambda: self._read_once(name, max_bytes))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See ``ObjectStore.get_range``."""
        if length <= 0:
            self.stat(name)
            return b""
        given = {"Range": f"bytes={start}-{start + length - 1}"}
        try:
            return self._bucket.retry_until_deadline(
                lambda: self._bucket.read_once("get_object", self._key(name), _read_body, **given)
            )
        except OutOfRangeError:
            return b""

    def download(self, name: str, path: Path) -> None:
        """See ``ObjectStore.download``; large objects arrive as parallel ranges, all of one version."""
        self._bucket.retry_until_deadline(lambda: self._try_download(name, path))

    def arriving(self, name: str, descriptor: int, size_bytes: int) -> Iterator[Piece]:
        """See ``bulk.Streams``; all of one version."""
        stat = self.stat(name)
        if stat.size_bytes != size_bytes:
            raise size_differs(self, name, stat.size_bytes, size_bytes)
        try:
            yield from arriving(self._bucket, self._key(name), stat, descriptor)
        except PreconditionFailedError as error:
            message = f"{name} was replaced in {self.uri} while it was read: it is no longer what its record names"
            raise CorruptObjectError(message) from error

    def stat(self, name: str) -> ObjectStat:
        """See ``ObjectStore.stat``."""
        key = self._key(name)
        try:
            return _stat_of(name, self._bucket.repeat("head_object", key))
        except OUTAGES:
            raise
        except StorageError:
            # The answer to HEAD has no body, so a missing object, a missing bucket and a web page that does not exist
            # look the same. That to GET says which.
            return self._bucket.retry_until_deadline(lambda: self._bucket.read_once("get_object", key, _unread(name)))

    def exists(self, name: str) -> bool:
        """See ``ObjectStore.exists``."""
        try:
            self.stat(name)
        except NotFoundError:
            return False
        return True

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """See ``ObjectStore.list_objects``."""
        for page in self._pages(prefix):
            for entry in page.get("Contents", []):
                name = entry["Key"].removeprefix(self._root)
                # Some tools mark a folder with an empty object whose name ends in a slash: no object of ours.
                if is_name(name):
                    yield _stat(name, entry["Size"], entry)

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """See ``ObjectStore.list_children``."""
        # Compared here, too: a folder of this name sorts behind it with its slash, and a server may ignore the field.
        found = self._children(prefix, start_after)
        return [child for child in found if child > start_after and is_name(f"{prefix}{child}")]

    def refused_children(self, prefix: str) -> list[str]:
        """See ``OpenableStore.refused_children``."""
        return [child for child in self._children(prefix) if not is_name(f"{prefix}{child}")]

    def _children(self, prefix: str, start_after: str = "") -> list[str]:
        full = f"{self._root}{prefix}"
        found: set[str] = set()
        for page in self._pages(prefix, start_after, Delimiter="/"):
            found.update(entry["Key"] for entry in page.get("Contents", []))
            found.update(entry["Prefix"] for entry in page.get("CommonPrefixes", []))
        children = {name.removeprefix(full).rstrip("/") for name in found} - {""}
        return sorted(child for child in children if not child.startswith("."))

    def delete(self, name: str) -> None:
        """See ``ObjectStore.delete``."""
        try:
            self._bucket.repeat("delete_object", self._key(name))
        except NotFoundError:
            return  # some servers report this, others return success

    def leftovers(self, *, until_s: float = math.inf) -> Iterator[ObjectStat]:
        """See ``gc_rules.HasLeftovers``: multipart uploads that nobody completed or discarded."""
        return unfinished_uploads(self._bucket, self._root, until_s, _may_be_large)

    def delete_leftover(self, name: str) -> None:
        """See ``gc_rules.HasLeftovers``."""
        discard_upload(self._bucket, name)

    def _key(self, name: str) -> str:
        return f"{self._root}{check_name(name)}"

    def _put(self, name: str, source: UploadSource) -> ObjectStat:
        key = self._key(name)
        if source.size_bytes > self._bucket.settings.part_bytes:
            upload(self._bucket, key, source)
            stat = self.stat(name)  # servers do not agree whether completing an upload returns the final etag
            if stat.size_bytes != source.size_bytes:
                message = f"{name} has {stat.size_bytes} bytes in {self.uri} after {source.size_bytes} were uploaded: "
                raise StorageError(message + "another writer was later, or the server lost some; write it again")
            return stat
        content = source.read(0, source.size_bytes)
        return self._written(name, content, self._bucket.repeat("put_object", key, Body=content))

    def _try_download(self, name: str, path: Path) -> None:
        try:
            download(self._bucket, self._key(name), self.stat(name), path)
        except PreconditionFailedError as error:
            raise StorageThrottledError(f"{name} was replaced in {self.uri} while it was read; try again") from error

    def _put_once(self, name: str, content: bytes, **condition: str) -> ObjectStat:
        return self._written(name, content, self._bucket.once("put_object", self._key(name), Body=content, **condition))

    def _written(self, name: str, content: bytes, response: Response) -> ObjectStat:
        """The result of a write's answer, after a check of its etag.

        Almost every server's is the MD5 of the content (AWS without KMS keys); where it is not, the object is asked.
        """
        etag = _unquoted(response["ETag"])
        if etag != md5(content, usedforsecurity=False).hexdigest():
            with suppress(NotFoundError):  # deleted already
                self._check_etag(name, content, etag)
        return ObjectStat(name=name, size_bytes=len(content), etag=etag)

    def _check_etag(self, name: str, content: bytes, etag: str) -> None:
        """Refuse a server that answers to a write with another etag than the object has: the next conditional write
        would fail as if another writer had been first.
        """
        if self.stat(name).etag == etag:
            return
        # Or another writer was later: the bytes tell. They are not read without need, which would double the transfer.
        found, now = self._bucket.retry_until_deadline(lambda: self._read_if_short(name, len(content)))
        if found == content and now.etag != etag:
            message = f"{self.uri} answered to the write of {name} with the etag {etag}, and it has {now.etag}: "
            raise UnsupportedStoreError(message + "conditional writes cannot work; use another server")

    def _try_put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        try:
            return self._put_once(name, content, IfNoneMatch="*")
        except (PreconditionFailedError, *TRANSIENT) as error:
            # 412 may come from our own first try, whose acknowledgement was lost; 409, 5xx and a lost connection say
            # nothing. The present object decides; while there is none, the same bytes may be sent again.
            found, stat = self._read_or_retry(name, error, len(content))
            if found == content:
                return stat
            message = f"{name} exists already in {self.uri}: another writer was first; use what it wrote"
            raise PreconditionFailedError(message) from error

    def _try_put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        try:
            return self._put_once(name, content, IfMatch=etag)  # unquoted: servers exist that compare literally
        except (PreconditionFailedError, NotFoundError, *TRANSIENT) as error:
            found = self._read_or_none(name, len(content))
            if found is not None and found[0] == content:
                return found[1]  # our own write, whose acknowledgement was lost
            now = found[1].etag if found is not None else None
            if isinstance(error, TRANSIENT) and now == etag:
                raise  # not written, or not yet; the same condition lets at most one of our tries through
            message = f"{name} has etag {now}, expected {etag}: another writer was first; read it again"
            raise PreconditionFailedError(message) from error

    def _read_or_retry(self, name: str, error: StorageError, num_bytes: int) -> ReadIfShort:
        found = self._read_or_none(name, num_bytes)
        if found is not None:
            return found
        if isinstance(error, TRANSIENT):
            raise error
        raise StorageThrottledError(f"{name} was there and is gone in {self.uri}; try again") from error

    def _read_or_none(self, name: str, num_bytes: int) -> ReadIfShort | None:
        """An object that may be our own write; for a longer one, which is another writer's, only its metadata."""
        with suppress(NotFoundError):
            return self._read_if_short(name, num_bytes)
        return None

    def _read_if_short(self, name: str, num_bytes: int) -> ReadIfShort:
        try:
            return self._read_once(name, num_bytes)
        except TooLargeError:
            return None, self.stat(name)

    def _read_once(self, name: str, max_bytes: int | None = None) -> Read:
        def read(response: Response) -> Read:
            stat = _stat_of(name, response)
            try:
                check_size(name, self.uri, stat.size_bytes, max_bytes)
            except TooLargeError:
                response["Body"].close()  # with its connection: the rest is never sent
                raise
            return _read_body(response), stat

        return self._bucket.read_once("get_object", self._key(name), read)

    def _pages(self, prefix: str, start_after: str = "", **parameters: str) -> Iterator[Response]:
        full = f"{self._root}{prefix}"
        begin = {"StartAfter": f"{full}{start_after}"} if start_after else {}
        while True:
            page = self._bucket.repeat("list_objects_v2", Prefix=full, **parameters, **begin)
            yield page
            if not page.get("IsTruncated"):
                return
            begin = {"ContinuationToken": page["NextContinuationToken"]}


def _may_be_large(name: str) -> bool:
    """Whether a name has the form of those objects of ours that may be larger than one part."""
    return is_of_key(name) or is_log(log_beside(name)) or is_probe(name) or is_tombstones(name) or is_shown(name)


def _unread(name: str) -> Callable[[Response], ObjectStat]:
    def read(response: Response) -> ObjectStat:
        response["Body"].close()
        return _stat_of(name, response)

    return read


def _read_body(response: Response) -> bytes:
    body: Any = response["Body"]
    with body:
        content: bytes = body.read()
    return content


def _stat_of(name: str, response: Response) -> ObjectStat:
    return _stat(name, response["ContentLength"], response)


def _stat(name: str, size_bytes: int, response: Response) -> ObjectStat:
    modified_at_s = response["LastModified"].timestamp()
    return ObjectStat(name=name, size_bytes=size_bytes, etag=_unquoted(response["ETag"]), modified_at_s=modified_at_s)


def _unquoted(etag: str) -> str:
    return etag.strip('"')
