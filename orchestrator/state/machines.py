"""The nodes of a cluster as the scheduler counts them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.contract import Resources
from orchestrator.state.amounts import Amount, amount_of, total_of
from orchestrator.state.nodes import Node


@dataclass(slots=True, init=False)
class Machines:
    """The nodes of a cluster as columns, those with the fewest GPUs first; or all of it as one pool.

    It is a pool where the nodes have no names: then only sizes are known, and room is counted over the whole cluster.
    """

    nodes: tuple[Node, ...]
    is_pool: bool
    names: tuple[str, ...]
    places: dict[str, int]
    totals: list[Amount]
    whole: Amount
    """All of it together."""
    leaving: tuple[Node, ...]
    """Those that are about to go: nothing is sent there."""
    lost: tuple[Node, ...]
    """Those that are not alive and may come back."""

    def __init__(self, nodes: tuple[Node | Resources, ...], total: Resources) -> None:
        known = [node if isinstance(node, Node) else Node(resources=node) for node in nodes]
        staying = [node for node in known if node.is_alive and node.leaves_at_s is None]
        self.leaving = tuple(node for node in known if node.is_alive and node.leaves_at_s is not None)
        self.lost = tuple(node for node in known if not node.is_alive)
        alive = [node for node in staying if node.resources.cpus > 0 or node.resources.gpus > 0]
        self.is_pool = not alive or any(not node.name for node in alive)
        self.whole = amount_of(total)
        if self.is_pool:
            self.nodes = tuple(alive)
            self.names, self.totals = ("",), [self.whole]
        else:
            # Spot nodes first: those that stay are kept for attempts that refuse to run on spot ones.
            alive.sort(key=lambda node: (node.resources.gpus, not node.is_spot, node.name))
            self.nodes = tuple(alive)
            self.names = tuple(node.name for node in alive)
            self.totals = [amount_of(node.resources) for node in alive]
            self.whole = total_of(self.totals)
        self.places = {name: place for place, name in enumerate(self.names)}

    def suitable(self, asked: Resources) -> list[int]:
        """Places of the nodes that are of the sort asked for."""
        if self.is_pool:
            return [0] if not self.nodes or any(node.suits(asked) for node in self.nodes) else []
        return [place for place, node in enumerate(self.nodes) if node.suits(asked)]
