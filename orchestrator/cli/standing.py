"""Where a sweep stands, in words: what it waits for, what it has used of its budget, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from orchestrator.cli.money import cost_document, cost_lines, hours_left, sweep_bill
from orchestrator.cli.pace import Pacer, durations_of, pace_of
from orchestrator.core.contract import Progress
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.units import format_duration, format_money, format_percent
from orchestrator.planning.estimate.costs import PriceTable
from orchestrator.planning.estimate.eta import TimeLeft
from orchestrator.scheduling.budgets import WARN_AT, overdue, time_left_s
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.state.spending import Bill
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import inbox_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import LiveProgress, read_progress, read_trouble, read_warnings
from orchestrator.sweeps.lease import LeaseState, read_lease
from orchestrator.sweeps.quotas import ANYBODY, Cap, read_quotas

MAX_LINES = 20
"""Of running jobs, and of reasons to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A sweep's snapshot beside all that the store knows of the present moment."""

    snapshot: Snapshot
    progress: Mapping[str, LiveProgress] = field(default_factory=dict)
    """As written; ``running`` and ``waits`` are what is still true of it."""
    lease: LeaseState | None = None
    warnings: tuple[str, ...] = ()
    """Of the controller, about budgets, deadlines and nodes."""
    num_messages: int = 0
    """Messages of clients that nobody has followed yet."""
    left: TimeLeft | None = None
    """None = it has ended, no controller serves it, or nobody can tell."""
    left_on: str = ""
    """What the time left was scheduled on."""
    shut: str = ""
    """Bound of its user under which jobs of it never start; empty = none."""
    now: float = 0.0
    prices: PriceTable | None = None
    """For what ran on nodes that tell no price."""

    @property
    def is_served(self) -> bool:
        """Whether a controller renews its lease."""
        return self.lease is not None and self.lease.expires_at_s > self.now

    @property
    def running(self) -> dict[str, Progress]:
        """Progress of the attempts that are live now; of those that have not reported, none but their names."""
        found = {}
        for name in self.snapshot.jobs.running:
            attempt, line = self.snapshot.jobs[name].attempt, self.progress.get(name)
            if attempt is not None and attempt.awaits_room:
                found[name] = Progress(phase=_room_waited_for(attempt, self.now))
                continue
            is_its_own = attempt is not None and line is not None and line.attempt_id == attempt.attempt_id
            found[name] = line.progress if is_its_own and line is not None else Progress(phase="starting")
        return found

    @property
    def waits(self) -> dict[str, str]:
        """Why pending jobs wait, as the controller last told."""
        jobs = self.snapshot.jobs
        return {
            name: line.progress.phase
            for name, line in self.progress.items()
            if not line.attempt_id and name in jobs and jobs[name].state is JobState.PENDING
        }


def _room_waited_for(attempt: Attempt, now: float) -> str:
    """``waits for room for 8 CPU, 8 GPU (8 workers) since 14:02 (1h40m): the cluster has none yet``."""
    workers = f" ({attempt.num_workers} workers)" if attempt.num_workers > 1 else ""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(attempt.launched_at_s))
    waited = format_duration(max(0.0, now - attempt.launched_at_s))
    return f"waits for room for {attempt.resources}{workers} since {since} ({waited}): the cluster has none yet"


def read_standing(
    store: ObjectStore, snapshot: Snapshot, pacer: Pacer | None = None, prices: PriceTable | None = None
) -> Standing:
    """Read the present moment of a sweep; the time left is that of ``pacer``, without one it is computed here."""
    progress, now = read_progress(store, snapshot.sweep), time.time()
    standing = Standing(
        snapshot=snapshot,
        progress=progress,
        lease=read_lease(store, snapshot.cluster) if snapshot.cluster else None,
        warnings=(() if snapshot.state.is_final else read_warnings(store, snapshot.sweep))
        + read_trouble(store, snapshot.sweep),
        num_messages=len(store.list_children(inbox_folder(snapshot.sweep))),
        now=now,
        prices=prices,
    )
    if not standing.is_served:  # nothing goes on, so that no time is left that would pass
        return standing
    if shut := _shut(store, snapshot):  # nor here
        return replace(standing, shut=shut)
    pace = pacer.look(snapshot, progress) if pacer else pace_of(snapshot, progress, durations_of(snapshot), now)
    return replace(standing, left=pace[0], left_on=pace[1]) if pace else standing


def _shut(store: ObjectStore, snapshot: Snapshot) -> str:
    """Bound of a sweep's user under which pending jobs of it never start; empty without one."""
    owner = snapshot.plan.owner if snapshot.plan is not None else ""
    if snapshot.plan is None or not owner or snapshot.state.is_final:
        return ""
    try:
        quotas = read_quotas(store, snapshot.cluster)
    except OrchestratorError:  # the controller warns of it
        return ""
    cap = quotas.get(owner, quotas.get(ANYBODY, Cap()))
    if cap.max_concurrent != 0 and cap.max_gpus != 0:
        return ""
    pending = [job for job in snapshot.plan.jobs if snapshot.jobs[job.name].state is JobState.PENDING]
    if cap.max_concurrent == 0 and pending:
        return f"user {owner} may run no attempts (max_concurrent=0)"
    if cap.max_gpus == 0 and any(job.resources.gpus for job in pending):
        return f"user {owner} may hold no GPUs (max_gpus=0)"
    return ""


def used_hours(snapshot: Snapshot, now: float) -> tuple[float, float]:
    """GPU-hours and core-hours of all attempts, those that run and those of former revisions included."""
    jobs = snapshot.plan.by_name() if snapshot.plan is not None else {}
    gpu_s, cpu_s = snapshot.spent_gpu_s, snapshot.spent_cpu_s
    for view in snapshot.jobs.values():
        if view.ran_s:
            gpu_s += view.ran_s * jobs[view.name].resources.gpus
            cpu_s += view.ran_s * jobs[view.name].resources.cpus
    for attempt in snapshot.live_attempts:
        ran_s = attempt.ran_s(now)
        gpu_s, cpu_s = gpu_s + ran_s * attempt.resources.gpus, cpu_s + ran_s * attempt.resources.cpus
    return gpu_s / 3600.0, cpu_s / 3600.0


def standing_lines(standing: Standing) -> Iterator[str]:
    """What a person wants to know beside the counts; the most urgent first."""
    snapshot = standing.snapshot
    yield from _control_lines(standing)
    if not snapshot.state.is_final:
        yield from _time_lines(standing)
    yield from _used_lines(standing)
    yield from _wait_lines(standing)


def standing_document(standing: Standing) -> dict[str, Any]:
    """The same for machines."""
    snapshot, left = standing.snapshot, standing.left
    gpu_hours, core_hours = used_hours(snapshot, standing.now)
    return {
        "served": standing.is_served,
        "messages_waiting": standing.num_messages,
        "time_left_s": None if left is None else left.seconds,
        "time_left_on": standing.left_on,
        "gpu_hours": gpu_hours,
        "core_hours": core_hours,
        "gpu_hour_budget": snapshot.plan.policy.gpu_hour_budget if snapshot.plan is not None else None,
        "cost_budget": snapshot.plan.policy.cost if snapshot.plan is not None else None,
        "cost": cost_document(*_cost(standing)),
        "tripped": snapshot.tripped,
        "warnings": list(standing.warnings),
        "paused": snapshot.state is SweepState.PAUSED,
        "priority": _priority(snapshot),
        "owner": snapshot.plan.owner if snapshot.plan is not None else "",
        "waits": standing.waits,
        "waits_for_room": {
            name: {
                "since_s": attempt.launched_at_s,
                "resources": str(attempt.resources),
                "workers": attempt.num_workers,
            }
            for name in snapshot.jobs.running
            if (attempt := snapshot.jobs[name].attempt) is not None and attempt.awaits_room
        },
        "waits_behind": {name: standing.progress[name].num_behind for name in standing.waits},
    }


def _priority(snapshot: Snapshot) -> int:
    if snapshot.priority is not None:
        return snapshot.priority
    return snapshot.plan.policy.priority if snapshot.plan is not None else 0


def _control_lines(standing: Standing) -> Iterator[str]:
    snapshot, sweep = standing.snapshot, standing.snapshot.sweep
    if snapshot.tripped:
        yield f"Stopped by the circuit breaker: {snapshot.tripped}. Submit it again once that is repaired."
    yield from (f"Warning: {warning}" for warning in standing.warnings)
    if snapshot.state is SweepState.PAUSED:
        yield f"Paused: nothing new starts until: orchestrator resume {sweep}"
    if snapshot.state is SweepState.STOPPING:
        yield "Stopping: what runs goes on to its end, nothing else starts."
    if snapshot.state is SweepState.CANCELLING:
        yield "Being cancelled: what runs ends after a checkpoint."
    if not standing.is_served and not snapshot.state.is_final:
        since = f", the last one was seen {_ago(standing)}" if standing.lease is not None else ""
        yield f"No controller serves this sweep{since}: nothing starts until one does; see: orchestrator up"
    if standing.num_messages:
        plural = "s wait" if standing.num_messages > 1 else " waits"
        yield f"{standing.num_messages} message{plural} for the controller (a submit or an order)."
    nodes = [node for node, exclusion in snapshot.excluded.items() if exclusion.until_s > standing.now]
    if nodes and not snapshot.state.is_final:
        yield f"Avoids {len(nodes)} nodes after repeated failures: {', '.join(nodes[:3])}{', ...' if nodes[3:] else ''}"


def _ago(standing: Standing) -> str:
    seen_at_s = standing.lease.expires_at_s if standing.lease is not None else standing.now
    return f"{format_duration(max(0.0, standing.now - seen_at_s))} ago"


def _time_lines(standing: Standing) -> Iterator[str]:
    snapshot, left = standing.snapshot, standing.left
    if left is not None and snapshot.state is SweepState.RUNNING:
        never = f"; {len(left.never)} jobs need more than that" if left.never else ""
        yield f"About {format_duration(left.seconds)} left, on {standing.left_on}{never}"
    elif standing.shut:
        yield f"No time left can be told: {standing.shut}; see: orchestrator quota"
    if snapshot.plan is None:
        return
    policy = snapshot.plan.policy
    late = overdue(policy, snapshot.accepted_at_s, standing.now)
    until_s = time_left_s(policy, snapshot.accepted_at_s, standing.now)
    if late:
        yield f"Nothing starts any more: {late}; move it and submit again."
    elif until_s is not None:
        short = left is not None and left.seconds > until_s
        yield f"{format_duration(until_s)} until the deadline{': not enough at this pace' if short else ''}"


def _used_lines(standing: Standing) -> Iterator[str]:
    gpu_hours, core_hours = used_hours(standing.snapshot, standing.now)
    policy = standing.snapshot.plan.policy if standing.snapshot.plan is not None else Policy()
    if policy.gpu_hour_budget is not None:
        yield _budget_line(standing, policy, gpu_hours, policy.gpu_hour_budget)
    elif gpu_hours or core_hours:
        used = [f"{gpu_hours:,.2f} GPU-hours"] if gpu_hours else []
        used += [f"{core_hours:,.2f} core-hours"] if core_hours else []
        yield f"Used {' and '.join(used)}"
    yield from cost_lines(*_cost(standing))


def _budget_line(standing: Standing, policy: Policy, gpu_hours: float, bound: float) -> str:
    """In the terms in which the scheduler keeps the budget: GPU-hours, or these at the price that the policy says."""
    is_money = bound != policy.gpu_hours
    price = policy.gpu_hour_price if is_money else 1.0
    show = format_money if is_money else "{:,.2f}".format
    used = f"{show(gpu_hours * price)} of {show(bound * price)}"
    used += f" ({gpu_hours:,.2f} GPU-hours at {price:g})" if is_money else " GPU-hours"
    share = f"{format_percent(gpu_hours / bound, digits=0)} %" if bound else "all"
    left = hours_left(standing.snapshot, standing.left.left_s)[0] if _is_all_told(standing.left) else 0.0
    in_all = f", about {show((gpu_hours + left) * price)} in all" if left else ""
    return f"Used {used}, {share} of the budget{in_all}{_verdict(gpu_hours, bound)}"


def _is_all_told(left: TimeLeft | None) -> TypeGuard[TimeLeft]:
    """Whether it is known of all jobs how long they still take."""
    return left is not None and not left.never


def _cost(standing: Standing) -> tuple[Bill, PriceTable | None, float | None]:
    """What it cost so far, by which table, and what it will have cost in the end, if that can be told."""
    snapshot, left = standing.snapshot, standing.left
    bill = sweep_bill(snapshot, standing.prices, standing.now)
    expected = bill.expected(*hours_left(snapshot, left.left_s)) if _is_all_told(left) else None
    return bill, standing.prices, expected


def _verdict(gpu_hours: float, bound: float) -> str:
    if gpu_hours >= bound:
        return ": it is spent, and nothing starts that needs GPUs; raise policy.budget and submit again"
    return ": nearly spent" if gpu_hours >= WARN_AT * bound else ""


def _wait_lines(standing: Standing) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for name, reason in standing.waits.items():
        grouped.setdefault(reason, []).append(name)
    for reason, names in list(grouped.items())[:MAX_LINES]:
        number = len(names) + sum(standing.progress[name].num_behind for name in names)
        plural, more = ("jobs wait", ", ...") if number > 1 else ("job waits", "")
        yield f"{number} {plural} ({names[0]}{more}): {reason.removeprefix('waits: ')}"
    if len(grouped) > MAX_LINES:
        yield f"and {len(grouped) - MAX_LINES} more reasons to wait: `orchestrator status SWEEP -o json` has all"
