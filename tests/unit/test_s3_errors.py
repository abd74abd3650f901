"""What servers and botocore say becomes our own error, with a remedy and without secrets; what clients share."""

import pickle
from typing import Any

import pytest
import urllib3
from botocore import exceptions as botocore
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from orchestrator.core.errors import (
    NoSpaceError,
    NotFoundError,
    PreconditionFailedError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    UnsupportedStoreError,
)
from orchestrator.storage.s3.client import new_session
from orchestrator.storage.s3.responses import (
    DamagedAnswerError,
    NoBucketError,
    OutOfRangeError,
    translate,
    translated_errors,
)

WHAT = "put_object s3://bucket/key"
SECRET = "AKIDSECRET"  # noqa: S105 - of nobody


def rejection(code: str, status: int) -> ClientError:
    error = {"Code": code, "Message": f"key {SECRET} is wrong"}
    response: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("NoSuchKey", 404, NotFoundError),
        ("404", 404, StorageError),  # without a document that says what is missing: somebody else's
        ("NoSuchBucket", 404, NoBucketError),
        ("InvalidRange", 416, OutOfRangeError),
        ("PreconditionFailed", 412, PreconditionFailedError),
        ("412", 412, PreconditionFailedError),
        ("AccessDenied", 403, StorageDeniedError),
        ("403", 403, StorageDeniedError),
        ("InvalidAccessKeyId", 403, StorageDeniedError),
        ("ExpiredToken", 400, StorageDeniedError),
        ("RequestTimeTooSkewed", 403, StorageDeniedError),
        ("SlowDown", 503, StorageThrottledError),
        ("ConditionalRequestConflict", 409, StorageThrottledError),
        ("TooManyRequests", 429, StorageThrottledError),
        ("InternalError", 500, StorageTimeoutError),
        ("Odd", 599, StorageTimeoutError),
        ("XAmzContentSHA256Mismatch", 400, StorageTimeoutError),
        ("XMinioStorageFull", 507, NoSpaceError),
        ("NotImplemented", 501, UnsupportedStoreError),
        ("Odd", 400, StorageError),
    ],
)
def test_response_of_a_server_becomes_our_error(code: str, status: int, expected: type[StorageError]) -> None:
    error = translate(rejection(code, status), WHAT)
    assert type(error) is expected
    assert WHAT in str(error)
    assert f"HTTP {status}" in str(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (botocore.NoCredentialsError(), StorageDeniedError),
        (botocore.ProfileNotFound(profile="p"), StorageDeniedError),
        (botocore.EndpointConnectionError(endpoint_url="http://h"), StorageTimeoutError),
        (botocore.ReadTimeoutError(endpoint_url="http://h"), StorageTimeoutError),
        (botocore.ConnectionClosedError(endpoint_url="http://h"), StorageTimeoutError),
        (botocore.IncompleteReadError(actual_bytes=1, expected_bytes=2), StorageTimeoutError),
        (botocore.FlexibleChecksumError(error_msg="differs"), DamagedAnswerError),
        (urllib3.exceptions.SSLError("bad record mac"), StorageTimeoutError),  # of a body
        (ResponseParserError("invalid XML"), StorageTimeoutError),
        (botocore.ParamValidationError(report="odd"), StorageError),
    ],
)
def test_error_of_botocore_becomes_our_error(error: Exception, expected: type[StorageError]) -> None:
    with pytest.raises(expected, match=WHAT) as caught, translated_errors(WHAT):
        raise error
    assert type(caught.value) is expected


def test_clock_that_is_off_is_named() -> None:
    assert "clock" in str(translate(rejection("RequestTimeTooSkewed", 403), WHAT))


def test_translated_error_quotes_nothing_of_the_server_and_survives_pickling() -> None:
    with pytest.raises(StorageDeniedError) as caught, translated_errors(WHAT):
        raise rejection("InvalidAccessKeyId", 403)
    error = caught.value
    assert SECRET not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own


def test_sessions_share_what_botocore_has_read_and_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []
    for name in ("first", "second", "third"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", name)
        sessions.append(new_session())
        credentials = sessions[-1].get_credentials()
        assert credentials is not None
        assert credentials.access_key == name
    loaders = [session._session.get_component("data_loader") for session in sessions]
    assert loaders[0] is loaders[2]
    assert len(set(loaders[0].search_paths)) == len(loaders[0].search_paths)
