"""A snapshot as plain JSON, without its plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from orchestrator.core.errors import ControllerError
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.codec import decode_value, encode_value
from orchestrator.state.job_table import JobTable
from orchestrator.state.job_view import JobView
from orchestrator.state.snapshot import Snapshot

SNAPSHOT_VERSION = 4
"""Raise it whenever the fold of the same events gives another state, or a state another meaning."""
_APART = {"plan", "jobs"}


def encode_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON form. Jobs to which nothing has happened yet are left out."""
    plain = {
        item.name: encode_value(getattr(snapshot, item.name)) for item in fields(snapshot) if item.name not in _APART
    }
    jobs = {view.name: encode_value(view) for view in snapshot.jobs.values() if view != _untouched(view)}
    return {"version": SNAPSHOT_VERSION, **plain, "jobs": jobs}


def decode_snapshot(document: Mapping[str, Any], plan: Plan | None) -> Snapshot:
    """Inverse of ``encode_snapshot``; ``plan`` is that of the document's ``revision``, none for revision 0.

    Raises:
        ControllerError: another version wrote it: the journal must be read instead.
    """
    if document["version"] != SNAPSHOT_VERSION:
        found = document["version"]
        message = f"the snapshot is of version {found}, this program knows {SNAPSHOT_VERSION}; it is passed over"
        raise ControllerError(message)
    told = document["jobs"]
    plain = decode_value(Snapshot, {name: value for name, value in document.items() if name not in _APART})
    planned = {job.name: job.key for job in plan.jobs} if plan else {}
    views = (
        decode_value(JobView, told[name]) if name in told else JobView(name=name, key=key)
        for name, key in planned.items()
    )
    return replace(plain, plan=plan, jobs=JobTable(views))


def _untouched(view: JobView) -> JobView:
    return JobView(name=view.name, key=view.key)
