"""Grids, checkpoints, fractions, pretrain blocks, published numbers and whatever is missing."""

import csv
import io
import json
import math
import re
import subprocess
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree as ET

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Published
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed, Learning
from orchestrator.report.render.answers import answers
from orchestrator.report.render.columns import caveats, result_records, text_table
from orchestrator.report.render.files import render_files
from orchestrator.report.render.label_efficiency import label_efficiency_figures, label_efficiency_html
from orchestrator.report.render.numbers import count, family_interval, fixed, number, p_text
from orchestrator.report.render.page import render_page
from orchestrator.report.results import Criterion, Facet
from orchestrator.report.statistics.summaries import PairedDifference
from orchestrator.state.snapshot import JobView
from orchestrator.state.spending import ResourceUse
from orchestrator.state.transitions import JobState
from orchestrator.storage.artifacts import Record
from tests.report_sweeps import LEVELS, StudyPlan, committed
from tests.report_sweeps import printed as _printed
from tests.sweep_fields import plan_of

ERROR = dict(zip(LEVELS, (0.27, 0.12, 0.07), strict=True))
SPREAD = {0: -0.01, 1: 0.0, 2: 0.012}


def _error(job):
    error = ERROR[job.facets["label_space"]] + SPREAD[job.facets["pretrain_seed"]]
    return error + 0.003 * int(job.facets.get("transfer_seed", 0)) * (
        1 + 2 * (job.facets["label_space"] == "levels/depth2")
    )


def _metrics(job):
    return {"val_error": _error(job)}


def _report(study, metrics=_metrics, views=None):
    plan = study.plan()
    return compute_report(plan, committed(plan, metrics), views)


def _ablation(report, facet):
    return next(ablation for ablation in report.ablations if ablation.facet is facet)


def _compute(report, row):
    found = report.tables[0].rows[row].compute
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------- grids
GRID = StudyPlan(cells=("lr=0.1", "lr=0.4", "lr=1"))


def _grid_metrics(job):
    """By validation lr=1 is best, by the part of train that was held out lr=0.4; backbones have neither."""
    cell = job.facets.get("cell")
    val = {"lr=0.1": 0.02, "lr=0.4": 0.01, "lr=1": 0.0}.get(cell, 0.0)
    held_out = {"lr=0.1": 0.3, "lr=0.4": 0.1, "lr=1": 0.2}.get(cell)
    return {"val_error": _error(job) + val} | ({} if held_out is None else {"select_error": held_out})


def test_grid_cell_is_selected_on_the_held_out_part_of_train():
    report = _report(GRID, _grid_metrics)
    row = report.tables[0].rows[2]
    assert (row.cell, row.selected_by, row.num_expected) == ("lr=0.4", Criterion.TRAIN_HOLDOUT, 3)
    assert row.summary.mean == pytest.approx(0.07 + 0.01 + sum(SPREAD.values()) / 3)
    assert "on samples held out of the transfer's training split" in _printed(report)


def test_grid_cell_of_the_smaller_loss_is_selected_of_those_with_equal_errors():
    losses = {"lr=0.1": 0.9, "lr=0.4": 0.7, "lr=1": 0.4}

    def metrics(job):
        cell = job.facets.get("cell")
        return {"val_error": _error(job)} | ({"select_error": 0.1, "select_loss": losses[cell]} if cell else {})

    assert {row.cell for row in _report(GRID, metrics).tables[0].rows} == {"lr=1"}


@pytest.mark.parametrize(
    ("study", "metrics"),
    [
        (GRID, lambda job: {"val_error": _grid_metrics(job)["val_error"]}),
        (replace(GRID, facets={"select_on": "val"}), _grid_metrics),
    ],
    ids=["nothing held out", "the sweep asks for it"],
)
def test_grid_cell_selected_on_validation_says_so(study, metrics):
    report = _report(study, metrics)
    assert {row.cell for row in report.tables[0].rows} == {"lr=1"}
    assert report.tables[0].criteria == (Criterion.VALIDATION,)
    assert "selected on validation" in _printed(report)
    assert any("optimistic" in note for note in report.notes)


@pytest.mark.parametrize("over", ["recipe", "backbone"])
def test_what_a_search_selected_on_validation_says_so(over):
    """As a cell of a grid; rows of the same transfer without a search, such as a retrained baseline, do not."""
    plan = StudyPlan(fractions=("0.1", "1"), facets={"select_on": "val"}).plan()
    search = replace(plan.jobs[0], name="search/main", kind=JobKind.SEARCH)
    readers = ("finetune",) if over == "recipe" else ("pretrain",)

    def with_search(job):
        kind, space = job.name.split("/")[0], job.facets["label_space"]
        if kind not in readers or space == "levels/depth1":
            return job
        # A search for backbones stands where these would; what reads features needs it by way of them.
        return replace(job, needs=(*job.needs, search.name), kind=JobKind.EMBED if over == "backbone" else job.kind)

    plan = replace(plan, jobs=(search, *map(with_search, plan.jobs)))
    report = compute_report(plan, committed(plan, lambda job: {} if job is search else _metrics(job)))
    assert [row.selected_by for row in report.tables[0].rows] == [None, Criterion.VALIDATION, Criterion.VALIDATION]
    printed = _printed(report)
    assert "search: selected on validation" in printed  # below the table
    assert "selection: selected on validation" in printed  # below the label fractions
    assert any("trial of a search" in note and "optimistic" in note for note in report.notes)
    lines = list(csv.DictReader(io.StringIO(render_files(report)["results.csv"].decode())))
    assert [line["selected_by"] for line in lines[:3]] == ["", *["selected on validation"] * 2]


def test_lowest_error_of_a_run_is_said_to_be_optimistic():
    report = _report(StudyPlan(metric="best_val_error"), lambda job: {"best_val_error": _error(job)})
    assert any("best_val_error is the lowest" in note and "optimistic" in note for note in report.notes)
    assert not any("optimistic" in note for note in _report(StudyPlan()).notes)


def test_error_of_another_level_is_no_subset_of_one_whose_name_it_begins_with():
    level = "val_level_error_super"
    report = _report(StudyPlan(metric=level), lambda job: {level: _error(job), f"{level}_coarse": 0.1})
    assert [row.subsets for row in report.tables[0].rows] == [{}] * 3


def test_best_epoch_selects_no_cell_of_a_grid():
    """lr=0.1 has the luckiest epoch, lr=1 ends best."""
    lucky = {"lr=0.1": 0.0, "lr=0.4": 0.02, "lr=1": 0.01}

    def metrics(job):
        return {**_grid_metrics(job), "best_val_error": lucky.get(job.facets.get("cell"), 0.0)}

    report = _report(replace(GRID, facets={"select_on": "val"}, metric="best_val_error"), metrics)
    assert {row.cell for row in report.tables[0].rows} == {"lr=1"}
    assert report.tables[0].rows[0].summary.mean == pytest.approx(0.01)


def test_grid_is_shown_whole_with_its_selected_cell_marked():
    report = _report(GRID, _grid_metrics)
    grid = _ablation(report, Facet.CELL)
    assert grid.values == ("lr=0.1", "lr=0.4", "lr=1")
    assert [[cell.is_selected for cell in row.cells] for row in grid.rows] == [[False, True, False]] * 3
    assert all(cell.summary.num_values == 3 for row in grid.rows for cell in row.cells)
    assert "8.07 ± 1.10 [10.00]*" in _printed(report)
    lines = list(csv.DictReader(io.StringIO(render_files(report)["ablations.csv"].decode())))
    assert [line["value"] for line in lines if line["is_selected"] == "1"] == ["lr=0.4"] * 3
    runs = list(csv.DictReader(io.StringIO(render_files(report)["runs.csv"].decode())))
    assert len(runs) == 3 * 3 * 3  # the other cells' runs too
    assert sum(run["is_selected"] == "1" for run in runs) == 9


def test_grid_cell_that_lacks_runs_is_not_selected_before_complete_ones_and_is_noted():
    def metrics(job):
        lost = job.facets.get("cell") == "lr=0.4" and job.facets["pretrain_seed"] == 1
        return None if lost else _grid_metrics(job)

    report = _report(GRID, metrics)
    assert {row.cell for row in report.tables[0].rows} == {"lr=1"}
    assert any("lacks 3 runs" in note for note in report.notes)
    assert "(2/3)" in _printed(report)


def test_grid_with_more_cells_than_fit_stands_upright():
    cells = tuple(f"lr={0.1 * index:.1f}" for index in range(1, 13))
    printed = _printed(_report(replace(GRID, cells=cells, pretrain_seeds=(0,))), width=140)
    assert "levels/depth3 (G = 32)" in printed
    assert "lr=1.2" in printed


# ---------------------------------------------------------------------------------- checkpoints, fractions and blocks
def test_checkpoints_stand_side_by_side_and_the_last_one_is_the_answer():
    def metrics(job):
        epoch = job.facets.get("checkpoint")
        return {"val_error": _error(job) + {"epoch50": 0.02, "epoch70": 0.01}.get(epoch, 0.0)}

    report = _report(StudyPlan(checkpoints=("epoch90", "epoch50", "epoch70")), metrics)
    table = _ablation(report, Facet.CHECKPOINT)
    assert table.values == ("epoch50", "epoch70", "epoch90")
    means = [cell.summary.mean for cell in table.rows[0].cells]
    assert means == sorted(means, reverse=True)
    assert [found.checkpoint for found in report.headlines] == ["epoch90"]
    assert len(report.tables) == 3
    assert "epoch90" in answers(report)[0].title


def test_checkpoints_beside_unnamed_final_weights_call_these_final():
    report = _report(StudyPlan(checkpoints=("", "epoch50")))
    assert _ablation(report, Facet.CHECKPOINT).values == ("epoch50", "final")
    assert [found.checkpoint for found in report.headlines] == [""]


def test_fractions_are_ordered_by_size_and_all_labels_are_the_answer():
    report = _report(StudyPlan(fractions=("0.1", "1", "0.05")))
    assert _ablation(report, Facet.FRACTION).values == ("0.05", "0.1", "1")
    assert [table.fraction for table in report.headlines] == ["1"]


def test_fractions_are_drawn_as_curves_with_bands_on_a_log_axis_of_page_and_file():
    fractions = ("0.01", "0.1", "1")
    report = _report(StudyPlan(fractions=fractions))
    (figure,) = label_efficiency_figures(report)
    svg = figure.svg()
    assert "bands: ± standard deviation over all runs, not a confidence interval" in svg
    assert svg.count("<polyline") == svg.count("<polygon") == len(report.tables[0].rows)
    shown = [re.search(rf'x="([0-9.]+)"[^>]*>{100 * float(one):g} %', svg) for one in fractions]
    at = [float(found[1]) for found in shown if found]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2)
    ET.fromstring(render_files(report)["label-efficiency.svg"])  # noqa: S314 - ours
    assert svg in label_efficiency_html(report)
    assert "label-efficiency.svg" not in render_files(_report(StudyPlan()))
    assert not label_efficiency_html(_report(StudyPlan()))


def test_pretrain_blocks_have_tables_of_their_own():
    report = _report(StudyPlan(blocks=("resnet34", "resnet50")))
    assert [table.pretrain for table in report.headlines] == ["resnet34", "resnet50"]
    assert all(row.summary.num_values == 3 for table in report.tables for row in table.rows)
    assert "pretrained by resnet50" in _printed(report)


def test_retraining_baseline_of_a_transfer_goes_before_that_of_the_sweep():
    plan = StudyPlan(target="levels/depth2").plan()
    jobs = [
        replace(job, facets={**job.facets, "baseline": "retrain"})
        if "transfer" in job.facets and job.facets["label_space"] == "levels/depth2"
        else job
        for job in plan.jobs
    ]
    plan = replace(plan, jobs=tuple(jobs))
    report = compute_report(plan, committed(plan, _metrics))
    assert report.tables[0].baseline == "levels/depth2"
    baseline = report.tables[0].baseline_row
    assert baseline is not None
    assert baseline.label_space == "levels/depth2"
    page = render_page(report, plan, Learning(curves={}, unreadable=())).decode()
    data = json.loads(page.partition('id="report">')[2].partition("</script>")[0])
    assert [table["baseline"] for table in data["tables"]] == ["levels/depth2"]


# --------------------------------------------------------------------------------------------- one-pass and published
def test_one_pass_is_the_pretraining_on_the_target_itself():
    report = _report(StudyPlan(), lambda job: {"val_error": 0.3 if job.kind == "pretrain" else _error(job)})
    assert report.tables[0].one_pass.summary.mean == pytest.approx(0.3)
    assert any(
        "direct training on levels/depth1, without transfer: 30.00" in line for line in answers(report)[0].sentences
    )


FACTORS = """\
version: 1
name: study
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: [levels/depth2]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
  factors: {optimizer: {adamw: {}, lamb: {recipe: {optimizer: lamb}}}}
transfer:
  - {name: top, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3},
     baselines: [one_pass]}
report:
  published: [{transfer: top, pretrain: optimizer-lamb, value: 0.0587}]
"""


@pytest.mark.parametrize("rows", [["optimizer"], ["optimizer", "labels"]])
def test_one_pass_of_a_sweep_with_factors_is_that_of_each_combination(rows):
    """They were trained, and in no table, sentence or file."""
    plan = plan_of(f"report.rows={rows}", "pretrain.labels=[levels/depth2, levels/depth1]", text=FACTORS)
    errors = {"adamw": 0.3, "lamb": 0.2}
    found = {
        job.name: Committed(metrics={"val_error": errors[str(job.facets["factor.optimizer"])]})
        for job in plan.jobs
        if job.kind is JobKind.PRETRAIN
    }
    report = compute_report(plan, found)
    told = [sentence for answer in answers(report) for sentence in answer.sentences if "direct training" in sentence]
    start = "direct training on levels/depth1, without transfer: adamw 30.00 ± 0.00 %, "
    assert set(told) == {f"{start}lamb 20.00 ± 0.00 % (published 5.87 %)"}
    records = result_records(report)
    lines = [dict(zip(records.columns, row, strict=True)) for row in records.rows]
    names = ("factor.optimizer", "factor.labels", "mean")
    of_target = [tuple(map(line.get, names)) for line in lines if line["label_space"] == "one-pass"]
    assert of_target == [("adamw", "levels/depth1", 0.3), ("lamb", "levels/depth1", 0.2)] * len(told)
    assert not any("published" in note for note in report.notes)


PAPER = Published(transfer="main", label_space="levels/depth3", value=0.0479, std=0.00045, source="table 1")


def test_published_numbers_stand_beside_ours():
    one_pass = Published(transfer="main", label_space="", value=0.0587, std=0.00025)
    report = _report(StudyPlan(published=(PAPER, one_pass)))
    assert [row.published for row in report.tables[0].rows] == [None, None, PAPER]
    printed = _printed(report)
    assert "4.79 ± 0.04" in printed or "4.79 ± 0.05" in printed
    assert "(published 5.87 ± 0.03 %)" in printed or "(published 5.87 ± 0.02 %)" in printed
    assert "| 4.79" in render_files(report)["report.md"].decode().replace("**", "")
    results = list(csv.DictReader(io.StringIO(render_files(report)["results.csv"].decode())))
    assert [line["published"] for line in results if line["published"]] == ["0.0479", "0.0587"]
    assert not any("published" in note for note in report.notes)


def test_published_numbers_of_checkpoints_and_cells_find_their_place():
    entries = (
        replace(PAPER, checkpoint="epoch50"),
        replace(PAPER, value=0.05),  # of the last checkpoint, which papers do not name
        replace(PAPER, cell="lr=1", value=0.06),
    )
    study = StudyPlan(checkpoints=("epoch50", "epoch90"), cells=("lr=0.1", "lr=1"), published=entries)
    report = _report(study, _grid_metrics)
    by_checkpoint = {table.checkpoint: table.rows[2].published for table in report.tables}
    assert {name: entry.value for name, entry in by_checkpoint.items()} == {"epoch50": 0.0479, "epoch90": 0.05}
    grid = next(item for item in report.ablations if item.facet is Facet.CELL and item.place.checkpoint == "epoch90")
    assert [cell.published and cell.published.value for cell in grid.rows[2].cells] == [None, 0.06]


def test_published_number_of_no_row_is_noted():
    report = _report(StudyPlan(published=(replace(PAPER, label_space="levels/depth9"),)))
    assert any("levels/depth9" in note and "no such row" in note for note in report.notes)


def test_of_several_published_numbers_for_a_row_those_that_are_not_shown_are_noted():
    report = _report(StudyPlan(published=(PAPER, replace(PAPER, value=0.05, source="table 2"))))
    assert [row.published.value for row in report.tables[0].rows if row.published] == [0.05]
    said = "levels/depth3 under main (table 1) is not shown: a later one is of the same row"
    assert [note for note in report.notes if "not shown" in note] == [f"the published number of {said}"]


# ----------------------------------------------------------------------------------------------- missing, failed, NaN
def test_failed_runs_are_shown_as_such():
    plan = StudyPlan().plan()
    lost = "finetune/main/levels/depth2/seed1/seed0"
    views = {job.name: JobView(name=job.name, key=job.key, state=JobState.SUCCEEDED) for job in plan.jobs}
    views[lost] = replace(views[lost], state=JobState.FAILED, reason="out of memory")
    report = compute_report(plan, committed(plan, lambda job: None if job.name == lost else _metrics(job)), views)
    assert report.tables[0].rows[1].absent == {"failed": 1}
    assert "2/3 runs, 1 failed" in _printed(report)
    assert any(f"first: {lost}: out of memory" in note for note in report.notes)
    assert report.absent == {lost: "failed"}


def test_jobs_without_a_result_are_counted_by_how_they_ended():
    """All of them were said to be in the state of the first one, such as failed where they were skipped."""
    plan = StudyPlan().plan()
    ends = {
        "finetune/main/levels/depth1/seed0/seed0": (JobState.CANCELLED, ""),
        "finetune/main/levels/depth2/seed0/seed0": (JobState.SKIPPED, "needs pretrain/levels/depth2/seed0"),
        "finetune/main/levels/depth2/seed1/seed0": (JobState.FAILED, "out of memory"),
        "finetune/main/levels/depth3/seed0/seed0": (JobState.SKIPPED, "needs pretrain/levels/depth3/seed0"),
    }
    views = {
        job.name: JobView(name=job.name, key=job.key, state=state, reason=reason)
        for job in plan.jobs
        for state, reason in [ends.get(job.name, (JobState.SUCCEEDED, ""))]
    }
    found = compute_report(plan, committed(plan, lambda job: None if job.name in ends else _metrics(job)), views)
    first = "finetune/main/levels/depth2/seed1/seed0: out of memory"
    assert found.notes[0] == f"1 jobs failed (first: {first}), 2 skipped, 1 cancelled; their cells lack these runs"


def test_nan_metric_is_shown_excluded_and_noted():
    def metrics(job):
        diverged = job.name == "finetune/main/levels/depth2/seed1/seed0"
        return {"val_error": math.nan if diverged else _error(job)}

    report = _report(StudyPlan(), metrics)
    row = report.tables[0].rows[1]
    assert (row.summary.num_values, row.absent) == (2, {"nan": 1})
    assert "2/3 runs, 1 NaN" in _printed(report)
    assert any("nan or infinity" in note for note in report.notes)
    for content in (render_files(report)["report.json"], json.dumps(report.to_json(), allow_nan=False).encode()):
        json.loads(content, parse_constant=pytest.fail)


def test_metric_that_no_run_reports_names_those_that_they_do():
    report = _report(StudyPlan(metric="val_auc"))
    assert any("no committed run has metric 'val_auc'" in note and "val_error" in note for note in report.notes)
    assert answers(report)[0].sentences == ("no result yet",)


def test_single_seed_has_no_std_and_says_why():
    report = _report(StudyPlan(pretrain_seeds=(0,)))
    row = report.tables[0].rows[0]
    assert (row.summary.std, row.summary.low, row.can_be_best) == (None, None, None)
    printed = _printed(report)
    assert "±" not in printed
    assert "one pretrain seed only" in printed


def test_two_pretrain_seeds_are_warned_about():
    assert any("one degree of freedom" in note for note in _report(StudyPlan(pretrain_seeds=(0, 1))).notes)


def test_empty_sweep_of_any_form_renders():
    report = _report(replace(GRID, checkpoints=("epoch1", "epoch2")), lambda job: None)
    assert set(render_files(report)) >= {"report.md", "curve.svg", "runs.parquet"}
    assert len(caveats(report)) == 1


# --------------------------------------------------------------------------------------------------- cost and numbers
def test_cost_counts_backbones_and_transfers_of_all_cells():
    plan = GRID.plan()
    report = compute_report(plan, committed(plan, _grid_metrics, measured_s=3600.0))
    # 3 backbones and 3 x 3 transfers of an hour on 4 GPUs and 2 cores each.
    assert _compute(report, 0).gpu_hours == pytest.approx(48.0)
    assert _compute(report, 0).cpu_hours == pytest.approx(24.0)
    assert "GPU-hours" in _printed(report)


def test_artifact_with_two_names_counts_once():
    """As of two blocks with equal values and some equal seeds: n was 4, and its hours counted twice."""
    plan = StudyPlan().plan()
    again = (job for job in plan.jobs if job.facets.get("pretrain_seed") == 2)
    renamed = (replace(job, name=f"{job.name}/b", needs=tuple(f"{need}/b" for need in job.needs)) for job in again)
    plan = replace(plan, jobs=(*plan.jobs, *renamed))
    view = JobView(name="pretrain/levels/depth2/seed2/b", key="k", state=JobState.SUCCEEDED, ran_s=10 * 3600.0)
    report = compute_report(plan, committed(plan, _metrics, measured_s=3600.0), {view.name: view})
    assert [(row.num_expected, row.is_complete, count(row)) for row in report.tables[0].rows] == [(3, True, "3")] * 3
    # The name that ran counts: 10 hours beside 5 of one, on 2 cores each.
    assert [_compute(report, row).cpu_hours for row in range(3)] == pytest.approx([12.0, 30.0, 12.0])
    assert len(list(csv.DictReader(io.StringIO(render_files(report)["runs.csv"].decode())))) == 9


def test_cost_of_a_backbone_counts_once_for_all_of_its_transfers():
    """It counted for each: n was 15, the spread 1.69, and a note warned of the one head and order of the transfers."""
    study = StudyPlan(metric="gpu_hours", transfer_seeds=range(5), resources=Resources(cpus=2, gpus=1))
    plan = study.plan()
    hours = {job.name: 10.0 + 2 * int(job.facets.get("pretrain_seed", 0)) for job in plan.jobs}
    found = {name: replace(run, measured_s=3600 * hours[name]) for name, run in committed(plan, _metrics).items()}
    report = compute_report(plan, found)
    text = text_table(report.tables[0])
    cells = [text.rows[0][text.header.index(name)] for name in ("gpu_hours [h]", "n", "seeds")]
    assert cells == ["12 ± 2", "3", "3"]
    assert not any("std of" in name for name in text.header)
    assert "transfer seed" not in text.caption
    files_of = render_files(report)
    assert {line["num_pairs"] for line in csv.DictReader(io.StringIO(files_of["comparisons.csv"].decode()))} == {"3"}
    assert len(list(csv.DictReader(io.StringIO(files_of["runs.csv"].decode())))) == 3 * 15
    some = {name: run for name, run in found.items() if not re.search("seed2/seed[34]", name)}
    assert all(row.is_complete for row in compute_report(plan, some).tables[0].rows)


def test_cost_prefers_what_all_attempts_of_this_sweep_took():
    plan = StudyPlan().plan()
    name = "pretrain/levels/depth1/seed0"
    views = {name: JobView(name=name, key="k", state=JobState.SUCCEEDED, ran_s=10 * 3600.0)}
    report = compute_report(plan, committed(plan, _metrics, measured_s=3600.0), views)
    assert _compute(report, 0).gpu_hours == pytest.approx(4 * (10 + 5))
    assert _compute(report, 1).gpu_hours == pytest.approx(4 * 6)
    held = ResourceUse(gpu_s=10 * 3600.0, cpu_s=5 * 3600.0)  # it ran on one of its four GPUs
    smaller = compute_report(
        plan, committed(plan, _metrics, measured_s=3600.0), {name: replace(views[name], used=(held,))}
    )
    assert _compute(smaller, 0).gpu_hours == pytest.approx(10 + 4 * 5)
    assert _compute(smaller, 0).cpu_hours == pytest.approx(5 + 2 * 5)


@pytest.mark.parametrize(
    ("kind", "changes", "seconds"),
    [
        ("pretrain", {}, 100.0),
        ("pretrain", {"resumed_steps": [60, 90]}, 10 + 100 * 32 / 8),  # its last attempt trained the last ten steps
        ("pretrain", {"resumed_steps": [90], "measured": {"setup_s": 10.0, "train_s": 90.0}}, None),
        ("embed", {"rows_of_earlier_attempts": 0, "measured": {"work_s": 50.0}}, 50.0),
        ("embed", {"rows_of_earlier_attempts": 600, "measured": {"work_s": 50.0}}, 125.0),
        ("embed", {"rows_of_earlier_attempts": 999, "measured": {"work_s": 50.0}}, None),  # all start and no work
        ("knn", {"measured": {"setup_s": 10.0, "train_s": 30.0, "work_s": 40.0}}, 40.0),  # the whole and its parts
        ("labels", {"measured": {}}, None),
    ],
)
def test_hours_of_a_reused_result_are_of_all_of_its_attempts(kind, changes, seconds):
    """Its record has the seconds of the last one; another sweep's journal is not read."""
    identity = {"kind": kind, "parameters": {"recipe": {"batch_size": 32, "epochs": 1}}}
    record = Record(
        key="k",
        identity=identity,
        attempt_id="k.3",
        job=f"{kind}/a",
        sweep="other",
        created_at_s=0.0,
        parts={},
        metrics={"num_steps": 100.0, "num_samples": 1000.0},
        summary={"measured": {"setup_s": 10.0, "train_s": 90.0, "images_per_s": 8.0}, **changes},
    )
    assert Committed.of(record).measured_s == seconds


def test_cost_that_nobody_recorded_is_not_shown():
    plan = StudyPlan().plan()
    report = compute_report(plan, committed(plan, _metrics, measured_s=None))
    assert report.tables[0].rows[0].compute is None
    assert "hours" not in _printed(report)
    found = committed(plan, _metrics, measured_s=3600.0)
    name = "pretrain/levels/depth1/seed0"
    report = compute_report(plan, {**found, name: replace(found[name], measured_s=None)})
    assert [row.compute.num_unknown for row in report.tables[0].rows if row.compute] == [1, 0, 0]
    assert "≥ 20" in _printed(report)  # five runs of an hour on four GPUs, and one of unknown time


@pytest.mark.parametrize("value", [-0.00001, 0.0, 0.00001])
def test_numbers_that_round_to_zero_have_no_sign(value):
    assert number(value, "val_error", sign="+") == "0.00"
    assert fixed(value, 1, sign="+") == "0.0"


def test_numbers_of_certainty_never_round_to_certainty():
    assert [p_text(value) for value in (None, 0.0001, 0.049, 1.0)] == ["-", "<0.001", "0.049", "1.000"]


def test_numbers_beside_a_threshold_do_not_print_it():
    """*established, corrected p = 0.050* stood beside an interval that ended at 0.00."""
    assert [p_text(value) for value in (0.0497, 0.0503, 0.04998, 0.05)] == ["0.0497", "0.0503", "0.04998", "0.050"]
    found = PairedDifference(
        num_pairs=3, mean=-0.002, low=None, high=None, confidence=0.95, family_low=-0.00398, family_high=-0.000021
    )
    established, unknown = (replace(found, p_family=p_value) for p_value in (0.0497, 0.0503))
    assert family_interval(established, "val_error") == "[-0.398, -0.002]"
    assert family_interval(established.turned, "val_error") == "[+0.002, +0.398]"
    assert family_interval(replace(unknown, family_high=0.000021), "val_error") == "[-0.40, 0.00]"


LARGE = {12343.67: "12343.7", -12337.42: "-12337.4", 1234.0: "1234", 999.96: "1000", 2.517: "2.517", 1.2e7: "1.2e+07"}


def test_large_numbers_have_all_digits_before_the_point():
    """A mean of 12343.7 images/s was 1.234e+04, and so were the ends of its interval."""
    assert [number(value, "images_per_s") for value in LARGE] == list(LARGE.values())
    assert number(9999999.96, "images_per_s", sign="+") == "+10000000"


def test_page_prints_large_numbers_as_tables_do():
    driver = pytest.importorskip("playwright._impl._driver", reason="needs the JavaScript engine of playwright")
    engine, *_ = driver.compute_driver_executable()
    text = files("orchestrator.report").joinpath("assets/page.js").read_text()
    function = text[text.index("const isThere =") : text.index("const plusMinus =")]
    values = [value for value in LARGE if value < 1e7]
    script = f"const DATA = {{}}; {function}; console.log(JSON.stringify({values}.map((value) => number(value))));"
    told = subprocess.run([engine, "-e", script], check=True, capture_output=True, timeout=60).stdout
    assert json.loads(told) == [LARGE[value] for value in values]


def test_parquet_has_the_numbers_of_the_csv_and_is_byte_stable():
    report = _report(StudyPlan(transfer_seeds=(0, 1)))
    files, again = render_files(report), render_files(report)
    table = pq.read_table(io.BytesIO(files["results.parquet"])).to_pydict()
    lines = list(csv.DictReader(io.StringIO(files["results.csv"].decode())))
    assert table["mean"] == [float(line["mean"]) for line in lines]
    assert table["label_space"] == [line["label_space"] for line in lines]
    assert table["transfer_std"][1] == pytest.approx(0.009 / math.sqrt(2))
    assert files == again
