"""What servers and botocore say becomes our own error, with a remedy and without secrets; what clients share."""

import os
import pickle
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from botocore import exceptions as botocore
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from orchestrator.core.errors import (
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
from orchestrator.storage.protocol import ObjectStat
from orchestrator.storage.s3 import client
from orchestrator.storage.s3.client import Bucket, new_session
from orchestrator.storage.s3.responses import (
    DamagedAnswerError,
    NoBucketError,
    OutOfRangeError,
    translate,
    translated_errors,
)
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.transfers import _Transfer
from orchestrator.testing import FakeClock

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
        (botocore.CredentialRetrievalError(provider="iam-role", error_msg="late"), CredentialsUnavailableError),
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time of requests, which their pauses move."""
    found = FakeClock()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=found, sleep=found.advance))
    return found


def test_look_up_without_credentials_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata service of the machine may have been busy for a second: botocore tells no difference."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    settings = S3Settings(endpoint_url="http://127.0.0.1:9", deadline_s=59.0)  # a client of its own
    with pytest.raises(StorageDeniedError, match=r"s3://bucket/key failed: NoCredentialsError; .*AWS_ACCESS_KEY_ID"):
        Bucket("bucket", settings).repeat("head_object", "key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    found = client._client(os.getpid(), settings, client._renewal.number)
    assert found._request_signer._credentials.access_key == "a"
    assert client._client(os.getpid(), settings, client._renewal.number) is found


class KeyServer(ThreadingHTTPServer):
    """Answers every GET with an object, to whoever signs with the one key that it accepts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _KeyHandler)
        self.accepted = ""
        self.seen: list[str] = []
        """Keys of all requests."""


class _KeyHandler(BaseHTTPRequestHandler):
    server: KeyServer

    def do_GET(self) -> None:
        key = re.findall(r"Credential=(\w+)/", self.headers["Authorization"])[0]
        self.server.seen.append(key)
        is_accepted = key == self.server.accepted
        body = b"content" if is_accepted else b"<Error><Code>InvalidAccessKeyId</Code></Error>"
        self.send_response(200 if is_accepted else 403)
        fields = {"ETag": '"e"', "Last-Modified": "Mon, 02 Jan 2023 00:00:00 GMT", "Content-Length": str(len(body))}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[KeyServer]:
    with KeyServer() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_credentials_that_were_renewed_in_their_file_are_read_again_once_a_minute(
    server: KeyServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes live for weeks, keys for hours: botocore reads the file when a client is made."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": os.devnull, "AWS_DEFAULT_REGION": "us-east-1"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "_renewal", client._Renewal())
    bucket = Bucket("bucket", S3Settings(endpoint_url=f"http://127.0.0.1:{server.server_port}"))

    def renew(key: str) -> None:
        server.accepted = key
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    def get() -> object:
        return bucket.read_once("get_object", "key", lambda response: response["Body"].read())

    renew("OLDKEY")
    assert get() == b"content"
    renew("NEWKEY")
    assert [get(), get()] == [b"content"] * 2
    assert server.seen == ["OLDKEY", "OLDKEY", "NEWKEY", "NEWKEY"]
    server.accepted = "ANOTHER"
    for later_s, num_requests in ((0.0, 1), (61.0, 2), (0.0, 1)):
        server.seen.clear()
        clock.advance(later_s)
        with pytest.raises(StorageDeniedError, match="InvalidAccessKeyId"):
            get()
        assert server.seen == ["NEWKEY"] * num_requests


@pytest.mark.parametrize("num_failures", [3, 1000])
def test_look_up_of_credentials_that_fails_is_repeated_until_the_deadline(
    num_failures: int, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Botocore renews them while the old ones are still valid: one second without an answer ends no checkpoint."""
    left = iter(range(num_failures))

    def put_object(**_: object) -> dict[str, Any]:
        if next(left, None) is not None:
            raise botocore.CredentialRetrievalError(provider="iam-role", error_msg="no answer")
        return {"ETag": '"e"', "ResponseMetadata": {"HTTPStatusCode": 200}}

    monkeypatch.setattr(client, "_client", lambda *_: SimpleNamespace(put_object=put_object))
    bucket, began_s = Bucket("bucket", S3Settings()), clock()
    if num_failures < 1000:
        assert bucket.repeat("put_object", "key", Body=b"")["ETag"] == '"e"'
        return
    with pytest.raises(StorageDeniedError, match=r"put_object s3://bucket/key .* \(given up after 60 s\)"):
        bucket.repeat("put_object", "key", Body=b"")
    assert 50 < clock() - began_s <= 60


CONTENT = secrets.token_bytes(1000)


class HaltingBucket(Bucket):
    """Each answer takes longer than the deadline, and ends after so many bytes."""

    def __init__(self, clock: FakeClock, num_bytes: int) -> None:
        super().__init__("bucket", S3Settings())
        self.clock, self.num_bytes, self.num_requests = clock, num_bytes, 0

    def read_once(self, operation: str, key: str, read: Callable[[Any], Any], **given: object) -> Any:
        """See ``Bucket.read_once``."""
        self.num_requests += 1
        self.clock.advance(self.settings.deadline_s + 1)
        start, end = map(int, re.findall(r"\d+", str(given.get("Range", f"0-{len(CONTENT) - 1}"))))
        body = BytesIO(CONTENT[start : start + self.num_bytes])
        return read({"Body": body, "ContentLength": end + 1 - start})


def test_range_that_gets_on_is_requested_again_after_any_time(clock: FakeClock, tmp_path: Path) -> None:
    bucket = HaltingBucket(clock, 300)
    with (tmp_path / "file").open("w+b") as file:
        stat = ObjectStat(name="key", size_bytes=2 * len(CONTENT), etag="e")
        _Transfer(bucket, "key", stat, file.fileno()).fetch((0, len(CONTENT)))
        assert file.read() == CONTENT
    assert bucket.num_requests == 4


def test_whole_object_that_never_gets_further_is_given_up(clock: FakeClock, tmp_path: Path) -> None:
    """It has one checksum, so that each try begins anew."""
    bucket = HaltingBucket(clock, 300)
    with (tmp_path / "file").open("w+b") as file:
        transfer = _Transfer(bucket, "key", ObjectStat(name="key", size_bytes=len(CONTENT), etag="e"), file.fileno())
        with pytest.raises(StorageTimeoutError, match=r"700 bytes before the end .*\(given up after 60 s\)"):
            transfer.fetch((0, len(CONTENT)))
    assert bucket.num_requests == 2
