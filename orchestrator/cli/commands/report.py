"""``orchestrator report``: the report of a sweep, computed only from artifacts."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.arguments import PricesOption, StoreOption, SweepName
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, TableForm, TableOption, print_document, stdout_console
from orchestrator.cli.pages import compare_line, tracking_and_pages
from orchestrator.core.errors import OrchestratorError, UserError
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import build_report
from orchestrator.report.inputs import read_learning
from orchestrator.report.render.files import MARKDOWN, PAGE, RESULTS, json_ready, render_files, save_files
from orchestrator.report.render.page import render_page
from orchestrator.report.render.terminal import render_terminal
from orchestrator.report.results import Report
from orchestrator.services.costs import cost_lines, read_prices, sweep_bill
from orchestrator.services.status import used_hours
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.storage.layout import provenance_name, spec_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed
from orchestrator.sweeps.client import load_plan, load_snapshot
from orchestrator.tracking.links import find_run_links


def report(
    sweep: SweepName,
    *,
    html: Annotated[bool, typer.Option("--html", help="Also write the interactive page, report.html.")] = False,
    out: Annotated[str, typer.Option(help="Also write every file into this directory.")] = "",
    prices: PricesOption = "",
    output: TableOption = TableForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Compute the report from the artifacts, print it and save it in the store; works while the sweep runs."""
    options = ReportOptions(form=output, with_page=html, directory=out, store=store, prices=prices)
    raise typer.Exit(show_report(sweep, options))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Flags of the command."""

    form: TableForm = TableForm.TABLE
    with_page: bool = False
    directory: str = ""
    """Where copies of the files go; empty: only into the store."""
    store: str = ""
    prices: str = ""
    """Path of a table of prices; empty: that of the setting, if there is one."""


def show_report(sweep: str, options: ReportOptions) -> ExitCode:
    """Print the report of what is committed at this moment, and save it in the store."""
    store = open_existing_store(options.store)
    require_sweep(store, sweep)
    _report(store, sweep, options)
    return ExitCode.OK


def print_report(store: ObjectStore, sweep: str, form: TableForm, prices: str) -> tuple[Plan, Report]:
    """Compute, save and print; ``prices`` as of the options."""
    return _report(store, sweep, ReportOptions(form=form, prices=prices))


def compute(store: ObjectStore, sweep: str, prices: PriceTable | None = None) -> tuple[Plan, Report]:
    """A sweep's plan and its report; the journal gives the reasons of jobs without a result."""
    snapshot = load_snapshot(store, sweep)
    plan = snapshot.plan or load_plan(store, sweep)
    return plan, build_report(store, plan, snapshot.jobs, prices)


def _report(store: ObjectStore, sweep: str, options: ReportOptions) -> tuple[Plan, Report]:
    with _without_cyclic_collection():
        prices = read_prices(options.prices)
        plan, report = compute(store, sweep, prices)
        files = render_files(report)
        if options.with_page:
            learning = read_learning(store, plan.jobs)
            origin = tuple(_origin(store, plan, prices))
            files[PAGE] = render_page(report, plan, learning, links=_run_links(store, plan), origin=origin)
    names = save_files(store, sweep, files)
    if options.directory:
        _write(Path(options.directory), files)
    _print(report, files, [f"{store.uri}/{name}" for name in names], options, compare=compare_line(store, plan))
    return plan, report


def _origin(store: ObjectStore, plan: Plan, prices: PriceTable | None) -> Iterator[tuple[str, str]]:
    """Facts of the study that are not in the plan, as far as the store has them."""
    snapshot = load_snapshot(store, plan.sweep)
    ended_at_s = snapshot.finished_at_s
    if snapshot.accepted_at_s:
        until = "not finished" if ended_at_s is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(ended_at_s))
        yield "Dates", f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(snapshot.accepted_at_s))} to {until} (UTC)"
    gpu_hours, core_hours = used_hours(snapshot, time.time())
    used = [f"{hours:,.2f} {unit}" for hours, unit in ((gpu_hours, "GPU-hours"), (core_hours, "core-hours")) if hours]
    yield "Cost", "; ".join([*used, *cost_lines(sweep_bill(snapshot, prices, time.time()), prices, None)]) or "nothing"
    with suppress(OrchestratorError):
        name = provenance_name(plan.sweep, snapshot.revision)
        stated = parse_sealed(name, store.get(name)).get("submitted_from") or {}
        if commit := str(stated.get("commit", "")):
            yield "Commit", commit + (" with uncommitted changes" if stated.get("diff") else "")
    yield "sweep.yaml", f"{store.uri.rstrip('/')}/{spec_name(plan.sweep, snapshot.revision)}"


@contextmanager
def _without_cyclic_collection() -> Iterator[None]:
    """A report creates millions of objects and almost no cycles: collecting them would take a seventh of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _print(
    report: Report, files: Mapping[str, bytes], uris: list[str], options: ReportOptions, *, compare: str
) -> None:
    console = stdout_console()
    if options.form in {TableForm.JSON, TableForm.YAML}:
        print_document(json_ready({**report.to_json(), "files": uris}), DocumentForm(options.form.value))
    elif options.form is TableForm.TABLE:
        console.print(render_terminal(report))
        folder = options.directory or uris[0].rpartition("/")[0]
        console.print(f"Report files: {folder}/")
        if options.with_page:
            console.print(f"Interactive page: {folder}/{PAGE}")
        console.print(compare, soft_wrap=True, end="\n" if compare else "")
    else:
        sys.stdout.write(files[RESULTS if options.form is TableForm.CSV else MARKDOWN].decode())


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        message = f"--out {directory}: {error.strerror}; the report is in the store all the same"
        raise UserError(message) from error


def _run_links(store: ObjectStore, plan: Plan) -> dict[str, str]:
    """Addresses of the tracked runs by job."""
    return find_run_links(store, plan, *tracking_and_pages(plan))
