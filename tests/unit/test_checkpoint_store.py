"""Checkpoints: committed by their manifest, verified on load, never fewer than one intact."""

import logging
from pathlib import Path

import pytest
import torch

from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from workloads.checkpoint.store import Checkpoint, CheckpointFolder

KEY = "pretrain-a-0123456789abcdef"


class CrashingStore(LocalStore):
    """A store whose owner dies at its n-th change."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self.changes_left = changes

    def put(self, name: str, content: bytes) -> ObjectStat:
        self._live_on()
        return super().put(name, content)

    def delete(self, name: str) -> None:
        self._live_on()
        super().delete(name)

    def _live_on(self) -> None:
        if not self.changes_left:
            raise KeyboardInterrupt
        self.changes_left -= 1


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def _checkpoint(step: int) -> Checkpoint:
    model = {"layer.weight": torch.full((2, 3), float(step)), "counter": torch.tensor(step)}
    state = {"best": 0.1 + 0.2 * step}
    return Checkpoint(step=step, model=model, optimizer={"exp_avg/layer.weight": torch.ones(2, 3)}, state=state)


def _assert_equal(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert (found.step, found.state) == (expected.step, expected.state)
    for mine, theirs in ((found.model, expected.model), (found.optimizer, expected.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def _manifests(store: LocalStore) -> list[int]:
    stats = store.list_objects(f"{checkpoints_folder(KEY)}/")
    return sorted(int(Path(s.name).parent.name.partition("-")[0]) for s in stats if s.name.endswith("manifest.json"))


def _object(store: LocalStore, step: int, part: str) -> str:
    stats = store.list_objects(f"{checkpoints_folder(KEY)}/{step:012d}-")
    return next(stat.name for stat in stats if stat.name.endswith(part))


def test_checkpoint_none_saved_loads_nothing(store: LocalStore) -> None:
    assert CheckpointFolder(store, KEY).load_newest() is None


def test_checkpoint_saved_comes_back_exactly(store: LocalStore) -> None:
    CheckpointFolder(store, KEY).save(_checkpoint(7))
    _assert_equal(CheckpointFolder(store, KEY).load_newest(), _checkpoint(7))


def test_checkpoint_save_keeps_the_newest_two(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (8, 9, 10, 11):
        folder.save(_checkpoint(step))
    assert _manifests(store) == [10, 11]


def test_checkpoint_later_attempt_deletes_what_it_found(store: LocalStore) -> None:
    CheckpointFolder(store, KEY).save(_checkpoint(9))
    later = CheckpointFolder(store, KEY)
    later.load_newest()
    for step in (10, 11):
        later.save(_checkpoint(step))
    assert _manifests(store) == [10, 11]


def test_checkpoint_of_another_live_attempt_is_left_alone(store: LocalStore) -> None:
    zombie, mine = CheckpointFolder(store, KEY), CheckpointFolder(store, KEY)
    mine.save(_checkpoint(50))
    for step in (10, 11, 12):
        zombie.save(_checkpoint(step))
    assert _manifests(store) == [11, 12, 50]


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_checkpoint_damaged_part_falls_back_and_says_so(
    store: LocalStore, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        folder.save(_checkpoint(step))
    name = _object(store, 2, part)
    content = store.get(name)
    store.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        _assert_equal(CheckpointFolder(store, KEY).load_newest(), _checkpoint(1))
    assert "000000000002-" in caplog.text
    assert part in caplog.text


def test_checkpoint_missing_part_falls_back(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        folder.save(_checkpoint(step))
    store.delete(_object(store, 2, "model.safetensors"))
    _assert_equal(CheckpointFolder(store, KEY).load_newest(), _checkpoint(1))


def test_checkpoint_damaged_one_is_deleted_before_intact_ones(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        folder.save(_checkpoint(step))
    store.put(_object(store, 2, "state.json"), b"{}")
    later = CheckpointFolder(store, KEY)
    later.load_newest()
    later.save(_checkpoint(3))
    assert _manifests(store) == [1, 3]


def test_checkpoint_crash_at_any_change_leaves_an_intact_one(tmp_path: Path) -> None:
    for changes in range(100):
        root = tmp_path / str(changes)
        folder = CheckpointFolder(LocalStore(root), KEY)
        for step in (1, 2):
            folder.save(_checkpoint(step))
        dying = CheckpointFolder(CrashingStore(root, changes), KEY)
        dying.load_newest()
        try:
            dying.save(_checkpoint(3))
        except KeyboardInterrupt:
            found = CheckpointFolder(LocalStore(root), KEY).load_newest()
            assert found is not None
            _assert_equal(found, _checkpoint(found.step))
            assert found.step in {2, 3}
        else:
            assert changes > 4
            return
    pytest.fail("saving never ended")


def test_checkpoint_delete_all_leaves_nothing(store: LocalStore) -> None:
    folder = CheckpointFolder(store, KEY)
    for step in (1, 2):
        folder.save(_checkpoint(step))
    folder.delete_all()
    assert list(store.list_objects(f"{checkpoints_folder(KEY)}/")) == []
    assert CheckpointFolder(store, KEY).load_newest() is None
