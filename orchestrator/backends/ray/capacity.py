"""What the cluster has, read from Ray now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray

from orchestrator.backends.protocol import Capacity, Node
from orchestrator.backends.ray.draining import leaving_nodes
from orchestrator.backends.ray.node_groups import growth, node_labels
from orchestrator.core.contract import Resources
from orchestrator.core.units import GIB

_READ_EVERY_S = 2.0
_MAY_COME_BACK_S = 3600.0
"""A node that is gone for longer does not come back."""
_ROUNDING = 1e-6
_ACCELERATOR_LABEL = "ray.io/accelerator-type"
_ACCELERATOR_RESOURCE = "accelerator_type:"
_MARKET_LABEL = "ray.io/market-type"
_OF_RAY = "ray.io/"


class ClusterCapacity:
    """Remembers the last answer for a short while: it changes only when nodes come or go."""

    def __init__(self) -> None:
        self._read_at_s = 0.0
        self._capacity = Capacity(total=Resources(cpus=0.0))
        self._ids: dict[str, str] = {}
        """Ray's id by name, of nodes that are gone, too."""
        self._names: dict[str, str] = {}
        self._seen: dict[str, tuple[Node, float]] = {}
        """By name, the nodes of the last hour, and when each was there."""

    def read(self) -> Capacity:
        """Resources of all nodes that are alive. A local request to Ray's control store, milliseconds."""
        if time.monotonic() >= self._read_at_s:
            self._read_at_s = time.monotonic() + _READ_EVERY_S
            leaving = leaving_nodes()
            machines = [_machine(node, leaving) for node in _nodes() if node["Alive"]]
            self._names.update({node_id: machine.name for node_id, machine in machines})
            self._ids.update({machine.name: node_id for node_id, machine in machines})
            shapes = [machine.resources for _, machine in machines if machine.leaves_at_s is None]
            self._capacity = Capacity(
                total=_sum(shapes),
                nodes=tuple(dict.fromkeys(shapes)),
                machines=tuple(machine for _, machine in machines),
                absent=self._absent([machine for _, machine in machines]),
                maximum=growth(),
            )
        return self._capacity

    def _absent(self, machines: list[Node]) -> tuple[Node, ...]:
        """Nodes that were here within the last hour and are not now."""
        now_s = time.monotonic()
        self._seen.update({machine.name: (machine, now_s) for machine in machines})
        self._seen = {name: seen for name, seen in self._seen.items() if now_s - seen[1] < _MAY_COME_BACK_S}
        here = {machine.name for machine in machines}
        return tuple(replace(node, is_alive=False) for name, (node, _) in self._seen.items() if name not in here)

    def name_of(self, node_id: str) -> str:
        """Our name of a node; empty for one that was never seen."""
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
        """Whether a node is about to go, and takes nothing new."""
        return any(machine.name == name and machine.leaves_at_s is not None for machine in self.read().machines)

    def room_of(self, name: str) -> Resources:
        """What a node has in all; nothing for one that is gone."""
        found = (machine.resources for machine in self.read().machines if machine.name == name)
        return next(found, Resources(cpus=0.0))


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def node_name(node: Mapping[str, Any]) -> str:
    """Of a row of ``ray.nodes()``: the host's name, which people know, and a part of Ray's id."""
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
        accelerator=labels.get(_ACCELERATOR_LABEL) or next(iter(types), ""),
        is_spot=labels.get(_MARKET_LABEL) == "spot",
        leaves_at_s=leaving.get(node_id),
    )
    return node_id, machine


def fits(resources: Resources, others: Iterable[Resources], room: Resources) -> bool:
    """Whether a runner fits beside others into a node, or into the whole cluster."""
    needed = _sum([resources, *others])
    return (
        needed.cpus <= room.cpus + _ROUNDING
        and needed.gpus <= room.gpus + _ROUNDING
        and needed.memory_gib <= room.memory_gib + _ROUNDING
    )


def _resources(node: Mapping[str, float]) -> Resources:
    return Resources(cpus=node.get("CPU", 0.0), gpus=node.get("GPU", 0.0), memory_gib=node.get("memory", 0.0) / GIB)


def _sum(resources: Iterable[Resources]) -> Resources:
    every = list(resources)
    return Resources(
        cpus=sum(one.cpus for one in every),
        gpus=sum(one.gpus for one in every),
        memory_gib=sum(one.memory_gib for one in every),
    )
