"""Flat records as Parquet, for data frames: ``pandas.read_parquet``, DuckDB, Polars."""

from __future__ import annotations

import io

from orchestrator.report.records import Records, Value


def render_parquet(records: Records) -> bytes:
    """The records with a typed column each; the same bytes for the same records and version of pyarrow."""
    import pyarrow as pa  # type: ignore[import-untyped]  # 0.2 s to import: only who saves a report pays for it
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    columns = zip(*records.rows, strict=True) if records.rows else [()] * len(records.columns)
    arrays = [pa.array(column, type=_type(column)) for column in columns]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=list(records.columns)), file, compression="zstd")
    return file.getvalue()


def _type(column: tuple[Value, ...]) -> object:
    """Of the values, which may all be None: then a float, as nearly all columns are."""
    import pyarrow as pa

    there = {type(value) for value in column if value is not None}
    if str in there:
        return pa.string()
    return pa.int64() if there == {int} else pa.float64()
