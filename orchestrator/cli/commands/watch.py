"""``orchestrator watch``: shows a running sweep, only from the store; the sweep does not depend on it."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Thread
from typing import Annotated, Protocol

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from orchestrator.cli.arguments import StoreOption, complete_sweep
from orchestrator.cli.commands.status import exit_code_for, status_table
from orchestrator.cli.commands.watch_frame import Matrix, frame
from orchestrator.cli.exits import ExitCode
from orchestrator.core.errors import OrchestratorError, StorageError, UserError
from orchestrator.core.units import format_duration, format_percent
from orchestrator.services.costs import read_prices
from orchestrator.services.eta import EtaTracker
from orchestrator.services.status import SweepStatus, brief, failure_lines, load_status, revive_killed_stack
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import stderr_console
from orchestrator.services.transports import Submitter
from orchestrator.state.snapshot import JobTable, JobView, Snapshot
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.sweeps.client import SweepLedger

EVERY_S = 0.5
_NUM_KEPT = 50
_END = "\x04"
"""What a terminal sends for the end of input."""
LEAVE = frozenset({"q", "Q", "\x1b", _END})
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
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 0.5,
    store: StoreOption = "",
) -> None:
    """Show a sweep live, or all sweeps; keys pause and cancel; on a pipe, print one line per ended job.

    Leaving does not stop it.
    """
    if not sweep:
        from orchestrator.cli.commands.top import show_all  # Textual takes half a second to load

        show_all("", store, every_s=every)
        return
    raise typer.Exit(watch_sweep(sweep, store, every_s=every))


_REQUESTS: Mapping[str, tuple[str, Callable[..., str]]] = {
    "p": ("pause: no job starts, running jobs finish", client.pause),
    "r": ("resume: ready jobs start again", client.resume),
    "c": ("cancel: running jobs end after a checkpoint, and no other job starts", client.cancel),
}
"""By key: what it asks the sweep's controller for."""


class Steering:
    """What keys ask of a sweep: each request is sent after ``y``; any other key takes it back."""

    def __init__(self, ask: Callable[[Callable[..., str]], None]) -> None:
        self._ask, self._key = ask, ""
        self.prompt = ""
        """The last line of the view; empty = nothing was asked."""

    @property
    def is_asking(self) -> bool:
        """Whether the next key is an answer."""
        return bool(self._key)

    def press(self, key: str) -> None:
        """Follow a key; empty = none was pressed."""
        if not key:
            return
        if not self._key:
            self._key = key if key in _REQUESTS else ""
            self.prompt = f"{_REQUESTS[key][0]}? y: yes, any other key: no" if self._key else ""
            return
        asked, self._key, self.prompt = self._key, "", ""
        if key.lower() == "y":
            try:
                self._ask(_REQUESTS[asked][1])
                self.prompt = "Request sent; a controller follows it within about a second."
            except OrchestratorError as error:
                self.prompt = str(error)


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

    def ask(self, request: Callable[..., str]) -> None:
        """Send a request about the sweep. Raises ``OrchestratorError``."""
        request(self._store, self.status.snapshot.sweep)

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
    watching, console = Watching(store, sweep), Console(highlight=False)
    try:
        if console.is_terminal:
            _on_screen(watching, console, every_s)
        else:
            _in_lines(watching, every_s)
    except KeyboardInterrupt:
        _say_detached(sweep, store_uri)
        return ExitCode.INTERRUPTED
    snapshot = watching.status.snapshot
    if not snapshot.state.is_final:
        _say_detached(sweep, store_uri)
        return exit_code_for(snapshot)
    for line in (f"Sweep {sweep}: {snapshot.outcome}", *failure_lines(snapshot)):
        stderr_console().print(line, markup=False, soft_wrap=True)
    return exit_code_for(snapshot)


def view(watching: Watching, console: Console, prompt: str = "") -> RenderableType:
    """The frame of this moment."""
    return frame(
        watching.status,
        watching.matrix,
        watching.events,
        height=console.height,
        width=console.width,
        is_ascii=not console.encoding.lower().startswith("utf"),
        prompt=prompt,
    )


def _on_screen(watching: Watching, console: Console, every_s: float) -> None:
    """On the alternate screen, until the sweep ends or a key that leaves is pressed."""
    steering = Steering(watching.ask)
    with _keys() as wait_for_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            with contextlib.suppress(StorageError):  # a moment's outage: the last view stays
                _look(watching)
            live.update(view(watching, console, steering.prompt), refresh=True)
            if watching.status.snapshot.state.is_final:
                return
            key = wait_for_key(every_s)
            if key in LEAVE and not steering.is_asking:
                return
            steering.press(key)


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


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it; empty if none was pressed."""
    if not sys.stdin.isatty():
        yield _slept
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _slept(every_s: float) -> str:
    time.sleep(every_s)
    return ""


def pressed(every_s: float) -> str:
    """The key that is pressed within so many seconds; empty if none is."""
    if not select.select([sys.stdin], [], [], every_s)[0]:
        return ""
    return sys.stdin.read(1) or _END  # nothing to read: the terminal is gone, and would be at once each time


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
