"""Tables of ``orchestrator data``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from orchestrator.core.units import format_bytes


def dataset_tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Splits; then, where they are known, sizes of classes by level."""
    table = Table(title=found["uri"], title_justify="left")
    table.add_column("split")
    for column in ("shards", "samples", "size"):
        table.add_column(column, justify="right")
    for split, sizes in found["splits"].items():
        size = format_bytes(sizes["size_bytes"])
        table.add_row(split, str(sizes["num_shards"]), f"{sizes['num_samples']:,}", size)
    table.caption, table.caption_justify = _classes(found), "left"
    yield table
    if found.get("samples_per_class"):
        yield _sizes_table(found["samples_per_class"])


def bad_table(bad_samples: Mapping[str, Any]) -> Table:
    """Bad samples by split and reason, with the first of each."""
    table = Table("split", "reason", "samples", "the first", title="Samples that cannot be used", title_justify="left")
    for split, reasons in bad_samples.items():
        for reason, found in reasons.items():
            table.add_row(split, reason, str(found["count"]), found["first"][0])
    return table


def samples_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per sample."""
    table = Table("shard", "key", "class", "name", "pixels", "size")
    for row in rows:
        classes, names = " ".join(map(str, row["classes"])), ", ".join(row["names"])
        size = f"{row['width']}x{row['height']}"
        table.add_row(row["shard"], row["key"], classes, names, size, format_bytes(row["length_bytes"]))
    return table


def _classes(found: Mapping[str, Any]) -> str:
    levels = ", ".join(f"{level} {count:,}" for level, count in found["levels"].items())
    kind = "multi-label, " if found["multi_label"] else ""
    return f"{kind}{found['num_classes']:,} classes" + (f"; levels: {levels}" if levels else "")


def _sizes_table(sizes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    table = Table("split", "level", title="Samples per class", title_justify="left")
    columns = {"num_nodes": "classes", "min": "min", "median": "median", "max": "max", "empty": "without samples"}
    for title in columns.values():
        table.add_column(title, justify="right")
    for split, levels in sizes.items():
        for level, found in levels.items():
            table.add_row(split, level, *(f"{found[column]:,g}" for column in columns))
    return table
