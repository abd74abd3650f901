"""The machines of a cluster, and which attempts may run on which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.contract import Resources, Spot

ZONE_LABEL = "zone"
"""Label of a node: nodes with the same value are near each other. A gang never spans two zones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster. A machine that comes back after its loss has another name."""

    name: str = ""
    """Empty = a shape of unnamed nodes: free resources are then counted over the whole cluster."""
    resources: Resources
    """Its total resources, used or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    zone_label: str = ZONE_LABEL
    """Name that the cluster itself has for its label ``zone``."""
    accelerator: str = ""
    """Type of its GPUs, such as ``A100``; empty = none, or not known."""
    is_spot: bool = False
    """Whether the provider may reclaim it."""
    is_head: bool = False
    """Whether it is the node that the cluster began with, which no autoscaler adds."""
    is_alive: bool = True
    max_count: int | None = None
    """For a type that an autoscaler may add: the largest number of such nodes; None = unknown."""
    leaves_at_s: float | None = None
    """When it will be gone, unix seconds, infinity = unknown; it takes no new work. None = it is not drained."""

    def suits(self, requested: Resources) -> bool:
        """Whether it meets the conditions of an attempt, apart from its size."""
        if requested.accelerator and requested.accelerator.casefold() != self.accelerator.casefold():
            return False
        if requested.spot is not Spot.ALLOW and self.is_spot != (requested.spot is Spot.REQUIRE):
            return False
        return all(self.labels.get(key) == value for key, value in requested.labels)

    def __str__(self) -> str:
        parts = [str(self.resources.bare)]
        parts += [self.accelerator] if self.accelerator else []
        parts += ["spot"] if self.is_spot else []
        parts += [f"{key}={value}" for key, value in sorted(self.labels.items())]
        return ", ".join(parts)
