"""How often attempts die, as far as the journals tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.errors import FailureKind
from orchestrator.state.snapshot import Snapshot

DEADLY = frozenset(
    {
        FailureKind.NODE_LOST,
        FailureKind.HANG,
        FailureKind.TIMEOUT,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.STORAGE,
        FailureKind.UNKNOWN,
    }
)
"""Ends that come at any moment and lose what was not saved. A preempted attempt saves first; a wrong job dies again."""


def observed_mtbf_s(snapshots: Sequence[Snapshot], *, prior_s: float, now: float) -> float:
    """Mean time between deaths of an attempt, seconds: what was expected counts as one death after ``prior_s``.

    That is the mean of the rate's posterior under a gamma prior of shape 1, so it moves from the expectation to the
    observation as deaths come in.
    """
    views = [view for snapshot in snapshots for view in snapshot.jobs.values()]
    ran_s = sum(view.ran_s for view in views)
    running = [attempt for snapshot in snapshots for attempt in snapshot.live_attempts]
    ran_s += sum(attempt.ran_s(now) for attempt in running)
    return (prior_s + ran_s) / (1 + sum(view.num_deaths for view in views))
