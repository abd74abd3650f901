"""Arguments and options that commands share; shells complete sweeps and jobs from the store."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.completion import complete_job, complete_sweep
from orchestrator.core.errors import StorageError, UsageError


def _checked_store(uri: str) -> str:
    """The same. Raises ``UsageError`` for what no store can be at, whatever lies there."""
    if uri:
        from orchestrator.storage.open import check_store_uri

        try:
            check_store_uri(uri)
        except StorageError as error:
            raise UsageError(f"--store: {error}") from error
    return uri


SweepName = Annotated[str, typer.Argument(help="Name of a submitted sweep.", autocompletion=complete_sweep)]
JobName = Annotated[
    str, typer.Argument(help="Name of a job (pretrain/levels/depth2/seed0).", autocompletion=complete_job)
]
JobPatterns = Annotated[
    list[str] | None,
    typer.Argument(help="Jobs, or patterns ('finetune/*'); none: the whole sweep.", autocompletion=complete_job),
]
StoreOption = Annotated[
    str, typer.Option("--store", help="Object store URI; default: the project's own.", callback=_checked_store)
]
ExaminedStore = Annotated[str, typer.Option("--store", help="Object store URI to examine; default: the project's own.")]
"""As it stands: what is wrong with it is a finding."""
PricesOption = Annotated[str, typer.Option(help="YAML table of prices: {A100: {hour: 2.2, spot: 0.9}}.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
