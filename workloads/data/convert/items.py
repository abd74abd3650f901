"""What a converter finds: where each image of a split lies, under which key and with which classes.

Tables of 14 million images are held as columns (about 70 bytes per image), not as objects.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows
from workloads.data.scan import IMAGE_EXTENSIONS
from workloads.data.streams import Purpose, Stage, permutation, seed_sequence

WHOLE_FILE: Final = -1
_UNSAFE_IN_KEY: Final = re.compile(r"[^A-Za-z0-9_/=@+,#~ -]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """One image as it lies in the source."""

    key: str
    extension: str
    """Lower case, without a dot."""
    path: str
    """The file, or the tar that holds it."""
    offset_bytes: int
    """Within the tar; ``WHOLE_FILE`` = the file is the image."""
    length_bytes: int
    leaves: tuple[int, ...]


class Items(Protocol):
    """Images of one split, by row."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes [N] of each image."""

    def __len__(self) -> int: ...

    def item(self, row: int) -> SourceItem:
        """An image."""


class ItemTable:
    """Images of one split; grows by `add`."""

    def __init__(self) -> None:
        self.containers: list[str] = []
        """Folders of plain files, and tars."""
        self._names, self._name_ends = bytearray(), array("q", [0])
        self._containers, self._offsets, self._lengths = array("i"), array("q"), array("q")
        self._leaves, self._leaf_ends = array("i"), array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes [N] of each image."""
        return np.frombuffer(self._lengths, dtype=np.int64) if len(self) else np.empty(0, dtype=np.int64)

    def container(self, path: Path) -> int:
        """Register a folder or a tar; returns its number for `add`."""
        self.containers.append(str(path))
        return len(self.containers) - 1

    def add(
        self, name: str, *, container: int, leaves: Sequence[int], length_bytes: int, offset_bytes: int = WHOLE_FILE
    ) -> None:
        """Add an image.

        Args:
            name: path within its folder or tar, with an extension of an image.
            container: number of the folder or tar.
            leaves: its classes.
            length_bytes: its size.
            offset_bytes: where it lies in the tar.
        """
        self._names += name.encode(errors="surrogateescape")
        self._name_ends.append(len(self._names))
        self._containers.append(container)
        self._offsets.append(offset_bytes)
        self._lengths.append(length_bytes)
        self._leaves.extend(leaves)
        self._leaf_ends.append(len(self._leaves))

    def name(self, row: int) -> str:
        """Path of an image within its container."""
        name = bytes(self._names[self._name_ends[row] : self._name_ends[row + 1]])
        return name.decode(errors="surrogateescape")

    def leaves(self, row: int) -> tuple[int, ...]:
        """Classes of an image."""
        return tuple(self._leaves[self._leaf_ends[row] : self._leaf_ends[row + 1]])

    def item(self, row: int) -> SourceItem:
        """An image."""
        name, container = self.name(row), self.containers[self._containers[row]]
        offset = self._offsets[row]
        return SourceItem(
            key=key_of(name),
            extension=extension_of(name),
            path=f"{container}/{name}" if offset == WHOLE_FILE else container,
            offset_bytes=offset,
            length_bytes=self._lengths[row],
            leaves=self.leaves(row),
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """All that `StoredItems` needs but the containers, by name."""
        return {
            "name": np.frombuffer(bytes(self._names), dtype=np.uint8),
            "name_end": np.array(self._name_ends, dtype=np.int64),
            "container": np.array(self._containers, dtype=np.int32),
            "offset": np.array(self._offsets, dtype=np.int64),
            "length": np.array(self._lengths, dtype=np.int64),
            "leaf": np.array(self._leaves, dtype=np.int32),
            "leaf_end": np.array(self._leaf_ends, dtype=np.int64),
        }

    def select(self, rows: Sequence[int]) -> ItemTable:
        """A table of some of the images, in this order."""
        chosen = ItemTable()
        chosen.containers = self.containers
        for row in rows:
            chosen.add(
                self.name(row),
                container=self._containers[row],
                leaves=self.leaves(row),
                length_bytes=self._lengths[row],
                offset_bytes=self._offsets[row],
            )
        return chosen

    def map_leaves(self, final: Mapping[int, int]) -> None:
        """Replace every class by another number."""
        self._leaves = array("i", [final[leaf] for leaf in self._leaves])

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Images of each class; one with several classes counts in each."""
        return tuple(np.bincount(np.array(self._leaves, dtype=np.int64), minlength=num_classes).tolist())

    def digest(self) -> str:
        """Sha256 of names, places, sizes and classes: equal for the same source at another path."""
        columns = (self._name_ends, self._containers, self._offsets, self._lengths, self._leaves, self._leaf_ends)
        found = sha256(bytes(self._names))
        for column in columns:
            found.update(column.tobytes())
        return found.hexdigest()

    def check_keys(self, split: str) -> None:
        """Raises ``UserError`` if two images would have the same key."""
        hashes = np.fromiter((_hash(key_of(self.name(row))) for row in range(len(self))), np.uint64, len(self))
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        for first, second in zip(order[same].tolist(), order[same + 1].tolist(), strict=True):
            one, other = self.name(first), self.name(second)
            if key_of(one) == key_of(other):
                message = f"{one!r} and {other!r} of split {split!r} would both have the key {key_of(one)!r}"
                raise UserError(message + "; rename one of them")


class StoredItems:
    """Images of one split, from columns that may be mapped from files; see `ItemTable.columns`."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], containers: Sequence[str]) -> None:
        self._columns, self._containers = columns, containers

    def __len__(self) -> int:
        return len(self._columns["offset"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes [N] of each image."""
        return self._columns["length"]

    def item(self, row: int) -> SourceItem:
        """An image."""
        columns, offset = self._columns, int(self._columns["offset"][row])
        name = self._run("name", row).tobytes().decode(errors="surrogateescape")
        container = self._containers[int(columns["container"][row])]
        return SourceItem(
            key=key_of(name),
            extension=extension_of(name),
            path=f"{container}/{name}" if offset == WHOLE_FILE else container,
            offset_bytes=offset,
            length_bytes=int(columns["length"][row]),
            leaves=tuple(self._run("leaf", row).tolist()),
        )

    def _run(self, column: str, row: int) -> NDArray[Any]:
        first, end = self._columns[f"{column}_end"][row : row + 2]
        return self._columns[column][first:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A listed source: what `write_dataset` turns into shards."""

    converter: str
    classes: ClassRows
    splits: Mapping[str, ItemTable]
    multi_label: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What people should know: files that were left out and why."""


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def key_of(name: str) -> str:
    """Key of a file: its path without the extension. A key ends at the first dot, so other dots become underscores.

    It begins with one underscore at most: names with two are webdataset's own, and no reader takes them for samples.
    """
    stem = str(PurePosixPath(name).with_suffix(""))
    key = _UNSAFE_IN_KEY.sub("_", stem).lstrip("/")
    return f"_{key.lstrip('_')}" if key.startswith("__") else key


def extension_of(name: str) -> str:
    """Lower case, without a dot."""
    return PurePosixPath(name).suffix.removeprefix(".").lower()


def is_image(name: str) -> bool:
    """By its extension; hidden files are none."""
    return extension_of(name) in IMAGE_EXTENSIONS and not PurePosixPath(name).name.startswith(".")


def hold_out(table: ItemTable, fraction: float, seed: int) -> dict[str, ItemTable]:
    """Split off ``val``: of each class (of a sample: its first) the same fraction, chosen by the seed, at least one
    sample staying in ``train``.
    """
    by_leaf: dict[int, list[int]] = {}
    for row in range(len(table)):
        by_leaf.setdefault((table.leaves(row) or (-1,))[0], []).append(row)
    val: list[int] = []
    for leaf, rows in sorted(by_leaf.items()):
        order = permutation(seed_sequence(seed, Stage.DATASET, Purpose.VAL_SPLIT, leaf + 1), len(rows))
        num_val = min(round(fraction * len(rows)), len(rows) - 1)
        val += [rows[position] for position in order[:num_val].tolist()]
    chosen = frozenset(val)
    train = [row for row in range(len(table)) if row not in chosen]
    return {"train": table.select(train), "val": table.select(sorted(val))}
