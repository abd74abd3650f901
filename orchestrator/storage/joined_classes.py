"""Class tables of several data sets joined by the names of their classes; for planning and for the index itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.core.errors import BadDataError

_NUMBER, _NAME = "class", "name"


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
