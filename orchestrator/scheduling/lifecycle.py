"""Events that follow only from the states of a sweep's jobs, not from resources. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence

from orchestrator.scheduling.budgets import overdue
from orchestrator.scheduling.commands import (
    CancelJob,
    Command,
    FailJob,
    FinishSweep,
    MarkReused,
    PreemptAttempt,
    SkipJob,
    StopAttempt,
    TripSweep,
)
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state.events import Running, SweepEnding
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState


def departures(snapshots: Sequence[Snapshot]) -> Iterator[StopAttempt]:
    """Stops of attempts at jobs that are no longer wanted, unless a pending job waits for the very same key: one that
    still waits for its resources has done nothing for it, and may ask for others than that job does.
    """
    living = [snapshot for snapshot in snapshots if snapshot.state.is_live]
    if not any(snapshot.leaving for snapshot in living):
        return
    waiting = [one for one in living if one.state in {SweepState.RUNNING, SweepState.PAUSED}]
    wanted = {view.key for snapshot in waiting for view in snapshot.jobs.values() if view.state is JobState.PENDING}
    for snapshot in living:
        for attempt in snapshot.leaving.values():
            is_of_use = attempt.key in wanted and not attempt.awaits_room
            if not is_of_use and snapshot.state is not SweepState.CANCELLING:
                yield StopAttempt(sweep=snapshot.sweep, attempt_id=attempt.attempt_id)


def follow_up(index: SweepIndex, committed: Collection[str], now: float) -> list[Command]:
    """Skips, reuses, failures, cancellations, stops and the end of one sweep."""
    snapshot = index.snapshot
    match snapshot.state:
        case SweepState.RUNNING:
            commands = [*_settled(index, committed), *_trip(index, now)]
        case SweepState.PAUSED:
            # Nothing starts by these, and a job that has failed for good can be retried.
            commands = [*_settled(index, committed), *_paused(snapshot)]
        case SweepState.STOPPING:
            commands = [*_cancelled(index), *_unplaced(snapshot)]
        case SweepState.CANCELLING:
            stops = [StopAttempt(sweep=snapshot.sweep, attempt_id=one.attempt_id) for one in snapshot.live_attempts]
            commands = [*_cancelled(index), *stops]
        case _:
            return []
    return [*commands, *_ending(snapshot)]


def _settled(index: SweepIndex, committed: Collection[str]) -> list[Command]:
    """In plan order: reuses of ready jobs, final failures, and skips of all jobs that depend on failed ones."""
    sweep = index.plan.sweep
    found: dict[int, Command] = {}
    for key in _both(index.ready_keys, committed):
        for place in index.ready_keys[key]:
            found[place] = MarkReused(sweep=sweep, job=index.jobs[place].name)
    for place, reason in index.given_up.items():
        if place not in found:
            found[place] = FailJob(sweep=sweep, job=index.jobs[place].name, reason=reason)
    found |= _skips(index, [place for place, command in found.items() if isinstance(command, FailJob)])
    return [found[place] for place in sorted(found)]


def _both(keys: Collection[str], others: Collection[str]) -> list[str]:
    fewer, more = (keys, others) if len(keys) <= len(others) else (others, keys)
    return [key for key in fewer if key in more]


def _skips(index: SweepIndex, failing: list[int]) -> dict[int, Command]:
    """Pending jobs that can never be ready, in the same round as the jobs from which this follows."""
    skips: dict[int, Command] = {}
    lost = set(failing)
    line = list(index.hopeless)
    line += [child for place in failing for child in index.children[place]]
    heapq.heapify(line)
    while line:
        place = heapq.heappop(line)
        if place in skips or index.views[place].state is not JobState.PENDING:
            continue
        job = index.jobs[place]
        because = next(need for need in job.needs if index.places[need] in lost or _is_lost(index, need))
        skips[place] = SkipJob(sweep=index.plan.sweep, job=job.name, because=because)
        lost.add(place)
        for child in index.children[place]:
            heapq.heappush(line, child)
    return skips


def _is_lost(index: SweepIndex, name: str) -> bool:
    state = index.views[index.places[name]].state
    return state.is_final and not state.is_done


def _trip_reason(index: SweepIndex) -> str:
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


def _trip(index: SweepIndex, now: float) -> Iterator[TripSweep]:
    snapshot = index.snapshot
    reason = _trip_reason(index) or overdue(index.plan.policy, snapshot.accepted_at_s, now)
    if not reason:
        return
    # An attempt that waits for its resources would begin to run, later than anything may start.
    waits = any(one.awaits_room and one.attempt_id not in snapshot.leaving for one in snapshot.live_attempts)
    if waits or snapshot.jobs.counts.get(JobState.PENDING):
        yield TripSweep(sweep=index.plan.sweep, reason=reason)


def _paused(snapshot: Snapshot) -> Iterator[PreemptAttempt]:
    if snapshot.pause is not Running.CHECKPOINT:
        yield from _unplaced(snapshot)
        return
    for attempt in snapshot.live_attempts:
        if attempt.preempting_at_s is None and attempt.attempt_id not in snapshot.leaving:
            reason = "the sweep is paused: its attempts write a checkpoint and give their room back"
            yield PreemptAttempt(sweep=snapshot.sweep, attempt_id=attempt.attempt_id, reason=reason)


def _unplaced(snapshot: Snapshot) -> Iterator[PreemptAttempt]:
    """Attempts that wait for their resources would begin to run where nothing starts any more."""
    for attempt in snapshot.live_attempts:
        is_asked = attempt.preempting_at_s is not None or attempt.attempt_id in snapshot.leaving
        if attempt.awaits_room and not is_asked:
            reason = f"the sweep is {snapshot.state}, and the attempt waits for its resources"
            yield PreemptAttempt(sweep=snapshot.sweep, attempt_id=attempt.attempt_id, reason=reason)


def _cancelled(index: SweepIndex) -> Iterator[CancelJob]:
    if not index.snapshot.jobs.counts.get(JobState.PENDING):
        return
    for view in index.views:
        if view.state is JobState.PENDING:
            yield CancelJob(sweep=index.plan.sweep, job=view.name)


def _ending(snapshot: Snapshot) -> Iterator[FinishSweep]:
    counts = {state: count for state, count in snapshot.jobs.counts.items() if count}
    if snapshot.leaving or not all(state.is_final for state in counts):
        return
    if all(state.is_done for state in counts) and snapshot.state is not SweepState.CANCELLING:
        status = SweepEnding.SUCCEEDED
    elif snapshot.state is SweepState.CANCELLING or (snapshot.state is SweepState.STOPPING and not snapshot.tripped):
        status = SweepEnding.CANCELLED
    else:
        status = SweepEnding.FAILED
    yield FinishSweep(sweep=snapshot.sweep, status=status)
