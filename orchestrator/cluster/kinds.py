"""What a cluster file is, and reading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.errors import NotFoundError, UserError

KUSTOMIZATION = "kustomization.yaml"
_SBATCH = "#SBATCH"
_RAY_KINDS = {"RayCluster", "RayJob"}
_EXPECTED = (
    "expected a Ray launcher configuration (clusters/aws.yaml), a RayCluster manifest or a kustomize directory "
    "(clusters/kuberay), or a batch script with #SBATCH lines"
)


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
    raise UserError(f"{path} is no cluster; {_EXPECTED}")
