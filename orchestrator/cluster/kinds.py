"""Kinds of cluster files, how they are read, and running the programs that manage clusters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.errors import NotFoundError, OrchestratorError, UserError

KUSTOMIZATION = "kustomization.yaml"
_SBATCH = "#SBATCH"
_RAY_KINDS = {"RayCluster", "RayJob"}
_EXPECTED = (
    "expected a Ray launcher configuration (clusters/aws.yaml), a RayCluster manifest or a kustomize directory "
    "(clusters/kuberay), or a batch script with #SBATCH lines"
)
_INSTALL = {
    "ray": "it comes with this package: activate the environment that has it",
    "kubectl": "install Kubernetes' kubectl and point KUBECONFIG at the cluster",
    "sbatch": "run this on a login node of the Slurm cluster",
    "squeue": "run this on a login node of the Slurm cluster",
    "scancel": "run this on a login node of the Slurm cluster",
    "ssh": "install an OpenSSH client",
    "rsync": "install rsync, which carries the checkout to the nodes",
}
_MAX_OUTPUT = 2000


class ClusterKind(StrEnum):
    """Which tool brings a cluster up."""

    RAY = "ray"
    """Ray's cluster launcher: clouds, and machines reached by ssh."""
    KUBERNETES = "kubernetes"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster as its file describes it."""

    path: Path
    kind: ClusterKind
    text: str = ""
    """Of a single file."""
    documents: tuple[Mapping[str, Any], ...] = ()
    """Its YAML documents; none of a kustomize directory, which has to be rendered first."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The one document of a launcher configuration."""
        return self.documents[0]

    @property
    def provider(self) -> str:
        """Of a launcher configuration: ``aws``, ``gcp``, ``local``; else empty."""
        return str((self.config.get("provider") or {}).get("type", "")) if self.kind is ClusterKind.RAY else ""

    @property
    def name(self) -> str:
        """What people call the cluster."""
        return str(self.config.get("cluster_name", "")) if self.kind is ClusterKind.RAY else self.path.stem


def read_cluster(path: Path) -> ClusterFile:
    """Read a cluster file, or recognise a kustomize directory.

    Raises:
        NotFoundError: there is nothing.
        UserError: it cannot be read, or is none of the kinds.
    """
    if path.is_dir():
        if (path / KUSTOMIZATION).is_file():
            return ClusterFile(path=path, kind=ClusterKind.KUBERNETES)
        raise UserError(f"{path} is a directory without {KUSTOMIZATION}; {_EXPECTED}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist; name a cluster file, such as clusters/aws.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_EXPECTED}") from error
    if any(line.startswith(_SBATCH) for line in text.splitlines()):
        return ClusterFile(path=path, kind=ClusterKind.SLURM, text=text)
    documents = parse_documents(text, str(path))
    return ClusterFile(path=path, kind=_kind_of(documents, path), text=text, documents=documents)


def parse_documents(text: str, source: str) -> tuple[Mapping[str, Any], ...]:
    """The YAML documents of a text. Raises ``UserError`` where it is none, with the place."""
    try:
        found = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not YAML: {error}") from error
    if not all(isinstance(one, Mapping) for one in found):
        raise UserError(f"{source} holds YAML, but no mappings; {_EXPECTED}")
    return tuple(found)


def _kind_of(documents: tuple[Mapping[str, Any], ...], path: Path) -> ClusterKind:
    if len(documents) == 1 and "cluster_name" in documents[0]:
        return ClusterKind.RAY
    if any(one.get("kind") in _RAY_KINDS for one in documents):
        return ClusterKind.KUBERNETES
    raise UserError(f"{path} is not the file of a cluster; {_EXPECTED}")


class ToolError(OrchestratorError):
    """A program is missing, does not answer, or failed."""


def find_tool(name: str) -> str:
    """Path of a program, of this interpreter's environment first. Raises ``ToolError`` with what to install."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if not found:
        raise ToolError(f"{name} is not on this machine; {_INSTALL.get(name, f'install {name}')}")
    return found


def ask_tool(command: Sequence[str], *, timeout_s: float = 30.0, standard_input: str | None = None) -> str:
    """What a program prints.

    Raises:
        ToolError: it is missing, takes too long, or fails; with the end of what it said.
    """
    program = find_tool(command[0])
    try:
        done = subprocess.run(
            [program, *command[1:]],
            input=standard_input,
            stdin=subprocess.DEVNULL if standard_input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{_shown(command)} did not end in {timeout_s:g} s; is what it talks to reachable?") from error
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip())[-_MAX_OUTPUT:]
        raise ToolError(f"{_shown(command)} failed with status {done.returncode}: {output}")
    return done.stdout


def run_tool(command: Sequence[str]) -> int:
    """Run a program in the foreground, with this process's terminal; its exit status. Raises ``ToolError``."""
    program = find_tool(command[0])
    return subprocess.run([program, *command[1:]], check=False).returncode


def _shown(command: Sequence[str]) -> str:
    return " ".join(command[:4]) + (" ..." if len(command) > 4 else "")
