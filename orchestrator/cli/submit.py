"""``orchestrator submit``: a client. It puts a message into the store and watches; nothing depends on its life."""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from orchestrator.cli.arguments import Code
from orchestrator.cli.asking import confirmed
from orchestrator.cli.commands.report import print_report
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.follow import follow_sweep
from orchestrator.cli.money import read_prices
from orchestrator.cli.output import DocumentForm, TableForm, print_document, stderr_console
from orchestrator.cli.plan import choose_fleet, plan_table, summary_line
from orchestrator.cli.plan_tables import outlook_lines
from orchestrator.cli.reach import reach
from orchestrator.cli.remote import Submitter, require_meeting_place
from orchestrator.cli.resubmit import Former, find_former, show_difference
from orchestrator.cli.settings import UNKNOWN_STORE, Settings
from orchestrator.cli.standing import Standing
from orchestrator.cli.status import ANSWER_S, exit_code_for, failure_lines, status_document
from orchestrator.cli.wish import Wish
from orchestrator.core.errors import ClusterError, StorageError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.fleets import StatedCluster
from orchestrator.services.outlook import Outlook, make_outlook
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.probe import probe_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.survey import require_datasets
from orchestrator.sweeps.client import Consent, Ownership, current_user

_TABLES = {
    DocumentForm.TABLE: TableForm.TABLE,
    DocumentForm.JSON: TableForm.JSON,
    DocumentForm.YAML: TableForm.YAML,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Flags of the command."""

    yes: bool = False
    wait: bool = True
    foreground: bool = False
    take_over: bool = False
    force: bool = False
    overrides: tuple[str, ...] = ()
    scale: str = ""
    store: str = ""
    priority: int | None = None
    """None = the policy's."""
    prices: str = ""
    code: Code | None = None
    """None = as set."""
    form: DocumentForm = DocumentForm.TABLE


def submit_sweep(reference: str, options: SubmitOptions) -> ExitCode:
    """Plan, ask, submit, follow, report."""
    settings = Settings()
    if options.code:
        settings = settings.model_copy(update={"code": options.code})
    outlook, text = _look_ahead(reference, settings, options)
    plan = outlook.plan
    if options.foreground:
        settings.known_store_uri(plan.store_uri)
    else:
        require_meeting_place(settings, plan.store_uri)
    former = find_former(plan) if is_initialised(plan.store_uri, deadline_s=ANSWER_S) else None
    if not _may_start(outlook, former, options):
        return ExitCode.REFUSED
    if not settings.jobs_address:
        # Before anything depends on it: a store that ignores conditional writes could lose a sweep later.
        probe_store(open_store(plan.store_uri))
    wish = Wish(
        plan=plan,
        text=text,
        ownership=Ownership.TAKE if options.take_over else Ownership.KEEP,
        consent=Consent.FORCE if options.force else Consent.ASK,
        replaces=options.yes or former is not None,
    )
    with ExitStack() as stack:
        submitter = _connect(stack, settings, plan, options)
        message = submitter.submit(wish)
        if submitter.store is None or (not options.wait and not options.foreground):
            _leave(submitter, plan, message, options.form)
            return ExitCode.OK
        return _follow_to_the_answer(
            submitter, submitter.store, plan, message, _again(reference, options), options.form
        )


def status_command(settings: Settings, plan: Plan, command: str = "status") -> str:
    """What to type to see a sweep, wherever its store is."""
    elsewhere = plan.store_uri != settings.store_uri()
    return f"orchestrator {command} {plan.sweep}" + (f" --store {shlex.quote(plan.store_uri)}" if elsewhere else "")


def _look_ahead(reference: str, settings: Settings, options: SubmitOptions) -> tuple[Outlook, str]:
    """What is submitted, beside its store and the cluster.

    Raises:
        StorageError: the store cannot be asked; a submit would fail there, too, unless the cluster alone needs it.
    """
    sweep, text = load_sweep(reference, options.overrides, scale=options.scale)
    require_datasets(sweep)
    plan = build_plan(sweep, store_uri=options.store or settings.store_uri(sweep))
    if options.priority is not None:
        plan = replace(plan, policy=replace(plan.policy, priority=options.priority))
    fleet, prices = choose_fleet(settings, StatedCluster()), read_prices(options.prices)
    outlook = make_outlook(sweep, plan, fleet=fleet, prices=prices)
    if outlook.found.problems and not settings.jobs_address:
        raise StorageError("; ".join(outlook.found.problems))
    return outlook, text


def _may_start(outlook: Outlook, former: Former | None, options: SubmitOptions) -> bool:
    """Show all that a submit would do; whether the budget, the owner and the user agree."""
    console, plan, found = stderr_console(), outlook.plan, dict(outlook.found.dispositions)
    console.print(plan_table(plan, found))
    console.print(summary_line(plan, found), markup=False)
    for line in outlook_lines(outlook):
        console.print(line, markup=False)
    for problem in (*outlook.found.problems, *outlook.warnings):
        console.print(f"warning: {problem}", markup=False)
    if plan.store_uri == UNKNOWN_STORE:
        console.print("What the cluster's store holds of it already is known there alone, and is not run again.")
    if former is not None:
        show_difference(former, plan)
    for refusal in outlook.refusals:
        complain(refusal)
    if outlook.refusals:
        return False
    stranger = former.stranger(current_user()) if former is not None and not options.force else ""
    if stranger:
        complain(stranger)
        return False
    changes = former is not None and not former.is_same(plan)
    question = "Replace its plan and submit?" if changes else "Submit?"
    return options.yes or confirmed(question, subject="a submit asks before it starts")


def _connect(stack: ExitStack, settings: Settings, plan: Plan, options: SubmitOptions) -> Submitter:
    try:
        return stack.enter_context(reach(settings, plan.store_uri, foreground=options.foreground))
    except ClusterError:
        where = "" if plan.store_uri == UNKNOWN_STORE else f" What the store knows: {status_command(settings, plan)}"
        known = f"Nothing was submitted.{where}"
        stderr_console().print(known, markup=False, soft_wrap=True)
        raise


def _again(reference: str, options: SubmitOptions) -> str:
    """The command that follows this very sweep again."""
    words = ["orchestrator", "submit", reference, "-y"]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += ["--scale", options.scale] if options.scale else []
    words += ["--store", options.store] if options.store else []
    words += ["--priority", str(options.priority)] if options.priority is not None else []
    return shlex.join(words)


def _leave(submitter: Submitter, plan: Plan, message: str, form: DocumentForm) -> None:
    """Say how to go on without this command."""
    if submitter.store is None:
        known = (
            "The cluster goes on by itself. To look at it from here, name its store: --store URI, or in the context."
        )
    else:
        known = f"Submitted. See: {status_command(submitter.settings, plan)}"
    stderr_console().print(known, soft_wrap=True, markup=False)
    if form is not DocumentForm.TABLE:
        print_document({"sweep": plan.sweep, "message": message}, form)


def _follow_to_the_answer(  # noqa: PLR0917 - all of what is known at the end
    submitter: Submitter, store: ObjectStore, plan: Plan, message: str, again: str, form: DocumentForm
) -> ExitCode:
    _show_addresses(submitter)
    try:
        snapshot = follow_sweep(submitter, store, plan.sweep, message)
    except KeyboardInterrupt:
        detached = f"Detached; the sweep goes on. Follow it again with: {again}"
        watch = status_command(submitter.settings, plan, "watch")
        stderr_console().print(f"\n{detached}, or: {watch}", markup=False, soft_wrap=True)
        return ExitCode.INTERRUPTED
    return conclude(store, plan.sweep, snapshot, form=form, connection=submitter)


def conclude(
    store: ObjectStore, sweep: str, snapshot: Snapshot, *, form: DocumentForm, connection: Submitter
) -> ExitCode:
    """Print the failures and the report of an ended sweep."""
    for line in failure_lines(snapshot):
        complain(line)
    if snapshot.state is not SweepState.CANCELLED:
        print_report(store, sweep, _TABLES[form])
    elif form is not DocumentForm.TABLE:
        print_document(status_document(Standing(snapshot=snapshot, now=time.time())), form)
    if not connection.wait_for_publisher(sweep):
        hint = f"MLflow does not have all of it yet; it follows by itself, or by: orchestrator publish {sweep}"
        stderr_console().print(hint, soft_wrap=True)
    _show_addresses(connection)
    return exit_code_for(snapshot)


def _show_addresses(connection: Submitter) -> None:
    for name, address in connection.addresses.items():
        stderr_console().print(f"{name}: {address}")
