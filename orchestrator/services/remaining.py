"""How long a submitted sweep still takes: estimates once, then refined by its own jobs at every look."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.estimate.eta import Fleet, TimeLeft, time_left
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.measured import history_of
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState
from orchestrator.sweeps.progress import LiveProgress


def expected_durations(plan: Plan) -> dict[str, float]:
    """Estimated seconds of every job of a plan, by what its store's results measured.

    Reads the store, for 10 s at most: call it once and keep the answer while a sweep is followed.
    """
    return estimate(plan, history=history_of(plan, {})).durations_s()


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
        snapshot: where it stands; without a plan nothing is left.
        durations_s: of ``expected_durations``.
        fleet: what the sweep may use.
        progress: of running jobs, by name.
        now: unix seconds.
    """
    if snapshot.plan is None:
        return TimeLeft(seconds=0.0)
    views = list(snapshot.jobs.values())
    live = {view.name: view.attempt for view in views if view.attempt is not None}
    told = {name: line.progress.eta_s for name, line in progress.items() if name in live and line.progress.eta_s > 0}
    return time_left(
        snapshot.plan,
        durations_s,
        fleet,
        done={view.name for view in views if view.state.is_final},
        running_left_s=told,
        measured_s={view.name: view.ran_s for view in views if view.state is JobState.SUCCEEDED},
        elapsed_s={name: attempt.ran_s(now) for name, attempt in live.items()},
    )
