"""``orchestrator explain``: why a job is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, print_document, stdout_console
from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.explain import Explanation, explain
from orchestrator.services.settings import Settings
from orchestrator.services.sources import find_plan
from orchestrator.services.status import brief_reason
from orchestrator.state.job_view import JobView
from orchestrator.state.transitions import JobState
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.sweeps.client import list_sweeps, load_snapshot

_SHOWN = 20
"""Sweeps of the store that an error names."""


def explain_job(job: str, *, sweep: str, against: str, form: DocumentForm, store_uri: str) -> ExitCode:
    """Print what the store has of a job, or which field keeps it from having a result."""
    uri = store_uri or Settings().store_uri()
    plan = _find_plan(sweep, uri) if sweep else None
    place = Settings().known_store_uri(store_uri or (plan.store_uri if plan else uri))
    found = explain(job, plan, place, against=against)
    view = _submitted(found, plan, place) if plan else None
    if form is not DocumentForm.TABLE:
        print_document({**found.to_json(), **_view_document(view)}, form)
        return ExitCode.OK
    for line in (*explanation_lines(found), *_view_lines(view, plan.sweep if plan else "")):
        stdout_console().print(line, markup=False)
    return ExitCode.OK


def _find_plan(sweep: str, uri: str) -> Plan:
    """As ``find_plan``; its refusal of an unknown name knows files and shipped sweeps, but not what was submitted."""
    try:
        return find_plan(sweep, uri)
    except SpecError as error:
        if Path(sweep).is_file() or not is_initialised(uri):
            raise
        names = list_sweeps(open_store(uri))
        if sweep in names:
            raise
        submitted = ", ".join(names[-_SHOWN:]) or "none"
        message = f"store {uri} has no sweep {sweep!r} either; submitted there: {submitted}"
        raise SpecError((*error.problems, message)) from None


def _submitted(found: Explanation, plan: Plan, uri: str) -> JobView | None:
    """The very job as its sweep has it, if that was submitted to this store."""
    if not is_initialised(uri):
        return None
    store = open_store(uri)
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
    """What a person reads."""
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


_STATES = {
    "committed": "committed; a submit reuses it",
    "resumable": "not committed, but it has checkpoints to go on from",
    "new": "new; no result has this key",
}
