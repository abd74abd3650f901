"""What garbage collection needs of the local store: ages, left-overs, and folders that go with their last object."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.core.errors import StorageError
from orchestrator.retention.fsck import check_sweep
from orchestrator.retention.gc import Collector
from orchestrator.retention.gc_rules import GcAction, Graces, Reason, Roots
from orchestrator.retention.roots import RootReader
from orchestrator.state.events import SweepAdopted
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import load_snapshot
from orchestrator.sweeps.requests import read_inbox
from orchestrator.testing import FakeClock
from tests.builders import SweepJournal

NUM_WRITERS, NUM_ROUNDS = 6, 60


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def test_stat_of_a_local_object_knows_when_it_was_written(store, tmp_path) -> None:
    before = time.time()
    store.put("a", b"one")
    assert before - 1 <= store.stat("a").modified_at_s <= time.time() + 1
    os.utime(tmp_path / "a", (5.0, 5.0))
    assert [stat.modified_at_s for stat in store.list_objects("")] == [5.0]


def test_delete_of_the_last_object_removes_its_folders(store) -> None:
    store.put("x/y/z/1", b"")
    store.put("x/2", b"")
    store.delete("x/y/z/1")
    assert store.list_children("x/") == ["2"]
    store.delete("x/2")
    assert store.list_children("") == []


def test_delete_of_a_folders_name_leaves_its_objects(store) -> None:
    store.put("x/y", b"one")
    store.delete("x")
    assert store.get("x/y") == b"one"


def test_delete_finishes_what_a_deletion_that_died_left(store, tmp_path) -> None:
    (tmp_path / "x/y").mkdir(parents=True)
    store.delete("x/y/gone")
    assert store.list_children("") == []


def test_writes_and_deletions_that_race_for_a_folder_all_succeed(store, tmp_path) -> None:
    """Every writer deletes what it wrote, so that folders vanish under the others' writes all the time."""
    barrier = threading.Barrier(NUM_WRITERS)

    def write(number: int) -> int:
        barrier.wait(timeout=60)
        for turn in range(NUM_ROUNDS):
            name, content = f"a/b/{turn % 2}/c/{number}", f"{number} {turn}".encode()
            (store.put if turn % 3 else store.put_if_absent)(name, content)
            assert store.get(name) == content
            store.delete(name)
        return NUM_ROUNDS

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        assert sum(pool.map(write, range(NUM_WRITERS))) == NUM_WRITERS * NUM_ROUNDS
    assert [path.name for path in tmp_path.iterdir()] == [".tmp"]
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_put_whose_folder_vanishes_between_making_and_publishing_makes_it_again(store, monkeypatch) -> None:
    link, num_links = os.link, []

    def link_late(source: Path, target: Path) -> None:
        num_links.append(target)
        if len(num_links) < 4:
            target.parent.rmdir()
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    store.put_if_absent("x/y", b"one")
    assert store.get("x/y") == b"one"
    assert len(num_links) == 4


def test_put_below_an_object_fails_at_once(store, monkeypatch) -> None:
    store.put("a", b"one")
    tries: list[Path] = []
    make = LocalStore._make_parents

    def make_counted(self: LocalStore, target: Path) -> None:
        tries.append(target)
        make(self, target)

    monkeypatch.setattr(LocalStore, "_make_parents", make_counted)
    with pytest.raises(StorageError):
        store.put("a/below", b"two")
    assert len(tries) == 1


NONCE = "0123456789abcdef"


def test_collect_old_leftovers_of_dead_writers_go_and_young_ones_stay(store, tmp_path) -> None:
    store.put("a", b"one")
    for probe in (NONCE, f"node-{NONCE}", f"doctor-{NONCE}/object", f"doctor-{NONCE[::-1]}"):
        store.put(f"probes/{probe}", b"")
        os.utime(tmp_path / f"probes/{probe}", (time.time() - 7200.0,) * 2)
    dead, at_work, foreign = "0123456789abcdef01234567", "76543210fedcba9876543210", ("tmp0123abcd", "0" * 23)
    for name, age_s in ((dead, 7200.0), (at_work, 10.0), *((name, 7200.0) for name in foreign)):
        (tmp_path / ".tmp" / name).write_bytes(b"half")
        os.utime(tmp_path / ".tmp" / name, (time.time() - age_s,) * 2)
    graces = Graces(age_s=3600.0, trash_s=0.0)
    preview = Collector(store, lambda _: Roots(), graces=graces).preview()
    assert Collector(store, lambda _: Roots(), graces=graces).collect().amounts == preview.amounts
    assert preview.amounts[GcAction.DESTROY, Reason.LEFTOVER].num_objects == 5
    left = {path.name for path in (tmp_path / ".tmp").iterdir()}
    assert left == {at_work, *foreign}, "TMPDIR of other programs may be the same folder"
    assert list(store.list_objects("probes/")) == []


@pytest.mark.parametrize(
    "name",
    [
        "artifacts/dataset/dataset-a-0123456789abcdef/parts/1-a/.nfs0",
        "sweeps/notes 1.txt",
        "sweeps/x/inbox/a copy.json",
        "sweeps/x/snapshots/00000128.jsonl (copy)",
        "sweeps/x/snapshots/why-kept.md",
        "trash/2025/old-model.pt",
        "trash/000000000001-0123abcd/notes.json",
        "pins/notes 1.txt",
        ".tmp/.nfs0",
    ],
)
def test_collect_goes_past_what_other_programs_left_in_the_store(store, tmp_path, name: str) -> None:
    """NFS, rsync and people leave files under names that no object may have; one of them must not end a collection."""
    SweepJournal(store, "x").tell(SweepAdopted(at_s=1.0, cluster="local", epoch=1, holder="test"))
    for key in ("dataset-a-0123456789abcdef", "dataset-b-0123456789abcdef"):
        store.put(f"artifacts/dataset/{key}/parts/1-a/x", b"of a dead attempt")
    foreign = tmp_path / name
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(b"theirs")
    clock, graces = FakeClock(time.time()), Graces(age_s=1.0, trash_s=1.0)
    for _ in range(2):
        clock.advance(2.0)
        Collector(store, RootReader(store), graces=graces, now=clock).collect()
    assert list(store.list_objects("artifacts/")) == []
    assert check_sweep(store, "x").findings == []
    assert load_snapshot(store, "x").num_events == 1
    assert not list(read_inbox(store, "x"))
    assert foreign.read_bytes() == b"theirs"
