"""The status of a sweep, in words: what runs, waits and has failed, how much of its budget is used, how long it takes.

The reason why a ready job does not start comes from ``scheduling.launching``, which decides it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeGuard

from orchestrator.core.contract import Progress
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.units import format_duration, format_money, format_percent
from orchestrator.planning.estimate.eta import TimeLeft
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.scheduling.budgets import WARN_AT, overdue, time_left_s
from orchestrator.services.costs import cost_document, cost_lines, hours_left, sweep_bill
from orchestrator.services.eta import EtaTracker, durations_of, eta_of
from orchestrator.services.settings import Settings
from orchestrator.services.stores import restart_killed
from orchestrator.services.terminal import command_line
from orchestrator.stack.description import read_description
from orchestrator.state.brief_reasons import WHOLE, brief_reason
from orchestrator.state.snapshot import Attempt, JobView, Snapshot
from orchestrator.state.spending import Bill
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import inbox_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import LiveProgress, read_progress, read_trouble, read_warnings
from orchestrator.sweeps.lease import LeaseState, read_lease
from orchestrator.sweeps.ledger import START_A_CONTROLLER
from orchestrator.sweeps.quotas import ANYBODY, Cap, read_quotas

MAX_LINES = 20
"""Of running jobs, and of reasons to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """A sweep's snapshot beside all that the store knows of the present moment."""

    snapshot: Snapshot
    progress: Mapping[str, LiveProgress] = field(default_factory=dict)
    """Progress as stored; ``running`` and ``waits`` are the parts that still apply."""
    lease: LeaseState | None = None
    warnings: tuple[str, ...] = ()
    """The controller's warnings about budgets, deadlines and nodes."""
    num_messages: int = 0
    """Messages of clients that are not handled yet."""
    left: TimeLeft | None = None
    """None = it has ended, no controller serves it, or it is unknown."""
    left_on: str = ""
    """The nodes on which the time left was scheduled."""
    shut: str = ""
    """Limit of its user under which its jobs never start; empty = none."""
    now: float = 0.0
    prices: PriceTable | None = None
    """Prices for nodes without a price label."""

    @property
    def is_served(self) -> bool:
        """Whether a controller renews its lease."""
        return self.lease is not None and self.lease.expires_at_s > self.now

    @property
    def running(self) -> dict[str, Progress]:
        """Progress of the attempts that are live now; attempts that have not reported have only their names."""
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
        """Why pending jobs wait, as last published by the controller."""
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


def load_status(
    store: ObjectStore, snapshot: Snapshot, tracker: EtaTracker | None = None, prices: PriceTable | None = None
) -> SweepStatus:
    """Read the present moment of a sweep; the time left is that of ``tracker``, without one it is computed here."""
    progress, now = read_progress(store, snapshot.sweep), time.time()
    status = SweepStatus(
        snapshot=snapshot,
        progress=progress,
        lease=read_lease(store, snapshot.cluster) if snapshot.cluster else None,
        warnings=(() if snapshot.state.is_final else read_warnings(store, snapshot.sweep))
        + read_trouble(store, snapshot.sweep),
        num_messages=len(store.list_children(inbox_folder(snapshot.sweep))),
        now=now,
        prices=prices,
    )
    if not status.is_served:  # no job runs, so the time left is not defined
        return status
    if shut := _closed_by_quota(store, snapshot):  # neither here
        return replace(status, shut=shut)
    eta = tracker.latest(snapshot, progress) if tracker else eta_of(snapshot, progress, durations_of(snapshot), now)
    return replace(status, left=eta[0], left_on=eta[1]) if eta else status


def _closed_by_quota(store: ObjectStore, snapshot: Snapshot) -> str:
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
    gpu_s, cpu_s = snapshot.spent_gpu_s, snapshot.spent_cpu_s
    for view in snapshot.jobs.values():
        gpu_s, cpu_s = gpu_s + view.gpu_s, cpu_s + view.cpu_s
    for attempt in snapshot.live_attempts:
        ran_s = attempt.ran_s(now)
        gpu_s, cpu_s = gpu_s + ran_s * attempt.resources.gpus, cpu_s + ran_s * attempt.resources.cpus
    return gpu_s / 3600.0, cpu_s / 3600.0


def status_lines(status: SweepStatus, store: str = "") -> Iterator[str]:
    """Lines for people beside the counts; the most urgent first."""
    snapshot = status.snapshot
    yield from _control_lines(status, store)
    if not snapshot.state.is_final:
        yield from _time_lines(status)
    yield from _used_lines(status)
    yield from _wait_lines(status, store)


def present_document(status: SweepStatus) -> dict[str, Any]:
    """The same for machines."""
    snapshot, left = status.snapshot, status.left
    gpu_hours, core_hours = used_hours(snapshot, status.now)
    return {
        "served": status.is_served,
        "messages_waiting": status.num_messages,
        "time_left_s": None if left is None else left.seconds,
        "time_left_on": status.left_on,
        "gpu_hours": gpu_hours,
        "core_hours": core_hours,
        "gpu_hour_budget": snapshot.plan.policy.gpu_hour_budget if snapshot.plan is not None else None,
        "cost_budget": snapshot.plan.policy.cost if snapshot.plan is not None else None,
        "cost": cost_document(*_cost(status)),
        "tripped": snapshot.tripped,
        "warnings": list(status.warnings),
        "paused": snapshot.state is SweepState.PAUSED,
        "priority": _priority(snapshot),
        "owner": snapshot.plan.owner if snapshot.plan is not None else "",
        "waits": status.waits,
        "waits_for_room": {
            name: {
                "since_s": attempt.launched_at_s,
                "resources": str(attempt.resources),
                "workers": attempt.num_workers,
            }
            for name in snapshot.jobs.running
            if (attempt := snapshot.jobs[name].attempt) is not None and attempt.awaits_room
        },
        "waits_behind": {name: status.progress[name].num_behind for name in status.waits},
    }


def _priority(snapshot: Snapshot) -> int:
    if snapshot.priority is not None:
        return snapshot.priority
    return snapshot.plan.policy.priority if snapshot.plan is not None else 0


def _control_lines(status: SweepStatus, store: str) -> Iterator[str]:
    snapshot, sweep = status.snapshot, status.snapshot.sweep
    if snapshot.tripped:
        yield f"Stopped by the circuit breaker: {snapshot.tripped}. Repair the cause, then submit it again."
    yield from (f"Warning: {warning}" for warning in status.warnings)
    if snapshot.state is SweepState.PAUSED:
        yield f"Paused: no job starts until: {command_line('resume', sweep, store=store)}"
    if snapshot.state is SweepState.STOPPING:
        yield "Stopping: running jobs finish, and no other job starts."
    if snapshot.state is SweepState.CANCELLING:
        yield "Being cancelled: running jobs end after a checkpoint."
    if not status.is_served and not snapshot.state.is_final:
        since = f", the last one was seen {_ago(status)}" if status.lease is not None else ""
        yield f"No controller serves this sweep{since}: no job starts until one runs; {START_A_CONTROLLER}"
    if status.num_messages:
        plural = "s wait" if status.num_messages > 1 else " waits"
        yield f"{status.num_messages} message{plural} for the controller (a submit or a request)."
    nodes = [node for node, exclusion in snapshot.excluded.items() if exclusion.until_s > status.now]
    if nodes and not snapshot.state.is_final:
        yield f"Avoids {len(nodes)} nodes after repeated failures: {', '.join(nodes[:3])}{', ...' if nodes[3:] else ''}"


def _ago(status: SweepStatus) -> str:
    seen_at_s = status.lease.expires_at_s if status.lease is not None else status.now
    return f"{format_duration(max(0.0, status.now - seen_at_s))} ago"


def _time_lines(status: SweepStatus) -> Iterator[str]:
    snapshot, left = status.snapshot, status.left
    if left is not None and snapshot.state is SweepState.RUNNING:
        never = f"; {len(left.never)} jobs need more than that" if left.never else ""
        yield f"About {format_duration(left.seconds)} left, on {status.left_on}{never}"
    elif status.shut:
        yield f"The time left cannot be estimated: {status.shut}; see: orchestrator quota"
    if snapshot.plan is None:
        return
    policy = snapshot.plan.policy
    late = overdue(policy, snapshot.accepted_at_s, status.now)
    until_s = time_left_s(policy, snapshot.accepted_at_s, status.now)
    if late:
        yield f"No job starts any more: {late}; set a later deadline and submit again."
    elif until_s is not None:
        short = left is not None and left.seconds > until_s
        yield f"{format_duration(until_s)} until the deadline{': not enough at this pace' if short else ''}"


def _used_lines(status: SweepStatus) -> Iterator[str]:
    gpu_hours, core_hours = used_hours(status.snapshot, status.now)
    policy = status.snapshot.plan.policy if status.snapshot.plan is not None else Policy()
    if policy.gpu_hour_budget is not None:
        yield _budget_line(status, policy, gpu_hours, policy.gpu_hour_budget)
    elif gpu_hours or core_hours:
        used = [f"{gpu_hours:,.2f} GPU-hours"] if gpu_hours else []
        used += [f"{core_hours:,.2f} core-hours"] if core_hours else []
        yield f"Used {' and '.join(used)}"
    yield from cost_lines(*_cost(status))


def _budget_line(status: SweepStatus, policy: Policy, gpu_hours: float, bound: float) -> str:
    """In the unit of the budget: GPU-hours, or their cost at the policy's price."""
    is_money = bound != policy.gpu_hours
    price = policy.gpu_hour_price if is_money else 1.0
    show = format_money if is_money else "{:,.2f}".format
    used = f"{show(gpu_hours * price)} of {show(bound * price)}"
    used += f" ({gpu_hours:,.2f} GPU-hours at {price:g})" if is_money else " GPU-hours"
    share = f"{format_percent(gpu_hours / bound, digits=0)} %" if bound else "all"
    left = hours_left(status.snapshot, status.left.left_s)[0] if _is_complete(status.left) else 0.0
    in_all = f", about {show((gpu_hours + left) * price)} in all" if left else ""
    return f"Used {used}, {share} of the budget{in_all}{_verdict(gpu_hours, bound)}"


def _is_complete(left: TimeLeft | None) -> TypeGuard[TimeLeft]:
    """Whether the time left is known for all jobs."""
    return left is not None and not left.never


def _cost(status: SweepStatus) -> tuple[Bill, PriceTable | None, float | None]:
    """Cost so far, the table of prices, and the expected total cost if known."""
    snapshot, left = status.snapshot, status.left
    bill = sweep_bill(snapshot, status.prices, status.now)
    expected = bill.expected(*hours_left(snapshot, left.left_s)) if _is_complete(left) else None
    return bill, status.prices, expected


def _verdict(gpu_hours: float, bound: float) -> str:
    if gpu_hours >= bound:
        return ": it is spent, and no job that needs GPUs starts; raise policy.budget and submit again"
    return ": nearly spent" if gpu_hours >= WARN_AT * bound else ""


def _wait_lines(status: SweepStatus, store: str) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for name, reason in status.waits.items():
        grouped.setdefault(reason, []).append(name)
    for reason, names in list(grouped.items())[:MAX_LINES]:
        number = len(names) + sum(status.progress[name].num_behind for name in names)
        plural, more = ("jobs wait", ", ...") if number > 1 else ("job waits", "")
        yield f"{number} {plural}: {reason.removeprefix('waits: ')} ({names[0]}{more})"
    if len(grouped) > MAX_LINES:
        yield f"and {len(grouped) - MAX_LINES} more reasons to wait; all of them: {_whole_status(status, store)}"


def _whole_status(status: SweepStatus, store: str) -> str:
    return command_line("status", status.snapshot.sweep, "-o", "json", store=store)


def status_document(status: SweepStatus) -> dict[str, Any]:
    """State of a sweep as plain JSON."""
    snapshot = status.snapshot
    live = {job: asdict(status.progress[job]) for job in status.running if job in status.progress}
    return {
        "sweep": snapshot.sweep,
        "state": snapshot.state.value,
        **present_document(status),
        "jobs": [_job_document(view) for view in snapshot.jobs.values()],
        "progress": live,
    }


def _job_document(view: JobView) -> dict[str, Any]:
    failure = view.last_failure
    return {
        "job": view.name,
        "key": view.key,
        "state": view.state.value,
        "attempts": view.num_attempts,
        "metrics": dict(view.metrics),
        "reason": view.reason,
        "previous_failure": None
        if failure is None
        else {"attempt": failure.attempt_id, "kind": failure.kind.value, "message": failure.message},
        "queued_s": view.queued_s,
        "overhead_s": view.overhead_s,
        "timings": asdict(view.timings) if view.timings else None,
    }


def failure_lines(snapshot: Snapshot, store: str = "") -> list[str]:
    """One line for each reason why jobs have no result, with the number of jobs and the first one's name.

    The cause may be anywhere in a reason, so its line is shown in full, followed by the place of the rest, if any.
    """
    grouped: dict[str, list[str]] = {}
    whole: dict[str, str] = {}
    for view in snapshot.jobs.values():
        if view.state is JobState.SKIPPED:
            grouped.setdefault("skipped: they need a job that failed or was cancelled", []).append(view.name)
        elif view.state is JobState.FAILED:
            shown = brief_reason(view.reason, WHOLE)
            log = command_line("logs", snapshot.sweep, view.name, store=store)
            rest = "" if shown == view.reason.strip() else f"; all of it: {log}"
            whole.setdefault(f"failed: {shown}", rest)
            grouped.setdefault(f"failed: {shown}", []).append(view.name)
    return [
        f"{len(names)} job{'s' * (len(names) > 1)} ({names[0]}{', ...' if names[1:] else ''}) {why}{whole.get(why, '')}"
        for why, names in grouped.items()
    ]


def running_lines(status: SweepStatus, store: str = "") -> list[str]:
    """``pretrain/levels/depth2/seed0  train 96/512  1,200 images/s  3m10s left`` for running jobs.

    Without a controller it is unknown whether they still run: ``... last seen: train 96/512``.
    """
    running = status.running
    describe = describe_progress if status.is_served else _last_seen
    lines = [
        f"{job}  {describe(progress)}{again(status.snapshot.jobs[job])}".rstrip()
        for job, progress in sorted(running.items())[:MAX_LINES]
    ]
    if len(running) > MAX_LINES:
        lines.append(f"and {len(running) - MAX_LINES} more running jobs; all of them: {_whole_status(status, store)}")
    return lines


def again(view: JobView) -> str:
    """`` (attempt 2; the one before ended with node_lost)``: an earlier failure is not the present state."""
    if view.last_failure is None or view.attempt is None:
        return ""
    return f"  (attempt {view.attempt.number}; the one before ended with {view.last_failure.kind.value})"


def describe_progress(progress: Progress) -> str:
    """``train 96/512  1,200 images/s  3m10s left``; its metrics are in ``-o json``."""
    parts = [_step(progress)]
    parts += [f"{progress.images_per_s:,.0f} images/s"] if progress.images_per_s > 0 else []
    parts += [f"{format_duration(progress.eta_s)} left"] if progress.eta_s > 0 else []
    return "  ".join(parts)


def _last_seen(progress: Progress) -> str:
    return f"last seen: {_step(progress)}"


def _step(progress: Progress) -> str:
    return progress.phase + (f" {progress.step}/{progress.total_steps}" if progress.total_steps else "")


def revive_killed_stack(snapshot: Snapshot) -> None:
    """Start the project's stack again if its supervisor was killed and the sweep has not ended.

    For commands that show or control a sweep and need no stack themselves; they do not wait for it.
    """
    settings = Settings()
    if snapshot.state.is_final or settings.is_remote or settings.driver_address:
        return
    killed = read_description(settings.home)
    if killed is None or killed.is_alive or snapshot.cluster not in {"", settings.cluster}:
        return
    restart_killed(settings.home)
