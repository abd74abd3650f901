"""The one table from what S3 servers and botocore say to our own errors.

Servers differ in their codes and agree more or less in the HTTP status, so the code decides where it is known and the
status where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from botocore import exceptions as botocore

from orchestrator.core.errors import (
    CorruptObjectError,
    NoSpaceError,
    NotFoundError,
    PreconditionFailedError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    UnsupportedStoreError,
)
from orchestrator.storage.error_counts import count_error
from orchestrator.storage.s3_answers import StrangeAnswerError

TRANSIENT = (StorageThrottledError, StorageTimeoutError)
"""What another try may cure. After a write they mean that it is unknown whether it happened."""


class OutOfRangeError(StorageError):
    """A ranged read starts at or after the end of the object."""


class NoBucketError(StorageError):
    """The server has no bucket of this name."""


@dataclass(frozen=True, slots=True)
class _Rule:
    error: type[StorageError]
    remedy: str
    codes: str = ""
    """Separated by spaces."""
    statuses: tuple[int, ...] = ()


_RULES = (
    _Rule(NoBucketError, "create the bucket or correct the store's URI", "NoSuchBucket InvalidBucketName"),
    _Rule(NotFoundError, "there is no such object", "NoSuchKey NoSuchUpload"),
    _Rule(OutOfRangeError, "the object ends before", "InvalidRange", (416,)),
    _Rule(
        PreconditionFailedError,
        "another writer was first; read it again",
        "PreconditionFailed PreConditionFailed",
        (412,),
    ),
    _Rule(StorageDeniedError, "set the clock of this machine; signatures carry the time", "RequestTimeTooSkewed"),
    _Rule(
        StorageDeniedError,
        "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of this machine)",
        "InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken InvalidToken TokenRefreshRequired InvalidClientTokenId",
        (401,),
    ),
    _Rule(StorageDeniedError, "ask for read, write, list and delete on this bucket", "AccessDenied", (403,)),
    _Rule(
        StorageError,
        "set AWS_REGION to the region of the bucket",
        "AuthorizationHeaderMalformed PermanentRedirect IllegalLocationConstraintException",
        (301, 307),
    ),
    _Rule(
        StorageThrottledError,
        "the store is overloaded or busy with the same object; try again",
        "SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException TooManyRequests RequestLimitExceeded "
        "BandwidthLimitExceeded ServiceUnavailable ConditionalRequestConflict OperationAborted",
        (409, 429, 503),
    ),
    _Rule(
        NoSpaceError,
        "free space in the store: orchestrator gc",
        "XMinioStorageFull QuotaExceeded XMinioAdminBucketQuotaExceeded InsufficientCapacity",
        (507,),
    ),
    _Rule(UnsupportedStoreError, "use a store that implements it", "NotImplemented", (501,)),
    _Rule(
        StorageError,
        "the server lost a part or told its etag wrongly; write the object again",
        "InvalidPart InvalidPartOrder EntityTooSmall",
    ),
    _Rule(
        StorageTimeoutError,
        "the bytes arrived damaged; try again",
        "BadDigest InvalidDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch",
    ),
    _Rule(StorageTimeoutError, "check the server", "InternalError RequestTimeout", (408, 500, 502, 504)),
)
_BY_CODE = {code: rule for rule in _RULES for code in rule.codes.split()}
_BY_STATUS = {status: rule for rule in _RULES for status in rule.statuses}
_OTHER_REJECTION = _Rule(StorageError, "see the server's documentation of this code")
_OTHER_FAILURE = _Rule(StorageTimeoutError, "check the server")
_NO_S3 = (
    "this is not the answer of an S3 server; check the endpoint (AWS_ENDPOINT_URL_S3: scheme, host, port), proxies, "
    "and whether this network asks for a login"
)
_ABSENT = _Rule(NotFoundError, "there is no such object")
"""A 404 to HEAD, whose answer has no body to say more."""
_ABSENT_WITHOUT_REASON = _Rule(StorageError, _NO_S3)
"""A 404 to anything else, without the document in which S3 says what is missing: an object, an upload, the bucket."""
_NO_CONDITIONS = _Rule(
    UnsupportedStoreError,
    "this server does not support conditional writes (If-None-Match, If-Match), without which two controllers could "
    "both believe they own a sweep; use a server that does",
)
_NOT_FOUND, _BAD_REQUEST, _NOT_IMPLEMENTED = 404, 400, 501

_BY_EXCEPTION: tuple[tuple[tuple[type[Exception], ...], type[StorageError], str], ...] = (
    (
        (
            botocore.NoCredentialsError,
            botocore.PartialCredentialsError,
            botocore.CredentialRetrievalError,
            botocore.TokenRetrievalError,
            botocore.NoAuthTokenError,
            botocore.SSOError,
            botocore.LoginError,
        ),
        StorageDeniedError,
        "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or use a machine with a role",
    ),
    (
        (botocore.FlexibleChecksumError, botocore.ChecksumError),
        CorruptObjectError,
        "the bytes differ from their checksum",
    ),
    (
        (botocore.ConnectionError, botocore.HTTPClientError, botocore.IncompleteReadError),
        StorageTimeoutError,
        "check that the server runs and the endpoint is right (AWS_ENDPOINT_URL_S3)",
    ),
)


@contextmanager
def translated_errors(what: str, *, is_conditional_write: bool = False) -> Iterator[None]:
    """Turn botocore's errors inside the block into ours; ``what`` names the operation, the bucket and the key."""
    try:
        yield
    except StrangeAnswerError as error:
        raise count_error(StorageError(f"{what} failed: the answer {error}: {_NO_S3}")) from None
    except (botocore.ClientError, botocore.BotoCoreError) as error:
        # Not `from error`: botocore's own errors carry parts of requests and responses that may quote credentials.
        raise count_error(translate(error, what, is_conditional_write=is_conditional_write)) from None


def translate(
    error: botocore.ClientError | botocore.BotoCoreError, what: str, *, is_conditional_write: bool = False
) -> StorageError:
    """Our error for one of botocore's."""
    if isinstance(error, botocore.ClientError):
        return _from_response(error, what, is_conditional_write=is_conditional_write)
    if isinstance(error, botocore.ProfileNotFound):
        profile = error.kwargs.get("profile", "")
        remedy = "correct AWS_PROFILE (setting aws_profile), or add the profile to ~/.aws/config"
        return StorageDeniedError(f"{what} failed: the AWS profile {profile!r} does not exist; {remedy}")
    for classes, own_class, remedy in _BY_EXCEPTION:
        if isinstance(error, classes):
            return own_class(f"{what} failed: {type(error).__name__}; {remedy}")
    return StorageError(f"{what} failed: {error}")


def _from_response(error: botocore.ClientError, what: str, *, is_conditional_write: bool) -> StorageError:
    code = error.response.get("Error", {}).get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    rule = _BY_CODE.get(code) or _rule_of_status(status, is_head=error.operation_name.startswith("Head"))
    if is_conditional_write and (status == _NOT_IMPLEMENTED or (status == _BAD_REQUEST and rule is _OTHER_REJECTION)):
        rule = _NO_CONDITIONS
    return rule.error(f"{what} failed: {code} (HTTP {status}); {rule.remedy}")


def _rule_of_status(status: int, *, is_head: bool) -> _Rule:
    if status == _NOT_FOUND:
        return _ABSENT if is_head else _ABSENT_WITHOUT_REASON
    return _BY_STATUS.get(status, _OTHER_FAILURE if status >= 500 else _OTHER_REJECTION)
