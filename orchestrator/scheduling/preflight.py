"""Before many similar jobs start, one of them runs first until it has trained two steps. Pure.

A model that does not fit, a recipe that diverges at once or a shard that cannot be read then costs one attempt and not
a thousand. No extra job is run: the first one continues to its end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.demand import AttemptDemand
from orchestrator.scheduling.fairness import Held
from orchestrator.state.transitions import JobState

MIN_JOBS = 8
"""Least number of jobs of a class for a preflight."""
MIN_GPU_HOURS = 24.0
"""Least GPU-hours of a class for a preflight."""
NUM_STEPS = 2
SILENT_S = 600.0
"""An attempt that never reports its steps also passes after so long."""

_Group: TypeAlias = tuple[str, str, AttemptDemand]
"""A class of jobs: kind, model with recipe, and shape."""


class Preflight:
    """The large classes of one plan's jobs, by number, and those without a job that has worked yet."""

    def __init__(self, jobs: Sequence[Job], demands: Sequence[AttemptDemand], seconds: Sequence[float]) -> None:
        by_group: dict[_Group, list[int]] = {}
        by_ids: dict[tuple[int, int], str] = {}  # jobs of a plan that was read share equal parts (`load_shared`)
        texts: dict[str, str] = {}
        for place, (job, demand) in enumerate(zip(jobs, demands, strict=True)):
            if demand.gpus:
                parameters = job.identity.get("parameters", {})
                parts = parameters.get("model"), parameters.get("recipe")
                ids = id(parts[0]), id(parts[1])
                if (text := by_ids.get(ids)) is None:
                    text = json.dumps(parts, sort_keys=True, default=str)
                    by_ids[ids] = text = texts.setdefault(text, text)
                by_group.setdefault((job.kind, text, demand), []).append(place)
        members = [
            places
            for (_, _, demand), places in by_group.items()
            if len(places) >= MIN_JOBS
            and sum(seconds[place] for place in places) * demand.gpus >= 3600.0 * MIN_GPU_HOURS
        ]
        self._numbers = {place: number for number, places in enumerate(members) for place in places}
        self._open = set(range(len(members)))

    def see(self, place: int, state: JobState) -> None:
        """Take a job's new state: after a success the other jobs of its class may start."""
        if state is JobState.SUCCEEDED:
            self._open.discard(self._numbers.get(place, -1))

    def watch(
        self,
        live: Mapping[str, Held],
        places: Mapping[str, int],
        *,
        stepping: Collection[str],
        now: float,
    ) -> dict[int, str]:
        """First jobs by the number of their class. ``stepping``: attempts known to have made two steps."""
        ahead: dict[int, str] = {}
        if not self._open:
            return ahead
        for attempt_id, held in live.items():
            number = self._numbers.get(places.get(held.attempt.job, -1), -1)
            if attempt_id in stepping or held.attempt.ran_s(now) >= SILENT_S:
                self._open.discard(number)
            ahead[number] = held.attempt.job
        return {number: job for number, job in ahead.items() if number in self._open}

    def group_of(self, place: int) -> int | None:
        """Number of a job's class, if the job has to wait for the first one of the class."""
        number = self._numbers.get(place)
        return number if number in self._open else None
