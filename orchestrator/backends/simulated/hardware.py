"""The nodes of a simulated cluster, and the rates of their failures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.core.contract import Resources

LLAMA3_GPU_MTBF_H = 50_677.0
"""GPU-hours between unexpected interruptions: 419 in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Some equal nodes."""

    count: int
    shape: Resources
    accelerator: str = ""
    is_spot: bool = False
    """Whether the provider may reclaim its nodes at any time."""
    labels: Mapping[str, str] = field(default_factory=dict)
    rack_size: int = 0
    """Nodes that share a rack and are lost together; 0 = no racks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """All nodes of a cluster. Node names are ``node0000``, ``node0001``, ... over all groups."""

    groups: tuple[NodeGroup, ...]
    grows: bool = False
    """Whether an autoscaler replaces lost nodes: then attempts are also launched before resources are free."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return round(sum(group.count * group.shape.gpus for group in self.groups))

    @classmethod
    def uniform(
        cls, num_gpus: int, *, gpus_per_node: int = 8, cpus_per_gpu: float = 12.0, spot: bool = False
    ) -> ClusterSpec:
        """Nodes of equal size, and a smaller one for what remains; without GPUs, one node of as many CPUs."""
        full, rest = divmod(num_gpus, gpus_per_node)
        sizes = [(full, gpus_per_node), (1 if rest else 0, rest)]
        return cls(
            groups=tuple(
                NodeGroup(
                    count=count,
                    shape=Resources(cpus=size * cpus_per_gpu, gpus=float(size), memory_gib=size * 128.0),
                    is_spot=spot,
                )
                for count, size in sizes
                if count
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """Rates of hardware failures, all of them memoryless. The default is a cluster that never fails."""

    gpu_mtbf_h: float = math.inf
    """Hours of one GPU between two faults, each of which ends the attempt that uses it."""
    spot_loss_per_h: float = 0.0
    """Probability, in [0, 1), that a spot node is taken away within an hour."""
    rack_mtbf_h: float = math.inf
    """Hours of one rack between two losses of all its nodes."""
    replace_s: float = 300.0
    """From the loss of a node to another one in its place."""
    detection_s: float = 10.0
    """From the death of a node to the moment when the backend reports it."""

    @property
    def spot_rate_per_s(self) -> float:
        """Losses per second of one spot node: an hour survives with ``1 - spot_loss_per_h``."""
        return -math.log1p(-self.spot_loss_per_h) / 3600.0

    @property
    def gpu_rate_per_s(self) -> float:
        """Faults per second of one GPU."""
        return 1.0 / (self.gpu_mtbf_h * 3600.0)

    @property
    def rack_rate_per_s(self) -> float:
        """Losses per second of one rack."""
        return 1.0 / (self.rack_mtbf_h * 3600.0)


@dataclass(slots=True, kw_only=True)
class SimulatedNode:
    """State of one node."""

    name: str
    group: NodeGroup
    rack: str
    cpus: float
    """Free CPUs; the next two fields are free GPUs and memory."""
    gpus: float
    memory_gib: float
    is_up: bool = True
    is_known_up: bool = True
    """What the backend reports; it follows ``is_up`` after the time of detection."""
    attempts: dict[str, Resources] = field(default_factory=dict)
    """What each attempt holds here."""
    cached: set[str] = field(default_factory=set)
    """Data sets on its disk."""
    idle: list[Resources] = field(default_factory=list)
    """Shapes of runners that are warm and hold nothing, the longest idle first."""

    def has(self, shape: Resources) -> bool:
        """Whether an attempt, or one worker of it, fits now."""
        fits = shape.cpus <= self.cpus + 1e-6 and shape.gpus <= self.gpus + 1e-6
        return self.is_up and fits and shape.memory_gib <= self.memory_gib + 1e-6

    def take(self, attempt_id: str, shape: Resources) -> bool:
        """Occupy resources; True if a warm runner of this shape takes the attempt."""
        is_warm = shape in self.idle
        if is_warm:
            self.idle.remove(shape)
        held = self.attempts.get(attempt_id)
        both = shape if held is None else _sum(held, shape)
        self.attempts[attempt_id] = both
        self._add(shape, -1.0)
        while self.idle and not self._holds_idle():
            self.idle.pop(0)  # its resources are needed
        return is_warm

    def give(self, attempt_id: str, *, warm: Resources | None) -> None:
        """Free what an attempt holds; ``warm`` is the shape of the runner that stays."""
        held = self.attempts.pop(attempt_id, None)
        if held is None:
            return
        self._add(held, 1.0)
        if warm is not None and self.is_up:
            self.idle.append(warm)

    def _add(self, shape: Resources, sign: float) -> None:
        self.cpus += sign * shape.cpus
        self.gpus += sign * shape.gpus
        self.memory_gib += sign * shape.memory_gib

    def _holds_idle(self) -> bool:
        gpus, cpus = sum(shape.gpus for shape in self.idle), sum(shape.cpus for shape in self.idle)
        return gpus <= self.gpus + 1e-6 and cpus <= self.cpus + 1e-6


def _sum(one: Resources, other: Resources) -> Resources:
    return Resources(
        cpus=one.cpus + other.cpus, gpus=one.gpus + other.gpus, memory_gib=one.memory_gib + other.memory_gib
    )


def build_nodes(spec: ClusterSpec) -> Iterator[SimulatedNode]:
    """All nodes of a cluster, whole and free."""
    number = 0
    for place, group in enumerate(spec.groups):
        for position in range(group.count):
            rack = f"rack{place}-{position // group.rack_size}" if group.rack_size else ""
            shape = group.shape
            yield SimulatedNode(
                name=f"node{number:04d}",
                group=group,
                rack=rack,
                cpus=shape.cpus,
                gpus=shape.gpus,
                memory_gib=shape.memory_gib,
            )
            number += 1
