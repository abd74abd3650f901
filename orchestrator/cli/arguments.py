"""Arguments and options that commands share; shells complete sweeps and jobs from the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.core.errors import StorageError, UsageError

COMPLETED_LINE = "_TYPER_COMPLETE_ARGS"
"""Variable in which typer's scripts for shells pass on the command line."""
DEADLINE_S = 1.5
"""Time limit for completions: a shell that hangs after Tab is worse than one that offers nothing."""
PricesOption = Annotated[str, typer.Option(help="YAML table of prices: {A100: {hour: 2.2, spot: 0.9}}.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
SweepFile = Annotated[
    str, typer.Argument(help="A sweep.yaml, or the name of a shipped sweep: quickstart, digits, clusters, paper-...")
]
GpusPerNodeOption = Annotated[
    int, typer.Option(help="GPUs per node of the cluster of --gpus; default: 8.", show_default=False)
]
CpusOption = Annotated[int, typer.Option(help="CPU cores of that cluster; default: 16 per GPU.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change one value (pretrain.recipe.lr=0.1); may be repeated."),
]


def complete_sweep(context: typer.Context, incomplete: str) -> list[str]:
    """Sweeps of the store whose names begin with the given text."""
    return _in_time(lambda: [name for name in _sweeps(_store(context)) if name.startswith(incomplete)])


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Jobs of the sweep that the command line names, up to their next '/'."""
    sweep = str(context.params.get("sweep") or "")
    return _in_time(lambda: _next_parts(_jobs(_store(context), sweep), incomplete)) if sweep else []


def _store(context: typer.Context) -> str:
    return str(context.params.get("store") or "")


def _sweeps(store_uri: str) -> list[str]:
    from orchestrator.services.stores import open_existing_store
    from orchestrator.sweeps.client import list_sweeps

    return list_sweeps(open_existing_store(store_uri))


def _jobs(store_uri: str, sweep: str) -> list[str]:
    from orchestrator.services.stores import open_existing_store
    from orchestrator.sweeps.client import load_plan

    return [job.name for job in load_plan(open_existing_store(store_uri), sweep).jobs]


def _next_parts(names: list[str], incomplete: str) -> list[str]:
    """Thousands of jobs are offered folder by folder, as shells offer files."""
    done = incomplete.rpartition("/")[0]
    start = len(done) + 1 if done else 0
    found: dict[str, None] = {}
    for name in names:
        if name.startswith(incomplete):
            part, separator, _ = name[start:].partition("/")
            found[name[:start] + part + separator] = None
    if len(found) == 1 and next(iter(found)).endswith("/"):
        return _next_parts(names, next(iter(found)))
    return list(found)


def _in_time(ask: Callable[[], list[str]]) -> list[str]:
    found: list[str] = []

    def answer() -> None:
        with suppress(Exception):  # the command itself reports any error better
            found.extend(ask())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return list(found)


def _store_uri(place: str) -> str:
    """A path, which starts from the working directory, as a URI; a URI as it is."""
    if not place:
        return place
    from orchestrator.storage.open import as_uri

    return as_uri(place)


def _checked_store(place: str) -> str:
    """Its URI. Raises ``UsageError`` for a text that cannot be a store's location."""
    uri = _store_uri(place)
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
FormerSweep = Annotated[str, typer.Option("--sweep", hidden=True)]
"""Where ``run``, ``explain`` and ``export`` took their sweep before; see ``refuse_former_order``."""


def refuse_former_order(command: str, former: str, *arguments: object) -> None:
    """Raise ``UsageError``, with the line to write, where the sweep is given as an option behind the job."""
    if former:
        line = " ".join(["orchestrator", command, former, *(str(one) for one in arguments if one)])
        raise UsageError(f"--sweep: the sweep is the first argument now; write: {line}")


JobPatterns = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names of jobs, or patterns ('finetune/*'); default: all jobs of the sweep.", autocompletion=complete_job
    ),
]
StoreOption = Annotated[
    str, typer.Option("--store", help="Object store: path or URI; default: the project's own.", callback=_checked_store)
]
ExaminedStore = Annotated[
    str,
    typer.Option("--store", help="Object store to check: path or URI; default: this project's.", callback=_store_uri),
]
"""Not checked here: an error of it is a finding of the command."""


class ScaleName(StrEnum):
    """Blocks of a sweep.yaml that change its size."""

    TINY = "tiny"


ScaleOption = Annotated[
    ScaleName | None,
    typer.Option(
        "--scale", help="Apply the block of this name in the file, which changes its size: tiny, for a quick test."
    ),
]


def scale_name(scale: ScaleName | None) -> str:
    """What ``load_sweep`` takes."""
    return "" if scale is None else scale.value
