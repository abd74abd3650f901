"""``orchestrator status``: the state of sweeps from their journals; needs no cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from orchestrator.cli.arguments import (
    PricesOption,
    StoreOption,
    complete_sweep,
)
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.cli.pages import address_lines, compare_line, compare_link
from orchestrator.core.errors import ControllerError, CorruptObjectError, NotFoundError, OrchestratorError, UserError
from orchestrator.core.units import format_duration
from orchestrator.services.costs import read_prices
from orchestrator.services.status import (
    SweepStatus,
    failure_lines,
    load_status,
    revive_killed_stack,
    running_lines,
    status_document,
    status_lines,
)
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_snapshot

_PHASES = ("queued", "launch", "import", "to first step", "work")
"""Seconds of a job: ready to launched; launched to running and ended to known; loading code; setup; all of the work."""

_EXITS = {
    SweepState.SUCCEEDED: ExitCode.OK,
    SweepState.FAILED: ExitCode.SWEEP_FAILED,
    SweepState.CANCELLED: ExitCode.CANCELLED,
}


def status(
    sweep: Annotated[
        str, typer.Argument(help="Name of a sweep; none: list all sweeps.", autocompletion=complete_sweep)
    ] = "",
    *,
    prices: PricesOption = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show the state of a sweep's jobs; needs only the store."""
    raise typer.Exit(show_status(sweep, store, output, prices))


def exit_code_for(snapshot: Snapshot) -> ExitCode:
    """Exit code of a command about a sweep."""
    return _EXITS.get(snapshot.state, ExitCode.UNFINISHED)


def show_status(sweep: str, store_uri: str, form: DocumentForm, prices: str = "") -> ExitCode:
    """Print one sweep's jobs, or all sweeps when none is named."""
    if prices and not sweep:
        raise UserError("--prices is for the cost of one sweep: orchestrator status SWEEP --prices FILE")
    table = read_prices(prices) if sweep else None
    store = open_existing_store(store_uri)
    if not sweep:
        return _show_all(store, form)
    require_sweep(store, sweep)
    status = load_status(store, load_snapshot(store, sweep), prices=table)
    snapshot = status.snapshot
    revive_killed_stack(snapshot)
    if form is DocumentForm.TABLE:
        compare = compare_line(store, snapshot.plan) if snapshot.plan is not None else ""
        stdout_console().print(status_table(status, store=store_uri))
        for line in address_lines(snapshot.cluster):
            stdout_console().print(line, soft_wrap=True)
        stdout_console().print(compare, soft_wrap=True, end="\n" if compare else "")
    else:
        compare = compare_link(store, snapshot.plan) if snapshot.plan is not None else ""
        print_document({**status_document(status), "compare": compare}, form)
    return exit_code_for(snapshot)


def status_table(status: SweepStatus, *, tells_failures: bool = True, store: str = "") -> Table:
    """One row per kind with counts by state and median seconds by phase, and what is running now."""
    snapshot = status.snapshot
    kinds: dict[str, list[JobView]] = {}
    for view in snapshot.jobs.values():
        kinds.setdefault(view.name.partition("/")[0], []).append(view)
    seen = [state for state in JobState if state in snapshot.counts]
    table = Table(title=f"Sweep {snapshot.sweep}: {snapshot.outcome}", title_justify="left")
    table.add_column("kind")
    for column in (*(state.value for state in seen), *_PHASES):
        table.add_column(column, justify="right")
    for kind, views in kinds.items():
        counts = Counter(view.state for view in views)
        table.add_row(kind, *(str(counts[state] or "-") for state in seen), *_median_phases(views))
    failures = failure_lines(snapshot, store) if tells_failures else ()
    notes = [*status_lines(status, store), *running_lines(status, store), *failures]
    table.caption, table.caption_justify = "\n".join(notes) or None, "left"
    return table


def _median_phases(views: Sequence[JobView]) -> list[str]:
    """Median of each phase over the jobs that this sweep ran to their end."""
    ended = [(view, view.timings) for view in views if view.timings is not None]
    if not ended:
        return ["-"] * len(_PHASES)
    columns = (
        [view.queued_s for view, _ in ended],
        [view.overhead_s or 0.0 for view, _ in ended],
        [timings.import_s for _, timings in ended],
        [timings.setup_s for _, timings in ended],
        [timings.work_s for _, timings in ended],
    )
    return [format_duration(median(column)) for column in columns]


def _show_all(store: ObjectStore, form: DocumentForm) -> ExitCode:
    states = {name: _snapshot_or_error(store, name) for name in list_sweeps(store)}
    if form is not DocumentForm.TABLE:
        print_document({name: _state(found) for name, found in states.items()}, form)
        return ExitCode.OK
    table = Table(title=f"Sweeps in {store.uri}", title_justify="left")
    for column in ("sweep", "state", "owner", "jobs"):
        table.add_column(column)
    for name, found in states.items():
        if isinstance(found, OrchestratorError):
            table.add_row(name, "unreadable", "", str(found))
            continue
        counts = ", ".join(f"{count} {state.value}" for state, count in found.counts.items())
        table.add_row(name, found.outcome, found.plan.owner if found.plan else "", counts)
    stdout_console().print(table)
    return ExitCode.OK


def _snapshot_or_error(store: ObjectStore, sweep: str) -> Snapshot | OrchestratorError:
    """One damaged journal must not hide the other sweeps."""
    try:
        return load_snapshot(store, sweep)
    except (ControllerError, CorruptObjectError, NotFoundError) as error:
        return error


def _state(found: Snapshot | OrchestratorError) -> str:
    return found.state.value if isinstance(found, Snapshot) else "unreadable"
