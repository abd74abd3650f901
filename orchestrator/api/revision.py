"""Whether a sweep's file still says what was submitted under its name."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Any

from orchestrator.cli.asking import confirmed
from orchestrator.cli.resubmit import find_former, show_difference
from orchestrator.core.errors import ControllerError, InfeasibleError
from orchestrator.planning.graph.diff import diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.open import is_initialised
from orchestrator.sweeps.client import current_user


class Changed(StrEnum):
    """What becomes of a sweep of this name whose plan is another one."""

    ASK = "ask"
    """Show the difference and ask whoever sits at the terminal; refuse where nobody does, as in a script."""
    REPLACE = "replace"
    """Make this the next revision."""
    REFUSE = "refuse"


def agree(plan: Plan, changed: Changed) -> bool:
    """See to it that a plan may replace what was submitted under its name, as far as its store knows of any.

    Returns:
        Whether its user agrees to replace another plan, should one turn up that the store here does not know.

    Raises:
        InfeasibleError: the sweep belongs to somebody else.
        ControllerError: it has another plan, and nobody agreed to replace it.
    """
    former = find_former(plan) if is_initialised(plan.store_uri) else None
    if former is None:
        return changed is Changed.REPLACE
    if stranger := former.stranger(current_user()):
        raise InfeasibleError(stranger)
    if former.is_same(plan):
        return True
    show_difference(former, plan)
    if changed is Changed.ASK and sys.stdin.isatty():
        if confirmed("Replace its plan and submit?", subject="a changed sweep"):
            return True
        raise ControllerError(f"sweep {plan.sweep!r} has another plan, and was left as it is")
    if changed is not Changed.REPLACE:
        message = (
            f"{difference(plan, former.snapshot)}; to replace it, submit(changed=Changed.REPLACE), or give this sweep "
            "another name"
        )
        raise ControllerError(message)
    return True


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
