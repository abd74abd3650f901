"""What the cluster has, read from Ray now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from orchestrator.backends.protocol import Capacity
from orchestrator.contract import Resources
from orchestrator.units import GIB

_READ_EVERY_S = 2.0
_ROUNDING = 1e-6


class ClusterCapacity:
    """Remembers the last answer for a short while: it changes only when nodes come or go."""

    def __init__(self) -> None:
        self._read_at_s = 0.0
        self._capacity = Capacity(total=Resources(cpus=0.0))

    def read(self) -> Capacity:
        """Resources of all nodes that are alive. A local request to Ray's control store, milliseconds."""
        if time.monotonic() >= self._read_at_s:
            self._read_at_s = time.monotonic() + _READ_EVERY_S
            nodes = [_resources(node["Resources"]) for node in _nodes() if node["Alive"]]
            self._capacity = Capacity(total=_sum(nodes), nodes=tuple(dict.fromkeys(nodes)))
        return self._capacity


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def fits(resources: Resources, others: Iterable[Resources], capacity: Capacity) -> bool:
    """Whether a runner fits beside others into the whole cluster (fragmentation is not seen here)."""
    needed, total = _sum([resources, *others]), capacity.total
    return (
        needed.cpus <= total.cpus + _ROUNDING
        and needed.gpus <= total.gpus + _ROUNDING
        and needed.memory_gib <= total.memory_gib + _ROUNDING
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
