"""Which URIs name a store, and which are refused before anything is asked."""

from pathlib import Path

import pytest

from orchestrator.core.errors import StorageDeniedError, StorageError, UnsupportedStoreError
from orchestrator.storage import open_store
from orchestrator.storage.local import LocalStore
from orchestrator.storage.probe import probe_store
from orchestrator.storage.s3.settings import Addressing, Checksums, S3Settings
from orchestrator.storage.s3.store import S3Store


@pytest.mark.parametrize(
    ("uri", "same"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://my.bucket-1/a", "s3://my.bucket-1/a"),
    ],
)
def test_open_store_of_an_s3_uri_keeps_bucket_and_prefix(uri: str, same: str) -> None:
    store = open_store(uri)
    assert isinstance(store, S3Store)
    assert store.uri == same


@pytest.mark.parametrize(
    "uri",
    [
        "s3:///a",
        "s3://b",
        "s3://Bucket/a",
        "s3://bucket:9000/a",
        "s3://bucket/../other",
        "s3://bucket/a/%2e%2e/b",
        "s3://bucket/a//b",
        "s3://bucket/a b",
        "s3://bucket/a?versionId=1",
        "s3://bucket/a#b",
        "file:///a/../b",
        "file:///a/%2E%2E/b",
        "file:///a?b",
        "http://bucket/a",
        "S4://bucket/a",
        "bucket/a",
    ],
)
def test_open_store_of_an_ambiguous_uri_is_refused(uri: str) -> None:
    with pytest.raises(StorageError):
        open_store(uri)


@pytest.mark.parametrize("uri", ["s3://user:hidden@bucket/a", "http://user:hidden@host", "file://user:hidden@/a"])
def test_open_store_of_a_uri_with_a_password_is_refused_without_showing_it(uri: str) -> None:
    with pytest.raises(StorageError, match="password") as caught:
        open_store(uri)
    assert "hidden" not in str(caught.value)


def test_open_store_of_a_bucket_that_is_not_allowed_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_S3_ALLOWED_BUCKETS", "mine, ours")
    assert open_store("s3://ours/a").uri == "s3://ours/a"
    with pytest.raises(StorageDeniedError, match="ORCHESTRATOR_S3_ALLOWED_BUCKETS"):
        open_store("s3://theirs/a")


@pytest.mark.parametrize("url", ["http://user:hidden@host", "ftp://hidden.host", "hidden.host:9000"])
def test_open_store_with_a_wrong_endpoint_is_refused_without_showing_it(url: str, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    with pytest.raises(StorageError, match="AWS_ENDPOINT_URL_S3") as caught:
        open_store("s3://bucket/a")
    assert "hidden" not in str(caught.value)


def test_settings_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example.org:9000")
    monkeypatch.setenv("ORCHESTRATOR_S3_ADDRESSING", "virtual")
    monkeypatch.setenv("ORCHESTRATOR_S3_CHECKSUMS", "when_required")
    monkeypatch.setenv("ORCHESTRATOR_S3_DEADLINE_S", "5")
    settings = S3Settings()
    assert settings.endpoint_url == "https://s3.example.org:9000"
    assert settings.addressing is Addressing.VIRTUAL
    assert settings.checksums is Checksums.WHEN_REQUIRED
    assert settings.deadline_s == 5


def test_settings_refuse_parts_that_no_file_gives_at_once(monkeypatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_S3_PART_BYTES", str(2 * 1024**3 - 4096))
    assert S3Settings().part_bytes == 2 * 1024**3 - 4096
    monkeypatch.setenv("ORCHESTRATOR_S3_PART_BYTES", str(2 * 1024**3))
    with pytest.raises(ValueError, match="less than or equal to 2147479552"):
        S3Settings()


def test_store_of_an_odd_prefix_is_refused() -> None:
    with pytest.raises(StorageError, match="refused"):
        S3Store("bucket", "../a")


class IgnoresAbsence(LocalStore):
    def put_if_absent(self, name, content):
        return self.put(name, content)


class IgnoresMatch(LocalStore):
    def put_if_match(self, name, content, etag):
        return self.put(name, content)


@pytest.mark.parametrize(("kind", "header"), [(IgnoresAbsence, "If-None-Match"), (IgnoresMatch, "If-Match")])
def test_probe_of_a_store_that_ignores_a_condition_names_it(
    kind: type[LocalStore], header: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedStoreError, match=header):
        probe_store(kind(tmp_path))
    assert not any(tmp_path.glob("probes/*"))
