"""``orchestrator plan``: what a submit would do, how long it takes and what it costs; nothing is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from orchestrator.cli.arguments import (
    CpusOption,
    GpusPerNodeOption,
    PricesOption,
    ScaleOption,
    SetOption,
    StoreOption,
    SweepFile,
    scale_name,
)
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import SpecError
from orchestrator.core.units import format_duration
from orchestrator.planning.estimate.estimates import Estimates
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition, JobGroup, count_by_kind, group_jobs
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.costs import read_prices
from orchestrator.services.fleets import StatedCluster, choose_fleet
from orchestrator.services.preview import (
    Preview,
    check_accelerator,
    diff_lines,
    diff_table,
    make_preview,
    preview_lines,
)
from orchestrator.services.settings import Settings, shown_store
from orchestrator.services.stores import find_plan
from orchestrator.services.terminal import stderr_console
from orchestrator.sweepfile import load_sweep

_MAX_GROUPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Flags of the command."""

    output: DocumentForm = DocumentForm.TABLE
    lists_jobs: bool = False
    diff: str = ""
    """Another sweep.yaml, shipped or submitted sweep to compare with."""
    cluster: StatedCluster = field(default_factory=StatedCluster)
    accelerator: str = ""
    prices: str = ""
    overrides: tuple[str, ...] = ()
    scale: str = ""
    store: str = ""


def plan(  # noqa: PLR0913 - one parameter per flag
    sweep: SweepFile,
    *,
    jobs: Annotated[bool, typer.Option("--jobs", help="List every job.")] = False,
    diff: Annotated[
        str, typer.Option(help="Show the differences to another sweep.yaml, shipped or submitted sweep.")
    ] = "",
    gpus: Annotated[
        int, typer.Option(help="GPUs of the cluster to estimate for; default: the current cluster.", show_default=False)
    ] = 0,
    gpus_per_node: GpusPerNodeOption = 0,
    cpus: CpusOption = 0,
    accelerator: Annotated[str, typer.Option(help="Type of the GPUs: A100, H100, ...")] = "",
    prices: PricesOption = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show what a submit would run and reuse, how long it would take and what it would cost. Changes nothing."""
    options = PlanOptions(
        output=output,
        lists_jobs=jobs,
        diff=diff,
        cluster=StatedCluster(gpus=gpus, gpus_per_node=gpus_per_node, cpus=cpus),
        accelerator=accelerator,
        prices=prices,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        store=store,
    )
    raise typer.Exit(show_plan(sweep, options))


def show_plan(reference: str, options: PlanOptions) -> ExitCode:
    """Print the plan of a sweep, or its difference to another one."""
    settings = Settings()
    sweep, _ = load_sweep(reference, options.overrides, scale=options.scale)
    plan = build_plan(sweep, store_uri=options.store or settings.store_uri(sweep))
    if options.diff:
        return _show_diff(reference, plan, options)
    outlook = make_preview(
        sweep,
        plan,
        fleet=choose_fleet(settings, options.cluster),
        accelerator=check_accelerator(options.accelerator),
        prices=read_prices(options.prices),
    )
    for problem in (*outlook.found.problems, *outlook.warnings):
        stderr_console().print(f"warning: {problem}")
    _print_outlook(outlook, options)
    for refusal in outlook.refusals:
        complain(refusal)
    return ExitCode.REFUSED if outlook.refusals else ExitCode.OK


def summary_line(plan: Plan, found: dict[str, Disposition]) -> str:
    """``52 jobs: 52 new, 0 resume, 0 reuse, 0 stale``."""
    counts = {disposition: list(found.values()).count(disposition) for disposition in Disposition}
    parts = ", ".join(f"{number} {disposition.value}" for disposition, number in counts.items())
    num_keys = len({job.key for job in plan.jobs})
    shared = f" with {num_keys} keys (jobs of one key run once)" if num_keys < len(plan.jobs) else ""
    return f"{len(plan.jobs)} jobs{shared}: {parts} (store {shown_store(plan.store_uri)})"


def _print_outlook(outlook: Preview, options: PlanOptions) -> None:
    if options.output is not DocumentForm.TABLE:
        print_document(outlook.to_json(), options.output)
        return
    console = stdout_console()
    console.print(jobs_table(outlook) if options.lists_jobs else groups_table(outlook))
    dispositions = dict(outlook.found.dispositions)
    console.print(summary_line(outlook.plan, dispositions))
    for line in preview_lines(outlook):
        console.print(line)


def _show_diff(reference: str, plan: Plan, options: PlanOptions) -> ExitCode:
    try:
        other = find_plan(options.diff, options.store or Settings().store_uri(), plan.store_uri)
    except SpecError as error:
        raise SpecError(tuple(f"--diff {problem}" for problem in error.problems)) from error
    diff = diff_plans(other, plan)
    if options.output is not DocumentForm.TABLE:
        print_document(diff.to_json(), options.output)
        return ExitCode.OK
    console = stdout_console()
    revision = f", revision {other.revision}" if other.revision else ""
    changed = " and ".join(flag for flag, given in (("--set", options.overrides), ("--scale", options.scale)) if given)
    title = f"{options.diff}{revision} -> {reference}{f' with {changed}' if changed else ''}"
    console.print(diff_table(diff, title))
    for line in diff_lines(diff, lists_jobs=options.lists_jobs):
        console.print(line)
    found = lookup_artifacts(plan)
    for problem in found.problems:
        stderr_console().print(f"warning: {problem}")
    console.print(f"A submit of {reference}: {summary_line(plan, dict(found.dispositions))}")
    return ExitCode.OK


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
