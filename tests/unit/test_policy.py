"""What a failure means for its job."""

from dataclasses import replace

import pytest

from orchestrator.core.errors import (
    CorruptObjectError,
    FailureKind,
    IdentityMismatchError,
    NotFoundError,
    StorageError,
    TooLargeError,
)
from orchestrator.state.failure_policy import JITTER, MAX_BACKOFF_S, POLICY, Charge, GiveUp, RetryAt, judge
from orchestrator.state.snapshot import Failure, JobView


def view(*kinds: FailureKind) -> JobView:
    counts = {kind: kinds.count(kind) for kind in kinds}
    last = Failure(attempt_id="k.1", kind=kinds[-1], message="why", at_s=100.0) if kinds else None
    return JobView(name="j", key="k", failures=counts, last_failure=last)


def test_policy_has_a_rule_for_every_kind() -> None:
    assert set(POLICY) == set(FailureKind)


def test_job_without_failures_may_start_at_once() -> None:
    assert judge(view(), max_failures=1) == RetryAt(at_s=0.0)


@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.INFEASIBLE])
def test_failure_that_would_repeat_itself_is_never_retried(kind: FailureKind) -> None:
    verdict = judge(view(kind), max_failures=10)
    assert isinstance(verdict, GiveUp)
    assert "why" in verdict.reason


def test_budget_counts_failures_of_all_charged_kinds_together() -> None:
    mixed = view(FailureKind.UNKNOWN, FailureKind.TIMEOUT, FailureKind.HANG)
    assert isinstance(judge(mixed, max_failures=3), GiveUp)
    assert isinstance(judge(mixed, max_failures=4), RetryAt)


def test_preemptions_lost_nodes_and_storage_leave_the_budget_alone() -> None:
    assert {kind for kind, rule in POLICY.items() if rule.charge is Charge.CLUSTER} == {
        FailureKind.PREEMPTED,
        FailureKind.NODE_LOST,
        FailureKind.STORAGE,
        FailureKind.NO_ROOM,
    }
    kinds = [FailureKind.PREEMPTED] * 50 + [FailureKind.NODE_LOST] * 5
    assert isinstance(judge(view(*kinds), max_failures=1), RetryAt)


def test_full_disk_or_refusing_store_has_ten_minutes_and_is_told_of() -> None:
    waited_s = 0.0
    for count in range(1, 8):
        verdict = judge(view(*[FailureKind.STORAGE] * count), max_failures=1)
        assert isinstance(verdict, RetryAt)
        waited_s += verdict.at_s - 100.0
        assert verdict.reason.endswith("waits for the store (or the disk of a node) to work again: why")
    assert 7 * 60.0 < waited_s < 13 * 60.0
    assert isinstance(judge(view(*[FailureKind.STORAGE] * 8), max_failures=99), GiveUp)


@pytest.mark.parametrize("error", [NotFoundError, CorruptObjectError, TooLargeError, IdentityMismatchError])
def test_object_that_no_waiting_brings_back_is_bad_data(error: type[StorageError]) -> None:
    assert error.failure_kind is FailureKind.BAD_DATA
    assert isinstance(judge(view(FailureKind.BAD_DATA, FailureKind.BAD_DATA), max_failures=9), GiveUp)


def test_job_that_always_takes_its_node_down_is_given_up() -> None:
    budget = POLICY[FailureKind.NODE_LOST].max_failures_of_kind
    assert budget is not None
    assert isinstance(judge(view(*[FailureKind.NODE_LOST] * budget), max_failures=99), GiveUp)


def test_backoff_doubles_up_to_a_bound_give_or_take_its_jitter() -> None:
    for count in range(1, 60):
        verdict = judge(view(*[FailureKind.UNKNOWN] * count), max_failures=999)
        assert isinstance(verdict, RetryAt)
        wait_s = min(MAX_BACKOFF_S, 2.0 ** (count - 1))
        assert wait_s * (1.0 - JITTER) <= verdict.at_s - 100.0 <= wait_s * (1.0 + JITTER)


def test_backoff_differs_between_attempts_and_never_for_one() -> None:
    base = view(FailureKind.UNKNOWN)
    assert base.last_failure is not None
    waits = [
        judge(replace(base, last_failure=replace(base.last_failure, attempt_id=f"k.{number}")), max_failures=9)
        for number in [*range(20), *range(20)]
    ]
    assert len({verdict.at_s for verdict in waits if isinstance(verdict, RetryAt)}) == 20


def test_job_on_lossy_nodes_may_lose_them_again_for_as_long_as_it_runs_meanwhile() -> None:
    lost = view(*[FailureKind.NODE_LOST] * 30)
    assert isinstance(judge(lost, max_failures=1), GiveUp)
    ran = replace(lost, ran_s=21 * 4 * 3600.0)  # 84 node-hours: 21 losses more than 10
    assert isinstance(judge(ran, max_failures=1), RetryAt)
    gang = replace(lost, ran_s=21 * 3600.0)
    assert isinstance(judge(gang, max_failures=1, num_workers=16), RetryAt)
    verdict = judge(gang, max_failures=1, num_workers=8)
    assert isinstance(verdict, GiveUp)
    assert "at most 20 (10 + one per 4 of 42 node-hours run)" in verdict.reason


def test_job_of_weeks_survives_more_than_one_time_without_a_store() -> None:
    failed = view(*[FailureKind.STORAGE] * 14)  # two times of ten minutes
    assert isinstance(judge(failed, max_failures=1), GiveUp)
    assert isinstance(judge(replace(failed, ran_s=7 * 6 * 3600.0), max_failures=1, num_workers=64), RetryAt)
    verdict = judge(replace(failed, ran_s=5 * 6 * 3600.0), max_failures=1, num_workers=64)
    assert isinstance(verdict, GiveUp)
    assert "at most 13 (8 + one per 6 of 30 hours run)" in verdict.reason
    ever = view(*[FailureKind.STORAGE] * 32)
    assert isinstance(judge(replace(ever, ran_s=9e9), max_failures=1), GiveUp)


def test_reason_of_a_retry_says_its_arithmetic() -> None:
    verdict = judge(view(FailureKind.HANG, FailureKind.UNKNOWN), max_failures=3)
    assert isinstance(verdict, RetryAt)
    assert "2 of 3 failures (policy.failures) are used" in verdict.reason
    assert "on another node" in verdict.reason
