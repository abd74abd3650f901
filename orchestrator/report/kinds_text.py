"""Kinds of labels against their numbers of classes, as papers print such results."""

from __future__ import annotations

from orchestrator.report.numbers import MISSING, mean_and_std, plus_minus
from orchestrator.report.results import Row, Table
from orchestrator.report.text import TextTable, describe_transfer, units

_MIN_KINDS, _MIN_ROWS = 2, 3
_MAX_COLUMNS = 8


def kinds_table(table: Table) -> TextTable | None:
    """Kinds of labels and their numbers of classes G as the two sides of a table; G goes down where there are many.

    None where there is nothing to arrange: fewer than two kinds with at least three label spaces each.
    """
    kinds: dict[str, dict[int, list[Row]]] = {}
    for row in table.rows:
        if row.granularity is not None:
            kinds.setdefault(row.series, {}).setdefault(row.granularity, []).append(row)
    large = [found for found in kinds.values() if sum(map(len, found.values())) >= _MIN_ROWS]
    if len(large) < _MIN_KINDS:
        return None
    sizes = sorted({size for found in kinds.values() for size in found})
    cells = {
        kind: [" / ".join(_cell(row, table) for row in found.get(size, ())) for size in sizes]
        for kind, found in kinds.items()
    }
    title = f"{describe_transfer(table)}: {table.metric}{units(table.metric)[0]} by kind of labels and G"
    if len(sizes) <= _MAX_COLUMNS:
        header = ("labels", *map(str, sizes))
        rows = [(kind, *some) for kind, some in cells.items()]
    else:
        header = ("G", *cells)
        rows = [(str(size), *some) for size, some in zip(sizes, zip(*cells.values(), strict=True), strict=True)]
    return TextTable(title=title, header=header, rows=tuple(rows), caption=_caption(table))


def _cell(row: Row, table: Table) -> str:
    found = MISSING if row.summary is None else plus_minus(row.summary, table.metric)
    if row.published is None:
        return found
    return f"{found} (published {mean_and_std(row.published.value, row.published.std, table.metric)})"


def _caption(table: Table) -> str:
    return f"baseline: {table.baseline}" if table.baseline else ""
