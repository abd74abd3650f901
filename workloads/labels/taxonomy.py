"""Levels of a taxonomy: columns of a class table, be it the data set's own, a file's, or the parts of folder names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from orchestrator.core.errors import BadDataError, NotFoundError, UserError
from orchestrator.storage.files import read_regular
from orchestrator.storage.open import check_allowed, open_store, split_object_uri
from workloads.labels.label_map import ClassLabels
from workloads.labels.setting import TABLE_FILE, ClassTable, Setting

_NOT_LEVELS: Final = frozenset({"class", "name"})
_TAXONOMIC_CLASS: Final = "taxonomic_class"
_LIST_KEYS: Final = ("categories", "classes", "rows")
_SHOWN: Final = 5

Row = Mapping[str, Any]


def level_names(classes: ClassTable) -> list[str]:
    """Columns of the class table that are levels of the hierarchy, in its order."""
    return [column for column in (classes[0] if classes else {}) if column not in _NOT_LEVELS]


def level_labels(level: str, classes: ClassTable) -> ClassLabels:
    """Target ids count the level's nodes in the order in which the leaf classes meet them; nodes are known by name.

    Raises:
        UserError: there is no such level, a class has no value there, or it has a single node.
    """
    if level not in level_names(classes):
        known = ", ".join(sorted(level_names(classes)))
        raise UserError(f"the data set has no level {level!r}; its levels are {known}")
    nodes = _nodes(level, classes)
    names = tuple(dict.fromkeys(nodes))
    if len(names) < 2:
        raise UserError(f"level {level!r} has the single class {names[0]!r}; there is nothing to tell apart")
    target_of = {name: target for target, name in enumerate(names)}
    targets = np.array([target_of[node] for node in nodes], dtype=np.int64)
    return ClassLabels(num_classes=len(names), names=names, targets=targets)


def node_of(row: Row, level: str) -> str | None:
    """Where a class stands at a level; None where its table has nothing: no column, an empty cell, or NaN."""
    value = row.get(level)
    is_nothing = value is None or value != value  # NaN, as tables read by pandas have it  # noqa: PLR0124
    return None if is_nothing or not (text := str(value)).strip() else text


def taxonomy_labels(definition: Mapping[str, Any], setting: Setting) -> ClassLabels:
    """A level of a taxonomy that the class table does not hold.

    Args:
        definition: ``level``; and either ``digest``, ``key`` and ``class_key`` (a file whose column ``key`` has the
            texts of the class table's column ``class_key``), or ``folders`` and ``separator`` (levels in class names).
        setting: the data set, and where the file lies.

    Raises:
        UserError: classes are missing from the table.
        BadDataError: the file is no table.
    """
    return level_labels(definition["level"], taxonomy_rows(definition, setting))


def check_chains(space: Mapping[str, Any], setting: Setting) -> None:
    """Check the ``chain`` of a taxonomy: levels that must each be a function of the next finer one.

    Raises:
        UserError: one is not; violations are listed.
    """
    definition = space.get("taxonomy", {})
    if "chain" in definition:
        check_nested(taxonomy_rows(definition, setting), definition["chain"])


def table_digest(setting: Setting) -> str:
    """Sha256 of the class table that a taxonomy is read from."""
    return read_table(setting.files[TABLE_FILE])[1]


def taxonomy_rows(definition: Mapping[str, Any], setting: Setting) -> list[dict[str, Any]]:
    """The class table that a taxonomy brings along, row c for leaf class c; see `taxonomy_labels`."""
    if "folders" in definition:
        return folder_rows(setting.classes, definition["folders"], definition["separator"])
    return _joined(definition, setting)


def folder_rows(classes: ClassTable, levels: Sequence[str], separator: str) -> list[dict[str, Any]]:
    """Levels from the parts of class names such as ``Plantae/Rosales/Rosa`` or ``00042_Plantae_Rosales_Rosa``.

    Raises:
        UserError: a name has another number of parts.
    """
    rows = []
    for row in classes:
        parts = str(row["name"]).split(separator)
        if len(parts) != len(levels):
            message = f"the class name {row['name']!r} has {len(parts)} parts between {separator!r}, but "
            raise UserError(message + f"{len(levels)} levels are named ({', '.join(levels)}); name each part")
        rows.append({"class": row["class"], "name": row["name"], **dict(zip(levels, parts, strict=True))})
    return rows


def violations(rows: Sequence[Row], coarse: str, fine: str) -> list[str]:
    """Nodes of the finer level that lie below several nodes of the coarser one, each with those."""
    parents: dict[str, dict[str, None]] = {}
    for row in rows:
        parents.setdefault(str(node_of(row, fine)), {})[str(node_of(row, coarse))] = None
    return [f"{node} ({', '.join(above)})" for node, above in parents.items() if len(above) > 1]


def check_nested(rows: Sequence[Row], chain: Sequence[str]) -> None:
    """Raises ``UserError`` that lists violations: each level of the chain must be a function of the next finer one.

    Every class must have a value at every level.
    """
    sizes = {level: len(set(_nodes(level, rows))) for level in chain}
    ordered = sorted(chain, key=sizes.__getitem__)
    for coarse, fine in pairwise(ordered):
        found = violations(rows, coarse, fine)
        if found:
            shown = "; ".join(found[:_SHOWN]) + ("; ..." if len(found) > _SHOWN else "")
            message = f"level {coarse!r} is not a function of {fine!r}: {len(found)} of its nodes lie below several: "
            raise UserError(f"{message}{shown}; correct the table, or set nested: false to use such levels anyway")


def _nodes(level: str, rows: Sequence[Row]) -> list[str]:
    """The node of each class. Raises ``UserError`` that names those without."""
    nodes = [node_of(row, level) for row in rows]
    without = [number for number, node in enumerate(nodes) if node is None]
    if without:
        shown = ", ".join(_shown(number, rows[number]) for number in without[:_SHOWN])
        more = f", ... ({len(without)} in all)" if len(without) > _SHOWN else ""
        verb = "has" if len(without) == 1 else "have"
        raise UserError(f"class {shown}{more} {verb} no value at level {level!r}; complete the class table")
    return [str(node) for node in nodes]


def _shown(number: int, row: Row) -> str:
    return f"{number} ({row['name']!r})" if row.get("name") is not None else str(number)


def read_table(uri: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of a CSV, JSON or Parquet file at a path or URI, and the sha256 of the file.

    JSON is a list of rows, or an object that holds one as ``categories`` (iNaturalist), ``classes`` or ``rows``. A
    column ``class`` that holds text is the taxonomic class, and is called so; ``species`` is added as the binomial
    where there are only genus and epithet.

    Raises:
        UserError: there is no such file.
        BadDataError: it is no table.
    """
    content = _content(uri)
    digest = sha256(content).hexdigest()
    if digest not in _parsed:  # a sweep asks for many levels of one table
        _parsed.clear()
        _parsed[digest] = _rows_of(content, uri)
    return _parsed[digest], digest


_parsed: dict[str, list[dict[str, Any]]] = {}


def _rows_of(content: bytes, uri: str) -> list[dict[str, Any]]:
    try:
        rows = _parse(content, uri.rpartition(".")[2].lower())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadDataError(f"{uri} is no table of classes (csv, json or parquet with a header): {error}") from error
    if not rows:
        raise BadDataError(f"{uri} has no rows; it must have one per class")
    return [_completed(row) for row in rows]


def _joined(definition: Mapping[str, Any], setting: Setting) -> list[dict[str, Any]]:
    """The table's rows in the order of the leaf classes."""
    uri, key, class_key = setting.files[TABLE_FILE], definition["key"], definition["class_key"]
    rows, digest = read_table(uri)
    if definition["digest"] not in {"", digest}:
        raise UserError(f"{uri} has changed since the sweep was planned (sha256 {digest[:12]}...); plan it again")
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if key not in row:
            raise UserError(f"{uri} has no column {key!r}; its columns are {', '.join(row)}; name one as key")
        if str(row[key]) in found:
            raise UserError(
                f"{uri} has {row[key]!r} twice in column {key!r}; choose a key that differs between classes"
            )
        found[str(row[key])] = row
    wanted = [str(row.get(class_key)) for row in setting.classes]
    missing = [name for name in wanted if name not in found]
    if missing:
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        message = f"{uri} lacks {len(missing)} classes of the data set: {shown}; "
        raise UserError(message + f"column {key!r} must hold what {class_key!r} of the class table holds")
    return [{**found[name], "class": leaf, "name": name} for leaf, name in enumerate(wanted)]


def _content(uri: str) -> bytes:
    try:
        if "://" not in uri:
            check_allowed(Path(uri).absolute().as_uri())
            return read_regular(Path(uri))
        folder, name = split_object_uri(uri)
        return open_store(folder).get(name)
    except (OSError, NotFoundError) as error:
        raise UserError(f"the class table {uri} cannot be read: {error}") from error


def _parse(content: bytes, suffix: str) -> list[dict[str, Any]]:
    if suffix == "csv":
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        return [_within_header(row, reader.line_num) for row in reader]
    if suffix == "parquet":
        import pandas as pd

        frame = pd.read_parquet(io.BytesIO(content))
        return [{str(column): value for column, value in row.items()} for row in frame.to_dict("records")]
    document = json.loads(content)
    if isinstance(document, dict):
        key = next((key for key in _LIST_KEYS if key in document), _LIST_KEYS[0])
        document = document[key]
    return [dict(row) for row in document]


def _within_header(row: dict[str, Any], line: int) -> dict[str, Any]:
    if None in row:  # what csv calls cells beyond the last column
        raise ValueError(f"line {line} has more cells than the header")
    return row


def _completed(row: dict[str, Any]) -> dict[str, Any]:
    if isinstance(row.get("class"), str) and not row["class"].isdigit():
        row = {(_TAXONOMIC_CLASS if column == "class" else column): value for column, value in row.items()}
    if "species" not in row and row.get("genus") and row.get("specific_epithet"):
        row = {**row, "species": f"{row['genus']} {row['specific_epithet']}"}
    return row
