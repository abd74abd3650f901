"""Market, accelerator and price of the nodes of attempts, remembered for the life of a controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.backends.protocol import AttemptReport, Capacity
from orchestrator.core.contract import Resources
from orchestrator.state.events import (
    AttemptPlaced,
    Event,
    NodeDescribed,
)
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.state.spending import PricedAllocation, priced_allocations


class NodePricing:
    """Market, accelerator and price of every node that this controller has seen.

    Remembered, because Ray does not describe a node that is gone.
    """

    def __init__(self) -> None:
        self._host: Node | None = None
        self._machines: tuple[Node, ...] = ()
        self._nodes: dict[str, Node] = {}

    def look(self, capacity: Capacity) -> None:
        """Remember the cluster's present nodes. Once per decision, which may lead to thousands of launches."""
        self._host = capacity.host
        if capacity.machines is not self._machines:
            self._machines = capacity.machines
            self._nodes.update({node.name: node for node in self._machines if node.name})

    def allocations(self, nodes: Sequence[str], resources: Resources, num_workers: int) -> tuple[PricedAllocation, ...]:
        """Allocations of an attempt on these nodes; empty if one of them is unknown. See ``priced_allocations``.

        Without nodes it runs on the backend's one machine, if it has only one.
        """
        if not nodes:
            return () if self._host is None else (_allocation_on(self._host, num_workers),)
        return priced_allocations(nodes, self._nodes, resources, num_workers)

    def placement_events(self, snapshot: Snapshot, reports: Mapping[str, AttemptReport], now: float) -> list[Event]:
        """Events with placement and hardware of attempts, as far as their launch did not have them; once each."""
        own = [(attempt, reports.get(attempt.attempt_id)) for attempt in snapshot.live_attempts]
        placed = [self._placed(attempt, report, now) for attempt, report in own]
        machines = {node: machine for _, report in own if report for node, machine in report.machines.items()}
        described = [
            NodeDescribed(at_s=now, node=node, machine=machine)
            for node, machine in machines.items()
            if node not in snapshot.nodes
        ]
        return [*described, *(event for event in placed if event is not None)]

    def _placed(self, attempt: Attempt, report: AttemptReport | None, now: float) -> AttemptPlaced | None:
        if report is None or (attempt.lots and not _is_elsewhere(attempt, report)):
            return None
        has_got_room = attempt.awaits_room and report.placed_for_s is not None
        nodes = report.worker_nodes or ((report.node,) if report.node and attempt.num_workers == 1 else ())
        lots = self.allocations(nodes, attempt.resources, attempt.num_workers) if nodes else ()
        if not has_got_room and (not lots or lots == attempt.lots or attempt.awaits_room):
            return None
        return AttemptPlaced(
            at_s=now,
            job=attempt.job,
            attempt_id=attempt.attempt_id,
            nodes=nodes,
            lots=lots,
            since_s=(report.placed_for_s or 0.0) if has_got_room else 0.0,
        )


def _allocation_on(host: Node, num_workers: int) -> PricedAllocation:
    return PricedAllocation(num_workers=num_workers, accelerator=host.accelerator, is_spot=host.is_spot)


def _is_elsewhere(attempt: Attempt, report: AttemptReport) -> bool:
    """Whether it runs elsewhere than planned, because its node was gone."""
    return bool(report.node) and len(attempt.nodes) == 1 and report.node != attempt.nodes[0]
