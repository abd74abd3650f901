"""Reports of sweeps with factors: rows of combinations, effects, what pairs them, and that label-only reports stay."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from orchestrator.api.views import committed_results
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan, Published
from orchestrator.report.build import compute_report
from orchestrator.report.compare_sweeps import UNPAIRED, compare_sweeps, comparison_tables, sweep_records
from orchestrator.report.factors import check_factors, matched_by
from orchestrator.report.inputs import Committed, Learning
from orchestrator.report.render.answers import answers
from orchestrator.report.render.columns import effect_table, text_table
from orchestrator.report.render.curves import draw_curve, draw_effects
from orchestrator.report.render.files import render_files
from orchestrator.report.render.notebook import report_figure
from orchestrator.report.render.numbers import TOO_FEW
from orchestrator.report.render.page import render_page
from orchestrator.report.results import FactorReport, Report
from orchestrator.state.snapshot import JobView
from orchestrator.state.spending import ResourceUse
from tests.report_sweeps import REPORT_FILES
from tests.sweep_fields import plan_of

MODEL = "{name: test_vit, image_size: 32}"
RECIPE = "{epochs: 2, batch_size: 64, lr: 1e-3}"
TEXT = f"""\
version: 1
name: study
datasets: {{tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}}}
labels: {{levels: {{dataset: tree, hierarchy: [depth1, depth2]}}}}
pretrain:
  model: {MODEL}
  labels: [levels/depth2]
  recipe: {{epochs: 2, batch_size: 64, lr: 1e-3}}
  seeds: [0, 1, 2, 3, 4]
  factors:
    optimizer: {{adamw: {{}}, lamb: {{recipe: {{optimizer: lamb, lr: 5.0e-3}}}}}}
    mix: {{none: {{}}, mixup: {{recipe: {{mixup: 0.2}}}}}}
transfer:
  - name: top
    target: levels/depth1
    protocol: probe
    recipe: {{epochs: 2, batch_size: 64, lr: 1e-3}}
    seeds: [0, 1]
"""
NO_MIX = "pretrain.factors.mix=null"
OTHER = ("pretrain.model={name: test_vit2, image_size: 32}", "pretrain.subset={fraction: 0.5}")
"""A backbone that shares nothing with the first one but the number of its seed."""
DATA = (
    NO_MIX,
    "pretrain.factors.optimizer=null",
    "pretrain.factors.data={all: {}, other: {model: {name: test_vit2, image_size: 32}, subset: {fraction: 0.5}}}",
)
"""The same two backbones as values of a factor."""


def committed(plan: Plan, *, seed: int = 3, better: str = "lamb", noise: float = 0.004) -> dict[str, Committed]:
    """Results with an effect of the optimizer, the same of a key in every plan."""
    found = {}
    for job in plan.jobs:
        if job.kind.value not in {"probe", "pretrain"}:
            continue
        of_key = np.random.default_rng([seed, int(job.key.rpartition("-")[2], 16) % 2**32])
        shared = np.random.default_rng([seed, int(job.facets["pretrain_seed"])]).normal(0, 0.03)
        effect = -0.02 if job.facets.get("factor.optimizer") == better or f"/{better}/" in job.name else 0.0
        value = 0.3 + effect + shared + of_key.normal(0, noise)
        metrics = {"val_error": value, "images_per_s": 1000 * value}
        found[job.name] = Committed(metrics=metrics, measured_s=3600.0)
    return found


def report_of(*overrides: str, text: str = TEXT, **options: Any) -> FactorReport:
    plan = plan_of(*overrides, text=text)
    report = compute_report(plan, committed(plan, **options))
    assert isinstance(report, FactorReport)
    return report


def _contrast(report: FactorReport, *values: str) -> Any:
    return next(e for e in report.effects[0].contrasts if e.values == values)


def test_rows_are_combinations_of_values_against_the_baseline_and_each_other() -> None:
    report = report_of("report={baseline: {optimizer: lamb, mix: none}}")
    (table,) = report.headlines
    assert [row.label_space for row in table.rows] == ["adamw + none", "adamw + mixup", "lamb + none", "lamb + mixup"]
    assert (table.row_title, table.baseline, table.place.pretrain) == ("optimizer + mix", "lamb + none", "")
    assert len(table.comparisons) == 6
    assert {row.summary.num_values for row in table.rows if row.summary} == {10}


def test_factors_that_are_no_rows_make_tables_of_their_own() -> None:
    report = report_of("report={rows: [optimizer]}", "pretrain.labels=[levels/depth1, levels/depth2]")
    assert [table.place.pretrain for table in report.headlines] == [
        f"mix {mix}, labels levels/{level}" for mix in ("none", "mixup") for level in ("depth1", "depth2")
    ]
    assert [row.label_space for row in report.headlines[0].rows] == ["adamw", "lamb"]


@pytest.mark.parametrize(
    ("factors", "second", "value", "pairs", "method"),
    [
        ((NO_MIX,), ("pretrain.recipe.optimizer=lamb", "pretrain.recipe.lr=5.0e-3"), "lamb", "10", "paired t"),
        (DATA, OTHER, "other", UNPAIRED, "Welch's t"),
    ],
    ids=["pairs", "independent"],
)
@pytest.mark.parametrize("is_wide", [False, True], ids=["many seeds", "too few seeds"])
def test_two_values_say_exactly_what_compare_says_of_two_sweeps(
    factors: tuple[str, ...], second: tuple[str, ...], value: str, pairs: str, method: str, is_wide: bool
) -> None:
    """Also where runs share only the number of the seed: as pairs they had another interval in two sweeps.

    With too few seeds the effect had an interval that no error can have, beside the row's *too few seeds*.
    """
    text = TEXT.replace("[0, 1, 2, 3, 4]", "[0, 1]") if is_wide else TEXT
    pairs = "4" if is_wide and pairs == "10" else pairs
    whole = plan_of(*factors, text=text)
    values = committed(whole, noise=0.1 if is_wide else 0.004)
    report = compute_report(whole, values)
    assert isinstance(report, FactorReport)
    plans = [plan_of(NO_MIX, "pretrain.factors=null", *more, text=text) for more in ((), second)]
    by_key = {job.key: values[job.name] for job in whole.jobs if job.name in values}
    reports: list[Report] = [
        compute_report(replace(plan, sweep=name), {job.name: by_key[job.key] for job in plan.jobs if job.key in by_key})
        for name, plan in zip(("first", "second"), plans, strict=True)
    ]
    comparison = compare_sweeps(reports, plans)
    (cells,) = comparison.places.values()
    (expected,) = cells[0].differences
    (table,) = comparison_tables(comparison)
    assert table.rows[0][-3] == pairs
    assert [line[-3] for line in sweep_records(comparison).rows] == [None, int(pairs != UNPAIRED)]
    for caption in (table.caption, text_table(report.headlines[0]).caption, effect_table(report.effects[0]).caption):
        assert f"({method} tests over pretrain seeds, Bonferroni" in caption
    row = next(row for row in report.headlines[0].rows if row.label_space == value)
    assert expected is not None
    assert row.difference is not None
    effect = _contrast(report, value).difference
    for field in ("mean", "low", "high", "p_value", "p_family", "family_low", "family_high", "num_pretrain_seeds"):
        assert getattr(row.difference, field) == getattr(expected, field), field
        if field not in {"family_low", "family_high"} or is_wide:  # else their arithmetic differs in the last bit
            assert getattr(effect, field) == getattr(expected, field), field
    assert (effect.family_low is None) == is_wide
    assert (effect_table(report.effects[0]).rows[0][2] == TOO_FEW) == is_wide


def test_sweeps_are_matched_by_values_of_factors_whatever_their_blocks_are_called() -> None:
    plan = plan_of(NO_MIX, text=TEXT)
    single = TEXT[TEXT.index("  model:") : TEXT.index("transfer:")]
    nested = "pretrain:\n  mine:\n" + "".join(f"  {line}\n" for line in single.splitlines())
    text = TEXT[: TEXT.index("pretrain:")] + nested + TEXT[TEXT.index("transfer:") :]
    other = plan_of("pretrain.mine.factors.mix=null", "pretrain.mine.recipe.mixup=0.1", "name=other", text=text)
    names = ("optimizer", "labels")
    reports = [matched_by(compute_report(replace(one, rows=names), committed(one)), names) for one in (plan, other)]
    (cells,) = compare_sweeps(reports, (plan, other)).places.values()
    assert [cell.label_space for cell in cells] == ["adamw + levels/depth2", "lamb + levels/depth2"]
    with pytest.raises(UserError, match="several cells with equal optimizer under top"):
        matched_by(report_of("report={rows: [optimizer]}"), ["optimizer"])
    with pytest.raises(UserError, match="'optimiser' is not a factor of sweep study: did you mean 'optimizer'"):
        check_factors(plan, ["optimiser"])


def test_effects_say_how_many_cells_match_and_what_pairs_them() -> None:
    report = report_of()
    (effects,) = report.effects
    assert effects.factors == {"optimizer": ("adamw", "lamb"), "mix": ("none", "mixup")}
    lamb = _contrast(report, "lamb")
    assert (lamb.num_matched, lamb.num_combinations, lamb.is_paired) == (2, 2, True)
    assert lamb.difference.is_established
    assert lamb.difference.mean == pytest.approx(-0.02, abs=0.005)
    assert not _contrast(report, "lamb", "mixup").difference.is_established
    assert [pairing.shared for pairing in effects.pairings] == ["initial weights, order, crops"] * 2
    assert {test.factors for test in effects.tests} == {("optimizer",), ("mix",), ("optimizer", "mix")}


def test_report_of_a_stored_plan_whose_facets_are_sorted_is_that_of_the_plan() -> None:
    plan = plan_of(text=TEXT)
    stored = replace(plan, jobs=tuple(replace(job, facets=dict(sorted(job.facets.items()))) for job in plan.jobs))
    found = committed(plan)
    assert compute_report(stored, found) == compute_report(plan, found)


def test_values_that_share_nothing_are_compared_by_welch_in_rows_and_effects() -> None:
    report = report_of(*DATA)
    effect = _contrast(report, "other")
    assert not effect.is_paired
    row = next(row for row in report.headlines[0].rows if row.label_space == "other")
    assert row.difference is not None
    assert (row.difference.mean, row.difference.p_value) == pytest.approx(
        (effect.difference.mean, effect.difference.p_value)
    )
    # The spread of the seeds, which pairs would take out, is in the interval.
    assert row.difference.std_error is not None
    assert row.difference.std_error > 0.01
    assert report.effects[0].pairings[0].shared == "the number of the seed only"


def test_backbones_that_only_searches_make_are_cells_of_the_design() -> None:
    """They were none: rows and baseline that the file asked for were left out without a word."""
    searched = "transfer.top.search={over: pretrain, random: {}, space: {batch_size: [32, 64]}}"
    report = report_of("report={rows: [optimizer], baseline: {optimizer: lamb}}", searched)
    assert [table.place.pretrain for table in report.headlines] == ["mix none", "mix mixup"]
    assert [row.label_space for row in report.headlines[0].rows] == ["adamw", "lamb"]
    assert report.headlines[0].baseline == "lamb"
    assert _lines(report, "runs.csv")[0]["factor.optimizer"] == "adamw"
    # Also where something else pretrains the same cells without a search: they were pairs then.
    analysed = f"{TEXT}analyze: [{{name: structure, measures: [collapse]}}]\n"
    plain = f"{TEXT}  - {{name: plain, target: levels/depth1, protocol: probe, recipe: {RECIPE}, seeds: [0]}}\n"
    for text in (TEXT, analysed, plain):
        report = report_of("report={rows: [optimizer], baseline: {optimizer: lamb}}", searched, text=text)
        effect = _contrast(report, "adamw")
        assert (effect.num_matched, effect.is_paired) == (2, False)
        paired = {table.transfer: table.rows[0].difference.is_paired for table in report.headlines}  # type: ignore[union-attr]
        assert paired == {"top": False, "plain": True} if text is plain else {"top": False}
    labels = "pretrain.labels=[levels/depth1, levels/depth2]"
    chosen = report_of(labels, "transfer.top.search={over: labels, asha: {}}")
    assert list(chosen.factors) == ["optimizer", "mix"]
    assert _contrast(chosen, "lamb").num_matched == 2


def test_retrained_baseline_of_a_single_label_space_has_a_table_of_its_own() -> None:
    """Its runs have the values of the design's cells, but for the label space, which is no factor of one value."""
    retrained = "transfer.top.baselines=[retrain]"
    plan = plan_of(retrained, text=TEXT)
    found = {
        name: replace(run, metrics={**run.metrics, "val_error": run.metrics["val_error"] + 0.3})
        if plan.by_name()[name].facets.get("baseline")
        else run
        for name, run in committed(plan).items()
    }
    report, plain = compute_report(plan, found), report_of()
    assert [table.place.pretrain for table in report.headlines] == ["", "labels levels/depth1"]
    first, second = report.headlines
    assert [row.label_space for row in second.rows] == [row.label_space for row in first.rows]
    assert [row.summary for row in first.rows] == [row.summary for row in plain.headlines[0].rows]
    assert min(row.summary.mean for row in second.rows if row.summary) > 0.5
    assert not any("equal seeds" in note for note in report.notes)


def test_metric_that_is_better_higher_turns_the_ranking_and_not_the_difference() -> None:
    low, high = report_of(), report_of("report={metric: images_per_s}")
    assert [row.label_space for row in low.headlines[0].ranked] == [
        row.label_space for row in reversed(high.headlines[0].ranked)
    ]
    lamb = next(row for row in high.headlines[0].rows if row.label_space == "lamb + none")
    assert lamb.difference is not None
    assert lamb.improvement is not None
    assert lamb.difference.mean < 0
    assert lamb.improvement < 0
    assert lamb.can_be_best is False


def test_improvement_of_a_metric_that_is_better_higher_is_said_to_be_higher() -> None:
    report = report_of("report={metric: images_per_s, baseline: {optimizer: lamb, mix: none}}")
    best = report.headlines[0].ranked[0]
    assert best.improvement is not None
    assert best.improvement > 0
    assert " % higher than the baseline lamb + none" in answers(report)[0].sentences[0]


@pytest.mark.parametrize(
    ("metric", "best", "unit", "values"),
    [
        ("gpu_hours", "lamb", "h", ("6 ± 0", "2 ± 0")),
        ("cpu_hours", "lamb", "h", ("12 ± 0", "4 ± 0")),
        ("images_per_s", "lamb", "images/s", ("300 ± 0", "900 ± 0")),
    ],
)
def test_what_pretraining_took_is_a_metric_of_its_transfers_with_direction_and_unit(
    metric: str, best: str, unit: str, values: tuple[str, str]
) -> None:
    """Of the backbone alone, which one optimizer makes in 1 hour and the other in 3, whatever its transfers take."""
    plan = plan_of(NO_MIX, f"report={{metric: {metric}}}", text=TEXT)
    held = replace(plan.jobs[0].resources, gpus=2.0, cpus=4.0)
    plan = replace(plan, jobs=tuple(replace(job, resources=held) for job in plan.jobs))
    found = {}
    for name in committed(plan):
        hours = 1.0 if "/optimizer-lamb/" in name else 3.0
        found[name] = Committed(metrics={"val_error": 0.1}, measured_s=36_000.0)
        if name.startswith("pretrain/"):
            found[name] = replace(found[name], measured_s=3600 * hours, images_per_s=900 / hours)
    report = compute_report(plan, found)
    assert not any("no committed run" in note for note in report.notes)
    (table,) = report.headlines
    text = text_table(table)
    column = text.header.index(f"{metric} [{unit}]")
    assert f"difference [{unit}]" in text.header
    assert (tuple(row[column] for row in text.rows), table.ranked[0].label_space) == (values, best)
    page = render_page(report, plan, Learning(curves={}, unreadable=())).decode()
    data = json.loads(page.partition('id="report">')[2].partition("</script>")[0])
    assert (data["unit"], data.get("isHigherBetter", False)) == (unit, metric == "images_per_s")
    sentences = " ".join(sentence for answer in answers(report) for sentence in answer.sentences)
    assert f"{metric} {values[1]} {unit}" in sentences
    assert (f"lowest mean: {best}" in sentences) == (metric != "images_per_s")


def test_hours_of_backbones_are_of_the_gpus_that_their_attempts_held() -> None:
    plan = plan_of(NO_MIX, "report={metric: gpu_hours}", text=TEXT)
    used = (ResourceUse(gpu_s=3 * 3600.0),)
    views = {
        job.name: JobView(name=job.name, key=job.key, ran_s=3600.0, used=used)
        for job in plan.jobs
        if job.kind is JobKind.PRETRAIN
    }
    found = {name: Committed(metrics={"val_error": 0.1}, measured_s=60.0) for name in committed(plan)}
    means = [row.summary.mean for row in compute_report(plan, found, views).headlines[0].rows if row.summary]
    assert means == [3.0, 3.0]
    # The search for the recipe of a transfer is no part of it, and all transfers of a backbone say the same.
    searched = plan_of(
        NO_MIX,
        "report={metric: gpu_hours}",
        "transfer.top.search={random: {}, space: {momentum: [0.5, 0.9]}}",
        text=TEXT,
    )
    views = {
        job.name: JobView(name=job.name, key=job.key, ran_s=3600.0, used=used)
        for job in searched.jobs
        if job.kind in {JobKind.PRETRAIN, JobKind.SEARCH}
    }
    found = {name: Committed(metrics={"val_error": 0.1}, measured_s=60.0) for name in committed(searched)}
    means = [row.summary.mean for row in compute_report(searched, found, views).headlines[0].rows if row.summary]
    assert means == [3.0, 3.0]


def test_files_of_factors_hold_every_effect_beside_the_usual_ones() -> None:
    files = render_files(report_of())
    assert files.keys() == {*REPORT_FILES, "effects.csv", "effects.parquet", "effects.svg"}
    lines = list(csv.DictReader(io.StringIO(files["effects.csv"].decode())))
    assert [tuple(map(line.get, ("factors", "values", "references", "num_matched", "freedom"))) for line in lines] == [
        ("optimizer", "lamb", "adamw", "2", "4"),
        ("mix", "mixup", "none", "2", "4"),
        ("optimizer x mix", "lamb x mixup", "adamw x none", "1", "4"),
    ]
    assert b"| optimizer lamb - adamw |" in files["report.md"]
    assert json.loads(files["report.json"])["effects"][0]["pairings"][0]["shared"] == "initial weights, order, crops"


def _lines(report: Report, file: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render_files(report)[file].decode())))


def test_results_runs_and_frames_have_a_column_of_each_factor() -> None:
    plan = plan_of("report={rows: [optimizer]}", text=TEXT)
    found = committed(plan)
    report = compute_report(plan, found)
    names = ("factor.optimizer", "factor.mix")
    cells = {(optimizer, mix) for optimizer in ("adamw", "lamb") for mix in ("none", "mixup")}
    results, runs = _lines(report, "results.csv"), _lines(report, "runs.csv")
    assert {(line["label_space"], tuple(line[name] for name in names)) for line in results} == {
        (cell[0], cell) for cell in cells
    }
    assert len(runs) == 40
    assert all("_".join(f"{n[7:]}-{line[n]}" for n in names) in line["job"] for line in runs)
    parquet = pq.read_table(io.BytesIO(render_files(report)["runs.parquet"]))
    assert [tuple(line[name] for name in names) for line in parquet.to_pylist()] == [
        tuple(line[name] for name in names) for line in runs
    ]
    frame = committed_results(plan, {job.key: found[job.name] for job in plan.jobs if job.name in found})  # type: ignore[misc]
    assert set(zip(*(frame[name] for name in names), strict=True)) == cells


def test_panel_of_many_lines_has_room_for_them_and_no_legend() -> None:
    rates = [round(0.001 * number, 3) for number in range(1, 41)]
    report = report_of(NO_MIX, f"pretrain.factors={{recipe.weight_decay: {rates}}}", "pretrain.seeds=[0, 1]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_curve(report)
        figure.draw_without_rendering()
    assert [panel.get_legend() for panel in figure.axes] == [None]


def test_figure_of_a_notebook_has_the_values_of_the_first_factor_along_its_axis() -> None:
    report = report_of()
    figure = report_figure(report)
    axis = figure.layout.xaxis
    assert (axis.title.text, list(axis.ticktext)) == ("optimizer", ["adamw", "lamb"])
    means = {row.label_space: 100 * row.summary.mean for row in report.headlines[0].rows if row.summary}
    drawn = {f"{value} + {line.name}": y for line in figure.data for value, y in zip(line.text, line.y, strict=True)}
    assert drawn == pytest.approx(means)
    assert {tuple(line.x) for line in figure.data} == {tuple(axis.tickvals)}


def test_answer_says_which_factor_matters_and_that_effects_do_not_depend_on_each_other() -> None:
    (*_, factors) = answers(report_of())
    assert factors.title == "factors: top (probe on levels/depth1)"
    assert factors.sentences[0].startswith("val_error is lower at 95 % with optimizer lamb - adamw -2.")
    assert factors.sentences[1:] == ("no interaction is established",)


def test_answer_names_factors_that_no_two_cells_differ_in_alone() -> None:
    """No value of them was said to differ, or none to share seeds, and they were never compared."""
    for spaces, said in {
        ("levels/depth1, levels/depth2", "other/2, other/3"): (
            "no tested value of a factor differs from another one at 95 %; corrected for 2 contrasts",
            "not tested: block (no two cells with results differ in it alone)",
        ),
        ("levels/depth1", "levels/depth2"): (
            "nothing is tested: no two cells with results differ in one factor alone",
        ),
    }.items():
        blocks = (
            f"{name}: {{model: {MODEL}, labels: [{some}], seeds: [0, 1, 2], recipe: {RECIPE}}}"
            for name, some in zip(("first", "second"), spaces, strict=True)
        )
        head, rest = TEXT.partition("pretrain:")[0], TEXT[TEXT.index("transfer:") :]
        head = head.replace("depth2]}", "depth2]}, other: {dataset: tree, random: {num_classes: [2, 3]}}")
        (*_, factors) = answers(report_of(text=f"{head}pretrain: {{{', '.join(blocks)}}}\n{rest}"))
        assert factors.sentences == said


def test_published_number_of_a_grid_cell_finds_its_row_among_combinations() -> None:
    """It was looked up by the names of table and row, and said to be of no row."""
    plan = plan_of("transfer.top.recipe.lr=null", "transfer.top.grid={lr: [0.1, 0.2]}", text=TEXT)
    job = next(job for job in plan.jobs if job.facets.get("cell") == "lr=0.2")
    pretrain, space = str(job.facets["pretrain"]), str(job.facets["label_space"])
    entry = Published(transfer="top", label_space=space, value=0.123, pretrain=pretrain, cell="lr=0.2")
    report = compute_report(replace(plan, published=(entry,)), committed(plan))
    assert not any("published" in note for note in report.notes)
    found = {(line["label_space"], line["value"]): line["published"] for line in _lines(report, "ablations.csv")}
    assert {place: number for place, number in found.items() if number} == {("adamw + none", "lr=0.2"): "0.123"}


def test_page_finds_the_runs_of_a_combination_by_its_row() -> None:
    plan = plan_of("report={rows: [optimizer]}", text=TEXT)
    report = compute_report(plan, committed(plan))
    page = render_page(report, plan, Learning(curves={}, unreadable=())).decode()
    data = json.loads(page.partition('id="report">')[2].partition("</script>")[0])
    rows = {(table["pretrain"], row["labelSpace"]) for table in data["tables"] for row in table["rows"]}
    assert rows == {(f"mix {mix}", optimizer) for mix in ("none", "mixup") for optimizer in ("adamw", "lamb")}
    assert {(run["pretrain"], run["label_space"]) for run in data["runs"]} == rows
    assert data["effects"][0]["established"] == [1, 0, 0]


def test_label_only_report_is_of_the_same_form_as_before() -> None:
    plan = plan_of("pretrain.factors=null", "pretrain.labels=[levels/depth1, levels/depth2]", text=TEXT)
    report = compute_report(plan, committed(plan))
    assert type(report) is Report
    assert "effects" not in report.to_json()
    assert not any(
        line.startswith("factor.") for file in ("results.csv", "runs.csv") for line in _lines(report, file)[0]
    )
    assert report.headlines[0].row_title == "pretrained on"


def test_missing_runs_leave_matched_cells() -> None:
    plan = plan_of(text=TEXT)
    there = {name: found for name, found in committed(plan).items() if "optimizer-lamb_mix-mixup" not in name}
    report = compute_report(plan, there)
    assert isinstance(report, FactorReport)
    lamb = _contrast(report, "lamb")
    assert (lamb.num_matched, lamb.num_combinations) == (1, 2)
    assert report.effects[0].tests == ()


def test_contrast_that_leaves_out_seeds_says_so_and_the_figure_leaves_out_the_cell() -> None:
    """In one cell one of five seeds diverged, or four of them, or none."""
    plan = plan_of(text=TEXT)
    for lost, (cells, seeds, told, drawn) in {
        "[4]": ("2", "4/5", "leave out seeds that lack a cell (first: optimizer lamb - adamw, 4 of 5 seeds)", 4),
        "[1-4]": ("1/2", "5", "use only matched cells (first: optimizer lamb - adamw, 1 of 2", 3),
        "none": ("2", "5", "no interaction is established", 4),
    }.items():
        gone = re.compile(f"optimizer-lamb_mix-mixup/.*seed{lost}/")
        report = compute_report(plan, {name: one for name, one in committed(plan).items() if not gone.search(name)})
        assert isinstance(report, FactorReport)
        assert effect_table(report.effects[0]).rows[0][4:6] == (cells, seeds)
        assert told in " ".join(answers(report)[-1].sentences)
        assert sum(np.size(line.get_xdata()) for line in draw_effects(report).axes[0].lines) == drawn


def test_points_of_an_interaction_plot_average_the_same_combinations_of_other_factors() -> None:
    """Of two data sets the second one lacks a cell, so its others are not drawn, either: they would not be parallel."""
    report = report_of()
    cells = [(a, b, data) for data in ("x", "y") for a in ("adamw", "lamb") for b in ("none", "mixup")]
    means = {"x": 0.1, "y": 0.9}
    table = replace(
        report.effects[0],
        factors={**report.effects[0].factors, "data": ("x", "y")},
        cells=tuple(cells),
        means=tuple(None if cell == cells[-1] else means[cell[-1]] for cell in cells),
    )
    panel = draw_effects(replace(report, effects=(table,))).axes[0]
    assert [y for line in panel.lines for y in np.asarray(line.get_ydata())] == pytest.approx([10.0] * 4)


def test_blocks_that_state_equal_values_of_all_factors_are_noted_as_not_told_apart() -> None:
    recipe = "{epochs: 2, batch_size: 64, lr: %s}"
    rest = f"model: {MODEL}, labels: [levels/depth2], seeds: [0, 1], recipe: {recipe}, factors: {{optimizer: %s}}"
    stated = {"a": ("1e-3", "adamw"), "b": ("2e-3", "adamw"), "c": ("3e-3", "lamb")}
    blocks = ", ".join(f"{name}: {{{rest % values}}}" for name, values in stated.items())
    text = f"{TEXT[: TEXT.index('pretrain:')]}pretrain: {{{blocks}}}\n{TEXT[TEXT.index('transfer:') :]}"
    (note,) = (note for note in report_of(text=text).notes if "equal seeds" in note)
    assert note.startswith("adamw under top has several runs of equal seeds (first: probe/top/a/")
    assert " and probe/top/b/" in note


def test_values_of_set_beside_factors_of_a_block_have_effects_and_tests() -> None:
    """The names of the blocks changed together with the values, so that no cell of either had a match."""
    report = report_of(NO_MIX, "pretrain.recipe.weight_decay=0,1e-4", "pretrain.seeds=[0, 1, 2]")
    assert sorted(report.factors) == ["optimizer", "weight_decay"]
    assert {e.factors for e in report.effects[0].contrasts} == {
        ("optimizer",),
        ("weight_decay",),
        ("weight_decay", "optimizer"),
    }
    assert all(e.num_matched == (2 if len(e.factors) == 1 else 1) for e in report.effects[0].contrasts)
    assert len(report.effects[0].tests) == 3


def test_blocks_of_a_file_are_a_factor_beside_their_own_tables() -> None:
    block = (
        f"{{model: {MODEL}, labels: [levels/depth1, levels/depth2], recipe: {{epochs: 2, batch_size: 64, lr: 1e-3%s}}}}"
    )
    pretrain = f"pretrain: {{first: {block % ''}, lamb: {block % ', optimizer: lamb'}}}\n"
    text = TEXT[: TEXT.index("pretrain:")] + pretrain + TEXT[TEXT.index("transfer:") :]
    report = report_of("pretrain.*.seeds=[0, 1, 2]", text=text)
    assert [table.place.pretrain for table in report.headlines] == ["first", "lamb"]
    assert [row.label_space for row in report.headlines[0].rows] == ["levels/depth1", "levels/depth2"]
    assert list(report.factors) == ["block", "labels"]
    lines = _lines(report, "results.csv")
    assert [(line["factor.block"], line["factor.labels"]) for line in lines if line["label_space"] != "one-pass"] == [
        (block, f"levels/{level}") for block in ("first", "lamb") for level in ("depth1", "depth2")
    ]
    assert {line["factor.block"] for line in lines if line["label_space"] == "one-pass"} == {""}
    assert _contrast(report, "lamb").num_matched == 2
