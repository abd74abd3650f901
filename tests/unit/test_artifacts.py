"""The commit protocol."""

import json
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from orchestrator.core.contract import JobRequest, Outcome
from orchestrator.core.errors import CorruptObjectError, IdentityMismatchError, NotFoundError, StorageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.retention.fsck import Problem, check_store
from orchestrator.storage.artifacts import (
    ArtifactWriter,
    Record,
    download_part,
    is_committed,
    part_object,
    read_part,
    read_record,
)
from orchestrator.storage.digests import digests_of
from orchestrator.storage.layout import artifact_folder, checkpoints_folder, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from orchestrator.testing import Fault, FaultyStore, Moment, SimulatedCrash
from tests.gc_store import Lab, make_job

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
    document = version_1(store)
    store.put(record_name(KEY), json.dumps({**document, "metrics": "many"}).encode())
    with pytest.raises(CorruptObjectError, match="summary must be objects"):
        read_record(store, KEY)


@pytest.mark.parametrize("size_bytes", [-1, 7.0, "7", None])
def test_record_with_a_part_of_no_size_raises(store: LocalStore, size_bytes: object) -> None:
    document = version_1(store)
    next(iter(document["parts"].values()))["size_bytes"] = size_bytes
    store.put(record_name(KEY), json.dumps(document).encode())
    with pytest.raises(CorruptObjectError):
        read_record(store, KEY)


def version_1(store: LocalStore) -> dict[str, Any]:
    """A committed record as programs wrote it before records were sealed."""
    commit(store)
    document: dict[str, Any] = json.loads(store.get(record_name(KEY)))
    del document["record_sha256"]
    return {**document, "version": 1}


def test_record_of_version_1_stays_readable(store: LocalStore) -> None:
    document = version_1(store)
    store.put(record_name(KEY), json.dumps(document).encode())
    record = read_record(store, KEY, identity=request().identity)
    assert record.version == 1
    assert read_part(store, record, "labels.json") == b"content"
    assert Record.from_bytes(record.to_bytes()) == record


def test_record_seal_is_what_other_tools_compute(store: LocalStore) -> None:
    commit(store)
    document = json.loads(store.get(record_name(KEY)))
    seal = document.pop("record_sha256")
    assert seal == sha256(rfc8785.dumps(document)).hexdigest()


def altered(document: Any, choice: random.Random) -> None:
    """Change one value somewhere inside a document."""
    place = choice.choice(list(document) if isinstance(document, dict) else range(len(document)))
    value = document[place]
    if isinstance(value, dict | list) and value and choice.random() < 0.8:
        altered(value, choice)
    elif isinstance(value, str):
        document[place] = f"{value}x" if choice.random() < 0.5 else value[:-1] or "x"
    elif isinstance(value, int | float):
        document[place] = value + choice.choice([1, -1, 0.25])
    else:
        document[place] = "something else"


def test_record_altered_anywhere_is_found_out(store: LocalStore) -> None:
    choice = random.Random(1)  # noqa: S311 - the same alterations every time
    commit(store, size=3, deep={"a": [1, 2.5]})
    content = store.get(record_name(KEY))
    for _ in range(300):
        document = json.loads(content)
        altered(document, choice)
        store.put(record_name(KEY), json.dumps(document).encode())
        with pytest.raises(CorruptObjectError):
            read_record(store, KEY)
        assert [found.problem for found in check_store(store)] == [Problem.UNREADABLE]


@pytest.mark.parametrize("removed", ["record_sha256", "version"])
def test_record_without_its_seal_is_no_record(store: LocalStore, removed: str) -> None:
    commit(store)
    document = json.loads(store.get(record_name(KEY)))
    del document[removed]
    store.put(record_name(KEY), json.dumps(document).encode())
    with pytest.raises(CorruptObjectError):
        read_record(store, KEY)


def test_record_with_a_flipped_bit_never_reads_as_another(store: LocalStore) -> None:
    choice = random.Random(2)  # noqa: S311 - the same flips every time
    commit(store, size=3)
    content = store.get(record_name(KEY))
    original = read_record(store, KEY)
    num_found_out = 0
    for _ in range(1000):
        damaged = bytearray(content)
        damaged[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        store.put(record_name(KEY), bytes(damaged))
        try:
            assert read_record(store, KEY) == original, "white space may change, nothing else"
        except CorruptObjectError:
            num_found_out += 1
    assert num_found_out > 800


@pytest.mark.parametrize("harm", ["delete", "shorten"])
def test_commit_after_its_parts_were_collected_is_refused(store: LocalStore, harm: str) -> None:
    writer = ArtifactWriter(store, request())
    for name in ("one", "two/nested"):
        writer.add(name, b"content")
    (name,) = [stat.name for stat in store.list_objects("artifacts/") if stat.name.endswith("nested")]
    store.delete(name)
    if harm == "shorten":
        store.put(name, b"cont")
    with pytest.raises(StorageError, match=r"two/nested.*run the job again"):
        writer.commit(now=0.0)
    assert not is_committed(store, KEY)


def test_commit_of_an_attempt_older_than_the_graces_of_gc_never_names_what_is_gone() -> None:
    """An attempt of a job that no sweep has any more sleeps for days between its parts and its commit."""
    lab, job = Lab(), make_job(3)
    writer = lab.write_parts(job, num_parts=2)
    lab.collect_until_freed()
    with pytest.raises(StorageError, match="part0, part1"):
        writer.commit(now=lab.clock())
    assert not is_committed(lab.store, job.key)


def adopting(store: LocalStore, num_folders: int) -> ArtifactWriter:
    """The writer of an attempt that takes over what earlier ones finished, in a folder each."""
    writer = ArtifactWriter(store, request())
    writer.add("labels.json", b"content")
    for number in range(num_folders):
        name = f"{checkpoints_folder(KEY)}/{number:012d}-a/rows{number}"
        store.put(name, b"rows")
        writer.adopt(f"rows{number}", name, size_bytes=4, digests=digests_of(b"rows"))
    return writer


def test_commit_of_many_adopted_folders_lists_them_together(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow store a listing for each of thousands would take longer than an attempt may make no progress."""
    writer = adopting(store, 50)
    listed: list[str] = []
    list_objects = LocalStore.list_objects

    def counted(self: LocalStore, prefix: str) -> Iterator[ObjectStat]:
        listed.append(prefix)
        return list_objects(self, prefix)

    monkeypatch.setattr(LocalStore, "list_objects", counted)
    assert writer.commit(now=0.0) is Outcome.COMMITTED
    assert len(listed) == 2
    assert read_part(store, read_record(store, KEY), "rows49") == b"rows"


@pytest.mark.parametrize("num_folders", [1, 3])
def test_commit_after_an_adopted_object_was_lost_is_refused(store: LocalStore, num_folders: int) -> None:
    writer = adopting(store, num_folders)
    store.delete(f"{checkpoints_folder(KEY)}/{0:012d}-a/rows0")
    with pytest.raises(StorageError, match="parts rows0 of"):
        writer.commit(now=0.0)


def test_alias_names_a_part_twice_and_stores_it_once(store: LocalStore) -> None:
    writer = ArtifactWriter(store, request())
    writer.add("one", b"content")
    writer.alias("two", "one")
    writer.commit(now=0.0)
    record = read_record(store, KEY)
    assert read_part(store, record, "two") == b"content"
    assert part_object(record, "one") == part_object(record, "two")
    with pytest.raises(KeyError):
        writer.alias("three", "missing")


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
