"""The commit protocol."""

import json
from pathlib import Path

import pytest

from orchestrator.contract import JobKind, JobRequest, Outcome
from orchestrator.errors import CorruptObjectError, IdentityMismatchError, NotFoundError
from orchestrator.storage.artifacts import (
    ArtifactWriter,
    Record,
    download_part,
    is_committed,
    part_object,
    read_part,
    read_record,
)
from orchestrator.storage.layout import artifact_folder, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.testing import Fault, FaultyStore, Moment, SimulatedCrash

KEY = "labels-x-0123456789abcdef"


def request(number: int = 1, **identity: object) -> JobRequest:
    return JobRequest(
        attempt_id=f"{KEY}.{number}",
        attempt_number=number,
        sweep="s",
        job="labels/x",
        key=KEY,
        kind=JobKind.LABELS,
        identity={"kind": "labels", "code_version": 1, "parameters": identity, "inputs": {}},
        store_uri="file:///nowhere",
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def commit(store: LocalStore, number: int = 1, content: bytes = b"content", **identity: object) -> Outcome:
    writer = ArtifactWriter(store, request(number, **identity))
    writer.add("labels.json", content)
    return writer.commit(now=5.0, metrics={"num_classes": 8.0}, summary={"note": "n"}, package_digest="d")


def test_commit_publishes_a_record_that_names_its_parts(store: LocalStore) -> None:
    assert not is_committed(store, KEY)
    assert commit(store) is Outcome.COMMITTED
    record = read_record(store, KEY, identity=request().identity)
    assert read_part(store, record, "labels.json") == b"content"
    assert (record.attempt_id, record.metrics, record.created_at_s) == (f"{KEY}.1", {"num_classes": 8.0}, 5.0)
    assert Record.from_bytes(record.to_bytes()) == record


def test_second_commit_of_a_key_changes_nothing(store: LocalStore) -> None:
    commit(store, 1, b"first")
    assert commit(store, 2, b"second") is Outcome.ALREADY_COMMITTED
    record = read_record(store, KEY)
    assert record.attempt_id == f"{KEY}.1"
    assert read_part(store, record, "labels.json") == b"first"


def test_commit_over_another_identity_raises(store: LocalStore) -> None:
    commit(store, 1, size=1)
    with pytest.raises(IdentityMismatchError, match=KEY):
        commit(store, 2, size=2)


def test_reading_with_another_identity_raises(store: LocalStore) -> None:
    commit(store, size=1)
    with pytest.raises(IdentityMismatchError):
        read_record(store, KEY, identity=request(size=2).identity)


@pytest.mark.parametrize("content", [b'{"key": "trunc', b"", b"[]", b"\xff", b"{}", b'{"parts": []}', b'{"parts": {}}'])
def test_damaged_record_raises_and_names_its_object(store: LocalStore, content: bytes) -> None:
    store.put(record_name(KEY), content)
    with pytest.raises(CorruptObjectError, match=record_name(KEY)):
        read_record(store, KEY)


def test_record_with_metrics_that_are_none_raises(store: LocalStore) -> None:
    commit(store)
    document = json.loads(store.get(record_name(KEY)))
    store.put(record_name(KEY), json.dumps({**document, "metrics": "many"}).encode())
    with pytest.raises(CorruptObjectError, match="metrics"):
        read_record(store, KEY)


def test_key_without_all_its_parts_is_never_committed(store: LocalStore) -> None:
    for nth in (1, 2, 3):
        faulty = FaultyStore(store, [Fault(moment=Moment.CRASH_BEFORE, nth=nth)])
        writer = ArtifactWriter(faulty, request(nth))
        with pytest.raises(SimulatedCrash):  # noqa: PT012 - the crash may come at any of these lines
            writer.add("one", b"1")
            writer.add("two", b"2")
            writer.commit(now=0.0)
        assert not is_committed(store, KEY)


def test_file_part_is_downloaded_and_verified(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w" * 1000)
    writer = ArtifactWriter(store, request())
    assert writer.add_file("weights", tmp_path / "weights").size_bytes == 1000
    writer.commit(now=0.0)
    path = download_part(store, read_record(store, KEY), "weights", tmp_path / "copy")
    assert path.read_bytes() == b"w" * 1000


@pytest.mark.parametrize("content", [b"contend", b"conten", b""])
def test_part_that_changed_in_the_store_is_found_out(store: LocalStore, tmp_path: Path, content: bytes) -> None:
    commit(store)
    record = read_record(store, KEY)
    store.put(part_object(record, "labels.json"), content)
    with pytest.raises(CorruptObjectError, match=r"labels\.json"):
        read_part(store, record, "labels.json")
    with pytest.raises(CorruptObjectError):
        download_part(store, record, "labels.json", tmp_path / "copy")


def test_unknown_part_and_key_raise_not_found(store: LocalStore) -> None:
    with pytest.raises(NotFoundError):
        read_record(store, KEY)
    commit(store)
    with pytest.raises(NotFoundError, match=r"labels\.json"):
        part_object(read_record(store, KEY), "weights")


def test_artifact_lies_under_its_kind_and_key(store: LocalStore) -> None:
    commit(store)
    assert record_name(KEY) == f"artifacts/labels/{KEY}/record.json"
    assert {stat.name.startswith(artifact_folder(KEY)) for stat in store.list_objects("artifacts/")} == {True}
