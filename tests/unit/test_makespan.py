"""Critical path, list scheduling, time left, and the budget guard."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.contract import Resources
from orchestrator.planning.estimate.estimates import Estimates, JobEstimate, refusals
from orchestrator.planning.estimate.eta import Fleet, critical_path, list_schedule, time_left
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.plan import Plan
from orchestrator.sweepfile.values import Policy
from tests.builders import make_job, make_plan


def fleet(*gpus: float, cpus: float = 64.0) -> Fleet:
    return Fleet(nodes=tuple(Resources(cpus=cpus, gpus=number) for number in gpus))


def diamond() -> Plan:
    return make_plan(
        make_job("dataset/d", cpus=1),
        make_job("pretrain/a", "dataset/d", gpus=1),
        make_job("pretrain/b", "dataset/d", gpus=1),
        make_job("finetune/a", "pretrain/a", gpus=1),
        make_job("finetune/b", "pretrain/b", gpus=1),
    )


DURATIONS = {"dataset/d": 1.0, "pretrain/a": 10.0, "pretrain/b": 5.0, "finetune/a": 2.0, "finetune/b": 3.0}


def test_critical_path_is_the_longest_chain() -> None:
    path = critical_path(diamond(), DURATIONS)
    assert path.jobs == ("dataset/d", "pretrain/a", "finetune/a")
    assert path.seconds == 13


def test_critical_path_leaves_out_jobs_that_take_nothing() -> None:
    path = critical_path(diamond(), {"finetune/b": 3.0})
    assert (path.jobs, path.seconds) == (("finetune/b",), 3.0)
    assert critical_path(diamond(), {}).seconds == 0
    assert critical_path(make_plan(), {}).jobs == ()


def test_list_schedule_enough_gpus_takes_the_critical_path() -> None:
    makespan = list_schedule(diamond(), DURATIONS, fleet(2))
    assert makespan.seconds == makespan.critical_s == makespan.bound_s == 13


def test_list_schedule_one_gpu_takes_all_work_one_after_the_other() -> None:
    makespan = list_schedule(diamond(), DURATIONS, fleet(1))
    assert makespan.seconds == 1 + 20
    assert makespan.busy_s == 20
    assert makespan.starts_s["pretrain/a"] < makespan.starts_s["pretrain/b"]  # the longer chain goes first


def test_list_schedule_reused_jobs_do_not_hold_others_up() -> None:
    makespan = list_schedule(diamond(), {"finetune/a": 2.0, "finetune/b": 3.0}, fleet(2))
    assert makespan.seconds == 3


def test_list_schedule_job_larger_than_any_node_never_runs_and_nor_does_what_needs_it() -> None:
    plan = make_plan(make_job("pretrain/a", gpus=2), make_job("finetune/a", "pretrain/a"), make_job("dataset/d"))
    makespan = list_schedule(plan, {"pretrain/a": 1.0, "finetune/a": 1.0, "dataset/d": 5.0}, fleet(1, 1))
    assert makespan.never == ("pretrain/a", "finetune/a")
    assert makespan.seconds == 5


def test_list_schedule_gang_lies_on_several_nodes() -> None:
    plan = make_plan(make_job("pretrain/a", gpus=2, workers=2))
    assert list_schedule(plan, {"pretrain/a": 4.0}, fleet(1, 1)).seconds == 4
    assert list_schedule(plan, {"pretrain/a": 4.0}, fleet(1)).never == ("pretrain/a",)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Plan, dict[str, float]]:
    number = draw(st.integers(1, 14))
    jobs = []
    for at in range(number):
        needs = draw(st.sets(st.integers(0, at - 1), max_size=3)) if at else set()
        gpus = draw(st.sampled_from([1.0, 1.0, 2.0, 4.0]))
        names = [f"pretrain/{need}" for need in sorted(needs)]
        jobs.append(make_job(f"pretrain/{at}", *names, gpus=gpus, workers=int(gpus)))
    durations = {job.name: draw(st.floats(0.1, 100)) for job in jobs if draw(st.booleans()) or job.name == "pretrain/0"}
    return make_plan(*jobs), durations


@given(planned(), st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=4))
def test_list_schedule_any_plan_keeps_order_and_room_and_lies_between_its_bounds(
    planned: tuple[Plan, dict[str, float]], gpus: list[float]
) -> None:
    plan, durations = planned
    room = fleet(*gpus)
    makespan = list_schedule(plan, durations, room)
    jobs, starts = plan.by_name(), makespan.starts_s
    assert set(starts) | set(makespan.never) == set(durations)
    for name, start in starts.items():
        for need in jobs[name].needs:
            assert need not in durations or start >= starts[need] + durations[need] - 1e-9
        held = [
            jobs[other].resources.gpus
            for other, begun in starts.items()
            if begun <= start < begun + durations[other] - 1e-12
        ]
        assert sum(held) <= room.gpus + 1e-6
    assert makespan.seconds >= makespan.bound_s - 1e-6
    assert makespan.seconds <= sum(durations.values()) + 1e-6


def test_time_left_is_corrected_by_what_jobs_took() -> None:
    left = time_left(
        diamond(),
        DURATIONS,
        fleet(1),
        done={"dataset/d", "pretrain/a"},
        running_left_s={},
        measured_s={"pretrain/a": 20.0},
    )
    assert left.seconds == 2 * 5 + 2 + 3


def test_time_left_running_jobs_say_it_themselves() -> None:
    left = time_left(
        diamond(),
        DURATIONS,
        fleet(2),
        done={"dataset/d", "pretrain/b", "finetune/b"},
        running_left_s={"pretrain/a": 4.0},
        measured_s={},
    )
    assert left.seconds == 6


def test_time_left_running_jobs_keep_the_room_that_they_have() -> None:
    left = time_left(
        diamond(),
        DURATIONS,
        fleet(1),
        done={"dataset/d"},
        running_left_s={"pretrain/b": 1.0},  # though the chain of a is the longer one
        measured_s={},
    )
    assert left.seconds == 1 + 10 + 3 + 2


def test_time_left_nothing_left_is_zero() -> None:
    left = time_left(diamond(), DURATIONS, fleet(1), done=set(DURATIONS), running_left_s={}, measured_s={})
    assert left.seconds == 0


def guarded(policy: Policy, *, cost: float | None = None, prices: PriceTable | None = None) -> list[str]:
    plan = replace(diamond(), policy=policy)
    hour = JobEstimate(seconds=3600, gpus=1, accelerator="A100", cost=cost)
    estimates = Estimates(jobs={f"job{number}": hour for number in range(10)}, prices=prices)
    return refusals(plan, estimates, list_schedule(plan, DURATIONS, fleet(1)), now=1000.0)


PRICES = PriceTable.parse("{currency: USD, A100: 3}", "p")


@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(gpu_hours=10), Policy(cost=30), Policy(deadline_s=1021), Policy(time_limit_s=21)],
)
def test_refusals_within_the_budget_there_are_none(policy: Policy) -> None:
    assert guarded(policy, cost=3.0, prices=PRICES) == []


@pytest.mark.parametrize(
    ("policy", "arithmetic"),
    [
        (Policy(gpu_hours=9.5), ("9.5 GPU-hours", "10.0", "0.5 too many")),
        (Policy(cost=29), ("29.00 USD", "30.00 USD", "1.00 USD too much")),
        (Policy(deadline_s=1020), ("1970-01-01 00:17 UTC", "20.0s", "21.0s", "13.0s")),
        (Policy(time_limit_s=20), ("21.0s",)),
    ],
)
def test_refusals_beyond_the_budget_show_their_arithmetic(policy: Policy, arithmetic: tuple[str, ...]) -> None:
    (refusal,) = guarded(policy, cost=3.0, prices=PRICES)
    assert all(number in refusal for number in arithmetic)


def test_refusals_of_sums_below_a_cent_say_these_sums() -> None:
    (refusal,) = guarded(Policy(cost=0.001), cost=0.00012, prices=PRICES)
    assert "allows 0.0010 USD; the jobs to run cost about 0.0012 USD" in refusal
    assert "0.00020 USD too much" in refusal


def test_refusals_cost_budget_without_prices_is_refused_and_says_what_is_missing() -> None:
    (refusal,) = guarded(Policy(cost=29))
    assert "--prices" in refusal


def test_refusals_cost_budget_with_a_price_per_gpu_hour_needs_no_table() -> None:
    assert guarded(Policy(cost=30, gpu_hour_price=3)) == []
    (refusal,) = guarded(Policy(cost=29, gpu_hour_price=3))
    assert "10.0 GPU-hours at 3" in refusal


def test_time_left_of_jobs_that_share_a_key_is_that_of_one() -> None:
    first, second = make_job("finetune/plain", key="finetune-same"), make_job("finetune/whole", key="finetune-same")
    below = make_job("finetune/below", second.name)
    plan = make_plan(first, second, below)
    durations = {first.name: 10.0, second.name: 10.0, below.name: 5.0}
    waiting = time_left(plan, durations, fleet(1), done=(), running_left_s={}, measured_s={})
    assert (waiting.seconds, dict(waiting.left_s)) == (15.0, {first.name: 10.0, below.name: 5.0})
    running = time_left(plan, durations, fleet(1), done=(), running_left_s={second.name: 4.0}, measured_s={})
    assert (running.seconds, dict(running.left_s)) == (9.0, {second.name: 4.0, below.name: 5.0})
