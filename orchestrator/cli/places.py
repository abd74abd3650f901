"""Commands about the place they run in: this directory's background stack; and options of all commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, DocumentOption
from orchestrator.core.errors import UsageError


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the others, and ``--version`` to all of them."""
    app.callback(invoke_without_command=True, no_args_is_help=True)(options)
    for command in (up, down):
        app.command()(command)


def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and its code's digest, and end.", is_eager=True)
    ] = False,
    context: Annotated[  # noqa: ARG001 - taken from the line before it is parsed, see run_app; here for --help
        str, typer.Option("--context", metavar="NAME", help="Act there; see: orchestrator config contexts.")
    ] = "",
) -> None:
    """Pretraining sweeps over label hierarchies: one sweep.yaml in, one answer out."""
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as version_of

        from orchestrator.core.code import package_digest

        try:
            number = version_of("pretraining-orchestrator")
        except PackageNotFoundError:
            number = "of a source tree"
        sys.stdout.write(f"orchestrator {number} (code {package_digest()[:12]})\n")
        raise typer.Exit


def up(
    *,
    s3: Annotated[bool, typer.Option("--s3", help="With an S3 server of its own on this machine.")] = False,
    full: Annotated[bool, typer.Option("--full", hidden=True)] = False,  # so that old commands learn what replaces it
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Start this directory's background stack: Ray with its dashboard, and MLflow."""
    from orchestrator.cli.control import start

    if full:
        raise UsageError(
            "option --full of `orchestrator up` is gone: the full stack (MLflow on PostgreSQL, S3, Prometheus, "
            "Grafana) is infra/compose; start it with `docker compose -f infra/compose/compose.yaml up` as "
            "docs/deploy.md says, or run `orchestrator up` for Ray and MLflow alone"
        )
    start(with_s3=s3, form=output)


def down(*, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Stop this directory's background stack; sweeps go on where they were at the next submit or up."""
    from orchestrator.cli.control import stop

    raise typer.Exit(stop(output))
