"""The command that a batch job, a pod or a service unit runs beside Ray's head."""

from __future__ import annotations

from typing import Annotated

import typer


def add_commands(app: typer.Typer) -> None:
    """Add it to the others."""
    app.command()(serve)


def serve(
    *,
    until_idle: Annotated[
        float | None, typer.Option(min=0.0, help="End when no sweep has been unfinished for so many seconds.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that attempts may take for a checkpoint after SIGTERM.")
    ] = 90.0,
) -> None:
    """Serve a store on the Ray cluster at RAY_ADDRESS until told to end; then let every attempt write a checkpoint."""
    from orchestrator.cli.serve import ServeOptions, serve

    raise typer.Exit(serve(ServeOptions(until_idle_s=until_idle, grace_s=grace)))
