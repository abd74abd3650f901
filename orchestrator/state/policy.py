"""What a failed attempt means for its job: one table, and budgets counted from the journal's events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.errors import FailureKind
from orchestrator.state.snapshot import JobView


class Action(StrEnum):
    """What follows a failure of one kind."""

    RETRY = "retry"
    FAIL_JOB = "fail_job"


class Charge(StrEnum):
    """Whom a failure is charged to."""

    JOB = "job"
    """Counts towards the plan's ``max_failures``."""
    CLUSTER = "cluster"
    """Not the job's fault: only the kind's own budget counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the policy. The n-th failure of a kind waits ``backoff_s * 2**(n - 1)``, at most ``MAX_BACKOFF_S``."""

    action: Action = Action.RETRY
    charge: Charge = Charge.JOB
    budget: int | None = None
    """Failures of this kind after which the job fails; ``None`` = no limit of its own."""
    backoff_s: float = 0.0


MAX_BACKOFF_S = 300.0

POLICY: dict[FailureKind, Rule] = {
    FailureKind.USER_ERROR: Rule(action=Action.FAIL_JOB),
    FailureKind.INFEASIBLE: Rule(action=Action.FAIL_JOB),
    # The next attempt would see the same samples in the same order and diverge at the same step.
    FailureKind.NUMERICS: Rule(action=Action.FAIL_JOB),
    FailureKind.OUT_OF_MEMORY: Rule(budget=2, backoff_s=2.0),
    FailureKind.BAD_DATA: Rule(budget=2, backoff_s=2.0),
    FailureKind.TIMEOUT: Rule(backoff_s=1.0),
    FailureKind.HANG: Rule(backoff_s=1.0),
    FailureKind.STORAGE: Rule(backoff_s=2.0),
    FailureKind.UNKNOWN: Rule(backoff_s=1.0),
    FailureKind.PREEMPTED: Rule(charge=Charge.CLUSTER),
    # Bounded, because a job that kills its own node (host memory, driver) looks just like this.
    FailureKind.NODE_LOST: Rule(charge=Charge.CLUSTER, budget=10, backoff_s=0.25),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The job may be tried again from ``at_s`` on."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The job fails."""

    reason: str


def judge(job: JobView, *, max_failures: int) -> Retry | GiveUp:
    """What to do with a pending job, given all its failures since the sweep was last submitted."""
    last = job.last_failure
    if last is None or not job.failures:
        return Retry(at_s=0.0)
    rule, count = POLICY[last.kind], job.failures.get(last.kind, 0)
    spent = _spent_budget(job, rule, count, max_failures)
    if spent:
        return GiveUp(reason=f"{last.kind}: {last.message} ({spent})")
    return Retry(at_s=last.at_s + min(MAX_BACKOFF_S, rule.backoff_s * 2.0 ** min(count - 1, 30)))


def _spent_budget(job: JobView, rule: Rule, count: int, max_failures: int) -> str:
    """Why there is no further attempt; empty if there is one."""
    if rule.action is Action.FAIL_JOB:
        return "such a failure is never retried"
    if rule.budget is not None and count >= rule.budget:
        return f"attempts that may end so: {rule.budget}, all spent"
    charged = sum(n for kind, n in job.failures.items() if POLICY[kind].charge is Charge.JOB)
    if rule.charge is Charge.JOB and charged >= max_failures:
        return f"max_failures={max_failures} is spent; resubmit the sweep to try again"
    return ""
