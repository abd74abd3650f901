"""Commands that look at what runs, and tell: health, logs, the live view, notifications."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.arguments import ExaminedStore, StoreOption, SweepName
from orchestrator.cli.completion import complete_job, complete_sweep
from orchestrator.cli.output import DocumentForm, DocumentOption


class LogForm(StrEnum):
    """Form of log records on stdout."""

    TEXT = "text"
    JSON = "json"


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the others."""
    for command in (doctor, logs, top, notify):
        app.command()(command)


def doctor(
    sweep: Annotated[str, typer.Argument(help="A sweep.yaml or shipped sweep, whose data are checked too.")] = "",
    *,
    local: Annotated[bool, typer.Option("--local", help="This machine and the store only, not the cluster.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that all checks of the cluster may take.")] = 60.0,
    output: DocumentOption = DocumentForm.TABLE,
    store: ExaminedStore = "",
) -> None:
    """Check store, credentials, disks, tracking, and every node of the cluster; say what to do about what fails."""
    from orchestrator.cli.doctor import DoctorOptions, examine

    options = DoctorOptions(sweep=sweep, local=local, limit_s=limit, form=output, store=store)
    raise typer.Exit(examine(options))


def logs(  # noqa: PLR0913 - one parameter per flag
    sweep: SweepName,
    job: Annotated[str, typer.Argument(help="A job: the log of its newest attempt.", autocompletion=complete_job)] = "",
    *,
    jobs: Annotated[
        list[str] | None, typer.Option("--job", help="Jobs or patterns ('probe/*'): all their attempts, by time.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="NAME=VALUE,...", help="Jobs with these facets or states.")
    ] = None,
    attempt: Annotated[int, typer.Option(help="Number of the attempt.")] = -1,
    rank: Annotated[int, typer.Option(help="Only this rank of a gang; default: all, each line with its rank.")] = -1,
    grep: Annotated[str, typer.Option(help="Only messages in which this regular expression is found.")] = "",
    since: Annotated[str, typer.Option(help="Only what is newer: 90s, 10m, 36h, 3d, or a moment with its zone.")] = "",
    level: Annotated[str, typer.Option(help="Only this level and above: debug, info, warning, error.")] = "debug",
    tail: Annotated[int, typer.Option("-n", "--tail", min=0, help="Only the last so many records.")] = 0,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on, over attempts, until the end.")] = False,
    output: Annotated[LogForm, typer.Option("-o", "--output", help="Text, or one JSON object per line.")] = (
        LogForm.TEXT
    ),
    store: StoreOption = "",
) -> None:
    """Print what attempts printed and logged, from the store; without a job, of all chosen jobs by time."""
    from orchestrator.cli.logs import LogOptions, show_logs

    options = LogOptions(
        jobs=tuple(jobs or ()),
        where=tuple(where or ()),
        attempt=attempt,
        rank=rank,
        grep=grep,
        since=since,
        level=level,
        tail=tail,
        follow=follow,
        as_json=output is LogForm.JSON,
        store=store,
    )
    raise typer.Exit(show_logs(sweep, job, options))


def top(
    sweep: Annotated[str, typer.Argument(help="A sweep to begin with.", autocompletion=complete_sweep)] = "",
    *,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
    store: StoreOption = "",
) -> None:
    """Show all sweeps, their jobs, what runs where and how fast, live; pause, resume and cancel by keys."""
    from orchestrator.cli.top import run_top

    raise typer.Exit(run_top(sweep, store, every_s=every))


def notify(
    sweep: Annotated[
        str, typer.Argument(help="Show what was told about this sweep.", autocompletion=complete_sweep)
    ] = "",
    *,
    test: Annotated[
        str, typer.Option("--test", metavar="FILE", help="Send a trial to all channels of a sweep.yaml or notify file.")
    ] = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show who was told what about a sweep, or try whether notifications arrive."""
    from orchestrator.cli.notify import show_notifications, try_channels

    raise typer.Exit(try_channels(test, output) if test else show_notifications(sweep, store, output))
