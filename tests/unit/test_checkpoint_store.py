"""Checkpoints: committed by their manifest, verified on load, never fewer than one intact."""

import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from orchestrator.core.errors import CorruptObjectError, NoSpaceError, StorageTimeoutError
from orchestrator.retention.inventory import named_objects
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.local import LocalStore
from orchestrator.storage.pins import Pin, add_pin, pin_name
from orchestrator.testing.memory_store import MemoryStore
from tests.checkpoint_cases import (
    KEY,
    PARTS,
    Deaths,
    Errors,
    HookedStore,
    assert_equal,
    assert_whole,
    checkpoint_of,
    committed_steps,
    object_of,
    raise_interrupt,
    save_at_once,
)
from tests.shard_cases import CountingStore
from workloads.checkpoint.store import Checkpoint, CheckpointFolder
from workloads.runtime.manifest import Entry, decode_manifest, encode_manifest
from workloads.train.saver import NodeCopies

NUM_DAMAGES = 1000


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_checkpoint_none_saved_loads_nothing(store: LocalStore) -> None:
    assert CheckpointFolder(store, KEY).load_newest() is None


def test_checkpoint_saved_comes_back_exactly(store: LocalStore) -> None:
    save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(7))


def test_checkpoint_of_many_ranges_comes_back_exactly(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.storage.bulk._RANGE_BYTES", 1000)
    model = {f"layer{n}": torch.rand(n, 50) for n in range(40)}
    saved = Checkpoint(step=7, model=model, optimizer={}, state={})
    save_at_once(CheckpointFolder(store, KEY), saved)
    arrived: list[None] = []
    assert_equal(CheckpointFolder(store, KEY, arrived=lambda: arrived.append(None)).load_newest(), saved)
    assert len(arrived) > len(PARTS), "each range tells that the reading goes on"


def test_checkpoint_loaded_is_independent_of_the_store(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    save_at_once(folder, checkpoint_of(7))
    loaded = folder.load_newest()
    folder.delete_all()
    for step in (8, 9):
        save_at_once(folder, checkpoint_of(step))
    assert_equal(loaded, checkpoint_of(7))


def test_checkpoint_that_finds_no_space_leaves_nothing(tmp_path: Path) -> None:
    """Every retry would leave as much again, and only a collection a day later would free it."""
    store = HookedStore(tmp_path)
    store.before = Errors([NoSpaceError("full")], within="optimizer.safetensors")
    with pytest.raises(NoSpaceError):
        save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))
    assert list(store.list_objects(f"{checkpoints_folder(KEY)}/")) == []


def test_checkpoint_of_a_store_out_of_reach_asks_it_for_no_deletion(tmp_path: Path) -> None:
    """Each would wait for an answer as long again, and the end of the attempt with it."""
    store, error = HookedStore(tmp_path), Errors([StorageTimeoutError("no answer")], within="optimizer.safetensors")
    asked: list[str] = []

    def note(name: str) -> None:
        asked.append(name)
        error(name)

    store.before = note
    with pytest.raises(StorageTimeoutError):
        save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))
    assert [name.rpartition("/")[2] for name in asked] == ["model.safetensors", "optimizer.safetensors"]


def test_checkpoint_whose_manifest_may_be_there_keeps_its_parts(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    store.after = Errors([StorageTimeoutError("no answer")], within="manifest.json")
    with pytest.raises(StorageTimeoutError):
        save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(7))


def test_checkpoint_save_keeps_the_newest_two(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (8, 9, 10, 11):
        save_at_once(folder, checkpoint_of(step))
    assert committed_steps(store) == [10, 11]


def test_checkpoint_that_a_pin_names_outlives_later_ones_and_its_job(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    save_at_once(folder, checkpoint_of(8))
    (name,) = store.list_children(f"{checkpoints_folder(KEY)}/")
    add_pin(store, Pin(name="best", keys=(f"{KEY}/checkpoints/{name}",), created_at_s=0.0))
    store.put(pin_name("a"), b"damaged")  # which hides no other pin
    for step in (9, 10, 11):
        save_at_once(folder, checkpoint_of(step))
    assert committed_steps(store) == [8, 10, 11]
    folder.delete_all()
    assert committed_steps(store) == [8, 10, 11]
    store.delete(pin_name("a"))
    folder.delete_all()
    assert committed_steps(store) == [8]
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(8))


def test_checkpoints_stay_after_the_commit_while_a_pin_cannot_be_read(store: LocalStore) -> None:
    """Which ones it names is not known; and a training that is committed must not fail for it."""
    folder = CheckpointFolder(store, KEY)
    store.put(pin_name("best"), b"damaged")
    for step in (8, 9, 10):
        save_at_once(folder, checkpoint_of(step))
    folder.delete_all()
    assert committed_steps(store) == [9, 10]


def test_checkpoint_later_attempt_deletes_what_it_found(store: LocalStore) -> None:
    save_at_once(CheckpointFolder(store, KEY), checkpoint_of(9))
    later = CheckpointFolder(store, KEY)
    later.load_newest()
    for step in (10, 11):
        save_at_once(later, checkpoint_of(step))
    assert committed_steps(store) == [10, 11]


def test_checkpoint_of_another_live_attempt_is_left_alone(store: LocalStore) -> None:
    zombie, mine = CheckpointFolder(store, KEY), CheckpointFolder(store, KEY)
    save_at_once(mine, checkpoint_of(50))
    for step in (10, 11, 12):
        save_at_once(zombie, checkpoint_of(step))
    assert committed_steps(store) == [11, 12, 50]


@pytest.mark.parametrize("part", PARTS)
def test_checkpoint_damaged_part_falls_back_and_says_so(
    store: LocalStore, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        save_at_once(folder, checkpoint_of(step))
    name = object_of(store, 2, part)
    content = store.get(name)
    store.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(1))
    assert "000000000002-" in caplog.text
    assert part in caplog.text


def test_checkpoint_that_arrives_damaged_once_is_read_again() -> None:
    """Memory and networks flip bits, too: an intact checkpoint must not count as a broken one."""

    class Flipping(MemoryStore):
        num_flips = 1

        def get_range(self, name: str, start: int, length: int) -> bytes:
            content = super().get_range(name, start, length)
            if self.num_flips and name.endswith("model.safetensors"):
                self.num_flips -= 1
                return bytes([content[0] ^ 1]) + content[1:]
            return content

    store = Flipping()
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        save_at_once(folder, checkpoint_of(step))
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(2))
    assert store.num_flips == 0


def test_checkpoint_missing_part_falls_back(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        save_at_once(folder, checkpoint_of(step))
    store.delete(object_of(store, 2, "model.safetensors"))
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(1))


def test_checkpoint_random_damages_are_all_detected(caplog: pytest.LogCaptureFixture) -> None:
    store, choice = MemoryStore(), random.Random(1)  # noqa: S311 - the same damages every time
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        save_at_once(folder, checkpoint_of(step))
    contents = {part: store.get(object_of(store, 2, part)) for part in PARTS}
    caplog.set_level(logging.CRITICAL)
    for number in range(NUM_DAMAGES):
        part = choice.choice(PARTS)
        name = object_of(store, 2, part)
        store.put(name, _damaged(contents[part], choice))
        found = CheckpointFolder(store, KEY).load_newest()
        assert found is not None, (number, part)
        assert found.step == 1, (number, part)
        store.put(name, contents[part])
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(2))


def _damaged(content: bytes, choice: random.Random) -> bytes:
    """One bit flipped, or cut short, or with another byte at its end."""
    match choice.randrange(4):
        case 0:
            return content[: choice.randrange(len(content))]
        case 1:
            return content + choice.randbytes(1)
        case _:
            place, bit = choice.randrange(len(content)), choice.randrange(8)
            return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"7",
        b"\xff",
        b'{"version": 2}',
        b'{"version": 2, "step": 1, "objects": []}',
        b'{"version": 2, "step": 1, "objects": {"model.safetensors": {}}}',
        b'{"version": 2, "step": 1, "objects": {}}',
    ],
)
def test_manifest_not_one_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="manifest"):
        decode_manifest(content)


def test_manifest_of_another_version_is_refused_by_its_number() -> None:
    content = encode_manifest(3, {"model.safetensors": Entry.of(b"x")})
    document = {**json.loads(content), "version": 99}
    with pytest.raises(CorruptObjectError, match="version 99"):
        decode_manifest(json.dumps(document).encode())


def test_manifest_written_otherwise_is_refused_although_it_means_the_same() -> None:
    content = encode_manifest(3, {"model.safetensors": Entry.of(b"x")})
    assert decode_manifest(content) == {"model.safetensors": Entry.of(b"x")}
    with pytest.raises(CorruptObjectError, match="not as it was written"):
        decode_manifest(content.replace(b"\n", b" "))


def test_manifest_names_what_lies_in_the_store(store: LocalStore) -> None:
    save_at_once(CheckpointFolder(store, KEY), checkpoint_of(3))
    manifest = object_of(store, 3, "manifest.json")
    named = named_objects(manifest, store.get(manifest))
    assert {Path(name).name for name in named} == {*PARTS} - {"manifest.json"}
    for name, entry in named.items():
        content = store.get(name)
        assert (len(content), sha256(content).hexdigest()) == (entry.size_bytes, entry.sha256)


def test_checkpoint_damaged_one_is_deleted_before_intact_ones(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        save_at_once(folder, checkpoint_of(step))
    store.put(object_of(store, 2, "state.json"), b"{}")
    later = CheckpointFolder(store, KEY)
    later.load_newest()
    save_at_once(later, checkpoint_of(3))
    assert committed_steps(store) == [1, 3]


def test_checkpoint_crash_at_any_change_leaves_an_intact_one(tmp_path: Path) -> None:
    for changes in range(100):
        root = tmp_path / str(changes)
        folder = CheckpointFolder(LocalStore(root), KEY)
        for step in (1, 2):
            save_at_once(folder, checkpoint_of(step))
        store = HookedStore(root)
        dying = CheckpointFolder(store, KEY)
        dying.load_newest()
        store.before = Deaths(changes, raise_interrupt)
        try:
            save_at_once(dying, checkpoint_of(3))
        except KeyboardInterrupt:
            found = CheckpointFolder(LocalStore(root), KEY).load_newest()
            assert found is not None
            assert_equal(found, checkpoint_of(found.step))
            assert found.step in {2, 3}
            assert_whole(LocalStore(root))
        else:
            assert changes == 8  # three parts and the manifest, then the oldest one's four objects
            return
    pytest.fail("saving never ended")


def test_checkpoint_delete_all_leaves_nothing(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        save_at_once(folder, checkpoint_of(step))
    folder.delete_all()
    assert list(store.list_objects(f"{checkpoints_folder(KEY)}/")) == []
    assert CheckpointFolder(store, KEY).load_newest() is None


def test_checkpoint_that_ranks_of_a_node_load_travels_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "store")
    save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))

    def load(copies: NodeCopies | None) -> Checkpoint | None:
        return CheckpointFolder(store, KEY, copy=copies.copy if copies else None).load_newest()

    load(None)
    once, ranks = len(store.ranges), [NodeCopies(store, tmp_path / "cache") for _ in range(4)]
    store.ranges.clear()
    with ThreadPoolExecutor(4) as pool:
        for loaded in pool.map(load, ranks):
            assert_equal(loaded, checkpoint_of(7))
    assert len(store.ranges) == once
    for copies in ranks:
        copies.discard()
    assert list((tmp_path / "cache" / "objects").iterdir()) == []


def test_checkpoint_is_read_past_a_cache_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CACHE_BYTES", "10")
    store = LocalStore(tmp_path / "store")
    save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))
    copies = NodeCopies(store, tmp_path / "cache")
    assert_equal(CheckpointFolder(store, KEY, copy=copies.copy).load_newest(), checkpoint_of(7))


def test_checkpoint_damaged_in_the_cache_of_the_node_is_read_from_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    save_at_once(CheckpointFolder(store, KEY), checkpoint_of(7))
    ranks = [NodeCopies(store, tmp_path / "cache") for _ in range(2)]
    assert_equal(CheckpointFolder(store, KEY, copy=ranks[0].copy).load_newest(), checkpoint_of(7))
    for file in (tmp_path / "cache" / "objects").iterdir():
        file.chmod(0o600)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert_equal(CheckpointFolder(store, KEY, copy=ranks[1].copy).load_newest(), checkpoint_of(7))
