"""How well a sweep's attempts use what they hold, added up as its journal grows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.contract import Progress
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState

SUCCEEDED = "succeeded"
"""As an outcome of attempts, beside the kinds of failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the ended attempts of one job held, and what of it was of use, in seconds."""

    ran_s: float = 0.0
    held_s: float = 0.0
    """What of it counts for goodput now, by weight."""
    useful_s: float = 0.0


_NONE = Share()


class Account:
    """One sweep; ``follow`` takes time by the number of jobs that changed."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._shares: dict[str, Share] = {}
        """Of jobs with ended attempts."""
        self._held_s = self._useful_s = self._gpu_s = 0.0
        self._steps: dict[str, Progress] = {}
        """Furthest known step of jobs that are not done."""
        self._jobs: Mapping[str, Job] = {}
        self._has_gpus = False

    def follow(self, snapshot: Snapshot) -> dict[str, int]:
        """Take the sweep as it is now; returns how many attempts ended since the last call, by outcome."""
        before, self._snapshot = self._snapshot, snapshot
        if before is snapshot or snapshot.plan is None:
            return {}
        if before is None or before.plan is not snapshot.plan:
            self._begin(snapshot.plan)
            for view in snapshot.jobs.values():
                self._book(view)
            return {}
        ended: dict[str, int] = {}
        for view in snapshot.jobs.changed_since(before.jobs):
            self._book(view)
            outcome = _outcome(before.jobs[view.name], view)
            if outcome:
                ended[outcome] = ended.get(outcome, 0) + 1
        return ended

    def see(self, progress: Mapping[str, Progress]) -> None:
        """Take the latest progress of running attempts, by job."""
        self._steps.update((job, one) for job, one in progress.items() if one.step and one.step_s and one.total_steps)

    def gpu_hours(self, now: float) -> float:
        """GPU-hours of all attempts, live ones as far as they are at ``now``; of former revisions' jobs, too."""
        live_s = sum(
            attempt.resources.gpus * attempt.ran_s(now)
            for attempt in (self._snapshot.live_attempts if self._snapshot else ())
        )
        former_s = self._snapshot.spent_gpu_s if self._snapshot else 0.0
        return (former_s + self._gpu_s + live_s) / 3600.0

    def goodput(self, now: float) -> float | None:
        """Share in [0, 1] of the time held that made progress which was kept; ``None`` before there is any.

        Kept is the time of the steps that a job has behind it, whichever attempt made them, and the work of jobs
        without steps that succeeded. Not kept: starting, steps made again after a loss, and all that failed. What
        running jobs without steps hold does not count yet.
        """
        held_s, useful_s = self._held_s, self._useful_s
        for name in self._snapshot.jobs.running if self._snapshot else ():
            share = self._running(name, now)
            held_s, useful_s = held_s + share.held_s, useful_s + share.useful_s
        return useful_s / held_s if held_s > 0.0 else None

    def _begin(self, plan: Plan) -> None:
        self._jobs = plan.by_name()
        self._has_gpus = any(job.resources.gpus for job in plan.jobs)
        self._shares, self._held_s, self._useful_s, self._gpu_s = {}, 0.0, 0.0, 0.0
        self._steps = {name: one for name, one in self._steps.items() if name in self._jobs}

    def _book(self, view: JobView) -> None:
        """The attempts of a job that have ended, in place of what was booked for it before."""
        old = self._shares.get(view.name, _NONE)
        if not view.ran_s and old is _NONE:
            return
        # A running job is weighed as a whole when it is asked for: its steps hold those of earlier attempts.
        share = Share(ran_s=view.ran_s) if view.state is JobState.RUNNING else self._ended(view)
        self._held_s += share.held_s - old.held_s
        self._useful_s += share.useful_s - old.useful_s
        self._gpu_s += (share.ran_s - old.ran_s) * self._jobs[view.name].resources.gpus
        self._shares[view.name] = share
        if view.state.is_final:
            self._steps.pop(view.name, None)

    def _ended(self, view: JobView) -> Share:
        weight, ran_s = self._weight(view.name), view.ran_s
        useful_s, steps = 0.0, self._steps.get(view.name)
        if view.state is JobState.SUCCEEDED and view.timings is not None:
            useful_s = view.timings.work_s - view.timings.setup_s
            resumed = view.resumed_from_step or 0
            if steps is not None and resumed < steps.total_steps:
                useful_s *= steps.total_steps / (steps.total_steps - resumed)
        elif not view.state.is_final and steps is not None:
            useful_s = steps.step * steps.step_s
        return Share(ran_s=ran_s, held_s=ran_s * weight, useful_s=_between(useful_s, ran_s) * weight)

    def _running(self, name: str, now: float) -> Share:
        view, steps = self._view(name), self._steps.get(name)
        if view.attempt is None or steps is None:
            return _NONE
        ran_s = view.ran_s + view.attempt.ran_s(now)
        weight = self._weight(name)
        return Share(ran_s=ran_s, held_s=ran_s * weight, useful_s=_between(steps.step * steps.step_s, ran_s) * weight)

    def _view(self, name: str) -> JobView:
        assert self._snapshot is not None  # noqa: S101 - for the type checker
        return self._snapshot.jobs[name]

    def _weight(self, name: str) -> float:
        resources = self._jobs[name].resources
        return resources.gpus if self._has_gpus else resources.cpus


def _between(useful_s: float, ran_s: float) -> float:
    return min(max(0.0, useful_s), ran_s)


def _outcome(before: JobView, view: JobView) -> str:
    """How an attempt ended between two views of a job; empty if none did."""
    if view.last_failure is not None and view.last_failure is not before.last_failure:
        return view.last_failure.kind.value
    if view.state is JobState.SUCCEEDED and before.state is not JobState.SUCCEEDED:
        return SUCCEEDED
    return ""
