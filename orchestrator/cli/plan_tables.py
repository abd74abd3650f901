"""Plans as people read them: counts by group, totals, differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from rich.table import Table

from orchestrator.core.units import format_bytes, format_duration
from orchestrator.planning.estimate.estimates import Estimates
from orchestrator.planning.estimate.history import EstimateSource
from orchestrator.planning.graph.diff import Change, PlanDiff
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition, JobGroup, count_by_kind, group_jobs
from orchestrator.services.outlook import Outlook

_MAX_GROUPS = 60
_MAX_NAMED = 5
_LABEL_WIDTH = 11
_SOURCES = {
    EstimateSource.HISTORY: "from results of the same model here",
    EstimateSource.CALIBRATED: "from the model of speed, corrected by other results here",
    EstimateSource.MODEL: "from the model of speed alone",
}


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


def groups_table(outlook: Outlook) -> Table:
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


def jobs_table(outlook: Outlook) -> Table:
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


def outlook_lines(outlook: Outlook) -> Iterator[str]:
    """Totals, and what they rest upon."""
    estimates = outlook.estimates
    if estimates.jobs:
        yield _labelled("to run", _work(estimates))
        yield from _wall_clock(outlook)
        yield _labelled("critical", f"{format_duration(outlook.path.seconds)}: {_chain(outlook.path.jobs)}")
        yield _labelled("storage", _storage(estimates))
        yield from _cost(estimates)
        yield from _sources(outlook)
    stale = outlook.counts[Disposition.STALE]
    if stale:
        yield _labelled(
            "stale", f"{stale} results were made by other code of the same code_version (an edit or another release)"
        )
        yield _labelled("", "and are reused: bump the kind's code_version if the change alters results")
    yield from outlook.notes


def diff_table(diff: PlanDiff, title: str) -> Table:
    """Counts by kind."""
    table = Table(title=f"Difference of plans: {title}", title_justify="left")
    table.add_column("kind")
    for change in Change:
        table.add_column(change.value, justify="right")
    by_kind: dict[str, Counter[Change]] = {}
    for job in diff.jobs:
        by_kind.setdefault(job.kind, Counter())[job.change] += 1
    for kind, counts in by_kind.items():
        table.add_row(kind, *(str(counts[change] or "-") for change in Change))
    return table


def diff_lines(diff: PlanDiff, *, lists_jobs: bool) -> Iterator[str]:
    """Why jobs got other keys, and which jobs came and went."""
    for cause, jobs in diff.by_cause().items():
        yield f"{len(jobs)} rekeyed by {cause}: {_named([job.name for job in jobs], lists_jobs=lists_jobs)}"
    for change in (Change.ADDED, Change.REMOVED, Change.RENAMED):
        names = [job.name for job in diff.jobs if job.change is change]
        if names:
            yield f"{len(names)} {change.value}: {_named(names, lists_jobs=lists_jobs)}"
    if all(job.change in {Change.UNCHANGED, Change.RENAMED} for job in diff.jobs):
        yield "Nothing has to run again."


def _named(names: Sequence[str], *, lists_jobs: bool) -> str:
    shown = names if lists_jobs else names[:_MAX_NAMED]
    return ", ".join(shown) + (", ..." if len(shown) < len(names) else "")


def _counts(counts: Mapping[Disposition, int]) -> list[str]:
    return [str(counts.get(disposition) or "-") for disposition in Disposition]


def _group_cells(estimates: Estimates, group: JobGroup) -> list[str]:
    return [*_counts(group.counts), *_takes(estimates, [job.name for job in group.jobs])]


def _takes(estimates: Estimates, names: Collection[str]) -> tuple[str, str]:
    found = [estimates.jobs[name] for name in names if name in estimates.jobs]
    if not found:
        return "-", "-"
    gpu_hours = sum(job.gpu_hours for job in found)
    return format_duration(median(job.seconds for job in found)), f"{gpu_hours:,.1f}" if gpu_hours else "-"


def _shape(resources: object, num_workers: int) -> str:
    return f"{resources}" + (f" ({num_workers} workers)" if num_workers > 1 else "")


def _labelled(label: str, text: str) -> str:
    return f"{label:{_LABEL_WIDTH}}{text}"


def _work(estimates: Estimates) -> str:
    number = len(estimates.jobs)
    parts = [f"{estimates.gpu_hours:,.1f} GPU-hours"] if estimates.gpu_hours else []
    parts += [f"{estimates.cpu_hours:,.2f} core-hours of jobs without GPUs"] if estimates.cpu_hours else []
    return f"{number} jobs, {' and '.join(parts)}"


def _wall_clock(outlook: Outlook) -> Iterator[str]:
    makespan, fleet = outlook.makespan, outlook.fleet
    if makespan is None or fleet is None:
        return
    if makespan.never:
        named = _named(makespan.never, lists_jobs=False)
        yield _labelled("wall clock", f"{len(makespan.never)} jobs can never run on {fleet.name}: {named}")
        yield _labelled("", "state a cluster with --gpus N, or lower resources")
        return
    bound = "critical path" if makespan.critical_s >= makespan.busy_s else "all work spread evenly"
    yield _labelled(
        "wall clock", f"{format_duration(makespan.seconds)} on {fleet.name}, without failures and other sweeps"
    )
    yield _labelled(
        "", f"(list schedule, longest chains first; not below {format_duration(makespan.bound_s)}: {bound})"
    )


def _chain(jobs: Sequence[str]) -> str:
    return " > ".join(jobs) or "nothing"


def _storage(estimates: Estimates) -> str:
    largest = max((job.checkpoint_bytes for job in estimates.jobs.values()), default=0)
    while_running = f", and up to {format_bytes(largest)} of checkpoints per running job" if largest else ""
    return f"{format_bytes(estimates.kept_bytes)} of artifacts{while_running}"


def _cost(estimates: Estimates) -> Iterator[str]:
    if estimates.prices is None:
        return
    cost = estimates.cost
    if cost is None:
        yield _labelled("cost", f"unknown: the table has no price of {', '.join(estimates.unpriced())}")
    else:
        yield _labelled("cost", estimates.prices.show(cost))


def _sources(outlook: Outlook) -> Iterator[str]:
    estimates, error = outlook.estimates, outlook.model_error
    parts = [f"{number} {_SOURCES[source]}" for source, number in estimates.sources.items()]
    yield _labelled("estimates", "; ".join(parts))
    if estimates.assumed_accelerator:
        yield _labelled("", f"GPUs are taken for {estimates.assumed_accelerator}: say what they are with --accelerator")
    if error is not None:
        yield _labelled(
            "",
            f"of {error.num_results} results here nine of ten lie within a factor of {error.within:.1f} of the model, "
            f"{error.within_calibrated:.1f} once corrected",
        )
    elif EstimateSource.HISTORY not in estimates.sources:
        yield _labelled("", "nothing was measured here yet: expect a factor of 3 either way")
    for note, number in estimates.notes.items():
        yield _labelled("", f"{number} jobs: {note}")
