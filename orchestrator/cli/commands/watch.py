"""``orchestrator watch``: shows a running sweep, only from the store; the sweep does not depend on it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Thread
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.live import Live

from orchestrator.cli.arguments import StoreOption, complete_sweep
from orchestrator.cli.commands.overview import Matrix
from orchestrator.cli.commands.status import exit_code_for, status_table
from orchestrator.cli.exits import ExitCode
from orchestrator.core.errors import UserError
from orchestrator.core.units import format_duration, format_percent
from orchestrator.services.costs import read_prices
from orchestrator.services.eta import EtaTracker
from orchestrator.services.status import SweepStatus, failure_lines, load_status, revive_killed_stack
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import stderr_console
from orchestrator.services.transports import Submitter
from orchestrator.state.brief_reasons import brief
from orchestrator.state.snapshot import JobTable, JobView, Snapshot
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import SweepLedger

EVERY_S = 0.5
_NUM_KEPT = 50
_POLL_S = 0.2
_PATIENCE_S = 15.0
_NOT_TAKEN = (
    "The controller has not accepted the sweep yet. The sweep waits in the store; if this takes long, check the "
    "actor 'controller' in the Ray dashboard, and whether its nodes reach the store."
)
_SHOWN_METRIC = "val_error"


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

    LiveView(store, sweep, every_s=every_s, is_ascii=_is_ascii()).run()


def _is_ascii() -> bool:
    return not Console().encoding.lower().startswith("utf")


class Watching:
    """What one display knows of a sweep; each look reads only what is new."""

    def __init__(self, store: ObjectStore, sweep: str) -> None:
        self._store = store
        self._ledger = SweepLedger(store, sweep)
        self._jobs: JobTable | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=_NUM_KEPT)
        self.tracker = EtaTracker()
        self._prices = read_prices("")
        self.matrix = Matrix()
        self.status = SweepStatus(snapshot=self._ledger.snapshot)

    def look(self) -> SweepStatus:
        """Read what is new.

        Raises:
            StorageError: the store does not answer; what is known stays.
        """
        snapshot = self._ledger.refresh()
        self._note(snapshot)
        self.matrix.update(snapshot)
        self.status = load_status(self._store, snapshot, self.tracker, self._prices)
        return self.status

    @property
    def events(self) -> list[str]:
        """What happened last to jobs, newest first."""
        now = self.status.now
        return [f"{format_duration(max(0.0, now - at_s)):>7} ago  {line}" for at_s, line in self._events]

    def _note(self, snapshot: Snapshot) -> None:
        jobs, self._jobs = self._jobs, snapshot.jobs
        changed = snapshot.jobs.values() if jobs is None else snapshot.jobs.changed_since(jobs)
        news = sorted((_moment(view), job_line(view)) for view in changed if _is_news(view))
        self._events.extendleft(news[-_NUM_KEPT:])


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
    for line in (f"Sweep {sweep}: {snapshot.outcome}", *failure_lines(snapshot)):
        stderr_console().print(line, markup=False, soft_wrap=True)
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
    lines = Lines()
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
    again = f"orchestrator watch {sweep}" + (f" --store {store_uri}" if store_uri else "")
    stderr_console().print(f"Detached; the sweep continues. To watch it again: {again}", markup=False, soft_wrap=True)


def _is_news(view_: JobView) -> bool:
    return view_.attempt is not None or view_.last_failure is not None or view_.state.is_final


def _moment(view_: JobView) -> float:
    """When a job changed last."""
    if view_.attempt is not None:
        return view_.attempt.launched_at_s
    return view_.ended_at_s or (view_.last_failure.at_s if view_.last_failure else 0.0)


class _Display(Protocol):
    def show(self, status: SweepStatus) -> None: ...


def follow_sweep(connection: Submitter, store: ObjectStore, sweep: str, message_id: str) -> Snapshot:
    """Show progress until the message is settled and the sweep has ended; returns its final snapshot.

    Raises:
        UserError: the controller refused the message.
    """
    tracker, prices = EtaTracker(), read_prices("")
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
                raise UserError(message)
            if message_id in snapshot.handled:
                display.show(status)
                if snapshot.state.is_final:
                    return snapshot
            elif time.monotonic() > patience_ends_s:
                patience_ends_s += _PATIENCE_S
                stderr_console().print(_NOT_TAKEN, soft_wrap=True)
            connection.keep_alive()
            time.sleep(_POLL_S)


def look_while(look: Callable[[], SweepStatus], meanwhile: Callable[[], None]) -> SweepStatus:
    """What a look at the store finds. While it lasts, ``meanwhile`` is called every fifth of a second.

    A store that does not answer is asked again for a minute before that is an error. It may be on the S3 server of the
    very stack that ``meanwhile`` starts again.
    """
    found: Future[SweepStatus] = Future()

    def run() -> None:
        try:
            found.set_result(look())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            found.set_exception(error)

    Thread(target=run, name="look at the store", daemon=True).start()  # daemon: Ctrl-C waits for no server
    while not wait([found], timeout=_POLL_S).done:
        meanwhile()
    return found.result()


@contextmanager
def _display() -> Iterator[_Display]:
    console = stderr_console()
    if not console.is_terminal:
        yield Lines()
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

    def __init__(self) -> None:
        self._said: dict[str, str] | None = None

    def show(self, status: SweepStatus) -> None:
        snapshot = status.snapshot
        now = {view.name: f"{view.state.value}#{view.num_attempts}" for view in snapshot.jobs.values()}
        num_ended = sum(view.state.is_final for view in snapshot.jobs.values())
        if self._said is None:
            self._said = now
            stderr_console().print(f"{num_ended} of {len(now)} jobs have ended already")
            return
        for view in snapshot.jobs.values():
            if self._said.get(view.name) != now[view.name] and (view.state.is_final or view.failures):
                stderr_console().print(
                    f"[{num_ended}/{len(now)}] {job_line(view, tells_reason=False)}", markup=False, soft_wrap=True
                )
        self._said = now


def job_line(view: JobView, *, tells_reason: bool = True) -> str:
    """``pretrain/levels/depth2/seed0 succeeded in 5.3s, val_error 12.10 %``."""
    failure = view.last_failure
    if failure is not None and not view.state.is_final:
        # The reason is printed once, when the attempt ends; later lines only say that the job continues.
        if view.attempt is not None:
            return f"{view.name} runs again (attempt {view.attempt.number})"
        return f"{view.name} will be tried again after {brief(failure)}"
    parts = [f"{view.name} {view.state.value}"]
    if view.state.is_done and view.timings is not None:
        parts.append(f"in {format_duration(view.timings.work_s)}")
    if _SHOWN_METRIC in view.metrics:
        parts.append(f"{_SHOWN_METRIC} {format_percent(view.metrics[_SHOWN_METRIC])} %")
    if failure is not None and tells_reason and not view.state.is_done:
        parts.append(f"({brief(failure)})")
    return " ".join(parts)
