"""What fsck finds, and what it leaves alone."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.retention.fsck import (
    Census,
    Depth,
    Problem,
    check_documents,
    check_store,
    check_sweep,
    repair,
)
from orchestrator.retention.inventory import LOCK
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import Record
from orchestrator.storage.layout import checkpoints_folder, journal_folder, journal_segment, record_name
from orchestrator.storage.local import LocalStore
from tests.gc_store import Lab, make_job
from workloads.runtime.manifest import Entry, encode_manifest

JOB = make_job(3)
RECORD = record_name(JOB.key)
CHECKPOINT = f"{checkpoints_folder(JOB.key)}/000000000007-abcd"
PART = f"{CHECKPOINT}/model.safetensors"


@pytest.fixture
def store() -> ObjectStore:
    lab = Lab()
    lab.write_parts(JOB, 2).commit(now=0.0)
    content = b"0123456789"
    lab.store.put(PART, content)
    lab.store.put(f"{CHECKPOINT}/manifest.json", encode_manifest(7, {"model.safetensors": Entry.of(content)}))
    return lab.store


def part_of_record(store: ObjectStore) -> str:
    return min(stat.name for stat in store.list_objects(RECORD.replace("record.json", "parts/")))


def check(store: ObjectStore, depth: Depth = Depth.SIZES) -> list[tuple[str, Problem, str]]:
    return [(finding.name, finding.problem, finding.named_by) for finding in check_store(store, depth)]


def test_check_intact_store_finds_nothing_and_counts_what_it_saw(store) -> None:
    census = Census()
    assert list(check_store(store, Depth.CONTENT, census)) == []
    assert (census.num_heads, census.checked.num_objects) == (2, 3)
    assert census.checked.num_bytes == sum(s.size_bytes for s in store.list_objects("") if s.name[-4:] != "json")


@pytest.mark.parametrize("head", [RECORD, f"{CHECKPOINT}/manifest.json"])
def test_check_missing_object_is_found(store, head) -> None:
    name = PART if head != RECORD else part_of_record(store)
    store.delete(name)
    assert check(store) == [(name, Problem.MISSING, head)]


def test_check_short_object_is_found_by_its_size(store) -> None:
    store.put(PART, b"01234567")
    assert check(store) == [(PART, Problem.SHORT, f"{CHECKPOINT}/manifest.json")]


def test_check_longer_object_is_found_by_its_size(store) -> None:
    store.put(PART, b"0123456789+")
    assert check(store) == [(PART, Problem.ALTERED, f"{CHECKPOINT}/manifest.json")]


def test_check_flipped_bit_is_found_by_content_alone(store) -> None:
    store.put(PART, b"0123456788")
    assert check(store) == []
    assert check(store, Depth.CONTENT) == [(PART, Problem.ALTERED, f"{CHECKPOINT}/manifest.json")]


def test_check_record_with_another_identity_is_found(store) -> None:
    record = Record.from_bytes(store.get(RECORD))
    store.put(RECORD, replace(record, identity={**record.identity, "code_version": 2}).to_bytes())
    assert check(store) == [(RECORD, Problem.ALTERED, RECORD)]


def test_check_record_of_another_key_is_found(store) -> None:
    record = Record.from_bytes(store.get(RECORD))
    store.put(RECORD, replace(record, key=make_job(8).key).to_bytes())
    assert (RECORD, Problem.ALTERED, RECORD) in check(store)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"parts": {}}', b"\xff\xfe", b'{"objects": 3}'])
@pytest.mark.parametrize("head", [RECORD, f"{CHECKPOINT}/manifest.json"])
def test_check_unreadable_head_is_found(store, head, content) -> None:
    store.put(head, content)
    assert check(store) == [(head, Problem.UNREADABLE, head)]


def test_check_manifest_that_was_altered_is_found_though_it_is_plausible(store) -> None:
    head = f"{CHECKPOINT}/manifest.json"
    document = json.loads(store.get(head))
    store.put(head, json.dumps({**document, "step": 8}, indent=1).encode())
    assert check(store) == [(head, Problem.UNREADABLE, head)]


def test_check_half_written_checkpoint_and_orphaned_parts_are_no_damage(store) -> None:
    store.delete(f"{CHECKPOINT}/manifest.json")
    store.put(RECORD.replace("record.json", "parts/9-dead/weights"), b"half")
    assert check(store) == []


def test_check_checkpoint_that_is_deleted_meanwhile_is_no_damage(store) -> None:
    class Deleting:
        """The job replaces its checkpoint between the listing and the look at its parts."""

        def __getattr__(self, name: str) -> Callable[..., object]:
            return getattr(store, name)  # type: ignore[no-any-return]

        def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
            content: bytes = store.get(name, max_bytes=max_bytes)
            if name.startswith(CHECKPOINT):
                for stat in list(store.list_objects(CHECKPOINT)):
                    store.delete(stat.name)
            return content

        def list_objects(self, prefix: str):
            return (stat for stat in list(store.list_objects(prefix)) if stat.name != PART)

    assert check(Deleting()) == []  # type: ignore[arg-type]
    assert not store.exists(PART)


def test_repair_deletes_a_damaged_lock_of_collections(store) -> None:
    store.put(LOCK, b"\0" * 40)
    (finding,) = check_documents(store)
    assert (finding.name, finding.problem) == (LOCK, Problem.ALTERED)
    assert repair(store, finding).startswith("deleted; ")
    assert not store.exists(LOCK)
    assert list(check_documents(store)) == []


def test_check_every_random_flip_is_found(tmp_path) -> None:
    lab = Lab()
    lab.store = LocalStore(tmp_path)
    lab.commit(JOB)
    lab.write_checkpoint(JOB)
    chance = random.Random(0)  # noqa: S311 - chance, not a secret
    names = sorted(stat.name for stat in lab.store.list_objects(""))
    for _ in range(60):
        name = chance.choice(names)
        path, content = tmp_path / name, bytearray((tmp_path / name).read_bytes())
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        found = list(check_store(lab.store, Depth.CONTENT))
        if name == RECORD:
            assert found or not _is_vouched_for(content, damaged)
        else:
            assert [finding.name for finding in found] == [name]
        path.write_bytes(content)
    assert list(check_store(lab.store, Depth.CONTENT)) == []


def _is_vouched_for(content: bytearray, damaged: bytearray) -> bool:
    """Whether the flip hit identity, key or parts, which hashes cover; metrics and times are the record's own word."""
    before, after = json.loads(content), json.loads(damaged)
    return any(before[name] != after[name] for name in ("identity", "key", "parts"))


@pytest.mark.parametrize(
    ("lost", "altered", "expected"),
    [([1], 3, [(1, Problem.MISSING), (3, Problem.ALTERED)]), ([0, 1], None, [(0, Problem.MISSING)])],
)
def test_check_looks_at_every_segment_behind_a_lost_one(
    lost: list[int], altered: int | None, expected: list[tuple[int, Problem]]
) -> None:
    lab = Lab()
    lab.run_sweep("kept", [JOB])
    for number in lost:
        lab.store.delete(journal_segment("kept", number))
    if altered is not None:
        lab.store.put(journal_segment("kept", altered), b"{}")
    found = [(finding.name, finding.problem) for finding in check_sweep(lab.store, "kept").findings]
    assert found == [(journal_segment("kept", number), problem) for number, problem in expected]


def test_check_finds_that_a_whole_journal_is_lost() -> None:
    lab = Lab()
    lab.run_sweep("kept", [JOB])
    for name in lab.names(journal_folder("kept")):
        lab.store.delete(name)
    (finding,) = check_sweep(lab.store, "kept").findings
    assert (finding.name, finding.problem) == (journal_segment("kept", 0), Problem.MISSING)
