"""``orchestrator drain``: stop starting jobs on a whole cluster, for an upgrade or maintenance, and start again."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from orchestrator.cli.arguments import StoreOption
from orchestrator.cli.commands.lifecycle import WAIT_S, ControlOptions, RunningOption, SenderOption
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.core.errors import ControllerError
from orchestrator.services.settings import Settings
from orchestrator.services.stores import open_existing_store
from orchestrator.services.terminal import command_line, stderr_console
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Drain, Running, current_user, end_drain, read_drain
from orchestrator.sweeps.lease import is_served, read_lease

_POLL_S = 0.1


def drain(
    *,
    running: RunningOption = Running.FINISH,
    reason: Annotated[str, typer.Option(help="Reason, shown to users who ask why no job starts.")] = "",
    end: Annotated[bool, typer.Option("--end", help="End the drain: jobs start again.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only show whether the cluster is drained.")] = False,
    cluster: Annotated[str, typer.Option(help="Name of the cluster in the store; default: that of the settings.")] = "",
    sender: SenderOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Drain the whole cluster for an upgrade or maintenance: no job starts until --end."""
    options = ControlOptions(store=store, sender=sender, form=output)
    if end and show:
        raise typer.BadParameter("use either --end or --show, not both")
    if end:
        raise typer.Exit(_end(cluster, options))
    if show:
        raise typer.Exit(_show_drain(cluster, options))
    raise typer.Exit(_begin(cluster, running, reason, options))


def _begin(cluster: str, running: Running, reason: str, options: ControlOptions) -> ExitCode:
    """Ask for a drain; print whether the cluster is drained already."""
    store, name = _place(cluster, options)
    sender = current_user() if options.sender is None else options.sender
    client.drain(store, name, running=running, reason=reason, sender=sender)
    return _show(_wait(store, name), name, store, options)


def _end(cluster: str, options: ControlOptions) -> ExitCode:
    """End the drain of a cluster."""
    store, name = _place(cluster, options)
    try:
        was_drained = read_drain(store, name) is not None
    except ControllerError:  # of a newer version, or damaged: nothing starts while it is there
        was_drained = True
    end_drain(store, name)
    if options.form is not DocumentForm.TABLE:
        print_document({"cluster": name, "was_drained": was_drained, "drain": None}, options.form)
    soon = ": waiting jobs start within seconds" if is_served(store, name) else ""
    state = f"is no longer drained{soon}" if was_drained else "works"
    stderr_console().print(f"Cluster {name} {state}.", soft_wrap=True)
    return ExitCode.OK


def _show_drain(cluster: str, options: ControlOptions) -> ExitCode:
    """Print whether a cluster is drained."""
    store, name = _place(cluster, options)
    return _show(read_drain(store, name), name, store, options)


def _place(cluster: str, options: ControlOptions) -> tuple[ObjectStore, str]:
    name = Settings().known_cluster(cluster)
    return open_existing_store(options.store), name


def _wait(store: ObjectStore, cluster: str) -> Drain | None:
    """The drain once no job runs any more, or after a few seconds."""
    deadline_s = time.monotonic() + WAIT_S
    request = read_drain(store, cluster)
    while (
        request is not None
        and request.drained_at_s is None
        and time.monotonic() < deadline_s
        and is_served(store, cluster)
    ):
        time.sleep(_POLL_S)
        request = read_drain(store, cluster)
    return request


def _show(request: Drain | None, cluster: str, store: ObjectStore, options: ControlOptions) -> ExitCode:
    if options.form is not DocumentForm.TABLE:
        print_document({"cluster": cluster, "drain": None if request is None else asdict(request)}, options.form)
    state = _describe(request, cluster, store, options)
    stderr_console().print(f"Cluster {cluster} {state}.", soft_wrap=True)
    return ExitCode.OK


def _describe(request: Drain | None, cluster: str, store: ObjectStore, options: ControlOptions) -> str:
    if request is None:
        return "is not drained"
    named = [] if cluster == Settings().cluster else ["--cluster", cluster]
    back = f"to end the drain: {command_line('drain', '--end', *named, store=options.store)}"
    if request.drained_at_s is not None:
        return f"is drained: no job runs and none starts; {back}"
    how = "ends" if request.running is Running.FINISH else "has written a checkpoint"
    if is_served(store, cluster):
        return (
            f"is draining: no job starts; the drain is complete when every running job {how}; to see the progress: "
            f"{command_line('drain', '--show', *named, store=options.store)}; {back}"
        )
    if read_lease(store, cluster) is None:
        known = sorted(name.rstrip("/") for name in store.list_children("controllers/") if name.rstrip("/") != cluster)
        others = f" (it has seen {', '.join(known)})" if known else ""
        return (
            f"will be drained: the store has seen no controller of a cluster of this name{others}, no controller runs "
            f"for it, and one that starts will start no job; {back}"
        )
    return (
        "is draining, but no controller runs: jobs that the last one started may still run. The next one starts no "
        f"job, and says when all have ended; {back}"
    )
