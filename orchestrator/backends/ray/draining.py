"""Nodes that are about to leave, from Ray's own record of drains, for all causes of drains.

A node is drained by a preemption notice that our watcher saw, by ``ray start --block`` on SIGTERM (the end of a pod or
of an allocation), by an autoscaler, or by hand with ``ray drain-node``. Ray then starts nothing more on it, and a
drained node without work ends itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.errors import OrchestratorError

_TIMEOUT_S = 5.0


class DrainError(OrchestratorError):
    """Ray could not be informed that a node leaves."""


class UnreachableError(DrainError):
    """Ray's control store did not answer; a repeated request may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A living node of a Ray cluster."""

    node_id: str
    address: str
    host: str
    is_head: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def leaving_nodes() -> dict[str, float]:
    """Ray's ids of nodes that are being drained, with the time when they will be gone: unix seconds, inf = unknown.

    A request to Ray's control store; this process must be connected to Ray.
    """
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes() or {}
    return {node_id: deadline_ms / 1000.0 if deadline_ms else math.inf for node_id, deadline_ms in found.items()}


class ControlStore:
    """A client of Ray's control store that does not join the cluster as a driver, which would take seconds."""

    def __init__(self, address: str) -> None:
        """``address`` is host:port of the head. Raises ``UnreachableError`` if nothing answers there."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled

        self._address = address
        try:
            self._client: Any = GcsClient(address=address)
        except Exception as error:
            raise UnreachableError(
                f"no Ray cluster answers at {address} ({error}); is Ray running on this node?"
            ) from error

    def nodes(self) -> list[RayNode]:
        """Nodes that are alive. Raises ``UnreachableError`` if there is no answer."""
        try:
            found: dict[Any, Any] = self._client.get_all_node_info(timeout=_TIMEOUT_S)
        except Exception as error:
            raise UnreachableError(f"Ray at {self._address} does not list its nodes ({error})") from error
        return list(_alive(found))

    def drain(self, node_id: str, reason: str, seconds_left: float) -> None:
        """Ask Ray to drain a node that will be gone in so many seconds; a second call changes the deadline only.

        Raises:
            UnreachableError: there is no answer.
            DrainError: Ray refuses.
        """
        from ray.core.generated import autoscaler_pb2

        deadline_ms = int((time.time() + seconds_left) * 1000)
        # The only reason that Ray never refuses.
        kind = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined] # generated
        try:
            is_accepted, refusal = self._client.drain_node(node_id, kind, reason, deadline_ms, timeout=_TIMEOUT_S)
        except Exception as error:
            raise UnreachableError(
                f"Ray at {self._address} did not learn that node {node_id} leaves ({error})"
            ) from error
        if not is_accepted:
            raise DrainError(f"Ray at {self._address} refuses to drain node {node_id}: {refusal}")


def _alive(found: dict[Any, Any]) -> Iterator[RayNode]:
    for node in found.values():
        if node.state == 0:  # GcsNodeInfo.ALIVE
            yield RayNode(
                node_id=node.node_id.hex(),
                address=node.node_manager_address,
                host=node.node_manager_hostname,
                is_head=node.is_head_node,
                labels=dict(node.labels),
            )
