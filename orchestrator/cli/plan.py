"""``orchestrator plan``: what a submit would do, how long it takes and what it costs; nothing is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, print_document, stderr_console, stdout_console
from orchestrator.cli.plan_tables import groups_table, jobs_table, kinds_table
from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition
from orchestrator.services.costs import read_prices
from orchestrator.services.preview import (
    Preview,
    StatedCluster,
    check_accelerator,
    choose_fleet,
    diff_lines,
    diff_table,
    make_preview,
    preview_lines,
)
from orchestrator.services.settings import Settings, shown_store
from orchestrator.services.sources import find_plan
from orchestrator.sweepfile import load_sweep


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


def show_plan(reference: str, options: PlanOptions) -> ExitCode:
    """Print the plan of a sweep, or its difference to another one."""
    settings = Settings()
    sweep, _ = load_sweep(reference, options.overrides, scale=options.scale)
    plan = build_plan(sweep, store_uri=options.store or settings.store_uri(sweep))
    if options.diff:
        return _show_diff(plan, options)
    outlook = make_preview(
        sweep,
        plan,
        fleet=choose_fleet(settings, options.cluster),
        accelerator=check_accelerator(options.accelerator),
        prices=read_prices(options.prices),
    )
    for problem in (*outlook.found.problems, *outlook.warnings):
        stderr_console().print(f"warning: {problem}", markup=False)
    _print_outlook(outlook, options)
    for refusal in outlook.refusals:
        complain(refusal)
    return ExitCode.REFUSED if outlook.refusals else ExitCode.OK


def plan_table(plan: Plan, found: dict[str, Disposition]) -> Table:
    """One row per kind with counts."""
    return kinds_table(plan, found)


def summary_line(plan: Plan, found: dict[str, Disposition]) -> str:
    """``52 jobs: 52 new, 0 resume, 0 reuse, 0 stale``."""
    counts = {disposition: list(found.values()).count(disposition) for disposition in Disposition}
    parts = ", ".join(f"{number} {disposition.value}" for disposition, number in counts.items())
    return f"{len(plan.jobs)} jobs: {parts} (store {shown_store(plan.store_uri)})"


def _print_outlook(outlook: Preview, options: PlanOptions) -> None:
    if options.output is not DocumentForm.TABLE:
        print_document(outlook.to_json(), options.output)
        return
    console = stdout_console()
    console.print(jobs_table(outlook) if options.lists_jobs else groups_table(outlook))
    dispositions = dict(outlook.found.dispositions)
    console.print(summary_line(outlook.plan, dispositions), markup=False)
    for line in preview_lines(outlook):
        console.print(line, markup=False)


def _show_diff(plan: Plan, options: PlanOptions) -> ExitCode:
    try:
        other = find_plan(options.diff, options.store or Settings().store_uri(), plan.store_uri)
    except SpecError as error:
        raise SpecError(tuple(f"--diff {problem}" for problem in error.problems)) from error
    diff = diff_plans(other, plan)
    if options.output is not DocumentForm.TABLE:
        print_document(diff.to_json(), options.output)
        return ExitCode.OK
    console = stdout_console()
    console.print(diff_table(diff, f"{options.diff} -> {plan.sweep}"))
    for line in diff_lines(diff, lists_jobs=options.lists_jobs):
        console.print(line, markup=False)
    return ExitCode.OK
