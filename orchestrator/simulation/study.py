"""Several sweeps as one plan: a study on one cluster and store, which trains once what its sweeps have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.errors import UserError
from orchestrator.planning.graph.plan import Job, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One plan with the jobs of several; ``names`` say, for each of those plans, what its jobs are called in it."""

    plan: Plan
    names: tuple[Mapping[str, str], ...]


def join_plans(plans: Sequence[Plan]) -> Study:
    """All jobs of some plans, those of one key once. A single plan keeps its names; else they begin with the sweep's.

    The first plan's policy counts for all of it.

    Raises:
        UserError: a sweep is named twice.
    """
    titles = [plan.sweep for plan in plans]
    if len(set(titles)) < len(titles):
        raise UserError(f"the sweeps are {', '.join(titles)}; name each once")
    if len(plans) == 1:
        return Study(plan=plans[0], names=({job.name: job.name for job in plans[0].jobs},))
    by_key: dict[str, Job] = {}
    names: list[dict[str, str]] = []
    for plan in plans:
        mine: dict[str, str] = {}
        for job in plan.jobs:  # every job stands after those that it needs
            known = by_key.get(job.key)
            name = known.name if known else f"{plan.sweep}/{job.name}"
            mine[job.name] = name
            if known is None:
                by_key[job.key] = replace(job, name=name, needs=tuple(mine[need] for need in job.needs))
        names.append(mine)
    study = replace(plans[0], sweep="+".join(titles), jobs=tuple(by_key.values()))
    return Study(plan=study, names=tuple(names))


def imagined(plan: Plan) -> Plan:
    """A plan of which nothing is read: data that are declared, and not there yet, keep no forecast from running."""
    jobs = [replace(job, execution=replace(job.execution, data_location={})) for job in plan.jobs]
    return replace(plan, jobs=tuple(jobs))
