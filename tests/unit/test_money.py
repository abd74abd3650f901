"""Money where people look for it: what controllers record of nodes, and what status and report make of it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.protocol import AttemptReport, Capacity
from orchestrator.cli.commands import report as report_command
from orchestrator.core.contract import Resources
from orchestrator.core.errors import UserError
from orchestrator.planning.estimate.eta import TimeLeft
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.report.build import compute_report
from orchestrator.report.render.files import render_files
from orchestrator.report.results import Report
from orchestrator.scheduling.budgets import Budget
from orchestrator.services.costs import read_prices
from orchestrator.services.status import SweepStatus, present_document, status_lines, used_hours
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import JobTable, JobView, Snapshot
from orchestrator.state.spending import PricedAllocation, ResourceUse, bill_of
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.journal import Journal
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.values import Policy
from orchestrator.testing import Lose, ScriptedBackend, Succeed
from tests.commands import run_command
from tests.live_sweep import SWEEP, write_live_sweep
from tests.report_sweeps import StudyPlan, committed
from tests.report_sweeps import printed as _printed
from tests.scripted_sweep import World, make_job, make_plan

NOW = 1_800_000_000.0
TABLE = PriceTable.parse("{currency: USD, H100: {hour: 7.0, spot: 3.0}, cpu: 0.05}", "p.yaml")


# ------------------------------------------------------------------------------------------------- what is recorded
class PricedBackend(ScriptedBackend):
    """One node with a price, or none yet, so that attempts are sent anywhere; ``moved_to`` is where they went."""

    is_there = True
    moved_to = ""

    def capacity(self) -> Capacity:
        price = {"price": "0.80"}
        named = Node(name="node-1", resources=self.total, labels=price, is_spot=True)
        other = Node(name="node-2", resources=replace(self.total, cpus=self.total.cpus * 2), labels=price)
        machines = (named, *((other,) if self.moved_to else ())) if self.is_there else ()
        shape = Node(resources=self.total)
        return Capacity(total=self.total, nodes=(self.total,), machines=machines, maximum=(shape,))

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        node = self.moved_to or ("node-1" if self.is_there else "")
        return [replace(report, node=node) for report in super().observe(attempt_ids)]


def _world(root: Path, backend_kind: type[PricedBackend] = PricedBackend, **scripts: list[object]) -> World:
    store = LocalStore(root)
    named = {name.replace("_", "/"): script for name, script in scripts.items()}
    backend = backend_kind(store, named, total=Resources(cpus=4.0))  # type: ignore[arg-type]
    return World(root, backend, store=store)


def _events(world: World, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in Journal(world.store, "sweep", holder="t").read_new() if event["type"] == kind]


def test_launch_on_a_known_node_records_its_market_and_its_price(tmp_path: Path) -> None:
    world = _world(tmp_path, dataset_0=[Succeed(after_observes=1000)])
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: world.is_running("dataset/0"))
    attempt = world.job("dataset/0").attempt
    assert attempt is not None
    assert attempt.lots == (PricedAllocation(is_spot=True, hourly=0.2),)  # one of four cores


def test_attempt_for_which_the_cluster_grew_is_priced_once_its_node_is_known(tmp_path: Path) -> None:
    world = _world(tmp_path, dataset_0=[Succeed(after_observes=1000), Succeed()])
    backend = world.backend
    assert isinstance(backend, PricedBackend)
    backend.is_there = False
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: world.is_running("dataset/0"))
    attempt = world.job("dataset/0").attempt
    assert attempt is not None
    assert attempt.lots == ()
    backend.is_there = True
    for _ in range(5):
        world.tick()
    attempt = world.job("dataset/0").attempt
    assert attempt is not None
    assert attempt.lots[0].hourly == pytest.approx(0.2)
    assert attempt.nodes == ("node-1",)  # the scheduler had chosen none
    assert len(_events(world, "attempt_placed")) == 1


def test_attempt_that_went_elsewhere_is_billed_where_it_is(tmp_path: Path) -> None:
    world = _world(tmp_path, dataset_0=[Succeed(after_observes=1000)])
    assert isinstance(world.backend, PricedBackend)
    world.backend.moved_to = "node-2"
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: bool(_events(world, "attempt_placed")))
    attempt = world.job("dataset/0").attempt
    assert attempt is not None
    assert attempt.lots[0].hourly == pytest.approx(0.1)
    assert not attempt.lots[0].is_spot
    assert attempt.nodes == ("node-1",)  # what the scheduler decided stays
    world.tick()
    assert len(_events(world, "attempt_placed")) == 1


def test_cost_of_lost_attempts_counts_as_that_of_others(tmp_path: Path) -> None:
    world = _world(tmp_path, dataset_0=[Lose(), Succeed()])
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: world.snapshot().state.is_final)
    view = world.job("dataset/0")
    assert view.num_attempts == 2
    assert bill_of(view.used).amount == pytest.approx(view.ran_s / 3600 * 0.2)
    assert view.ran_s > 0


# ------------------------------------------------------------------------------------------------------------ status
def _standing(
    *used: ResourceUse, policy: Policy | None = None, left_s: float | None = None, prices: PriceTable | None = None
) -> SweepStatus:
    """Of a sweep of two jobs on one GPU each: one has ended and used this, one takes as long as this yet."""
    jobs = [replace(make_job(f"pretrain/{name}"), resources=Resources(cpus=8.0, gpus=1.0)) for name in "ab"]
    plan = replace(make_plan(*jobs), policy=policy or Policy())
    ran_s = sum(use.gpu_s for use in used)
    first = JobView(name=jobs[0].name, key=jobs[0].key, ran_s=ran_s, used=used, state=JobState.SUCCEEDED)
    views = JobTable([first, JobView(name=jobs[1].name, key=jobs[1].key)])
    snapshot = Snapshot(sweep="s", state=SweepState.RUNNING, plan=plan, accepted_at_s=NOW, jobs=views)
    left = None if left_s is None else TimeLeft(seconds=left_s, left_s={jobs[1].name: left_s})
    return SweepStatus(snapshot=snapshot, now=NOW, prices=prices, left=left, left_on="a node")


LABELLED = ResourceUse(accelerator="H100", is_spot=True, gpu_s=7200.0, cpu_s=57_600.0, amount=6.0)
BARE = ResourceUse(accelerator="H100", is_spot=False, gpu_s=3600.0, cpu_s=28_800.0)


def _told(standing: SweepStatus) -> str:
    return "\n".join(status_lines(standing))


def test_status_says_what_it_cost_and_will_cost() -> None:
    assert "Cost so far 6.00, about 9.00 in all" in _told(_standing(LABELLED, left_s=3600.0))
    priced = _standing(LABELLED, BARE, left_s=3600.0, prices=TABLE)
    assert "Cost so far 13.00 USD, about 17.33 USD in all" in _told(priced)
    cost = present_document(priced)["cost"]
    assert (cost["amount"], cost["is_partial"], cost["currency"]) == (13.0, False, "USD")
    assert cost["expected"] == pytest.approx(13.0 + 13.0 / 3)


def test_status_says_at_least_where_a_part_has_no_price() -> None:
    told = _told(_standing(LABELLED, BARE, left_s=3600.0))
    assert "Cost so far at least 6.00: 1.00 GPU-hours have no known price" in told
    assert "in all" not in told


def test_status_without_any_price_says_nothing_of_money_and_null_to_machines() -> None:
    assert "Cost" not in _told(_standing(BARE))
    cost = present_document(_standing(BARE))["cost"]
    assert (cost["amount"], cost["expected"], cost["unpriced_gpu_hours"]) == (None, None, 1.0)
    other = PriceTable.parse("{L4: 1}", "p.yaml")
    assert "Cost so far unknown: 1.00 GPU-hours have no price" in _told(_standing(BARE, prices=other))


def test_status_counts_a_budget_of_money_as_the_scheduler_does() -> None:
    policy = Policy(cost=20.0, gpu_hour_price=4.0)
    standing = _standing(LABELLED, policy=policy, left_s=3600.0)
    told = _told(standing)
    assert "Used 8.00 of 20.00 (2.00 GPU-hours at 4), 40 % of the budget, about 12.00 in all" in told
    gpu_hours, _ = used_hours(standing.snapshot, NOW)
    guard = Budget(policy=policy, used=gpu_hours, promised=0.0)
    assert guard.refusal(2.9) == ""
    assert "the budget is 20" in guard.refusal(3.1)  # 12.00 are left, at 4: three hours
    assert present_document(standing)["cost_budget"] == 20.0


def test_status_of_a_sweep_of_both_budgets_tells_the_one_that_ends_first() -> None:
    assert "2.00 of 3.00 GPU-hours" in _told(
        _standing(LABELLED, policy=Policy(gpu_hours=3.0, cost=99, gpu_hour_price=1))
    )
    assert "4.00 of 5.00 (2.00" in _told(_standing(LABELLED, policy=Policy(gpu_hours=9.0, cost=5, gpu_hour_price=2)))


def test_status_command_takes_the_table_of_the_option_or_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    write_live_sweep(store, num_transfers=40, now=NOW)
    path = tmp_path / "p.yaml"
    path.write_text("{currency: EUR, cpu: 1}")
    arguments = ("status", SWEEP, "--store", store.uri, "-o", "json")
    by_option = json.loads(run_command(capsys, *arguments, "--prices", str(path)).out)
    monkeypatch.setenv("ORCHESTRATOR_PRICES", str(path))
    by_setting = json.loads(run_command(capsys, *arguments).out)
    assert by_option["cost"]["currency"] == by_setting["cost"]["currency"] == "EUR"


def test_prices_that_cannot_be_read_are_named_with_where_they_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--prices /nowhere cannot be read"):
        read_prices("/nowhere")
    monkeypatch.setenv("ORCHESTRATOR_PRICES", "/nowhere/else")
    with pytest.raises(UserError, match=r"the setting prices .* /nowhere/else cannot be read"):
        read_prices("")
    monkeypatch.delenv("ORCHESTRATOR_PRICES")
    assert read_prices("") is None


# ------------------------------------------------------------------------------------------------------------ report
def _report(
    *, used: dict[str, tuple[ResourceUse, ...]], prices: PriceTable | None = None, measured_s: float | None = None
) -> Report:
    plan = StudyPlan().plan()
    views = {
        job.name: JobView(
            name=job.name, key=job.key, state=JobState.SUCCEEDED, ran_s=3600.0, used=used.get(job.kind.value, ())
        )
        for job in plan.jobs
        if job.kind.value in used
    }
    found = committed(plan, lambda _: {"val_error": 0.1}, measured_s=measured_s)
    return compute_report(plan, found, views, prices)


def _cost_of(report: Report) -> tuple[float | None, bool]:
    compute = report.tables[0].rows[0].compute
    assert compute is not None
    return compute.cost, compute.is_cost_partial


def test_report_adds_what_the_nodes_of_backbones_and_transfers_cost() -> None:
    hour = ResourceUse(accelerator="H100", is_spot=True, gpu_s=4 * 3600.0, amount=12.0)
    report = _report(used={"pretrain": (hour,), "finetune": (hour,)})
    compute = report.tables[0].rows[0].compute
    assert compute is not None
    num_runs = round(compute.gpu_hours / 4)
    assert _cost_of(report) == (12.0 * num_runs, False)
    assert f"{12.0 * num_runs:.2f}" in _printed(report)
    files = render_files(report)
    (line, *_) = csv.DictReader(io.StringIO(files["results.csv"].decode()))
    assert (float(line["cost"]), line["cost_is_partial"], line["currency"]) == (12.0 * num_runs, "0", "")
    assert "cost" in files["report.md"].decode()


def test_report_of_reused_results_says_at_least() -> None:
    hour = ResourceUse(accelerator="H100", is_spot=True, gpu_s=4 * 3600.0, amount=12.0)
    report = _report(used={"pretrain": (hour,)}, measured_s=3600.0)  # the transfers were made by another sweep
    cost, is_partial = _cost_of(report)
    assert is_partial
    assert f"≥ {cost:.2f}" in _printed(report)


def test_report_takes_a_table_where_nodes_had_no_label() -> None:
    bare = ResourceUse(accelerator="H100", is_spot=False, gpu_s=3600.0)
    report = _report(used={"pretrain": (bare,), "finetune": (bare,)}, prices=TABLE)
    cost, is_partial = _cost_of(report)
    assert cost is not None
    assert cost % 7.0 == pytest.approx(0.0)
    assert not is_partial
    assert "[USD]" in _printed(report)


def test_report_without_prices_has_no_cost() -> None:
    report = _report(used={}, measured_s=3600.0)
    assert _cost_of(report)[0] is None
    assert "cost" not in _printed(report)


def test_cost_on_the_page_of_a_report_is_by_the_table_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    write_live_sweep(store, num_transfers=40, now=NOW - 1e7)  # the command has the real clock
    path = tmp_path / "p.yaml"
    path.write_text("{currency: EUR, cpu: 1}")
    costs: list[str] = []

    def render(*_: object, origin: Iterable[tuple[str, str]], **__: object) -> bytes:
        costs.append(dict(origin)["Cost"])
        return b""

    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    monkeypatch.setattr(report_command, "render_files", lambda _: {"report.json": b"{}"})
    monkeypatch.setattr(report_command, "render_page", render)
    ended = run_command(capsys, "report", SWEEP, "--store", store.uri, "--html", "--prices", str(path), "-o", "json")
    assert ended.code == 0, ended.err
    assert "Cost so far" in costs[0]
