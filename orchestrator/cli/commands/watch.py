"""``orchestrator watch``: shows a running sweep, only from the store; the sweep does not depend on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.live import Live

from orchestrator.cli.arguments import StoreOption, complete_sweep
from orchestrator.cli.commands.live_rows import POLL_S, Watching, job_line, look_while
from orchestrator.cli.commands.status import exit_code_for, status_table
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import stdout_console
from orchestrator.core.errors import InfeasibleError, UserError
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.services.costs import read_prices
from orchestrator.services.eta import EtaTracker
from orchestrator.services.status import SweepStatus, failure_lines, load_status, revive_killed_stack
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import command_line, stderr_console
from orchestrator.services.transports import Submitter
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import SweepLedger

EVERY_S = 0.5
_PATIENCE_S = 15.0
_NOT_TAKEN = (
    "The controller has not accepted the sweep yet. The sweep waits in the store; if this takes long, check the "
    "actor 'controller' in the Ray dashboard, and whether its nodes reach the store."
)


def watch(
    sweep: Annotated[
        str, typer.Argument(help="Name of a submitted sweep; none: all sweeps.", autocompletion=complete_sweep)
    ] = "",
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = EVERY_S,
    store: StoreOption = "",
) -> None:
    """Show a sweep live, or all sweeps; keys pause and cancel; on a pipe, print one line per ended job.

    Leaving does not stop it.
    """
    if not sweep:
        _show_all("", store, every)
        return
    raise typer.Exit(watch_sweep(sweep, store, every_s=every))


def top(
    sweep: Annotated[str, typer.Argument(help="Sweep to show first.", autocompletion=complete_sweep)] = "",
    *,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 1.0,
    store: StoreOption = "",
) -> None:
    """Show all sweeps live, with their jobs, nodes and rates; keys pause, resume and cancel."""
    _show_all(sweep, store, every)


def _show_all(sweep: str, store_uri: str, every_s: float) -> None:
    """The live view of all sweeps, until the user leaves it. Raises ``UserError`` where there is no terminal."""
    store = open_existing_store(store_uri)
    if sweep:
        require_sweep(store, sweep)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("the view of all sweeps needs a terminal; use: orchestrator status -o json")
    from orchestrator.cli.commands.live_view import LiveView  # Textual takes half a second to load

    read_prices("")  # or refuse: the view reads them in a thread of its own
    LiveView(store, sweep, every_s=every_s, is_ascii=_is_ascii()).run()


def _is_ascii() -> bool:
    return not Console().encoding.lower().startswith("utf")


def watch_sweep(sweep: str, store_uri: str, *, every_s: float = EVERY_S) -> ExitCode:
    """Show a sweep until it ends or the user leaves."""
    store = open_existing_store(store_uri)
    require_sweep(store, sweep)
    watching = Watching(store, sweep)
    try:
        # A screen without keys cannot be left: where input is no terminal, lines are printed.
        if sys.stdin.isatty() and sys.stdout.isatty():
            snapshot = _on_screen(store, sweep, every_s) or watching.look().snapshot
        else:
            _in_lines(watching, every_s)
            snapshot = watching.status.snapshot
    except KeyboardInterrupt:
        _say_detached(sweep, store_uri)
        return ExitCode.INTERRUPTED
    if not snapshot.state.is_final:
        _say_detached(sweep, store_uri)
        return exit_code_for(snapshot)
    for line in (f"Sweep {sweep}: {snapshot.outcome}", *failure_lines(snapshot, store_uri)):
        stdout_console().print(line)
    return exit_code_for(snapshot)


def _on_screen(store: ObjectStore, sweep: str, every_s: float) -> Snapshot | None:
    """On the alternate screen, until the sweep ends or the user leaves; none if nothing was read until then.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    from orchestrator.cli.commands.live_view import INTERRUPTED, LiveView  # Textual takes half a second to load

    view = LiveView(store, sweep, every_s=every_s, is_alone=True, is_ascii=_is_ascii())
    if view.run() == INTERRUPTED:
        raise KeyboardInterrupt
    return view.shown.snapshot


def _in_lines(watching: Watching, every_s: float) -> None:
    lines = Lines(stdout_console())
    while True:
        status = _look(watching)
        lines.show(status)
        if status.snapshot.state.is_final:
            return
        time.sleep(every_s)


def _look(watching: Watching) -> SweepStatus:
    """The status of this moment; a stack that was killed is started again, also while the store does not answer."""
    status = look_while(watching.look, lambda: revive_killed_stack(watching.status.snapshot))
    revive_killed_stack(status.snapshot)
    return status


def _say_detached(sweep: str, store_uri: str) -> None:
    again = command_line("watch", sweep, store=store_uri)
    stderr_console().print(f"Detached; the sweep continues. To watch it again: {again}", soft_wrap=True)


class _Display(Protocol):
    def show(self, status: SweepStatus) -> None: ...


def follow_sweep(
    connection: Submitter, store: ObjectStore, sweep: str, message_id: str, prices: PriceTable | None = None
) -> Snapshot:
    """Show progress until the message is settled and the sweep has ended; returns its final snapshot.

    Raises:
        InfeasibleError: the controller refused the message.
    """
    tracker = EtaTracker()
    ledger, patience_ends_s = SweepLedger(store, sweep), time.monotonic() + _PATIENCE_S

    def look() -> SweepStatus:
        snapshot = ledger.refresh()
        is_taken = message_id in snapshot.handled
        return load_status(store, snapshot, tracker, prices) if is_taken else SweepStatus(snapshot=snapshot)

    with _display() as display:
        while True:
            status = look_while(look, connection.keep_alive)
            snapshot = status.snapshot
            if message_id in snapshot.refusals:
                message = f"the controller refused sweep '{sweep}': {snapshot.refusals[message_id]}"
                raise InfeasibleError(message)
            if message_id in snapshot.handled:
                display.show(status)
                if snapshot.state.is_final:
                    return snapshot
            elif time.monotonic() > patience_ends_s:
                patience_ends_s += _PATIENCE_S
                stderr_console().print(_NOT_TAKEN, soft_wrap=True)
            connection.keep_alive()
            time.sleep(POLL_S)


@contextmanager
def _display() -> Iterator[_Display]:
    console = stderr_console()
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield _Table(live)


class _Table:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, status: SweepStatus) -> None:
        self._live.update(status_table(status, tells_failures=not status.snapshot.state.is_final))


class Lines:
    """For pipes and logs: says each job's end once, and sums up what had ended before.

    Why jobs failed is printed once, when the sweep ends, for all jobs that failed for the same reason.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] | None = None

    def show(self, status: SweepStatus) -> None:
        snapshot = status.snapshot
        now = {view.name: f"{view.state.value}#{view.num_attempts}" for view in snapshot.jobs.values()}
        num_ended = sum(view.state.is_final for view in snapshot.jobs.values())
        if self._said is None:
            self._said = now
            self._console.print(f"{num_ended} of {len(now)} jobs have ended already")
            return
        for view in snapshot.jobs.values():
            if self._said.get(view.name) != now[view.name] and (view.state.is_final or view.failures):
                self._console.print(f"[{num_ended}/{len(now)}] {job_line(view, tells_reason=False)}", soft_wrap=True)
        self._said = now
