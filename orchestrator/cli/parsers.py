"""Options and calls of ``plan``, ``explain``, ``status``, ``watch``, ``run`` and ``publish``."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.arguments import (
    PricesOption,
    ScaleOption,
    SetOption,
    StoreOption,
    SweepFile,
    SweepName,
    complete_sweep,
    scale_name,
)
from orchestrator.cli.output import DocumentForm, DocumentOption


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


def watch(
    sweep: SweepName,
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 0.5,
    store: StoreOption = "",
) -> None:
    """Show a sweep full-screen as it goes; on a pipe, one line per job that ends. Leaving stops nothing."""
    from orchestrator.cli.watch import watch_sweep

    raise typer.Exit(watch_sweep(sweep, store, every_s=every))


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


def publish(sweep: SweepName, *, output: DocumentOption = DocumentForm.TABLE, store: StoreOption = "") -> None:
    """Bring MLflow up to date with a sweep; safe to repeat."""
    from orchestrator.cli.control import publish_sweep

    publish_sweep(sweep, store, output)
