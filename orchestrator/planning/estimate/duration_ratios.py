"""Ratios of measured to estimated durations of a running sweep's finished jobs, by class of jobs. Pure.

The scheduler, the time left in ``status`` and the controller of a forecast all use these ratios. A class is the kind
and the whole model of a job (``Job.duration_class``). Sums are whole milliseconds, so that adding and removing a job
leaves no rounding error, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import DurationClass

_PRIOR_JOBS = 2.0
_STEP = math.log(1.1)
_MAX_STEPS = 100


@dataclass(slots=True)
class _Sums:
    actual_ms: int = 0
    estimated_ms: int = 0
    num_jobs: int = 0

    def add(self, actual_s: float, estimated_s: float, count: int) -> None:
        self.actual_ms += count * int(actual_s * 1000)
        self.estimated_ms += count * int(estimated_s * 1000)
        self.num_jobs += count

    @property
    def ratio(self) -> float | None:
        """Measured / estimated; None where nothing was measured."""
        return self.actual_ms / self.estimated_ms if self.actual_ms > 0 and self.estimated_ms > 0 else None

    @property
    def steps(self) -> int:
        if not self.num_jobs or self.estimated_ms <= 0:
            return 0
        prior = _PRIOR_JOBS * self.estimated_ms / self.num_jobs
        ratio = (self.actual_ms + prior) / (self.estimated_ms + prior)
        return max(-_MAX_STEPS, min(_MAX_STEPS, round(math.log(max(ratio, 1e-9)) / _STEP)))


class DurationRatios:
    """Sums over finished jobs, by class and by kind."""

    def __init__(self) -> None:
        self._classes: dict[DurationClass, _Sums] = {}
        self._kinds: dict[JobKind, _Sums] = {}

    def add(self, alike: DurationClass, actual_s: float, estimated_s: float, count: int = 1) -> None:
        """Add a finished job of a class (``count`` 1), or take one out again (-1)."""
        self._classes.setdefault(alike, _Sums()).add(actual_s, estimated_s, count)
        self._kinds.setdefault(alike[0], _Sums()).add(actual_s, estimated_s, count)

    def ratio(self, alike: DurationClass) -> float:
        """Factor for estimates of a class, as measured: of the class, else of its kind, else 1. For people to read."""
        found = (sums.ratio for sums in (self._classes.get(alike), self._kinds.get(alike[0])) if sums is not None)
        return next((ratio for ratio in found if ratio is not None), 1.0)

    @property
    def steps(self) -> Mapping[DurationClass, int]:
        """Factors that queues are ordered by, as logarithms to base 1.1; classes that it leaves out have 0.

        They are rounded, so that small changes do not reorder queues, and they change slowly: two imaginary jobs with
        exactly the estimated duration are added, so that the first finished job does not decide alone.
        """
        return {alike: steps for alike, sums in self._classes.items() if (steps := sums.steps)}


def factor(steps: int) -> float:
    """Factor of an estimate, from its logarithm in ``steps``."""
    return math.exp(_STEP * steps)
