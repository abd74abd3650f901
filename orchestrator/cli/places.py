"""Commands about the place they run in: this directory's background stack."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, DocumentOption
from orchestrator.core.errors import UsageError


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
