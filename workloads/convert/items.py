"""Requests to converters and their results: the place, key and classes of each image.

Tables of 14 million images are held as columns (about 70 bytes per image), not as objects.

Only plain files inside the source are read, unless links are allowed explicitly. A link that leaves the source could
pack any file that this user may read into shards that others read; a named pipe would block its reader without end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.core.units import MIB
from orchestrator.storage.dataset_files import TAXONOMIC_CLASS, ClassRows
from orchestrator.storage.files import is_inside, kind_of
from workloads.convert.left_out import LeftOut
from workloads.data.scan import IMAGE_EXTENSIONS
from workloads.runtime.streams import Purpose, Stage, permutation, seed_sequence

WHOLE_FILE: Final = -1
_FIRST_ROW: Final = -2
_KEEPS_LETTERS: Final = "keeps_letters"
"""Column of a table whose keys keep letters outside of ASCII."""
_UNSAFE_IN_KEY: Final = re.compile(r"[^A-Za-z0-9_/=@+,#~ -]")
_UNSAFE_BUT_LETTERS: Final = re.compile(r"[^\w/=@+,#~ -]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """One image as it lies in the source."""

    key: str
    extension: str
    """Lower case, without a dot."""
    path: str
    """The file, or the tar that holds it."""
    offset_bytes: int
    """Within the tar; ``WHOLE_FILE`` = the file is the image; below it: see `offset_of_row`."""
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
        """Folders of plain files, tars, and arrays of pixels."""
        self.contents: list[str] = []
        """Digests of arrays of pixels, in which every image has the same size whatever it shows."""
        self._names, self._name_ends = bytearray(), array("q", [0])
        self._containers, self._offsets, self._lengths = array("i"), array("q"), array("q")
        self._leaves, self._leaf_ends = array("i"), array("q", [0])
        self._keeps_letters = False

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes [N] of each image."""
        return np.frombuffer(self._lengths, dtype=np.int64) if len(self) else np.empty(0, dtype=np.int64)

    def container(self, path: Path, *, sha256_of_array: str = "") -> int:
        """Register a folder, a tar or an array; returns its number for `add`."""
        self.containers.append(str(path))
        if sha256_of_array:
            self.contents.append(sha256_of_array)
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
            offset_bytes: where it lies in the tar; of a row of an array: `offset_of_row`.
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

    def first_leaves(self) -> NDArray[np.int64]:
        """The first class [N] of each image; -1 = it has none."""
        ends = np.array(self._leaf_ends, dtype=np.int64)
        first_leaves_N, has_leaf_N = np.full(len(self), -1, dtype=np.int64), ends[1:] > ends[:-1]
        first_leaves_N[has_leaf_N] = np.array(self._leaves, dtype=np.int64)[ends[:-1][has_leaf_N]]
        return first_leaves_N

    def item(self, row: int) -> SourceItem:
        """An image."""
        name, container = self.name(row), self.containers[self._containers[row]]
        offset = self._offsets[row]
        return SourceItem(
            key=key_of(name, keeps_letters=self._keeps_letters),
            extension=extension_of(name),
            path=_place_of(container, name) if offset == WHOLE_FILE else container,
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
            **({_KEEPS_LETTERS: np.ones(1, dtype=np.bool_)} if self._keeps_letters else {}),
        }

    def select(self, rows: NDArray[np.int64]) -> ItemTable:
        """A table of some of the images, in this order."""
        chosen = ItemTable()
        chosen.containers, chosen.contents = self.containers, self.contents
        for row in map(int, rows):
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
        """Sha256 of names, places, sizes, classes and whole arrays: equal for the same source at another path."""
        columns = (self._name_ends, self._containers, self._offsets, self._lengths, self._leaves, self._leaf_ends)
        found = sha256(bytes(self._names))
        for column in columns:
            found.update(column.tobytes())
        found.update("".join(self.contents).encode())
        return found.hexdigest()

    def check_keys(self, split: str) -> None:
        """See that all images have different keys.

        Where letters outside of ASCII are all that tells two names apart, all keys of the table keep these letters.
        (Others have underscores in their place, as the shards that earlier releases wrote.)

        Raises:
            UserError: two images would have the same key.
        """
        same = self._same_key()
        if same is not None and not self._names.isascii():
            self._keeps_letters = True
            same = self._same_key()
        if same is not None:
            one, other, key = same
            message = f"{one!r} and {other!r} of split {split!r} would both have the key {key!r}; rename one of them"
            raise UserError(message)

    def places(self) -> Iterator[tuple[str, int]]:
        """Path and offset of each image, equal for one image whatever links lead to its folder."""
        real: dict[str, str] = {}
        for row, offset in enumerate(self._offsets):
            folder, file = self.containers[self._containers[row]], ""
            if offset == WHOLE_FILE:
                folder, _, file = _place_of(folder, self.name(row)).rpartition("/")
            if folder not in real:
                real[folder] = os.path.realpath(folder)
            yield f"{real[folder]}/{file}", offset

    def _same_key(self) -> tuple[str, str, str] | None:
        """Names of two images with the same key, and the key; None if there are none."""
        key = partial(key_of, keeps_letters=self._keeps_letters)
        hashes = np.fromiter((_hash(key(self.name(row))) for row in range(len(self))), np.uint64, len(self))
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        for first, second in zip(order[same].tolist(), order[same + 1].tolist(), strict=True):
            one, other = self.name(first), self.name(second)
            if key(one) == key(other):
                return one, other, key(one)
        return None


class StoredItems:
    """Images of one split, from columns that may be mapped from files; see `ItemTable.columns`."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], containers: Sequence[str]) -> None:
        self._columns, self._containers = columns, containers
        self._keeps_letters = _KEEPS_LETTERS in columns

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
            key=key_of(name, keeps_letters=self._keeps_letters),
            extension=extension_of(name),
            path=_place_of(container, name) if offset == WHOLE_FILE else container,
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
    """What people should know, see `LeftOut`; nothing of it is in a digest."""


def check_disjoint(splits: Mapping[str, ItemTable]) -> None:
    """See that no image of ``train`` is in another split.

    Raises:
        UserError: one is. It would be trained on and measured on.
    """
    held = {place: split for split, table in splits.items() if split != "train" for place in table.places()}
    if not held or "train" not in splits:
        return
    train = splits["train"]
    for row, place in enumerate(train.places()):
        if place in held:
            message = f"{train.name(row)!r} ({train.item(row).path}) is an image of split 'train' and of split "
            message += f"{held[place]!r}, so that it would be trained on and measured on; take it out of one of them, "
            raise UserError(f"{message}or name other places with --split")


def offset_of_row(row: int) -> int:
    """What the offset of an image is that is a row of an array of pixels (``workloads.convert.arrays``)."""
    return _FIRST_ROW - row


def row_of_offset(offset_bytes: int) -> int:
    """The row of an array; negative: the image lies in a folder or a tar."""
    return _FIRST_ROW - offset_bytes


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def key_of(name: str, *, keeps_letters: bool = False) -> str:
    """Key of a file: its path without the extension. A key ends at the first dot, so other dots become underscores.

    It begins with one underscore at most: names with two are webdataset's own, and no reader takes them for samples.

    Args:
        name: path of the file.
        keeps_letters: keep letters and digits outside of ASCII, which are underscores else.
    """
    stem = str(PurePosixPath(name).with_suffix(""))
    key = (_UNSAFE_BUT_LETTERS if keeps_letters else _UNSAFE_IN_KEY).sub("_", stem).lstrip("/")
    return f"_{key.lstrip('_')}" if key.startswith("__") else key


def _place_of(folder: str, name: str) -> str:
    """Of a file that a table names, perhaps by an absolute path."""
    return name if name.startswith("/") else f"{folder}/{name}"


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
    leaves_N = table.first_leaves()
    rows_N = np.argsort(leaves_N, kind="stable")
    leaves, firsts = np.unique(leaves_N[rows_N], return_index=True)
    is_val_N = np.zeros(len(table), dtype=np.bool_)
    for leaf, rows in zip(leaves.tolist(), np.split(rows_N, firsts)[1:], strict=True):
        order = permutation(seed_sequence(seed, Stage.DATASET, Purpose.VAL_SPLIT, leaf + 1), len(rows))
        num_val = min(round(fraction * len(rows)), len(rows) - 1)
        is_val_N[rows[order[:num_val]]] = True
    return {"train": table.select(np.flatnonzero(~is_val_N)), "val": table.select(np.flatnonzero(is_val_N))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """A source and how to read it; what a converter does not know it ignores."""

    source: Path
    splits: Mapping[str, str] = field(default_factory=dict)
    """Folders or files of the source by split; empty: the usual ones."""
    val_fraction: float = 0.0
    """Share of each class of ``train`` to hold out as ``val``, in [0, 1); 0 = none."""
    seed: int = 0
    """Of the held-out samples and of the order in shards."""
    labels: Path | None = None
    """``imagenet1k``: file or folder that says the classes of validation images."""
    path_column: str = "path"
    label_column: str = "label"
    separator: str = ""
    """Between the labels of one sample; empty: each has one."""
    level_columns: tuple[str, ...] = ()
    root: Path | None = None
    """What relative paths of a table start from; default: the table's folder."""
    follow_links: bool = False
    """Whether links may lead out of the source."""


def level_of(column: str) -> str:
    """The column of the class table for a column of a source: ``class`` is the number of the leaf class there."""
    return TAXONOMIC_CLASS if column == "class" else column


def level_column_notes(columns: Sequence[str], classes: ClassRows) -> list[str]:
    """What people should know of the columns that they asked for as levels: which of them are none, in sentences.

    Args:
        columns: of the source.
        classes: the class table, in which a column `name` holds the names of the classes.
    """
    notes = []
    column_of: dict[str, str] = {}
    for column in columns:
        other = column_of.setdefault(level_of(column), column)
        if other != column:
            lost = (
                f"columns {other!r} and {column!r} are one level, {level_of(column)!r}, with the values of the second"
            )
            notes.append(f"{lost}; rename one of them, to have both")
    if "name" in columns and classes:
        name, number = Counter(row["name"] for row in classes).most_common(1)[0]
        if number > 1:
            what = f"column 'name' is no level, but the names of the classes, and {number} of them are called {name!r}"
            notes.append(f"{what}; rename the column, to have a level of it")
    return notes


class ShardingOptions(Protocol):
    """What decides, besides the listing, which image goes into which shard."""

    @property
    def shard_bytes(self) -> int:
        """Size that a shard stays below, unless one image alone is larger."""

    @property
    def shuffle_seed(self) -> int | None:
        """Draws the order of the samples; None = that of the listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """See `ShardingOptions`."""

    shard_bytes: int
    shuffle_seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """How to write shards."""

    destination_uri: str
    shard_bytes: int = 256 * MIB
    """Size that a shard stays below, unless one image alone is larger."""
    shuffle: bool = True
    """Whether samples are written in an order drawn from the seed; sorted classes make poor blocks to shuffle in."""
    seed: int = 0
    num_processes: int = 1

    @property
    def shuffle_seed(self) -> int | None:
        """See `ShardingOptions`."""
        return self.seed if self.shuffle else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRule:
    """Where links of a source may lead."""

    roots: Sequence[str]
    """Real paths of folders."""
    follows_all: bool = False

    @classmethod
    def within(cls, *folders: Path, follow_links: bool) -> Self:
        """Links may lead anywhere inside these folders, each of which may be reached by a link itself."""
        return cls(roots=tuple(os.path.realpath(folder) for folder in folders), follows_all=follow_links)

    def check(self, path: Path) -> None:
        """Look at a link. Raises ``UserError``: it leads nowhere, in a circle, or out of the source."""
        try:
            target = os.path.realpath(path, strict=True)
        except OSError as error:
            where = "in a circle" if error.errno == errno.ELOOP else "to nothing that can be read"
            raise UserError(f"{path} is a link that leads {where}; repair or remove it") from error
        if not self.follows_all and not any(is_inside(target, root) for root in self.roots):
            message = f"{path} is a link to {target}, which is outside of the source; copy the file, or say that "
            raise UserError(message + "links may be followed anywhere: --follow-links")

    def check_folder(self, folder: Path) -> None:
        """Look at a folder that the source names. Raises ``UserError``: it lies outside, however it gets there."""
        target = os.path.realpath(folder)
        if not self.follows_all and not any(is_inside(target, root) for root in self.roots):
            message = f"{folder} lies in {target}, which is outside of the source; copy its images, or say that paths "
            raise UserError(message + "and links may be followed anywhere: --follow-links")


def folder_images(folder: Path, rule: LinkRule, left_out: LeftOut) -> Iterator[tuple[str, int]]:
    """(path within the folder, bytes) of every image below it, sorted; other files are counted, hidden folders skipped.

    Raises:
        UserError: what is named as an image is no plain file, or a link may not be followed.
    """
    return _images(folder, rule, left_out, ())


def image_bytes(path: Path, rule: LinkRule) -> int:
    """Size of an image of the source.

    Raises:
        UserError: it is no plain file, or a link that may not be followed.
        OSError: it cannot be looked at.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        rule.check(path)
        status = path.stat()
    _check_plain(path, status)
    return status.st_size


def _images(
    folder: Path, rule: LinkRule, left_out: LeftOut, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, int]]:
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise UserError(f"{folder} is a link to a folder that holds it, so that its images have no end; remove it")
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    if not entries:
        left_out.add_empty(folder)
    for entry in entries:
        path = folder / entry.name
        if entry.is_symlink() and (is_image(entry.name) or entry.is_dir()):
            rule.check(path)
        if entry.is_dir():
            below = _images(path, rule, left_out, (*above, here))
            yield from ((f"{entry.name}/{name}", size) for name, size in below)
        elif is_image(entry.name):
            yield entry.name, image_bytes(path, rule)
        else:
            left_out.add(folder, entry.name)


def _check_plain(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is {kind_of(status.st_mode)}, and images are plain files; remove it from the source")
