"""The nodes of the cluster, read from Ray periodically, and the nodes that its autoscaler may add.

Ray does not tell its clients how far a cluster can grow, so the file that describes the cluster is read: the launcher's
configuration, which ``ray up`` leaves on the head, or a ``RayCluster`` manifest.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray
import yaml

from orchestrator.backends.protocol import Capacity
from orchestrator.backends.ray.draining import leaving_nodes
from orchestrator.core.contract import Resources
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.units import GIB
from orchestrator.state.nodes import ZONE_LABEL, Node

GROUPS_VARIABLE = "ORCHESTRATOR_NODE_GROUPS"
"""Environment variable of the head's ``ray start``: the file. Unset = the cluster has the nodes that it has."""
MARKET_LABEL = "ray.io/market-type"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
_RAY_LABELS = "ray.io/"
_ZONE_OF_RAY = "ray.io/availability-zone"
"""Ray sets this label from a variable of the node's environment, which Kubernetes sites set."""
HEAD_RESOURCE = "node:__internal_head__"
"""Resource that Ray gives to the node a cluster began with."""
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What reading a file raises that describes nodes in another way."""
_LOG = logging.getLogger(__name__)
_READ_EVERY_S = 2.0
_MAY_COME_BACK_S = 3600.0
"""A node that is gone for longer than this does not come back. So for as long after its start, a process does not know
all nodes that may come back."""
_SETTLES_AFTER_S = 600.0
"""The nodes of one request to a batch system join within minutes of each other."""
_ROUNDING = 1e-6
_ACCELERATOR_RESOURCE = "accelerator_type:"


def growth() -> tuple[Node, ...] | None:
    """One node of each kind that the autoscaler may add; ``None`` where the cluster does not grow.

    A file that cannot be read is reported once and counts as none: only existing nodes are used, and no job fails
    because none of them would hold it.
    """
    path = os.environ.get(GROUPS_VARIABLE, "")
    if not path:
        return None
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return _growth_of(path, 0, 0)
    return _growth_of(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _growth_of(path: str, _modified_ns: int, _size_bytes: int) -> tuple[Node, ...] | None:
    """Read once until the file changes: a mounted ConfigMap follows what is applied."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        return node_groups([one for one in yaml.safe_load_all(text) if isinstance(one, Mapping)], path)
    except (OSError, yaml.YAMLError, OrchestratorError, ImportError, *_BROKEN) as error:
        _LOG.warning("%s: %r; the cluster counts as one that does not grow", GROUPS_VARIABLE, error)
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
    """Node types of ``available_node_types``, without the head, which exists already."""
    types: Mapping[str, Mapping[str, Any]] = config["available_node_types"]
    for name, one in types.items():
        limits = (one.get("max_workers"), config.get("max_workers"))  # of the type, and of all types together
        max_count = min((limit for limit in limits if limit is not None), default=None)
        if name != config.get("head_node_type") and max_count != 0:
            yield _node(_resources(one.get("resources") or {}), one.get("labels") or {}, max_count)


def _pods(spec: Mapping[str, Any]) -> Iterator[Node]:
    """Groups of workers, read by the functions of Ray's autoscaler: a job waits for what the autoscaler adds."""
    # It loads Ray's autoscaler, which only clusters with such groups need.
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _get_labels_from_group_spec,
        _get_ray_resources_from_group_spec,
    )

    for group in _without_nulls(spec.get("workerGroupSpecs") or ()):
        if group.get("maxReplicas", 1):
            name = group["groupName"]
            try:
                sizes = _get_ray_resources_from_group_spec(group, is_head=False)
                labels = _get_labels_from_group_spec(group, name)
            except _BROKEN as error:
                raise OrchestratorError(f"group {name}: {' '.join(str(error).split()) or repr(error)}") from error
            max_count = group.get("maxReplicas")
            max_count = None if max_count is None else int(max_count) * int(group.get("numOfHosts", 1))
            yield _node(_resources(sizes), labels, max_count)


def _without_nulls(part: Any) -> Any:  # noqa: ANN401 - any part of a manifest
    """A part of a manifest as Kubernetes stores it: fields that are null are absent."""
    if isinstance(part, Mapping):
        return {name: _without_nulls(value) for name, value in part.items() if value is not None}
    return [_without_nulls(one) for one in part] if isinstance(part, list) else part


def _node(resources: Resources, labels: Mapping[str, str], max_count: int | None) -> Node:
    return Node(
        resources=resources,
        max_count=None if max_count is None else int(max_count),
        labels=node_labels(labels),
        zone_label=zone_label(labels),
        accelerator=labels.get(ACCELERATOR_LABEL, ""),
        is_spot=labels.get(MARKET_LABEL) == "spot",
    )


def node_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """What the scheduler knows of a node's Ray labels: those that are not Ray's own, and its zone."""
    zone = {ZONE_LABEL: labels[_ZONE_OF_RAY]} if labels.get(_ZONE_OF_RAY) else {}
    return zone | {name: value for name, value in labels.items() if not name.startswith(_RAY_LABELS)}


def zone_label(labels: Mapping[str, str]) -> str:
    """The Ray label from which ``node_labels`` has the zone."""
    return _ZONE_OF_RAY if labels.get(_ZONE_OF_RAY) and ZONE_LABEL not in labels else ZONE_LABEL


class ClusterCapacity:
    """Remembers the last answer for a short while: it changes only when nodes come or go."""

    def __init__(self) -> None:
        self._read_at_s = 0.0
        self._capacity = Capacity(total=Resources(cpus=0.0))
        self._ids: dict[str, str] = {}
        """Ray's ids by name; also of nodes that are gone."""
        self._names: dict[str, str] = {}
        self._seen: dict[str, tuple[Node, float]] = {}
        """The nodes of the last hour by name, and when each was last alive."""
        self._began_s = self._joined_s = time.monotonic()
        """When it began to look, and when a node joined last."""

    def read(self) -> Capacity:
        """Resources of all nodes that are alive. A local request to Ray's control store, milliseconds."""
        if time.monotonic() >= self._read_at_s:
            self._read_at_s = time.monotonic() + _READ_EVERY_S
            leaving = leaving_nodes()
            machines = [_machine(node, leaving) for node in _nodes() if node["Alive"]]
            self._names.update({node_id: machine.name for node_id, machine in machines})
            self._ids.update({machine.name: node_id for node_id, machine in machines})
            shapes = [machine.resources for _, machine in machines if machine.leaves_at_s is None]
            absent, maximum = self._absent([machine for _, machine in machines]), growth()
            self._capacity = Capacity(
                total=_sum(shapes),
                nodes=tuple(dict.fromkeys(shapes)),
                machines=tuple(machine for _, machine in machines),
                absent=absent,
                maximum=maximum,
                # Where an autoscaler adds the nodes, their kinds are known, or will be once its file can be read again.
                is_settled=maximum is not None or (not os.environ.get(GROUPS_VARIABLE) and self._is_still()),
            )
        return self._capacity

    def _absent(self, machines: list[Node]) -> tuple[Node, ...]:
        """Nodes that were alive within the last hour and are not now."""
        now_s = time.monotonic()
        if any(machine.name not in self._seen for machine in machines):
            self._joined_s = now_s
        self._seen.update({machine.name: (machine, now_s) for machine in machines})
        self._seen = {name: seen for name, seen in self._seen.items() if now_s - seen[1] < _MAY_COME_BACK_S}
        here = {machine.name for machine in machines}
        return tuple(replace(node, is_alive=False) for name, (node, _) in self._seen.items() if name not in here)

    def _is_still(self) -> bool:
        """Whether it knows all nodes that may come back, and none has joined for some time."""
        now_s = time.monotonic()
        return now_s - self._began_s >= _MAY_COME_BACK_S and now_s - self._joined_s >= _SETTLES_AFTER_S

    def name_of(self, node_id: str) -> str:
        """Our name of a node; empty for a node that was never seen."""
        if node_id and node_id not in self._names:
            self._read_at_s = 0.0
            self.read()
        return self._names.get(node_id, "")

    def ids_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Ray's ids of nodes, without those that were never seen."""
        self.read()
        return tuple(self._ids[name] for name in names if name in self._ids)

    def first_gone(self, node_ids: Iterable[str]) -> str:
        """Name of the first of these nodes, by Ray's ids, that is not alive; empty if all of them are."""
        alive = {self._ids[machine.name] for machine in self.read().machines}
        return next((self._names.get(node_id, node_id) for node_id in node_ids if node_id not in alive), "")

    def is_leaving(self, name: str) -> bool:
        """Whether a node is being drained and takes no new work."""
        return any(machine.name == name and machine.leaves_at_s is not None for machine in self.read().machines)

    def room_of(self, name: str) -> Resources:
        """Total resources of a node; none for a node that is gone."""
        found = (machine.resources for machine in self.read().machines if machine.name == name)
        return next(found, Resources(cpus=0.0))


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def node_name(node: Mapping[str, Any]) -> str:
    """The name of a row of ``ray.nodes()``: the host's name, which people know, and a part of Ray's id."""
    return f"{node.get('NodeManagerHostname', 'node')}/{node.get('NodeID', '')[:8]}"


def _machine(node: Mapping[str, Any], leaving: Mapping[str, float]) -> tuple[str, Node]:
    """Ray's id of a node, and the node."""
    labels: dict[str, str] = node.get("Labels") or {}
    types = [name.removeprefix(_ACCELERATOR_RESOURCE) for name in node["Resources"] if _ACCELERATOR_RESOURCE in name]
    node_id: str = node.get("NodeID", "")
    machine = Node(
        name=node_name(node),
        resources=_resources(node["Resources"]),
        labels=node_labels(labels),
        zone_label=zone_label(labels),
        accelerator=labels.get(ACCELERATOR_LABEL) or next(iter(types), ""),
        is_spot=labels.get(MARKET_LABEL) == "spot",
        is_head=HEAD_RESOURCE in node["Resources"],
        leaves_at_s=leaving.get(node_id),
    )
    return node_id, machine


def fits(resources: Resources, others: Iterable[Resources], room: Resources) -> bool:
    """Whether a runner fits beside the others on a node, or in the whole cluster."""
    needed = _sum([resources, *others])
    return (
        needed.cpus <= room.cpus + _ROUNDING
        and needed.gpus <= room.gpus + _ROUNDING
        and needed.memory_gib <= room.memory_gib + _ROUNDING
    )


def _resources(amounts: Mapping[str, float]) -> Resources:
    """From amounts by Ray's names."""
    return Resources(
        cpus=float(amounts.get("CPU", 0)),
        gpus=float(amounts.get("GPU", 0)),
        memory_gib=float(amounts.get("memory", 0)) / GIB,
    )


def _sum(resources: Iterable[Resources]) -> Resources:
    every = list(resources)
    return Resources(
        cpus=sum(one.cpus for one in every),
        gpus=sum(one.gpus for one in every),
        memory_gib=sum(one.memory_gib for one in every),
    )
