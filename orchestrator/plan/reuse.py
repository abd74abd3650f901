"""What a submit would do with each job: the plan compared with what a store holds. Pure; the caller looks keys up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import StrEnum

from orchestrator.plan.graph import Job, Plan


class Disposition(StrEnum):
    """``reuse``: committed already. ``resume``: has checkpoints. ``new``: everything else."""

    NEW = "new"
    REUSE = "reuse"
    RESUME = "resume"


def dispositions(plan: Plan, committed: Collection[str], checkpointed: Collection[str]) -> dict[str, Disposition]:
    """Disposition of every job by name, given the keys that are committed and those that have checkpoints."""

    def dispose(job: Job) -> Disposition:
        if job.key in committed:
            return Disposition.REUSE
        return Disposition.RESUME if job.key in checkpointed else Disposition.NEW

    return {job.name: dispose(job) for job in plan.jobs}


def count_by_kind(plan: Plan, found: dict[str, Disposition]) -> dict[str, Counter[Disposition]]:
    """Numbers of jobs by kind and disposition, kinds in plan order."""
    counts: dict[str, Counter[Disposition]] = {}
    for job in plan.jobs:
        counts.setdefault(job.kind.value, Counter())[found[job.name]] += 1
    return counts
