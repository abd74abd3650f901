"""``orchestrator logs``: the text log of a job's attempt, from the store."""

from __future__ import annotations

import sys
import time

from orchestrator.cli.console import stderr_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.status import open_existing_store, require_sweep
from orchestrator.controller.client import load_plan, load_snapshot
from orchestrator.errors import NotFoundError
from orchestrator.spec.suggest import did_you_mean
from orchestrator.storage.layout import log_name
from orchestrator.storage.protocol import ObjectStore

_POLL_S = 0.5


def print_logs(sweep: str, job: str, attempt: int, store_uri: str, *, follow: bool) -> ExitCode:
    """Print a log; with ``follow`` go on, over later attempts too, until the job has ended."""
    store = open_existing_store(store_uri)
    require_sweep(store, sweep)
    names = [candidate.name for candidate in load_plan(store, sweep).jobs]
    if job not in names:
        message = f"sweep '{sweep}' has no job '{job}': {did_you_mean(job, names)}"
        raise NotFoundError(message)
    numbers = _numbers(store, sweep, job)
    if attempt >= 0 and attempt not in numbers:
        message = f"job '{job}' of sweep '{sweep}' has no log of an attempt {attempt}; there are {numbers or 'none'}"
        raise NotFoundError(message)
    number = attempt if attempt >= 0 else _newest(store, sweep, job)
    printed = _print_from(store, log_name(sweep, job, number), 0) if number is not None else 0
    while follow and _is_live(store, sweep, job):
        time.sleep(_POLL_S)
        newest = _newest(store, sweep, job)
        number, printed = (number, printed) if attempt >= 0 or newest == number else (newest, 0)
        if number is not None:
            printed = _print_from(store, log_name(sweep, job, number), printed)
    if follow and number is not None:
        _print_from(store, log_name(sweep, job, number), printed)  # what came between the last look and the end
    if number is None:
        why = load_snapshot(store, sweep).jobs[job].reason or "none of its attempts has started, or it was reused"
        message = f"job '{job}' of sweep '{sweep}' has no log: {why}"
        raise NotFoundError(message)
    if not printed:
        stderr_console().print(f"(attempt {number} has printed nothing)")
    return ExitCode.OK


def _numbers(store: ObjectStore, sweep: str, job: str) -> list[int]:
    return [int(name) for name in store.list_children(f"logs/{sweep}/{job}/") if name.isdigit()]


def _newest(store: ObjectStore, sweep: str, job: str) -> int | None:
    numbers = _numbers(store, sweep, job)
    return numbers[-1] if numbers else None


def _is_live(store: ObjectStore, sweep: str, job: str) -> bool:
    view = load_snapshot(store, sweep).jobs.get(job)
    return view is not None and not view.state.is_final


def _print_from(store: ObjectStore, name: str, start: int) -> int:
    """Print what a log has beyond ``start`` bytes; returns its new length."""
    if not store.exists(name):
        return start
    content = store.get(name)
    sys.stdout.write(content[start:].decode(errors="replace"))
    sys.stdout.flush()
    return len(content)
