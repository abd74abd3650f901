"""What a failed attempt means for its job: one table, and budgets counted from the journal's events."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.errors import FailureKind
from orchestrator.state.job_view import Failure, JobView


class Action(StrEnum):
    """What follows a failure of one kind."""

    RETRY = "retry"
    RETRY_SMALLER = "retry_smaller"
    """With half the micro-batch, in whole norm groups (``Execution.memory_retries``)."""
    RETRY_ELSEWHERE = "retry_elsewhere"
    """On another node if there is one with room."""
    FAIL_JOB = "fail_job"


class Charge(StrEnum):
    """Whom a failure is charged to."""

    JOB = "job"
    """Counts towards the policy's ``max_failures``."""
    CLUSTER = "cluster"
    """Not the job's fault: only the kind's own budget counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the policy. The n-th failure of a kind waits ``backoff_s * 2**(n - 1)``, at most ``MAX_BACKOFF_S``."""

    action: Action = Action.RETRY
    charge: Charge = Charge.JOB
    budget: int | None = None
    """Failures of this kind after which the job fails; ``None`` = no limit of its own."""
    node_hours_per_failure: float = 0.0
    """Above 0: the budget grows by one whenever the job's attempts have run for so long on one node."""
    backoff_s: float = 0.0
    waits_for: str = ""
    """What has to change outside before a further attempt can succeed; its last message is told along with it."""


MAX_BACKOFF_S = 300.0
JITTER = 0.25
"""A wait is longer or shorter by up to this part: a thousand jobs that failed at once do not return at once."""
MAX_LOSSES = 1000
_WORKERS_PER_NODE = 4
SAME_STEPS, SAME_PART = 20, 0.01
"""Failures of numerics so many steps apart, or this part of the steps before, are the same one."""
_MAX_TOLD = 200
"""Characters of a message that a reason quotes."""

POLICY: dict[FailureKind, Rule] = {
    FailureKind.USER_ERROR: Rule(action=Action.FAIL_JOB),
    FailureKind.INFEASIBLE: Rule(action=Action.FAIL_JOB),
    # One flipped bit of a GPU must not end weeks of training: the next attempt replays the same samples in the same
    # order from the newest checkpoint. See ``_repetition`` for what the replay tells.
    FailureKind.NUMERICS: Rule(action=Action.RETRY_ELSEWHERE, backoff_s=1.0),
    FailureKind.OUT_OF_MEMORY: Rule(action=Action.RETRY_SMALLER, budget=2, backoff_s=2.0),
    # Once more: the copy in a node's cache may be bad and the store's good.
    FailureKind.BAD_DATA: Rule(action=Action.RETRY_ELSEWHERE, budget=2, backoff_s=2.0),
    FailureKind.TIMEOUT: Rule(action=Action.RETRY_ELSEWHERE, backoff_s=1.0),
    FailureKind.HANG: Rule(action=Action.RETRY_ELSEWHERE, backoff_s=1.0),
    # Neither a full disk nor a store that refuses is the job's fault, and both take a person some minutes to cure: the
    # seven waits add up to ten. Objects that are missing or damaged are bad data, which no waiting mends.
    FailureKind.STORAGE: Rule(
        charge=Charge.CLUSTER, budget=8, backoff_s=5.0, waits_for="the store (or the disk of a node) to work again"
    ),
    FailureKind.UNKNOWN: Rule(action=Action.RETRY_ELSEWHERE, backoff_s=1.0),
    # Free of charge, but an attempt that "is preempted" whenever it starts must not come back for ever.
    FailureKind.PREEMPTED: Rule(charge=Charge.CLUSTER, budget=100, node_hours_per_failure=1.0),
    # Bounded, because a job that kills its own node (host memory, driver) looks just like this. That dies early; a gang
    # on spot nodes dies now and then for weeks: one more for each four node-hours allows for 20 % per node-hour.
    FailureKind.NODE_LOST: Rule(
        action=Action.RETRY_ELSEWHERE,
        charge=Charge.CLUSTER,
        budget=10,
        node_hours_per_failure=4.0,
        backoff_s=0.25,
    ),
    # Nothing ran, so nothing is charged, and no budget ends it: jobs wait for a node for as long as it takes.
    FailureKind.NO_ROOM: Rule(charge=Charge.CLUSTER, backoff_s=1.0, waits_for="room on the cluster"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The job may be tried again from ``at_s`` on."""

    at_s: float
    reason: str = ""
    """Which attempt it is, of how many, and what it waits for; empty for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The job fails."""

    reason: str


def judge(job: JobView, *, max_failures: int, num_workers: int = 1) -> Retry | GiveUp:
    """What to do with a pending job, given all its failures since the sweep was last submitted.

    ``num_workers`` are those of the job: a gang lies on more nodes, and loses one of them more often.
    """
    last = job.last_failure
    if last is None or not job.failures:
        return Retry(at_s=0.0)
    rule, count = POLICY[last.kind], job.failures.get(last.kind, 0)
    allowed, how = _allowed(job, rule, num_workers)
    charged = sum(n for kind, n in job.failures.items() if POLICY[kind].charge is Charge.JOB)
    spent = _repetition(job, last, count) or _spent_budget(rule, count, allowed, how, charged, max_failures)
    if spent:
        return GiveUp(reason=f"{last.kind}: {last.message} ({spent})")
    wait_s = _backoff_s(rule, count, last.attempt_id)
    told = f"after {last.kind}"
    told += f", {count} of at most {allowed}{how}" if allowed is not None else ""
    told += f"; {charged} of {max_failures} failures (policy.failures) are used" if rule.charge is Charge.JOB else ""
    told += f"; backoff {wait_s:.3g} s, {_MEANS[rule.action]}"
    if rule.waits_for:
        told += f"; waits for {rule.waits_for}: {_first_line(last.message)}"
    return Retry(at_s=last.at_s + wait_s, reason=told)


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= _MAX_TOLD else f"{line[:_MAX_TOLD]}..."


_MEANS = {
    Action.RETRY: "tried again",
    Action.RETRY_SMALLER: "tried again with half the micro-batch",
    Action.RETRY_ELSEWHERE: "tried again, on another node if one has room",
    Action.FAIL_JOB: "not tried again",
}


def _allowed(job: JobView, rule: Rule, num_workers: int) -> tuple[int | None, str]:
    """Failures of a kind after which a job fails, and the arithmetic of it."""
    if rule.budget is None or not rule.node_hours_per_failure:
        return rule.budget, ""
    node_hours = job.ran_s / 3600.0 * max(1.0, num_workers / _WORKERS_PER_NODE)
    more = int(node_hours / rule.node_hours_per_failure)
    how = f" ({rule.budget} + one per {rule.node_hours_per_failure:g} of {node_hours:.3g} node-hours run)"
    return min(MAX_LOSSES, rule.budget + more), how


def is_same_step(first: Failure, later: Failure) -> bool:
    """Whether two failures of numerics are the same one: one flipped bit never strikes twice in the same place.

    Other GPUs, layouts and micro-batches round differently, which may move a divergence by a few steps. Failures
    without a step, as of fits, have no other place.
    """
    if first.step is None or later.step is None:
        return first.step == later.step
    return abs(first.step - later.step) <= max(SAME_STEPS, SAME_PART * first.step)


def _repetition(job: JobView, last: Failure, count: int) -> str:
    """Why a failure of numerics is the job's own: the replay of its steps came to it again."""
    if last.kind is not FailureKind.NUMERICS or count < 2 or len(job.numerics) < 2:
        return ""
    first, later = job.numerics[-2:]
    if not is_same_step(first, later):
        return ""
    where = f"step {first.step}" if first.step == later.step else f"steps {first.step} and {later.step}"
    nodes = f" (on {first.node} and {later.node})" if first.node and later.node else ""
    again = "once more from the newest checkpoint" if first.step is not None else "once more"
    at = f" at {where}" if first.step is not None else ""
    return f"the attempt was made {again} and ended so again{at}{nodes}: the data or the recipe is the cause, no node"


def _spent_budget(  # noqa: PLR0917 - the numbers of one sentence
    rule: Rule, count: int, allowed: int | None, how: str, charged: int, max_failures: int
) -> str:
    """Why there is no further attempt; empty if there is one."""
    if rule.action is Action.FAIL_JOB:
        return "a failure of this kind is never retried, since it would come back"
    if allowed is not None and count >= allowed:
        return f"attempt {count} that ended so, and at most {allowed}{how} are made"
    if rule.charge is Charge.JOB and charged >= max_failures:
        return (
            f"failed attempt {charged} of max_failures={max_failures} (policy.failures): all are spent; "
            "resubmit the sweep to try again"
        )
    return ""


def _backoff_s(rule: Rule, count: int, attempt_id: str) -> float:
    digest = hashlib.sha256(attempt_id.encode()).digest()
    spread = 1.0 + JITTER * (2.0 * int.from_bytes(digest[:4], "big") / 0xFFFFFFFF - 1.0)
    return min(MAX_BACKOFF_S, rule.backoff_s * 2.0 ** min(count - 1, 30)) * spread
