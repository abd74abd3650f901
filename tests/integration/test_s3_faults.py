"""Between the client and a real S3 server things go wrong; never is a wrong result taken for a right one."""

from __future__ import annotations

import itertools
import secrets
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import (
    CorruptObjectError,
    NoSpaceError,
    PreconditionFailedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    UnsupportedStoreError,
)
from orchestrator.storage.probe import probe_store
from orchestrator.storage.s3.store import S3Store
from tests.s3_proxy import Damage, Faults
from tests.s3_server import SMALL_PARTS_BYTES, faults, proxy, s3_server, s3_store, store

__all__ = ["faults", "proxy", "s3_server", "store"]

HARMLESS = [Damage.THROTTLED, Damage.RESET]
LOST = [Damage.ANSWER_LOST, Damage.ANSWER_LOST_AS_500, Damage.ANSWER_LOST_AS_409]
SHORT_S = 0.5
"""A deadline that passes within a test."""
PART = "artifacts/pretrain/pretrain-a-0123456789abcdef/parts/1-a/big"
METRICS = "metrics/pretrain-a-0123456789abcdef/000001/a"
"""Of an attempt: unfinished uploads to other names are another program's."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tries; what a try does does not depend on them."""
    monkeypatch.setattr("orchestrator.storage.s3.client._FIRST_PAUSE_S", 0.01)


@pytest.fixture
def impatient(faults, proxy, tmp_path) -> S3Store:
    return s3_store(tmp_path, endpoint_url=proxy[0], deadline_s=SHORT_S, read_timeout_s=SHORT_S)


@pytest.mark.parametrize("damage", [*HARMLESS, *LOST, Damage.REQUEST_FLIPPED])
def test_put_if_absent_that_is_damaged_twice_ends_written(damage: Damage, store: S3Store, faults: Faults) -> None:
    faults.damage_next("PUT", damage, damage)
    stat = store.put_if_absent("a", b"mine")
    assert store.get_with_stat("a") == (b"mine", stat)


@pytest.mark.parametrize("damage", [*HARMLESS, *LOST, Damage.REQUEST_FLIPPED])
def test_put_if_absent_on_a_taken_name_fails_whatever_is_damaged(
    damage: Damage, store: S3Store, faults: Faults
) -> None:
    store.put("a", b"theirs")
    faults.damage_next("PUT", damage)
    with pytest.raises(PreconditionFailedError):
        store.put_if_absent("a", b"mine")
    assert store.get("a") == b"theirs"


@pytest.mark.parametrize("damage", [*HARMLESS, *LOST, Damage.REQUEST_FLIPPED])
def test_put_if_match_that_is_damaged_twice_ends_written(damage: Damage, store: S3Store, faults: Faults) -> None:
    first = store.put("a", b"before")
    faults.damage_next("PUT", damage, damage)
    stat = store.put_if_match("a", b"mine", first.etag)
    assert store.get_with_stat("a") == (b"mine", stat)


@pytest.mark.parametrize("damage", [*HARMLESS, *LOST])
def test_put_if_match_with_a_former_etag_fails_whatever_is_damaged(
    damage: Damage, store: S3Store, faults: Faults
) -> None:
    first = store.put("a", b"before")
    store.put("a", b"theirs")
    faults.damage_next("PUT", damage)
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("a", b"mine", first.etag)
    assert store.get("a") == b"theirs"


@pytest.mark.parametrize("damage", [*HARMLESS, Damage.ANSWER_TRUNCATED])
@pytest.mark.parametrize("size_bytes", [1000, SMALL_PARTS_BYTES + 1000])
def test_reading_that_is_damaged_returns_the_content(
    damage: Damage, size_bytes: int, store: S3Store, faults: Faults, tmp_path: Path
) -> None:
    content = secrets.token_bytes(size_bytes)
    store.put("a", content)
    faults.damage_next("GET", damage, damage)
    assert store.get("a") == content
    faults.damage_next("GET", damage, damage)
    store.download("a", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


def test_download_of_an_object_that_is_replaced_meanwhile_is_one_of_both(
    store: S3Store, faults: Faults, tmp_path: Path
) -> None:
    size_bytes = 6 * SMALL_PARTS_BYTES
    store.put("big", b"1" * size_bytes)
    seen = itertools.count()

    def replace_after_the_first_part(method: str, _path: str) -> None:
        if method == "GET" and next(seen) == 1:
            s3_store(tmp_path).put("big", b"2" * size_bytes)

    faults.schedule = replace_after_the_first_part
    store.download("big", tmp_path / "target")
    assert set((tmp_path / "target").read_bytes()) == set(b"2")


def test_get_of_flipped_bits_is_read_again_and_refused_then(store: S3Store, faults: Faults) -> None:
    store.put("a", b"content")
    faults.damage_next("GET", Damage.ANSWER_FLIPPED)
    assert store.get("a") == b"content"
    faults.damage_next("GET", Damage.ANSWER_FLIPPED, Damage.ANSWER_FLIPPED)
    with pytest.raises(CorruptObjectError, match="a"):
        store.get("a")


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("damage", [*HARMLESS, Damage.ANSWER_LOST, Damage.ANSWER_LOST_AS_500])
def test_multipart_upload_that_is_damaged_ends_written(
    damage: Damage, method: str, store: S3Store, faults: Faults
) -> None:
    content = secrets.token_bytes(2 * SMALL_PARTS_BYTES + 7)
    faults.damage_next(method, damage, damage, damage)
    stat = store.put("big", content)
    assert store.get_with_stat("big") == (content, stat)


def test_multipart_upload_whose_completion_is_lost_ends_with_the_new_content(store: S3Store, faults: Faults) -> None:
    size_bytes = SMALL_PARTS_BYTES + 7
    store.put("big", bytes(size_bytes))
    lose = iter([Damage.ANSWER_LOST] * 2)
    faults.schedule = lambda method, path: next(lose, None) if method == "POST" and "uploadId=" in path else None
    content = secrets.token_bytes(size_bytes)
    store.put("big", content)
    assert store.get("big") == content


def test_multipart_upload_that_fails_is_discarded(impatient: S3Store, faults: Faults) -> None:
    faults.damage_all("PUT", Damage.FULL)
    with pytest.raises(NoSpaceError, match="big"):
        impatient.put(PART, bytes(2 * SMALL_PARTS_BYTES))
    faults.damage_all("", Damage.FULL)
    assert list(impatient.leftovers()) == []
    assert not impatient.exists(PART)


def test_multipart_upload_of_a_dead_writer_is_found_and_discarded(
    impatient: S3Store, faults: Faults, tmp_path: Path
) -> None:
    # Its writer cannot discard it any more, as if it had been killed.
    faults.schedule = lambda method, path: (
        Damage.FULL if method == "DELETE" or (method == "PUT" and "partNumber=2" in path) else None
    )
    with pytest.raises(NoSpaceError):
        impatient.put(PART, bytes(2 * SMALL_PARTS_BYTES))
    faults.damage_all("", Damage.FULL)
    (leftover,) = impatient.leftovers()
    assert leftover.name.endswith(f"/{PART}")
    assert list(impatient.list_objects("")) == []
    impatient.delete_leftover(leftover.name)
    impatient.delete_leftover(leftover.name)
    assert list(impatient.leftovers()) == []


def test_unfinished_uploads_to_all_names_of_large_objects_of_ours_are_found_and_no_others(
    s3_server, tmp_path: Path
) -> None:
    ours = [
        PART,
        METRICS,
        "logs/study/pretrain/a/000001-01234567/rank0.log",
        "probes/0123456789abcdef",
        "sweeps/study/report/report.html",
        "sweeps/study/progress.json",
        "trash/001800000000-0a1b2c3d/000001.json",
        f"mlflow/our%20study/{'a' * 32}/artifacts/backbone/backbone.safetensors",
    ]
    others = ["mlflow/backup.tar", "sweeps/study/images.tar", "sweeps/study/report/old/a.html", "trash/000001.json"]
    store = s3_store(tmp_path)
    for name in (*ours, *others):
        store._bucket.repeat("create_multipart_upload", f"{store._root}{name}")
    found = [stat.name.partition(" ")[2] for stat in store.leftovers()]
    assert sorted(found) == sorted(f"{store._root}{name}" for name in ours)


def test_upload_that_ends_while_unfinished_ones_are_listed_is_left_out(
    store: S3Store, faults: Faults, tmp_path: Path
) -> None:
    other = s3_store(tmp_path)
    for name in (PART, METRICS, "other-team/in22k.tar", "artifacts/pretrain/weights.tar", "logs/all.tar"):
        other._bucket.repeat("create_multipart_upload", other._key(name))
    ended, stays = other.leftovers()
    seen = itertools.count()

    def end_before_its_parts_are_listed(method: str, path: str) -> None:
        if method == "GET" and "uploadId=" in path and next(seen) == 0:
            other.delete_leftover(ended.name)

    faults.schedule = end_before_its_parts_are_listed
    assert list(store.leftovers()) == [stays]
    faults.seen.clear()
    assert list(store.leftovers(until_s=stays.modified_at_s - 1)) == []
    assert len(faults.seen) == 1, "the parts of younger ones are not asked for"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (Damage.THROTTLED, StorageThrottledError),
        (Damage.SILENCE, StorageTimeoutError),
        (Damage.RESET, StorageTimeoutError),
        (Damage.FULL, NoSpaceError),
    ],
)
def test_writing_that_never_succeeds_ends_at_the_deadline(
    damage: Damage, error: type[StorageError], impatient: S3Store, faults: Faults
) -> None:
    faults.damage_all("PUT", damage)
    with pytest.raises(error, match=r"orchestrator/tests/.*/a"):
        impatient.put("a", b"mine")
    faults.damage_all("PUT", damage)
    with pytest.raises(error, match=r"orchestrator/tests/.*/a"):
        impatient.put_if_absent("a", b"mine")
    assert not impatient.exists("a")


def test_refused_write_is_not_repeated(store: S3Store, faults: Faults) -> None:
    faults.damage_all("PUT", Damage.FULL)
    with pytest.raises(NoSpaceError):
        store.put("a", b"mine")
    assert len(faults.seen) == 1


def test_write_whose_etag_is_no_md5_is_not_read_back(
    store: S3Store, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in buckets with KMS keys: whether it is the etag of the object, a request without a body tells."""
    monkeypatch.setattr("orchestrator.storage.s3.store.md5", sha256)
    stat = store.put_if_absent("a", b"mine")
    assert [method for method, _ in faults.seen] == ["PUT", "HEAD"]
    assert store.put_if_match("a", b"again", stat.etag).etag == store.stat("a").etag


DAMAGES = st.lists(st.sampled_from([None, *HARMLESS, *LOST]), max_size=3)
OPERATIONS = st.tuples(st.sampled_from(["put_if_absent", "put_if_match", "put", "delete"]), DAMAGES)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, min_size=1, max_size=5))
def test_any_writes_under_any_damage_say_truly_what_is_there(operations, store: S3Store, faults: Faults) -> None:
    name, expected, etag = f"objects/{secrets.token_hex(8)}", None, "none"
    for operation, damages in operations:
        faults.damage_next("DELETE" if operation == "delete" else "PUT", *damages)
        content = secrets.token_bytes(8)
        try:
            if operation == "delete":
                store.delete(name)
                expected = None
            else:
                given_etag = (etag,) if operation == "put_if_match" else ()
                etag = getattr(store, operation)(name, content, *given_etag).etag
                expected = content
        except PreconditionFailedError:
            must_lose = expected is not None if operation == "put_if_absent" else expected is None
            assert must_lose
        assert (store.get(name) if store.exists(name) else None) == expected


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Damage.CONDITIONS_IGNORED, "ignores If-None-Match"),
        (Damage.CONDITIONS_RACY, r"let [234] of 4 writers through .* If-None-Match"),
        (Damage.REPLACING_RACY, r"let [234] of 4 writers through .* If-Match"),
        (Damage.CONDITIONS_REFUSED, "HTTP 400.*does not support conditional writes"),
        (Damage.CONDITIONS_NOT_IMPLEMENTED, "HTTP 501.*does not support conditional writes"),
        (Damage.WRONG_ETAG_ON_PUT, "answered to the write of .* with the etag 0000"),
    ],
)
def test_probe_of_a_server_that_breaks_its_conditions_says_how(
    damage: Damage, reason: str, store: S3Store, faults: Faults
) -> None:
    faults.damage_all("PUT", damage)
    with pytest.raises(UnsupportedStoreError, match=reason):
        probe_store(store)
    faults.damage_all("", damage)
    assert list(store.list_objects("")) == []
