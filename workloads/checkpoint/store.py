"""Checkpoints in the object store: ``<step>-<nonce>/`` folders, each committed by its ``manifest.json``.

A checkpoint exists once its manifest does; the manifest names every object with its size and sha256. Loading verifies
all of it and falls back to the next older one that is intact.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch import Tensor

from orchestrator.errors import CorruptObjectError, NotFoundError
from orchestrator.storage import ObjectStore
from orchestrator.storage.layout import checkpoints_folder
from workloads.models.weights import decode_tensors, encode_tensors

_LOG = logging.getLogger(__name__)
_KEPT = 2
_MANIFEST = "manifest.json"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All state of a run after ``step`` updates; ``state`` is plain JSON."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]


class CheckpointFolder:
    """The checkpoints of one job, as one attempt sees them."""

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
        name = f"{checkpoint.step:012d}-{secrets.token_hex(8)}"
        contents = {
            "model.safetensors": encode_tensors(checkpoint.model),
            "optimizer.safetensors": encode_tensors(checkpoint.optimizer),
            "state.json": json.dumps({"step": checkpoint.step, **checkpoint.state}, allow_nan=False).encode(),
        }
        for part, content in contents.items():
            self._store.put(f"{self._root}/{name}/{part}", content)
        # Every part is durable before the manifest names it: a crash before this line leaves a folder that no reader
        # takes for a checkpoint.
        self._store.put(f"{self._root}/{name}/{_MANIFEST}", _manifest(checkpoint.step, contents))
        self._mine.append(name)
        # Older ones go only now that a newer one is committed: at every moment one intact checkpoint exists.
        for old in self._mine[:-_KEPT]:
            self._delete(old)
        self._mine = self._mine[-_KEPT:]

    def delete_all(self) -> None:
        """Delete every checkpoint of the job; call it only once the job's record is committed."""
        for name in self._names():
            self._delete(name)

    def _names(self) -> list[str]:
        return sorted(self._store.list_children(f"{self._root}/"), key=_step_of)

    def _load(self, name: str) -> Checkpoint:
        manifest = self._read_manifest(name)
        contents = {part: self._read_verified(name, part, entry) for part, entry in manifest["objects"].items()}
        state = json.loads(contents["state.json"])
        return Checkpoint(
            step=state.pop("step"),
            model=decode_tensors(contents["model.safetensors"]),
            optimizer=decode_tensors(contents["optimizer.safetensors"]),
            state=state,
        )

    def _read_manifest(self, name: str) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self._store.get(f"{self._root}/{name}/{_MANIFEST}"))
        except ValueError as error:
            raise CorruptObjectError(f"{name}/{_MANIFEST} is no JSON: {error}") from error
        if manifest.get("version") != _VERSION:
            raise CorruptObjectError(f"{name}/{_MANIFEST} has version {manifest.get('version')}, known is {_VERSION}")
        return manifest

    def _read_verified(self, name: str, part: str, entry: Mapping[str, Any]) -> bytes:
        content = self._store.get(f"{self._root}/{name}/{part}")
        if (len(content), sha256(content).hexdigest()) != (entry["size_bytes"], entry["sha256"]):
            message = (
                f"{name}/{part} has {len(content)} bytes that are not the {entry['size_bytes']} its manifest names"
            )
            raise CorruptObjectError(message)
        return content

    def _delete(self, name: str) -> None:
        # The manifest goes first: a crash in between leaves a folder without one, not a checkpoint with holes.
        self._store.delete(f"{self._root}/{name}/{_MANIFEST}")
        for stat in list(self._store.list_objects(f"{self._root}/{name}/")):
            self._store.delete(stat.name)


def _manifest(step: int, contents: Mapping[str, bytes]) -> bytes:
    objects = {part: {"size_bytes": len(c), "sha256": sha256(c).hexdigest()} for part, c in contents.items()}
    return json.dumps({"version": _VERSION, "step": step, "objects": objects}, indent=1).encode()


def _step_of(name: str) -> tuple[int, str]:
    step, _, nonce = name.partition("-")
    return (int(step) if step.isdigit() else -1), nonce
