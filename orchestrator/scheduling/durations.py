"""How long attempts take: estimates, the remaining time of stopped attempts, the ends of live ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.job_kinds import KINDS
from orchestrator.planning.graph.plan import Job
from orchestrator.state.snapshot import Attempt, JobView

RESTART_S = 60.0
"""Seconds to stop an attempt and to start its next one: saving, loading, warming up."""

_LEAST_LEFT = 0.05
_LOST_PER_DEATH = 0.1
"""Part of a job that counts as lost by each death: one of ten epochs, after each of which it saves."""
_OVERRUN = 0.25
_LEAST_OVERRUN_S = 30.0


def estimate_s(job: Job, durations: Mapping[str, float]) -> float:
    """Seconds at full size, as estimated before anything ran."""
    return max(0.001, durations.get(job.name, KINDS[job.kind].default_s))


def left_s(job: Job, view: JobView, full_s: float, *, stopped_after_s: float | None = None) -> float:
    """Seconds that the next attempt needs at full size: it goes on from the newest checkpoint.

    An attempt that is stopped saves before its end; one that dies loses what it did since its last checkpoint, which is
    not known here and counts as ``_LOST_PER_DEATH``.
    ``stopped_after_s``: as if the live attempt was stopped now, after so many seconds at full size.
    """
    if not KINDS[job.kind].saves or (view.last_failure is None and stopped_after_s is None):
        return full_s
    saved_s = max(0.0, view.full_size_s(job.resources) - _LOST_PER_DEATH * full_s * view.num_deaths)
    return max(_LEAST_LEFT * full_s, full_s - saved_s - (stopped_after_s or 0.0))


def expected_end_s(attempt: Attempt, total_s: float, *, remaining_s: float | None, now: float) -> tuple[float, float]:
    """When an attempt ends: to choose nodes by, and to let others use them until.

    They differ once it has overrun its estimate: it may end at any moment, so nothing new may count on its room, yet
    other nodes are likely to be free before.
    """
    if attempt.preempting_at_s is not None:
        return max(now, min(attempt.preempting_at_s + attempt.grace_s, now + RESTART_S)), now
    if remaining_s is not None:
        return now + remaining_s, now + remaining_s
    began_at_s = attempt.began_at_s
    if began_at_s is None:
        return now + total_s, now + total_s
    end_s = began_at_s + total_s
    if end_s > now:
        return end_s, end_s
    return now + max(_LEAST_OVERRUN_S, _OVERRUN * (now - began_at_s)), now
