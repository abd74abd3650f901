"""Simulations in the report: means with intervals, and whether what papers claim holds."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from scipy import stats

from orchestrator.cli.commands.submit import _judged
from orchestrator.cli.exits import ExitCode
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed, Learning
from orchestrator.report.render.curves import encode_png
from orchestrator.report.render.files import SIMULATION_FILES, render_files
from orchestrator.report.render.notebook import report_html
from orchestrator.report.render.page import render_page
from orchestrator.report.render.simulations import (
    SIMULATIONS_METHOD,
    draw_simulations,
    page_document,
    simulation_tables,
)
from orchestrator.report.results import Report
from orchestrator.report.statistics.expectations import Judgement, SimulationRuns, judge
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from orchestrator.sweepfile.values import Expectation
from orchestrator.sweeps.ledger import plan_content
from tests.report_sweeps import REPORT_FILES, printed

CELLS = tuple({"k": k, "labels": labels} for k in (2, 4, 8) for labels in ("coarse", "fine"))
COARSE = {"labels": ("coarse",)}


def runs_of(num_seeds: int, noise: float = 0.02) -> SimulationRuns:
    """The metric is 1/k after coarse and 3 after fine training, times noise; all cells share a large part of it."""
    rng = np.random.default_rng(0)
    means = np.array([1 / float(cell["k"]) if cell["labels"] == "coarse" else 3.0 for cell in CELLS])
    shared = 1 + rng.normal(0, 0.3, (num_seeds, 1))
    own = 1 + rng.normal(0, noise, (num_seeds, len(CELLS)))
    return SimulationRuns(cells=CELLS, values={"m": means * shared * own, "formula": means * np.ones_like(own)})


def verdict(claim: Expectation, runs: SimulationRuns) -> Judgement:
    return judge(claim, runs, "m").judgement


def slope(low: float, high: float) -> Expectation:
    return Expectation(rule="slope", of="k", log=True, low=low, high=high, where=COARSE)


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (slope(-1.1, -0.9), Judgement.HOLDS),
        (slope(-0.8, -0.5), Judgement.FAILS),
        (slope(-1.0, -0.8), Judgement.TOO_FEW),  # an end lies where the truth does
        (Expectation(rule="ratio", of="k", levels=(2, 8), low=3.9, high=4.1, where=COARSE), Judgement.HOLDS),
        (Expectation(rule="ratio", of="k", levels=(2, 8), low=5, high=6, where=COARSE), Judgement.FAILS),
        (Expectation(rule="ordering", of="labels", levels=("coarse", "fine"), low=0.0), Judgement.HOLDS),
        (Expectation(rule="ordering", of="labels", levels=("fine", "coarse"), low=0.0), Judgement.FAILS),
        (Expectation(rule="monotone", of="k", high=0.0, where=COARSE), Judgement.HOLDS),
        (Expectation(rule="monotone", of="k", low=0.0, where=COARSE), Judgement.FAILS),
        (Expectation(rule="mean", low=2.0, where={"labels": ("fine",)}), Judgement.HOLDS),
        (Expectation(rule="mean", low=2.0), Judgement.FAILS),  # coarse means are far below
        (Expectation(rule="mean", high=3.0, where={"labels": ("fine",)}), Judgement.TOO_FEW),
        (Expectation(rule="closed_form", other_metric="formula", low=0.9, high=1.1), Judgement.HOLDS),
        (Expectation(rule="closed_form", other_metric="absent", low=0.9, high=1.1), Judgement.TOO_FEW),
    ],
)
def test_claims_are_judged_by_their_error_bars(claim: Expectation, expected: Judgement) -> None:
    assert verdict(claim, runs_of(400)) is expected


def test_seeds_are_shared_by_cells_so_a_ratio_is_known_better_than_its_parts() -> None:
    runs = runs_of(50)
    (ratio,) = judge(Expectation(rule="ratio", of="k", levels=(2, 8), low=0, high=9, where=COARSE), runs, "m").numbers
    first, second = runs.values["m"][:, 0], runs.values["m"][:, 4]
    assert ratio.value == pytest.approx(first.mean() / second.mean())
    spread = first.std(ddof=1) / np.sqrt(50) / first.mean()
    assert ratio.value is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert (ratio.high - ratio.low) / ratio.value < 1.5 * spread  # unpaired it would be at least 2 * 2 * 1.4


def test_error_of_a_mean_is_the_usual_one() -> None:
    runs = runs_of(20)
    values = runs.values["m"][:, 1]
    number = judge(Expectation(rule="mean", low=0.0, where={"labels": ("fine",), "k": (2,)}), runs, "m").numbers[0]
    assert number.low == pytest.approx(values.mean() - 2.093024 * values.std(ddof=1) / np.sqrt(20), rel=1e-6)


def test_numbers_without_spread_are_judged_as_they_are() -> None:
    runs = SimulationRuns(cells=({"k": 1}, {"k": 2}), values={"m": np.ones((3, 2))})
    assert verdict(Expectation(rule="mean", low=0.5, high=1.0), runs) is Judgement.HOLDS
    assert verdict(Expectation(rule="mean", low=1.0), runs) is Judgement.FAILS
    assert verdict(Expectation(rule="monotone", of="k", low=0.0), runs) is Judgement.FAILS


def outcomes_of(*shares: float, num_seeds: int = 3) -> SimulationRuns:
    """Of each cell the share of seeds that succeed."""
    values = np.array([[float(seed < share * num_seeds) for share in shares] for seed in range(num_seeds)])
    return SimulationRuns(cells=tuple({"k": k} for k in range(len(shares))), values={"m": values})


def test_share_of_trials_has_the_exact_interval() -> None:
    """One success in 50 trials happens in 18 % of cases with a probability of 0.0606."""
    share = stats.binomtest(1, 50).proportion_ci()
    claim = Expectation(rule="mean", high=0.0605, where={"k": (0,)})
    judged = judge(claim, outcomes_of(0.02, 0.5, num_seeds=50), "m")
    assert judged.judgement is Judgement.TOO_FEW
    assert [judged.numbers[0].low, judged.numbers[0].high] == pytest.approx([share.low, share.high])


def test_exact_interval_of_a_mean_has_no_p_value_of_another_test() -> None:
    plan, _ = report_of()
    committed = {
        job.name: Committed(
            metrics={},
            runs={
                "seed": (seeds := np.arange(*job.identity["parameters"]["seeds"].values(), dtype=np.float64)),
                "m": seeds % 4 == 0,
            },
        )
        for job in plan.jobs
    }
    (found,) = compute_report(plan, committed).simulations
    exact = stats.binomtest(5, 20).proportion_ci()
    for cell in found.cells:
        estimate = cell.estimates["m"]
        assert (estimate.low, estimate.high) == pytest.approx((exact.low, exact.high))
        assert estimate.p_value is None
        assert estimate.std_error is not None
    assert "exact interval" in SIMULATIONS_METHOD


def test_trials_that_all_succeed_may_still_fail() -> None:
    """Three successes in three trials happen in 22 % of cases with a probability of 0.6."""
    claim = Expectation(rule="mean", low=0.9, where={"k": (0,)})
    judged = judge(claim, outcomes_of(1.0, 0.5), "m")
    assert judged.judgement is Judgement.TOO_FEW
    assert [judged.numbers[0].low, judged.numbers[0].high] == pytest.approx([0.05 ** (1 / 3), 1.0])
    assert verdict(claim, outcomes_of(1.0, 0.5, num_seeds=50)) is Judgement.HOLDS
    assert verdict(Expectation(rule="mean", high=0.5, where={"k": (0,)}), outcomes_of(1.0, 0.5)) is Judgement.TOO_FEW
    assert verdict(Expectation(rule="mean", high=0.5, where={"k": (0,)}), outcomes_of(1.0, 0.5, num_seeds=9)) is (
        Judgement.FAILS
    )
    rises = judge(Expectation(rule="monotone", of="k", low=0.0), outcomes_of(0.0, 1.0, 0.5), "m").numbers[0]
    assert rises.low == pytest.approx(2 * 0.05 ** (1 / 3) - 1)  # both cells may be other than they look


@pytest.mark.parametrize("values", [[[1.0, 1.0]] * 3, [[1.0, 0.9], [1.0, 0.8], [1.0, 0.7]], [[1.0, 0.0]] * 5])
def test_shares_of_many_samples_and_closed_forms_are_judged_as_they_are_and_have_no_interval(
    values: list[list[float]],
) -> None:
    runs = SimulationRuns(cells=({"k": 1}, {"k": 2}), values={"m": np.array(values)})
    judged = judge(Expectation(rule="mean", low=0.99, where={"k": (1,)}), runs, "m")
    (number,) = judged.numbers
    assert (judged.judgement, number.low, number.high, number.is_equal) == (Judgement.HOLDS, None, None, True)


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (Expectation(rule="slope", of="k", log=True, low=-1, high=1), Judgement.UNDEFINED),
        (Expectation(rule="ratio", of="k", levels=(1, 2), low=0), Judgement.UNDEFINED),
        (Expectation(rule="closed_form", other_metric="formula", low=0.99, high=1.01), Judgement.UNDEFINED),
        (
            Expectation(rule="closed_form", other_metric="formula", low=0.99, high=1.01, where={"k": (2,)}),
            Judgement.HOLDS,
        ),
        (
            Expectation(rule="closed_form", other_metric="formula", low=2, high=3, where={"k": (2, 3)}),
            Judgement.FAILS,
        ),
    ],
)
def test_numbers_that_do_not_exist_are_undefined_with_any_number_of_seeds(
    claim: Expectation, expected: Judgement
) -> None:
    """They had too few seeds, with a thousand of them; 0 is what a closed form of 0 says."""
    values = np.random.default_rng(0).normal(1, 0.1, (1000, 1)) * np.array([1.0, 0.0, 1.0, 1.0])
    cells = tuple({"k": k} for k in (1, 2, 3, 4))
    runs = SimulationRuns(cells=cells, values={"m": values, "formula": np.array([[1.0, 0.0, 1.0, 0.0]] * 1000)})
    assert verdict(claim, runs) is expected


@pytest.mark.parametrize("num_seeds", [0, 1])
def test_one_seed_says_nothing(num_seeds: int) -> None:
    assert verdict(slope(-9, 9), runs_of(num_seeds)) is Judgement.TOO_FEW


SWEEP = """\
version: 1
name: sims
simulate:
  gran:
    run: x
    factors: {k: [2, 4, 8], labels: [coarse, fine]}
    seeds: {count: 20, per_job: 10}
    metric: m
    expect:
      - {slope: {of: k, log: true}, where: {labels: coarse}, between: [-1.1, -0.9], paper: -1, source: theorem 5}
      - {threshold: {above: 2}, where: {labels: fine}}
policy: {expectations: fail}
"""


def report_of(text: str = SWEEP, num_blocks: int = 2) -> tuple[Plan, Report]:
    plan = build_plan(parse_sweep(text, "s", shipped_recipes()), store_uri="file:///s")
    values = runs_of(20).values["m"]
    names = [",".join(f"{name}={level}" for name, level in cell.items()) for cell in CELLS]
    committed: dict[str, Committed] = {}
    for job in plan.jobs:
        first, stop = job.identity["parameters"]["seeds"].values()
        if first < 10 * num_blocks:
            column = values[first:stop, names.index(str(job.facets["cell"]))]
            runs = {"seed": np.arange(first, stop, dtype=np.float64), "m": column}
            committed[job.name] = Committed(metrics={}, runs=runs)
    return plan, compute_report(plan, committed)


def test_report_shows_cells_claims_and_the_papers_numbers() -> None:
    plan, report = report_of()
    text = printed(report)
    assert "slope of log m over log k in [-1.1, -0.9] (labels coarse)" in text
    assert "-1 (theorem 5)" in text
    assert text.count(" holds") == 2
    assert "no transfer to report on" not in text
    files = render_files(report)
    assert set(files) == {*REPORT_FILES, *SIMULATION_FILES}
    lines = list(csv.DictReader(io.StringIO(files["simulations.csv"].decode())))
    assert [line["cell"] for line in lines][:2] == ["k=2,labels=coarse", "k=2,labels=fine"]
    assert lines[0]["num_seeds"] == "20"
    assert json.loads(files["report.json"])["simulations"][0]["expectations"][0]["judgement"] == "holds"
    assert b"theorem 5" in files["report.md"]
    page = render_page(report, plan, Learning(curves={}))
    assert b"simulations-section" in page
    assert b'"isLogX":false' in page


def test_notebook_has_the_tables_of_a_sweep_of_simulations_alone() -> None:
    shown, empty = (report_html(report_of(num_blocks=number)[1]) for number in (2, 0))
    assert "no result yet" not in shown
    assert "<h5>Simulation gran (x): m</h5>" in shown
    assert "-1 (theorem 5)" in shown
    assert "no result yet" in empty


def test_curves_are_drawn_over_the_first_numeric_factor_of_the_file() -> None:
    """A stored plan has the names of factors in the order of the alphabet."""
    text = SWEEP.replace("{k: [2, 4, 8], labels", "{kind: [x], steps: [1, 2], rate: [0.1], k: [2, 4, 8], labels")
    plan = build_plan(parse_sweep(text, "s", shipped_recipes()), store_uri="file:///s")
    stored = Plan.from_json(json.loads(plan_content(plan.to_json(), 1)))
    assert list(stored.simulations[0].factors) == ["k", "kind", "labels", "rate", "steps"]
    (found,) = compute_report(stored, {}).simulations
    assert found.ordered_factor == page_document(found)["factor"] == "steps"
    assert found.factors == plan.simulations[0].factors
    assert simulation_tables(found)[0].header[:5] == ("k", "kind", "labels", "rate", "steps")  # as its rows


METHODS = """\
version: 1
name: sims
simulate:
  gran:
    run: x
    factors: {method: [a, b, c]}
    seeds: {count: 2, per_job: 2}
    metric: m
    expect: [{between: [0.5, 2], where: {method: [a, c]}, paper: 1.25}]
"""


def panel_of(means: dict[str, float], text: str = METHODS) -> Axes:
    """What is drawn of methods whose two seeds have the same value; those that are not given have none yet."""
    plan = build_plan(parse_sweep(text, "s", shipped_recipes()), store_uri="file:///s")
    committed = {
        job.name: Committed(
            metrics={}, runs={"seed": np.arange(2.0), "m": np.full(2, means[method]), "formula": np.full(2, 3.0)}
        )
        for job in plan.jobs
        if (method := str(job.facets["cell"]).removeprefix("method=")) in means
    }
    return draw_simulations(compute_report(plan, committed).simulations).axes[0]


def test_figure_has_the_papers_numbers_beside_the_cells_that_are_there() -> None:
    axis = panel_of({"a": 1.0, "c": 1.5})
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "c"]
    assert axis.get_xlabel() == "method"
    (marks,) = (line for line in axis.lines if line.get_label() == "paper")
    assert np.asarray(marks.get_xydata()).tolist() == [[0, 1.25], [1, 1.25]]
    claim = "closed_form: {metric: formula, within: 0.1}, where: {method: c}"
    axis = panel_of(
        {"a": 1.0, "c": 2.9}, METHODS.replace("between: [0.5, 2], where: {method: [a, c]}, paper: 1.25", claim)
    )
    (marks,) = (line for line in axis.lines if line.get_label() == "paper")
    assert np.asarray(marks.get_xydata()).tolist() == [[1, 3]]


def test_figure_and_page_say_what_bands_and_bars_are() -> None:
    (found,) = report_of()[1].simulations
    told = "bands: 95 % intervals over seeds"
    figure = draw_simulations([found, found])
    assert figure.get_supxlabel() == page_document(found)["spread"] == told
    encode_png(figure)
    upper, lower = (axis.get_tightbbox() for axis in figure.axes)
    assert upper is not None
    assert lower is not None
    assert upper.y0 > lower.y1  # each panel has room, and so has the text below
    assert lower.y0 > figure.texts[0].get_window_extent().y1
    assert not panel_of({"a": 1.0}).figure.get_supxlabel()  # all seeds are equal: there is no interval


def test_axes_of_a_figure_show_no_rounding_and_no_powers() -> None:
    axis = panel_of({"a": 1.0, "b": 1.0 + 1e-13, "c": 1.0})
    low, high = axis.get_ylim()
    assert high - low > 1e-4
    axis = panel_of({"a": 0.1, "b": 1.0, "c": 20.0})
    assert axis.get_yscale() == "log"
    assert axis.yaxis.get_major_formatter()(0.5) == "0.5"


def test_bounds_of_a_claim_are_printed_in_full() -> None:
    text = METHODS.replace("metric: m", "metric: val_error").replace("0.5, 2", "0.07, 0.0999999")
    plan = build_plan(parse_sweep(text, "s", shipped_recipes()), store_uri="file:///s")
    assert "val_error in [7, 9.99999] (method a, c)" in printed(compute_report(plan, {}))


@pytest.mark.parametrize(
    ("metric", "ends", "mean", "unit", "text"),
    [
        ("error", (0, 0.5), 0.25, " [%]", "25.00"),
        ("error", (0, 2), 0.25, "", "0.25"),
        ("error", (0, 0.5), 1.25, "", "1.25"),
        ("log_error", (-30, -20), -27.6, "", "-27.6"),
        ("log_error", (0, 1), 0.25, "", "0.25"),
    ],
    ids=["rate", "claimed above 1", "above 1", "below 0", "logarithm in [0, 1]"],
)
def test_only_rates_are_printed_in_percent(
    metric: str, ends: tuple[float, float], mean: float, unit: str, text: str
) -> None:
    """Whatever was called an error was: a logarithm of -27.6 as -2763 %."""
    changed = METHODS.replace("metric: m", f"metric: {metric}").replace("[0.5, 2]", str([*ends]))
    plan = build_plan(parse_sweep(changed.replace(", paper: 1.25", ""), "s", shipped_recipes()), store_uri="file:///s")
    runs = {"seed": np.arange(2.0), metric: np.full(2, mean)}
    (found,) = compute_report(plan, {job.name: Committed(metrics={}, runs=runs) for job in plan.jobs}).simulations
    cells, claims = simulation_tables(found)
    assert (cells.header[1], cells.rows[0][1], claims.rows[0][2]) == (f"{metric}{unit}", text, text)
    low, high = (100 * end if unit else end for end in ends)
    assert claims.rows[0][0] == f"{metric} in [{low:g}, {high:g}] (method a, c)"
    axis = draw_simulations([found]).axes[0]
    assert axis.get_ylabel() == f"{metric}{unit}"
    assert axis.lines[0].get_ydata() == pytest.approx([100 * mean if unit else mean] * 3)
    assert page_document(found)["unit"] == unit


def test_seeds_that_are_not_there_yet_are_counted() -> None:
    _, report = report_of(num_blocks=1)
    assert "10/20" in printed(report)
    assert len(report.missing) == 6


def test_table_csv_and_page_say_alike_that_seeds_are_equal_or_have_no_metric() -> None:
    """Method a is 1 in both seeds, b has a seed without the metric, and c has none with it."""
    text = METHODS.replace("where: {method: [a, c]}, ", "")
    plan = build_plan(parse_sweep(text, "s", shipped_recipes()), store_uri="file:///s")
    values = {"a": [1.0, 1.0], "b": [0.75, np.nan], "c": [np.nan, np.nan]}
    runs = {name: {"seed": np.arange(2.0), "m": np.array(some)} for name, some in values.items()}
    report = compute_report(
        plan,
        {job.name: Committed(metrics={}, runs=runs[str(job.facets["cell"])[-1]]) for job in plan.jobs},
    )
    rows = simulation_tables(report.simulations[0])[1].rows
    assert [row[1:5] for row in rows] == [
        ("method=a", "1", "- (all seeds are equal)", "2"),
        ("method=b", "0.75", "-", "1/2"),
        ("method=c", "-", "-", "0/2"),
    ]
    assert simulation_tables(report.simulations[0])[0].rows[0] == ("a", "1", "- (all seeds are equal)", "2")
    lines = list(csv.DictReader(io.StringIO(render_files(report)["expectations.csv"].decode())))
    assert [(line["low"], line["num_seeds"], line["num_expected"]) for line in lines] == [
        ("", "2", "2"),
        ("", "1", "2"),
        ("", "0", "2"),
    ]
    assert b"all seeds are equal" in render_page(report, plan, Learning(curves={}))
    (note,) = (note for note in report.notes if "biased" in note)
    assert note.startswith("simulation gran: 1 of 2 runs have no m (first: method=b); means and expectations leave")
    assert not any("biased" in note for note in report_of(num_blocks=1)[1].notes)
    other = Committed(metrics={}, runs={"seed": np.arange(2.0), "x": np.ones(2)})
    notes = compute_report(plan, {job.name: other for job in plan.jobs}).notes
    assert "simulation gran: no run has a metric m; they have x" in notes


def test_table_says_why_a_number_is_undefined() -> None:
    claim = "closed_form: {metric: f, within: 0.1}"
    text = METHODS.replace("between: [0.5, 2], where: {method: [a, c]}, paper: 1.25", claim)
    plan = build_plan(parse_sweep(text, "s", shipped_recipes()), store_uri="file:///s")
    runs = {"seed": np.arange(2.0), "m": np.ones(2), "f": np.zeros(2)}
    (found,) = compute_report(plan, {job.name: Committed(metrics={}, runs=runs) for job in plan.jobs}).simulations
    first, *_ = simulation_tables(found)[1].rows
    assert first[1:5] == ("method=a", "-", "- (a ratio to a mean of 0)", "2")
    assert first[-1] == "undefined"


def test_submit_ends_with_its_own_code_where_an_expectation_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert _judged(report_of()[1]) is ExitCode.OK
    plan, report = report_of(SWEEP.replace("above: 2", "above: 5"))
    assert plan.policy.fails_on_expectations
    assert _judged(report) is ExitCode.EXPECTATION
    assert "m > 5 (labels fine): does not hold" in capsys.readouterr().err


def test_reports_without_simulations_say_nothing_of_them() -> None:
    report = Report(sweep="s", metric="val_error", baseline="", tables=())
    assert "simulations" not in report.to_json()
    files: dict[str, Any] = render_files(report)
    assert set(files) == set(REPORT_FILES)
    assert b"simulation" not in files["report.json"]
    plan = Plan(sweep="s", revision=0, store_uri="", jobs=(), baseline="")
    assert b"simulation-" not in render_page(report, plan, Learning(curves={}))
