"""``csv`` and ``parquet``: a table with a path and a label per image, one file per split.

Labels are numbers (then they are the classes) or names (then classes are numbered in the order of the names; also
``2.0`` is a name). Several labels of a sample are in one field with a separator, or in a list column of Parquet: the
data set is multi-label.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import LEAF_LEVEL, ClassRows, is_missing
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


def find_level_columns(request: ConvertRequest, suffix: str) -> tuple[list[str], dict[str, str]]:
    """Columns that can be levels, coarse to fine: their values follow from the label and join classes.

    Second, columns of that kind which cannot be had for their name, and why.

    There are none if no label occurs twice, since all columns follow from it then, or if a sample has several labels.
    Raises ``UserError`` as the converters, and where a column that they would not read is damaged.
    """
    files, rows_of = _files(request, suffix), _parquet_rows if suffix == "parquet" else _csv_rows
    used = (request.path_column, request.label_column)
    first, *others = (_plain_columns(path, suffix, used) for path in files.values())
    nodes: dict[str, dict[str, str | None]] = {
        column: {} for column in first if all(column in names for names in others)
    }
    num_rows, labels = 0, set[str]()
    for path in files.values():
        for row in rows_of(path, (*used, *nodes)):
            label, *more = _tokens(row[request.label_column], request.separator) or ("", "")
            if more or not nodes:
                return [], {}
            num_rows += 1
            labels.add(label)
            for column in [*nodes]:
                node = _node(row[column])
                if nodes[column].setdefault(label, node) != node:
                    del nodes[column]
    class_of = _class_names(labels)
    num_classes, counts = len({*class_of.values()}), dict[str, int]()
    for column, of_label in nodes.items():
        pairs = {(class_of[label], node) for label, node in of_label.items()}
        number = len({node for _, node in pairs if node})
        if len(pairs) == num_classes and 2 <= number < num_classes < num_rows:
            counts[column] = number
    left_out = {column: why for column in counts if (why := _name_problem(column, counts))}
    return sorted((column for column in counts if column not in left_out), key=counts.__getitem__), left_out


def _name_problem(column: str, levels: Collection[str]) -> str:
    """Why a column cannot be a level under its name beside other levels; empty if it can."""
    if column == LEAF_LEVEL:
        return "since in a sweep this name means the classes themselves; rename its column"
    other = level_of(column)
    if other != column and other in levels:
        return f"since its name in a class table is that of the column {other!r}; rename one of the two"
    return ""


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
        """The tables with final classes. Raises ``UserError`` for labels of which some are negative numbers."""
        negative = [text for text in self._seen if text.startswith("-")]
        if negative and _are_numbers({text.removeprefix("-") for text in self._seen}):
            message = f"{negative[0]} is no class: numbers count classes from 0; remove its rows if it marks a missing "
            raise UserError(message + "label, else number the classes from 0 or name them")
        if _are_numbers(self._seen):
            num_classes = 1 + max((int(text) for text in self._seen), default=-1)
            if num_classes > _MAX_CLASSES:
                raise UserError(f"the largest label is {num_classes - 1}; numbers must count classes from 0")
            names = [str(leaf) for leaf in range(num_classes)]
        else:
            names = sorted(self._seen)
        leaf_of = {name: leaf for leaf, name in enumerate(names)}
        class_of = _class_names(self._seen)
        final = {number: leaf_of[class_of[text]] for text, number in self._seen.items()}
        by_leaf: dict[int, Row] = {}
        for text, number in self._seen.items():
            if number in levels:
                _note(by_leaf, final[number], levels[number], f"the label {text!r}")
        classes: ClassRows = [{"class": leaf, "name": name, **by_leaf.get(leaf, {})} for leaf, name in enumerate(names)]
        for table in splits.values():
            table.map_leaves(final)
        return Conversion(converter=converter, classes=classes, splits=splits, multi_label=multi_label)


def _are_numbers(labels: Collection[str]) -> bool:
    return all(text.isascii() and text.isdigit() for text in labels)


def _class_names(labels: Collection[str]) -> dict[str, str]:
    """The class of each label: of numbers, 07 and 7 are one."""
    are_numbers = _are_numbers(labels)
    return {text: str(int(text)) if are_numbers else text for text in labels}


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
    found = {level_of(column): _node(row[column]) for column in columns}
    _note(levels, leaves[0], found, f"the class of {row!r}")


def _node(value: object) -> str | None:
    return None if is_missing(value) else str(value)


def _note(levels: dict[int, Row], leaf: int, found: Row, what: str) -> None:
    known = levels.setdefault(leaf, found)
    if known != found:
        level = next(level for level in found if known[level] != found[level])
        message = f"a sample of {what} has {known[level]!r} at level {level!r}, this one {found[level]!r}"
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
            for row in reader:
                if any(row.get(None, ())):  # what csv calls cells beyond the last column
                    message = f"line {reader.line_num} of {path} has more cells than the header; quote cells that hold "
                    raise UserError(f"{message}commas")
                yield row
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


def _plain_columns(path: Path, suffix: str, used: Sequence[str]) -> list[str]:
    """Names of columns of text and numbers besides those that are used and the names of classes.

    Others hold images or lists. Of Parquet, only as many as belong into memory together, small ones first: a level
    repeats few values, which are short or stored once.
    """
    if suffix == "csv":
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file, suppress(csv.Error):
            return [name for name in next(csv.reader(file), []) if name not in {*used, "name"}]
        return []  # whoever reads the rows says what is wrong
    from pyarrow import ArrowException, types
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}); write it again") from error
    is_plain = (types.is_string, types.is_large_string, types.is_dictionary, types.is_integer, types.is_boolean)
    plain = [field.name for field in table.schema_arrow if any(is_type(field.type) for is_type in is_plain)]
    largest = Counter[str]()
    for sizes in _group_sizes(table.metadata):
        largest |= sizes
    room = _MAX_GROUP_BYTES - sum(largest[column] for column in {*used})
    ordered = sorted({*plain} - {*used, "name"}, key=largest.__getitem__)
    totals = accumulate(largest[column] for column in ordered)
    small = {column for column, total in zip(ordered, totals, strict=True) if total <= room}
    return [column for column in plain if column in small]


def _check_expansion(path: Path, metadata: Any, columns: Sequence[str]) -> None:  # noqa: ANN401 - pyarrow is untyped
    """Refuse a group of rows that expands to more than belongs into memory; some kilobytes can hold gigabytes."""
    for sizes in _group_sizes(metadata):
        size = sum(sizes[column] for column in {*columns})
        if size > _MAX_GROUP_BYTES:
            message = (
                f"{path} has a group of rows of {size} bytes, the most is {_MAX_GROUP_BYTES}; write it with smaller"
            )
            raise UserError(f"{message} row groups")


def _group_sizes(metadata: Any) -> Iterator[Counter[str]]:  # noqa: ANN401 - pyarrow is untyped
    """Bytes of each column, expanded, for each group of rows."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        sizes = Counter[str]()
        for chunk in (group.column(number) for number in range(group.num_columns)):
            place = chunk.path_in_schema
            for column in {place, place.partition(".")[0]}:  # a column of lists, or one with a dot in its name
                sizes[column] += chunk.total_uncompressed_size
        yield sizes


def _check_columns(path: Path, columns: Sequence[str], found: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in found]:
        message = f"{path} has no column {missing[0]!r}; it has {', '.join(found)}"
        raise UserError(message + ": name them with --path-column, --label-column and --level-column")
