"""The nodes of a cluster and the runners that wait on them, as one small object: for people to look at, never truth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.json_text import parse_json
from orchestrator.state.codec import decode_value
from orchestrator.state.nodes import Node
from orchestrator.storage.bounds import PROGRESS_BYTES
from orchestrator.storage.layout import nodes_name
from orchestrator.storage.protocol import ObjectStore

WRITE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePresence:
    """One node that is there."""

    name: str
    cpus: float = 0.0
    gpus: float = 0.0
    accelerator: str = ""
    is_spot: bool = False
    is_leaving: bool = False
    """Whether it is about to go, and takes nothing new."""
    idle_runners: int = 0
    """Runners that wait there for their next attempt, and hold what they were started with."""


class PresenceBoard:
    """Writes the nodes of one cluster whenever something about them has changed, and not more often than it should."""

    def __init__(self, store: ObjectStore, cluster: str) -> None:
        self._store = store
        self._name = nodes_name(cluster)
        self._written: list[NodePresence] | None = None
        self._write_at_s = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return now >= self._write_at_s

    def show(self, machines: Sequence[Node], idle_runners: Mapping[str, int], now: float) -> None:
        """Write how it is now, unless that is known."""
        self._write_at_s = now + WRITE_EVERY_S
        found = [_presence(node, idle_runners.get(node.name, 0)) for node in machines if node.name and node.is_alive]
        if found != self._written:
            document = {"at_s": now, "nodes": [asdict(one) for one in found]}
            self._store.put(self._name, json.dumps(document).encode())
            self._written = found


def read_presence(store: ObjectStore, cluster: str) -> tuple[NodePresence, ...]:
    """The nodes as they were told last; none where nobody told, or where that cannot be read."""
    try:
        document = parse_json(store.get(nodes_name(cluster), max_bytes=PROGRESS_BYTES))
        return tuple(decode_value(NodePresence, one) for one in document["nodes"])
    except (OrchestratorError, ValueError, TypeError, LookupError, AttributeError):
        return ()


def _presence(node: Node, idle_runners: int) -> NodePresence:
    return NodePresence(
        name=node.name,
        cpus=node.resources.cpus,
        gpus=node.resources.gpus,
        accelerator=node.accelerator,
        is_spot=node.is_spot,
        is_leaving=node.leaves_at_s is not None,
        idle_runners=idle_runners,
    )
