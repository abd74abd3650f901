"""How far a Ray cluster can grow: the kinds of nodes that its autoscaler may add.

Ray does not tell its clients, so the file that describes the cluster is read again: the launcher's configuration, which
``ray up`` leaves on the head, or a ``RayCluster`` manifest.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.contract import Resources
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.units import GIB
from orchestrator.state.nodes import ZONE_LABEL, Node

GROUPS_VARIABLE = "ORCHESTRATOR_NODE_GROUPS"
"""Environment variable of the head's ``ray start``: the file. Unset = the cluster has the nodes that it has."""
MARKET_LABEL = "ray.io/market-type"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
LABELS_VARIABLE = "RAY_OVERRIDE_LABELS"
"""Ray's: labels of the node that is started, as JSON."""
_OF_RAY = "ray.io/"
_ZONE_OF_RAY = "ray.io/availability-zone"
"""Ray fills it in from a variable of the node's environment, which Kubernetes sites set."""
_SUFFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LOG = logging.getLogger(__name__)


def growth() -> tuple[Node, ...] | None:
    """One node of each kind that the autoscaler may add; ``None`` where the cluster does not grow.

    A file that cannot be read is told once and counts as none: what is there then has to do.
    """
    path = os.environ.get(GROUPS_VARIABLE, "")
    return _growth_of(path) if path else None


@lru_cache(maxsize=4)
def _growth_of(path: str) -> tuple[Node, ...] | None:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        return node_groups([one for one in yaml.safe_load_all(text) if isinstance(one, Mapping)], path)
    except (OSError, yaml.YAMLError, OrchestratorError, ValueError, TypeError, LookupError, AttributeError) as error:
        _LOG.warning("%s: %r; the cluster is taken not to grow", GROUPS_VARIABLE, error)
        return None


def node_groups(documents: list[Mapping[str, Any]], source: str) -> tuple[Node, ...]:
    """The kinds of nodes of a launcher configuration or of the ``RayCluster`` among some manifests.

    Raises:
        OrchestratorError: there is neither.
    """
    for document in documents:
        if "available_node_types" in document:
            return tuple(_launched(document))
        if document.get("kind") == "RayCluster":
            return tuple(_pods(document["spec"]))
        if document.get("kind") == "RayJob":
            return tuple(_pods(document["spec"]["rayClusterSpec"]))
    raise OrchestratorError(f"{source} describes no nodes; name a Ray launcher configuration or a RayCluster manifest")


def _launched(config: Mapping[str, Any]) -> Iterator[Node]:
    """Of ``available_node_types``; the head is there already."""
    types: Mapping[str, Mapping[str, Any]] = config["available_node_types"]
    for name, one in types.items():
        if name != config.get("head_node_type") and one.get("max_workers", 1):
            sizes: Mapping[str, float] = one.get("resources") or {}
            resources = Resources(
                cpus=float(sizes.get("CPU", 0)),
                gpus=float(sizes.get("GPU", 0)),
                memory_gib=float(sizes.get("memory", 0)) / GIB,
            )
            max_count = one.get("max_workers", config.get("max_workers"))
            yield _node(resources, one.get("labels") or {}, max_count)


def _pods(spec: Mapping[str, Any]) -> Iterator[Node]:
    for group in spec.get("workerGroupSpecs") or ():
        if group.get("maxReplicas", 1):
            container = group["template"]["spec"]["containers"][0]
            limits = (container.get("resources") or {}).get("limits") or {}
            parameters = group.get("rayStartParams") or {}
            resources = Resources(
                cpus=float(parameters.get("num-cpus") or _quantity(limits.get("cpu", "0"))),
                gpus=float(parameters.get("num-gpus") or _quantity(limits.get("nvidia.com/gpu", "0"))),
                memory_gib=_quantity(limits.get("memory", "0")) / GIB,
            )
            max_count = group.get("maxReplicas")
            max_count = None if max_count is None else int(max_count) * int(group.get("numOfHosts") or 1)
            yield _node(resources, {**(group.get("labels") or {}), **_labels_of(container)}, max_count)


def _labels_of(container: Mapping[str, Any]) -> dict[str, str]:
    values = {one["name"]: one.get("value", "") for one in container.get("env") or ()}
    found: dict[str, str] = json.loads(values.get(LABELS_VARIABLE) or "{}")
    return found


def _node(resources: Resources, labels: Mapping[str, str], max_count: int | None) -> Node:
    return Node(
        resources=resources,
        max_count=None if max_count is None else int(max_count),
        labels=node_labels(labels),
        accelerator=labels.get(ACCELERATOR_LABEL, ""),
        is_spot=labels.get(MARKET_LABEL) == "spot",
    )


def node_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """What the scheduler knows of a node's Ray labels: those that are not Ray's own, and its zone."""
    zone = {ZONE_LABEL: labels[_ZONE_OF_RAY]} if labels.get(_ZONE_OF_RAY) else {}
    return zone | {name: value for name, value in labels.items() if not name.startswith(_OF_RAY)}


def _quantity(text: str | float) -> float:
    """A Kubernetes quantity: ``500m``, ``8``, ``64Gi``."""
    written = str(text)
    for suffix, factor in _SUFFIXES.items():
        if written.endswith(suffix):
            return float(written.removesuffix(suffix)) * factor
    return float(written.removesuffix("m")) / 1000.0 if written.endswith("m") else float(written)
