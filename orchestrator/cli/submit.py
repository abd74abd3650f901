"""``orchestrator submit``: a client. It puts a message into the store and watches; nothing depends on its life."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass

from orchestrator.cli.connect import Connection, connect
from orchestrator.cli.console import stderr_console, stdout_console
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.follow import follow_sweep
from orchestrator.cli.plan import look_up, plan_table, summary_line
from orchestrator.cli.report import print_report
from orchestrator.cli.settings import Settings
from orchestrator.cli.status import exit_code_for, failure_lines, status_document
from orchestrator.controller.client import Ownership, submit
from orchestrator.plan.build import build_plan
from orchestrator.plan.graph import Plan
from orchestrator.spec import load_sweep
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.open import open_store
from orchestrator.storage.probe import probe_store
from orchestrator.storage.protocol import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Flags of the command."""

    yes: bool
    wait: bool
    foreground: bool
    take_over: bool
    as_json: bool


def submit_sweep(reference: str, options: SubmitOptions) -> ExitCode:
    """Plan, ask, submit, follow, report."""
    settings = Settings()
    sweep, text = load_sweep(reference)
    plan = build_plan(sweep, store_uri=settings.store_uri(sweep))
    found = look_up(plan)
    stderr_console().print(plan_table(plan, found))
    stderr_console().print(summary_line(plan, found))
    if not options.yes and not _confirmed():
        return ExitCode.REFUSED
    # Before anything depends on it: a store that ignores conditional writes could lose a sweep later.
    probe_store(open_store(plan.store_uri))
    ownership = Ownership.TAKE if options.take_over else Ownership.KEEP
    with ExitStack() as stack:
        connection = stack.enter_context(connect(settings, plan.store_uri, foreground=options.foreground))
        message = submit(connection.store, plan, text, settings.cluster, ownership=ownership)
        connection.wake()
        if not options.wait and not options.foreground:
            stderr_console().print(f"Submitted. See: {status_command(settings, plan)}", soft_wrap=True)
            if options.as_json:
                stdout_console().print_json(json.dumps({"sweep": plan.sweep, "message": message}))
            return ExitCode.OK
        again = f"orchestrator submit {shlex.quote(reference)} -y"
        return _follow_to_the_answer(connection, plan, message, again, options)


def status_command(settings: Settings, plan: Plan) -> str:
    """What to type to see a sweep, wherever its store is."""
    elsewhere = plan.store_uri != settings.store_uri()
    return f"orchestrator status {plan.sweep}" + (f" --store {shlex.quote(plan.store_uri)}" if elsewhere else "")


def _follow_to_the_answer(
    connection: Connection, plan: Plan, message: str, again: str, options: SubmitOptions
) -> ExitCode:
    _show_addresses(connection)
    try:
        snapshot = follow_sweep(connection, plan.sweep, message)
    except KeyboardInterrupt:
        detached = f"Detached; the sweep goes on. Follow it again with: {again}"
        stderr_console().print(f"\n{detached}, or: {status_command(connection.settings, plan)}", soft_wrap=True)
        return ExitCode.INTERRUPTED
    return conclude(connection.store, plan.sweep, snapshot, as_json=options.as_json, connection=connection)


def conclude(store: ObjectStore, sweep: str, snapshot: Snapshot, *, as_json: bool, connection: Connection) -> ExitCode:
    """Print the failures and the report of an ended sweep."""
    for line in failure_lines(snapshot):
        complain(line)
    if snapshot.state is not SweepState.CANCELLED:
        print_report(store, sweep, as_json=as_json)
    elif as_json:
        stdout_console().print_json(json.dumps(status_document(snapshot, {})))
    if not connection.wait_for_publisher(sweep):
        hint = f"MLflow does not have all of it yet; it follows by itself, or by: orchestrator publish {sweep}"
        stderr_console().print(hint, soft_wrap=True)
    _show_addresses(connection)
    return exit_code_for(snapshot)


def _show_addresses(connection: Connection) -> None:
    for name, address in connection.addresses.items():
        stderr_console().print(f"{name}: {address}")


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        complain("a submit asks before it starts; there is no terminal to ask on, so pass -y")
        return False
    return input("Submit? [y/N] ").strip().lower() in {"y", "yes"}
