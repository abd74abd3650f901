"""How long a running sweep still takes: its estimates, corrected by what its own jobs took. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from orchestrator.core.contract import JobKind
from orchestrator.planning.estimate.makespan import Fleet, list_schedule
from orchestrator.planning.estimate.volumes import subject_of
from orchestrator.planning.graph.plan import Job, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Until the last job commits, if nothing fails."""

    seconds: float
    corrected_by: Mapping[str, float] = field(default_factory=dict)
    """Measured / estimated seconds by kind, where jobs of a kind have ended."""
    left_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each job that has not ended still takes."""
    never: tuple[str, ...] = ()
    """Jobs that the cluster cannot run."""


def time_left(
    plan: Plan,
    durations_s: Mapping[str, float],
    fleet: Fleet,
    *,
    done: Collection[str],
    running_left_s: Mapping[str, float],
    measured_s: Mapping[str, float],
    elapsed_s: Mapping[str, float] | None = None,
) -> TimeLeft:
    """Schedule what is left of a sweep from now on.

    Args:
        plan: the sweep's.
        durations_s: estimates by job, those of ended jobs included.
        fleet: what the cluster has.
        done: jobs that need not run (any more), also because they failed.
        running_left_s: seconds that running jobs say they still take.
        measured_s: seconds that ended jobs took, from launch to end.
        elapsed_s: seconds since the launch of running jobs that do not say how long they still take.
    """
    elapsed = elapsed_s or {}
    corrections = _corrections(plan, durations_s, measured_s)
    left = {}
    for job in plan.jobs:
        if job.name in done:
            continue
        ratio = corrections.get(_setting(job)) or corrections.get((job.kind, "")) or 1.0
        expected_s = durations_s.get(job.name, 0.0) * ratio - elapsed.get(job.name, 0.0)
        left[job.name] = max(0.0, running_left_s.get(job.name, expected_s))
    makespan = list_schedule(plan, left, fleet, running={*running_left_s, *elapsed})
    by_kind = {kind.value: ratio for (kind, subject), ratio in corrections.items() if not subject}
    return TimeLeft(seconds=makespan.seconds, corrected_by=by_kind, left_s=left, never=makespan.never)


def _corrections(
    plan: Plan, durations_s: Mapping[str, float], measured_s: Mapping[str, float]
) -> dict[tuple[JobKind, str], float]:
    """Median of measured / estimated by kind and model, and under the empty model by kind."""
    ratios: dict[tuple[JobKind, str], list[float]] = {}
    for job in plan.jobs:
        took_s, expected_s = measured_s.get(job.name, 0.0), durations_s.get(job.name, 0.0)
        if took_s > 0 and expected_s > 0:
            for setting in {_setting(job), (job.kind, "")}:
                ratios.setdefault(setting, []).append(took_s / expected_s)
    return {setting: median(found) for setting, found in ratios.items()}


def _setting(job: Job) -> tuple[JobKind, str]:
    return job.kind, subject_of(job.identity)
