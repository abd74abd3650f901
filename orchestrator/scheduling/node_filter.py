"""The cluster in one round of decisions: its nodes, shapes that fit, and nodes that are not used in this round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.scheduling.demand import Amount, AttemptDemand, amount_of, count_workers, times, total_of
from orchestrator.scheduling.placement import Machines
from orchestrator.state.nodes import ZONE_LABEL, Node

_MAX_SHAPES_NAMED = 4
_SEVERAL = 2


class NodeFilter:
    """Which nodes an attempt may use. ``excluded`` nodes are used only if the others do not suffice."""

    def __init__(
        self, machines: Machines, total: Resources, *, maximum: Sequence[Node] | None, excluded: Collection[str]
    ) -> None:
        self.machines = machines
        self.can_grow = maximum is not None
        self._total, self._maximum = total, maximum or ()
        self._excluded = frozenset(machines.places[name] for name in excluded if name in machines.places)
        self._nodes: dict[AttemptDemand, frozenset[int]] = {}
        self._other_zones: dict[AttemptDemand, tuple[frozenset[int], ...]] = {}
        self._zones = [node.labels.get(ZONE_LABEL, "") for node in machines.nodes]
        self._holds: dict[AttemptDemand, bool] = {}
        self._by_requirements: dict[Resources, frozenset[int]] = {}

    @property
    def has_excluded(self) -> bool:
        """Whether a node of the cluster is excluded."""
        return bool(self._excluded)

    @cached_property
    def growth_base(self) -> Amount:
        """What is asked for beyond the present nodes is measured by this: their resources. Of a resource that none of
        them has, what an autoscaler may add in all, as far as the number of such nodes is known.
        """
        most = total_of(times(amount_of(kind.resources), kind.max_count or 0) for kind in self._maximum)
        cpus, gpus, memory = (has or added for has, added in zip(self.machines.whole, most, strict=True))
        return cpus, gpus, memory

    def nodes(self, demand: AttemptDemand) -> frozenset[int]:
        """Places of the nodes that an attempt may use: excluded ones only where the others, with what an autoscaler may
        yet add, could never hold all of it.
        """
        found = self._nodes.get(demand)
        if found is None:
            suitable = self._suitable(demand)
            healthy = suitable - self._excluded
            is_enough = self._num_workers(demand, healthy) + self._num_growing(demand) >= demand.num_workers
            found, *others = self._by_zone(demand, healthy if is_enough else suitable)
            self._nodes[demand], self._other_zones[demand] = found, tuple(others)
        return found

    def may_ask(self, demand: AttemptDemand, free: Mapping[int, int], waiting: Iterable[AttemptDemand]) -> bool:
        """Whether an attempt may ask an autoscaler for nodes. Those in ``waiting`` have asked already.

        Not if the present nodes could hold it, and those that may still be added are too few, beside its workers that
        fit now (``free``, by place): it would wait in Ray, where it has no reservation and preempts nothing.
        """
        if self.machines.is_pool or self._num_workers(demand, self.nodes(demand)) < demand.num_workers:
            return True
        growing = list(self._growing(demand))
        if math.inf in {count for _, count in growing}:
            return True
        zones: defaultdict[str, float] = defaultdict(float)
        for place, num_workers in free.items():
            zones[self._zones[place]] += num_workers
        for kind, count in growing:
            zones[kind.labels.get(ZONE_LABEL, "")] += count
        taken = total_of(one.total for one in waiting if any(_may_hold(kind, one) for kind, _ in growing))
        most = math.fsum(zones.values()) if demand.num_workers == 1 else _in_largest_zone(zones)
        is_growing = any(count for _, count in growing)
        return is_growing and most - _num_displaced(demand.worker, taken) >= demand.num_workers

    def other_zones(self, demand: AttemptDemand) -> tuple[frozenset[int], ...]:
        """Places of the nodes of further zones that a gang may use instead; it never lies in two."""
        self.nodes(demand)
        return self._other_zones[demand]

    def needed(self, demand: AttemptDemand) -> tuple[str, ...]:
        """Names of the excluded nodes that an attempt may use, since the others do not suffice for it."""
        return self._names(self.nodes(demand) & self._excluded)

    def avoided(self, demand: AttemptDemand) -> tuple[str, ...]:
        """Names of the excluded nodes that an attempt must not use."""
        return self._names(self._excluded - self.nodes(demand))

    def could_hold(self, demand: AttemptDemand) -> bool:
        """Whether it fits on the empty cluster, with all nodes that the autoscaler may add.

        A cluster without nodes counts as not known yet.
        """
        found = self._holds.get(demand)
        if found is None:
            found = self._holds[demand] = self._would_hold(demand)
        return found

    def may_come_back(self, demand: AttemptDemand) -> bool:
        """Whether it fits on the present nodes together with those that were lost a short time ago."""
        lost = [node for node in self.machines.lost if node.suits(demand.resources)]
        num_lost = sum(count_workers(demand.worker, amount_of(node.resources)) for node in lost)
        return num_lost > 0 and num_lost + self._num_workers(demand, self._suitable(demand)) >= demand.num_workers

    def refusal(self, demand: AttemptDemand, kind: str) -> str:
        """Why an attempt can never run here, with the largest shapes of nodes."""
        nodes = [*self.machines.nodes, *self._maximum]
        sort = [node for node in nodes if node.suits(demand.resources)]
        shapes = _largest(sort or nodes)
        available = f"the largest node{' of that sort' if 0 < len(sort) < len(nodes) else ''} has {shapes[0]}"
        if len(shapes) > 1:
            available = "the largest nodes have " + " or ".join(str(shape) for shape in shapes[:_MAX_SHAPES_NAMED])
        if not sort and nodes:
            available = f"no node is of that sort; {available}"
        requested, more = str(demand.resources), "add a larger node"
        if demand.num_workers > 1:
            requested += f" for {demand.num_workers} workers ({demand.resources.share(demand.num_workers)} each)"
            if self.can_grow and (grown := self._num_grown(demand)):
                available += f", and at full growth there is room for {grown:g} of these workers in one zone"
                more = "let the cluster grow further"
            elif not self.can_grow:
                available += f", the cluster {self._total}"
        is_search = kind == JobKind.SEARCH
        less = "search.concurrent, or what its trials ask for," if is_search else f"`resources` of {kind} jobs"
        remedy = f"lower {less} in sweep.yaml, or {more} and resubmit"
        return f"infeasible: it asks for {requested}, but {available}; {remedy}"

    def _suitable(self, demand: AttemptDemand) -> frozenset[int]:
        requested = Resources(
            accelerator=demand.resources.accelerator, spot=demand.resources.spot, labels=demand.resources.labels
        )
        found = self._by_requirements.get(requested)
        if found is None:
            found = self._by_requirements[requested] = frozenset(self.machines.suitable(requested))
        return found

    def _would_hold(self, demand: AttemptDemand) -> bool:
        if not self.machines.nodes and not self._maximum:
            return True
        # A leaving node may come back, as after maintenance: no job fails as infeasible while the node exists.
        for node in self.machines.leaving:
            if node.suits(demand.resources) and count_workers(demand.worker, amount_of(node.resources)) > 0:
                return True
        if self._num_grown(demand) >= demand.num_workers:
            return True
        if not self.machines.is_pool:
            return self._num_workers(demand, self._suitable(demand)) >= demand.num_workers
        shapes = [amount_of(node.resources) for node in self.machines.nodes if node.suits(demand.resources)]
        is_held = any(count_workers(demand.worker, shape) > 0 for shape in shapes)
        return is_held and (demand.num_workers == 1 or count_workers(demand.total, self.machines.whole) > 0)

    def _num_grown(self, demand: AttemptDemand) -> float:
        """How many workers, up to all of them, fit into the largest zone of the empty cluster at its full growth.

        Nodes and kinds without a zone count in each: their zone is not known.
        """
        kinds = [kind for kind in self._maximum if kind.suits(demand.resources)]
        there = [] if self.machines.is_pool else [self.machines.nodes[place] for place in self._suitable(demand)]
        zones: defaultdict[str, float] = defaultdict(float)

        def with_nodes(counts: Iterable[tuple[Node, float]]) -> float:
            for node, count in counts:
                if per_node := count_workers(demand.worker, amount_of(node.resources)):
                    zones[node.labels.get(ZONE_LABEL, "")] += per_node * count
            return _in_largest_zone(zones)

        found = with_nodes((kind, math.inf if kind.max_count is None else kind.max_count) for kind in kinds)
        if found < demand.num_workers:
            found = with_nodes((node, 1) for node in there if not any(_is_alike(node, kind) for kind in kinds))
        return found

    def _num_growing(self, demand: AttemptDemand) -> float:
        """How many workers fit on the nodes that an autoscaler may still add; infinite if unknown."""
        return math.fsum(count for _, count in self._growing(demand))

    def _growing(self, demand: AttemptDemand) -> Iterator[tuple[Node, float]]:
        """By kind of node."""
        for kind in self._maximum:
            if not _may_hold(kind, demand):
                continue
            num_there = sum(_is_alike(node, kind) for node in self.machines.nodes)
            num_nodes = math.inf if kind.max_count is None else max(0, kind.max_count - num_there)
            yield kind, num_nodes * count_workers(demand.worker, amount_of(kind.resources))

    def _names(self, places: frozenset[int]) -> tuple[str, ...]:
        return tuple(sorted(self.machines.names[place] for place in places))

    def _num_workers(self, demand: AttemptDemand, places: frozenset[int]) -> int:
        """Workers of an attempt that fit into the largest zone when it is empty."""
        return max(self._zone_workers(demand, zone) for zone in self._by_zone(demand, places))

    def _zone_workers(self, demand: AttemptDemand, places: frozenset[int]) -> int:
        return sum(count_workers(demand.worker, self.machines.totals[place]) for place in places)

    def _by_zone(self, demand: AttemptDemand, places: frozenset[int]) -> list[frozenset[int]]:
        """For a gang, the nodes of each zone, largest capacity first; else all nodes. Never empty.

        Between zones, gradients are slow and traffic is charged.
        """
        if demand.num_workers == 1 or self.machines.is_pool:
            return [places]
        zones: dict[str, set[int]] = {}
        for place in places:
            zones.setdefault(self._zones[place], set()).add(place)
        if len(zones) < _SEVERAL:
            return [places]
        found = [frozenset(zone) for _, zone in sorted(zones.items())]
        return sorted(found, key=lambda zone: -self._zone_workers(demand, zone))


def _in_largest_zone(zones: Mapping[str, float]) -> float:
    """Nodes of an unknown zone count in each."""
    known = max((count for zone, count in zones.items() if zone), default=0.0)
    return known + zones.get("", 0.0)


def _may_hold(kind: Node, demand: AttemptDemand) -> bool:
    return kind.suits(demand.resources) and count_workers(demand.worker, amount_of(kind.resources)) > 0


def _num_displaced(worker: Amount, taken: Amount) -> int:
    """How many workers would fit where so much is taken."""
    return max((-(-most // one) for one, most in zip(worker, taken, strict=True) if one), default=0)


def _is_alike(node: Node, kind: Node) -> bool:
    """Whether a node is of a kind: shape, market, accelerator, zone. Memory may differ slightly from what was asked."""
    if node.is_head or (kind.accelerator and kind.accelerator.casefold() != node.accelerator.casefold()):
        return False
    zone = kind.labels.get(ZONE_LABEL)
    same = (node.resources.gpus, node.resources.cpus, node.is_spot)
    is_here = not zone or node.labels.get(ZONE_LABEL) == zone
    return is_here and same == (kind.resources.gpus, kind.resources.cpus, kind.is_spot)


def _largest(nodes: Sequence[Node]) -> list[Resources]:
    """Shapes that do not fit into another one, those with most GPUs first."""
    shapes = {node.resources.bare for node in nodes} or {Resources(cpus=0.0)}
    top = [shape for shape in shapes if not any(other != shape and _fits(shape, other) for other in shapes)]
    return sorted(top, key=lambda node: (node.gpus, node.cpus, node.memory_gib), reverse=True)


def _fits(shape: Resources, other: Resources) -> bool:
    return count_workers(amount_of(shape), amount_of(other)) > 0
