"""Commands about the place they run in: settings, health, and this directory's background stack; and the version."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestrator.cli import configuration
from orchestrator.cli.arguments import StoreOption
from orchestrator.cli.output import DocumentForm, DocumentOption, Output, OutputOption


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the others, and ``--version`` to all of them."""
    app.callback(invoke_without_command=True, no_args_is_help=True)(options)
    for command in (config, doctor, up, down):
        app.command()(command)


def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and its code's digest, and end.", is_eager=True)
    ] = False,
) -> None:
    """Pretraining sweeps over label hierarchies: one sweep.yaml in, one answer out."""
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as version_of

        from orchestrator.planning.code import package_digest

        try:
            number = version_of("pretraining-orchestrator")
        except PackageNotFoundError:
            number = "of a source tree"
        sys.stdout.write(f"orchestrator {number} (code {package_digest()[:12]})\n")
        raise typer.Exit


def config(
    *,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each comes from.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Show the settings that count here: environment, .env, orchestrator.toml, the user's file, defaults."""
    from orchestrator.cli.config import show_config

    show_config(configuration.applied(), output, with_origin=origin)


def doctor(*, output: OutputOption = Output.TABLE, store: StoreOption = "") -> None:
    """Check store, credentials, clock, disks and tracking, and say what to do about each that fails."""
    from orchestrator.cli.doctor import examine

    raise typer.Exit(examine(store, as_json=output is Output.JSON))


def up(
    *,
    s3: Annotated[bool, typer.Option("--s3", help="With an S3 server of its own on this machine.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start this directory's background stack: Ray with its dashboard, and MLflow."""
    from orchestrator.cli.control import start

    start(with_s3=s3, as_json=output is Output.JSON)


def down() -> None:
    """Stop this directory's background stack; sweeps go on where they were at the next submit or up."""
    from orchestrator.cli.control import stop

    raise typer.Exit(stop())
