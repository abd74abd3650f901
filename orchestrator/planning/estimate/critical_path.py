"""The longest chain of jobs: no cluster ends a plan sooner. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.planning.graph.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Jobs in the order in which they run, and their seconds together."""

    jobs: tuple[str, ...]
    seconds: float


def seconds_to_end(plan: Plan, durations_s: Mapping[str, float]) -> dict[str, float]:
    """For each job the seconds of the longest chain from its start to the end of the plan.

    Jobs that ``durations_s`` does not name take no time.
    """
    after: dict[str, float] = {}
    for job in reversed(plan.jobs):
        to_end = after[job.name] = after.get(job.name, 0.0) + durations_s.get(job.name, 0.0)
        for need in job.needs:
            if to_end > after.get(need, -1.0):
                after[need] = to_end
    return after


def critical_path(plan: Plan, durations_s: Mapping[str, float]) -> CriticalPath:
    """The longest chain; of equal ones the one that the plan names first. Empty if nothing has to run."""
    to_end = seconds_to_end(plan, durations_s)
    waiting: dict[str, list[str]] = {}
    for job in plan.jobs:
        for need in job.needs:
            waiting.setdefault(need, []).append(job.name)
    chain: list[str] = []
    heads = [job.name for job in plan.jobs if not job.needs]
    while heads:
        name = max(heads, key=to_end.__getitem__)
        chain.append(name)
        heads = waiting.get(name, [])
    jobs = tuple(name for name in chain if durations_s.get(name, 0.0) > 0)
    return CriticalPath(jobs=jobs, seconds=to_end[chain[0]] if chain else 0.0)
