"""``orchestrator config``: the settings that count here, and who says so."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from orchestrator.cli.configuration import Resolved
from orchestrator.cli.console import stdout_console
from orchestrator.cli.output import DocumentForm, print_document


def show_config(found: Sequence[Resolved], form: DocumentForm, *, with_origin: bool) -> None:
    """Print all settings, passwords hidden."""
    if form is not DocumentForm.TABLE:
        print_document({each.setting.name: _document(each, with_origin=with_origin) for each in found}, form)
        return
    table = Table(title="Settings", title_justify="left")
    for column in ("setting", "value", *(("from",) if with_origin else ()), "meaning"):
        table.add_column(column, overflow="fold")
    for each in found:
        origin = (escape(each.origin),) if with_origin else ()
        table.add_row(each.setting.name, escape(each.shown) or "-", *origin, each.setting.meaning)
    stdout_console().print(table)


def _document(resolved: Resolved, *, with_origin: bool) -> object:
    if not with_origin:
        return resolved.shown
    return {"value": resolved.shown, "origin": resolved.origin, "variable": resolved.setting.variable}
