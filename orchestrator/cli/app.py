"""All commands. Each command's module is imported when the command runs."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import (
    bounding,
    cluster,
    configuring,
    data,
    labels,
    language,
    observing,
    places,
    power,
    reproduce,
    serving,
    steering,
    submitting,
)
from orchestrator.cli.arguments import JobName, PricesOption, StoreOption, SweepName
from orchestrator.cli.completion import COMPLETED_LINE, complete_sweep
from orchestrator.cli.exits import ExitCode, complain, exit_code_of
from orchestrator.cli.on_demand import command_line
from orchestrator.cli.output import DocumentForm, DocumentOption, TableForm, TableOption
from orchestrator.cli.sections import SectionedGroup
from orchestrator.cli.sources import ScaleOption, SetOption, scale_name
from orchestrator.core.errors import OrchestratorError, SpecError
from orchestrator.core.security import redaction
from orchestrator.services import settings_sources as configuration

app = typer.Typer(
    name="orchestrator",
    cls=SectionedGroup,
    help="Pretraining sweeps over label hierarchies: one sweep.yaml in, one answer out.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data.app, name="data")
app.add_typer(labels.app, name="labels")
submitting.add_commands(app)
language.add_commands(app)
steering.add_commands(app)
places.add_commands(app)
observing.add_commands(app)
power.add_commands(app)
reproduce.add_commands(app)
configuring.add_commands(app)
bounding.add_commands(app)
cluster.add_commands(app)
serving.add_commands(app)


class Listing(StrEnum):
    """What ``ls`` lists."""

    ARTIFACTS = "artifacts"
    PINS = "pins"


class UsageBy(StrEnum):
    """What ``du`` adds up by."""

    SWEEP = "sweep"
    KIND = "kind"
    LEVEL = "level"


SweepFile = Annotated[
    str, typer.Argument(help="A sweep.yaml, or the name of a shipped sweep: quickstart, digits, clusters, paper-...")
]
SweepFiles = Annotated[
    list[str], typer.Argument(help="Sweep files or shipped sweeps; several share one cluster, and their common jobs.")
]


@app.command()
def plan(  # noqa: PLR0913 - one parameter per flag
    sweep: SweepFile,
    *,
    jobs: Annotated[bool, typer.Option("--jobs", help="List every job.")] = False,
    diff: Annotated[str, typer.Option(help="Compare with another sweep.yaml, shipped or submitted sweep.")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster to estimate for; default: the present one.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each of its nodes; default: 8.")] = 0,
    cpus: Annotated[int, typer.Option(help="CPU cores of that cluster; default: 16 per GPU.")] = 0,
    accelerator: Annotated[str, typer.Option(help="What the GPUs are: A100, H100, ...")] = "",
    prices: PricesOption = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show what a submit would run and reuse, how long it takes and what it costs. Changes nothing."""
    from orchestrator.cli.plan import PlanOptions, show_plan
    from orchestrator.services.preview import StatedCluster

    options = PlanOptions(
        output=output,
        lists_jobs=jobs,
        diff=diff,
        cluster=StatedCluster(gpus=gpus, gpus_per_node=gpus_per_node, cpus=cpus),
        accelerator=accelerator,
        prices=prices,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        store=store,
    )
    raise typer.Exit(show_plan(sweep, options))


@app.command(name="forecast")
def forecast_sweep(  # noqa: PLR0913 - one parameter per flag
    sweeps: SweepFiles,
    *,
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster; default: this machine.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each of its nodes; default: 8.")] = 0,
    cpus: Annotated[int, typer.Option(help="CPU cores of that cluster; default: 16 per GPU.")] = 0,
    spot: Annotated[float, typer.Option(help="All nodes are spot: chance of losing one within an hour.")] = 0.0,
    gpu_mtbf: Annotated[float, typer.Option(help="Hours of one GPU between faults; 0: none ever.")] = 50_677.0,
    replace: Annotated[float, typer.Option(help="Seconds from the loss of a node to another one.")] = 300.0,
    accelerator: Annotated[str, typer.Option(help="What the GPUs are: A100, H100, ...")] = "",
    prices: PricesOption = "",
    seed: Annotated[int, typer.Option(help="Of everything that happens by chance.")] = 0,
    png: Annotated[str, typer.Option(help="Draw a Gantt chart into this file.")] = "",
    html: Annotated[str, typer.Option(help="The same as a page to zoom into.")] = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Run sweeps on virtual time, failures included: how long, how well used, what it costs. Changes nothing."""
    from orchestrator.cli.forecast import ForecastOptions, show_forecast
    from orchestrator.services.preview import StatedCluster

    options = ForecastOptions(
        cluster=StatedCluster(gpus=gpus, gpus_per_node=gpus_per_node, cpus=cpus),
        spot=spot,
        gpu_mtbf_h=gpu_mtbf,
        replace_s=replace,
        accelerator=accelerator,
        prices=prices,
        seed=seed,
        png=png,
        html=html,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        store=store,
        form=output,
    )
    raise typer.Exit(show_forecast(sweeps, options))


@app.command()
def explain(
    job: Annotated[str, typer.Argument(help="Name of a job, or a key of the store.")],
    *,
    sweep: Annotated[str, typer.Option(help="The job's sweep: a sweep.yaml, a shipped or a submitted sweep.")] = "",
    against: Annotated[str, typer.Option(help="Compare with this key instead of the nearest one.")] = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Say why a job has no result yet: the nearest result of the store, and what differs."""
    from orchestrator.cli.explain import explain_job

    raise typer.Exit(explain_job(job, sweep=sweep, against=against, form=output, store_uri=store))


@app.command()
def describe(
    sweep: SweepName,
    job: JobName,
    *,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show all that is known of one job: identity, attempts, failures, and where its results and logs are."""
    from orchestrator.cli.describe import describe_job

    raise typer.Exit(describe_job(sweep, job, form=output, store_uri=store))


@app.command()
def status(
    sweep: Annotated[
        str, typer.Argument(help="Name of a sweep; none: list all sweeps.", autocompletion=complete_sweep)
    ] = "",
    *,
    prices: PricesOption = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show the state of a sweep's jobs, from the store alone."""
    from orchestrator.cli.status import show_status

    raise typer.Exit(show_status(sweep, store, output, prices))


@app.command()
def watch(
    sweep: SweepName,
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 0.5,
    store: StoreOption = "",
) -> None:
    """Show a sweep full-screen as it goes; on a pipe, one line per job that ends. Leaving stops nothing."""
    from orchestrator.cli.watch import watch_sweep

    raise typer.Exit(watch_sweep(sweep, store, every_s=every))


@app.command()
def report(
    sweep: SweepName,
    *,
    html: Annotated[bool, typer.Option("--html", help="Also make the interactive page, report.html.")] = False,
    out: Annotated[str, typer.Option(help="Also write every file into this directory.")] = "",
    prices: PricesOption = "",
    output: TableOption = TableForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Compute the answer from the artifacts, print it and save it in the store; works while the sweep runs."""
    from orchestrator.cli.report import ReportOptions, show_report

    options = ReportOptions(form=output, with_page=html, directory=out, store=store, prices=prices)
    raise typer.Exit(show_report(sweep, options))


@app.command()
def compare(
    sweeps: Annotated[
        list[str] | None, typer.Argument(help="Submitted sweeps; the others are compared with the first.")
    ] = None,
    *,
    samples: Annotated[tuple[str, str] | None, typer.Option(metavar="A B", help="Two jobs or rows of a sweep.")] = None,
    transfer: Annotated[str, typer.Option(help="With --samples: only this transfer; default: all.")] = "",
    out: Annotated[str, typer.Option(help="With --samples: folder for a page, pictures and a CSV.")] = "",
    metric: Annotated[str, typer.Option(help="What to compare; default: what the sweeps report.")] = "",
    output: TableOption = TableForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Compare the same cells of several sweeps, paired by seeds; with --samples, two networks image by image."""
    if samples is not None:
        from orchestrator.cli.compare_samples import SampleOptions, show_sample_comparison

        first, second = samples
        options = SampleOptions(first=first, second=second, transfer=transfer, out=out, form=output, store=store)
        raise typer.Exit(show_sample_comparison(sweeps or [], options))
    from orchestrator.cli.compare import show_comparison

    raise typer.Exit(show_comparison(sweeps or [], metric=metric, form=output, store_uri=store))


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
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Reproduce one job in the foreground; by default nothing of it stays in the store."""
    from orchestrator.cli.run import RunOptions, run_job

    options = RunOptions(sweep=sweep, inprocess=inprocess, pdb=pdb, commit=commit, form=output, store=store)
    raise typer.Exit(run_job(job, options))


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="Key of a result, or with --sweep the name of a job.")],
    directory: Annotated[Path, typer.Argument(help="Folder to write; made if it is not there.")],
    *,
    sweep: Annotated[str, typer.Option(help="The job's sweep.", autocompletion=complete_sweep)] = "",
    epoch: Annotated[int | None, typer.Option(help="Kept weights of this epoch; default: the final ones.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files of a former export.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Write a backbone for timm: safetensors, configuration, and a card of what it is and was made of."""
    from orchestrator.cli.export import ExportOptions, export_backbone

    options = ExportOptions(sweep=sweep, epoch=epoch, replaces=force, form=output, store=store)
    raise typer.Exit(export_backbone(name, directory, options))


@app.command()
def publish(sweep: SweepName, *, output: DocumentOption = DocumentForm.TABLE, store: StoreOption = "") -> None:
    """Bring MLflow up to date with a sweep; safe to repeat."""
    from orchestrator.cli.control import publish_sweep

    publish_sweep(sweep, store, output)


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
    output: DocumentOption = DocumentForm.TABLE,
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
        form=output,
        store=store,
    )
    raise typer.Exit(collect_garbage(options))


@app.command()
def fsck(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also read everything and compare its sha256.")] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Rebuild damaged plans; delete damaged snapshots, leases, claims and caches."),
    ] = False,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Report every missing, short or altered object of the store, and repair what can be repaired."""
    from orchestrator.cli.store import check_integrity

    raise typer.Exit(check_integrity(store, deep=deep, repairs=repair, form=output))


@app.command()
def ls(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.ARTIFACTS,
    *,
    sweep: Annotated[str, typer.Option(help="Only what this sweep's plan names.")] = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """List what the store holds."""
    from orchestrator.cli.store import list_contents

    raise typer.Exit(list_contents(what, sweep, store, output))


@app.command()
def du(
    *,
    by: Annotated[UsageBy, typer.Option(help="What to add up by.")] = UsageBy.SWEEP,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show what sweeps, kinds of jobs or label spaces take."""
    from orchestrator.cli.store import show_usage

    raise typer.Exit(show_usage(by, store, output))


def run_app() -> None:
    """Run the command of ``sys.argv`` and end the process with its exit code."""
    redaction.install()
    try:
        # Shells ask for completions by variables, with the line so far in one of them.
        context, arguments = configuration.take_flag(sys.argv[1:] or os.environ.get(COMPLETED_LINE, "").split())
        if sys.argv[1:] and configuration.lacks_name(arguments):
            raise SpecError(("--context needs a name; see: orchestrator config contexts",))
        configuration.apply(Path.cwd(), os.environ, context)
        command_line(app)(args=arguments if sys.argv[1:] else None)
    except OrchestratorError as error:
        complain(str(error))
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
