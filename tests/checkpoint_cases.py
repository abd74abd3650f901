"""Small checkpoints, and stores that trouble whoever writes them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event

import torch

from orchestrator.core.errors import StorageError
from orchestrator.retention.inventory import named_objects
from orchestrator.storage import ObjectStore
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from workloads.checkpoint.snapshot import Snapshot
from workloads.checkpoint.store import Checkpoint, CheckpointFolder

KEY = "pretrain-a-0123456789abcdef"
PARTS = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def checkpoint_of(step: int) -> Checkpoint:
    model = {"layer.weight": torch.full((2, 3), float(step)), "counter": torch.tensor(step)}
    state = {"best": 0.1 + 0.2 * step}
    return Checkpoint(step=step, model=model, optimizer={"exp_avg/layer.weight": torch.ones(2, 3)}, state=state)


def save_at_once(folder: CheckpointFolder, checkpoint: Checkpoint) -> None:
    """Write and commit a checkpoint, without a writer in the background."""
    with closing(Snapshot()) as snapshot:
        snapshot.fit(checkpoint)
        snapshot.take(checkpoint)
        folder.commit(snapshot)


def assert_equal(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert (found.step, found.state) == (expected.step, expected.state)
    for mine, theirs in ((found.model, expected.model), (found.optimizer, expected.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert all(mine[name].dtype == theirs[name].dtype for name in theirs)


def assert_whole(store: ObjectStore) -> None:
    """Whatever has a manifest has all its parts."""
    manifests = [s.name for s in store.list_objects(f"{checkpoints_folder(KEY)}/") if s.name.endswith("manifest.json")]
    for manifest in manifests:
        assert [name for name in named_objects(manifest, store.get(manifest)) if not store.exists(name)] == []


def committed_steps(store: ObjectStore, key: str = KEY) -> list[int]:
    stats = store.list_objects(f"{checkpoints_folder(key)}/")
    return sorted(int(Path(s.name).parent.name.partition("-")[0]) for s in stats if s.name.endswith("manifest.json"))


def object_of(store: ObjectStore, step: int, part: str) -> str:
    stats = store.list_objects(f"{checkpoints_folder(KEY)}/{step:012d}-")
    return next(stat.name for stat in stats if stat.name.endswith(part))


class HookedStore(LocalStore):
    """Calls ``before`` and ``after`` with the name of each change; what they raise, the change raises."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[str], object] = lambda _: None
        self.after: Callable[[str], object] = lambda _: None

    def put(self, name: str, content: bytes) -> ObjectStat:
        self.before(name)
        stat = super().put(name, content)
        self.after(name)
        return stat

    def put_file(self, name: str, path: Path) -> ObjectStat:
        self.before(name)
        stat = super().put_file(name, path)
        self.after(name)
        return stat

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        self.before(name)
        stat = super().put_if_match(name, content, etag)
        self.after(name)
        return stat

    def delete(self, name: str) -> None:
        self.before(name)
        super().delete(name)
        self.after(name)


class Errors:
    """Raises the next of some errors at each call whose name has ``within``, and then no more."""

    def __init__(self, errors: Sequence[StorageError], within: str = "") -> None:
        self.left = list(errors)
        self._within = within

    def __call__(self, name: str) -> None:
        if self.left and self._within in name:
            raise self.left.pop(0)


class FirstTries:
    """Every name that has ``within`` fails at its first time, with the errors in turn."""

    def __init__(self, errors: Sequence[StorageError], within: str = "") -> None:
        self._errors, self._within = itertools.cycle(errors), within
        self.failed: set[str] = set()

    def __call__(self, name: str) -> None:
        if self._within in name and name not in self.failed:
            self.failed.add(name)
            raise next(self._errors)


class Gate:
    """Holds whoever calls it with a name that has ``within`` until it is opened."""

    def __init__(self, within: str = "") -> None:
        self._within = within
        self.reached, self._is_open = Event(), Event()

    def __call__(self, name: str) -> None:
        if self._within in name:
            self.reached.set()
            assert self._is_open.wait(60)

    def open(self) -> None:
        self._is_open.set()


class Deaths:
    """``die`` is called at the n-th call, from 0."""

    def __init__(self, calls: int, die: Callable[[], None]) -> None:
        self._calls_left, self._die = calls, die

    def __call__(self, _: str) -> None:
        if not self._calls_left:
            self._die()
        self._calls_left -= 1


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def kill_this() -> None:
    """As the kernel does: nothing runs after it."""
    os.kill(os.getpid(), signal.SIGKILL)


def resident_bytes() -> int:
    """Memory of this process apart from files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
