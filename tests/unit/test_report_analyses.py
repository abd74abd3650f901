"""Analyses in the report: over seeds, beside the errors of transfers, and as figures of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from scipy.stats import spearmanr

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed, Learning
from orchestrator.report.render.analyses import analyses_html, analysis_figures, analysis_tables
from orchestrator.report.render.files import render_files
from orchestrator.report.render.notebook import report_html
from orchestrator.report.render.page import render_page
from orchestrator.report.results import AnalysisPicture, AnalysisReport, Report
from orchestrator.report.statistics.summaries import spearman
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes

SWEEP = """\
version: 1
name: analysed
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*"]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1, 2]
  checkpoints: {keep: {epochs: [1]}}
transfer: [{name: top, target: levels/depth1, protocol: probe, recipe: cached-probe}]
analyze:
  - {name: structure, from_checkpoints: [1, 2], measures: [collapse, distances, {embedding: {}}]}
  - {name: similarity, between: [labels], measures: [cka]}
"""


@cache
def plan(*, analyses: bool = True) -> Plan:
    text = SWEEP if analyses else SWEEP.partition("analyze:")[0]
    return build_plan(parse_sweep(text, "s.yaml", shipped_recipes()), store_uri="file:///store")


NC1_LAST = ("nc1", "epoch2", "levels/depth1")


def committed(*, lacking: str = "-", of_last: Mapping[str, float] = MappingProxyType({})) -> dict[str, Committed]:
    """Results of all jobs; ``of_last``: other values of NC1 at the last epoch, by backbone."""
    found = {}
    for job in plan().jobs:
        if lacking in job.name:
            continue
        seed, level = int(job.facets.get("pretrain_seed", 0)), str(job.facets.get("level", ""))
        fine = level == "depth2"
        if job.kind is JobKind.PROBE:
            found[job.name] = Committed(metrics={"val_error": 0.1 + 0.01 * seed + 0.05 * fine})
        elif job.facets.get("analysis") == "structure":
            late = job.facets["checkpoint"] == "epoch2"
            matrix = {"names": ["a", "<b>"], "values": [[1.0 + seed, 4.0], [4.0, 1.0]]}
            points = {"points": [[0.0, 1.0], [2.0, 3.0]], "classes": [0, 1], "class_names": ["a", "<b>"], "trained": []}
            metrics = {"nc1": (0.2 if late else 0.8) + 0.1 * seed + 0.3 * fine, "clp_accuracy": 1.0 - 0.01 * seed}
            if late and (other := of_last.get(f"{job.facets['label_space']}/seed{seed}")) is not None:
                metrics["nc1"] = other
            pictures: dict[str, Any] = {"distances": matrix}
            pictures["embedding"] = {**points, "trained_names": [], "method": "pca"}
            pictures["layers"] = {"names": ["act1", "<act2>"], "values": [0.5, 0.1 * seed + 0.2 * fine]}
            found[job.name] = Committed(metrics=metrics, pictures=pictures)
        elif job.facets.get("analysis") == "similarity":
            values = [[1.0, 0.4 + 0.1 * seed], [0.4 + 0.1 * seed, 1.0]]
            found[job.name] = Committed(metrics={"cka_mean": values[0][1]}, pictures={"cka": {"values": values}})
        elif job.kind in {JobKind.PRETRAIN, JobKind.LABELS}:
            found[job.name] = Committed(metrics={"val_error": 0.2, "num_classes": 2.0})
    return found


def report(**how: Any) -> Report:
    return compute_report(plan(), committed(**how))


def test_numbers_are_a_line_for_each_metric_and_label_space_with_a_column_for_each_checkpoint() -> None:
    table = next(analysis_tables(report().analyses[0]))
    assert table.header[:4] == ("metric", "pretrained on", "epoch1: mean ± std", "epoch2: mean ± std")
    assert [row[:4] for row in table.rows if row[0] == "nc1"] == [
        ("nc1", "levels/depth1", "0.9 ± 0.1", "0.3 ± 0.1"),
        ("nc1", "levels/depth2", "1.2 ± 0.1", "0.6 ± 0.1"),
    ]
    assert "0 = collapsed" in table.caption
    assert "n: pretrain seeds, with the interval of the last checkpoint" in table.caption
    in_notebook = report_html(replace(report(), tables=()))
    assert f"<h5>{table.title}</h5>" in in_notebook
    assert "no result yet" not in in_notebook


def test_only_rates_of_measures_are_printed_in_percent() -> None:
    """Whatever a measure of another package called an error was."""
    structure = report().analyses[0]
    named = [
        replace(row, metric={"nc1": "mine_error_rank", "clp_accuracy": "mine_accuracy"}[row.metric])
        for row in structure.rows
    ]
    printed = {}
    for factor in (1, 100):
        rows = tuple(replace(row, summary=replace(row.summary, mean=factor * row.summary.mean)) for row in named)
        table = next(analysis_tables(replace(structure, rows=rows)))
        printed[factor] = {row[0]: row[3].partition(" ")[0] for row in table.rows}, "percent" in table.caption
    assert printed == {
        1: ({"mine_error_rank": "0.6", "mine_accuracy": "99.00"}, True),  # 1.2 after the first epoch
        100: ({"mine_error_rank": "60", "mine_accuracy": "99"}, False),
    }


def test_rows_are_means_over_seeds_with_an_interval_by_label_space_and_checkpoint() -> None:
    structure = report().analyses[0]
    rows = {(row.label_space, row.checkpoint, row.metric): row for row in structure.rows}
    assert len(rows) == len(structure.rows) == 2 * 2 * 2
    found = rows["levels/depth2", "epoch2", "nc1"]
    assert found.summary.mean == pytest.approx(0.6)
    assert found.summary.num_values == found.num_expected == 3
    assert found.summary.low is not None
    assert found.summary.low < 0.6
    accuracy = rows["levels/depth1", "epoch1", "clp_accuracy"].summary
    assert accuracy.high == 1.0  # Student's interval would end above
    low = rows["levels/depth1", "epoch2", "nc1"].summary.low
    assert low is not None
    assert low > 0
    scattered = report(of_last={"levels/depth1/seed0": 4.0})
    (found,) = (row for row in scattered.analyses[0].rows if (row.metric, row.checkpoint, row.label_space) == NC1_LAST)
    assert found.summary.low == 0.0  # and below, though scatter is never negative


def test_chance_of_clusters_is_explained_and_absent_from_older_results() -> None:
    found = committed()
    for name, one in found.items():
        if "clp_accuracy" in one.metrics and "seed0" not in name:
            found[name] = replace(one, metrics={**one.metrics, "clp_chance_accuracy": 0.25})
    table = next(analysis_tables(compute_report(plan(), found).analyses[0]))
    rows = [row for row in table.rows if row[0] == "clp_chance_accuracy"]
    assert [row[3] for row in rows] == ["25.00 ± 0.00"] * 2
    assert {row[-1] for row in rows} == {"2/3 runs"}
    assert "clp_chance: the same with predictions permuted" in table.caption


def test_rows_say_which_runs_are_missing() -> None:
    found = report(lacking="analyze/structure/levels/depth1/seed2/epoch1")
    row = next(
        row for row in found.analyses[0].rows if (row.label_space, row.checkpoint) == ("levels/depth1", "epoch1")
    )
    assert (row.summary.num_values, row.num_expected) == (2, 3)
    assert "analyze/structure/levels/depth1/seed2/epoch1" in found.missing
    table = next(analysis_tables(found.analyses[0]))
    assert {row[1]: row[-1] for row in table.rows} == {"levels/depth1": "2/3, 3/3 runs", "levels/depth2": "3"}


def test_correlation_is_over_backbones_at_the_checkpoint_that_the_transfer_measured() -> None:
    found = {one.metric: one for one in report().analyses[0].correlations}
    assert found["nc1"].num_backbones == 6  # final weights alone, which the analysis calls epoch2
    errors = [0.1, 0.11, 0.12, 0.15, 0.16, 0.17]
    assert found["nc1"].coefficient == pytest.approx(spearmanr([0.2, 0.3, 0.4, 0.5, 0.6, 0.7], errors).statistic)
    assert any("exploratory" in table.caption for table in analysis_tables(report().analyses[0]))


FACTORS = """\
version: 1
name: factors
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*"]
  factors: {speed: {slow: {recipe: {lr: 1e-4}}, fast: {recipe: {lr: 1e-3}}}}
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
transfer: [{name: top, target: levels/depth1, protocol: probe, recipe: cached-probe}]
analyze:
  - {name: structure, measures: [collapse]}
  - {name: seeds, between: [seeds], measures: [cka]}
"""


def test_correlations_of_a_sweep_with_factors_are_over_all_cells_and_within_each() -> None:
    factors = build_plan(parse_sweep(FACTORS, "s.yaml", shipped_recipes()), store_uri="file:///store")
    found = {}
    for number, job in enumerate(sorted(factors.jobs, key=lambda job: (str(job.facets.get("pretrain")), job.name))):
        if job.kind is JobKind.PROBE:
            found[job.name] = Committed(metrics={"val_error": 0.01 * number})
        elif job.facets.get("analysis") == "structure":
            found[job.name] = Committed(metrics={"nc1": float(number)})
        elif job.facets.get("analysis") == "seeds":
            found[job.name] = Committed(metrics={"cka_mean": 0.5}, pictures={"cka": {"values": [[1, 0.5], [0.5, 1]]}})
    analyses = compute_report(factors, found).analyses
    by_block = {one.pretrain: one for one in analyses[0].correlations}
    assert {block: one.num_backbones for block, one in by_block.items()} == {"": 8, "speed-slow": 4, "speed-fast": 4}
    assert by_block["speed-slow"].coefficient == pytest.approx(1)
    assert any("all" in line for table in analysis_tables(analyses[0]) for line in table.rows)
    assert not analyses[1].correlations  # of backbones compared with each other, none has an error of its own


def test_errors_of_searched_backbones_are_not_correlated_with_what_was_found_in_others() -> None:
    """Both have the same label spaces and seeds, and are different networks."""
    search = "search: {over: pretrain, random: {}, space: {lr: [1e-3, 1e-2]}}"
    searched = f"  - {{name: searched, target: levels/depth1, protocol: probe, recipe: cached-probe, {search}}}\n"
    head, rest = SWEEP.partition("transfer: ")[0], SWEEP[SWEEP.index("analyze:") :]
    plain = "  - {name: top, target: levels/depth1, protocol: probe, recipe: cached-probe}\n"
    for others, correlated in (("", set()), (plain, {"top"})):
        text = f"{head}transfer:\n{searched}{others}{rest}"
        both = build_plan(parse_sweep(text, "s.yaml", shipped_recipes()), store_uri="file:///store")
        found = {}
        for number, job in enumerate(both.jobs):
            if job.kind is JobKind.PROBE:
                found[job.name] = Committed(metrics={"val_error": 0.001 * number})
            elif job.facets.get("analysis") == "structure":
                found[job.name] = Committed(metrics={"nc1": float(number)})
        (structure,) = compute_report(both, found).analyses
        assert {one.transfer for one in structure.correlations} == correlated


def test_spearman_takes_ties_at_their_mean_rank() -> None:
    first, second = [1.0, 2.0, 2.0, 5.0, 0.0], [3.0, 1.0, 4.0, 4.0, 4.0]
    assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None
    two = [0.0, 0.0, 1.0]
    assert spearman([1.0, 2.0, 3.0], two) == spearman(two, [1.0, 2.0, 3.0]) == pytest.approx(0.75**0.5)


def test_matrices_are_means_over_seeds_and_named_by_what_differs() -> None:
    structure, similarity = report().analyses
    distances = [picture for picture in structure.pictures if picture.kind == "distances"]
    assert len(distances) == 4
    assert distances[0].values[0][0] == pytest.approx(2.0)
    assert distances[0].num_seeds == 3
    (matrix,) = similarity.pictures
    assert matrix.names == ("levels/depth1", "levels/depth2")
    assert list(matrix.values[0]) == pytest.approx([1.0, 0.5])


def test_activity_by_layer_is_a_line_for_each_label_space_and_a_table() -> None:
    structure = report().analyses[0]
    first, last = (picture for picture in structure.pictures if picture.kind == "layers")
    assert (first.title, last.title) == ("epoch1", "epoch2")
    assert first.lines == ("levels/depth1", "levels/depth2")
    assert first.num_seeds == 3
    assert first.values[0] == pytest.approx((0.5, 0.1))
    assert first.values[1] == pytest.approx((0.5, 0.3))
    table = next(table for table in analysis_tables(structure) if "active units by layer" in table.title)
    assert table.rows[1] == ("2", "<act2>", "10.0", "30.0")
    html = analyses_html(report())
    (figure,) = re.findall(r"<svg[^>]*per layer[^>]*epoch1.*?</svg>", html, flags=re.DOTALL)
    assert figure.count("<polyline") == 2
    assert figure.count("<circle") == 4


def test_page_has_figures_that_are_whole_and_escape_names() -> None:
    html = analyses_html(report())
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    labels = [ET.fromstring(figure).attrib["aria-label"] for figure in figures]  # noqa: S314 - ours
    assert "nc1 over epochs" in labels
    assert any(label.startswith("squared class distances") for label in labels)
    assert any(label.startswith("debiased CKA") for label in labels)
    assert any("original class" in label for label in labels)
    assert "<b>" not in html
    assert html.encode() in render_page(report(), plan(), Learning(curves={}))


def test_collapse_over_several_orders_of_magnitude_is_drawn_on_a_logarithmic_axis() -> None:
    assert "nc1 over epochs, logarithmic" not in analyses_html(report())
    assert "bars: ± standard deviation over pretraining seeds" in analyses_html(report())
    collapsed = {f"levels/depth1/seed{seed}": 1e-4 for seed in (0, 1, 2)}
    html = analyses_html(report(of_last=collapsed))
    (figure,) = re.findall(r"<svg[^>]*nc1 over epochs, logarithmic.*?</svg>", html, flags=re.DOTALL)
    assert {"0.0001", "0.01", "1"} <= set(re.findall(r">([\d.e-]+)</text>", figure))
    ends = [float(y) for y in re.findall(r'<circle [^>]*cy="([\d.]+)"', figure)]
    assert max(ends) == pytest.approx(220, abs=0.1)  # on the axis, which begins at the power of ten below


def picture(kind: str, num: int, **fields: Any) -> AnalysisPicture:
    names = tuple(f"class{number}" for number in range(num))
    values = tuple(tuple(float(abs(row - column)) for column in range(num)) for row in range(num))
    return AnalysisPicture(kind=kind, title="t", names=names, num_seeds=1, **{"values": values, **fields})


def figures(*pictures: AnalysisPicture) -> list[str]:
    analysis = AnalysisReport(name="a", rows=(), correlations=(), pictures=pictures)
    return [figure.svg() for figure in analysis_figures(analysis)]


def test_matrices_of_many_classes_are_drawn_by_shades_in_a_few_bytes_for_each_cell() -> None:
    few, many = figures(picture("distances", 10), picture("distances", 100))
    assert few.count("<title>") == 100
    assert "class1, class3: 2" in few
    assert "<title>" not in many
    assert len(many) < 20 * 100 * 100
    # All cells, and each once.
    runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", many)
    drawn = {(int(row), int(column) + step) for column, row, length, _ in runs for step in range(int(length))}
    assert len(drawn) == sum(int(length) for _, _, length, _ in runs) == 100 * 100 - 100  # the diagonal is white


def test_small_matrices_of_similarity_have_their_values_in_the_cells() -> None:
    values = ((1.0, 0.25), (0.25, 1.0))
    (figure,) = figures(picture("cka", 2, values=values))
    assert figure.count(">0.25</text>") == 2


def test_pictures_of_samples_name_few_classes_and_leave_out_the_same_classes_by_other_numbers() -> None:
    same = ((0.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 0.0))
    (figure,) = figures(picture("embedding", 2, values=same, trained_names=("b", "a")))
    assert ">class1</text>" in figure
    coarse = ((0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (2.0, 1.0, 2.0, 1.0))
    fine, trained = figures(picture("embedding", 3, values=coarse, trained_names=("b", "a")))
    assert ">class2</text>" in fine
    assert ">a</text>" in trained
    many = tuple((float(number), 0.0, float(number), float(number % 2)) for number in range(20))
    fine, _ = figures(picture("embedding", 20, values=many, trained_names=("b", "a")))
    assert fine.count("<text") == 1
    hues = [int(found) for found in re.findall(r"hsl\((\d+) ", fine)]
    assert max(hues[0::2]) < min(hues[1::2])  # those of one trained class beside each other


def test_files_of_a_report_hold_the_analyses() -> None:
    files = render_files(report())
    lines = files["analyses.csv"].decode().splitlines()
    assert lines[0].startswith("analysis,pretrain,label_space,checkpoint,metric")
    assert len(lines) == 1 + 8 + 1
    assert "analysis structure" in files["report.md"].decode()
    drawn = ET.fromstring(files["analyses.svg"])  # noqa: S314 - ours
    assert len(drawn.findall("{*}svg")) == analyses_html(report()).count("<svg")
    assert len(json.loads(files["report.json"])["analyses"]) == 2
    assert len(report().to_json()["analyses"]) == 2


def test_report_of_a_sweep_without_analyses_knows_nothing_of_them() -> None:
    found = compute_report(plan(analyses=False), {})
    files = render_files(found)
    assert "analyses.csv" not in files
    assert b"analyses" not in files["report.json"]
    assert "analyses" not in found.to_json()
    page = render_page(found, plan(analyses=False), Learning(curves={}))
    assert b"analyses-section" not in page
    assert b"@@ANALYSES@@" not in page
