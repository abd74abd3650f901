"""``orchestrator plan``: what a submit would do, how long it takes and what it costs; nothing is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.money import read_prices
from orchestrator.cli.output import DocumentForm, print_document, stderr_console, stdout_console
from orchestrator.cli.plan_tables import diff_lines, diff_table, groups_table, jobs_table, kinds_table, outlook_lines
from orchestrator.cli.settings import Settings, shown_store
from orchestrator.core.errors import SpecError, StorageError, UsageError
from orchestrator.planning.estimate.accelerators import PEAKS
from orchestrator.planning.estimate.estimates import known_accelerator
from orchestrator.planning.estimate.makespan import Fleet
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition
from orchestrator.services.fleets import StatedCluster, ray_fleet, stated_fleet, this_machine
from orchestrator.services.look_up import look_up as look_up_plan
from orchestrator.services.outlook import Outlook, make_outlook
from orchestrator.services.sources import find_plan, read_sweep


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
    sweep, _ = read_sweep(reference, options.overrides, scale=options.scale)
    plan = build_plan(sweep, store_uri=options.store or settings.store_uri(sweep))
    if options.diff:
        return _show_diff(plan, options)
    outlook = make_outlook(
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


def look_up(plan: Plan) -> dict[str, Disposition]:
    """Dispositions of all jobs, for a submit; reads the store but never creates it.

    Raises:
        StorageError: the store cannot be asked; a submit would fail there, too.
    """
    found = look_up_plan(plan)
    if found.problems:
        raise StorageError("; ".join(found.problems))
    return dict(found.dispositions)


def plan_table(plan: Plan, found: dict[str, Disposition]) -> Table:
    """One row per kind with counts."""
    return kinds_table(plan, found)


def summary_line(plan: Plan, found: dict[str, Disposition]) -> str:
    """``52 jobs: 52 new, 0 resume, 0 reuse, 0 stale``."""
    counts = {disposition: list(found.values()).count(disposition) for disposition in Disposition}
    parts = ", ".join(f"{number} {disposition.value}" for disposition, number in counts.items())
    return f"{len(plan.jobs)} jobs: {parts} (store {shown_store(plan.store_uri)})"


def choose_fleet(settings: Settings, stated: StatedCluster) -> Fleet | None:
    """The stated cluster, else the one of ``RAY_ADDRESS``, else this machine; None if nobody here can tell."""
    if stated.is_stated:
        return stated_fleet(stated)
    if settings.is_remote:
        return None
    if not settings.driver_address:
        return this_machine()
    fleet = ray_fleet(settings.driver_address, settings.namespace)
    if fleet is None:
        message = (
            f"the cluster at {settings.driver_address} did not tell its nodes: no wall clock; state it with --gpus"
        )
        stderr_console().print(f"warning: {message}", markup=False)
    return fleet


def check_accelerator(name: str) -> str:
    """The table's name of an accelerator. Raises ``UsageError`` for one that it does not have."""
    found = known_accelerator(name) if name else ""
    if name and not found:
        raise UsageError(f"--accelerator {name!r} is not known; known are {', '.join(sorted(PEAKS))}")
    return found


def _print_outlook(outlook: Outlook, options: PlanOptions) -> None:
    if options.output is not DocumentForm.TABLE:
        print_document(outlook.to_json(), options.output)
        return
    console = stdout_console()
    console.print(jobs_table(outlook) if options.lists_jobs else groups_table(outlook))
    dispositions = dict(outlook.found.dispositions)
    console.print(summary_line(outlook.plan, dispositions), markup=False)
    for line in outlook_lines(outlook):
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
