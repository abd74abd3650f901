"""The remaining time of a sweep: once for `status`, and in the background for live displays."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.core.contract import Resources
from orchestrator.core.errors import OrchestratorError
from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.estimate.eta import Fleet, TimeLeft, time_left
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.services.artifact_lookup import history_of
from orchestrator.services.fleets import this_machine
from orchestrator.services.settings import Settings
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.state.transitions import JobState
from orchestrator.sweeps.client import LiveProgress

Eta = tuple[TimeLeft, str]
"""Time left, and what it was scheduled on."""


def eta_of(
    snapshot: Snapshot, progress: Mapping[str, LiveProgress], durations_s: Mapping[str, float], now: float
) -> Eta | None:
    """Time left of a sweep; None if it has ended, or if it is unknown."""
    fleet = _fleet(snapshot) if durations_s and not snapshot.state.is_final else None
    if fleet is None:
        return None
    return time_left_of(snapshot, durations_s, fleet, progress=progress, now=now), fleet.name


def durations_of(snapshot: Snapshot) -> dict[str, float]:
    """Estimated seconds of all jobs; empty if there is nothing to estimate, or if it is impossible. Reads the store."""
    if snapshot.plan is None or snapshot.state.is_final:
        return {}
    try:
        return expected_durations(snapshot.plan)
    except (OrchestratorError, KeyError, ValueError):  # a plan of another version: its other figures are right
        return {}


class EtaTracker:
    """Keeps the time left of a followed sweep fresh in a thread: scheduling 10,000 jobs takes most of a second."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._durations_s: dict[str, float] = {}
        self._revision = 0
        self._updated_at_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._eta: Eta | None = None

    def latest(self, snapshot: Snapshot, progress: Mapping[str, LiveProgress]) -> Eta | None:
        """The latest answer, which may be some seconds old; starts a new computation if due. Does not wait."""
        is_busy = self._thread is not None and self._thread.is_alive()
        is_new = snapshot.revision != self._revision or time.monotonic() - self._updated_at_s > self.EVERY_S
        if not is_busy and is_new and snapshot.plan is not None:
            self._updated_at_s = time.monotonic()
            self._thread = threading.Thread(target=self._answer, args=(snapshot, progress), daemon=True)
            self._thread.start()
        return None if snapshot.state.is_final else self._eta

    def wait(self) -> None:
        """Wait until the requested answer is ready."""
        if self._thread is not None:
            self._thread.join()

    def _answer(self, snapshot: Snapshot, progress: Mapping[str, LiveProgress]) -> None:
        if snapshot.revision != self._revision:
            self._durations_s, self._revision = durations_of(snapshot), snapshot.revision
        self._eta = eta_of(snapshot, progress, self._durations_s, time.time())


def _fleet(snapshot: Snapshot) -> Fleet | None:
    """Nodes for the sweep: this machine if it runs here, else what it holds now and what its attempts wait for; None if
    it has no attempts.
    """
    if snapshot.cluster == Settings().cluster and snapshot.cluster.startswith("local-"):
        return this_machine()
    live = snapshot.live_attempts
    if not live:
        return None
    held = [attempt.resources for attempt in live if not attempt.awaits_room]
    total = Resources(cpus=sum(each.cpus for each in held), gpus=sum(each.gpus for each in held))
    names = [f"what it holds now: {total}"] if held else []
    names += ["what its waiting attempts ask for"] if len(held) < len(live) else []
    return Fleet(nodes=tuple(attempt.resources.bare for attempt in live), name=", and ".join(names))


def expected_durations(plan: Plan) -> dict[str, float]:
    """Estimated seconds of every job of a plan, by what its store's results measured.

    Reads the store, for 10 s at most: call it once and keep the answer while a sweep is followed.
    """
    return estimate(plan, history=history_of(plan)).durations_s()


def time_left_of(
    snapshot: Snapshot,
    durations_s: Mapping[str, float],
    fleet: Fleet,
    *,
    progress: Mapping[str, LiveProgress],
    now: float,
) -> TimeLeft:
    """Time left of a sweep. Pure.

    Args:
        snapshot: of the sweep; without a plan no time is left.
        durations_s: of ``expected_durations``.
        fleet: the nodes for the sweep.
        progress: of running jobs, by name.
        now: unix seconds.
    """
    if snapshot.plan is None:
        return TimeLeft(seconds=0.0)
    views, jobs = list(snapshot.jobs.values()), snapshot.plan.by_name()
    live = {view.name: view.attempt for view in views if view.attempt is not None}
    as_held = {name: _as_held(jobs[name], attempt) for name, attempt in live.items()}
    slowdowns = {name: jobs[name].execution.num_workers / job.execution.num_workers for name, job in as_held.items()}
    reported_left_s = {
        name: line.progress.eta_s for name, line in progress.items() if name in live and line.progress.eta_s > 0
    }
    return time_left(
        replace(snapshot.plan, jobs=tuple(as_held.get(job.name, job) for job in snapshot.plan.jobs)),
        {name: seconds * slowdowns.get(name, 1.0) for name, seconds in durations_s.items()},
        fleet,
        done={view.name for view in views if view.state.is_final},
        running_left_s=reported_left_s,
        measured_s={
            view.name: view.full_size_s(jobs[view.name].resources) for view in views if view.state is JobState.SUCCEEDED
        },
        elapsed_s={name: attempt.ran_s(now) for name, attempt in live.items() if not attempt.awaits_room},
    )


def _as_held(job: Job, attempt: Attempt) -> Job:
    """The job at the size of its live attempt: an elastic one may run on fewer GPUs than it asks for."""
    execution = replace(job.execution, num_workers=attempt.num_workers)
    return replace(job, resources=attempt.resources, execution=execution)
