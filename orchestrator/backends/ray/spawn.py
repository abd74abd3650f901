"""New runner actors: their resources, and the nodes where they may come up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.ray.gang_shape import COORDINATOR, NODE_LABEL
from orchestrator.backends.ray.reservations import off_the_head
from orchestrator.backends.ray.runner import MAX_CONCURRENT_CALLS, Runner
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import Resources, Spot
from orchestrator.core.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a runner may be."""

    node: str = ""
    """Name of the one node for it; empty = any."""
    node_id: str = ""
    """Ray's id of that node."""
    excluded: tuple[str, ...] = ()
    """Names of nodes where it must not be."""
    excluded_ids: tuple[str, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    """Ray labels that a node must have which is yet to come; of one that is there the scheduler knows."""

    def suits(self, node: str) -> bool:
        """Whether a runner on a node, as far as that is known, may be used."""
        if self.node:
            return node == self.node
        return not node or node not in self.excluded


ANY_SITE = Site()
_MARKET, _ACCELERATOR = "ray.io/market-type", "ray.io/accelerator-type"
_MARKETS = {Spot.REQUIRE: "spot", Spot.NEVER: "!spot"}


def selector_of(asked: Resources) -> dict[str, str]:
    """The conditions of an attempt as Ray's label selector: an autoscaler then adds nodes that meet them."""
    selector = dict(asked.labels)
    if asked.spot in _MARKETS:
        selector[_MARKET] = _MARKETS[asked.spot]
    if asked.accelerator:
        selector[_ACCELERATOR] = asked.accelerator
    return selector


def create_runner(
    name: str, namespace: str, resources: Resources, settings: RunnerSettings, site: Site
) -> ActorHandle[Any]:
    """Start a runner; does not wait until it is up."""
    options: dict[str, Any] = {"memory": int(resources.memory_gib * GIB)} if resources.memory_gib else {}
    actor_class: Any = ray.remote(Runner).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        max_concurrency=MAX_CONCURRENT_CALLS,
        max_restarts=0,
        **options,
        **_constraints(resources, site),
    )
    handle: ActorHandle[Any] = actor_class.remote(name, settings.to_json())
    return handle


def _constraints(resources: Resources, site: Site) -> dict[str, Any]:
    is_coordinator = resources == COORDINATOR
    if site.node_id:
        if is_coordinator:
            # It belongs on its gang's first node. A soft affinity forgets one that has only just joined, a hard one
            # fails for it; a label waits. Of a node that is gone the backend knows.
            return {"label_selector": {NODE_LABEL: site.node_id}}
        # The scheduler has counted on this node, so that another one would be one too many there.
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(site.node_id, soft=False)}
    if is_coordinator and (strategy := off_the_head()):
        return {"scheduling_strategy": strategy}
    avoided = {NODE_LABEL: f"!in({','.join(site.excluded_ids)})"} if site.excluded_ids else {}
    selector = avoided if is_coordinator else {**site.selector, **avoided}
    return {"label_selector": selector} if selector else {}
