"""What shells offer after Tab: names of sweeps and jobs, from the store, or nothing if it does not answer soon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import typer

COMPLETED_LINE = "_TYPER_COMPLETE_ARGS"
"""Variable in which typer's scripts for shells pass on the command line."""
DEADLINE_S = 1.5
"""A shell that hangs after Tab is worse than one that offers nothing."""


def complete_sweep(context: typer.Context, incomplete: str) -> list[str]:
    """Sweeps of the store whose names begin so."""
    return _in_time(lambda: [name for name in _sweeps(_store(context)) if name.startswith(incomplete)])


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Jobs of the sweep that stands before on the command line, up to their next '/'."""
    sweep = str(context.params.get("sweep") or "")
    return _in_time(lambda: _next_parts(_jobs(_store(context), sweep), incomplete)) if sweep else []


def _store(context: typer.Context) -> str:
    return str(context.params.get("store") or "")


def _sweeps(store_uri: str) -> list[str]:
    from orchestrator.services.sources import open_existing_store
    from orchestrator.sweeps.client import list_sweeps

    return list_sweeps(open_existing_store(store_uri))


def _jobs(store_uri: str, sweep: str) -> list[str]:
    from orchestrator.services.sources import open_existing_store
    from orchestrator.sweeps.client import load_plan

    return [job.name for job in load_plan(open_existing_store(store_uri), sweep).jobs]


def _next_parts(names: list[str], incomplete: str) -> list[str]:
    """Thousands of jobs are offered folder by folder, as shells offer files."""
    done = incomplete.rpartition("/")[0]
    start = len(done) + 1 if done else 0
    found: dict[str, None] = {}
    for name in names:
        if name.startswith(incomplete):
            part, separator, _ = name[start:].partition("/")
            found[name[:start] + part + separator] = None
    if len(found) == 1 and next(iter(found)).endswith("/"):
        return _next_parts(names, next(iter(found)))
    return list(found)


def _in_time(ask: Callable[[], list[str]]) -> list[str]:
    found: list[str] = []

    def answer() -> None:
        with suppress(Exception):  # whatever is wrong, the command itself says it better
            found.extend(ask())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return list(found)
