"""What is garbage: pure rules from a listing and the roots, and the survey of a store by them.

A store may be a bucket that others use, too: what does not have the form of our names is never garbage.

``docs/retention.md`` has the rules as a table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from orchestrator.core.errors import CorruptObjectError, NotFoundError, TooLargeError
from orchestrator.core.ids import is_key
from orchestrator.retention.inventory import (
    ARTIFACT_DEPTH,
    LOGS,
    LOGS_DEPTH,
    MANIFEST,
    METRICS,
    METRICS_DEPTH,
    RECORD,
    SEARCH_DEPTH,
    SEARCHES,
    TRIALS,
    Amount,
    folder_of,
    last_part,
    named_objects,
    walk_artifacts,
    walk_folders,
    whole_artifact,
)
from orchestrator.storage.bounds import RECORD_BYTES
from orchestrator.storage.layout import log_beside, record_name, search_log_head
from orchestrator.storage.logs import is_log
from orchestrator.storage.protocol import ObjectStat, ObjectStore

_FOLDER_DEPTH = ARTIFACT_DEPTH + 2
"""Name parts of ``artifacts/<kind>/<key>/parts/<attempt>-<nonce>/`` and of a checkpoint's folder."""
DAY_S = 86_400.0


class Reason(StrEnum):
    """Why an object is garbage."""

    UNREFERENCED_ARTIFACT = "unreferenced_artifact"
    """Committed, and no kept sweep, pin or other artifact's identity names it."""
    ABANDONED_JOB = "abandoned_job"
    """Parts and checkpoints of a job that was never committed and is in no kept sweep."""
    ORPHANED_PARTS = "orphaned_parts"
    """Parts of a dead attempt, or of one that lost the race for the commit: no record names them."""
    SUPERFLUOUS_CHECKPOINT = "superfluous_checkpoint"
    """Its job is committed, so that nothing resumes from it."""
    UNFINISHED_CHECKPOINT = "unfinished_checkpoint"
    """Without a manifest: its writer died."""
    UNREFERENCED_METRICS = "unreferenced_metrics"
    UNREFERENCED_SEARCH = "unreferenced_search"
    """The log of a search job, or the published state of its trials."""
    FORGOTTEN_LOGS = "forgotten_logs"
    LEFTOVER = "leftover"
    """A temporary file or upload of a writer that died."""


FOLLOWS_RECORD = frozenset({Reason.UNREFERENCED_METRICS, Reason.UNREFERENCED_SEARCH})
"""Reasons of objects that stay as long as the record of their key is visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """The objects that must stay at one moment, including those that others were made from."""

    keys: AbstractSet[str] = frozenset()
    """Keys whose artifacts, checkpoints (until committed) and metrics stay."""
    checkpoints: AbstractSet[str] = frozenset()
    """Folders ``<key>/checkpoints/<step>-<nonce>`` that stay although their job is committed."""
    live: AbstractSet[str] = frozenset()
    """Keys with a running attempt: nothing below them is touched."""
    sweeps: AbstractSet[str] = frozenset()
    """Sweeps whose logs stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A folder that is deleted as a whole."""

    name: str
    """Prefix of its objects, with a final ``/``."""
    reason: Reason
    key: str = ""
    """Key that it belongs to; empty for logs."""
    amount: Amount = field(default_factory=Amount)
    newest_at_s: float = 0.0
    """When its youngest object was written."""
    heads: tuple[str, ...] = ()
    """Its objects that make the others visible to readers: a record, manifests, the head of a search's log."""

    @property
    def veil(self) -> str:
        """The object that must be gone before the unit's bytes may go; empty for none but ``heads``."""
        return record_name(self.key) if self.reason in FOLLOWS_RECORD else ""

    @property
    def behind(self) -> str:
        """Another unit that must have been condemned for as long as this one, if it is condemned at all."""
        return whole_artifact(self.key) if self.reason in FOLLOWS_RECORD else ""


@runtime_checkable
class HasLeftovers(Protocol):
    """A store in which dead writers leave temporary objects that listings do not show."""

    def leftovers(self, *, until_s: float = math.inf) -> Iterator[ObjectStat]:
        """Those of that time and earlier, also of active writers; the names are only for ``delete_leftover``."""

    def delete_leftover(self, name: str) -> None:
        """Delete one; deleting a missing one is success."""


def classify_artifact(
    key: str, stats: Sequence[ObjectStat], roots: Roots, named_folders: Callable[[], AbstractSet[str] | None]
) -> list[Unit]:
    """Garbage among all objects of a key.

    ``named_folders`` is asked only where the answer depends on it: the folders (``.../parts/<x>/`` and
    ``.../checkpoints/<x>/``) that the key's record names; ``None`` if the record cannot be read: then nothing is
    garbage.
    """
    if key in roots.live or not stats or not is_key(key):
        return []
    is_committed = any(stat.name == record_name(key) for stat in stats)
    if key not in roots.keys:
        reason = Reason.UNREFERENCED_ARTIFACT if is_committed else Reason.ABANDONED_JOB
        return [_unit(whole_artifact(key), reason, key, stats)]
    folders = _folders(stats)
    if not is_committed:
        return list(_unfinished(key, folders))
    checkpoints = [folder for folder in folders if _is_checkpoint(folder)]
    # Almost always there are only one attempt's parts, those of the record, which then need not be read.
    named = set(folders) if len(folders) == 1 and not checkpoints else named_folders()
    if named is None:
        return []
    kept = named | {f"{whole_artifact(name.partition('/')[0])}{name.partition('/')[2]}/" for name in roots.checkpoints}
    return [_unit(folder, _reason_of(folder), key, inside) for folder, inside in folders.items() if folder not in kept]


def classify_metrics(key: str, folder: str, stats: Iterable[ObjectStat], roots: Roots) -> list[Unit]:
    """The folder of a key's metrics, if it is garbage."""
    if key in roots.live or key in roots.keys or not is_key(key):
        return []
    return [_unit(folder, Reason.UNREFERENCED_METRICS, key, stats)]


def classify_search(key: str, folder: str, stats: Iterable[ObjectStat], roots: Roots) -> list[Unit]:
    """The folder of a search job's log or trials, if it is garbage."""
    if key in roots.live or key in roots.keys or not is_key(key):
        return []
    return [_unit(folder, Reason.UNREFERENCED_SEARCH, key, stats)]


def classify_logs(sweep: str, folder: str, stats: Iterable[ObjectStat], roots: Roots) -> list[Unit]:
    """The folder of a sweep's logs, if it is garbage: with an object of another name it is somebody else's."""
    if sweep in roots.sweeps:
        return []
    is_ours = True

    def looked_at() -> Iterator[ObjectStat]:
        nonlocal is_ours
        for stat in stats:
            is_ours = is_ours and is_log(log_beside(stat.name))
            yield stat

    unit = _unit(folder, Reason.FORGOTTEN_LOGS, "", looked_at())
    return [unit] if is_ours else []


def folders_of(names: Iterable[str]) -> set[str]:
    """The folders of attempts and checkpoints that some objects lie in."""
    return {folder for name in names if (folder := folder_of(name, _FOLDER_DEPTH))}


def is_head(name: str) -> bool:
    """Whether this is the name of a record, or of the manifest of a checkpoint."""
    parts = name.split("/")
    is_record = len(parts) == ARTIFACT_DEPTH + 1 and parts[-1] == RECORD
    is_manifest = len(parts) == ARTIFACT_DEPTH + 3 and parts[-3] == "checkpoints" and parts[-1] == MANIFEST
    return is_record or is_manifest


def _unfinished(key: str, folders: dict[str, list[ObjectStat]]) -> Iterator[Unit]:
    for folder, inside in folders.items():
        if not _is_checkpoint(folder):
            yield _unit(folder, Reason.ORPHANED_PARTS, key, inside)
        elif not any(stat.name == folder + MANIFEST for stat in inside):
            yield _unit(folder, Reason.UNFINISHED_CHECKPOINT, key, inside)


def _folders(stats: Sequence[ObjectStat]) -> dict[str, list[ObjectStat]]:
    """Objects by folder of an attempt or checkpoint; anything else in a key's folder is left alone."""
    found: dict[str, list[ObjectStat]] = {}
    for stat in stats:
        folder = folder_of(stat.name, _FOLDER_DEPTH)
        if folder and folder.split("/")[ARTIFACT_DEPTH] in {"parts", "checkpoints"}:
            found.setdefault(folder, []).append(stat)
    return found


def _is_checkpoint(folder: str) -> bool:
    return folder.split("/")[ARTIFACT_DEPTH] == "checkpoints"


def _reason_of(folder: str) -> Reason:
    return Reason.SUPERFLUOUS_CHECKPOINT if _is_checkpoint(folder) else Reason.ORPHANED_PARTS


def _unit(name: str, reason: Reason, key: str, stats: Iterable[ObjectStat]) -> Unit:
    """Counts a stream: the logs of a large sweep are many objects."""
    num_objects, num_bytes, newest_at_s = 0, 0, 0.0
    heads = []
    for stat in stats:
        num_objects += 1
        num_bytes += stat.size_bytes
        newest_at_s = max(newest_at_s, stat.modified_at_s)
        if key and (is_head(stat.name) or stat.name == search_log_head(key)):
            heads.append(stat.name)
    amount = Amount(num_objects=num_objects, num_bytes=num_bytes)
    return Unit(name=name, reason=reason, key=key, amount=amount, newest_at_s=newest_at_s, heads=tuple(heads))


class GcAction(StrEnum):
    """What a collection does with garbage, in the order in which it happens."""

    WAIT_FOR_GRACE = "wait_for_grace"
    """Too young: it may belong to an attempt that is about to commit."""
    HIDE = "hide"
    """Move to the trash: invisible from now on, and restorable."""
    WAIT_IN_TRASH = "wait_in_trash"
    DESTROY = "destroy"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a collection did, or would do."""

    amounts: dict[tuple[GcAction, Reason], Amount] = field(default_factory=lambda: defaultdict(Amount))
    restored: list[str] = field(default_factory=list)
    """Folders taken back out of the trash, because a root reaches them again."""

    def add(self, action: GcAction, unit: Unit) -> None:
        """Count one folder."""
        self.amounts[action, unit.reason] += unit.amount

    def total(self, action: GcAction) -> Amount:
        """Sum over all reasons."""
        return sum((amount for (did, _), amount in self.amounts.items() if did is action), Amount())


@dataclass(frozen=True, slots=True, kw_only=True)
class Graces:
    """How long garbage stays, in seconds."""

    age_s: float = DAY_S
    """Objects younger than this are never touched."""
    trash_s: float = DAY_S
    """How long it stays restorable once hidden."""


def survey(store: ObjectStore, roots: Roots, on_alive: Callable[[], None]) -> tuple[Iterator[Unit], ...]:
    """Everything that no root reaches, of any age, streamed: of artifacts, of metrics, of searches, and of logs.

    ``on_alive`` is called before each folder: where there is little garbage, nothing is yielded for long.
    """

    def walk(root: str, depth: int) -> Iterator[tuple[str, Iterator[ObjectStat]]]:
        for folder in walk_folders(store, root, depth):
            on_alive()
            yield folder

    def artifacts() -> Iterator[Unit]:
        for key, stats in walk_artifacts(store):
            on_alive()
            yield from classify(store, key, stats, roots)

    return (
        artifacts(),
        (
            unit
            for folder, stats in walk(METRICS, METRICS_DEPTH)
            for unit in classify_metrics(last_part(folder), folder, stats, roots)
        ),
        *(
            (
                unit
                for folder, stats in walk(root, SEARCH_DEPTH)
                for unit in classify_search(last_part(folder), folder, stats, roots)
            )
            for root in (SEARCHES, TRIALS)
        ),
        (
            unit
            for folder, stats in walk(LOGS, LOGS_DEPTH)
            for unit in classify_logs(last_part(folder), folder, stats, roots)
        ),
    )


def leftover(stat: ObjectStat) -> Unit:
    """A single object of a writer that died, as garbage."""
    amount = Amount(num_objects=1, num_bytes=stat.size_bytes)
    return Unit(name=stat.name, reason=Reason.LEFTOVER, amount=amount, newest_at_s=stat.modified_at_s)


def classify(store: ObjectStore, key: str, stats: Sequence[ObjectStat], roots: Roots) -> list[Unit]:
    """Garbage among all objects of a key; reads its record where that decides."""
    return classify_artifact(key, stats, roots, lambda: _named_folders(store, key))


def _named_folders(store: ObjectStore, key: str) -> AbstractSet[str] | None:
    head = record_name(key)
    try:
        return folders_of(named_objects(head, store.get(head, max_bytes=RECORD_BYTES)))
    except (NotFoundError, CorruptObjectError, TooLargeError, ValueError):
        return None  # deleted meanwhile, or damaged: fsck reports that, and nothing of the key is deleted
