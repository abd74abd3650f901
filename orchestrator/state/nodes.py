"""The machines of a cluster, and which attempts may run on which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.contract import Resources, Spot

ZONE_LABEL = "zone"
"""Of a node: nodes with the same value are near each other. A gang never lies in two zones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster. A machine that comes back after its loss has another name."""

    name: str = ""
    """Empty = a shape that the cluster has somewhere: room is then counted over the whole cluster."""
    resources: Resources
    """All that it has, used or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    accelerator: str = ""
    """Type of its GPUs, such as ``A100``; empty = none, or not known."""
    is_spot: bool = False
    """Whether the provider may take it back."""
    is_alive: bool = True
    max_count: int | None = None
    """Of a kind that an autoscaler may add: how many of it there may be at once; none = not known."""
    leaves_at_s: float | None = None
    """When it will be gone, unix seconds, infinity = not said; it takes nothing new. None = it stays."""

    def suits(self, asked: Resources) -> bool:
        """Whether it is of the sort that an attempt asks for, whatever its size."""
        if asked.accelerator and asked.accelerator.casefold() != self.accelerator.casefold():
            return False
        if asked.spot is not Spot.ALLOW and self.is_spot != (asked.spot is Spot.REQUIRE):
            return False
        return all(self.labels.get(key) == value for key, value in asked.labels)

    def __str__(self) -> str:
        parts = [str(self.resources.bare)]
        parts += [self.accelerator] if self.accelerator else []
        parts += ["spot"] if self.is_spot else []
        parts += [f"{key}={value}" for key, value in sorted(self.labels.items())]
        return ", ".join(parts)
