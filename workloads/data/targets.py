"""What ``orchestrator data`` works on: shards named by a folder, by patterns, or by a ``dataset.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    ClassRows,
    DatasetFile,
    numbered_classes,
    read_class_table,
    read_dataset_file,
)
from orchestrator.storage.listing import list_shards
from orchestrator.storage.open import expand_braces
from workloads.data.index import Shard
from workloads.data.jobs import described_shards, unread_shard

_SHARD_SUFFIX = ".tar"
_NUMBERED = re.compile(r"([^{},]*?)([0-9]+)\.tar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Shards by split with their class table."""

    uri: str
    splits: Mapping[str, Sequence[Shard]]
    classes: ClassRows
    classes_uri: str
    """Empty: the classes are numbers."""
    described: DatasetFile | None
    multi_label: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """What somebody names."""

    place: str
    """A folder, a tar or a brace pattern, as a path or a URI; unused where ``splits`` are given."""
    splits: Mapping[str, str]
    """Patterns or folders by split."""
    classes: str = ""
    num_classes: int = 0
    multi_label: bool = False


def open_target(request: TargetRequest) -> Target:
    """Find the shards.

    Raises:
        NotFoundError: there are none.
        UserError: nothing says what the classes are.
    """
    uri = ", ".join(to_uri(place).rstrip("/") for place in request.splits.values() or [request.place])
    described = _described(uri) if not request.splits and not uri.endswith(_SHARD_SUFFIX) else None
    classes_uri = to_uri(request.classes) if request.classes else f"{uri}/{CLASSES_FILE}" if described else ""
    if not classes_uri and not request.num_classes:
        message = f"{uri} has no dataset.json, and nothing says its classes"
        raise UserError(message + ": name the class table with --classes, or count the classes with --num-classes")
    classes = read_class_table(classes_uri)[0] if classes_uri else numbered_classes(request.num_classes)
    return Target(
        uri=uri,
        splits=described_shards(uri, described) if described else _listed(uri, request),
        classes=classes,
        classes_uri=classes_uri,
        described=described,
        multi_label=described.multi_label if described else request.multi_label,
    )


def to_uri(place: str) -> str:
    """A path as a ``file://`` URI with its braces; a URI as it is, and a folder without its final slash."""
    if "://" in place:
        return place
    if place.startswith("pipe:"):
        raise UserError(f"{place!r} would run a program; name a path, file:// or s3:// URI of shards")
    return "file://" + quote(str(Path(place).absolute()), safe="/{},.+=@~")


def _described(uri: str) -> DatasetFile | None:
    try:
        return read_dataset_file(uri)
    except NotFoundError:
        return None


def _listed(uri: str, request: TargetRequest) -> dict[str, list[Shard]]:
    if request.splits:
        patterns = {split: to_pattern(place) for split, place in request.splits.items()}
        return {split: [unread_shard(shard) for shard in list_shards([found])] for split, found in patterns.items()}
    splits: dict[str, list[Shard]] = {}
    for shard in list_shards([to_pattern(uri)]):
        split = shard.name.removesuffix(_SHARD_SUFFIX).rpartition("-")[0] or "train"
        splits.setdefault(split, []).append(unread_shard(shard))
    if "train" not in splits:  # names that tell no splits, such as photos-000000.tar
        return {"train": [shard for shards in splits.values() for shard in shards]}
    return splits


def to_pattern(place: str) -> str:
    """A URI that names shards: a tar or brace pattern as it is, anything else as a folder, with a slash at its end."""
    uri = to_uri(place)
    return uri if uri.endswith(_SHARD_SUFFIX) else f"{uri.rstrip('/')}/"


def pattern_of(shards: Sequence[Shard]) -> str | list[str]:
    """What names these shards of one folder and no others: a brace pattern if they are numbered, else their URIs."""
    folder, names = shards[0].store_uri.rstrip("/"), [shard.object_name for shard in shards]
    first, last = _NUMBERED.fullmatch(names[0]), _NUMBERED.fullmatch(names[-1])
    if len(names) > 1 and first and last:
        pattern = f"{first[1]}{{{first[2]}..{last[2]}}}{_SHARD_SUFFIX}"
        if list(expand_braces(pattern)) == names:
            return f"{folder}/{pattern}"
    return [f"{folder}/{name}" for name in names]
