"""How long jobs take: estimates, corrected by what finished jobs of the same class took. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from orchestrator.core.job_kinds import KINDS
from orchestrator.planning.graph.plan import Job
from orchestrator.state.failure_policy import POLICY
from orchestrator.state.snapshot import Attempt, JobView

RESTART_S = 60.0
"""What it costs to stop an attempt and to start its next one: saving, loading, warming up."""

_PRIOR_JOBS = 2.0
_STEP = math.log(1.1)
_MAX_STEPS = 100
_LEAST_LEFT = 0.05
_OVERRUN = 0.25
_LEAST_OVERRUN_S = 30.0


def estimate_s(job: Job, durations: Mapping[str, float]) -> float:
    """Seconds at full size, as estimated before anything ran."""
    return max(0.001, durations.get(job.name, KINDS[job.kind].default_s))


class MeasuredDurations:
    """Sums over finished jobs of one class. In whole milliseconds: they come out the same in any order."""

    __slots__ = ("actual_ms", "estimated_ms", "num_jobs")

    def __init__(self) -> None:
        self.actual_ms = self.estimated_ms = self.num_jobs = 0

    def add(self, actual_s: float, estimated_s: float, count: int) -> None:
        """Add a finished job (``count`` 1), or take one out again (-1)."""
        self.actual_ms += count * int(actual_s * 1000)
        self.estimated_ms += count * int(estimated_s * 1000)
        self.num_jobs += count

    @property
    def steps(self) -> int:
        """Logarithm to base 1.1 of the correction, rounded: small changes reorder no queue.

        The correction is the ratio of sums with two jobs added that took just what was estimated, so that the first
        one finished does not count for all.
        """
        if not self.num_jobs or self.estimated_ms <= 0:
            return 0
        prior = _PRIOR_JOBS * self.estimated_ms / self.num_jobs
        ratio = (self.actual_ms + prior) / (self.estimated_ms + prior)
        return max(-_MAX_STEPS, min(_MAX_STEPS, round(math.log(max(ratio, 1e-9)) / _STEP)))


def correction(steps: int) -> float:
    """Factor of an estimate."""
    return math.exp(_STEP * steps)


def left_s(job: Job, view: JobView, full_s: float) -> float:
    """Seconds that the next attempt needs at full size: one that was stopped goes on from its checkpoint."""
    stopped = view.last_failure is not None and POLICY[view.last_failure.kind].was_stopped
    if not KINDS[job.kind].saves or not stopped:
        return full_s
    return max(_LEAST_LEFT * full_s, full_s - view.ran_s)


def longest_paths_ms(durations_s: Sequence[float], children: Sequence[Sequence[int]]) -> list[int]:
    """Milliseconds from the start of each job to the end of all that depends on it, had it all the room it wants.

    Jobs stand after those they need. Source: Graham, Bounds on multiprocessing timing anomalies (1969): list
    scheduling by longest remaining path.
    """
    paths = [0] * len(durations_s)
    for place in range(len(durations_s) - 1, -1, -1):
        after = max((paths[child] for child in children[place]), default=0)
        paths[place] = int(durations_s[place] * 1000) + after
    return paths


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
