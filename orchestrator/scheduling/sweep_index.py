"""The scheduler's index of one sweep, updated from the changes since the last round.

Invariants:

- It follows from the snapshot: a new index gives the same decisions (a property test compares them).
- A pending job is in exactly one place: hopeless, waiting for others, given up, or in the queue of its shape.
- Sums are whole numbers, so that adding and removing leaves no rounding error.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.duration_ratios import DurationRatios, factor
from orchestrator.planning.estimate.eta import longest_paths
from orchestrator.planning.graph.plan import DurationClass, Job, Plan
from orchestrator.scheduling.demand import AttemptDemand, DemandTable
from orchestrator.scheduling.durations import estimate_s, left_s
from orchestrator.scheduling.fairness import Holdings
from orchestrator.scheduling.placement import ExpectedEnd, Machines
from orchestrator.scheduling.preflight import Preflight
from orchestrator.state.failure_policy import GiveUp, judge
from orchestrator.state.snapshot import Failure, JobView, Snapshot
from orchestrator.state.transitions import JobState

FailureGroup: TypeAlias = tuple[JobKind, FailureKind, str]
"""Failures in one group are one problem: kind of job, kind of failure and what its message says."""

_PARTICULARS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{16,}|\d+(?:\.\d+)?|(?:/[\w.@=+-]+)+|'[^']*'|\"[^\"]*\"")
_MAX_TEXT = 120
Ticket = tuple[int, int]
"""A ready job in its queue: minus the milliseconds of its longest remaining path, and its place in the plan."""


# ---------------------------------------------------------------------------------------------- failures that are alike


def failure_group_of(job: Job, failure: Failure) -> FailureGroup:
    """The group of a failure's message: its text without numbers, paths and quoted names."""
    first = failure.message.strip().partition("\n")[0]
    return job.kind, failure.kind, " ".join(_PARTICULARS.sub("*", first).split())[:_MAX_TEXT]


class FailureCounts:
    """Failures by group and by node, and successes by kind of job."""

    __slots__ = ("alike", "by_node", "numerics", "succeeded")

    def __init__(self) -> None:
        self.alike: dict[FailureGroup, set[str]] = {}
        """Names of the jobs that failed for good and count for the breaker."""
        self.succeeded: dict[JobKind, int] = {}
        self.by_node: dict[str, dict[str, Failure]] = {}
        """By node and job: each job's latest failure."""
        self.numerics: dict[str, JobView] = {}
        """Jobs with failures of numerics, by name."""

    def count(self, job: Job, view: JobView, count: int) -> None:
        """Add a job's present state (``count`` 1), or remove its earlier one (-1)."""
        if view.state is JobState.SUCCEEDED:
            self.succeeded[job.kind] = self.succeeded.get(job.kind, 0) + count
        if view.numerics and count > 0:
            self.numerics[job.name] = view
        elif view.numerics:
            self.numerics.pop(job.name, None)
        failure = view.last_failure
        if failure is None:
            return
        if view.state is JobState.FAILED and view.failures and view.counts_for_breaker:
            _keep(self.alike.setdefault(failure_group_of(job, failure), set()), job.name, count)
        if failure.node:
            on_node = self.by_node.setdefault(failure.node, {})
            if count > 0:
                on_node[job.name] = failure
            else:
                on_node.pop(job.name, None)


def _keep(names: set[str], name: str, count: int) -> None:
    if count > 0:
        names.add(name)
    else:
        names.discard(name)


# ------------------------------------------------------------------------------------------------------------ the index


@dataclass(slots=True)
class RememberedEnds:
    """When live attempts are expected to end, as worked out in an earlier round on the same machines."""

    machines: Machines | None = None
    by_id: dict[str, ExpectedEnd] = field(default_factory=dict)


class SweepIndex:
    """Queues of ready jobs by shape, what the sweep holds, and what it used and how it failed so far."""

    def __init__(self, plan: Plan, demands: DemandTable, durations: Mapping[str, float]) -> None:
        self.plan, self.durations = plan, durations
        self.snapshot = Snapshot(sweep=plan.sweep)
        self.jobs: tuple[Job, ...] = plan.jobs
        self.places = {job.name: place for place, job in enumerate(plan.jobs)}
        self.demands = [demands.of(job.resources, job.execution.num_workers) for job in plan.jobs]
        self.children: list[list[int]] = [[] for _ in plan.jobs]
        for place, job in enumerate(plan.jobs):
            for need in job.needs:
                self.children[self.places[need]].append(place)
        self.views: list[JobView] = [JobView(name=job.name, key=job.key) for job in plan.jobs]
        self.queues: dict[AttemptDemand, list[Ticket]] = {}
        self.ready_keys: dict[str, set[int]] = {}
        self.hopeless: set[int] = set()
        """Pending jobs that need a job which will never have an artifact."""
        self.given_up: dict[int, str] = {}
        """Ready jobs without further attempts, and why."""
        self.not_before_s: dict[int, float] = {}
        """When the backoff of ready jobs ends that have one."""
        self.retries: dict[int, str] = {}
        """Why failed jobs are retried, and how many attempts they have left."""
        self.holdings = Holdings(demands)
        self.failures = FailureCounts()
        self.endings = RememberedEnds()
        self.proven: dict[AttemptDemand, int] = {}
        """Shapes that were launched before, and of how many jobs: a lost node does not make them infeasible."""
        self.launched_s: dict[AttemptDemand, float] = {}
        """Latest launch of each shape."""
        self.last_end_s = 0.0
        """When an attempt of the sweep ended last."""
        self._unmet = [len(job.needs) for job in plan.jobs]
        self._lost = [0] * len(plan.jobs)
        self._duration_ratios = DurationRatios()
        self._classes = [job.duration_class for job in plan.jobs]
        self._estimates_s = [estimate_s(job, durations) for job in plan.jobs]
        self._steps: Mapping[DurationClass, int] = {}
        self.full_s = list(self._estimates_s)
        """Seconds of each job at full size, corrected by what was measured."""
        self.paths_ms = self._longest_paths_ms()
        self.preflight = Preflight(plan.jobs, self.demands, self._estimates_s)
        for place in range(len(plan.jobs)):
            self._enter(place)

    def update(self, snapshot: Snapshot) -> None:
        """Follow the sweep to a later snapshot of the same plan."""
        changed = list(snapshot.jobs.changed_since(self.snapshot.jobs))
        if snapshot.jobs is not self.snapshot.jobs:
            for view in changed:
                self._replace(self.places[view.name], view)
        self.holdings.set_leaving(snapshot.leaving)
        self.snapshot = snapshot
        self._correct()

    def uses(self, durations: Mapping[str, float]) -> bool:
        """Whether it was created with these estimates."""
        return durations is self.durations or durations == self.durations

    @property
    def last_launch_s(self) -> float:
        """Time of the sweep's latest launch."""
        return max(self.launched_s.values(), default=0.0)

    def left_s(self, place: int, *, stopped_after_s: float | None = None) -> float:
        """Seconds that the next attempt at a job needs at full size; see ``durations.left_s``."""
        return left_s(self.jobs[place], self.views[place], self.full_s[place], stopped_after_s=stopped_after_s)

    def ready_since_s(self, place: int) -> float:
        """Earliest time at which the job could have started, by its own attempts and its inputs."""
        view, needs = self.views[place], self.jobs[place].needs
        ends = [self.views[self.places[need]].ended_at_s or 0.0 for need in needs]
        own = view.last_failure.at_s if view.last_failure is not None else 0.0
        return max([self.snapshot.accepted_at_s, own, *ends])

    def unlaunched(self) -> Iterator[Job]:
        """Ready jobs in plan order."""
        for place in sorted(place for places in self.ready_keys.values() for place in places):
            yield self.jobs[place]

    def _replace(self, place: int, view: JobView) -> None:
        old = self.views[place]
        if old.state is JobState.PENDING:
            self._leave(place)
        self.views[place] = view
        self._count(place, old, -1)
        self._count(place, view, 1)
        self.holdings.change(old.attempt, view.attempt)
        if view.launched_at_s is not None:
            demand = self.demands[place]
            self.launched_s[demand] = max(self.launched_s.get(demand, 0.0), view.launched_at_s)
        self._follow_ends(_attempt_end_s(old), _attempt_end_s(view))
        self._update_children(place, old.state, view.state)
        self.preflight.see(place, view.state)
        if view.state is JobState.PENDING:
            self._enter(place)

    def _follow_ends(self, old_s: float, new_s: float) -> None:
        if new_s >= self.last_end_s:
            self.last_end_s = new_s
        elif old_s == self.last_end_s:  # rare: a job's artifact went missing, and its end with it
            self.last_end_s = max(_attempt_end_s(view) for view in self.views)

    def _update_children(self, place: int, old: JobState, new: JobState) -> None:
        met = new.is_done - old.is_done
        lost = _is_lost(new) - _is_lost(old)
        if not met and not lost:
            return
        for child in self.children[place]:
            is_pending = self.views[child].state is JobState.PENDING
            if is_pending:
                self._leave(child)
            self._unmet[child] -= met
            self._lost[child] += lost
            if is_pending:
                self._enter(child)

    def _enter(self, place: int) -> None:
        """Classify a pending job: hopeless, waiting for others, or ready."""
        if self._lost[place]:
            self.hopeless.add(place)
        if self._unmet[place]:
            return
        job, view, demand = self.jobs[place], self.views[place], self.demands[place]
        self.ready_keys.setdefault(job.key, set()).add(place)
        verdict = judge(view, max_failures=self.plan.policy.max_failures, num_workers=demand.num_workers)
        if isinstance(verdict, GiveUp):
            self.given_up[place] = verdict.reason
            return
        if verdict.at_s:
            self.not_before_s[place] = verdict.at_s
            self.retries[place] = verdict.reason
        insort(self.queues.setdefault(demand, []), (-self.paths_ms[place], place))

    def _leave(self, place: int) -> None:
        self.hopeless.discard(place)
        if self._unmet[place]:
            return
        key, demand = self.jobs[place].key, self.demands[place]
        self.ready_keys[key].discard(place)
        if not self.ready_keys[key]:
            del self.ready_keys[key]
        if self.given_up.pop(place, None) is not None:
            return
        self.not_before_s.pop(place, None)
        self.retries.pop(place, None)
        queue, ticket = self.queues[demand], (-self.paths_ms[place], place)
        del queue[bisect_left(queue, ticket)]
        if not queue:
            del self.queues[demand]

    def _count(self, place: int, view: JobView, count: int) -> None:
        job, demand = self.jobs[place], self.demands[place]
        if view.ran_s:
            self.holdings.history.add(view.used, demand, _last_end_s(view), count)
        if view.num_attempts:
            self.proven[demand] = self.proven.get(demand, 0) + count
        if view.state is JobState.SUCCEEDED and view.ran_s:
            took_s = view.full_size_s(job.resources)
            self._duration_ratios.add(self._classes[place], took_s, self._estimates_s[place], count)
        self.failures.count(job, view, count)

    def _correct(self) -> None:
        steps = self._duration_ratios.steps
        if steps == self._steps:
            return
        ready = [place for queue in self.queues.values() for _, place in queue]
        self._steps = steps
        factors = {alike: factor(count) for alike, count in steps.items()}
        self.endings = RememberedEnds()
        self.full_s = [
            estimate * factors.get(alike, 1.0) for estimate, alike in zip(self._estimates_s, self._classes, strict=True)
        ]
        self.paths_ms = self._longest_paths_ms()
        self.queues = {}
        for place in ready:
            self.queues.setdefault(self.demands[place], []).append((-self.paths_ms[place], place))
        for queue in self.queues.values():
            queue.sort()

    def _longest_paths_ms(self) -> list[int]:
        """In whole milliseconds, so that queues are ordered alike wherever they are made."""
        return longest_paths([int(seconds * 1000) for seconds in self.full_s], self.children)


def _is_lost(state: JobState) -> bool:
    return state.is_final and not state.is_done


def _attempt_end_s(view: JobView) -> float:
    failed_s = view.last_failure.at_s if view.last_failure is not None else 0.0
    done_s = view.ended_at_s if view.state is JobState.SUCCEEDED else None
    return max(failed_s, done_s or 0.0)


def _last_end_s(view: JobView) -> float:
    """When its latest attempt ended; a reopened job no longer tells, its last failure does."""
    if view.last_failure is not None and (view.ended_at_s is None or view.ended_at_s < view.last_failure.at_s):
        return view.last_failure.at_s
    return view.ended_at_s or view.launched_at_s or 0.0
