"""``orchestrator report``: the answer, computed from artifacts alone."""

from __future__ import annotations

import json

from orchestrator.cli.console import stdout_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.status import open_existing_store, require_sweep
from orchestrator.controller.client import load_plan
from orchestrator.report.render_terminal import render_terminal
from orchestrator.report.report import build_report, save_report
from orchestrator.storage.protocol import ObjectStore


def show_report(sweep: str, store_uri: str, *, as_json: bool) -> ExitCode:
    """Print the report of what is committed at this moment, and save it in the store."""
    store = open_existing_store(store_uri)
    require_sweep(store, sweep)
    print_report(store, sweep, as_json=as_json)
    return ExitCode.OK


def print_report(store: ObjectStore, sweep: str, *, as_json: bool) -> None:
    """Compute, save and print."""
    report = build_report(store, load_plan(store, sweep))
    files = save_report(store, sweep, report)
    console = stdout_console()
    if as_json:
        console.print_json(json.dumps({**report.to_json(), "files": [f"{store.uri}/{name}" for name in files]}))
        return
    console.print(render_terminal(report))
    console.print(f"Report files: {store.uri}/{files[0].rpartition('/')[0]}/")
