"""Which nodes are at fault for failures and are excluded for some time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from orchestrator.core.errors import FailureKind
from orchestrator.scheduling.commands import ExcludeNode
from orchestrator.scheduling.placement import Machines
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state.failure_policy import FULL_DISK, POLICY, is_same_step, signature_of
from orchestrator.state.snapshot import Failure, JobView, Snapshot
from orchestrator.state.transitions import JobState

WINDOW_S = 6 * 3600.0
MIN_JOBS = 3
"""Number of different jobs that must fail on a node; one is enough if the failure's text blames the hardware."""
UNLIKE_OTHERS = 3.0
"""Least ratio to the failures of the average node: if jobs fail everywhere, no node is at fault."""
EXCLUDED_S = 3600.0
REPEATED_S = 4 * EXCLUDED_S
"""A node that fails again soon after its exclusion is excluded for longer."""
MAX_EXCLUDED = 0.1
"""Largest part of the nodes that is excluded, and at least one of several."""
OUTAGE_S = 300.0
"""Periods of this length are compared: an outage of the store fails jobs for as long as they are tried again."""


def excluded_nodes(snapshots: Iterable[Snapshot], now: float) -> dict[str, float]:
    """Excluded nodes, and until when."""
    found: dict[str, float] = {}
    for snapshot in snapshots:
        for node, exclusion in snapshot.excluded.items():
            if exclusion.until_s > now:
                found[node] = max(found.get(node, 0.0), exclusion.until_s)
    return found


def exclusions(
    indexes: Sequence[SweepIndex],
    machines: Machines,
    excluded: Collection[str],
    now: float,
    *,
    steps: Mapping[str, int] | None = None,
    former: Sequence[Snapshot] = (),
    held: Collection[str] = (),
) -> Iterator[ExcludeNode]:
    """Nodes on which different jobs failed lately, more than elsewhere, or that computed what a replay did not; never
    more than a tenth of the cluster, including those that are excluded already. To be carried out before the ends of
    sweeps: one that has ended takes no more news.

    ``steps``: by attempt, the training step that it has reached. ``former``: ended sweeps, whose exclusions count, too.
    ``held``: sweeps that take no news now; another one records what they found out.
    """
    num_nodes = 0 if machines.is_pool else len(machines.names)
    already = machines.places.keys() & excluded
    most = max(1, int(MAX_EXCLUDED * num_nodes))
    room, outages = most - len(already), _outages(indexes, most)
    ends = _latest_ends([*(index.snapshot for index in indexes), *former])
    failed = {
        node: _recent(indexes, node, max(now - WINDOW_S, ends.get(node, 0.0)), outages)
        for node in _nodes_with_failures(indexes)
        if node in machines.places  # spot nodes that are gone would raise the mean of those that are there
    }
    refuted = _refuted(indexes, steps or {}, ends)
    total = sum(len(failures) for failures in failed.values())
    failed |= {node: {} for node in refuted.keys() - failed.keys()}
    for node in sorted(failed, key=lambda node: (-len(failed[node]), node)):
        if num_nodes < 2 or room <= 0 or node in already or node not in machines.places:
            continue
        sweep, reason = refuted.get(node, ("", ""))
        reason = reason or _blame(failed[node], (total - len(failed[node])) / (num_nodes - 1))
        if reason:
            room -= 1
            sweep = sweep or next(one.plan.sweep for one in indexes if node in one.failures.by_node)
            if sweep in held:
                sweep = next((one.plan.sweep for one in indexes if one.plan.sweep not in held), sweep)
            until_s = now + (REPEATED_S if node in ends and now - ends[node] < WINDOW_S else EXCLUDED_S)
            notice = f"node {node} is excluded for {(until_s - now) / 3600.0:g} h: {reason}"
            yield ExcludeNode(sweep=sweep, node=node, reason=notice, until_s=until_s)


def _nodes_with_failures(indexes: Iterable[SweepIndex]) -> set[str]:
    return {node for index in indexes for node, failures in index.failures.by_node.items() if failures}


def _outages(indexes: Iterable[SweepIndex], most: int) -> set[int]:
    """Numbers of the periods around which jobs met a full disk on more than so many nodes: they share that disk."""
    nodes: defaultdict[int, set[str]] = defaultdict(set)
    for index in indexes:
        for node, failures in index.failures.by_node.items():
            for failure in failures.values():
                if _is_full_disk(index, failure):
                    number = _period_of(failure)
                    for near in (number - 1, number, number + 1):
                        nodes[near].add(node)
    return {number for number, found in nodes.items() if len(found) > most}


def _period_of(failure: Failure) -> int:
    return int(failure.at_s // OUTAGE_S)


def _is_full_disk(index: SweepIndex, failure: Failure) -> bool:
    """Whether a disk of its node was full. A store that is full, or does not answer, says nothing of a node: jobs
    elsewhere may just not have needed it meanwhile.
    """
    store, message = index.plan.store_uri, failure.message
    if failure.kind is not FailureKind.STORAGE or (store and store in message):
        return False
    signature = signature_of(message)
    return signature is not None and signature.name == FULL_DISK


def _may_blame_node(index: SweepIndex, failure: Failure, outages: Collection[int]) -> bool:
    """Whether it counts against its node. A full disk does, unless many nodes met one: it is one that they share."""
    if _is_full_disk(index, failure):
        return _period_of(failure) not in outages
    return POLICY[failure.kind].may_blame_node


def _recent(
    indexes: Iterable[SweepIndex], node: str, since_s: float, outages: Collection[int]
) -> dict[tuple[str, str], Failure]:
    """Latest failures of different jobs on a node that may be its fault."""
    return {
        (index.plan.sweep, job): failure
        for index in indexes
        for job, failure in index.failures.by_node.get(node, {}).items()
        if failure.at_s > since_s and _may_blame_node(index, failure, outages)
    }


def _latest_ends(snapshots: Iterable[Snapshot]) -> dict[str, float]:
    """When the latest exclusion of each node ends or ended. What failed before is settled."""
    ends: dict[str, float] = {}
    for snapshot in snapshots:
        for node, exclusion in snapshot.excluded.items():
            ends[node] = max(ends.get(node, 0.0), exclusion.until_s)
    return ends


def _refuted(
    indexes: Sequence[SweepIndex], steps: Mapping[str, int], ends: Mapping[str, float]
) -> dict[str, tuple[str, str]]:
    """Nodes that computed wrong numbers where a replay of the same steps computed right ones: sweep and reason."""
    found: dict[str, tuple[str, str]] = {}
    for index in indexes:
        for view in index.failures.numerics.values():
            for failure, how in _not_repeated(view, steps):
                # However long ago, since a replay may take weeks: only what came before an exclusion is settled.
                if failure.node and failure.at_s > ends.get(failure.node, 0.0):
                    wrong = failure.message.partition("\n")[0][:100]
                    gpus = f" (GPU {', '.join(failure.gpus)})" if failure.gpus else ""
                    reason = f"it computed wrong numbers{gpus}: {view.name} failed there ({wrong}), {how}"
                    found[failure.node] = index.plan.sweep, reason
    return found


def _not_repeated(view: JobView, steps: Mapping[str, int]) -> Iterator[tuple[Failure, str]]:
    """Failures of numerics that were the node's fault, and the evidence."""
    for first, later in pairwise(view.numerics):
        if is_same_step(first, later):
            continue
        # The attempt that failed earlier in the training did so where the other one had passed.
        wrong, other = sorted((first, later), key=lambda failure: failure.step or 0)
        yield wrong, f"and an attempt on {other.node or 'other nodes'} passed that step"
    last = view.numerics[-1]
    if view.state is JobState.SUCCEEDED:
        yield last, "and the attempt after it did not"
    elif view.attempt is not None and last.step is not None:
        step = steps.get(view.attempt.attempt_id, 0)
        if step > last.step and not is_same_step(last, replace(last, step=step)):
            yield last, f"and the attempt after it is past that step, at {step}"


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
