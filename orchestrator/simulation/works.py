"""From planned jobs and their durations to what simulated attempts do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from orchestrator.backends.simulated import ClusterSpec, JobWork
from orchestrator.backends.simulated.work import young_interval_s
from orchestrator.core.contract import JobRequest
from orchestrator.core.job_kinds import TRAINING_KINDS, JobKind
from orchestrator.planning.graph.plan import Job, Plan

_SAVING = TRAINING_KINDS | {JobKind.EMBED}
"""Kinds whose attempts lose only what follows their newest checkpoint, or their newest part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the durations of jobs do not say. Seconds."""

    cold_start_s: float = 15.0
    """From placement to the first step of a job with GPUs where a process, or each worker of a gang, starts: imports,
    data, compilation. The durations of jobs contain it once."""
    cpu_start_s: float = 1.0
    """The same of a job without GPUs."""
    warm_start_s: float = 1.0
    """The same on a runner that is up."""
    checkpoint_stall_s: float = 0.5
    """For how long a checkpoint holds up training: one copy of the state in memory, 0.1 s per GB. Small states take
    less: never more than a hundredth of the interval."""
    stop_s: float = 5.0
    """From a stop to the end of an attempt."""
    mtbf_s: float = 0.0
    """Where above 0: attempts save as often as Young's formula says for this mean time between failures of one node,
    unless their job asks for an interval of its own."""


class Workload:
    """The work of every job of a plan."""

    def __init__(self, plan: Plan, durations_s: Mapping[str, float], assumptions: Assumptions) -> None:
        self._jobs = plan.by_name()
        self._durations_s = durations_s
        self._assumptions = assumptions
        self._done: frozenset[str] = frozenset()

    def leave_out(self, keys: Collection[str]) -> None:
        """Jobs that are done take no time."""
        self._done = frozenset(keys)

    def work_of(self, request: JobRequest) -> JobWork:
        """What an attempt at a job does; its checkpoints follow the request, which knows how often attempts die."""
        assumed, duration_s = self._assumptions, self._durations_s.get(request.job, 0.0)
        mtbf_s = request.execution.checkpoint_mtbf_s or assumed.mtbf_s
        every_s = 0.0
        if request.kind in _SAVING:
            by_epochs_s = _epochs_interval_s(self._jobs[request.job], duration_s)
            every_s = young_interval_s(assumed.checkpoint_stall_s, mtbf_s) if mtbf_s else by_epochs_s
            every_s = min(every_s, duration_s)
        start_s = self._start_s(self._jobs[request.job])
        return JobWork(
            work_s=duration_s - start_s,
            checkpoint_every_s=every_s,
            checkpoint_stall_s=min(assumed.checkpoint_stall_s, 0.01 * every_s),
            cold_start_s=start_s,
            warm_start_s=min(assumed.warm_start_s, start_s),
            stop_s=assumed.stop_s,
        )

    def lower_bound_s(self, spec: ClusterSpec) -> float:
        """Seconds below which no schedule gets, even on a cluster that never fails and where every runner is warm."""
        left = [job for job in self._jobs.values() if job.key not in self._done]
        bounds = [self._critical_path_s(left)]
        groups = spec.groups
        for resource in ("gpus", "cpus"):
            has = sum(group.count * getattr(group.shape, resource) for group in groups)
            # Jobs with one key run once.
            asked = {job.key: getattr(job.resources, resource) * self._least_s(job) for job in left}
            bounds.append(sum(asked.values()) / has if has else 0.0)
        return max(bounds)

    def _critical_path_s(self, jobs: list[Job]) -> float:
        ends: dict[str, float] = {}
        for job in jobs:
            begin_s = max((ends.get(need, 0.0) for need in job.needs), default=0.0)
            ends[job.name] = begin_s + self._least_s(job)
        return max(ends.values(), default=0.0)

    def _start_s(self, job: Job) -> float:
        """How much of a job's duration is its start where no process is up."""
        assumed = self._assumptions
        cold_s = assumed.cold_start_s if job.resources.gpus else assumed.cpu_start_s
        return min(cold_s, self._durations_s.get(job.name, 0.0))

    def _least_s(self, job: Job) -> float:
        """Of a job, at best: gangs always start anew, anything else may find a warm runner."""
        start_s = self._start_s(job)
        warm_s = start_s if job.execution.num_workers > 1 else min(self._assumptions.warm_start_s, start_s)
        return self._durations_s[job.name] - start_s + warm_s


def _epochs_interval_s(job: Job, duration_s: float) -> float:
    """Seconds between checkpoints at the ends of epochs, or after as many steps as the job asks for."""
    recipe = job.identity.get("parameters", {}).get("recipe") or {}
    epochs = recipe.get("epochs") or 0
    if not epochs or not math.isfinite(epochs):
        return duration_s / 10.0
    return duration_s * min(1.0, job.execution.checkpoint_every_epochs / epochs)
