"""Commands that steer submitted sweeps; they need the store alone, and work while no controller runs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.arguments import JobPatterns, StoreOption, SweepName, Yes
from orchestrator.cli.output import DocumentForm, DocumentOption

if TYPE_CHECKING:
    from orchestrator.cli.orders import Sending

_Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="NAME=VALUE,...", help="Only jobs with these facets, kind, state or name."),
]
_Force = Annotated[bool, typer.Option("--force", help="Also if the sweep belongs to somebody else.")]
_Sender = Annotated[str | None, typer.Option("--sender", help="In whose name; default: this user.")]


class RunningJobs(StrEnum):
    """What becomes of jobs that run."""

    FINISH = "finish"
    CHECKPOINT = "checkpoint"


_OfRunning = Annotated[RunningJobs, typer.Option("--running", help="Running jobs finish, or end after a checkpoint.")]


def pause(
    sweep: SweepName,
    *,
    running: _OfRunning = RunningJobs.FINISH,
    force: _Force = False,
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Start nothing new of a sweep until it is resumed; what runs goes on."""
    from orchestrator.cli import steer
    from orchestrator.sweeps.client import Running

    sending = _sending(store, sender, output, force=force)
    raise typer.Exit(steer.pause(sweep, Running(running.value), sending))


def resume(
    sweep: SweepName,
    *,
    force: _Force = False,
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Let a paused sweep go on."""
    from orchestrator.cli import steer

    raise typer.Exit(steer.resume(sweep, _sending(store, sender, output, force=force)))


def stop(
    sweep: SweepName,
    *,
    force: _Force = False,
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """End a sweep gently: what runs goes on to its end, nothing else starts."""
    from orchestrator.cli import steer

    raise typer.Exit(steer.stop(sweep, _sending(store, sender, output, force=force)))


def cancel(
    sweep: SweepName,
    jobs: JobPatterns = None,
    *,
    where: _Where = None,
    yes: Yes = False,
    force: _Force = False,
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """End a sweep, or some of its jobs, now: what runs ends after a checkpoint, nothing else starts."""
    from orchestrator.cli import steer

    sending = _sending(store, sender, output, force=force, yes=yes)
    raise typer.Exit(steer.cancel(sweep, jobs or (), where or (), sending))


def retry(
    sweep: SweepName,
    jobs: JobPatterns = None,
    *,
    where: _Where = None,
    yes: Yes = False,
    force: _Force = False,
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Give jobs that failed, were skipped or cancelled another chance; without jobs all of them."""
    from orchestrator.cli import steer

    sending = _sending(store, sender, output, force=force, yes=yes)
    raise typer.Exit(steer.retry(sweep, jobs or (), where or (), sending))


def priority(
    sweep: SweepName,
    level: Annotated[str, typer.Argument(help="low, normal, high, urgent, or a whole number; higher goes first.")],
    *,
    force: _Force = False,
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Give a sweep another priority until its plan changes."""
    from orchestrator.cli import steer

    raise typer.Exit(steer.set_priority(sweep, level, _sending(store, sender, output, force=force)))


def drain(
    *,
    running: _OfRunning = RunningJobs.FINISH,
    reason: Annotated[str, typer.Option(help="Shown to whoever asks why nothing starts.")] = "",
    end: Annotated[bool, typer.Option("--end", help="Let the cluster work again.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only say whether it is drained.")] = False,
    cluster: Annotated[str, typer.Option(help="Name of the cluster in leases; default: this project's.")] = "",
    sender: _Sender = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Bring the whole cluster to rest, for an upgrade or maintenance: no sweep starts anything until --end."""
    from orchestrator.cli import drain as draining
    from orchestrator.sweeps.client import Running

    sending = _sending(store, sender, output)
    if end and show:
        raise typer.BadParameter("--end and --show exclude each other")
    if end:
        raise typer.Exit(draining.end(cluster, sending))
    if show:
        raise typer.Exit(draining.show(cluster, sending))
    raise typer.Exit(draining.begin(cluster, Running(running.value), reason, sending))


def _sending(
    store: str, sender: str | None, output: DocumentForm, *, force: bool = False, yes: bool = False
) -> Sending:
    from orchestrator.cli.orders import Sending
    from orchestrator.sweeps.client import Consent

    consent = Consent.FORCE if force else Consent.ASK
    return Sending(store=store, sender=sender, consent=consent, yes=yes, form=output)
