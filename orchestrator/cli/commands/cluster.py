"""``orchestrator cluster``: check, start, show and end a Ray cluster that a file describes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.cluster.check import cluster_checks
from orchestrator.cluster.kinds import ClusterKind, read_cluster
from orchestrator.cluster.start_stop import Confirmation, down_commands, run_all, status_commands, up_commands
from orchestrator.core.checks import Verdict, run_checks
from orchestrator.services.terminal import confirmed, stderr_console

cluster = typer.Typer(
    help="Check, start and stop Ray clusters on clouds, Kubernetes, Slurm and your own machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ClusterArgument = Annotated[
    Path,
    typer.Argument(help="A Ray launcher file, a RayCluster manifest or kustomize directory, or an sbatch script."),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]


@cluster.command()
def check(file: ClusterArgument, *, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Check a cluster file, for example region and quotas. Creates nothing."""
    raise typer.Exit(examine(file, output))


@cluster.command()
def up(
    file: ClusterArgument,
    *,
    check_only: Annotated[bool, typer.Option("--check", help="Only check; the same as `cluster check`.")] = False,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Start even if checks fail.")] = False,
    yes: YesOption = False,
) -> None:
    """Check a cluster file, then start the cluster, or update a running cluster to match the file."""
    if check_only or not unchecked:
        verdict = examine(file, DocumentForm.TABLE)
        if check_only or verdict is not ExitCode.OK:
            raise typer.Exit(verdict)
    _end(run_all(up_commands(read_cluster(file), _confirmation(is_given=yes))))


@cluster.command()
def down(file: ClusterArgument, *, yes: YesOption = False) -> None:
    """Stop a cluster. When it is up again, its sweeps resume: everything is in the store."""
    found = read_cluster(file)
    commands = down_commands(found, _confirmation(is_given=yes))
    # Ray's launcher asks by itself, kubectl and scancel never do. Where there is no terminal, scripts go on as ever.
    if not yes and found.kind is not ClusterKind.RAY and sys.stdin.isatty():
        how = " and ".join(map(shlex.join, commands))
        if not confirmed(f"Stop the cluster of {file} by {how}?", subject="cluster down asks for confirmation"):
            raise typer.Exit(ExitCode.REFUSED)
    _end(run_all(commands))


@cluster.command()
def status(file: ClusterArgument) -> None:
    """Show a cluster's nodes and their resources, as printed by the cluster's own tool."""
    _end(run_all(status_commands(read_cluster(file))))


def examine(file: Path, output: DocumentForm) -> ExitCode:
    """Run all checks and print one line for each; fails if any of them does."""
    results = list(run_checks(list(cluster_checks(read_cluster(file)))))
    num_failed = sum(result.verdict is Verdict.FAILED for result in results)
    if output is not DocumentForm.TABLE:
        print_document({"ok": not num_failed, "checks": [asdict(result) for result in results]}, output)
    else:
        for result in results:
            advice = f" -> {result.remedy}" if result.remedy else ""
            line = f"{result.verdict.value:8} {result.name:15} {result.detail}{advice}"
            stdout_console().print(line)
    if num_failed:
        message = f"{num_failed} of {len(results)} checks failed; nothing was created."
        stderr_console().print(message)
    return ExitCode.FAILURE if num_failed else ExitCode.OK


def _confirmation(*, is_given: bool) -> Confirmation:
    return Confirmation.GIVEN if is_given else Confirmation.ASK


def _end(status_of_tool: int) -> None:
    if status_of_tool:
        raise typer.Exit(ExitCode.FAILURE)
