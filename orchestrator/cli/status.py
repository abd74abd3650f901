"""``orchestrator status``: what the journal says, without any cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from orchestrator.cli.console import stdout_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.settings import Settings
from orchestrator.contract import Progress
from orchestrator.controller.client import LiveProgress, list_sweeps, load_snapshot, read_progress
from orchestrator.errors import NotFoundError
from orchestrator.spec.suggest import did_you_mean
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.units import format_duration

_PHASES = ("queued", "launch", "import", "to first step", "work")
"""Seconds of a job: ready to launched; launched to running and ended to known; loading code; setup; all of the work."""

_EXITS = {
    SweepState.SUCCEEDED: ExitCode.OK,
    SweepState.FAILED: ExitCode.SWEEP_FAILED,
    SweepState.CANCELLED: ExitCode.CANCELLED,
}


def exit_code_for(snapshot: Snapshot) -> ExitCode:
    """What a command about a sweep ends with."""
    return _EXITS.get(snapshot.state, ExitCode.UNFINISHED)


def open_existing_store(uri: str) -> ObjectStore:
    """The store that commands read. Raises ``NotFoundError`` where nothing was ever written."""
    resolved = uri or Settings().store_uri()
    if not is_initialised(resolved):
        message = f"there is no store at {resolved}: submit a sweep first, or name another with --store"
        raise NotFoundError(message)
    return open_store(resolved)


def require_sweep(store: ObjectStore, sweep: str) -> None:
    """Raise ``NotFoundError`` with the nearest name if the store does not know the sweep."""
    known = list_sweeps(store)
    if sweep not in known:
        message = f"store {store.uri} has no sweep '{sweep}': {did_you_mean(sweep, known)}"
        raise NotFoundError(message)


def show_status(sweep: str, store_uri: str, *, as_json: bool) -> ExitCode:
    """Print one sweep's jobs, or all sweeps when none is named."""
    store = open_existing_store(store_uri)
    if not sweep:
        return _show_all(store, as_json=as_json)
    require_sweep(store, sweep)
    snapshot, progress = load_snapshot(store, sweep), read_progress(store, sweep)
    if as_json:
        stdout_console().print_json(json.dumps(status_document(snapshot, progress)))
    else:
        stdout_console().print(status_table(snapshot, progress))
    return exit_code_for(snapshot)


def status_document(snapshot: Snapshot, progress: Mapping[str, LiveProgress]) -> dict[str, Any]:
    """State of a sweep in JSON."""
    jobs = [
        {
            "job": view.name,
            "key": view.key,
            "state": view.state.value,
            "attempts": view.num_attempts,
            "metrics": dict(view.metrics),
            "reason": view.reason,
            "queued_s": view.queued_s,
            "overhead_s": view.overhead_s,
            "timings": asdict(view.timings) if view.timings else None,
        }
        for view in snapshot.jobs.values()
    ]
    live = {job: asdict(line) for job, line in progress.items()}
    return {"sweep": snapshot.sweep, "state": snapshot.state.value, "jobs": jobs, "progress": live}


def status_table(snapshot: Snapshot, progress: Mapping[str, LiveProgress]) -> Table:
    """One row per kind with counts by state and median seconds by phase, and what is running now."""
    kinds: dict[str, list[JobView]] = {}
    for view in snapshot.jobs.values():
        kinds.setdefault(view.name.partition("/")[0], []).append(view)
    seen = [state for state in JobState if state in snapshot.counts]
    table = Table(title=f"Sweep {snapshot.sweep}: {snapshot.state.value}", title_justify="left")
    table.add_column("kind")
    for column in (*(state.value for state in seen), *_PHASES):
        table.add_column(column, justify="right")
    for kind, views in kinds.items():
        states = [view.state for view in views]
        table.add_row(kind, *(str(states.count(state) or "-") for state in seen), *_median_phases(views))
    notes = [*running_lines(progress), *failure_lines(snapshot)]
    table.caption, table.caption_justify = escape("\n".join(notes)) or None, "left"
    return table


def failure_lines(snapshot: Snapshot) -> list[str]:
    """One line for each reason why jobs have no result, with the number of jobs and the first one's name."""
    grouped: dict[str, list[str]] = {}
    for view in snapshot.jobs.values():
        if view.state is JobState.SKIPPED:
            grouped.setdefault("skipped: they need a job that failed", []).append(view.name)
        elif view.state is JobState.FAILED:
            grouped.setdefault(f"failed: {view.reason}", []).append(view.name)
    return [
        f"{len(names)} job{'s' * (len(names) > 1)} ({names[0]}{', ...' if names[1:] else ''}) {why}"
        for why, names in grouped.items()
    ]


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


def running_lines(progress: Mapping[str, LiveProgress]) -> list[str]:
    """``pretrain/levels/depth2/seed0  train 96/512  val_error 0.12`` for each running job."""
    return [f"{job}  {describe_progress(line.progress)}".rstrip() for job, line in sorted(progress.items())]


def describe_progress(progress: Progress) -> str:
    """``train 96/512  val_error 0.12``."""
    steps = f" {progress.step}/{progress.total_steps}" if progress.total_steps else ""
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in sorted(progress.metrics.items()))
    return f"{progress.phase}{steps}  {metrics}"


def _show_all(store: ObjectStore, *, as_json: bool) -> ExitCode:
    states = {name: load_snapshot(store, name) for name in list_sweeps(store)}
    if as_json:
        stdout_console().print_json(json.dumps({name: snapshot.state.value for name, snapshot in states.items()}))
        return ExitCode.OK
    table = Table(title=f"Sweeps in {store.uri}", title_justify="left")
    for column in ("sweep", "state", "jobs"):
        table.add_column(column)
    for name, snapshot in states.items():
        counts = Counter(job.state.value for job in snapshot.jobs.values())
        table.add_row(name, snapshot.state.value, ", ".join(f"{count} {state}" for state, count in counts.items()))
    stdout_console().print(table)
    return ExitCode.OK
