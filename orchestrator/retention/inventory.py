"""The content of a store by folder, and the names of objects of retention and garbage collection.

Listings are streamed: memory holds one folder, and the names of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Self

from orchestrator.core.errors import NotFoundError, TooLargeError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.artifacts import Record
from orchestrator.storage.bounds import RECORD_BYTES
from orchestrator.storage.layout import artifact_folder, checkpoints_folder, log_beside, record_name, sweep_folder
from orchestrator.storage.logs import context_of
from orchestrator.storage.protocol import ObjectStat, ObjectStore

ARTIFACTS, METRICS, LOGS = "artifacts/", "metrics/", "logs/"
ARTIFACT_DEPTH, METRICS_DEPTH, LOGS_DEPTH = 3, 2, 2
"""Name parts of ``artifacts/<kind>/<key>/``, ``metrics/<key>/`` and ``logs/<sweep>/``."""
CHECKPOINT_DEPTH = ARTIFACT_DEPTH + 2
"""Of ``artifacts/<kind>/<key>/checkpoints/<step>-<nonce>/``, and of an attempt's parts."""
SEARCHES, TRIALS, SEARCH_DEPTH = "searches/", "trials/", 2
"""Of ``searches/<key>/`` and ``trials/<key>/``: the log of a search job, and what people see of its trials."""
PROBES = "probes/"
"""Folder in which ``probe_store`` writes and deletes an object."""
TRASH = "trash/"
LOCK = "trash/lock.json"
RECORD, MANIFEST = "record.json", "manifest.json"
NO_GROUP = "-"
ALL_GROUPS = ""


def folder_of(name: str, depth: int) -> str:
    """The first ``depth`` parts of a name with a final ``/``; empty if the object does not lie below that many."""
    parts = name.split("/", depth)
    return "/".join(parts[:depth]) + "/" if len(parts) > depth else ""


def last_part(folder: str) -> str:
    """``a/b/`` -> ``b``: the key of an artifact's or a metrics folder, the sweep of a folder of logs."""
    return folder.rstrip("/").rpartition("/")[2]


def whole_artifact(key: str) -> str:
    """The folder of everything of a key, with its final ``/``."""
    return artifact_folder(key) + "/"


def forgotten_name(sweep: str) -> str:
    """Name of the mark that a sweep's results may be deleted."""
    return f"{sweep_folder(sweep)}/forgotten.json"


def tombstones_name(run: str, number: int) -> str:
    """One batch of tombstones of one run."""
    return f"{TRASH}{run}/{number:06d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Some objects and their bytes together."""

    num_objects: int = 0
    num_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(num_objects=self.num_objects + other.num_objects, num_bytes=self.num_bytes + other.num_bytes)

    @classmethod
    def of(cls, stats: Iterable[ObjectStat]) -> Self:
        """Amount of some listed objects."""
        sizes = [stat.size_bytes for stat in stats]
        return cls(num_objects=len(sizes), num_bytes=sum(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactLine:
    """One key's folder, for people."""

    key: str
    is_committed: bool
    total: Amount
    checkpoints: Amount
    """The part of ``total`` that is checkpoints and no part of a committed artifact."""
    newest_at_s: float

    @property
    def kind(self) -> str:
        """Kind of the job."""
        return self.key.partition("-")[0]


def walk_folders(store: ObjectStore, root: str, depth: int) -> Iterator[tuple[str, Iterator[ObjectStat]]]:
    """Every folder of ``depth`` name parts below ``root`` with its objects, to be consumed before the next folder.

    Objects that lie higher up are left out. Stores list a folder's objects one after the other; should one come back to
    a folder that it had left, the folder is yielded a second time at the end, complete.
    """
    seen: set[str] = set()
    split: set[str] = set()
    for folder, stats in groupby(store.list_objects(root), key=lambda stat: folder_of(stat.name, depth)):
        if folder in seen:
            split.add(folder)
        elif folder:
            seen.add(folder)
            yield folder, stats
    for folder in sorted(split):
        yield folder, store.list_objects(folder)


def walk_artifacts(store: ObjectStore) -> Iterator[tuple[str, list[ObjectStat]]]:
    """Every key that has objects, with all of them; folders that no key can have are left out."""
    for folder, stats in walk_folders(store, ARTIFACTS, ARTIFACT_DEPTH):
        key = last_part(folder)
        if folder == whole_artifact(key):
            yield key, list(stats)


def artifact_lines(store: ObjectStore) -> Iterator[ArtifactLine]:
    """One line for every key that has objects."""
    for key, stats in walk_artifacts(store):
        is_committed = any(stat.name == record_name(key) for stat in stats)
        yield ArtifactLine(
            key=key,
            is_committed=is_committed,
            total=Amount.of(stats),
            checkpoints=Amount.of(_spare_checkpoints(store, key, stats, is_committed=is_committed)),
            newest_at_s=max(stat.modified_at_s for stat in stats),
        )


def _spare_checkpoints(
    store: ObjectStore, key: str, stats: Iterable[ObjectStat], *, is_committed: bool
) -> list[ObjectStat]:
    """Objects of checkpoints without those that the key's record names; none if it cannot be read: then none goes."""
    found = [stat for stat in stats if stat.name.startswith(f"{checkpoints_folder(key)}/")]
    if not found or not is_committed:
        return found
    head = record_name(key)
    try:
        named = named_objects(head, store.get(head, max_bytes=RECORD_BYTES))
    except (NotFoundError, TooLargeError, ValueError):
        return []
    kept = {folder_of(name, CHECKPOINT_DEPTH) for name in named}
    return [stat for stat in found if folder_of(stat.name, CHECKPOINT_DEPTH) not in kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One object as the record or manifest that names it says it is."""

    size_bytes: int
    sha256: str


def named_objects(head: str, content: bytes) -> Mapping[str, Named]:
    """Objects, by full name, that a ``record.json`` or a checkpoint's ``manifest.json`` names.

    Raises:
        ValueError: the content is neither, or a manifest whose own sha256 tells that it was altered.
    """
    folder, _, base = head.rpartition("/")
    try:
        if base == RECORD:
            parts = Record.from_bytes(content).parts.values()
            return {f"{folder}/{part.path}": Named(size_bytes=part.size_bytes, sha256=part.sha256) for part in parts}
        return _manifest_objects(folder, content)
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{head} does not have the fields of a {base}: {error!r}"
        raise ValueError(message) from error


def _manifest_objects(folder: str, content: bytes) -> Mapping[str, Named]:
    document = parse_json(content)
    entries = document["objects"]
    digest = document.pop("sha256", None)
    if digest is not None and digest != sha256(json.dumps(document, indent=1).encode()).hexdigest():
        raise ValueError("it is not as it was written: its own sha256 does not match")
    return {
        f"{folder}/{part}": Named(size_bytes=entry["size_bytes"], sha256=entry["sha256"])
        for part, entry in entries.items()
    }


@dataclass(slots=True, kw_only=True)
class Usage:
    """Storage of one group; an object that several groups share counts in each of them."""

    artifacts: Amount = field(default_factory=Amount)
    checkpoints: Amount = field(default_factory=Amount)
    metrics: Amount = field(default_factory=Amount)
    logs: Amount = field(default_factory=Amount)
    shared: Amount = field(default_factory=Amount)
    """The part that other groups share."""

    @property
    def total(self) -> Amount:
        """All of it."""
        return self.artifacts + self.checkpoints + self.metrics + self.logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Returns the groups of a job; an object without a group is counted under ``NO_GROUP``."""

    of_key: Callable[[str], Collection[str]]
    of_log: Callable[[str, str], Collection[str]]
    """Takes a sweep and a job's name."""


def measure_usage(store: ObjectStore, grouping: Grouping) -> dict[str, Usage]:
    """Usage by group; under ``ALL_GROUPS`` everything once."""
    usage: dict[str, Usage] = {ALL_GROUPS: Usage()}
    for line in artifact_lines(store):
        groups = grouping.of_key(line.key)
        _count(usage, "checkpoints", groups, line.checkpoints)
        num_bytes = line.total.num_bytes - line.checkpoints.num_bytes
        num_objects = line.total.num_objects - line.checkpoints.num_objects
        _count(usage, "artifacts", groups, Amount(num_objects=num_objects, num_bytes=num_bytes))
    for folder, stats in walk_folders(store, METRICS, METRICS_DEPTH):
        _count(usage, "metrics", grouping.of_key(last_part(folder)), Amount.of(stats))
    for stat in store.list_objects(LOGS):
        _count(usage, "logs", _groups_of_log(grouping, stat.name), Amount(num_objects=1, num_bytes=stat.size_bytes))
    return usage


def _groups_of_log(grouping: Grouping, name: str) -> Collection[str]:
    """Of a log, of a part of one whose attempt runs or was killed, or of a flight record."""
    try:
        context = context_of(log_beside(name))
    except ValueError:
        return ()
    return grouping.of_log(context.sweep, context.job)


def _count(usage: dict[str, Usage], part: str, groups: Collection[str], amount: Amount) -> None:
    for group in (*(groups or (NO_GROUP,)), ALL_GROUPS):
        found = usage.setdefault(group, Usage())
        setattr(found, part, getattr(found, part) + amount)
        if len(groups) > 1:
            found.shared += amount
