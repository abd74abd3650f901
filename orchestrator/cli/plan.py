"""``orchestrator plan``: what a submit would do, and nothing done."""

from __future__ import annotations

import json
from collections import Counter

from rich.table import Table

from orchestrator.cli.console import stdout_console
from orchestrator.cli.settings import Settings
from orchestrator.errors import StorageError
from orchestrator.plan.build import build_plan
from orchestrator.plan.clusters import long_clusterings
from orchestrator.plan.graph import Plan
from orchestrator.plan.reuse import Disposition, count_by_kind, dispositions
from orchestrator.spec import load_sweep
from orchestrator.storage.layout import checkpoints_folder, record_name
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore


def show_plan(reference: str, *, as_json: bool) -> None:
    """Print the plan of a sweep as a table or as JSON."""
    sweep, _ = load_sweep(reference)
    plan = build_plan(sweep, store_uri=Settings().store_uri(sweep))
    found = look_up(plan)
    if as_json:
        jobs = [{"disposition": found[job["name"]].value, **job} for job in plan.to_json()["jobs"]]
        stdout_console().print_json(json.dumps({**plan.to_json(), "jobs": jobs}))
        return
    console = stdout_console()
    console.print(plan_table(plan, found))
    console.print(summary_line(plan, found))
    for line in long_clusterings(sweep):
        console.print(line)


def look_up(plan: Plan) -> dict[str, Disposition]:
    """Dispositions of all jobs; reads the store but never creates it."""
    if not is_initialised(plan.store_uri):
        return dispositions(plan, frozenset(), frozenset())
    try:
        store = open_store(plan.store_uri)
        committed = {job.key for job in plan.jobs if store.exists(record_name(job.key))}
        started = {job.key for job in plan.jobs if job.key not in committed and _has_checkpoint(store, job.key)}
    except OSError as error:
        message = f"store {plan.store_uri} cannot be read: {error}"
        raise StorageError(message) from error
    return dispositions(plan, committed, started)


def plan_table(plan: Plan, found: dict[str, Disposition]) -> Table:
    """One row per kind with counts."""
    table = Table(title=f"Plan of sweep {plan.sweep}", title_justify="left")
    table.add_column("kind")
    for disposition in Disposition:
        table.add_column(disposition.value, justify="right")
    table.add_column("each needs")
    needs = {job.kind.value: str(job.resources) for job in plan.jobs}
    for kind, counts in count_by_kind(plan, found).items():
        table.add_row(kind, *(str(counts[disposition] or "-") for disposition in Disposition), needs[kind])
    return table


def summary_line(plan: Plan, found: dict[str, Disposition]) -> str:
    """``52 jobs: 52 new, 0 reuse, 0 resume``."""
    counts = Counter(found.values())
    parts = ", ".join(f"{counts[disposition]} {disposition.value}" for disposition in Disposition)
    return f"{len(plan.jobs)} jobs: {parts} (store {plan.store_uri})"


def _has_checkpoint(store: ObjectStore, key: str) -> bool:
    return bool(store.list_children(checkpoints_folder(key) + "/"))
