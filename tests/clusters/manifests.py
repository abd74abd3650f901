"""Kubernetes objects as kubectl renders them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.cluster.check_kubernetes import render
from orchestrator.cluster.kinds import read_cluster

ROOT = Path(__file__).parents[2]
KUBERAY, SERVICES = ROOT / "clusters" / "kuberay", ROOT / "infra" / "kubernetes"
RENDERED = (KUBERAY, KUBERAY / "rayjob", KUBERAY / "kueue", *sorted((SERVICES / "overlays").iterdir()))


@cache
def rendered(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """The objects of a kustomize directory."""
    return tuple(render(read_cluster(folder)))


def rendered_with(folder: Path, *components: str, further: str = "") -> tuple[Mapping[str, Any], ...]:
    """The Ray cluster with components and further lines, by way of an overlay as a user writes it into ``folder``."""
    base = os.path.relpath(KUBERAY, folder)
    listed = ", ".join(f"{base}/components/{component}" for component in components)
    (folder / "kustomization.yaml").write_text(f"resources: [{base}]\ncomponents: [{listed}]\n{further}")
    return tuple(render(read_cluster(folder)))


def pods(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The pod specifications of an object, wherever they are."""

    def walk(part: Any) -> Iterator[Mapping[str, Any]]:
        if isinstance(part, list):
            for one in part:
                yield from walk(one)
        elif isinstance(part, Mapping):
            if "containers" in part:
                yield part
            for one in part.values():
                yield from walk(one)

    yield from walk(document.get("spec"))


def containers(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All containers of an object, those that only prepare included."""
    for pod in pods(document):
        yield from [*pod["containers"], *pod.get("initContainers", [])]


def named(documents: tuple[Mapping[str, Any], ...], kind: str, name: str) -> Mapping[str, Any]:
    """One object."""
    return next(one for one in documents if one["kind"] == kind and one["metadata"]["name"] == name)
