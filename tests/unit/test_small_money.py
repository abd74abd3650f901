"""Sums of all sizes, and why a cost is not known: as people read them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.errors import UserError
from orchestrator.core.units import format_money
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.report.build import compute_report
from orchestrator.report.render.columns import TextTable
from orchestrator.report.render.numbers import money
from orchestrator.report.render.terminal import FittingTable
from orchestrator.services.costs import cost_lines, sweep_bill
from orchestrator.state.spending import ResourceUse, bill_of
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.local import LocalStore
from tests.commands import run_command
from tests.live_sweep import SWEEP, write_live_sweep
from tests.report_sweeps import StudyPlan, committed
from tests.scripted_sweep import make_job, make_plan

TABLE = PriceTable.parse("{currency: USD, cpu: {hour: 3, spot: 1}}", "p.yaml")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0.00"),
        (1234.5, "1,234.50"),
        (0.01, "0.01"),
        (0.00999, "0.010"),
        (0.001234, "0.0012"),
        (0.0000012, "0.0000012"),
        (1e-9, "<0.000001"),
        (-0.002, "-0.0020"),
    ],
)
def test_money_of_any_size_says_something(amount: float, text: str) -> None:
    assert format_money(amount) == text
    assert TABLE.show(amount) == f"{text} USD"
    assert money(amount, is_at_least=False) == text


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_money_is_never_shown_as_nothing_and_is_right_within_half_of_what_it_shows(amount: float) -> None:
    shown = float(format_money(amount).replace(",", ""))
    assert shown > 0
    assert abs(shown - amount) <= max(0.0051, 0.0) if amount >= 0.01 else abs(shown / amount - 1) <= 0.051


@pytest.mark.parametrize("currency", ["[1]", "1", "USD 2", "", "{a: b}", "abcdefghi", '""', '" "'])
def test_currency_that_is_no_name_is_refused(currency: str) -> None:
    with pytest.raises(UserError, match=r"p\.yaml: currency is .*letters or signs"):
        PriceTable.parse(f"{{currency: {currency or 'null'}, cpu: 1}}", "p.yaml")


@pytest.mark.parametrize("currency", ["USD", "€", "US$", "credits"])
def test_currency_of_letters_or_signs_is_shown(currency: str) -> None:
    assert PriceTable.parse(f"{{currency: {currency}, cpu: 1}}", "p.yaml").show(2) == f"2.00 {currency}"


def test_prices_for_all_sweeps_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "store")
    write_live_sweep(store, num_transfers=40, now=1.0)
    path = tmp_path / "p.yaml"
    path.write_text("cpu: 1")
    ended = run_command(capsys, "status", "--store", store.uri, "--prices", str(path))
    assert ended.code != 0
    assert "--prices is for the cost of one sweep" in ended.message
    assert SWEEP in run_command(capsys, "status", "--store", store.uri).out


# --------------------------------------------------------------------------------------------------- unknown markets
def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    writer = ArtifactWriter(context.store, request)
    writer.add("payload", b"x")
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=writer.commit(now=0.0))


def test_sweep_inside_this_process_is_billed_as_on_demand(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = make_plan(make_job("dataset/0"), store_uri=store.uri)
    snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node", entry_point=f"{__name__}:execute")
    (use,) = snapshot.jobs["dataset/0"].used
    assert use.is_spot is False
    bill = sweep_bill(snapshot, TABLE, now=2e9)
    assert not bill.is_partial
    assert bill.amount == pytest.approx(3 * use.cpu_s / 3600)
    (line,) = cost_lines(bill, TABLE, None)
    assert line.startswith("Cost so far 0.")
    assert "0.00 USD" not in line


def test_hours_of_an_unknown_market_are_not_blamed_on_the_table() -> None:
    unknown = ResourceUse(cpu_s=7200.0)
    (line,) = cost_lines(bill_of([unknown], TABLE), TABLE, None)
    assert line == ("Cost so far unknown: 2.00 core-hours have no price: it is not known whether the machine was spot")
    known = ResourceUse(cpu_s=3600.0, is_spot=False)
    (line,) = cost_lines(bill_of([unknown, known], TABLE), TABLE, None)
    assert line.startswith("Cost so far at least 3.00 USD: 2.00 core-hours have no known price: it is not known")
    gpus = ResourceUse(accelerator="L4", gpu_s=3600.0, is_spot=False)
    (line,) = cost_lines(bill_of([unknown, gpus], TABLE), TABLE, None)
    assert line.endswith("have no price: of some it is not known whether the machine was spot")
    (line,) = cost_lines(bill_of([gpus], TABLE), TABLE, None)
    assert line.endswith("have no price, neither by a node's label nor by the table")


# ------------------------------------------------------------------------------------------------------------ report
def test_report_says_why_it_shows_no_cost_for_prices() -> None:
    plan = StudyPlan().plan()
    found = committed(plan, lambda _: {"val_error": 0.1}, measured_s=60.0)
    other = PriceTable.parse("{L4: 2, cpu: {hour: 2, spot: 1}}", "p.yaml")
    assert any(note.startswith("cost unknown") for note in compute_report(plan, found, prices=other).notes)
    assert not any("cost" in note for note in compute_report(plan, found).notes)
    price = "{hour: 2, spot: 2}"
    names = {job.resources.accelerator for job in plan.jobs} | {"cpu", ""}
    priced = PriceTable.parse("{" + ", ".join(f"'{name}': {price}" for name in names) + "}", "p.yaml")
    assert not any("cost" in note for note in compute_report(plan, found, prices=priced).notes)


def _printed(table: TextTable, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(FittingTable(table=table))
    return " ".join(file.getvalue().split())


def test_columns_that_find_no_room_are_named() -> None:
    table = TextTable(
        title="t", header=("name", "CPU-hours", "cost [USD]"), rows=(("a", "1", "2.00"),), expendable=((1, 2),)
    )
    assert "left out for width: CPU-hours, cost [USD]; all are in -o json" in _printed(table, 16)
    assert "left out" not in _printed(table, 80)
    assert "left out" not in _printed(replace(table, expendable=()), 16)
