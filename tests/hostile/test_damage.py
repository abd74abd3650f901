"""Damage to anything in a store: found, or harmless, and repaired where the rest of the store allows it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from orchestrator.core.errors import ControllerError
from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.planning.graph.build import build_plan
from orchestrator.retention.fsck import check_documents
from orchestrator.storage import seals
from orchestrator.storage.artifacts import _fits, is_committed
from orchestrator.storage.journal import Journal, JournalDamagedError
from orchestrator.storage.layout import (
    inbox_folder,
    inbox_message,
    journal_folder,
    journal_segment,
    lease_name,
    plan_name,
    snapshots_folder,
)
from orchestrator.sweepfile.load import load_all
from orchestrator.sweepfile.parse.document import Changes
from orchestrator.sweeps import client, ledger
from orchestrator.sweeps.lease import Lease, LeaseLostError, read_lease
from orchestrator.sweeps.ledger import DocumentDamagedError
from orchestrator.testing import Hang
from tests.commands import run_command
from tests.hostile.damage import (
    SWEEP,
    Change,
    Scene,
    draw_change,
    find_damage,
    judge,
    make_scene,
    many_snapshots,
    run_campaign,
)
from tests.hostile.sweeps import filled
from tests.scripted_sweep import CLUSTER, World, diamond, make_job


def test_lost_segment_of_a_journal_is_found_or_harmless() -> None:
    """Readers that start from a stored state need no segment before it; all others refuse the journal."""
    with many_snapshots():
        scene = make_scene(is_finished=False)
        names = sorted(name for name in scene.contents if name.startswith(journal_folder(SWEEP)))
        judge_all(scene, [Change("lost", {name: None}) for name in (names[0], names[-2])])


def test_random_changes_are_found_or_harmless() -> None:
    assert run_campaign(24, 11)["found"] > 10


@pytest.mark.slow
def test_two_hundred_random_changes_are_found_or_harmless() -> None:
    assert run_campaign(200, random.randrange(2**32))["found"] > 100  # noqa: S311 - not for secrets


def judge_all(scene: Scene, changes: list[Change]) -> None:
    for change in changes:
        judge(scene, change)


def test_campaign_without_seals_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: here documents are read as earlier versions read them."""
    with many_snapshots():
        scene = make_scene(is_finished=True)
        monkeypatch.setattr("orchestrator.report.inputs.check_seal", lambda _name, _content: False)
        monkeypatch.setattr("orchestrator.retention.fsck.check_seal", lambda _name, _content: False)
        changes = [draw_change(scene, random.Random(number)) for number in range(400)]  # noqa: S311 - not for secrets
        metrics = [one for one in changes if one.how in {"digit", "flip"} and next(iter(one.contents))[:7] == "metrics"]
        with pytest.raises(AssertionError, match="curves reads"):
            judge_all(scene, metrics)


def interrupted(root: Path) -> World:
    """A sweep whose backbones run, and whose controller has just died."""
    world = World(root)
    world.backend._scripts |= {"pretrain/a": [Hang()], "pretrain/b": [Hang()]}
    world.submit(*diamond())
    world.tick_until(lambda: len(world.backend.live) == 2)
    return world


def alter(world: World, name: str, before: bytes, after: bytes) -> None:
    content = world.store.get(name)
    assert before in content
    world.store.put(name, content.replace(before, after, 1))


def test_controller_sets_a_sweep_with_a_changed_plan_aside_and_serves_the_others(tmp_path: Path, caplog) -> None:
    world = interrupted(tmp_path)
    alter(world, plan_name("sweep", 1), b'"key": "probe/a"', b'"key": "probe/x"')
    world.backend.kill_all()
    world.new_controller()
    world.submit(make_job("dataset/other"), sweep="other")
    world.finish("other")
    assert not is_committed(world.store, diamond()[3].key)
    with pytest.raises(DocumentDamagedError, match="its sha256 is not the one in the sweep's journal"):
        world.snapshot()
    said = [record for record in caplog.records if "set aside" in record.getMessage()]
    assert said
    assert not any(record.exc_info for record in said)


def test_plan_of_an_earlier_version_is_checked_by_its_keys(tmp_path: Path) -> None:
    """Its journal holds no digest of it."""
    world = interrupted(tmp_path)
    name = journal_segment("sweep", 0)
    lines = [json.loads(line) for line in world.store.get(name).splitlines()]
    lines[0] = {"sequence": 0, "holder": "old", "nonce": "0"}
    del lines[2]["documents"]
    for sequence in range(1, len(world.store.list_children(journal_folder("sweep")))):
        world.store.delete(journal_segment("sweep", sequence))
    world.store.put(name, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    assert world.snapshot().plan is not None
    alter(world, plan_name("sweep", 1), b'"key": "probe/a"', b'"key": "probe/x"')
    with pytest.raises(DocumentDamagedError, match="probe/a does not belong to its identity"):
        world.snapshot()


def test_controller_leaves_the_place_of_a_lost_segment_free(tmp_path: Path) -> None:
    """Once it is restored the sweep goes on; another segment in its place would make the loss final."""
    world, name = interrupted(tmp_path), journal_segment("sweep", 2)
    lost = world.store.get(name)
    world.store.delete(name)
    world.new_controller()
    for _ in range(5):
        world.tick()
    assert not world.store.exists(name)
    with pytest.raises(JournalDamagedError, match=r"segment 2 of .*it is missing, and later ones exist"):
        world.snapshot()
    world.store.put(name, lost)
    world.tick_until(lambda: world.snapshot().epoch == 2)


def test_segment_of_another_sweep_or_time_is_not_taken_for_the_journal(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    first, second = Journal(world.store, "chain", holder="a"), Journal(world.store, "fork", holder="a")
    for journal in (first, second):
        journal.append([{"type": "x"}])
        journal.append([{"type": "y"}])
    forged = world.store.get(journal_segment("fork", 1))
    world.store.put(journal_segment("chain", 1), forged)
    with pytest.raises(JournalDamagedError, match="its own sha256 does not match"):
        Journal(world.store, "chain").read_new()
    # Written by the same program under the same name, at another time: only the chain tells.
    content = b"\n".join(forged.split(b"\n"))
    document = json.loads(content.split(b"\n", 1)[0])
    del document["content_sha256"]
    plain = json.dumps(document).encode() + b"\n" + content.split(b"\n", 1)[1]
    world.store.put(journal_segment("chain", 1), seals.seal(journal_segment("chain", 1), plain))
    with pytest.raises(JournalDamagedError, match="another one than its header names"):
        Journal(world.store, "chain").read_new()


def test_journal_of_an_earlier_version_is_chained_from_its_last_segment_on(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    old = b'{"sequence": 0, "holder": "old", "nonce": "0"}\n{"type": "x"}\n'
    world.store.put(journal_segment("old", 0), old)
    Journal(world.store, "old", holder="new", next_sequence=1).append([{"type": "y"}])
    assert [event["type"] for event in Journal(world.store, "old").read_new()] == ["x", "y"]
    world.store.put(journal_segment("old", 0), old.replace(b'"x"', b'"z"'))
    with pytest.raises(JournalDamagedError, match=r"segment 1 .* another one than its header names"):
        Journal(world.store, "old").read_new()


def test_lease_that_was_put_back_gets_an_epoch_above_the_journals(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    yesterday = world.store.get(lease_name(CLUSTER))
    for _ in range(3):
        world.new_controller().tick()
    assert world.snapshot().epoch == 4
    world.store.put(lease_name(CLUSTER), yesterday)
    world.new_controller().tick()
    lease = read_lease(world.store, CLUSTER)
    assert lease is not None
    assert (lease.epoch, world.snapshot().epoch) == (5, 5)
    assert world.backend.epochs[-1] == 5


def test_lease_with_a_changed_number_is_refused(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    alter(world, lease_name(CLUSTER), b'"epoch": 1', b'"epoch": 7')
    with pytest.raises(ControllerError, match="its own sha256 does not match"):
        world.new_controller().tick()


def test_message_that_was_changed_is_refused_with_its_reason(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    message = client.set_priority(world.store, "sweep", 3, now=world.clock())
    alter(world, inbox_message("sweep", message), b'"priority": 3', b'"priority": 8')
    world.tick_until(lambda: message in world.snapshot().handled)
    assert "its own sha256 does not match" in world.snapshot().refusals[message]
    assert world.snapshot().priority is None


def test_pipe_in_the_inbox_is_refused_and_the_next_message_followed(tmp_path: Path) -> None:
    """Anybody who may write the store can put one there; opening it would wait for ever."""
    world = interrupted(tmp_path)
    message = client.set_priority(world.store, "sweep", 3, now=world.clock())
    os.mkfifo(tmp_path / inbox_message("sweep", "0-pipe"))
    world.tick_until(lambda: message in world.snapshot().handled)
    assert "named pipe" in world.snapshot().refusals["0-pipe"]
    assert world.store.list_children(inbox_folder("sweep")) == []


def test_submit_that_was_changed_is_named_and_starts_nothing(tmp_path: Path, caplog) -> None:
    """Whose cluster it was meant for is unknown, so that no journal can hold a refusal."""
    world = World(tmp_path)
    message = world.submit(make_job("dataset/tree"))
    alter(world, inbox_message("sweep", message), b'"cpus": 1.0', b'"cpus": 3.0')
    for _ in range(20):
        world.tick()
    assert world.launches() == []
    said = [record.getMessage() for record in caplog.records if message in record.getMessage()]
    assert len(said) == 1
    assert "submit the sweep again" in said[0]
    assert [finding.name for finding in check_documents(world.store)] == [inbox_message("sweep", message)]


@pytest.mark.parametrize("key", ["dataset-tree-0123456789abcdef", "index-tree-0123456789abcdef"])
def test_plan_with_a_key_of_another_identity_cannot_be_submitted(tmp_path: Path, key: str) -> None:
    world = World(tmp_path)
    tree = make_job("dataset/tree")
    with pytest.raises(ControllerError, match=r"dataset/tree does not belong to its identity|is none of a job"):
        world.submit(type(tree)(name=tree.name, kind=tree.kind, key=key, identity=tree.identity))


def test_fsck_restores_a_plan_and_does_without_a_snapshot(tmp_path: Path, capsys, monkeypatch) -> None:
    """The plan byte for byte, from the sweep's spec; it names a damage that it cannot repair, and fails for it."""
    monkeypatch.setattr(ledger, "SNAPSHOT_EVERY", 2)
    world, file = World(tmp_path / "store"), tmp_path / "sweep.yaml"
    file.write_bytes(filled(name="sweep"))
    loaded = load_all(str(file), Changes())
    plan = build_plan(loaded.sweep, store_uri=world.store.uri)
    world.last_message["sweep"] = client.submit(
        world.store, plan, loaded.canonical, CLUSTER, sender="ann", now=world.clock()
    )
    world.finish()
    name, before = plan_name("sweep", 1), world.store.get(plan_name("sweep", 1))
    truth = world.snapshot()
    world.store.put(name, before.replace(b'"kind": "dataset"', b'"kind": "datasex"', 1))
    for child in world.store.list_children(snapshots_folder("sweep")):
        world.store.put(f"{snapshots_folder('sweep')}{child}", b"damaged")
    found = run_command(capsys, "fsck", "--store", world.store.uri)
    assert found.code == 1
    assert f"altered  {name}" in found.out
    repaired = run_command(capsys, "fsck", "--repair", "--store", world.store.uri, "-o", "json")
    assert repaired.code == 0, repaired.message
    assert len(repaired.document["findings"]) == 3
    assert world.store.get(name) == before
    assert world.snapshot() == truth
    assert find_damage(world.store) == []
    alter(world, journal_segment("sweep", 1), b'"at_s": 1', b'"at_s": 2')
    left = run_command(capsys, "fsck", "--repair", "--store", world.store.uri)
    assert left.code == 1
    assert journal_segment("sweep", 1) in left.out


def test_sealed_document_is_found_damaged_at_every_byte_and_readable_by_earlier_versions() -> None:
    content = seals.seal("a/b.json", b'{"n": 1, "text": "x"}')
    assert json.loads(content) == {**json.loads(content), "n": 1, "text": "x"}
    assert seals.parse_sealed("a/b.json", content) == {"n": 1, "text": "x"}
    assert seals.parse_sealed("a/b.json", b'{"n": 1}') == {"n": 1}
    for place in range(len(content)):
        for bit in range(8):
            altered = bytearray(content)
            altered[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                seals.parse_sealed("a/b.json", bytes(altered))
    both = content.replace(b"_sha", b"?sha", 1)
    with pytest.raises(ValueError, match="sha256"):
        seals.check_seal("a/b.json", both[:30] + b"?" + both[31:])
    with pytest.raises(ValueError, match="sha256"):
        seals.parse_sealed("a/c.json", content)
    assert canonical_json(seals.parse_sealed("a/b.json", content))


def test_pipe_among_the_snapshots_is_done_without_and_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ledger, "SNAPSHOT_EVERY", 2)
    world = interrupted(tmp_path)
    truth = world.snapshot()
    name = f"{snapshots_folder('sweep')}99999999.jsonl"
    os.mkfifo(tmp_path / name)
    assert world.snapshot() == truth
    assert [finding.name for finding in find_damage(world.store)] == [name]


def test_controller_that_was_replaced_while_it_started_leaves_the_other_in_peace(tmp_path: Path, monkeypatch) -> None:
    """It sleeps between its lease and its journals; meanwhile another one starts."""
    world = interrupted(tmp_path)
    slept = Lease(world.store, CLUSTER, "sleeper", world.clock).acquire()
    sleeper, live = world.new_controller(), world.new_controller()
    live.tick()

    def acquired(lease: Lease, above: int = 0) -> int:
        assert not above, "it took an epoch above the live one's"
        lease.epoch, lease._renew_at_s = slept, world.clock() + 5.0
        return slept

    monkeypatch.setattr(Lease, "acquire", acquired)
    with pytest.raises(LeaseLostError, match="another controller has started"):
        sleeper.tick()
    live.tick()


def test_record_with_another_number_in_a_text_is_damaged() -> None:
    """The quick way to check its digest must not take text for numbers."""
    sealed = {"text": "torch 2, x", "epochs": 3.0}
    digest = sha256_hex(canonical_json(sealed))
    assert _fits(digest, sealed)
    assert not _fits(digest, {**sealed, "text": "torch 2.0, x"})
