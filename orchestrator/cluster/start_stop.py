"""Starting and ending a cluster with the tool of its file."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from orchestrator.cluster.check_kubernetes import in_namespace, namespaces, render
from orchestrator.cluster.kinds import ClusterFile, ClusterKind, run_tool
from orchestrator.core.errors import UserError

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KEEP_LABEL = "pretraining-orchestrator/keep"
"""Label of Kubernetes objects that outlive the cluster because they hold data, such as claims and their namespace."""


class Confirmation(StrEnum):
    """Whether the tool asks before it creates or ends machines."""

    ASK = "ask"
    GIVEN = "given"


def up_commands(file: ClusterFile, confirmation: Confirmation) -> list[list[str]]:
    """The commands that start a cluster, or that update a running one to match its file."""
    path = argument_of(file.path)
    if file.kind is ClusterKind.RAY:
        return [["ray", "up", path, *_yes(confirmation)]]
    if file.kind is ClusterKind.KUBERNETES:
        return [["kubectl", "apply", _flag(file), path]]
    return [["sbatch", path]]


def down_commands(file: ClusterFile, confirmation: Confirmation) -> list[list[str]]:
    """The commands that end a cluster; the store keeps all data."""
    path = argument_of(file.path)
    if file.kind is ClusterKind.RAY:
        return [["ray", "down", path, *_yes(confirmation)]]
    if file.kind is ClusterKind.KUBERNETES:
        return [["kubectl", "delete", _flag(file), path, "--ignore-not-found", "--wait=true", "-l", f"!{KEEP_LABEL}"]]
    return [["scancel", f"--name={job_name(file)}", "--me"]]


def status_commands(file: ClusterFile) -> list[list[str]]:
    """The commands that show a cluster's state. Raises ``ToolError`` if a directory cannot be rendered."""
    if file.kind is ClusterKind.RAY:
        return [["ray", "exec", argument_of(file.path), "ray status"]]
    if file.kind is ClusterKind.KUBERNETES:
        pods = [
            ["kubectl", "get", "pods", *in_namespace(one), "-l", "ray.io/cluster"]
            for one in namespaces(file.documents or render(file))
        ]
        return [["kubectl", "get", _flag(file), argument_of(file.path)], *pods]
    return [["squeue", f"--name={job_name(file)}", "--me"]]


def run_all(commands: list[list[str]]) -> int:
    """Run commands until one fails; returns the last exit status. Raises ``ToolError`` for a missing program."""
    status = 0
    for command in commands:
        status = run_tool(command)
        if status:
            break
    return status


def job_name(file: ClusterFile) -> str:
    """The job name of a batch script: its last ``--job-name``, else its file's name, as Slurm does.

    Raises:
        UserError: it is not a single word. ``scancel`` must not end jobs of no name, or of several names.
    """
    name = file.path.name
    for line in file.text.splitlines():
        option = line.removeprefix("#SBATCH").strip() if line.startswith("#SBATCH") else ""
        if option.startswith(("--job-name=", "--job-name ")):
            name = option[len("--job-name") + 1 :].strip()
        elif option.startswith("-J "):
            name = option[3:].strip()
    if not _JOB_NAME.fullmatch(name):
        raise UserError(f"{file.path} names its job {name!r}; write --job-name with letters, digits, '.', '_' and '-'")
    return name


def argument_of(path: Path) -> str:
    """A path as no program takes it for an option: ``sbatch`` runs what is in ``--wrap=...``."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _flag(file: ClusterFile) -> str:
    return "-k" if file.path.is_dir() else "-f"


def _yes(confirmation: Confirmation) -> list[str]:
    return ["--yes"] if confirmation is Confirmation.GIVEN else []
