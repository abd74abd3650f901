"""Checks that answers come from S3 and match the request, and maps them to our errors.

Other servers may answer in place of S3: the login page of a network, a web server at the wrong port, a redirect to
https. Botocore parses such an answer as far as it can, often as an empty one, and garbage collection would accept an
empty listing. So an answer is accepted only if it has the status and the fields of S3, and a listing must name the
bucket and the folder of the request.

One table maps errors of servers and botocore to our own errors. Codes of servers differ, HTTP statuses mostly agree, so
the code decides if it is known, else the status.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import urllib3
from botocore import exceptions as botocore
from botocore.parsers import ResponseParserError

from orchestrator.core.errors import (
    CorruptObjectError,
    CredentialsUnavailableError,
    NoSpaceError,
    NotFoundError,
    PreconditionFailedError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    UnsupportedStoreError,
)
from orchestrator.storage.os_errors import FREE_SPACE, count_error

Response = dict[str, Any]

_OK: Final = (HTTPStatus.OK,)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_REGION_HEADER: Final = "x-amz-bucket-region"
_MAX_QUOTED: Final = 80
_OBJECT: Final = ("ETag", "LastModified", "ContentLength")
_OBJECT_IN_BODY: Final = "GetObject"
_ERROR: Final = "Error"
"""Operations for which S3 may send 200 before it fails; botocore handles this."""
_ROOT_ELEMENT: Final = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?<([A-Za-z][\w:.-]{0,60})[\s/>]")
_ENTRIES: Final = {
    "Contents": ("Key", "Size", "ETag", "LastModified"),
    "CommonPrefixes": ("Prefix",),
    "Uploads": ("Key", "UploadId", "Initiated"),
}
_NEXT_PAGE: Final = {
    "list_objects_v2": ("NextContinuationToken",),
    "list_multipart_uploads": ("NextKeyMarker", "NextUploadIdMarker"),
}
TRANSIENT = (StorageThrottledError, StorageTimeoutError)
"""Errors that a retry may solve. After a write they mean that its outcome is unknown."""
_NO_S3 = (
    "this is not the answer of an S3 server; check the endpoint (AWS_ENDPOINT_URL_S3: scheme, host, port), proxies, "
    "and whether this network asks for a login"
)
_NOT_FOUND, _BAD_REQUEST, _NOT_IMPLEMENTED = 404, 400, 501


class DamagedAnswerError(CorruptObjectError):
    """The bytes of an answer differ from their checksum: the object is damaged, or only the answer was on its way."""


_BY_EXCEPTION: tuple[tuple[tuple[type[Exception], ...], type[StorageError], str], ...] = (
    (
        (
            botocore.NoCredentialsError,
            botocore.PartialCredentialsError,
            botocore.TokenRetrievalError,
            botocore.NoAuthTokenError,
            botocore.SSOError,
            botocore.LoginError,
        ),
        StorageDeniedError,
        "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or use a machine with a role",
    ),
    (
        # Botocore renews credentials minutes before they expire, and raises this although the old ones are still valid.
        (botocore.CredentialRetrievalError, botocore.MetadataRetrievalError),
        CredentialsUnavailableError,
        "the credentials provider failed; check this machine's metadata service and role, or credential_process",
    ),
    (
        (botocore.FlexibleChecksumError, botocore.ChecksumError),
        DamagedAnswerError,
        "the bytes differ from their checksum",
    ),
    (
        (
            botocore.ConnectionError,
            botocore.HTTPClientError,
            botocore.IncompleteReadError,
            ResponseParserError,
            urllib3.exceptions.HTTPError,  # of a body: botocore translates only some
        ),
        StorageTimeoutError,
        "check that the server runs and the endpoint is right (AWS_ENDPOINT_URL_S3)",
    ),
)


class StrangeAnswerError(Exception):
    """An answer that no S3 server gives to this request; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The form of every answer to an operation."""

    statuses: Sequence[int] = _OK
    fields: Sequence[str] = ()
    root: str = ""
    """Name of the XML document; empty: the answer has no document, or (of an object) anything."""
    names_itself_by: str = ""
    """Field of a listing that has the bucket's name."""


_FORMS: Final[Mapping[str, _Form]] = {
    "put_object": _Form(fields=("ETag",)),
    "get_object": _Form(fields=_OBJECT, statuses=(HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT)),
    "head_object": _Form(fields=_OBJECT),
    "delete_object": _Form(statuses=(HTTPStatus.NO_CONTENT,)),
    "list_objects_v2": _Form(root="ListBucketResult", names_itself_by="Name"),
    "create_multipart_upload": _Form(root="InitiateMultipartUploadResult", fields=("UploadId",)),
    "upload_part": _Form(fields=("ETag",)),
    "complete_multipart_upload": _Form(root="CompleteMultipartUploadResult", fields=("ETag",)),
    "abort_multipart_upload": _Form(statuses=(HTTPStatus.NO_CONTENT,)),
    "list_multipart_uploads": _Form(root="ListMultipartUploadsResult", names_itself_by="Bucket"),
    "list_parts": _Form(root="ListPartsResult", fields=("UploadId",)),
}
_ROOTS: Final = {"".join(part.capitalize() for part in name.split("_")): form.root for name, form in _FORMS.items()}
"""By the operation's name in S3's API."""


def check_raw_answer(operation_model: Any, response_dict: Response, **_: object) -> None:  # noqa: ANN401 - botocore's
    """Check an answer before botocore reads it; a handler of its events ``before-parse``.

    Raises:
        StrangeAnswerError: it is a redirect to another address, which botocore would follow in a circle, or a document
            of another kind.
    """
    status, headers = response_dict["status_code"], response_dict["headers"]
    if status in _REDIRECTS and _REGION_HEADER not in headers:
        raise StrangeAnswerError(f"redirects to {_place(headers.get('location', ''))}")
    if status == HTTPStatus.OK and operation_model.name != _OBJECT_IN_BODY and operation_model.name in _ROOTS:
        _check_document(response_dict["body"], _ROOTS[operation_model.name])


def _check_document(body: bytes, wanted: str) -> None:
    match = _ROOT_ELEMENT.match(body)
    found = match[1].decode() if match else ""
    if found != _ERROR and (found != wanted or (not match and body.strip())):
        shown = f"<{found}>" if found else f"{len(body)} bytes of something else"
        raise StrangeAnswerError(f"is {shown}, S3's is {f'<{wanted}>' if wanted else 'empty'}")


def check_answer(operation: str, parameters: Mapping[str, Any], response: Response) -> None:
    """Compare what botocore read from an answer with the request.

    Args:
        operation: as boto3 names its method; others than this product's are not checked.
        parameters: the request's parameters.
        response: as boto3 returns it.

    Raises:
        StrangeAnswerError: it is not S3's, or not to this request.
        PreconditionFailedError: the object is not the version that was asked for; the server ignored the condition.
    """
    form = _FORMS.get(operation)
    if form is None:
        return
    status = response["ResponseMetadata"]["HTTPStatusCode"]
    if status not in form.statuses:
        raise StrangeAnswerError(
            f"has HTTP status {status}, S3's has {' or '.join(str(int(s)) for s in form.statuses)}"
        )
    _require(form.fields, response, f"HTTP {status}")
    if operation == "get_object":
        _check_object(parameters, response, status)
    if form.names_itself_by:
        _check_listing(operation, form.names_itself_by, parameters, response)


def _check_object(parameters: Mapping[str, Any], response: Response, status: int) -> None:
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", str(parameters.get("Range", "")))
    if wanted is not None:
        found = re.match(r"bytes (\d+)-(\d+)/", str(response.get("ContentRange", "")))
        is_range = status == HTTPStatus.PARTIAL_CONTENT and found is not None
        if not is_range or not _is_inside(found, wanted, response["ContentLength"]):  # type: ignore[arg-type]
            shown = f"HTTP {status}, Content-Range {response.get('ContentRange', 'missing')!r}"
            raise StrangeAnswerError(
                f"holds other bytes than {parameters['Range']!r}: {shown}; the server ignores ranges"
            )
    version = parameters.get("IfMatch")
    if version is not None and response["ETag"].strip('"') != version:
        raise PreconditionFailedError(
            f"{parameters['Key']} has etag {response['ETag']}, expected {version}: it was replaced"
        )


def _is_inside(found: re.Match[str], wanted: re.Match[str], length: int) -> bool:
    start, end = int(found[1]), int(found[2])
    return start == int(wanted[1]) and start <= end <= int(wanted[2]) and length == end - start + 1


def _check_listing(operation: str, name_field: str, parameters: Mapping[str, Any], response: Response) -> None:
    for field, wanted in ((name_field, parameters["Bucket"]), ("Prefix", parameters.get("Prefix", ""))):
        found = response.get(field, "")
        if found != wanted:
            message = f"is a listing of {field} {_quoted(found)}, and {wanted!r} was asked for"
            raise StrangeAnswerError(message if found else f"is a listing that does not say of which {field} it is")
    for kind, fields in _ENTRIES.items():
        for entry in response.get(kind, ()):
            _require(fields, entry, "a line of a listing")
            if not entry[fields[0]].startswith(parameters.get("Prefix", "")):
                message = f"lists {_quoted(entry[fields[0]])}, which is not below {parameters['Prefix']!r}"
                raise StrangeAnswerError(message)
    if response.get("IsTruncated"):
        tokens = _NEXT_PAGE[operation]
        # More uploads of one key than a page holds: the next one begins at the same key.
        if not response.get(tokens[0]) or all(response.get(one) == parameters.get(one[4:]) for one in tokens):
            raise StrangeAnswerError("says that its listing goes on, and not where")


def _require(fields: Sequence[str], response: Mapping[str, Any], what: str) -> None:
    missing = [field for field in fields if field not in response]
    if missing:
        raise StrangeAnswerError(f"({what}) has no {', '.join(missing)}, which S3's always has")


def _place(location: str) -> str:
    """Scheme, host and port of an address; the rest may hold anything."""
    parts = urlsplit(location)
    return _quoted(f"{parts.scheme}://{parts.netloc}") if parts.netloc else "no address"


def _quoted(text: object) -> str:
    return repr(str(text)[:_MAX_QUOTED])


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
        FREE_SPACE,
        "XMinioStorageFull QuotaExceeded XMinioAdminBucketQuotaExceeded InsufficientCapacity",
        (507,),
    ),
    _Rule(UnsupportedStoreError, "use a store that implements it", "NotImplemented", (501,)),
    _Rule(
        StorageError,
        "the server lost a part or reported a wrong etag for it; write the object again",
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
_ABSENT = _Rule(NotFoundError, "there is no such object")
"""A 404 to HEAD, whose answer has no body to say more."""
_ABSENT_WITHOUT_REASON = _Rule(StorageError, _NO_S3)
"""A 404 to anything else, without the document in which S3 says what is missing: an object, an upload, the bucket."""
_NO_CONDITIONS = _Rule(
    UnsupportedStoreError,
    "this server does not support conditional writes (If-None-Match, If-Match), without which two controllers could "
    "both believe they own a sweep; use a server that does",
)


@contextmanager
def translated_errors(what: str, *, is_conditional_write: bool = False) -> Iterator[None]:
    """Turn botocore's errors inside the block into ours; ``what`` names the operation, the bucket and the key."""
    try:
        yield
    except StrangeAnswerError as error:
        raise count_error(StorageError(f"{what} failed: the answer {error}: {_NO_S3}")) from None
    except (botocore.ClientError, botocore.BotoCoreError, ResponseParserError, urllib3.exceptions.HTTPError) as error:
        # Not `from error`: botocore's own errors carry parts of requests and responses that may quote credentials.
        raise count_error(translate(error, what, is_conditional_write=is_conditional_write)) from None


def translate(error: Exception, what: str, *, is_conditional_write: bool = False) -> StorageError:
    """Our error for one of botocore's or urllib3's."""
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
