"""Checks of nodes: an excluded node comes back after a passed check, not only after some time.

A node with GPUs is checked when it is first seen without an attempt, so before its first gang, and when it is excluded
for failures. A node that fails stays excluded and is checked again; if no check is possible, the exclusion ends after
its time. In the journal both are ``NodeExcluded``: with an end in the future, or now, as older readers expect.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from orchestrator.backends.protocol import Backend
from orchestrator.controller.owned_sweeps import OwnedSweep, OwnedSweeps
from orchestrator.core.clocks import is_time
from orchestrator.scheduling.node_exclusion import MAX_EXCLUDED, REPEATED_S, excluded_nodes
from orchestrator.state import events

RECHECK_S = 900.0
"""Seconds between two checks of an excluded node."""
_LOG = logging.getLogger(__name__)


@runtime_checkable
class ChecksNodes(Protocol):
    """A backend that can check its nodes."""

    def check_node(self, name: str, store_uri: str) -> None:
        """Begin to check a node, once nothing else holds its GPUs; no effect on a node that is being checked."""

    def checked_nodes(self) -> Mapping[str, str]:
        """Nodes whose checks have ended since the last call, and what is wrong with them; empty = nothing."""


class NodeHealth:
    """Starts checks and records what they found. A new controller does not know earlier checks."""

    def __init__(self, backend: Backend, store_uri: str) -> None:
        self._backend, self._store_uri = backend, store_uri
        self._checked_at_s: dict[str, float] = {}
        self._faults: dict[str, str] = {}
        """Results that are in no journal yet."""
        self._logged_as_full: set[str] = set()
        """Nodes with faults that stay in use because too many are excluded: logged once."""

    def follow(self, owned: OwnedSweeps, now: float) -> None:
        """Start and collect checks; called in each round of a controller."""
        backend = self._backend
        if not isinstance(backend, ChecksNodes):
            return
        for node, fault in backend.checked_nodes().items():
            if fault:
                self._faults[node] = fault
            else:
                self._forget(node)
                self._readmit(owned, node, now)
        self._leave_out(owned, now)
        snapshots = owned.snapshots()
        if not owned.active():
            return  # no job waits for nodes; GPUs of an idle cluster are left alone
        excluded = excluded_nodes(snapshots, now)
        live = [attempt for one in snapshots for attempt in one.live_attempts if attempt.resources.gpus]
        busy = {node for attempt in live for node in attempt.nodes}
        for machine in self._backend.capacity().machines:
            if (
                machine.resources.gpus
                and machine.leaves_at_s is None
                and self._is_due(machine.name, excluded, busy, now)
            ):
                self._checked_at_s[machine.name] = now
                backend.check_node(machine.name, self._store_uri)

    def _is_due(self, node: str, excluded: Collection[str], busy: Collection[str], now: float) -> bool:
        last_s = self._checked_at_s.get(node)
        if node in busy:
            # A running attempt shows that the node works; a check of all its GPUs would wait for the attempt's end.
            self._checked_at_s.setdefault(node, now)
            return False
        is_suspect = node in excluded or node in self._faults
        return last_s is None or (is_suspect and is_time(last_s + RECHECK_S, now, RECHECK_S))

    def _readmit(self, owned: OwnedSweeps, node: str, now: float) -> None:
        reason = f"node {node} is used again: it has passed its check"
        for owned_sweep in _who_excludes(owned, node, now):
            self._append(owned, owned_sweep, node, reason, now, until_s=now)

    def _leave_out(self, owned: OwnedSweeps, now: float) -> None:
        """Not more nodes than the limit of exclusions: a failure on all nodes is no fault of the nodes."""
        names = {machine.name for machine in self._backend.capacity().machines} if self._faults else set()
        most = max(1, int(MAX_EXCLUDED * len(names)))
        until_s = now + REPEATED_S
        for node, fault in list(self._faults.items()):
            excluded = _excluded(owned, now)
            if node not in excluded and len(names & excluded.keys()) >= most:
                if node not in self._logged_as_full:
                    self._logged_as_full.add(node)
                    _LOG.warning("node %s stays in use, %d are excluded already: %s", node, most, fault)
                continue
            reason = f"node {node} is excluded until it passes a check: {fault}"
            for owned_sweep in _who_excludes(owned, node, now) or owned.active()[:1]:
                self._append(owned, owned_sweep, node, reason, now, until_s=until_s)
            if _excluded(owned, now).get(node, 0.0) >= until_s:  # else the append failed: repeat it in the next round
                self._forget(node)

    def _forget(self, node: str) -> None:
        self._faults.pop(node, None)
        self._logged_as_full.discard(node)

    def _append(
        self, owned: OwnedSweeps, owned_sweep: OwnedSweep, node: str, reason: str, now: float, *, until_s: float
    ) -> None:
        with owned.guard(owned_sweep.snapshot.sweep):
            event = events.NodeExcluded(at_s=now, node=node, reason=reason, until_s=until_s)
            owned.append(owned_sweep, [event])


def _excluded(owned: OwnedSweeps, now: float) -> dict[str, float]:
    return excluded_nodes(owned.snapshots(), now)


def _who_excludes(owned: OwnedSweeps, node: str, now: float) -> list[OwnedSweep]:
    names = [snapshot.sweep for snapshot in owned.snapshots() if node in excluded_nodes([snapshot], now)]
    return [found for name in names if (found := owned.read_again(name)) is not None]
