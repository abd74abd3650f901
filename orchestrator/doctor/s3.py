"""Checks of S3 stores only: credentials, bucket, clock, uploads in parts, checksums."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from boto3.session import Session

from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import StorageDeniedError, StorageError, StorageTimeoutError
from orchestrator.storage.s3.client import Bucket
from orchestrator.storage.s3.responses import translated_errors
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.store import S3Store

DEADLINE_S, TIMEOUT_S = 6.0, 4.0
"""Time limits so short that each check ends by itself, with its reason."""
WARN_SKEW_S, MAX_SKEW_S = 30.0, 240.0
"""S3 refuses signatures that are 15 minutes off, claims of shared jobs tolerate six; the limit is half of six."""
_AWS = "https://s3.amazonaws.com"
_CONTENT = b"orchestrator doctor " * 64


class Impatient:
    """A store with short time limits; all else as in the settings."""

    def __init__(self, bucket: str, prefix: str) -> None:
        wanted = {"deadline_s": DEADLINE_S, "connect_timeout_s": TIMEOUT_S, "read_timeout_s": TIMEOUT_S}
        self.settings = S3Settings().model_copy(update=wanted)
        self.bucket = Bucket(bucket, self.settings)
        self.store = S3Store(bucket, prefix, self.settings)

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return self.settings.endpoint_url or _AWS


def s3_checks(place: Impatient) -> Iterator[Check]:
    """Checks of a bucket, in order."""
    yield Check(name="credentials", run=_find_credentials, needs=["store URI"])
    yield Check(name="server", run=lambda: _reach(place), needs=["store URI"])
    yield Check(name="clock", run=lambda: _compare_clocks(place), needs=["server"])
    yield Check(name="bucket", run=lambda: _find_bucket(place), needs=["credentials", "server"])
    yield Check(name="checksums", run=lambda: _check_checksums(place), needs=["bucket"])
    yield Check(name="uploads in parts", run=lambda: _upload_in_parts(place), needs=["bucket"])


def _find_credentials() -> str:
    with translated_errors("looking for credentials"):
        found = Session().get_credentials()
    if found is None:
        raise StorageDeniedError(
            "there are none; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or use a machine's role"
        )
    return f"found by {found.method}"  # never the credentials, nor a part of them


def _reach(place: Impatient) -> str:
    _date_header(place)
    return f"{place.endpoint} answers"


def _compare_clocks(place: Impatient) -> str:
    skew_s, error_s = measure_skew_s(place)
    message = f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
    if abs(skew_s) - error_s > MAX_SKEW_S:
        raise StorageDeniedError(f"{message}; set the clock (NTP): signatures, leases and claims carry the time")
    if abs(skew_s) - error_s > WARN_SKEW_S:
        raise ConcernError(f"{message}; set the clock (NTP)")
    return f"within {abs(skew_s) + error_s:.0f} s of the server's"


def measure_skew_s(place: Impatient) -> tuple[float, float]:
    """How far this machine is ahead of the server, and how wrong that may be, seconds.

    HTTP dates are whole seconds (RFC 9110, 5.6.7), so the server's time is half a second later on average.
    """
    before_s = time.time()
    header = _date_header(place)
    after_s = time.time()
    try:
        server_s = parsedate_to_datetime(header).timestamp() + 0.5
    except ValueError:
        raise ConcernError(f"{place.endpoint} sends no time; compare the clocks by hand") from None
    return (before_s + after_s) / 2 - server_s, 0.5 + (after_s - before_s) / 2


def _date_header(place: Impatient) -> str:
    """The ``Date`` of any answer, also of a refusal."""
    # The settings allow http and https only.
    request = Request(f"{place.endpoint}/", method="HEAD")  # noqa: S310
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            return str(response.headers.get("Date", ""))
    except HTTPError as error:
        return str(error.headers.get("Date", ""))
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        message = f"{place.endpoint} does not answer: {reason}; check that it runs, AWS_ENDPOINT_URL_S3, and proxies"
        raise StorageTimeoutError(message) from None


def _find_bucket(place: Impatient) -> str:
    # Listed, not asked for by HEAD, whose answer has no body to say what is wrong.
    place.bucket.repeat("list_objects_v2", Prefix=_key(place), MaxKeys=1)
    return f"{place.bucket.name} is there, and may be listed"


def _check_checksums(place: Impatient) -> str:
    mode = place.settings.checksums
    key = _key(place)
    place.bucket.repeat("put_object", key, Body=_CONTENT)
    try:
        found = place.bucket.repeat("head_object", key, ChecksumMode="ENABLED")
    finally:
        place.bucket.repeat("delete_object", key)
    names = sorted(name for name in found if name.startswith("Checksum") and name != "ChecksumType")
    return f"{mode.value}; the server {'keeps ' + ', '.join(names) if names else 'keeps none, ours are in the records'}"


def _upload_in_parts(place: Impatient) -> str:
    key, bucket = _key(place), place.bucket
    upload_id = bucket.repeat("create_multipart_upload", key)["UploadId"]
    try:
        part = bucket.repeat("upload_part", key, UploadId=upload_id, PartNumber=1, Body=_CONTENT)
        listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"], **_checksums(part)}]}
        bucket.repeat("complete_multipart_upload", key, UploadId=upload_id, MultipartUpload=listed)
    except StorageError:
        with suppress(StorageError):
            bucket.repeat("abort_multipart_upload", key, UploadId=upload_id)
        raise
    size_bytes = bucket.repeat("head_object", key)["ContentLength"]
    bucket.repeat("delete_object", key)
    if size_bytes != len(_CONTENT):
        raise StorageError(f"an upload of {len(_CONTENT)} bytes in parts has become {size_bytes}; use another server")
    return "begun, filled, completed"


def _checksums(part: dict[str, object]) -> dict[str, object]:
    return {name: part[name] for name in ("ChecksumCRC32", "ChecksumCRC64NVME") if name in part}


def _key(place: Impatient) -> str:
    prefix = place.store.uri.removeprefix(f"s3://{place.bucket.name}").strip("/")
    return f"{prefix}/probes/doctor-{secrets.token_hex(8)}".lstrip("/")
