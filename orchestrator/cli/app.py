"""All commands. Each command's module is imported when the command runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli import data, labels
from orchestrator.cli.exits import ExitCode, complain, exit_code_of
from orchestrator.cli.output import Output, OutputOption
from orchestrator.errors import OrchestratorError

app = typer.Typer(
    name="orchestrator",
    help="Pretraining sweeps over label hierarchies: one sweep.yaml in, one answer out.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data.app, name="data")
app.add_typer(labels.app, name="labels")


class Listing(StrEnum):
    """What ``ls`` lists."""

    ARTIFACTS = "artifacts"
    PINS = "pins"


class UsageBy(StrEnum):
    """What ``du`` adds up by."""

    SWEEP = "sweep"
    KIND = "kind"
    LEVEL = "level"


SweepFile = Annotated[str, typer.Argument(help="A sweep.yaml, or the name of a shipped sweep (quickstart, digits).")]
SweepName = Annotated[str, typer.Argument(help="Name of a submitted sweep.")]
StoreOption = Annotated[str, typer.Option("--store", help="Object store URI; default: the project's own.")]


@app.command()
def submit(
    sweep: SweepFile,
    *,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    wait: Annotated[bool, typer.Option(help="Follow until the sweep ends; Ctrl-C detaches.")] = True,
    foreground: Annotated[bool, typer.Option("--foreground", help="Run Ray inside this command.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Adopt an unfinished sweep of another cluster.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a sweep, run it, and print its answer."""
    from orchestrator.cli.submit import SubmitOptions, submit_sweep

    options = SubmitOptions(
        yes=yes, wait=wait, foreground=foreground, take_over=take_over, as_json=output is Output.JSON
    )
    raise typer.Exit(submit_sweep(sweep, options))


@app.command()
def plan(sweep: SweepFile, *, output: OutputOption = Output.TABLE) -> None:
    """Show what a submit would run and reuse. Changes nothing."""
    from orchestrator.cli.plan import show_plan

    show_plan(sweep, as_json=output is Output.JSON)


@app.command()
def status(
    sweep: Annotated[str, typer.Argument(help="Name of a sweep; none: list all sweeps.")] = "",
    *,
    output: OutputOption = Output.TABLE,
    store: StoreOption = "",
) -> None:
    """Show the state of a sweep's jobs, from the store alone."""
    from orchestrator.cli.status import show_status

    raise typer.Exit(show_status(sweep, store, as_json=output is Output.JSON))


@app.command()
def logs(
    sweep: SweepName,
    job: Annotated[str, typer.Argument(help="Name of a job (pretrain/levels/depth2/seed0).")],
    *,
    attempt: Annotated[int, typer.Option(help="Number of the attempt; default: the newest.")] = -1,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    store: StoreOption = "",
) -> None:
    """Print the log of a job's attempt."""
    from orchestrator.cli.logs import print_logs

    raise typer.Exit(print_logs(sweep, job, attempt, store, follow=follow))


@app.command()
def report(sweep: SweepName, *, output: OutputOption = Output.TABLE, store: StoreOption = "") -> None:
    """Compute the answer from the artifacts, print it and save it in the store."""
    from orchestrator.cli.report import show_report

    raise typer.Exit(show_report(sweep, store, as_json=output is Output.JSON))


@app.command()
def run(
    job: Annotated[str, typer.Argument(help="Name of a job (pretrain/levels/depth2/seed0).")],
    *,
    sweep: Annotated[
        str, typer.Option(help="The job's sweep: a sweep.yaml, a shipped or a submitted sweep.")
    ] = "quickstart",
    inprocess: Annotated[bool, typer.Option("--inprocess", help="In this process, without Ray.")] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="Open the debugger where the job fails.")] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Keep the result in the store.")] = False,
    store: StoreOption = "",
) -> None:
    """Reproduce one job in the foreground; by default nothing of it stays in the store."""
    from orchestrator.cli.run import RunOptions, run_job

    options = RunOptions(sweep=sweep, inprocess=inprocess, pdb=pdb, commit=commit, store=store)
    raise typer.Exit(run_job(job, options))


@app.command()
def cancel(sweep: SweepName, *, store: StoreOption = "") -> None:
    """Stop a sweep's running jobs after a checkpoint and start no others."""
    from orchestrator.cli.control import cancel_sweep

    cancel_sweep(sweep, store)


@app.command()
def publish(sweep: SweepName, *, store: StoreOption = "") -> None:
    """Bring MLflow up to date with a sweep; safe to repeat."""
    from orchestrator.cli.control import publish_sweep

    publish_sweep(sweep, store)


@app.command()
def gc(
    *,
    apply: Annotated[
        bool, typer.Option("--apply/--dry-run", help="Do it, or only show it; the default shows.")
    ] = False,
    grace: Annotated[str, typer.Option(help="Objects younger than this are never touched: 24h, 7d, ...")] = "24h",
    trash_grace: Annotated[str, typer.Option(help="How long what was hidden can be restored.")] = "24h",
    forget: Annotated[list[str] | None, typer.Option(help="A finished sweep whose results may go.")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="NAME=TARGET: keep a key, a checkpoint or a sweep's results.")
    ] = None,
    unpin: Annotated[list[str] | None, typer.Option(help="Name of a pin to remove.")] = None,
    output: OutputOption = Output.TABLE,
    store: StoreOption = "",
) -> None:
    """Show or collect what no sweep, pin or committed result needs; safe while sweeps run."""
    from orchestrator.cli.store import GcOptions, collect_garbage

    options = GcOptions(
        apply=apply,
        grace=grace,
        trash_grace=trash_grace,
        forget=forget or (),
        pin=pin or (),
        unpin=unpin or (),
        as_json=output is Output.JSON,
        store=store,
    )
    raise typer.Exit(collect_garbage(options))


@app.command()
def fsck(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also read everything and compare its sha256.")] = False,
    output: OutputOption = Output.TABLE,
    store: StoreOption = "",
) -> None:
    """Report every missing, short or altered object that a record or checkpoint names."""
    from orchestrator.cli.store import check_integrity

    raise typer.Exit(check_integrity(store, deep=deep, as_json=output is Output.JSON))


@app.command()
def ls(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.ARTIFACTS,
    *,
    sweep: Annotated[str, typer.Option(help="Only what this sweep's plan names.")] = "",
    output: OutputOption = Output.TABLE,
    store: StoreOption = "",
) -> None:
    """List what the store holds."""
    from orchestrator.cli.store import list_contents

    raise typer.Exit(list_contents(what, sweep, store, as_json=output is Output.JSON))


@app.command()
def du(
    *,
    by: Annotated[UsageBy, typer.Option(help="What to add up by.")] = UsageBy.SWEEP,
    output: OutputOption = Output.TABLE,
    store: StoreOption = "",
) -> None:
    """Show what sweeps, kinds of jobs or label spaces take."""
    from orchestrator.cli.store import show_usage

    raise typer.Exit(show_usage(by, store, as_json=output is Output.JSON))


@app.command()
def doctor(*, output: OutputOption = Output.TABLE, store: StoreOption = "") -> None:
    """Check store, credentials, clock, disks and tracking, and say what to do about each that fails."""
    from orchestrator.cli.doctor import examine

    raise typer.Exit(examine(store, as_json=output is Output.JSON))


@app.command()
def up(
    *,
    s3: Annotated[bool, typer.Option("--s3", help="With an S3 server of its own on this machine.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start this directory's background stack: Ray with its dashboard, and MLflow."""
    from orchestrator.cli.control import start

    start(with_s3=s3, as_json=output is Output.JSON)


@app.command()
def down() -> None:
    """Stop this directory's background stack; sweeps go on where they were at the next submit or up."""
    from orchestrator.cli.control import stop

    raise typer.Exit(stop())


def run_app() -> None:
    """Run the command of ``sys.argv`` and end the process with its exit code."""
    try:
        app()
    except OrchestratorError as error:
        complain(str(error))
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
