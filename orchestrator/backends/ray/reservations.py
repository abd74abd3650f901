"""Placement groups of gangs, and where a gang's runner may sit."""

from __future__ import annotations

import logging

import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_HEAD = "node:__internal_head__"
_LOG = logging.getLogger(__name__)


def remove_reservation(group_id: str) -> None:
    """Give the resources of a placement group back, and end what still runs in it; one that is gone is no error."""
    try:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    except (RayError, ValueError) as error:
        _LOG.warning("placement group %s was not removed: %s", group_id, error)


def off_the_head() -> NodeAffinitySchedulingStrategy | None:
    """A preference for the largest node that is not the cluster's head; ``None`` if the head is all there is.

    Ray Train's controller sits beside a gang's runner. On the head, which survives everything, neither should compete
    with the cluster's own services.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and _HEAD not in node["Resources"]]  # type: ignore[no-untyped-call]
    if not nodes:
        return None
    best = max(nodes, key=lambda node: (node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)))
    return NodeAffinitySchedulingStrategy(best["NodeID"], soft=True)
