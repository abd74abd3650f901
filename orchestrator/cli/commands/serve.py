"""``orchestrator serve``: runs a controller on a Ray cluster as long as the machines are allocated.

A batch job of a queueing system, a pod or a service unit runs it on the node of Ray's head: sweeps in the store
continue, new ones are taken from the inbox, and before the machines are taken back every attempt writes a checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated

import typer

from orchestrator.cli.exits import ExitCode, complain
from orchestrator.core.errors import ControllerError, UserError
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import stderr_console
from orchestrator.services.transports import RayTransport, connect
from orchestrator.state.events import Running
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.drain import drain, end_drain, read_drain

SENDER = "orchestrator serve"
"""Sender of the drain: the next start ends only a drain of this sender."""
_POLL_S = 0.5


def serve(
    *,
    until_idle: Annotated[
        float | None, typer.Option(min=0.0, help="Exit when all sweeps have been finished for this many seconds.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that attempts have for a checkpoint after SIGTERM.")
    ] = 90.0,
) -> None:
    """Run the sweeps of a store on the Ray cluster at RAY_ADDRESS until a signal; then checkpoint all attempts."""
    raise typer.Exit(serve_cluster(until_idle_s=until_idle, grace_s=grace))


@dataclass(slots=True)
class _EndSignal:
    """The first signal to end that was received."""

    name: str = ""

    def take(self, number: int, _frame: FrameType | None) -> None:
        """Called by Python between two instructions of the main thread."""
        self.name = self.name or signal.Signals(number).name


@dataclass(slots=True, kw_only=True)
class _Idleness:
    """Measures for how long a controller has had no unfinished sweep."""

    since_s: float = field(default_factory=time.monotonic)

    def note(self, *, has_unfinished: bool) -> float:
        """Take its present state; returns the seconds since it last had one."""
        now_s = time.monotonic()
        if has_unfinished:
            self.since_s = now_s
        return now_s - self.since_s


def serve_cluster(*, until_idle_s: float | None, grace_s: float) -> ExitCode:
    """Serve the store of the settings on their Ray cluster.

    Args:
        until_idle_s: return when no sweep has been unfinished for so long; None = run until a signal.
        grace_s: how long attempts may take for their checkpoints after SIGTERM or SIGINT.

    Returns ``OK`` when idle long enough, and ``INTERRUPTED`` when a signal ended it and all attempts have ended;
    ``UNFINISHED`` if some had not ended within the grace.

    Raises:
        UserError: the settings name no Ray cluster.
        ClusterError, ControllerError: as every command that connects.
    """
    settings = Settings()
    if not settings.driver_address:
        raise UserError("serve needs the address of a Ray cluster: set RAY_ADDRESS=host:port of its head node")
    with connect(settings, settings.store_uri(), foreground=False) as connection, _listening() as call:
        _end_own_drain(connection)
        _print(f"serving {connection.store.uri} as cluster {settings.cluster}")
        if _stay(connection, call, until_idle_s):
            _print("no sweep is unfinished: done")
            return ExitCode.OK
        _print(f"{call.name}: all attempts write a checkpoint now")
        return _drain_cluster(connection, call.name, grace_s)


@contextmanager
def _listening() -> Iterator[_EndSignal]:
    """Take the signals to end. Entered after connecting: Ray sets handlers of its own, which would end this process."""
    call = _EndSignal()
    former = {number: signal.signal(number, call.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield call
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stay(connection: RayTransport, call: _EndSignal, until_idle_s: float | None) -> bool:
    """Wait until a signal (returns False) or until it is idle (True)."""
    idleness = _Idleness()
    while not call.name:
        connection.keep_alive()
        has_unfinished = connection.link.has_unfinished
        rest_s = idleness.note(has_unfinished=has_unfinished)
        if until_idle_s is not None and not has_unfinished and rest_s >= until_idle_s:
            return True
        time.sleep(_POLL_S)
    return False


def _drain_cluster(connection: RayTransport, reason: str, grace_s: float) -> ExitCode:
    store, cluster = connection.store, connection.settings.cluster
    reason, sender = _owner(store, cluster) or (reason, SENDER)
    drain(store, cluster, running=Running.CHECKPOINT, reason=reason, sender=sender)
    connection.wake()
    ends_s = time.monotonic() + grace_s
    while time.monotonic() < ends_s:
        found = read_drain(store, cluster)
        if found is None:  # do not begin it again: it would block the `serve` that ended it
            complain(
                "the drain was ended (by `orchestrator drain --end`, or by another `serve` of this cluster) before all "
                "attempts were seen to end; an attempt that ends with this cluster resumes from its newest checkpoint"
            )
            return ExitCode.UNFINISHED
        if found.drained_at_s is not None:
            _print("no job runs any more; sweeps resume when a controller serves the cluster again")
            return ExitCode.INTERRUPTED
        time.sleep(_POLL_S)
    complain(
        f"an attempt wrote no checkpoint within {grace_s:g} s; it will resume from its last one. The "
        "controller ends an attempt after 120 s: set --grace to 120 or more"
    )
    return ExitCode.UNFINISHED


def _owner(store: ObjectStore, cluster: str) -> tuple[str, str] | None:
    """Reason and sender of a drain that a person has begun, which keeps them: the next start must not end it."""
    try:
        found = read_drain(store, cluster)
    except ControllerError:
        return "", ""  # of an unknown sender, so of a person
    return None if found is None or found.sender == SENDER else (found.reason, found.sender)


def _end_own_drain(connection: RayTransport) -> None:
    """End the drain that the end of the last allocation left; a person's drain stays."""
    store, cluster = connection.store, connection.settings.cluster
    try:
        found = read_drain(store, cluster)
    except ControllerError as error:
        complain(str(error))
        return
    if found is None:
        return
    if found.sender != SENDER:
        _print(f"the cluster is drained by {found.sender or 'somebody'}; work starts after: orchestrator drain --end")
        return
    end_drain(store, cluster)
    connection.wake()


def _print(text: str) -> None:
    stderr_console().print(text, soft_wrap=True)
