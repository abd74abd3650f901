"""Checkpoints in the object store: ``<step>-<nonce>/`` folders, each committed by its ``manifest.json``.

A checkpoint exists once its manifest does; the manifest names every object with its size and sha256. Loading verifies
all of it and falls back to the next older one that is intact.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from orchestrator.errors import CorruptObjectError, NotFoundError, StorageError
from orchestrator.storage import ObjectStore
from orchestrator.storage.layout import checkpoints_folder
from workloads.checkpoint.host import HostFile
from workloads.checkpoint.manifest import Entry, decode_manifest, encode_manifest
from workloads.checkpoint.snapshot import MODEL, OPTIMIZER, STATE, Checkpoint, Snapshot

__all__ = ["Checkpoint", "CheckpointFolder"]

_LOG = logging.getLogger(__name__)
_KEPT = 2
_MANIFEST = "manifest.json"
_RANGE_BYTES = 4 * 1024**2
_NUM_RANGES = 4

Write = Callable[[], object]


def _once(write: Write) -> None:
    write()


class CheckpointFolder:
    """The checkpoints of one job, as one attempt sees them. For one thread at a time."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._root = checkpoints_folder(key)
        self._mine: list[str] = []
        """Folders that this attempt found or wrote, oldest first: the only ones it may delete."""

    def load_newest(self) -> Checkpoint | None:
        """The newest intact checkpoint, or None. Says in the log which ones it had to skip, and why."""
        found = [name for name in self._names() if self._store.exists(f"{self._root}/{name}/{_MANIFEST}")]
        broken: list[str] = []
        loaded: Checkpoint | None = None
        for name in reversed(found):
            try:
                loaded = self._load(name)
                break
            except (CorruptObjectError, NotFoundError) as error:
                _LOG.warning("checkpoint %s of %s is skipped, the next older one is tried: %s", name, self._root, error)
                broken.append(name)
        # Broken ones come first, so that they are the first to be deleted.
        self._mine = broken + [name for name in found if name not in broken]
        return loaded

    def save(self, checkpoint: Checkpoint) -> None:
        """Write and commit a checkpoint, then delete what it makes superfluous."""
        with closing(Snapshot()) as snapshot:
            snapshot.fit(checkpoint)
            snapshot.take(checkpoint)
            self.commit(snapshot)

    def commit(
        self,
        snapshot: Snapshot,
        *,
        before: Mapping[str, bytes] | None = None,
        persist: Callable[[Write], None] = _once,
    ) -> None:
        """Write and commit what a snapshot holds, then delete what it makes superfluous.

        ``before`` are other objects, by full name, that are durable before this checkpoint exists. ``persist`` makes
        each write; it may repeat it.

        Raises:
            StorageError: a write failed; the checkpoint does not exist, or its manifest's acknowledgement was lost.
        """
        name = f"{snapshot.step:012d}-{secrets.token_hex(8)}"
        folder = f"{self._root}/{name}"
        snapshot.wait()
        # Whoever resumes from this checkpoint never writes these again.
        for other, content in (before or {}).items():
            persist(partial(self._store.put, other, content))
        objects = {}
        for part, file in snapshot.files.items():
            objects[part] = Entry.of(file.view)
            persist(partial(self._store.put_file, f"{folder}/{part}", file.path))
        objects[STATE] = Entry.of(snapshot.document)
        persist(partial(self._store.put, f"{folder}/{STATE}", snapshot.document))
        # Every part is durable before the manifest names it: a crash before this line leaves a folder that no reader
        # takes for a checkpoint.
        persist(partial(self._store.put, f"{folder}/{_MANIFEST}", encode_manifest(snapshot.step, objects)))
        self._mine.append(name)
        # Older ones go only now that a newer one is committed: at every moment one intact checkpoint exists.
        self._delete_superfluous()

    def delete_all(self) -> None:
        """Delete every checkpoint of the job; call it only once the job's record is committed."""
        for name in self._names():
            self._delete(name)

    def _names(self) -> list[str]:
        return sorted(self._store.list_children(f"{self._root}/"), key=_step_of)

    def _load(self, name: str) -> Checkpoint:
        try:
            objects = decode_manifest(self._store.get(f"{self._root}/{name}/{_MANIFEST}"))
        except CorruptObjectError as error:
            raise CorruptObjectError(f"{name}/{_MANIFEST}: {error}") from error
        state: dict[str, Any] = json.loads(self._read_verified(name, STATE, objects[STATE]).view.tobytes())
        model, optimizer = (_tensors_of(self._read_verified(name, part, objects[part])) for part in (MODEL, OPTIMIZER))
        return Checkpoint(step=state.pop("step"), model=model, optimizer=optimizer, state=state)

    def _read_verified(self, name: str, part: str, entry: Entry) -> HostFile:
        full_name = f"{self._root}/{name}/{part}"
        size_bytes = self._store.stat(full_name).size_bytes
        if size_bytes != entry.size_bytes:
            message = f"{name}/{part} has {size_bytes} bytes, its manifest names {entry.size_bytes}"
            raise CorruptObjectError(message)
        file = self._read(full_name, size_bytes)
        found = Entry.of(file.view)
        if found != entry:
            message = f"{name}/{part} has sha256 {found.sha256[:12]}..., its manifest names {entry.sha256[:12]}..."
            raise CorruptObjectError(message)
        return file

    def _read(self, name: str, size_bytes: int) -> HostFile:
        """Read an object in parallel ranges, straight to where its tensors will stay."""
        file = HostFile(size_bytes)

        def fetch(start: int) -> None:
            content = self._store.get_range(name, start, min(_RANGE_BYTES, size_bytes - start))
            file.view[start : start + len(content)] = content  # a shorter answer leaves zeros: the sha256 tells

        starts = range(0, size_bytes, _RANGE_BYTES)
        if len(starts) == 1:
            fetch(0)
            return file
        with ThreadPoolExecutor(_NUM_RANGES, thread_name_prefix="checkpoint-read") as pool:
            list(pool.map(fetch, starts))
        return file

    def _delete_superfluous(self) -> None:
        try:
            while len(self._mine) > _KEPT:
                self._delete(self._mine[0])
                del self._mine[0]
        except StorageError as error:
            # The checkpoint is committed, so this harms nothing; the next save tries again.
            _LOG.warning("superfluous checkpoint %s of %s stays for now: %s", self._mine[0], self._root, error)

    def _delete(self, name: str) -> None:
        # The manifest goes first: a crash in between leaves a folder without one, not a checkpoint with holes.
        self._store.delete(f"{self._root}/{name}/{_MANIFEST}")
        for stat in list(self._store.list_objects(f"{self._root}/{name}/")):
            self._store.delete(stat.name)


def _tensors_of(file: HostFile) -> dict[str, Tensor]:
    """Tensors that lie where the file does; they outlive it."""
    with closing(file):
        tensors: dict[str, Tensor] = load_file(file.path)
    return tensors


def _step_of(name: str) -> tuple[int, str]:
    step, _, nonce = name.partition("-")
    return (int(step) if step.isdigit() else -1), nonce
