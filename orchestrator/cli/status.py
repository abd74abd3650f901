"""``orchestrator status``: what the journal says, without any cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from orchestrator.cli.brief import brief_reason
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.money import read_prices
from orchestrator.cli.output import DocumentForm, print_document, stderr_console, stdout_console
from orchestrator.cli.pages import compare_line, compare_link
from orchestrator.cli.settings import Settings
from orchestrator.cli.standing import MAX_LINES, Standing, read_standing, standing_document, standing_lines
from orchestrator.core.contract import Progress
from orchestrator.core.errors import ControllerError, CorruptObjectError, NotFoundError, OrchestratorError, UserError
from orchestrator.core.units import format_duration
from orchestrator.stack.description import read_description
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweeps.client import list_sweeps, load_snapshot

ANSWER_S = 4.0
"""A store that does not answer for so long is said not to answer."""
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
    """The store that commands read. Raises ``NotFoundError`` where nothing was ever written, else as settings do."""
    resolved = Settings().known_store_uri(uri)
    if not is_initialised(resolved, deadline_s=ANSWER_S):
        message = f"there is no store at {resolved}: submit a sweep first, or name another with --store"
        raise NotFoundError(message)
    return open_store(resolved)


def require_sweep(store: ObjectStore, sweep: str) -> None:
    """Raise ``NotFoundError`` with the nearest name if the store does not know the sweep."""
    known = list_sweeps(store)
    if sweep not in known:
        message = f"store {store.uri} has no sweep '{sweep}': {did_you_mean(sweep, known)}"
        raise NotFoundError(message)


def show_status(sweep: str, store_uri: str, form: DocumentForm, prices: str = "") -> ExitCode:
    """Print one sweep's jobs, or all sweeps when none is named."""
    if prices and not sweep:
        raise UserError("--prices is for the cost of one sweep: orchestrator status SWEEP --prices FILE")
    table = read_prices(prices) if sweep else None
    store = open_existing_store(store_uri)
    if not sweep:
        return _show_all(store, form)
    require_sweep(store, sweep)
    standing = read_standing(store, load_snapshot(store, sweep), prices=table)
    snapshot = standing.snapshot
    revive_killed_stack(snapshot)
    if form is DocumentForm.TABLE:
        compare = compare_line(store, snapshot.plan) if snapshot.plan is not None else ""
        stdout_console().print(status_table(standing))
        stdout_console().print(compare, soft_wrap=True, markup=False, end="\n" if compare else "")
    else:
        compare = compare_link(store, snapshot.plan) if snapshot.plan is not None else ""
        print_document({**status_document(standing), "compare": compare}, form)
    return exit_code_for(snapshot)


def revive_killed_stack(snapshot: Snapshot) -> None:
    """Have the project's stack started again if its supervisor was killed and the sweep is not at its end.

    For commands that look at a sweep or steer it and need no stack themselves: none of them waits for it.
    """
    settings = Settings()
    if snapshot.state.is_final or settings.is_remote or settings.driver_address:
        return
    killed = read_description(settings.home)
    if killed is None or killed.is_alive or snapshot.cluster not in {"", settings.cluster}:
        return
    from orchestrator.stack.start import restart_killed_stack

    if restart_killed_stack(settings.home) is not None:
        died = f"The supervisor of the local stack (pid {killed.pid}) has died"
        again = "the stack starts again, and the sweep goes on from its checkpoints."
        stderr_console().print(f"{died}; {again}", markup=False, soft_wrap=True)


def status_document(standing: Standing) -> dict[str, Any]:
    """State of a sweep as plain JSON."""
    snapshot = standing.snapshot
    live = {job: asdict(standing.progress[job]) for job in standing.running if job in standing.progress}
    return {
        "sweep": snapshot.sweep,
        "state": snapshot.state.value,
        **standing_document(standing),
        "jobs": [_job_document(view) for view in snapshot.jobs.values()],
        "progress": live,
    }


def _job_document(view: JobView) -> dict[str, Any]:
    failure = view.last_failure
    return {
        "job": view.name,
        "key": view.key,
        "state": view.state.value,
        "attempts": view.num_attempts,
        "metrics": dict(view.metrics),
        "reason": view.reason,
        "previous_failure": None
        if failure is None
        else {"attempt": failure.attempt_id, "kind": failure.kind.value, "message": failure.message},
        "queued_s": view.queued_s,
        "overhead_s": view.overhead_s,
        "timings": asdict(view.timings) if view.timings else None,
    }


def status_table(standing: Standing) -> Table:
    """One row per kind with counts by state and median seconds by phase, and what is running now."""
    snapshot = standing.snapshot
    kinds: dict[str, list[JobView]] = {}
    for view in snapshot.jobs.values():
        kinds.setdefault(view.name.partition("/")[0], []).append(view)
    seen = [state for state in JobState if state in snapshot.counts]
    table = Table(title=f"Sweep {snapshot.sweep}: {snapshot.state.value}", title_justify="left")
    table.add_column("kind")
    for column in (*(state.value for state in seen), *_PHASES):
        table.add_column(column, justify="right")
    for kind, views in kinds.items():
        counts = Counter(view.state for view in views)
        table.add_row(kind, *(str(counts[state] or "-") for state in seen), *_median_phases(views))
    notes = [*standing_lines(standing), *running_lines(standing), *failure_lines(snapshot)]
    table.caption, table.caption_justify = escape("\n".join(notes)) or None, "left"
    return table


def failure_lines(snapshot: Snapshot) -> list[str]:
    """One line for each reason why jobs have no result, with the number of jobs and the first one's name."""
    grouped: dict[str, list[str]] = {}
    for view in snapshot.jobs.values():
        if view.state is JobState.SKIPPED:
            grouped.setdefault("skipped: they need a job that failed or was cancelled", []).append(view.name)
        elif view.state is JobState.FAILED:
            grouped.setdefault(f"failed: {brief_reason(view.reason)}", []).append(view.name)
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


def running_lines(standing: Standing) -> list[str]:
    """``pretrain/levels/depth2/seed0  train 96/512  1,200 images/s  3m10s left`` for running jobs.

    Without a controller nobody knows whether they still run: ``... last seen: train 96/512``.
    """
    running = standing.running
    tell = describe_progress if standing.is_served else _last_seen
    lines = [
        f"{job}  {tell(progress)}{again(standing.snapshot.jobs[job])}".rstrip()
        for job, progress in sorted(running.items())[:MAX_LINES]
    ]
    if len(running) > MAX_LINES:
        lines.append(f"and {len(running) - MAX_LINES} more running jobs: `orchestrator status SWEEP -o json` has all")
    return lines


def again(view: JobView) -> str:
    """``  (attempt 2; the one before ended with node_lost)``: what is past must not look like the present."""
    if view.last_failure is None or view.attempt is None:
        return ""
    return f"  (attempt {view.attempt.number}; the one before ended with {view.last_failure.kind.value})"


def describe_progress(progress: Progress) -> str:
    """``train 96/512  1,200 images/s  3m10s left``; its metrics are in ``-o json``."""
    parts = [_step(progress)]
    parts += [f"{progress.images_per_s:,.0f} images/s"] if progress.images_per_s > 0 else []
    parts += [f"{format_duration(progress.eta_s)} left"] if progress.eta_s > 0 else []
    return "  ".join(parts)


def _last_seen(progress: Progress) -> str:
    return f"last seen: {_step(progress)}"


def _step(progress: Progress) -> str:
    return progress.phase + (f" {progress.step}/{progress.total_steps}" if progress.total_steps else "")


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
            table.add_row(name, "unreadable", "", escape(str(found)))
            continue
        counts = ", ".join(f"{count} {state.value}" for state, count in found.counts.items())
        table.add_row(name, found.state.value, escape(found.plan.owner) if found.plan else "", counts)
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
