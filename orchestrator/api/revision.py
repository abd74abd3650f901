"""Whether a sweep's file still says what was submitted under its name."""

from __future__ import annotations

from typing import Any

from orchestrator.plan.diff import diff_plans
from orchestrator.plan.graph import Plan
from orchestrator.state.snapshot import Snapshot


def is_same_answer(plan: Plan, submitted: Plan | None) -> bool:
    """Whether a report of one plan is a report of the other: the same keys, compared the same way."""
    return submitted is not None and _answer(plan) == _answer(submitted)


def difference(plan: Plan, snapshot: Snapshot) -> str:
    """How the jobs of a plan differ from those of the submitted revision, in words; empty if they do not.

    While no revision is accepted there is nothing that could differ.
    """
    if snapshot.plan is None or _keys(plan) == _keys(snapshot.plan):
        return ""
    counts = diff_plans(snapshot.plan, plan).counts
    changes = ", ".join(f"{number} {change.value}" for change, number in counts.items() if number)
    return (
        f"what was submitted as sweep {plan.sweep!r} (revision {snapshot.revision}) is not what this file and its "
        f"overrides say now: from there to here, {changes}"
    )


def _answer(plan: Plan) -> tuple[Any, ...]:
    return _keys(plan), plan.metric, plan.baseline, plan.published


def _keys(plan: Plan) -> dict[str, str]:
    return {job.name: job.key for job in plan.jobs}
