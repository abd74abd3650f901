"""The interactive report in a real browser: filters, no errors, no requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed, Learning, read_learning
from orchestrator.report.render.page import render_page
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.local import LocalStore
from tests.browser import SIZE, browser, watch  # noqa: F401 - a fixture among them
from tests.report_sweeps import StudyPlan, committed

pytestmark = pytest.mark.ci

SPACES = {"levels/depth1": 2, "levels/depth2": 8, "levels/depth3": 32, "random/32": 32}
STUDY = StudyPlan(
    spaces=SPACES,
    transfers=("main", "probe"),
    checkpoints=("epoch50", "epoch90"),
    cells=("lr=0.1", "lr=1"),
    transfer_seeds=(0, 1),
)
LOST = tuple(f"finetune/main/random/32/seed1/epoch90/{cell}/seed1" for cell in ("lr=0.1", "lr=1"))
LINK = "http://127.0.0.1:5000/#/experiments/1/runs/abc"


def _metrics(job):
    if job.name in LOST:
        return None
    error = {"levels/depth1": 0.3, "levels/depth2": 0.2, "levels/depth3": 0.1, "random/32": 0.35}
    value = error[job.facets["label_space"]] + 0.01 * job.facets["pretrain_seed"]
    value += 0.003 * job.facets.get("transfer_seed", 0) * job.facets["pretrain_seed"]
    value += 0.05 * (job.facets.get("checkpoint") == "epoch50") + 0.02 * (job.facets.get("cell") == "lr=0.1")
    return {"val_error": value, "val_error_hard": 2 * value, "select_error": value}


SEARCHES = tuple(
    Job(
        name=f"search/{name}",
        kind=JobKind.SEARCH,
        key=f"search-{name}-0",
        identity={"kind": "search", "parameters": {}, "inputs": {}},
        resources=Resources(cpus=8, gpus=2),
        facets={},
    )
    for name in ("tuned", "levels")
)


def _search(index):
    """Of a recipe, then of levels: three trials, the middle one stopped."""
    values = (0.3, 0.2, 0.1)
    params: list[dict[str, object]] = [{"lr": 10.0 ** (place - 2), "decay": 0.0} for place in range(3)]
    if index:
        params = [{"label_space": f"levels/depth{place + 1}"} for place in range(3)]
    trials = [
        {"trial": place, "params": params[place], "epoch": 9.0 - 8 * (place == 1), "value": values[place], "reason": ""}
        | {"state": "stopped" if place == 1 else "completed", "spent_s": 3600.0}
        for place in range(3)
    ]
    return {
        "over": "labels" if index else "recipe",
        "algorithm": "asha",
        "metric": "select_error",
        "best": {"trial": 2},
        "trials": trials,
        "saving": {"epochs": 19.0, "full_epochs": 27.0, "spent_s": 7600.0, "full_s": 10800.0, "share": 0.296},
        "risk": [{"rung": 1.0, "num_stopped": 1, "num_pairs": 1, "num_swapped": 0}],
    }


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    plan = STUDY.plan(store.uri)
    for job in plan.jobs:
        if job.kind in {"pretrain", "finetune"}:
            lines = [
                {"step": step, "epoch": float(step), "at_s": 1.0, "metrics": {"val_error": 1 / step, "train_loss": 2.0}}
                for step in (1, 2, 3)
            ]
            content = "".join(json.dumps(line) + "\n" for line in lines)
            store.put(metrics_segment(job.key, 1, 0, 3), content.encode())
    found = committed(plan, _metrics)
    for index, job in enumerate(SEARCHES):
        found[job.name] = Committed(metrics={}, search=_search(index))
    plan = replace(plan, jobs=(*plan.jobs, *SEARCHES))
    report = compute_report(plan, found)
    links = {job.name: LINK for job in plan.jobs}
    path = Path(tmp_path_factory.mktemp("page"), "report.html")
    path.write_bytes(render_page(report, plan, read_learning(store, plan.jobs), links=links))
    return path.as_uri()


@pytest.fixture(scope="module")
def drawn(browser, address):  # noqa: F811 - the imported fixture
    """The page, drawn once: 5 MB of JavaScript take a while to read."""
    page = browser.new_page(viewport=SIZE)
    watched = watch(page)
    page.goto(address)
    page.wait_for_selector("html[data-ready=true]")
    return page, watched


@pytest.fixture
def page(drawn, address):
    """The page without any filter; after each test it must have asked for nothing and complained about nothing."""
    found, watched = drawn
    found.click("#filter-reset")
    yield found
    assert watched.errors == []
    assert watched.requests == [address]


def _rows(page, table="#results"):
    # One question to the browser: a table of runs has hundreds of cells.
    cells = "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.innerText))"
    return page.eval_on_selector_all(f"{table} tbody tr", cells)


def _traces(page, plot="curve"):
    return page.evaluate("id => document.getElementById(id).data.map(trace => trace.name)", plot)


def test_page_shows_table_curve_pairs_grid_and_runs(page):
    rows = _rows(page)
    assert [row[0] for row in rows] == list(SPACES)
    assert rows[2][2].startswith("11.1")
    assert "5/6 runs" in rows[3]
    assert _traces(page) == [
        "levels",
        "random",
        "pale: lacks runs",
        "baseline levels/depth1",
        "direct training on levels/depth1",
        "lowest mean: levels/depth3",
    ]
    assert page.evaluate("document.getElementById('pairs').data[0].z.length") == 4
    assert page.locator("table[data-facet=cell] td.selected").count() == 4
    assert page.locator("table[data-facet=checkpoint] thead th").all_inner_texts()[2:] == ["epoch50", "epoch90"]
    lost = next(row for row in _rows(page, "#runs") if row[0] == LOST[1])
    assert lost[1] == "missing"
    assert page.locator("#runs a", has_text="MLflow").first.get_attribute("href") == LINK
    artifact = page.locator("#runs a", has_text="finetune-").first.get_attribute("href")
    assert artifact.startswith("file://")
    assert "/artifacts/finetune/" in artifact


def test_page_filters_by_checkpoint_transfer_and_cell(page):
    def error():
        return float(_rows(page)[2][2].split()[0])

    last = error()
    page.select_option("#filter-checkpoint", "epoch50")
    assert error() == pytest.approx(last + 5.0, abs=0.011)
    assert "epoch50" in page.inner_text("#table-title")
    page.select_option("#filter-transfer", "probe")
    assert page.inner_text("#table-title").startswith("probe ")
    page.select_option("#filter-transfer", "main")
    page.select_option("#filter-checkpoint", "epoch90")
    page.select_option("#filter-cell", "lr=0.1")
    assert error() == pytest.approx(last + 2.0, abs=0.011)
    assert page.is_hidden("#pairs-section")
    page.select_option("#filter-cell", "selected")
    assert error() == last
    assert page.is_visible("#pairs-section")


def test_improvement_in_another_cell_is_positive_where_a_metric_that_is_better_higher_is_higher(browser, tmp_path):  # noqa: F811
    plan = replace(STUDY, metric="val_score", transfers=("main",), checkpoints=("",)).plan()

    def metrics(job):
        error = _metrics(job)["val_error"]
        return {"val_score": 1 - error, "select_error": error}

    report = compute_report(plan, committed(plan, metrics))
    (tmp_path / "report.html").write_bytes(render_page(report, plan, Learning(curves={}, unreadable=())))
    page = browser.new_page(viewport=SIZE)
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    page.select_option("#filter-cell", "lr=0.1")
    baseline, lower_error = _rows(page)[:2]
    assert (baseline[-1], lower_error[-1][0]) == ("baseline", "+")
    page.close()


def test_curve_names_the_best_of_the_table_where_it_has_no_number_of_classes(browser, tmp_path):  # noqa: F811
    plan = StudyPlan(spaces=SPACES).plan()
    report = compute_report(plan, committed(plan, lambda job: _metrics(job) if "transfer" in job.facets else None))
    (table,) = report.tables
    rows = tuple(replace(row, granularity=None if "depth3" in row.label_space else 8) for row in table.rows)
    report = replace(report, tables=(replace(table, rows=rows),))
    (tmp_path / "report.html").write_bytes(render_page(report, plan, Learning(curves={}, unreadable=())))
    page = browser.new_page(viewport=SIZE)
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    assert _traces(page)[-2:] == ["baseline levels/depth1", "lowest mean: levels/depth3"]  # a line, and no ring
    assert page.evaluate("document.getElementById('curve').data.at(-1).mode") == "lines"
    page.close()


def test_page_filters_by_kind_of_label_space(page):
    page.uncheck("#filter-series input[value=random]")
    assert [row[0] for row in _rows(page)] == list(SPACES)[:3]
    assert "random" not in _traces(page)
    assert all("random" not in row[0] for row in _rows(page, "#runs"))
    page.check("#filter-series input[value=random]")
    assert len(_rows(page)) == 4


def test_page_filters_by_protocol_and_target_leave_nothing_empty(page):
    page.select_option("#filter-protocol", "finetune")
    page.select_option("#filter-target", "levels/depth1")
    assert len(_rows(page)) == 4


def test_page_sorts_by_any_column_both_ways(page):
    page.click("#results thead button >> text=val_error")
    ascending = [row[0] for row in _rows(page)]
    assert ascending == ["levels/depth3", "levels/depth2", "levels/depth1", "random/32"]
    page.click("#results thead button >> text=val_error")
    assert [row[0] for row in _rows(page)] == ascending[::-1]


def test_page_draws_learning_curves_of_both_stages(page):
    # A curve per run of the selected cells: 4 label spaces x 3 backbones x 2 transfer seeds, the lost one included.
    assert len(_traces(page, "learning")) == 24
    page.select_option("#filter-stage", "pretrain")
    assert len(_traces(page, "learning")) == 12
    page.select_option("#filter-learning", "train_loss")
    assert page.evaluate("document.getElementById('learning').data[0].y") == [2, 2, 2]


def test_page_finds_runs_by_name(page):
    page.fill("#runs-find", "depth2/seed1")
    assert page.input_value("#runs-find") == "depth2/seed1"
    names = [row[0] for row in _rows(page, "#runs")]
    assert names
    assert all("depth2/seed1" in name for name in names)


def test_page_shows_searches_their_trials_and_what_was_saved(page):
    found = _rows(page, "#searches")
    assert [row[0] for row in found] == ["search/tuned", "search/levels"]
    assert found[0][5:7] == ["lr = 1, decay = 0", "10.00"]
    assert found[0][-1] == "30"
    assert [row[0] for row in _rows(page, "#trials")] == ["2", "0", "1"]
    assert page.locator("#trials tr.best td").first.inner_text() == "2"
    caption = page.inner_text("#search-caption")
    assert "30 % saved" in caption
    assert "Risk: 1 of 3 trials were stopped early" in caption
    assert _traces(page, "landscape") == ["completed", "stopped", "best: trial 2"]
    assert page.evaluate("document.getElementById('landscape').layout.xaxis.type") == "log"


def test_page_sorts_trials_and_changes_between_parameters_and_searches(page):
    page.click("#trials thead button >> text=lr")
    assert [row[0] for row in _rows(page, "#trials")] == ["0", "1", "2"]
    page.click("#trials thead button >> text=lr")
    assert [row[0] for row in _rows(page, "#trials")] == ["2", "1", "0"]
    page.select_option("#filter-parameter", "decay")
    assert page.evaluate("document.getElementById('landscape').data[0].x") == [0, 0]
    page.select_option("#filter-search", "search/levels")
    assert [row[1] for row in _rows(page, "#trials")] == ["levels/depth3", "levels/depth1", "levels/depth2"]
    assert page.evaluate("document.getElementById('landscape').layout.xaxis.type") == "category"
    assert page.locator("#filter-parameter").count() == 0
