"""Stored states of a sweep: a shortcut through its journal that never changes what is read."""

from __future__ import annotations

import gc
import json
from hashlib import sha256
from pathlib import Path
from weakref import ref

import pytest

from orchestrator.core.errors import ControllerError, FailureKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.state import events
from orchestrator.state.fold import fold
from orchestrator.state.snapshot import encode_snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.journal import KEPT, Journal, read_snapshots
from orchestrator.storage.layout import journal_folder, journal_segment, snapshots_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client, ledger
from orchestrator.testing import Fault, FaultyStore, Moment
from tests.builders import failed, launched, make_plan
from tests.scripted_sweep import World, diamond, make_job

FOREIGN = f"{snapshots_folder('sweep')}#why-kept.md"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A finished sweep, with a snapshot after every second segment, and a file of somebody else beside them."""
    monkeypatch.setattr(ledger, "SNAPSHOT_EVERY", 2)
    made = World(tmp_path)
    made.store.put(FOREIGN, b"theirs")
    made.submit(*diamond())
    made.finish()
    return made


def names(world: World) -> list[str]:
    return [name for name in world.store.list_children(snapshots_folder("sweep")) if not FOREIGN.endswith(name)]


def without_snapshots(world: World):
    """The sweep as its journal alone tells it."""
    for name in names(world):
        world.store.delete(f"{snapshots_folder('sweep')}{name}")
    return client.load_snapshot(world.store, "sweep")


def test_reader_with_a_snapshot_opens_only_the_segments_after_it(world: World) -> None:
    found = client.load_snapshot(world.store, "sweep")
    world.store.delete(journal_segment("sweep", 0))
    assert client.load_snapshot(world.store, "sweep") == found
    assert found.state is SweepState.SUCCEEDED
    assert found.num_events > 10


def test_reader_with_a_snapshot_lists_only_the_segments_after_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 lists a thousand in one request: a long journal would take more requests than all else that is read."""
    listed: list[str] = []
    original = LocalStore.list_children

    def list_counted(store: LocalStore, prefix: str, *, start_after: str = "") -> list[str]:
        found = original(store, prefix, start_after=start_after)
        listed.extend(f"{prefix}{child}" for child in found if prefix == journal_folder("sweep"))
        return found

    monkeypatch.setattr(LocalStore, "list_children", list_counted)
    covered = int(names(world)[-1].removesuffix(".jsonl"))
    client.load_snapshot(world.store, "sweep")
    assert listed[0] == journal_segment("sweep", covered - 1), "the last one that the snapshot covers"
    assert len(listed) <= 2


def test_reader_with_and_without_snapshots_sees_the_same(world: World) -> None:
    assert client.load_snapshot(world.store, "sweep") == without_snapshots(world)


def test_only_the_newest_snapshots_stay(world: World) -> None:
    assert len(names(world)) == KEPT
    assert world.store.get(FOREIGN) == b"theirs"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-40],
        lambda content: content.replace(b"succeeded", b"cancelled"),
        lambda content: b"",
        lambda content: b"\xff" + content,
    ],
)
def test_damaged_snapshot_is_passed_over(world: World, damage) -> None:
    truth = client.load_snapshot(world.store, "sweep")
    newest = f"{snapshots_folder('sweep')}{names(world)[-1]}"
    world.store.put(newest, damage(world.store.get(newest)))
    assert len(list(read_snapshots(world.store, "sweep"))) == KEPT - 1
    assert client.load_snapshot(world.store, "sweep") == truth


def test_snapshot_of_an_earlier_version_has_no_seal_but_a_digest(world: World) -> None:
    newest = f"{snapshots_folder('sweep')}{names(world)[-1]}"
    header, body = world.store.get(newest).split(b"\n", 1)
    fields = json.loads(header)
    del fields[next(iter(fields))]
    assert list(fields) == ["next_sequence", "journal_sha256", "sha256"]
    for digest, expected in ((fields["sha256"], KEPT), ("f" * 64, KEPT - 1), ("0" * 64, KEPT - 1)):
        world.store.put(newest, json.dumps({**fields, "sha256": digest}).encode() + b"\n" + body)
        assert len(list(read_snapshots(world.store, "sweep"))) == expected


def test_fold_of_the_same_events_gives_the_same_state_while_its_version_stays() -> None:
    """A job for each kind of failure, which then finds no room on another node: the node to avoid depends on the kind.

    If this fails because the fold gives another state, or the state is stored in another form that means something
    else, raise ``SNAPSHOT_VERSION``; then write both numbers here.
    """
    kinds = [kind for kind in FailureKind if kind is not FailureKind.NO_ROOM]
    jobs = {kind: make_job(f"dataset/{kind.value}") for kind in kinds}
    journal: list[events.Event] = [events.PlanAccepted(at_s=0.0, message_id="m", revision=1)]
    for kind, job in jobs.items():
        journal += [
            launched(job, "first"),
            failed(job, kind, node="first"),
            launched(job, "second", at_s=3.0, number=2),
            events.AttemptFailed(
                at_s=4.0,
                job=job.name,
                attempt_id=f"{job.key}.2",
                kind=FailureKind.PREEMPTED,
                had_no_room=True,
                message="",
                node="second",
            ),
        ]
    plan = make_plan(*jobs.values(), revision=1)
    document = encode_snapshot(fold(plan.sweep, journal, lambda _: plan))
    version, text = document.pop("version"), json.dumps(document, sort_keys=True)
    assert (version, sha256(text.encode()).hexdigest()[:16]) == (10, "8d14d4767e6a6c61")


def test_snapshot_of_another_version_is_passed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = client.load_snapshot(world.store, "sweep")
    monkeypatch.setattr("orchestrator.state.snapshot.SNAPSHOT_VERSION", 99)
    assert client.load_snapshot(world.store, "sweep") == truth


def test_snapshot_whose_plan_is_gone_is_passed_over(world: World) -> None:
    newest = f"{snapshots_folder('sweep')}{names(world)[-1]}"
    header, body = world.store.get(newest).split(b"\n", 1)
    document = {**json.loads(body), "revision": 7}
    changed = json.dumps(document).encode()
    told = {**json.loads(header), "sha256": sha256(changed).hexdigest()}
    world.store.put(newest, json.dumps(told).encode() + b"\n" + changed + b"\n")
    assert client.load_snapshot(world.store, "sweep").revision == 1


def test_ended_sweep_is_read_from_a_snapshot_of_its_end(tmp_path: Path) -> None:
    """A controller that starts reads each sweep that ever ended: few of them have 128 segments."""
    world = World(tmp_path)
    world.submit(*diamond())
    world.finish()
    segments = world.store.list_children(journal_folder("sweep"))
    assert names(world) == [f"{len(segments):08d}.jsonl"]
    assert client.load_snapshot(world.store, "sweep") == without_snapshots(world)


@pytest.mark.parametrize("holder", ["", "writer"])
def test_ledger_keeps_the_plan_of_the_current_revision_alone(tmp_path: Path, holder: str) -> None:
    world, seen = World(tmp_path), list[ref[Plan]]()
    follower = ledger.SweepLedger(world.store, "sweep", holder=holder)
    for number in range(3):
        world.submit(make_job(f"dataset/{number}"))
        world.finish()
        owned = world.controller._owned
        assert owned is not None
        for plan in (follower.refresh().plan, owned.snapshots()[0].plan):
            assert plan is not None
            seen.append(ref(plan))
    del plan
    gc.collect()
    assert [found() is not None for found in seen] == [False] * 4 + [True] * 2


def test_snapshot_that_cannot_be_stored_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SNAPSHOT_EVERY", 2)
    world = World(tmp_path)
    faults = [Fault(moment=Moment.ERROR_BEFORE, nth=nth, within=snapshots_folder("sweep")) for nth in (1, 2, 3)]
    world.new_controller(FaultyStore(world.store, faults))
    world.submit(*diamond())
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_new_controller_that_starts_from_a_snapshot_goes_on_with_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SNAPSHOT_EVERY", 2)
    world = World(tmp_path)
    world.submit(*diamond())
    for _ in range(60):
        if world.snapshot().state.is_final:
            break
        world.tick()
        world.new_controller()
    assert world.snapshot().state is SweepState.SUCCEEDED
    assert sorted(world.launches()) == sorted(job.name for job in diamond())


def test_event_of_a_newer_version_is_an_error_at_every_read_and_not_passed_over_by_the_second(world: World) -> None:
    follower = ledger.SweepLedger(world.store, "sweep")
    truth = follower.refresh()
    writer = Journal(world.store, "sweep", holder="newer")
    writer.read_new()
    writer.append([{"type": "sweep_levitated", "version": 1, "at_s": world.clock()}])
    for reader in (follower, ledger.SweepLedger(world.store, "sweep")):
        for _ in range(3):
            with pytest.raises(ControllerError, match="'sweep_levitated' of version 1, which this version"):
                reader.refresh()
    assert follower.snapshot == truth
