"""Objects that are far larger than what any program of ours writes: said so, never read, and the others go on."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.core.errors import ControllerError, CorruptObjectError, TooLargeError
from orchestrator.core.units import MIB
from orchestrator.retention.fsck import Depth, Problem, check_store
from orchestrator.retention.inventory import forgotten_name
from orchestrator.retention.roots import is_forgotten
from orchestrator.services.artifact_lookup import read_artifact_summary
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage import artifacts, bounds, journal
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.claims import Claims
from orchestrator.storage.journal import Journal, JournalDamagedError
from orchestrator.storage.layout import (
    claim_name,
    drain_name,
    inbox_folder,
    inbox_message,
    journal_folder,
    journal_segment,
    lease_name,
    plan_name,
    progress_name,
    quotas_name,
    record_name,
    snapshot_name,
    snapshots_folder,
)
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client, requests
from orchestrator.sweeps.drain import read_drain
from orchestrator.sweeps.lease import read_lease
from orchestrator.sweeps.ledger import DocumentDamagedError
from orchestrator.sweeps.quotas import read_quotas
from orchestrator.testing import FakeClock
from tests.gc_store import Lab
from tests.scripted_sweep import CLUSTER, World, diamond, make_job

TREE = make_job("dataset/tree")
HUGE_BYTES = 513 * MIB
"""More than any bound."""


def swell(store: object, name: str) -> None:
    """Make an object huge: what it holds, and zeros that take no room on the disk."""
    assert isinstance(store, LocalStore)
    path = store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(HUGE_BYTES)


@contextmanager
def little_memory() -> Iterator[None]:
    """Whatever happens inside never holds as much as one of the huge objects."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def test_bounds_leave_room_for_a_hundred_thousand_jobs() -> None:
    assert bounds.PLAN_BYTES >= 3 * 140 * MIB
    assert max(vars(bounds)[name] for name in vars(bounds) if name.endswith("_BYTES")) < HUGE_BYTES


def test_sweep_with_a_huge_segment_is_named_and_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(make_job("dataset/broken"), sweep="broken")
    world.finish("broken")
    for child in world.store.list_children(snapshots_folder("broken")):  # its end would be read from there
        world.store.delete(f"{snapshots_folder('broken')}{child}")
    swell(world.store, journal_segment("broken", len(world.store.list_children(journal_folder("broken"))) - 1))
    world.new_controller()
    world.submit(*diamond())
    with little_memory():
        world.finish()
        with pytest.raises(JournalDamagedError, match=rf"of sweep 'broken'.*{HUGE_BYTES} bytes.*at most 536870912"):
            client.load_snapshot(world.store, "broken")
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_sweep_with_a_huge_plan_is_named_and_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(make_job("dataset/broken"), sweep="broken")
    world.finish("broken")
    swell(world.store, plan_name("broken", 1))
    world.new_controller()
    world.submit(*diamond())
    with little_memory():
        world.finish()
        with pytest.raises(DocumentDamagedError, match=rf"{plan_name('broken', 1)}.*{HUGE_BYTES} bytes"):
            client.load_snapshot(world.store, "broken")
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_huge_message_is_refused_with_its_size_and_the_next_one_is_followed(tmp_path: Path) -> None:
    world = World(tmp_path)
    swell(world.store, inbox_message("sweep", "0-huge"))
    world.submit(TREE)
    with little_memory():
        world.finish()
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.SUCCEEDED
    assert f"{HUGE_BYTES} bytes" in snapshot.refusals["0-huge"]
    assert world.store.list_children(inbox_folder("sweep")) == []


def test_huge_record_fails_its_job_and_names_the_object(tmp_path: Path) -> None:
    world = World(tmp_path)
    swell(world.store, record_name(TREE.key))
    world.submit(*diamond())
    with little_memory():
        world.finish()
        with pytest.raises(TooLargeError, match=record_name(TREE.key)):
            read_record(world.store, TREE.key)
        assert read_artifact_summary(world.store, TREE.key) is None
    assert world.snapshot().counts == {JobState.FAILED: 1, JobState.SKIPPED: 4}
    assert record_name(TREE.key) in world.job(TREE.name).reason


def test_huge_record_is_found_by_fsck(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    swell(store, record_name(TREE.key))
    with little_memory():
        (finding,) = check_store(store, Depth.SIZES)
    assert (finding.name, finding.problem) == (record_name(TREE.key), Problem.UNREADABLE)


def test_huge_record_is_not_collected_and_the_rest_is(tmp_path: Path) -> None:
    lab = Lab(clock=FakeClock(time.time() + 60.0))  # later than the times of files
    lab.store = LocalStore(tmp_path)
    lab.commit(TREE)
    before = lab.payload()
    lab.commit(make_job("dataset/other"))
    swell(lab.store, record_name(TREE.key))
    with little_memory():
        lab.collect_until_freed()
    assert lab.payload() == before


def test_huge_snapshot_is_passed_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(*diamond())
    world.finish()
    truth = world.snapshot()
    swell(world.store, snapshot_name("sweep", 3))
    with little_memory():
        assert client.load_snapshot(world.store, "sweep") == truth


def test_huge_claim_counts_as_nobodys(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    swell(store, claim_name(TREE.key))
    with little_memory():
        assert Claims(store, CLUSTER).take(TREE.key, "sweep", 1e9) is None
    assert store.stat(claim_name(TREE.key)).size_bytes < bounds.SMALL_BYTES


@pytest.mark.parametrize(
    ("name", "read"),
    [(lease_name(CLUSTER), read_lease), (drain_name(CLUSTER), read_drain), (quotas_name(CLUSTER), read_quotas)],
)
def test_huge_object_of_a_cluster_is_named(
    tmp_path: Path, name: str, read: Callable[[LocalStore, str], object]
) -> None:
    store = LocalStore(tmp_path)
    swell(store, name)
    with little_memory(), pytest.raises(ControllerError, match=rf"{name}.*{HUGE_BYTES} bytes"):
        read(store, CLUSTER)


def test_huge_progress_and_mark_of_a_forgotten_sweep_are_not_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    swell(store, progress_name("sweep"))
    swell(store, forgotten_name("sweep"))
    with little_memory():
        with pytest.raises(TooLargeError, match=progress_name("sweep")):
            client.read_progress(store, "sweep")
        assert not is_forgotten(store, "sweep")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"epoch": 3}', b"\xff"])
def test_damaged_lease_starts_no_controller_and_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    world = World(tmp_path)
    world.store.put(lease_name(CLUSTER), content)
    with pytest.raises(ControllerError, match=rf"{lease_name(CLUSTER)}.*restore it from a copy"):
        world.new_controller().tick()
    assert world.store.get(lease_name(CLUSTER)) == content


def test_lease_whose_epoch_is_no_number_is_damaged(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    content = world.store.get(lease_name(CLUSTER))
    world.store.put(lease_name(CLUSTER), content.replace(b'"epoch": 1', b'"epoch": "1"'))
    with pytest.raises(ControllerError, match="is not a number"):
        world.new_controller().tick()


def test_device_in_place_of_an_object_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(CorruptObjectError, match=r"endless .* it is a device"):
        store.get("endless")


def test_segment_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    store = LocalStore(tmp_path)
    writer = Journal(store, "sweep", holder="w")
    writer.append([{"type": "small"}])
    with pytest.raises(TooLargeError, match="at most 1000"):
        writer.append([{"type": "large", "text": "x" * 1000}])
    writer.append([{"type": "small"}])
    assert [event["type"] for event in Journal(store, "sweep").read_new()] == ["small", "small"]


def test_message_that_nobody_would_read_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PLAN_BYTES", 1000)
    world = World(tmp_path)
    with pytest.raises(TooLargeError, match=r"message to sweep sweep has .* make several sweeps"):
        world.submit(*diamond())
    assert world.store.list_children(inbox_folder("sweep")) == []


def test_snapshot_and_record_that_nobody_would_read_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "PLAN_BYTES", 100)
    monkeypatch.setattr(artifacts, "RECORD_BYTES", 100)
    world = World(tmp_path)
    with pytest.raises(TooLargeError, match="the journal is read instead"):
        journal.write_snapshot(world.store, "sweep", 1, {"text": "x" * 100})
    world.submit(TREE)
    with pytest.raises(TooLargeError, match="fewer parts or a shorter summary"):
        world.finish()
    assert list(world.store.list_objects(record_name(TREE.key))) == []
    assert list(world.store.list_objects("sweeps/sweep/snapshots/")) == []
