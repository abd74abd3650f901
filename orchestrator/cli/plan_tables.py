"""Plans as people read them: counts by group, totals, differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

from rich.table import Table

from orchestrator.core.units import format_duration
from orchestrator.planning.estimate.estimates import Estimates
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition, Group, count_by_kind, group_jobs
from orchestrator.services.preview import Preview

_MAX_GROUPS = 60


def kinds_table(plan: Plan, found: Mapping[str, Disposition]) -> Table:
    """One row per kind with counts."""
    table = Table(title=f"Plan of sweep {plan.sweep}", title_justify="left")
    table.add_column("kind")
    for disposition in Disposition:
        table.add_column(disposition.value, justify="right")
    table.add_column("each needs")
    needs = {job.kind.value: str(job.resources) for job in plan.jobs}
    for kind, counts in count_by_kind(plan, dict(found)).items():
        table.add_row(kind, *_counts(counts), needs[kind])
    return table


def groups_table(outlook: Preview) -> Table:
    """One row per kind, and within it one per label space, as long as there are not too many."""
    plan, found = outlook.plan, outlook.found.dispositions
    groups = group_jobs(plan, found)
    table = Table(title=f"Plan of sweep {plan.sweep}", title_justify="left")
    table.add_column("jobs", no_wrap=True)
    for name in (*(disposition.value for disposition in Disposition), "each takes", "GPU-hours"):
        table.add_column(name, justify="right")
    table.add_column("each needs")
    is_long = len(groups) > _MAX_GROUPS
    for kind, counts in count_by_kind(plan, dict(found)).items():
        of_kind = [group for group in groups if group.kind == kind]
        jobs = [job for group in of_kind for job in group.jobs]
        shapes = ", ".join(sorted({_shape(job.resources, job.execution.num_workers) for job in jobs}))
        names = [job.name for job in jobs]
        table.add_row(kind, *_counts(counts), *_takes(outlook.estimates, names), shapes, style="bold")
        for group in () if is_long or len(of_kind) == 1 else of_kind:
            table.add_row(f"  {group.title}", *_group_cells(outlook.estimates, group), "")
    table.caption = "label spaces are left out: --jobs lists every job" if is_long else None
    return table


def jobs_table(outlook: Preview) -> Table:
    """One row per job."""
    table = Table(title=f"Plan of sweep {outlook.plan.sweep}", title_justify="left")
    table.add_column("job", overflow="fold")
    table.add_column("state")
    table.add_column("takes", justify="right")
    table.add_column("by")
    table.add_column("key", overflow="fold")
    for job in outlook.plan.jobs:
        estimated = outlook.estimates.jobs.get(job.name)
        takes = (format_duration(estimated.seconds), estimated.source.value) if estimated else ("-", "-")
        table.add_row(job.name, outlook.found.dispositions[job.name].value, *takes, job.key)
    return table


def _counts(counts: Mapping[Disposition, int]) -> list[str]:
    return [str(counts.get(disposition) or "-") for disposition in Disposition]


def _group_cells(estimates: Estimates, group: Group) -> list[str]:
    return [*_counts(group.counts), *_takes(estimates, [job.name for job in group.jobs])]


def _takes(estimates: Estimates, names: Collection[str]) -> tuple[str, str]:
    found = [estimates.jobs[name] for name in names if name in estimates.jobs]
    if not found:
        return "-", "-"
    gpu_hours = sum(job.gpu_hours for job in found)
    return format_duration(median(job.seconds for job in found)), f"{gpu_hours:,.1f}" if gpu_hours else "-"


def _shape(resources: object, num_workers: int) -> str:
    return f"{resources}" + (f" ({num_workers} workers)" if num_workers > 1 else "")
