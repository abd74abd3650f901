"""``orchestrator submit``: puts a message into the store and follows the sweep, which does not depend on it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from orchestrator.cli.arguments import PricesOption, ScaleOption, SetOption, StoreOption, SweepFile, Yes, scale_name
from orchestrator.cli.commands.lifecycle import parse_priority
from orchestrator.cli.commands.plan import kinds_table, summary_line
from orchestrator.cli.commands.report import print_report
from orchestrator.cli.commands.status import exit_code_for
from orchestrator.cli.commands.watch import follow_sweep
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, DocumentOption, TableForm, print_document
from orchestrator.core.errors import ClusterError, InfeasibleError
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.render.simulations import describe_claim
from orchestrator.report.results import Report
from orchestrator.report.simulations import unmet
from orchestrator.services.costs import read_prices
from orchestrator.services.preview import preview_lines
from orchestrator.services.settings import UNKNOWN_STORE, Settings
from orchestrator.services.settings_sources import Code
from orchestrator.services.status import SweepStatus, failure_lines, status_document
from orchestrator.services.stores import revive_killed_store
from orchestrator.services.submit import PreparedSubmit, SubmitRequest, prepare_submit, show_difference
from orchestrator.services.terminal import command_line, confirmed, stderr_console
from orchestrator.services.transports import Submitter, open_submitter
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import Consent, Ownership

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


def submit(  # noqa: PLR0913 - one parameter per flag
    sweep: SweepFile,
    *,
    yes: Yes = False,
    wait: Annotated[bool, typer.Option(help="Follow until the sweep ends; Ctrl-C detaches.")] = True,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run Ray inside this command, which must stay alive.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over an unfinished sweep of another cluster.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Allow this for a sweep of another user.")] = False,
    priority: Annotated[
        str, typer.Option(help="low, normal, high, urgent, or a whole number; replaces the priority of the file.")
    ] = "",
    code: Annotated[
        Code | None,
        typer.Option(
            help="On a cluster with a dashboard: run the code installed there (image), or send this code (wheel)."
        ),
    ] = None,
    prices: PricesOption = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Plan a sweep, run it, and print its report."""
    options = SubmitOptions(
        yes=yes,
        wait=wait,
        foreground=foreground,
        take_over=take_over,
        force=force,
        priority=parse_priority(priority) if priority else None,
        prices=prices,
        code=code,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        store=store,
        form=output,
    )
    raise typer.Exit(submit_sweep(sweep, options))


def submit_sweep(reference: str, options: SubmitOptions) -> ExitCode:
    """Plan, ask, submit, follow, report."""
    settings = Settings()
    if options.code:
        settings = settings.model_copy(update={"code": options.code})
    sweep, text = load_sweep(reference, options.overrides, scale=options.scale)
    consent = Consent.FORCE if options.force else Consent.ASK
    store_uri = options.store or settings.store_uri(sweep)
    revive_killed_store(store_uri)
    prepared = prepare_submit(
        sweep,
        text,
        settings,
        store_uri=store_uri,
        priority=options.priority,
        prices=options.prices,
        consent=consent,
        runs_here=options.foreground,
    )
    if not _may_start(prepared, options):
        return ExitCode.REFUSED
    prices = read_prices(options.prices)
    plan, check = prepared.plan, prepared.check
    store = prepared.probed_store()
    request = SubmitRequest(
        plan=plan,
        spec_text=text,
        ownership=Ownership.TAKE if options.take_over else Ownership.KEEP,
        consent=consent,
        replaces=options.yes or check.previous is not None,
        replaced_revision=None if options.yes else check.seen_revision,
    )
    with ExitStack() as stack:
        submitter = _connect(stack, settings, plan, store, foreground=options.foreground)
        message = submitter.submit(request.sent_now())
        if submitter.store is None or (not options.wait and not options.foreground):
            _leave(submitter, plan, message, options.form)
            return ExitCode.OK
        try:
            snapshot = follow_sweep(submitter, submitter.store, plan.sweep, message, prices)
        except KeyboardInterrupt:
            left = _left(submitter.settings, plan, reference, options)
            stderr_console().print(f"\n{left}", soft_wrap=True)
            return ExitCode.INTERRUPTED
        return conclude(submitter.store, plan, snapshot, options, connection=submitter)


def status_command(settings: Settings, plan: Plan, command: str = "status") -> str:
    """What to type to see a sweep, wherever its store is."""
    return command_line(command, plan.sweep, store=_store_elsewhere(settings, plan))


def _store_elsewhere(settings: Settings, plan: Plan) -> str:
    """The plan's store where the settings name another one."""
    return plan.store_uri if plan.store_uri != settings.store_uri() else ""


def _may_start(prepared: PreparedSubmit, options: SubmitOptions) -> bool:
    """Show all that a submit would do; whether the budget, the owner and the user agree."""
    console, preview, check, plan = stderr_console(), prepared.preview, prepared.check, prepared.plan
    found = dict(preview.found.dispositions)
    console.print(kinds_table(plan, found))
    console.print(summary_line(plan, found))
    for line in preview_lines(preview):
        console.print(line)
    for problem in (*preview.found.problems, *preview.warnings):
        console.print(f"warning: {problem}")
    if plan.store_uri == UNKNOWN_STORE:
        console.print("Only the cluster knows which results its store has already; those jobs are not run again.")
    if check.previous is not None:
        show_difference(check.previous, plan)
    for refusal in check.refusals:
        complain(refusal)
    if check.refusals:
        return False
    question = "Replace its plan and submit?" if check.changes_plan else "Submit?"
    return options.yes or confirmed(question, subject="submit asks for confirmation")


def _connect(
    stack: ExitStack, settings: Settings, plan: Plan, store: ObjectStore | None, *, foreground: bool
) -> Submitter:
    if foreground:
        stack.enter_context(_ending_on_sigterm())
    try:
        return stack.enter_context(open_submitter(settings, plan.store_uri, foreground=foreground, store=store))
    except (ClusterError, InfeasibleError):
        where = "" if plan.store_uri == UNKNOWN_STORE else f" What the store knows: {status_command(settings, plan)}"
        known = f"Nothing was submitted.{where}"
        stderr_console().print(known, soft_wrap=True)
        raise


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the body as Ctrl-C does, with its own exit code however the body ends then."""
    is_terminated = False

    def end(*_: object) -> None:
        nonlocal is_terminated
        is_terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until Ray, which ends with this command, sets it anew
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, end) or signal.SIG_DFL
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as ended:
        is_terminated |= (
            isinstance(ended, SystemExit) and ended.code == signal.SIGTERM
        )  # Ray's handler, while it starts
        if not is_terminated:
            raise
    finally:
        signal.signal(signal.SIGTERM, former)
    if is_terminated:
        raise typer.Exit(ExitCode.TERMINATED)


def _again(reference: str, options: SubmitOptions) -> str:
    """The command that submits this very sweep again, and follows it."""
    words = ["submit", reference, "-y"]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += ["--scale", options.scale] if options.scale else []
    words += ["--priority", str(options.priority)] if options.priority is not None else []
    words += ["--prices", options.prices] if options.prices else []
    words += ["--code", options.code.value] if options.code else []
    flags = {"--foreground": options.foreground, "--take-over": options.take_over, "--force": options.force}
    return command_line(*words, *(flag for flag, is_set in flags.items() if is_set), store=options.store)


def _left(settings: Settings, plan: Plan, reference: str, options: SubmitOptions) -> str:
    """What Ctrl-C leaves behind, and how to go on."""
    again = _again(reference, options)
    if options.foreground:  # Ray ends with this command
        return f"Stopped; submit it again to continue: {again}"
    watch = status_command(settings, plan, "watch")
    return f"Detached; the sweep continues. To follow it again: {again}, or: {watch}"


def _leave(submitter: Submitter, plan: Plan, message: str, form: DocumentForm) -> None:
    """Say how to go on without this command."""
    if submitter.store is None:
        known = (
            "The cluster continues by itself. To see the sweep from here, name its store with --store URI, or in "
            "the context."
        )
    else:
        known = f"Submitted. See: {status_command(submitter.settings, plan)}"
    stderr_console().print(known, soft_wrap=True)
    if form is not DocumentForm.TABLE:
        print_document({"sweep": plan.sweep, "message": message}, form)


def conclude(
    store: ObjectStore, planned: Plan, snapshot: Snapshot, options: SubmitOptions, *, connection: Submitter
) -> ExitCode:
    """Print the failures and the report of an ended sweep."""
    for line in failure_lines(snapshot, _store_elsewhere(connection.settings, planned)):
        complain(line)
    ended = exit_code_for(snapshot)
    if snapshot.state is not SweepState.CANCELLED:
        plan, report = print_report(store, planned.sweep, _TABLES[options.form], options.prices)
        if ended is ExitCode.OK and plan.policy.fails_on_expectations:
            ended = _judged(report)
    elif options.form is not DocumentForm.TABLE:
        print_document(status_document(SweepStatus(snapshot=snapshot, now=time.time())), options.form)
    try:
        is_published = connection.wait_for_publisher(planned.sweep)
    except KeyboardInterrupt:
        is_published, ended = False, ExitCode.INTERRUPTED
    if not is_published:
        publish = status_command(connection.settings, planned, "publish")
        hint = f"MLflow does not have all results yet; they follow. To publish them now: {publish}"
        stderr_console().print(hint, soft_wrap=True)
    return ended


def _judged(report: Report) -> ExitCode:
    """Whether every expectation of the simulations holds; complains of those that do not."""
    failed = unmet(report.simulations)
    for found, judged in failed:
        complain(f"{describe_claim(found, judged)}: {judged.judgement.value} (policy.expectations: fail)")
    return ExitCode.EXPECTATION if failed else ExitCode.OK
