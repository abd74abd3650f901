"""Stores in a bucket of any S3-compatible server: how a URI ``s3://bucket/prefix`` names one, and opens it."""

from __future__ import annotations

import re
from urllib.parse import SplitResult

from pydantic import ValidationError

from orchestrator.core.errors import StorageDeniedError, StorageError
from orchestrator.storage.protocol import OpenableStore, Scheme, check_name

_BUCKET = re.compile(r"(?![0-9]+(?:\.[0-9]+){3}$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""Never in the form of an IP address, by S3's rules: the name could be taken for a server."""


def bucket_and_prefix(parts: SplitResult, uri: str) -> tuple[str, str]:
    """Bucket and prefix of a URI. Raises ``StorageError`` if it names no bucket."""
    if not _BUCKET.fullmatch(parts.netloc):
        message = (
            f"store {uri!r} names no bucket: write s3://bucket/prefix, the bucket of 3-63 of a-z, 0-9, '.' and '-'"
        )
        raise StorageError(message)
    prefix = parts.path.removeprefix("/").removesuffix("/")
    return parts.netloc, check_name(prefix) if prefix else ""


def _open(parts: SplitResult, uri: str, deadline_s: float | None) -> OpenableStore:
    bucket, prefix = bucket_and_prefix(parts, uri)
    from orchestrator.storage.s3.settings import S3Settings
    from orchestrator.storage.s3.store import S3Store  # boto3 takes a third of a second to import

    try:
        settings = S3Settings()
    except ValidationError as error:
        raise StorageError(f"the S3 settings in the environment are wrong: {error}") from error
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


S3 = Scheme(name="s3", example="s3://bucket/prefix", check=bucket_and_prefix, open=_open)
