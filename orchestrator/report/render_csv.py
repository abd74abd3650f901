"""Flat records as CSV (RFC 4180); an empty cell is a value that does not exist (yet)."""

from __future__ import annotations

import csv
import io

from orchestrator.report.records import Records


def render_csv(records: Records) -> str:
    """A header and a line per record."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(records.columns)
    writer.writerows(records.rows)
    return file.getvalue()
