"""Attempts on nodes that are about to leave: they write a checkpoint while they can, and go on elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.core.contract import Resources
from orchestrator.state.commands import PreemptAttempt
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState

MARGIN_S = 15.0
"""An attempt that says it ends so long before its node does is left alone: a commit takes seconds."""


def withdrawals(
    snapshots: Sequence[Snapshot],
    nodes: Sequence[Node | Resources],
    *,
    remaining_s: Mapping[str, float],
    whereabouts: Mapping[str, str],
    now: float,
) -> Iterator[PreemptAttempt]:
    """Preemptions of the attempts that a leaving node would take along, each asked for once.

    Args:
        snapshots: sweeps with live attempts.
        nodes: of the cluster.
        remaining_s: by attempt, the seconds that it says it will still take.
        whereabouts: by attempt, the node on which it is; of those that were sent to none, for which the cluster grew.
        now: unix seconds.
    """
    leaving = {one.name: one.leaves_at_s for one in nodes if isinstance(one, Node) and one.leaves_at_s is not None}
    if not leaving:
        return
    for snapshot in snapshots:
        if snapshot.state is SweepState.CANCELLING:
            continue  # they are asked to end anyway
        for attempt in snapshot.live_attempts:
            told = attempt.nodes or (whereabouts.get(attempt.attempt_id, ""),)
            left_s, node = _time_left(told, leaving, now)
            if not node or attempt.preempting_at_s is not None or attempt.attempt_id in snapshot.leaving:
                continue
            if remaining_s.get(attempt.attempt_id, math.inf) + MARGIN_S > left_s or math.isinf(left_s):
                yield PreemptAttempt(sweep=snapshot.sweep, attempt_id=attempt.attempt_id, reason=_reason(node, left_s))


def _time_left(nodes: Sequence[str], leaving: Mapping[str, float], now: float) -> tuple[float, str]:
    """Until the first of an attempt's nodes is gone, and which one; an empty name if none of them leaves."""
    ends = [(leaving[name] - now, name) for name in nodes if name in leaving]
    return min(ends, default=(math.inf, ""))


def _reason(node: str, left_s: float) -> str:
    when = "leaves the cluster" if math.isinf(left_s) else f"will be gone in {max(0.0, left_s):.0f} s"
    return f"node {node} {when}: its attempts write a checkpoint and go on elsewhere"
