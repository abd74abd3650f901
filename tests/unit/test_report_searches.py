"""Searches in reports: the best first, what was saved, and at what risk."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.estimate.volumes import num_full_trials
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed, Learning
from orchestrator.report.render.files import json_ready, render_markdown
from orchestrator.report.render.other_tables import search_table, sentences
from orchestrator.report.render.page import render_page
from orchestrator.report.results import SearchReport

TRIALS = [
    {
        "trial": 0,
        "params": {"lr": 0.1},
        "state": "completed",
        "epoch": 9.0,
        "value": 0.2,
        "spent_s": 3600.0,
        "reason": "",
    },
    {
        "trial": 1,
        "params": {"lr": 0.5},
        "state": "stopped",
        "epoch": 1.0,
        "value": 0.1,
        "spent_s": 400.0,
        "reason": "x",
    },
    {
        "trial": 2,
        "params": {"lr": 0.3},
        "state": "completed",
        "epoch": 9.0,
        "value": 0.1,
        "spent_s": 3600.0,
        "reason": "",
    },
    {
        "trial": 3,
        "params": {"lr": 9.0},
        "state": "failed",
        "epoch": 0.0,
        "value": None,
        "spent_s": 0.0,
        "reason": "NaN",
    },
]
FOUND = {
    "over": "recipe",
    "algorithm": "asha",
    "metric": "select_error",
    "best": {"trial": 2},
    "trials": TRIALS,
    "saving": {"epochs": 19.0, "full_epochs": 27.0, "spent_s": 7600.0, "full_s": 10800.0, "share": 0.296},
    "risk": [{"rung": 1.0, "num_stopped": 1, "num_pairs": 1, "num_swapped": 1}],
}
JOB = Job(
    name="search/tuned/levels/depth1",
    kind=JobKind.SEARCH,
    key="search-x-0",
    identity={"kind": "search", "parameters": {}, "inputs": {}},
    resources=Resources(cpus=8, gpus=2),
    facets={},
)


def test_search_table_has_the_best_first_and_says_what_was_saved():
    table = search_table(SearchReport.of(JOB, FOUND))
    assert [row[0] for row in table.rows] == ["2", "0", "1", "3"]
    assert table.best == 0
    assert table.rows[3][-1] == "-"
    assert "19 of 27 epochs were trained, 4.22 GPU-hours of 6" in table.caption
    assert "30 % saved" in table.caption
    assert "1 of 1 pairs of the remaining trials changed their order" in table.caption


def test_search_table_has_the_best_first_also_where_others_have_its_value():
    equal = [{**one, "value": 0.1} if one["state"] == "completed" else one for one in TRIALS]
    table = search_table(SearchReport.of(JOB, {**FOUND, "trials": equal}))
    assert (table.rows[0][0], table.best) == ("2", 0)


def test_search_without_stops_claims_no_saving():
    every = {**FOUND, "trials": [TRIALS[0], TRIALS[2]]}
    assert sentences(SearchReport.of(JOB, every)) == ["All trials ran to the end: 4.22 GPU-hours."]
    told = sentences(SearchReport.of(JOB, {**every, "trials": [TRIALS[0], TRIALS[2], TRIALS[3]]}))
    assert told == ["1 of 3 trials failed, all others ran to the end: 4.22 GPU-hours."]


def test_report_shows_committed_searches_in_markdown_and_json():
    plan = Plan(sweep="s", revision=1, store_uri="file:///x", jobs=(JOB,), baseline="")
    report = compute_report(plan, {JOB.name: Committed(metrics={}, search=FOUND)})
    assert "## search/tuned/levels/depth1: asha over recipe, by select_error" in render_markdown(report)
    assert json.loads(json.dumps(json_ready(report.to_json())))["searches"][0]["best"] == 2
    assert compute_report(plan, {}).searches == ()


def test_page_has_every_trial_and_the_sentences_of_the_other_forms():
    plan = Plan(sweep="s", revision=1, store_uri="file:///x", jobs=(JOB,), baseline="")
    report = compute_report(plan, {JOB.name: Committed(metrics={}, search=FOUND)})
    page = render_page(report, plan, Learning(curves={})).decode()
    (embedded,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    (search,) = json.loads(embedded)["searches"]
    assert [trial["number"] for trial in search["trials"]] == [2, 0, 1, 3]
    assert search["trials"][0] == {
        "number": 2,
        "params": {"lr": 0.3},
        "state": "completed",
        "epoch": 9.0,
        "value": 0.1,
        "reason": "",
        "hours": pytest.approx(2.0),  # 1 h on 2 GPUs
    }
    assert (search["best"], search["fields"], search["unit"]) == (2, ["lr"], "GPU-hours")
    assert (search["spent"], search["full"]) == (pytest.approx(7600 / 1800), 6.0)
    assert " ".join(search["sentences"]) in search_table(report.searches[0]).caption
    assert "function renderSearches()" in page
    assert "@@" not in page.replace(embedded, "").split('id="report"')[0]


def test_scripts_of_the_page_are_javascript(tmp_path):
    """A slip in either would leave the page empty, which only browsers notice."""
    driver = pytest.importorskip("playwright._impl._driver", reason="needs the JavaScript engine of playwright")
    engine, *_ = driver.compute_driver_executable()
    plan = Plan(sweep="s", revision=1, store_uri="file:///x", jobs=(JOB,), baseline="")
    page = render_page(compute_report(plan, {}), plan, Learning(curves={})).decode()
    script = tmp_path / "page.js"
    script.write_text(page.rpartition("<script>")[2].partition("</script>")[0])
    assert "renderSearches" in script.read_text()
    subprocess.run([engine, "--check", script], check=True, timeout=60)


def test_page_without_searches_has_none():
    plan = Plan(sweep="s", revision=1, store_uri="file:///x", jobs=(JOB,), baseline="")
    page = render_page(compute_report(plan, {}), plan, Learning(curves={})).decode()
    assert '"searches":[]' in page


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [({"random": {}}, 9.0), ({"asha": {"grace_epochs": 1, "reduction": 3.0}}, (9 * 1 + 3 * 2 + 1 * 6) / 9)],
)
def test_estimates_count_only_the_epochs_that_halving_leaves(algorithm, expected):
    trial = {"kind": "finetune", "parameters": {"recipe": {"epochs": 9, "batch_size": 4}}}
    parameters = {"trials": 9, "algorithm": algorithm, "space": {"lr": {"log": [0.01, 1.0]}}, "trial": trial}
    job = Job(
        name="s", kind=JobKind.SEARCH, key="k", identity={"kind": "search", "parameters": parameters, "inputs": {}}
    )
    assert num_full_trials(job) == pytest.approx(expected)


def test_plan_with_searched_batch_sizes_and_epochs_is_estimated(tmp_path):
    from orchestrator.planning.graph.build import build_plan
    from orchestrator.sweepfile.load import load_sweep
    from tests.integration.search_jobs import SWEEP

    text = SWEEP.replace("recipe: {epochs: 9, batch_size: 16}", "recipe: {lr: 0.1}")
    space = "{random: {}, trials: 6, space: {epochs: [3, 9], batch_size: {log_integer: [8, 32]}}}"
    (tmp_path / "sweep.yaml").write_text(text.replace("SEARCH", space))
    sweep, _ = load_sweep(str(tmp_path / "sweep.yaml"))
    plan = build_plan(sweep, store_uri="file:///store")
    seconds = {name: job.seconds for name, job in estimate(plan).jobs.items()}
    (search,) = [name for name in seconds if name.startswith("search/")]
    (tuned,) = [name for name in seconds if name.startswith("finetune/")]
    assert seconds[search] > 2 * seconds[tuned]
