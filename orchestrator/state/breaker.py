"""When a sweep's jobs all fail alike, and when a node is at fault. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from orchestrator.errors import FailureKind
from orchestrator.state.commands import ExcludeNode
from orchestrator.state.job_view import Failure
from orchestrator.state.machines import Machines
from orchestrator.state.signatures import signature_of
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.sweep_index import SweepIndex

SUSPECT = frozenset({FailureKind.HANG, FailureKind.TIMEOUT, FailureKind.UNKNOWN, FailureKind.NODE_LOST})
"""Kinds that may be a node's fault."""
WINDOW_S = 6 * 3600.0
MIN_JOBS = 3
"""Different jobs that must fail on a node; one is enough where the failure's text blames the hardware."""
UNLIKE_OTHERS = 3.0
"""How many times as many as on the average node: where jobs fail everywhere, no node is to blame."""
EXCLUDED_S = 3600.0
REPEATED_S = 4 * EXCLUDED_S
"""A node that fails again soon after it was let back in stays out for longer."""
MAX_EXCLUDED = 0.1
"""Part of the nodes, and at least one of several."""


def trip_reason(index: SweepIndex) -> str:
    """Why the sweep should stop: the first jobs of a kind all failed in the same way; empty if it should not."""
    limit = index.plan.policy.breaker
    for (kind, failure, text), names in sorted(index.failures.alike.items()):
        if limit and len(names) >= limit and not index.failures.succeeded.get(kind):
            return (
                f"{len(names)} {kind} jobs failed in the same way and none has succeeded "
                f"(policy.breaker={limit}): {failure}: {text}; the first is "
                f"{min(names, key=index.places.__getitem__)}. Repair the cause and resubmit the sweep"
            )
    return ""


def excluded_nodes(snapshots: Iterable[Snapshot], now: float) -> dict[str, float]:
    """Nodes to keep away from, and until when."""
    found: dict[str, float] = {}
    for snapshot in snapshots:
        for node, exclusion in snapshot.excluded.items():
            if exclusion.until_s > now:
                found[node] = max(found.get(node, 0.0), exclusion.until_s)
    return found


def exclusions(
    indexes: Sequence[SweepIndex], machines: Machines, excluded: Collection[str], now: float
) -> Iterator[ExcludeNode]:
    """Nodes on which different jobs failed lately, more than elsewhere; never more than a tenth of the cluster, those
    that are left out already among them.
    """
    num_nodes = 0 if machines.is_pool else len(machines.names)
    already = machines.places.keys() & excluded
    room = max(1, int(MAX_EXCLUDED * num_nodes)) - len(already)
    failed = {node: _recent(indexes, node, now) for node in _nodes_with_failures(indexes)}
    total = sum(len(failures) for failures in failed.values())
    for node in sorted(failed, key=lambda node: (-len(failed[node]), node)):
        if num_nodes < 2 or room <= 0 or node in already or node not in machines.places:
            continue
        reason = _blame(failed[node], (total - len(failed[node])) / (num_nodes - 1))
        if reason:
            room -= 1
            index = next(one for one in indexes if node in one.failures.by_node)
            until_s = now + _sentence_s(indexes, node, now)
            told = f"node {node} is left out for {(until_s - now) / 3600.0:g} h: {reason}"
            yield ExcludeNode(sweep=index.plan.sweep, node=node, reason=told, until_s=until_s)


def _nodes_with_failures(indexes: Iterable[SweepIndex]) -> set[str]:
    return {node for index in indexes for node, failures in index.failures.by_node.items() if failures}


def _recent(indexes: Iterable[SweepIndex], node: str, now: float) -> dict[tuple[str, str], Failure]:
    """Latest failures of different jobs on a node that may be its fault and came after it was last let back in."""
    since_s = now - WINDOW_S
    for index in indexes:
        if node in index.snapshot.excluded:
            since_s = max(since_s, index.snapshot.excluded[node].until_s)
    return {
        (index.plan.sweep, job): failure
        for index in indexes
        for job, failure in index.failures.by_node.get(node, {}).items()
        if failure.at_s > since_s and failure.kind in SUSPECT
    }


def _blame(failures: dict[tuple[str, str], Failure], elsewhere: float) -> str:
    for _, failure in sorted(failures.items()):
        signature = signature_of(failure.message)
        if signature is not None and signature.blames_node:
            return f"{signature.name}: {failure.message.partition(chr(10))[0][:200]}"
    if len(failures) >= MIN_JOBS and len(failures) > UNLIKE_OTHERS * elsewhere:
        kinds = sorted({str(failure.kind) for failure in failures.values()})
        return (
            f"{len(failures)} jobs failed on it in {WINDOW_S / 3600.0:g} h ({', '.join(kinds)}), on the average other "
            f"node {elsewhere:.2g}"
        )
    return ""


def _sentence_s(indexes: Iterable[SweepIndex], node: str, now: float) -> float:
    ends = [index.snapshot.excluded[node].until_s for index in indexes if node in index.snapshot.excluded]
    return REPEATED_S if ends and now - max(ends) < WINDOW_S else EXCLUDED_S
