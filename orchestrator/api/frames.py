"""Plans, states and results as pandas data frames, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from orchestrator.core.job_kinds import RESULT_KINDS
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.look_up import Seen
from orchestrator.services.outlook import Outlook
from orchestrator.state.snapshot import Snapshot

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> DataFrame:
    """Rows as a frame that has these columns first, also when there are no rows."""
    from pandas import DataFrame

    found = DataFrame(list(rows))
    more = [column for column in found.columns if column not in columns]
    return found.reindex(columns=[*columns, *more])


def planned_jobs(outlook: Outlook) -> DataFrame:
    """One row per job of a plan: what becomes of it and what it takes, and its facets."""
    columns = ("job", "kind", "state", "seconds", "gpus", "gpu_hours", "kept_bytes", "cost", "estimated_from", "key")
    rows = []
    for job in outlook.plan.jobs:
        estimated = outlook.estimates.jobs.get(job.name)
        rows.append(
            {
                "job": job.name,
                "kind": job.kind.value,
                "state": outlook.found.dispositions[job.name].value,
                "seconds": estimated.seconds if estimated else 0.0,
                "gpus": job.resources.gpus,
                "gpu_hours": estimated.gpu_hours if estimated else 0.0,
                "kept_bytes": estimated.kept_bytes if estimated else 0,
                "cost": estimated.cost if estimated else None,
                "estimated_from": estimated.source.value if estimated else "",
                "key": job.key,
                **job.facets,
            }
        )
    return frame(rows, columns)


def job_states(snapshot: Snapshot) -> DataFrame:
    """One row per job of a submitted sweep."""
    columns = ("job", "kind", "state", "attempts", "ran_s", "queued_s", "reason", "key")
    rows = [
        {
            "job": view.name,
            "kind": view.name.partition("/")[0],
            "state": view.state.value,
            "attempts": view.num_attempts,
            "ran_s": view.ran_s,
            "queued_s": view.queued_s,
            "reason": view.reason,
            "key": view.key,
        }
        for view in snapshot.jobs.values()
    ]
    return frame(rows, columns)


def committed_results(plan: Plan, records: Mapping[str, Seen]) -> DataFrame:
    """One row per committed run that trains or measures a backbone: facets and final metrics; rates are fractions.

    Without any run there are the columns that the plan says there will be.
    """
    measured = [job for job in plan.jobs if job.kind in RESULT_KINDS]
    first = ("job", "kind", "transfer", "protocol", "target", "label_space", "granularity")
    columns = tuple(dict.fromkeys([*first, *(facet for job in measured for facet in job.facets), plan.metric, "key"]))
    rows = [
        {"job": job.name, "kind": job.kind.value, **job.facets, **records[job.key].metrics, "key": job.key}
        for job in measured
        if job.key in records
    ]
    return frame(rows, columns)


def html_of(title: str, table: DataFrame, lines: Iterable[str]) -> str:
    """A heading, a table and lines of text."""
    text = "\n".join(lines)
    return f"<h4>{escape(title)}</h4>{table.to_html(index=False, na_rep='')}<pre>{escape(text)}</pre>"
