"""Live progress of a sweep: a table that renews itself on a terminal, one line per ended job anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.live import Live

from orchestrator.cli.output import stderr_console
from orchestrator.cli.status import status_table
from orchestrator.core.errors import UserError
from orchestrator.core.units import format_duration, format_percent
from orchestrator.services.costs import read_prices
from orchestrator.services.eta import EtaTracker
from orchestrator.services.status import SweepStatus, brief, load_status
from orchestrator.services.transports import Submitter
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import SweepLedger

_POLL_S = 0.2
_PATIENCE_S = 15.0
_NOT_TAKEN = (
    "The controller has not taken the sweep yet. It waits in the store; if this goes on, see the actor 'controller' in "
    "the Ray dashboard, and that its nodes reach the store."
)
_SHOWN_METRIC = "val_error"


class _Display(Protocol):
    def show(self, standing: SweepStatus) -> None: ...


def follow_sweep(connection: Submitter, store: ObjectStore, sweep: str, message_id: str) -> Snapshot:
    """Show progress until the message is settled and the sweep has ended; returns its final snapshot.

    Raises:
        UserError: the controller refused the message.
    """
    pacer, prices = EtaTracker(), read_prices("")
    ledger, patience_ends_s = SweepLedger(store, sweep), time.monotonic() + _PATIENCE_S
    with _display() as display:
        while True:
            snapshot = ledger.refresh()
            if message_id in snapshot.refusals:
                message = f"the controller refused sweep '{sweep}': {snapshot.refusals[message_id]}"
                raise UserError(message)
            if message_id in snapshot.handled:
                display.show(load_status(store, snapshot, pacer, prices))
                if snapshot.state.is_final:
                    return snapshot
            elif time.monotonic() > patience_ends_s:
                patience_ends_s += _PATIENCE_S
                stderr_console().print(_NOT_TAKEN, soft_wrap=True)
            connection.keep_alive()
            time.sleep(_POLL_S)


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

    def show(self, standing: SweepStatus) -> None:
        self._live.update(status_table(standing))


class Lines:
    """For pipes and logs: says each job's end once, and sums up what had ended before."""

    def __init__(self) -> None:
        self._said: dict[str, str] | None = None

    def show(self, standing: SweepStatus) -> None:
        snapshot = standing.snapshot
        now = {view.name: f"{view.state.value}#{view.num_attempts}" for view in snapshot.jobs.values()}
        num_ended = sum(view.state.is_final for view in snapshot.jobs.values())
        if self._said is None:
            self._said = now
            stderr_console().print(f"{num_ended} of {len(now)} jobs have ended already")
            return
        for view in snapshot.jobs.values():
            if self._said.get(view.name) != now[view.name] and (view.state.is_final or view.failures):
                stderr_console().print(f"[{num_ended}/{len(now)}] {job_line(view)}", markup=False, soft_wrap=True)
        self._said = now


def job_line(view: JobView) -> str:
    """``pretrain/levels/depth2/seed0 succeeded in 5.3s, val_error 12.10 %``."""
    failure = view.last_failure
    if failure is not None and not view.state.is_final:
        # The reason is told once, when the attempt ends; what follows says only that it goes on.
        if view.attempt is not None:
            return f"{view.name} runs again (attempt {view.attempt.number})"
        return f"{view.name} will be tried again after {brief(failure)}"
    parts = [f"{view.name} {view.state.value}"]
    if view.state.is_done and view.timings is not None:
        parts.append(f"in {format_duration(view.timings.work_s)}")
    if _SHOWN_METRIC in view.metrics:
        parts.append(f"{_SHOWN_METRIC} {format_percent(view.metrics[_SHOWN_METRIC])} %")
    if failure is not None and not view.state.is_done:
        parts.append(f"({brief(failure)})")
    return " ".join(parts)
