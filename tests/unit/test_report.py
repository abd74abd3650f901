import csv
import io
import json
from dataclasses import asdict, replace
from xml.etree import ElementTree as ET

import pytest

from orchestrator.report.build import build_report
from orchestrator.report.render.answers import answers
from orchestrator.report.render.columns import caveats
from orchestrator.report.render.curves import curve_points
from orchestrator.report.render.files import render_files, save_files, save_report
from orchestrator.report.results import Compute
from orchestrator.storage.layout import report_name
from orchestrator.testing.memory_store import MemoryStore
from tests.report_sweeps import REPORT_FILES
from tests.report_sweeps import printed as _printed
from tests.sample_sweep import BASELINE, ERROR, GRANULARITY, commit, sample_metrics, sample_plan

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def plan(store):
    return sample_plan(store.uri)


def _commit_all(store, plan, without=()):
    for job in plan.jobs:
        if job.name not in without:
            commit(store, job)


def _table(report, transfer="superclass"):
    return next(table for table in report.tables if table.transfer == transfer)


def _row(report, space, transfer="superclass"):
    return next(row for row in _table(report, transfer).rows if row.label_space == space)


def test_report_complete_sweep_has_a_row_per_label_space_in_plan_order(store, plan):
    _commit_all(store, plan)
    report = build_report(store, plan)
    assert [table.transfer for table in report.tables] == ["superclass", "superclass-probe"]
    assert [(row.label_space, row.granularity) for row in _table(report).rows] == list(GRANULARITY.items())
    assert report.missing == ()


@pytest.mark.parametrize("space", ERROR)
def test_report_row_has_mean_std_and_subsets(store, plan, space):
    _commit_all(store, plan)
    row = _row(build_report(store, plan), space)
    assert row.summary.mean == pytest.approx(ERROR[space])
    assert row.summary.std == pytest.approx(0.01)
    assert row.subsets["hard"].mean == pytest.approx(1.5 * ERROR[space])
    assert list(row.subsets) == ["hard", "normal"]


def test_report_row_is_compared_with_the_baseline(store, plan):
    _commit_all(store, plan)
    row = _row(build_report(store, plan), "levels/depth3")
    assert row.improvement == pytest.approx((0.27 - 0.07) / 0.27)
    assert row.difference.mean == pytest.approx(-0.2)
    assert row.difference.is_established
    assert _row(build_report(store, plan), BASELINE).difference is None


def test_report_missing_seed_is_shown_and_left_out_of_the_numbers(store, plan):
    lost = "finetune/superclass/levels/depth2/seed1/seed0"
    _commit_all(store, plan, without=[lost])
    report = build_report(store, plan)
    row = _row(report, "levels/depth2")
    assert (row.summary.num_values, row.num_expected, row.difference.num_pairs) == (2, 3, 2)
    assert report.missing == (lost,)
    printed = _printed(report)
    assert "2/3 runs" in printed
    assert lost in printed


def test_report_label_space_without_results_is_shown_as_missing(store, plan):
    lost = [job.name for job in plan.jobs if "superclass/random" in job.name]
    _commit_all(store, plan, without=lost)
    report = build_report(store, plan)
    assert _row(report, "random/128").summary is None
    assert "missing" in _printed(report)
    assert "0/3 runs" in _printed(report)


def test_report_empty_store_renders_everything(store, plan):
    report = build_report(store, plan)
    assert set(render_files(report)) == set(REPORT_FILES)
    assert answers(report)[0].sentences == ("no result yet",)
    assert len(report.missing) == len([job for job in plan.jobs if job.kind not in {"dataset", "index"}])


def test_report_without_baseline_compares_nothing(store):
    plan = sample_plan(store.uri, baseline="")
    _commit_all(store, plan)
    report = build_report(store, plan)
    assert {row.improvement for row in _table(report).rows} == {None}
    assert "improvement" not in _printed(report)


def test_report_baseline_that_is_not_pretrained_is_noted(store, plan):
    _commit_all(store, plan)
    report = build_report(store, replace(plan, baseline="levels/depth9"))
    assert any("levels/depth9" in caveat for caveat in caveats(report))
    assert {row.improvement for row in _table(report).rows} == {None}


def test_report_unknown_metric_is_noted(store, plan):
    _commit_all(store, plan)
    report = build_report(store, replace(plan, metric="val_auc"))
    assert any("'val_auc'" in caveat for caveat in caveats(report))


def test_report_other_metric_is_computed_from_it(store, plan):
    _commit_all(store, plan)
    report = build_report(store, replace(plan, metric="val_error_hard"))
    assert _row(report, BASELINE).summary.mean == pytest.approx(1.5 * ERROR[BASELINE])
    assert "40.50" in _printed(report)


def test_report_answer_names_the_best_space_and_its_rivals(store, plan):
    _commit_all(store, plan)
    best, rival, *_ = answers(build_report(store, plan))[0].sentences
    assert best.startswith("lowest mean: levels/depth3 (G = 32), val_error 7.00 ± 1.00 %, 74.1 % lower than the base")
    assert "(established, corrected p " in best
    assert rival.startswith("lowest of random: random/128 (G = 128), val_error 28.00 ± 1.00 %, 3.7 % higher")
    assert "(not established, corrected p = " in rival


def test_report_best_space_with_all_seeds_stands_before_a_lucky_single(store, plan):
    lost = [f"finetune/superclass/levels/depth3/seed{seed}/seed0" for seed in (1, 2)]
    _commit_all(store, plan, without=lost)
    ranked = _table(build_report(store, plan)).ranked
    assert [row.label_space for row in ranked][:2] == ["levels/depth4", "levels/depth2"]
    assert ranked[-1].label_space == "levels/depth3"


def test_report_single_label_spaces_share_a_line_by_rule(store):
    plan = sample_plan(store.uri, spaces=("mod5", "mod2"), seeds=(0,), transfers=("superclass",), baseline="mod2")
    for job in plan.jobs:
        commit(store, job, {"val_error": 0.5} if "label_space" in job.facets else sample_metrics(job))
    points = curve_points(_table(build_report(store, plan)).rows, "val_error")
    assert list(points) == ["modulo"]
    assert [point.label_space for point in points["modulo"]] == ["mod5", "mod2"]


def test_report_saved_files_are_in_the_store_and_readable(store, plan):
    _commit_all(store, plan)
    report = build_report(store, plan)
    names = save_report(store, plan.sweep, report)
    files = {name.rpartition("/")[2]: store.get(name) for name in names}
    assert set(files) == set(REPORT_FILES)
    assert files["curve.png"].startswith(PNG_SIGNATURE)
    assert ET.fromstring(files["curve.svg"]).tag.endswith("svg")  # noqa: S314 - our own file
    document = json.loads(files["report.json"])
    assert document["tables"][0]["rows"][0]["summary"]["mean"] == pytest.approx(ERROR[BASELINE])
    assert b"| **levels/depth3** | **32** | **7.00" in files["report.md"]


def test_report_with_costs_is_replaced_by_other_results_and_not_by_the_same_without_prices(store):
    def files(error: float, compute: Compute):
        return {"report.json": json.dumps({"rows": [{"error": error, "compute": asdict(compute)}]}).encode()}

    unpriced = Compute(gpu_hours=1.0, cpu_hours=2.0)
    priced = files(0.5, replace(unpriced, cost=3.0, currency="USD"))
    name = report_name("study", "report.json")
    for content, expected in ((priced, priced), (files(0.5, unpriced), priced), (files(0.4, unpriced), None)):
        save_files(store, "study", content, keeps_costs=True)
        assert store.get(name) == (expected or content)["report.json"]


class _SharedStore(MemoryStore):
    """Somebody else saves a page while files are written."""

    def put(self, name, content):
        if name.endswith("runs.csv"):
            super().put(name.replace("runs.csv", "report.html"), b"newer page")
        return super().put(name, content)


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "beside another writer"])
def test_report_leaves_no_older_file_of_another_one_behind(is_shared):
    """The page of a running sweep stood beside its final results, and effects of a design that was no longer there."""
    store = _SharedStore() if is_shared else MemoryStore()
    usual = {"runs.csv": b"", "report.md": b"", "report.json": b"{}"}
    for name, content in {**usual, "report.html": b"older page", "effects.csv": b"older effects"}.items():
        MemoryStore.put(store, report_name("study", name), content)
    later = {**usual, "report.json": b"[]"}
    names, page = save_files(store, "study", later), report_name("study", "report.html")
    found = {stat.name for stat in store.list_objects(report_name("study", ""))}
    assert found == ({*names, page} if is_shared else set(names))
    # The page of these very results stays, with other prices, too.
    save_files(store, "study", {**later, "report.json": b'{"cost": 12}', "report.html": b"page"})
    save_files(store, "study", {**later, "report.json": b'{"cost": null}'})
    assert store.exists(page)


def test_report_equal_records_give_equal_files(store, plan):
    _commit_all(store, plan)
    assert render_files(build_report(store, plan)) == render_files(build_report(store, plan))


def test_report_csv_of_runs_reproduces_the_table(store, plan):
    _commit_all(store, plan)
    files = render_files(build_report(store, plan))
    runs = list(csv.DictReader(io.StringIO(files["runs.csv"].decode())))
    results = list(csv.DictReader(io.StringIO(files["results.csv"].decode())))
    assert len(runs) == 2 * len(ERROR) * 3
    values = [
        float(run["val_error"])
        for run in runs
        if (run["transfer"], run["label_space"]) == ("superclass", "levels/depth2")
    ]
    summary = next(
        line
        for line in results
        if (line["transfer"], line["label_space"], line["subset"]) == ("superclass", "levels/depth2", "")
    )
    assert sum(values) / len(values) == pytest.approx(float(summary["mean"]))
    assert float(summary["ci_low"]) <= float(summary["paired_difference"]) <= float(summary["ci_high"])


def test_report_narrow_terminal_leaves_out_subsets_and_keeps_the_answer(store, plan):
    _commit_all(store, plan)
    report = build_report(store, plan)
    assert "hard" in _printed(report, width=140)
    narrow = _printed(report, width=80)
    assert "hard" not in narrow.partition("left out for width")[0]
    assert "left out for width: hard [%]" in narrow
    assert "7.00 ± 1.00" in narrow
    assert max(len(line) for line in narrow.splitlines()) <= 80


def test_report_text_in_brackets_is_not_taken_for_markup(store):
    plan = sample_plan(store.uri, spaces=(BASELINE,), seeds=(0,), transfers=("superclass",))
    facets = [{**job.facets, "target": "[red]x"} if "transfer" in job.facets else job.facets for job in plan.jobs]
    jobs = tuple(replace(job, facets=facet) for job, facet in zip(plan.jobs, facets, strict=True))
    assert "[red]x" in _printed(build_report(store, replace(plan, jobs=jobs)))
