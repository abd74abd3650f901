"""``orchestrator explain``: why a job is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from orchestrator.cli.arguments import FormerSweep, StoreOption, complete_job, complete_sweep, refuse_former_order
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.explain import Explanation, explain_job
from orchestrator.services.settings import Settings
from orchestrator.services.stores import find_plan, find_store
from orchestrator.state.brief_reasons import brief_reason
from orchestrator.state.snapshot import JobView
from orchestrator.state.transitions import JobState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_snapshot

_STATES = {
    "committed": "committed; a submit reuses it",
    "resumable": "not committed, but it has checkpoints from which it resumes",
    "new": "new; no result has this key",
}


def explain(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP|KEY",
            help="A sweep.yaml, a shipped or a submitted sweep; or alone the key of a result.",
            autocompletion=complete_sweep,
        ),
    ],
    job: Annotated[
        str, typer.Argument(help="Name of a job of the sweep, or its key.", autocompletion=complete_job)
    ] = "",
    *,
    against: Annotated[str, typer.Option(help="Compare with this key instead of the nearest one.")] = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
    former: FormerSweep = "",
) -> None:
    """Show why a job has no result yet: the most similar result in the store, and what differs."""
    refuse_former_order("explain", former, sweep)
    if not job:
        sweep, job = "", sweep
    uri = store or Settings().store_uri()
    opened = find_store(uri) if sweep else None
    plan = find_plan(sweep, uri, store=opened) if sweep else None
    place = Settings().known_store_uri(store or (plan.store_uri if plan else uri))
    results = opened if opened is not None and place == uri else find_store(place)
    found = explain_job(job, plan, place, results, against=against)
    view = _submitted(found, plan, results) if plan and results else None
    if output is not DocumentForm.TABLE:
        print_document({**found.to_json(), **_view_document(view)}, output)
        return
    for line in (*explanation_lines(found), *_view_lines(view, plan.sweep if plan else "")):
        stdout_console().print(line)


def _submitted(found: Explanation, plan: Plan, store: ObjectStore) -> JobView | None:
    """The same job in the submitted sweep, if that is in this store."""
    if plan.sweep not in list_sweeps(store):
        return None
    view = load_snapshot(store, plan.sweep).jobs.get(found.name)
    return view if view is not None and view.key == found.key else None


def _view_document(view: JobView | None) -> dict[str, str]:
    return {"job_state": view.state.value, "reason": view.reason} if view is not None else {}


def _view_lines(view: JobView | None, sweep: str) -> Iterator[str]:
    if view is not None and view.state in {JobState.FAILED, JobState.SKIPPED, JobState.CANCELLED}:
        why = f": {brief_reason(view.reason)}" if view.reason else ""
        yield f"  in sweep {sweep} it is {view.state.value}{why}"
        yield f"  see      orchestrator describe {sweep} {view.name}"


def explanation_lines(found: Explanation) -> Iterator[str]:
    """The text for people."""
    yield f"{found.name or found.key}: {_STATES[found.state]}"
    if found.name:
        yield f"  key      {found.key}"
    if found.committed_by:
        yield f"  made by  {found.committed_by}"
    if found.compared_with:
        which = "compared with" if found.num_candidates == 1 else f"nearest of {found.num_candidates} results"
        yield f"  {which}: {found.compared_with} ({found.compared_job})"
        yield "  what differs, old -> new:" if found.fields else "  nothing differs: it is the same key"
        for field in found.fields:
            yield f"    {field}"
    elif found.state != "committed":
        yield "  the store has no result of this kind to compare with"
