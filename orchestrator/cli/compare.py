"""``orchestrator compare``: the same cells of several sweeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.text import Text

from orchestrator.cli.console import stderr_console, stdout_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, TableForm, print_document
from orchestrator.cli.status import open_existing_store, require_sweep
from orchestrator.report.build import build_report
from orchestrator.report.compare_sweeps import check_different, compare_sweeps, comparison_tables, sweep_records
from orchestrator.report.render.files import json_ready, markdown_table, render_csv
from orchestrator.report.render.terminal import FittingTable
from orchestrator.report.results import Report
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import load_plan, load_snapshot


def show_comparison(sweeps: Sequence[str], *, metric: str, form: TableForm, store_uri: str) -> ExitCode:
    """Print the comparison; it is not saved, as it belongs to no single sweep."""
    check_different(sweeps)
    store = open_existing_store(store_uri)
    for sweep in sweeps:
        require_sweep(store, sweep)
    comparison = compare_sweeps([_report(store, sweep, metric) for sweep in sweeps])
    if form in {TableForm.JSON, TableForm.YAML}:
        print_document(json_ready(comparison.to_json()), DocumentForm(form.value))
    elif form is TableForm.CSV:
        sys.stdout.write(render_csv(sweep_records(comparison)))
    else:
        for table in comparison_tables(comparison):
            if form is TableForm.TABLE:
                stdout_console().print(FittingTable(table=table))
            else:
                sys.stdout.write(markdown_table(table) + "\n\n")
    for note in comparison.notes:
        stderr_console().print(Text(f"Note: {note}", style="yellow"))
    return ExitCode.OK


def _report(store: ObjectStore, sweep: str, metric: str) -> Report:
    snapshot = load_snapshot(store, sweep)
    plan = snapshot.plan or load_plan(store, sweep)
    chosen = replace(plan, metric=metric) if metric else plan
    return build_report(store, chosen, snapshot.jobs)
