"""``csv`` and ``parquet``: a table with a path and a label per image, one file per split.

Labels are numbers (then they are the classes) or names (then classes are numbered in the order of the names; also
``2.0`` is a name). Several labels of a sample are in one field with a separator, or in a list column of Parquet: the
data set is multi-label.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows, is_missing
from workloads.convert.imagefolder import with_val
from workloads.convert.items import (
    Conversion,
    ConvertRequest,
    ItemTable,
    LinkRule,
    image_bytes,
    is_image,
    level_of,
)

_MAX_CLASSES = 10_000_000
_MAX_GROUP_BYTES = 512 * 1024**2
Row = Mapping[str, Any]


def convert_csv(request: ConvertRequest) -> Conversion:
    """List the images of CSV files with a header line. Raises ``UserError`` for a wrong column, label or path."""
    return _convert(request, "csv", _csv_rows)


def convert_parquet(request: ConvertRequest) -> Conversion:
    """List the images of Parquet files. Raises ``UserError`` for a wrong column, label or path."""
    return _convert(request, "parquet", _parquet_rows)


def _convert(
    request: ConvertRequest, suffix: str, rows_of: Callable[[Path, Sequence[str]], Iterator[Row]]
) -> Conversion:
    files = _files(request, suffix)
    columns = (request.path_column, request.label_column, *request.level_columns)
    labels, is_multi = _Labels(), bool(request.separator)
    levels: dict[int, Row] = {}
    splits: dict[str, ItemTable] = {}
    for split, path in files.items():
        splits[split] = table = ItemTable()
        root = request.root or path.parent
        container, rule = table.container(root), LinkRule.within(root, follow_links=request.follow_links)
        for row in rows_of(path, columns):
            found = row[request.label_column]
            is_multi = is_multi or isinstance(found, list)
            leaves = tuple(dict.fromkeys(labels.number(text) for text in _tokens(found, request.separator)))
            _note_levels(levels, leaves, row, request.level_columns)
            name = str(row[request.path_column])
            table.add(name, container=container, leaves=leaves, length_bytes=_size(root, name, path, rule))
    return labels.conversion(suffix, with_val(splits, request), levels, multi_label=is_multi)


class _Labels:
    """Numbers labels as they come; the final numbers are known at the end."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def number(self, text: str) -> int:
        """A provisional number."""
        return self._seen.setdefault(text, len(self._seen))

    def conversion(
        self, converter: str, splits: Mapping[str, ItemTable], levels: Mapping[int, Row], *, multi_label: bool
    ) -> Conversion:
        """The tables with final classes."""
        are_numbers = all(text.isascii() and text.isdigit() for text in self._seen)
        if are_numbers:
            num_classes = 1 + max((int(text) for text in self._seen), default=-1)
            if num_classes > _MAX_CLASSES:
                raise UserError(f"the largest label is {num_classes - 1}; numbers must count classes from 0")
            names = [str(leaf) for leaf in range(num_classes)]
        else:
            names = sorted(self._seen)
        leaf_of = {name: leaf for leaf, name in enumerate(names)}
        final = {number: leaf_of[str(int(text)) if are_numbers else text] for text, number in self._seen.items()}
        by_leaf = {final[number]: row for number, row in levels.items()}
        classes: ClassRows = [{"class": leaf, "name": name, **by_leaf.get(leaf, {})} for leaf, name in enumerate(names)]
        for table in splits.values():
            table.map_leaves(final)
        return Conversion(converter=converter, classes=classes, splits=splits, multi_label=multi_label)


def _tokens(label: object, separator: str) -> list[str]:
    if isinstance(label, list):
        return [str(item) for item in label if not is_missing(item)]
    text = "" if is_missing(label) else str(label).strip()
    if separator:
        return [part.strip() for part in text.split(separator) if part.strip()]
    if not text:
        raise UserError("a sample has an empty label; remove its row, or give --separator for multi-label data")
    return [text]


def _note_levels(levels: dict[int, Row], leaves: Sequence[int], row: Row, columns: Sequence[str]) -> None:
    if not columns or len(leaves) != 1:
        return
    found = {level_of(column): None if is_missing(row[column]) else str(row[column]) for column in columns}
    known = levels.setdefault(leaves[0], found)
    if known != found:
        level = next(level for level in found if known[level] != found[level])
        message = f"a sample of the class of {row!r} has {known[level]!r} at level {level!r}, this one {found[level]!r}"
        raise UserError(message + "; a level must follow from the label: correct the table")


def _files(request: ConvertRequest, suffix: str) -> dict[str, Path]:
    if request.splits:
        found = {split: request.source / name for split, name in request.splits.items()}
    elif request.source.is_file():
        found = {"train": request.source}
    else:
        found = {split: request.source / f"{split}.{suffix}" for split in ("train", "val", "test")}
        found = {split: path for split, path in found.items() if path.is_file()}
    if "train" not in found or not all(path.is_file() for path in found.values()):
        raise UserError(f"{request.source} has no train.{suffix}; name the tables: --split train=list.{suffix}")
    return found


def _size(root: Path, name: str, table: Path, rule: LinkRule) -> int:
    if not is_image(name):
        raise UserError(f"{table} names {name!r}, which has no extension of an image")
    try:
        return image_bytes(root / name, rule)
    except OSError as error:
        raise UserError(f"{table} names {name!r}, but {root / name} cannot be read: {error.strerror}") from error


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            _check_columns(path, columns, reader.fieldnames or ())
            yield from reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as CSV in UTF-8 (line {reader.line_num + 1}: {error})") from error


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        table = ParquetFile(path)
        _check_columns(path, columns, table.schema_arrow.names)
        _check_expansion(path, table.metadata, columns)
        for batch in table.iter_batches(columns=list(columns)):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}); write it again") from error


def _check_expansion(path: Path, metadata: Any, columns: Sequence[str]) -> None:  # noqa: ANN401 - pyarrow is untyped
    """Refuse a group of rows that expands to more than belongs into memory; some kilobytes can hold gigabytes."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        chunks = (group.column(number) for number in range(group.num_columns))
        size = sum(
            chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns
        )
        if size > _MAX_GROUP_BYTES:
            message = (
                f"{path} has a group of rows of {size} bytes, the most is {_MAX_GROUP_BYTES}; write it with smaller"
            )
            raise UserError(f"{message} row groups")


def _check_columns(path: Path, columns: Sequence[str], found: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in found]:
        message = f"{path} has no column {missing[0]!r}; it has {', '.join(found)}"
        raise UserError(message + ": name them with --path-column, --label-column and --level-column")
