"""From a store URI to a store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import ValidationError

from orchestrator.core.errors import StorageDeniedError, StorageError
from orchestrator.storage.allowed import check_allowed
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore, check_name

if TYPE_CHECKING:
    from orchestrator.storage.s3 import S3Store
    from orchestrator.storage.settings import S3Settings

_SUPPORTED = "file:///absolute/path, s3://bucket/prefix"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"(?![0-9]+(?:\.[0-9]+){3}$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""Never the form of an address, as S3 has it: a server by that name might be asked instead of a bucket."""


def open_store(uri: str) -> ObjectStore:
    """Open the store at an absolute ``file://`` or ``s3://bucket/prefix`` URI. Creates nothing until the first write.

    Raises:
        StorageError: the scheme is unknown, the path is not absolute, or anything in the URI is ambiguous.
        StorageDeniedError: the settings do not allow this place.
    """
    parts = _split(uri)
    check_allowed(uri)
    return _open_s3(parts, uri) if parts.scheme == "s3" else LocalStore(_local_path(parts, uri))


def check_store_uri(uri: str) -> None:
    """Refuse a URI that ``open_store`` would refuse whatever the environment says. Pure.

    Raises:
        StorageError: as ``open_store``.
    """
    parts = _split(uri)
    if parts.scheme == "s3":
        _bucket_and_prefix(parts, uri)
    else:
        _local_path(parts, uri)


def is_s3(uri: str) -> bool:
    """Whether a URI names a bucket. Raises ``StorageError`` for what ``check_store_uri`` refuses."""
    check_store_uri(uri)
    return _split(uri).scheme == "s3"


def split_s3(uri: str) -> tuple[str, str]:
    """Bucket and prefix of an ``s3://`` URI. Raises as ``is_s3``."""
    return _bucket_and_prefix(_split(uri), uri)


def is_initialised(uri: str, *, deadline_s: float | None = None) -> bool:
    """Whether something can be in the store at all; asking creates nothing.

    Args:
        uri: of the store.
        deadline_s: seconds after which a silent server counts as gone; default: as the settings say.

    Raises:
        StorageError: as ``open_store``, or the store does not answer.
    """
    parts = _split(uri)
    check_allowed(uri)
    store = _open_s3(parts, uri, deadline_s) if parts.scheme == "s3" else LocalStore(_local_path(parts, uri))
    return store.is_reachable


def _split(uri: str) -> SplitResult:
    # None of these messages shows the URI: what stands before an @ may be a password.
    if _CONTROL.search(uri):
        # urlsplit would leave out some of them, and so mean another place.
        raise StorageError("the store URI holds control characters; write them as %0A and the like, or leave them out")
    try:
        parts = urlsplit(uri)
    except ValueError:
        message = "the store is not a URI: its host is malformed; write file:///absolute/path or s3://bucket/prefix"
        raise StorageError(message) from None
    if "@" in parts.netloc:
        raise StorageError("a store URI with a user or password is refused; credentials belong into the environment")
    if not parts.scheme:
        hint = f"write file://{uri}; " if uri.startswith("/") else ""
        raise StorageError(f"store {uri!r} has no scheme; {hint}supported: {_SUPPORTED}")
    if parts.scheme not in {"file", "s3"}:
        raise StorageError(f"store {uri!r} has the scheme {parts.scheme!r}; supported: {_SUPPORTED}")
    path = unquote(parts.path)
    if parts.query or parts.fragment or ".." in path.split("/") or "\0" in path:
        message = f"store {uri!r} is refused: '..', '?', '#' and NUL could mean another place than it seems"
        raise StorageError(message)
    return parts


def _local_path(parts: SplitResult, uri: str) -> Path:
    path = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.is_absolute():
        message = f"store {uri!r} is not absolute; write file:///absolute/path"
        raise StorageError(message)
    return path


def _open_s3(parts: SplitResult, uri: str, deadline_s: float | None = None) -> S3Store:
    bucket, prefix = _bucket_and_prefix(parts, uri)
    from orchestrator.storage.s3 import S3Store  # boto3 takes a third of a second to import

    settings = _s3_settings()
    if not settings.allows(bucket):
        message = (
            f"bucket {bucket} of store {uri!r} is not among the allowed ones ({settings.allowed_buckets}); "
            "use one of them or change ORCHESTRATOR_S3_ALLOWED_BUCKETS"
        )
        raise StorageDeniedError(message)
    if deadline_s is not None:
        limits = ("deadline_s", "connect_timeout_s", "read_timeout_s")
        settings = settings.model_copy(update={name: min(getattr(settings, name), deadline_s) for name in limits})
    return S3Store(bucket, prefix, settings)


def _bucket_and_prefix(parts: SplitResult, uri: str) -> tuple[str, str]:
    if not _BUCKET.fullmatch(parts.netloc):
        message = (
            f"store {uri!r} names no bucket: write s3://bucket/prefix, the bucket of 3-63 of a-z, 0-9, '.' and '-'"
        )
        raise StorageError(message)
    prefix = parts.path.removeprefix("/").removesuffix("/")
    return parts.netloc, check_name(prefix) if prefix else ""


def _s3_settings() -> S3Settings:
    from orchestrator.storage.settings import S3Settings

    try:
        return S3Settings()
    except ValidationError as error:
        raise StorageError(f"the S3 settings in the environment are wrong: {error}") from error
