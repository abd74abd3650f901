"""Checkpoints in the object store: ``<step>-<nonce>/`` folders, each committed by its ``manifest.json``.

A checkpoint exists once its manifest does; the manifest names every object with its size and sha256. Loading verifies
all of it and falls back to the next older one that is intact. The newest few are kept, those that a run keeps for its
artifact (``workloads.checkpoint.retention``), and those that a pin names.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from functools import partial
from itertools import takewhile
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from orchestrator.core.errors import (
    OUTAGES,
    CorruptObjectError,
    NotFoundError,
    StorageError,
)
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import once
from orchestrator.storage.bulk import fetch
from orchestrator.storage.digests import Digests
from orchestrator.storage.layout import attempts_folder, checkpoint_name, checkpoints_folder
from orchestrator.storage.pins import read_pins
from workloads.checkpoint.retention import KEPT, Kept, kept_steps
from workloads.checkpoint.snapshot import MODEL, OPTIMIZER, STATE, Checkpoint, HostFile, Snapshot
from workloads.runtime.manifest import MANIFEST, Entry, decode_manifest, encode_manifest

__all__ = ["Checkpoint", "CheckpointFolder"]

_LOG = logging.getLogger(__name__)
_KEEP_LAST = 2

Write = Callable[[], object]
Copy = Callable[[str, int, Digests, int], bool]
"""Writes the object of this name, size and content into an open file, verified; False: read it from the store."""


def _nothing() -> None:
    return None


class CheckpointFolder:
    """The checkpoints of one job, as one attempt sees them. For one thread at a time.

    The newest ``keep_last`` stay. ``attempt_number`` is the attempt's own; 0 = it has none, and is alone. ``copy`` is a
    nearer source than the store. ``arrived`` is called for each piece that is read from the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        *,
        keep_last: int = _KEEP_LAST,
        attempt_number: int = 0,
        copy: Copy | None = None,
        arrived: Callable[[], None] = _nothing,
    ) -> None:
        self._copy, self._arrived = copy, arrived
        self._store = store
        self._key = key
        self._root = checkpoints_folder(key)
        self._keep_last = keep_last
        self._attempt_number = attempt_number
        self._mine: list[str] = []
        """Folders that this attempt found or wrote, oldest first: the only ones it may delete."""
        self._kept: dict[str, set[int]] = {}
        """Steps that the state of a checkpoint names as kept, by its folder."""
        self._once_kept: set[int] = set()

    def load_newest(self) -> Checkpoint | None:
        """The newest intact checkpoint, or None. Says in the log which ones it had to skip, and why."""
        found = [name for name in self._names() if self._store.exists(f"{self._root}/{name}/{MANIFEST}")]
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
        if loaded is not None:
            self._remember_kept(self._mine[-1], loaded.state)
            for name in self._mine[len(broken) : -1] if self._once_kept else ():
                self._remember_kept(name, self._read_state(name))
        return loaded

    def newest_name(self) -> str | None:
        """Name of the checkpoint that ``load_newest`` returned, or of the newest one written since."""
        return self._mine[-1] if self._mine and self._mine[-1] in self._kept else None

    def load_named(self, name: str) -> Checkpoint:
        """The checkpoint of this name, as another rank found it.

        Raises:
            CorruptObjectError, NotFoundError: it is damaged or gone.
        """
        return self._load(name)

    def load_at_most(self, step: int) -> Checkpoint | None:
        """The newest intact checkpoint of this step or an earlier one, among those that this attempt knows.

        A kept one may be so old that what it names itself is deleted; it is skipped, too.
        """
        steps = {_step_of(name)[0] for name in self._mine}
        for name in reversed([name for name in self._mine if _step_of(name)[0] <= step]):
            try:
                loaded = self._load(name)
                if kept_steps(loaded.state) <= steps:
                    return loaded
                error: StorageError = NotFoundError("checkpoints that it names are deleted")
            except (CorruptObjectError, NotFoundError) as caught:
                error = caught
            _LOG.warning("checkpoint %s of %s is skipped, the next older one is tried: %s", name, self._root, error)
        return None

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, and of this one all but the last, which the run wrote as it went back.

        Nothing may be in flight.
        """
        here = [name for name in self._mine if _step_of(name)[0] == step]
        gone = [name for name in self._mine if _step_of(name)[0] > step] + here[:-1]
        if gone and not self._has_successor():
            self._drop(gone)

    def load_kept(self, kept: Kept) -> Checkpoint:
        """The checkpoint that a run keeps of a step.

        Raises:
            StorageError: none of that step is left and intact, and says so itself that it is of that evaluation.
        """
        reasons = []
        for name in reversed(self._mine):
            if _step_of(name)[0] != kept.step:
                continue
            try:
                checkpoint = self._load(name)
            except (CorruptObjectError, NotFoundError) as error:
                reasons.append(str(error))
                continue
            # Another attempt, under other numerics, may have come to other weights at this step.
            if kept.to_json() in checkpoint.state.get(KEPT, ()):
                return checkpoint
            reasons.append(f"{name} is of another evaluation")
        message = (
            f"the checkpoint of step {kept.step} of {self._key}, which its artifact is to hold, is lost: "
            f"{'; '.join(reasons) or 'there is none'}; run fsck, delete {self._root} and submit again to train anew"
        )
        raise StorageError(message)

    def commit(
        self,
        snapshot: Snapshot,
        *,
        before: Mapping[str, bytes] | None = None,
        protected: AbstractSet[int] = frozenset(),
        persist: Callable[[Write], None] = once,
    ) -> None:
        """Write and commit what a snapshot holds, then delete what it makes superfluous.

        ``before`` are other objects, by full name, that are durable before this checkpoint exists. ``protected`` are
        steps whose checkpoints stay. ``persist`` makes each write; it may repeat it.

        Raises:
            StorageError: a write failed; the checkpoint does not exist, or its manifest's acknowledgement was lost. If
                the manifest's write was not reached, the parts are deleted, as far as the store answers and allows it.
        """
        name = checkpoint_name(snapshot.step, secrets.token_hex(8))
        folder = f"{self._root}/{name}"
        snapshot.wait()
        # Whoever resumes from this checkpoint never writes these again.
        for other, content in (before or {}).items():
            persist(partial(self._store.put, other, content))
        try:
            objects = self._write_parts(folder, snapshot, persist)
        except OUTAGES:
            raise  # a deletion would wait for the store as long again, and the end of the attempt with it
        except Exception:
            # Each retry writes another folder: what is left of all of them would fill a store that is short of space.
            with suppress(StorageError):
                for part in (*snapshot.files, STATE):
                    self._store.delete(f"{folder}/{part}")
            raise
        # Every part is durable before the manifest names it: a crash before this line leaves a folder that no reader
        # takes for a checkpoint. From here on nothing of it is deleted: the manifest may be there in spite of an error.
        persist(partial(self._store.put, f"{folder}/{MANIFEST}", encode_manifest(snapshot.step, objects)))
        self._mine.append(name)
        self._remember_kept(name, json.loads(snapshot.document))
        # Older ones go only now that a newer one is committed: at every moment one intact checkpoint exists.
        self._delete_superfluous(protected)

    def _write_parts(self, folder: str, snapshot: Snapshot, persist: Callable[[Write], None]) -> dict[str, Entry]:
        objects = {}
        for part, file in snapshot.files.items():
            objects[part] = Entry.of(file.view)
            persist(partial(self._store.put_file, f"{folder}/{part}", file.path))
        objects[STATE] = Entry.of(snapshot.document)
        persist(partial(self._store.put, f"{folder}/{STATE}", snapshot.document))
        return objects

    def delete_all(self) -> None:
        """Delete the job's checkpoints but those that are pinned; call it only once the job's record is committed."""
        damaged: list[CorruptObjectError] = []
        pinned = self._pinned(damaged)
        if damaged:
            _LOG.warning("which checkpoints of %s are pinned is not known: %s", self._root, damaged[0])
            return
        for name in self._names():
            if name not in pinned:
                self._delete(name)

    def _pinned(self, damaged: list[CorruptObjectError]) -> set[str]:
        """Checkpoints of the job that a pin names; ``damaged`` gets an entry for each pin that cannot be read."""
        pins = read_pins(self._store, on_damaged=damaged.append)
        names = [reference.partition("/checkpoints/") for pin in pins for reference in pin.keys]
        return {name for key, _, name in names if key == self._key}

    def _names(self) -> list[str]:
        return sorted(self._store.list_children(f"{self._root}/"), key=_step_of)

    def _load(self, name: str) -> Checkpoint:
        try:
            objects = decode_manifest(self._store.get(f"{self._root}/{name}/{MANIFEST}"))
        except CorruptObjectError as error:
            raise CorruptObjectError(f"{name}/{MANIFEST}: {error}") from error
        state: dict[str, Any] = json.loads(self._read_verified(name, STATE, objects[STATE]).view.tobytes())
        model, optimizer = (_tensors_of(self._read_verified(name, part, objects[part])) for part in (MODEL, OPTIMIZER))
        return Checkpoint(step=state.pop("step"), model=model, optimizer=optimizer, state=state)

    def _read_verified(self, name: str, part: str, entry: Entry) -> HostFile:
        """Read an object straight to where its tensors will stay; again if it arrives damaged."""
        file = HostFile(entry.size_bytes)
        try:
            digests, place = entry.digests, f"{self._root}/{name}/{part}"
            size_bytes, algorithm = entry.size_bytes, digests.algorithm
            if self._copy is not None and self._copy(place, size_bytes, digests, file.descriptor):
                return file
            for is_last in (False, True):
                found = fetch(
                    self._store,
                    place,
                    file.descriptor,
                    size_bytes=size_bytes,
                    algorithm=algorithm,
                    arrived=lambda _: self._arrived(),
                )
                if digests.match(found):
                    break
                message = (
                    f"{name}/{part} has {algorithm} {found[:12]}..., its manifest names {digests.expected[:12]}..."
                )
                if is_last:
                    raise CorruptObjectError(message)
                _LOG.warning("%s; it is read again", message)
        except BaseException:
            file.close()
            raise
        return file

    def _delete_superfluous(self, protected: AbstractSet[int]) -> None:
        try:
            superfluous = self._superfluous(protected)
            damaged: list[CorruptObjectError] = []
            pinned = self._pinned(damaged) if superfluous else set()
            for error in damaged:  # what it protects must not fill the store
                _LOG.warning("%s is still thinned out: %s", self._root, error)
            self._drop([name for name in superfluous if name not in pinned])
        except StorageError as error:
            # The checkpoint is committed, so this harms nothing; the next save tries again.
            _LOG.warning("superfluous checkpoints of %s stay for now: %s", self._root, error)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._delete(name)
            self._mine.remove(name)
            self._kept.pop(name, None)

    def _superfluous(self, protected: AbstractSet[int]) -> list[str]:
        """Neither new enough nor kept by one that is: whichever of those a run resumes from, it finds what it keeps."""
        last = self._mine[-1]
        # After going back, ``delete_after`` follows; damaged ones stand at the front.
        behind = [*takewhile(lambda name: _step_of(name)[0] >= _step_of(last)[0], reversed(self._mine[:-1]))]
        newest = [name for name in self._mine if name not in behind][-self._keep_last :]
        wanted = set(protected).union(*(self._kept.get(name, set()) for name in newest))
        gone = [name for name in self._mine if name not in {*newest, *behind} and _step_of(name)[0] not in wanted]
        # What was kept once may be kept still by an attempt that resumed from a state of then. Such an attempt, if any,
        # has its number already: whoever starts after this look finds the checkpoints without it.
        if any(_step_of(name)[0] in self._once_kept for name in gone) and self._has_successor():
            gone = [name for name in gone if _step_of(name)[0] not in self._once_kept]
        return gone

    def _remember_kept(self, name: str, state: Mapping[str, Any]) -> None:
        self._kept[name] = kept_steps(state)
        self._once_kept |= self._kept[name]

    def _read_state(self, name: str) -> dict[str, Any]:
        """The state of a checkpoint that is not loaded; of a damaged one, nothing."""
        try:
            objects = decode_manifest(self._store.get(f"{self._root}/{name}/{MANIFEST}"))
            state = json.loads(self._read_verified(name, STATE, objects[STATE]).view.tobytes())
        except (NotFoundError, CorruptObjectError, ValueError, KeyError):
            return {}
        return state if isinstance(state, dict) else {}

    def _has_successor(self) -> bool:
        """Whether a later attempt at this job exists."""
        numbers = self._store.list_children(attempts_folder(self._key)) if self._attempt_number else []
        return any(int(name.removesuffix(".json")) > self._attempt_number for name in numbers)

    def _delete(self, name: str) -> None:
        # The manifest goes first: a crash in between leaves a folder without one, not a checkpoint with holes.
        self._store.delete(f"{self._root}/{name}/{MANIFEST}")
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
