"""What a failure means for its job."""

import pytest

from orchestrator.errors import FailureKind
from orchestrator.state.policy import MAX_BACKOFF_S, POLICY, Charge, GiveUp, Retry, judge
from orchestrator.state.snapshot import Failure, JobView


def view(*kinds: FailureKind) -> JobView:
    counts = {kind: kinds.count(kind) for kind in kinds}
    last = Failure(attempt_id="k.1", kind=kinds[-1], message="why", at_s=100.0) if kinds else None
    return JobView(name="j", key="k", failures=counts, last_failure=last)


def test_policy_has_a_rule_for_every_kind() -> None:
    assert set(POLICY) == set(FailureKind)


def test_job_without_failures_may_start_at_once() -> None:
    assert judge(view(), max_failures=1) == Retry(at_s=0.0)


@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.INFEASIBLE, FailureKind.NUMERICS])
def test_failure_that_would_repeat_itself_is_never_retried(kind: FailureKind) -> None:
    verdict = judge(view(kind), max_failures=10)
    assert isinstance(verdict, GiveUp)
    assert "why" in verdict.reason


def test_budget_counts_failures_of_all_charged_kinds_together() -> None:
    mixed = view(FailureKind.UNKNOWN, FailureKind.TIMEOUT, FailureKind.STORAGE)
    assert isinstance(judge(mixed, max_failures=3), GiveUp)
    assert isinstance(judge(mixed, max_failures=4), Retry)


def test_preemptions_and_lost_nodes_leave_the_budget_alone() -> None:
    assert {kind for kind, rule in POLICY.items() if rule.charge is Charge.CLUSTER} == {
        FailureKind.PREEMPTED,
        FailureKind.NODE_LOST,
    }
    kinds = [FailureKind.PREEMPTED] * 50 + [FailureKind.NODE_LOST] * 5
    assert isinstance(judge(view(*kinds), max_failures=1), Retry)


def test_job_that_always_takes_its_node_down_is_given_up() -> None:
    budget = POLICY[FailureKind.NODE_LOST].budget
    assert budget is not None
    assert isinstance(judge(view(*[FailureKind.NODE_LOST] * budget), max_failures=99), GiveUp)


def test_backoff_doubles_up_to_a_bound() -> None:
    waits = []
    for count in range(1, 60):
        verdict = judge(view(*[FailureKind.UNKNOWN] * count), max_failures=999)
        assert isinstance(verdict, Retry)
        waits.append(verdict.at_s - 100.0)
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == MAX_BACKOFF_S
    assert waits == sorted(waits)
