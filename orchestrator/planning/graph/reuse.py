"""What a submit would do with each job: the plan compared with a store. Pure; the caller looks up the keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan


class Disposition(StrEnum):
    """What a submit does with a job."""

    NEW = "new"
    """To be run from its start."""
    RESUME = "resume"
    """Not committed, but it has checkpoints."""
    REUSE = "reuse"
    """Committed already."""
    STALE = "stale"
    """Committed already, and reused, by other code of the same ``code_version``."""

    @property
    def is_reused(self) -> bool:
        """Whether the job need not run."""
        return self in {Disposition.REUSE, Disposition.STALE}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGroup:
    """Jobs of one kind, label space and transfer: a line of the table."""

    kind: str
    title: str
    """The common facets of the jobs."""
    jobs: tuple[Job, ...]
    counts: Mapping[Disposition, int]


def dispositions(
    plan: Plan, committed: Collection[str], checkpointed: Collection[str], stale: Collection[str] = ()
) -> dict[str, Disposition]:
    """Disposition of every job by name.

    Args:
        plan: the plan.
        committed: keys that have a record.
        checkpointed: keys that have checkpoints.
        stale: those of ``committed`` whose record was written by other code.
    """

    def dispose(job: Job) -> Disposition:
        if job.key in committed:
            return Disposition.STALE if job.key in stale else Disposition.REUSE
        return Disposition.RESUME if job.key in checkpointed else Disposition.NEW

    return {job.name: dispose(job) for job in plan.jobs}


def repeated_jobs(plan: Plan) -> dict[str, str]:
    """Jobs with the key of a job before them, and that job: of several names for one result the first one runs."""
    first: dict[str, str] = {}
    made_by = {job.name: first.setdefault(job.key, job.name) for job in plan.jobs}
    return {name: maker for name, maker in made_by.items() if maker != name}


def count_by_kind(plan: Plan, found: Mapping[str, Disposition]) -> dict[str, Counter[Disposition]]:
    """Numbers of jobs by kind and disposition, kinds in plan order."""
    counts: dict[str, Counter[Disposition]] = {}
    for job in plan.jobs:
        counts.setdefault(job.kind.value, Counter())[found[job.name]] += 1
    return counts


def group_jobs(plan: Plan, found: Mapping[str, Disposition]) -> list[JobGroup]:
    """Jobs by kind, and within it by block, transfer and label space, in plan order."""
    grouped: dict[tuple[str, str], list[Job]] = {}
    for job in plan.jobs:
        grouped.setdefault((job.kind.value, _title(job)), []).append(job)
    kinds = list(dict.fromkeys(kind for kind, _ in grouped))
    ordered = sorted(grouped.items(), key=lambda item: kinds.index(item[0][0]))
    return [
        JobGroup(kind=kind, title=title, jobs=tuple(jobs), counts=Counter(found[job.name] for job in jobs))
        for (kind, title), jobs in ordered
    ]


def _title(job: Job) -> str:
    facets = job.facets
    if job.kind is JobKind.DATASET:  # independent of the number of part jobs
        return str(facets.get("dataset", job.name.partition("/")[2]))
    if "label_space" not in facets:
        return job.name.partition("/")[2]
    parts = [facets.get("transfer"), facets.get("baseline"), facets.get("pretrain"), facets["label_space"]]
    return " ".join(str(part) for part in parts if part)
