"""The two small files that describe a data set, in the folder of its shards: ``dataset.json`` and ``classes.json``.

``classes.json`` is the class table: row c describes leaf class c with ``class``, ``name`` and one column per level of a
hierarchy. ``dataset.json`` names every shard with its size and sha256, so that a plan needs no listing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Final, Protocol, Self

from orchestrator.core.errors import BadDataError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.open import open_store, split_object_uri

_NUMBER, _NAME = "class", "name"
TAXONOMIC_CLASS: Final = "taxonomic_class"
"""Column of the Linnaean rank "class", since ``class`` numbers the leaf classes."""
DATASET_FILE: Final = "dataset.json"
CLASSES_FILE: Final = "classes.json"
DATASET_VERSION: Final = 1
_MOST_SHOWN: Final = 5
NOT_LEVELS: Final = frozenset({"class", "name"})
LEAF_LEVEL: Final = "leaf"
"""The level that every data set has: its classes themselves. A column of this name takes precedence."""
ClassRows = list[dict[str, Any]]
MIXTURE_WINDOW: Final = 10_000
"""Samples of a weighted mixture of which each data set has its exact share; so weights count in ten-thousandths."""


def weights_problem(weights: Sequence[float]) -> str:
    """Why data sets cannot be mixed by these weights; empty if they can."""
    total = sum(weights)
    if all(weight > 0 and weight * MIXTURE_WINDOW >= total for weight in weights):
        return ""
    message = f"the weights {list(weights)} of a mixture are not valid; each must be above 0 and at least "
    return f"{message}1/{MIXTURE_WINDOW} of their sum; leave a data set out instead"


def join_class_tables(tables: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """One table for all data sets, and the new number of each class of each of them.

    Classes of one name are one class; they are numbered by first appearance. A level is kept if every class has it.

    Raises:
        BadDataError: a class has no name, two in one table share a name, or one lies at two places of a level.
    """
    rows: dict[str, dict[str, Any]] = {}
    numbers: list[list[int]] = []
    for table in tables:
        names = [str(row.get(_NAME, "")) for row in table]
        if "" in names or len(set(names)) < len(names):
            raise BadDataError("classes are joined by name, but a class table lacks one or repeats one; name all")
        for name, row in zip(names, table, strict=True):
            _check_same(name, rows.setdefault(name, {**row, _NUMBER: len(rows)}), row)
        numbers.append([rows[name][_NUMBER] for name in names])
    common = [column for column in (tables[0][0] if tables[0] else {}) if all(column in row for row in rows.values())]
    return [{column: row[column] for column in common} for row in rows.values()], numbers


def _check_same(name: str, row: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for level in (row.keys() & other.keys()) - {_NUMBER}:
        if row[level] != other[level]:
            message = f"class {name!r} is {row[level]!r} at level {level!r} in one data set and {other[level]!r} in "
            raise BadDataError(message + "another; correct one of the class tables")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A shard of a data set, beside its ``dataset.json``."""

    name: str
    size_bytes: int
    sha256: str
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """The content of ``dataset.json``."""

    splits: Mapping[str, tuple[ShardEntry, ...]]
    num_classes: int
    levels: Mapping[str, int]
    """Distinct values of each column of the class table but ``class`` and ``name``."""
    classes_sha256: str
    digest: str
    """Of all shards, see `dataset_digest`."""
    multi_label: bool = False
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Samples of each leaf class by split; one with several labels counts in each."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Its source and arguments, for people and for resuming."""
    version: int = DATASET_VERSION

    def num_samples(self, split: str) -> int:
        """Samples of a split; 0 if there is none of this name."""
        return sum(shard.num_samples for shard in self.splits.get(split, ()))

    def to_bytes(self) -> bytes:
        """JSON, sorted and indented for people."""
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, content: bytes, uri: str) -> Self:
        """Inverse of `to_bytes`. Raises ``BadDataError``: not such a file, or its shards do not have its digest."""
        try:
            document = parse_json(content)
            version = document.pop("version")
            if version != DATASET_VERSION:
                raise BadDataError(f"{uri} has version {version!r}, this program reads {DATASET_VERSION}: update it")
            splits = {
                name: tuple(ShardEntry(**shard) for shard in shards) for name, shards in document["splits"].items()
            }
            counts = {name: tuple(found) for name, found in document["class_counts"].items()}
            found = cls(**{**document, "splits": splits, "class_counts": counts})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadDataError(f"{uri} does not describe a data set: {error!r}; write the data set again") from error
        if dataset_digest(found.splits) != found.digest:
            raise BadDataError(
                f"{uri} names shards that do not have its digest: it was altered; index the shards again"
            )
        return found


def read_dataset_file(folder_uri: str) -> DatasetFile:
    """Read ``<folder>/dataset.json``.

    Raises:
        NotFoundError: there is none.
        BadDataError: it is damaged.
        StorageError: the URI is refused, or the store does not answer.
    """
    content = open_store(folder_uri.rstrip("/")).get(DATASET_FILE)
    return DatasetFile.from_bytes(content, f"{folder_uri.rstrip('/')}/{DATASET_FILE}")


class HashedShard(Protocol):
    """A shard whose content is known."""

    @property
    def name(self) -> str:
        """Of the object, without its folder."""

    @property
    def sha256(self) -> str:
        """Of all bytes."""

    @property
    def num_samples(self) -> int:
        """That can be used."""


def held_out_problem(splits: Mapping[str, Iterable[HashedShard]]) -> str:
    """Why a data set would be measured on what it is trained on: a shard of ``train`` in another split.

    Empty if it would not. Shards are compared by their content.
    """
    of_train = {shard.sha256: shard.name for shard in splits.get("train", ()) if shard.num_samples}
    for split, shards in splits.items():
        both = [shard for shard in shards if split != "train" and shard.sha256 in of_train]
        if both:
            more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
            message = (
                f"{both[0].name}{more} of split {split!r} is {of_train[both[0].sha256]} of split 'train', too: its "
            )
            return f"{message}samples would be trained on and measured on; name the shards of 'train' without it"
    return ""


def dataset_digest(splits: Mapping[str, Iterable[ShardEntry]]) -> str:
    """Sha256 over the sorted lines ``<split>/<basename> <size> <sha256>``: equal data has one digest anywhere."""
    lines = [
        f"{split}/{shard.name} {shard.size_bytes} {shard.sha256}\n"
        for split, shards in splits.items()
        for shard in shards
    ]
    return sha256("".join(sorted(lines)).encode()).hexdigest()


def read_class_table(uri: str) -> tuple[ClassRows, str]:
    """The class table at the URI of a JSON file, and the sha256 of the file.

    Raises:
        NotFoundError: there is none.
        BadDataError: it is no class table.
        StorageError: the URI is refused, or the store does not answer.
    """
    folder, name = split_object_uri(uri)
    content = open_store(folder).get(name)
    return parse_class_table(content, f"the class table {uri}"), sha256(content).hexdigest()


def parse_class_table(content: bytes, what: str) -> ClassRows:
    """The rows, ordered by class. Raises ``BadDataError``: no JSON list of rows, or classes are missing."""
    try:
        rows: ClassRows = parse_json(content)
        rows.sort(key=lambda row: int(row["class"]))
        found = [row["class"] for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f'{what} is not a JSON list of rows such as {{"class": 0, "name": "tench"}}: {error!r}'
        raise BadDataError(message) from error
    if found != list(range(len(rows))):
        raise BadDataError(f"{what} has the classes {found[:20]}; they must be 0, 1, 2, ...")
    return rows


def numbered_classes(num_classes: int) -> ClassRows:
    """Classes without names or levels."""
    return [{"class": leaf, "name": str(leaf)} for leaf in range(num_classes)]


def node_of(row: Mapping[str, Any], level: str) -> str | None:
    """Where a class stands at a level; None where its table has nothing: no column, an empty cell, or NaN."""
    value = row.get(level)
    return None if is_missing(value) or not (text := str(value)).strip() else text


def is_missing(value: object) -> bool:
    """Whether a table has no value: None, or NaN, as tables read by pandas have it."""
    return value is None or value != value  # noqa: PLR0124


def level_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Distinct values of each level, in the order of the columns."""
    nodes: dict[str, set[str]] = {}
    for row in rows:
        for column in row:
            if column not in NOT_LEVELS and (node := node_of(row, column)) is not None:
                nodes.setdefault(column, set()).add(node)
    return {level: len(found) for level, found in nodes.items()}


def level_problem(rows: Sequence[Mapping[str, Any]], level: str) -> str:
    """Why classes have no targets at a level: those that stand nowhere at it; empty if all have a value."""
    without = [number for number, row in enumerate(rows) if node_of(row, level) is None]
    if not without:
        return ""
    shown = ", ".join(_shown(number, rows[number]) for number in without[:_MOST_SHOWN])
    more = f", ... ({len(without)} in all)" if len(without) > _MOST_SHOWN else ""
    verb = "has" if len(without) == 1 else "have"
    return f"class {shown}{more} {verb} no value at level {level!r}; complete the class table"


def _shown(number: int, row: Mapping[str, Any]) -> str:
    return f"{number} ({row['name']!r})" if row.get("name") is not None else str(number)
