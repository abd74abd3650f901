"""``orchestrator up`` and ``down``: this directory's background stack."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import UsageError
from orchestrator.services.settings import Settings
from orchestrator.services.stack_transport import addresses_of
from orchestrator.services.terminal import stderr_console
from orchestrator.stack.start import ensure_stack, stop_stack


def up(
    *,
    s3: Annotated[bool, typer.Option("--s3", help="Also start an S3 server on this machine.")] = False,
    full: Annotated[bool, typer.Option("--full", hidden=True)] = False,  # so that old commands show what replaces it
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Start this directory's servers in the background: Ray with its dashboard, and MLflow."""
    if full:
        raise UsageError(
            "option --full of `orchestrator up` is gone: the full stack (MLflow on PostgreSQL, S3, Prometheus, "
            "Grafana) is infra/compose; start it with `docker compose -f infra/compose/compose.yaml up` as "
            "docs/deploy.md says, or run `orchestrator up` for Ray and MLflow alone"
        )
    stack = ensure_stack(Settings().home, with_s3=s3)
    if output is not DocumentForm.TABLE:
        print_document(asdict(stack), output)
        return
    table = Table(show_header=False)
    for name, address in addresses_of(stack).items():
        table.add_row(name, address)
    stdout_console().print(table)


def down(*, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Stop this directory's servers; the next submit resumes its sweeps."""
    stopped = stop_stack(Settings().home)  # running attempts resume from their checkpoints another time
    stderr_console().print("Stopped." if stopped else "No stack is running here.")
    if output is not DocumentForm.TABLE:
        print_document({"stopped": stopped}, output)
