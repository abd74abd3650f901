"""What attempts cost, by the prices of their nodes and by a table."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestrator.core.contract import Execution, Outcome, Resources
from orchestrator.metrics.sweeps import SweepAccount
from orchestrator.notifications.messages import used_gpu_hours
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.scheduling.demand import DemandTable
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.services.status import used_hours
from orchestrator.state import events
from orchestrator.state.fold import fold
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.spending import (
    Bill,
    PricedAllocation,
    ResourceUse,
    added,
    bill_of,
    price_of,
    priced_allocations,
)
from tests.builders import done, launched, make_job, make_plan

GPU_NODE = Node(
    name="g", resources=Resources(cpus=96.0, gpus=8.0), labels={"price": "24.00"}, accelerator="H100", is_spot=True
)
ON_DEMAND = replace(GPU_NODE, name="d", labels={"price": "55.04"}, is_spot=False)
CPU_NODE = Node(name="c", resources=Resources(cpus=16.0), labels={"price": "0.80"})
UNPRICED = Node(name="u", resources=Resources(cpus=96.0, gpus=8.0), accelerator="H100", is_spot=True)
NODES = {node.name: node for node in (GPU_NODE, ON_DEMAND, CPU_NODE, UNPRICED)}
TABLE = PriceTable.parse("{currency: USD, H100: {hour: 7.0, spot: 3.0}, L4: 0.7, cpu: {hour: 0.05, spot: 0.02}}", "p")


@pytest.mark.parametrize(
    ("name", "resources", "expected"),
    [
        ("g", Resources(cpus=12.0, gpus=1.0), 3.0),
        ("g", Resources(cpus=96.0, gpus=8.0), 24.0),
        ("g", Resources(cpus=48.0, gpus=1.0), 12.0),  # the cores of four GPUs: nobody else can use these
        ("c", Resources(cpus=4.0), 0.2),
        ("g", Resources(cpus=12.0), 3.0),
    ],
)
def test_lot_of_one_worker_costs_its_share_of_the_node(name: str, resources: Resources, expected: float) -> None:
    (lot,) = priced_allocations((name,), NODES, resources, 1)
    assert lot.hourly == pytest.approx(expected)
    assert lot.accelerator == NODES[name].accelerator
    assert lot.is_spot is NODES[name].is_spot


def test_lots_of_a_gang_over_two_markets_are_priced_each() -> None:
    gang = Resources(cpus=36.0, gpus=3.0)
    spot, on_demand = priced_allocations(("g", "d", "g"), NODES, gang, 3)
    assert (spot.num_workers, spot.is_spot) == (2, True)
    assert spot.hourly == pytest.approx(6.0)
    assert (on_demand.num_workers, on_demand.is_spot) == (1, False)
    assert on_demand.hourly == pytest.approx(6.88)


def test_lots_of_a_gang_on_one_node_count_all_workers() -> None:
    (lot,) = priced_allocations(("g",), NODES, Resources(cpus=24.0, gpus=2.0), 2)
    assert lot.num_workers == 2
    assert lot.hourly == pytest.approx(6.0)


@pytest.mark.parametrize("names", [("g", "gone"), ("gone",), (), ("g", "g")])
def test_lots_with_a_node_that_nobody_knows_are_unknown(names: tuple[str, ...]) -> None:
    assert priced_allocations(names, NODES, Resources(cpus=3.0, gpus=3.0), 3 if len(names) != 1 else 1) == ()


@pytest.mark.parametrize("text", ["", "free", "-1", "nan", "inf"])
def test_price_label_that_is_no_price_counts_as_none(text: str) -> None:
    assert price_of(replace(GPU_NODE, labels={"price": text})) is None


def test_bill_takes_labels_first_and_the_table_for_the_rest() -> None:
    labelled = ResourceUse(accelerator="H100", is_spot=True, gpu_s=7200.0, cpu_s=9.0, amount=5.0)
    bare = ResourceUse(accelerator="H100", is_spot=False, gpu_s=3600.0, cpu_s=9.0)
    cores = ResourceUse(is_spot=True, cpu_s=36_000.0)
    bill = bill_of([labelled, bare, cores], TABLE)
    assert bill.amount == pytest.approx(5.0 + 7.0 + 10 * 0.02)
    assert bill.gpu_hours == pytest.approx(3.0)
    assert bill.core_hours == pytest.approx(10.0)
    assert not bill.is_partial
    without = bill_of([labelled, bare, cores])
    assert (without.amount, without.is_partial) == (5.0, True)
    assert without.unpriced_gpu_hours == pytest.approx(1.0)
    assert without.unpriced_core_hours == pytest.approx(10.0)


def test_bill_without_the_market_is_known_only_where_both_cost_the_same() -> None:
    assert bill_of([ResourceUse(accelerator="L4", gpu_s=3600.0)], TABLE).amount == pytest.approx(0.7)
    assert bill_of([ResourceUse(accelerator="H100", gpu_s=3600.0)], TABLE).is_partial
    assert not bill_of([ResourceUse(accelerator="H100", gpu_s=3600.0)], TABLE).is_known
    assert bill_of([ResourceUse(accelerator="A100", is_spot=True, gpu_s=3600.0)], TABLE).is_partial


def test_bill_expects_the_rest_at_the_price_so_far() -> None:
    bill = bill_of(
        [
            ResourceUse(is_spot=True, accelerator="H100", gpu_s=7200.0, amount=6.0),
            ResourceUse(is_spot=True, cpu_s=3600.0),
        ],
        TABLE,
    )
    assert bill.expected(10.0, 0.0) == pytest.approx(6.02 + 30.0)
    assert bill.expected(0.0, 100.0) == pytest.approx(6.02 + 2.0)
    assert Bill().expected(0.0, 0.0) == 0.0
    assert Bill().expected(1.0, 0.0) is None
    assert bill_of([ResourceUse(gpu_s=1.0)]).expected(0.0, 0.0) is None


def test_uses_of_one_sort_are_added_and_others_kept() -> None:
    one = ResourceUse(is_spot=True, gpu_s=1.0, amount=2.0)
    assert added((one,), [one, replace(one, amount=None), ResourceUse()]) == (
        ResourceUse(is_spot=True, gpu_s=2.0, amount=4.0),
        replace(one, amount=None),
    )


def _launched(at_s: float, number: int, *, lots: tuple[PricedAllocation, ...] = ()) -> events.AttemptLaunched:
    return events.AttemptLaunched(
        at_s=at_s, job="pretrain/a", attempt_id=f"k.{number}", key="k", number=number, epoch=1, lots=lots
    )


def _ended(at_s: float, number: int) -> events.AttemptSucceeded:
    return events.AttemptSucceeded(at_s=at_s, job="pretrain/a", attempt_id=f"k.{number}", outcome=Outcome.COMMITTED)


def _fold(*journal: events.Event) -> Snapshot:
    job = replace(make_job("pretrain/a"), key="k", resources=Resources(cpus=12.0, gpus=1.0))
    plans = {1: make_plan(job), 2: make_plan(replace(job, name="pretrain/b", key="other"))}
    accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
    return fold("sweep", [accepted, *journal], lambda event: plans[event.revision])


def test_fold_bills_each_attempt_at_the_price_of_its_own_node() -> None:
    snapshot = _fold(
        _launched(0.0, 1, lots=(PricedAllocation(is_spot=True, hourly=3.0),)),
        events.AttemptLost(at_s=3600.0, job="pretrain/a", attempt_id="k.1", reason="gone"),
        _launched(3600.0, 2),
        events.AttemptPlaced(
            at_s=3700.0, job="pretrain/a", attempt_id="k.2", nodes=("d",), lots=(PricedAllocation(hourly=7.0),)
        ),
    )
    assert bill_of(snapshot.uses(7200.0)).amount == pytest.approx(3.0 + 7.0)  # from its launch on
    ended = _fold(_launched(0.0, 1, lots=(PricedAllocation(hourly=2.0),)), _ended(3600.0, 1))
    assert bill_of(ended.jobs["pretrain/a"].used).amount == pytest.approx(2.0)


def test_fold_keeps_the_cost_of_jobs_that_a_later_revision_does_not_have() -> None:
    revised = events.PlanAccepted(at_s=5000.0, message_id="n", revision=2)
    ended = _fold(_launched(0.0, 1, lots=(PricedAllocation(hourly=2.0),)), _ended(3600.0, 1), revised)
    assert bill_of(ended.uses(9999.0)).amount == pytest.approx(2.0)
    placed = events.AttemptPlaced(
        at_s=6000.0, job="pretrain/a", attempt_id="k.1", nodes=("g",), lots=(PricedAllocation(hourly=2.0),)
    )
    leaving = _fold(_launched(0.0, 1), revised, placed, _ended(7200.0, 1))
    assert bill_of(leaving.uses(9999.0)).amount == pytest.approx(4.0)


def test_fold_of_a_journal_without_prices_leaves_them_unknown() -> None:
    bill = bill_of(_fold(_launched(0.0, 1), _ended(3600.0, 1)).uses(4000.0), TABLE)
    assert bill.amount == 0.0
    assert bill.unpriced_gpu_hours == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------------------- hours
def _counted(snapshot: Snapshot) -> Iterator[float]:
    """GPU-hours of a sweep without live attempts, as ``status``, messages, Prometheus and the budget count them."""
    yield used_hours(snapshot, 9e9)[0]
    yield used_gpu_hours(snapshot, 9e9)
    account = SweepAccount()
    account.follow(snapshot)
    yield account.gpu_hours(9e9)
    assert snapshot.plan is not None
    index = SweepIndex(snapshot.plan, DemandTable(), {})
    index.update(snapshot)
    yield index.holdings.history.gpu_hours + snapshot.spent_gpu_s / 3600.0


def test_hours_are_those_of_the_gpus_that_a_smaller_gang_held_whatever_the_plan_asks() -> None:
    gang, end_s = make_job("pretrain/a", cpus=32.0, gpus=8.0, min_gpus=2.0, workers=8), 10 * 3600.0
    plans = {1: make_plan(gang), 2: make_plan(replace(gang, resources=Resources(cpus=4.0, gpus=1.0))), 3: make_plan()}
    journal: list[events.Event] = [
        events.PlanAccepted(at_s=0.0, message_id="m1", revision=1),
        launched(gang, at_s=0.0, resources=Resources(cpus=8.0, gpus=2.0), num_workers=2),
        done(gang, end_s),
    ]
    for revision in plans:
        if revision > 1:
            journal.append(events.PlanAccepted(at_s=end_s + revision, message_id=f"m{revision}", revision=revision))
        snapshot = fold("s", journal, lambda event: plans[event.revision])
        assert list(_counted(snapshot)) == pytest.approx([20.0] * 4), f"revision {revision}"
        assert used_hours(snapshot, 9e9)[1] == pytest.approx(80.0)


def test_past_use_for_fair_shares_is_what_a_smaller_gang_held() -> None:
    gang = replace(make_job("pretrain/a"), resources=Resources(cpus=32.0, gpus=8.0, memory_gib=80.0, min_gpus=2.0))
    plan = make_plan(replace(gang, execution=Execution(num_workers=8)))
    held = Resources(cpus=8.0, gpus=2.0, memory_gib=20.0)
    journal = [
        events.PlanAccepted(at_s=0.0, message_id="m", revision=1),
        launched(gang, at_s=0.0, resources=held, num_workers=2),
        done(gang, 100.0),
    ]
    index = SweepIndex(plan, DemandTable(), {})
    index.update(fold("s", journal, lambda _: plan))
    cpus, gpus, memory = index.holdings.history.decayed_s(100.0)
    assert (cpus / 1e4, gpus / 1e4, memory / 1024) == pytest.approx((800.0, 200.0, 2000.0))
