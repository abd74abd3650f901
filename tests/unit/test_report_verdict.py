"""What a report claims: from one corrected family, and not more often than it says."""

import csv
import io
import json
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from scipy import stats

from orchestrator.planning.estimate.power import Comparisons
from orchestrator.report.build import compute_report
from orchestrator.report.compare_sweeps import compare_sweeps
from orchestrator.report.comparisons import compared
from orchestrator.report.inputs import Learning
from orchestrator.report.render.answers import answers, headline, verdict
from orchestrator.report.render.columns import comparison_records, result_records, text_table
from orchestrator.report.render.curves import draw_curve
from orchestrator.report.render.files import render_csv, render_files
from orchestrator.report.render.numbers import TOO_FEW
from orchestrator.report.render.other_tables import pairs_table
from orchestrator.report.render.page import render_page
from orchestrator.report.results import FactorTable
from orchestrator.report.statistics.corrections import corrected, within
from orchestrator.report.statistics.intervals import MetricRange
from orchestrator.report.statistics.summaries import SeedPair, mean_in_common, paired_differences
from tests.null_sweeps import Scenario, established, lowest_can_be_best, pairs_of, variances_of_table_5
from tests.report_sweeps import StudyPlan, committed
from tests.report_sweeps import printed as _printed

SPACES = {"levels/depth1": 2, "levels/depth2": 8, "levels/depth3": 32, "levels/depth4": 128, "random/128": 128}
CLAIM = re.compile(r"at 95 %: |is the best at 95 %|the best at 95 % is among|pairs of label spaces differ")


def _report(means, *, transfers=(0,), metric="val_error", baseline="levels/depth1"):
    """Of values ``(seeds, label spaces)``, as rates."""
    plan = StudyPlan(
        spaces=dict(list(SPACES.items())[: means.shape[1]]),
        pretrain_seeds=range(means.shape[0]),
        transfer_seeds=transfers,
        metric=metric,
        baseline=baseline,
    ).plan()
    names = list(SPACES)

    def metrics(job):
        value = means[job.facets["pretrain_seed"], names.index(job.facets["label_space"])]
        return {metric: float(value)}

    return compute_report(plan, committed(plan, metrics))


def _sweeps(scenario, num_sweeps, seed=0):
    """As errors around 30 %, so that none is cut off at 0 or 1."""
    return 0.3 + 0.02 * scenario.draw(np.random.default_rng(seed), num_sweeps)


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("stds", [(1.0,) * 5, variances_of_table_5(5)], ids=["equal", "table 5"])
def test_null_sweeps_are_given_a_verdict_in_five_percent_at_most(num_seeds, stds):
    """5,000 sweeps each: 6 % are three standard errors above; ``benchmarks`` has 20,000 and more designs."""
    means = Scenario(num_seeds=num_seeds, stds=stds).draw(np.random.default_rng(num_seeds), 5000)
    found = established(means)
    assert np.mean(found.any(axis=0)) <= 0.06
    assert np.mean(lowest_can_be_best(means, found)) >= 0.94


def test_improvement_and_difference_are_of_the_same_runs():
    """The row lacks the seeds on which the baseline is bad: lower by its mean, higher in every pair."""
    means = np.array([[0.100, 0.105], [0.101, 0.106], [0.100, 0.1052], [0.2, np.nan], [0.2, np.nan]])
    report = _report(means)
    [table] = report.tables
    [row] = [row for row in table.rows if row.label_space != table.baseline]
    assert row.difference is not None
    assert row.improvement is not None
    assert row.summary.mean < table.baseline_row.summary.mean
    assert row.difference.is_established
    assert row.difference.mean > 0 > row.improvement
    assert row.improvement == pytest.approx(-row.difference.mean / np.mean(means[:3, 0]))
    told = " ".join(sentence for answer in answers(report) for sentence in answer.sentences)
    assert "lower than" not in told


def test_improvement_and_difference_agree_where_pretraining_seeds_have_other_numbers_of_transfers():
    """One transfer of the second seed is left to both rows: over runs the row is higher, over seeds it is lower."""
    values = {"levels/depth1": (0.1, 0.2), "levels/depth2": (0.11, 0.18)}
    plan = StudyPlan(
        spaces=dict.fromkeys(values, 2), pretrain_seeds=(0, 1), transfer_seeds=(0, 1, 2), baseline="levels/depth1"
    ).plan()

    def metrics(job):
        seed = job.facets["pretrain_seed"]
        is_lost = seed and job.facets.get("transfer_seed")
        return None if is_lost else {"val_error": values[job.facets["label_space"]][seed]}

    row = compute_report(plan, committed(plan, metrics)).tables[0].rows[1]
    assert row.summary is not None
    assert row.difference is not None
    assert row.summary.mean == pytest.approx(0.1275)
    assert row.difference.mean == pytest.approx(-0.005)
    assert row.improvement == pytest.approx(0.005 / 0.15)


def test_interval_of_independent_rows_is_possible_by_the_mean_of_all_runs_of_the_baseline():
    """It is wide, and from 50 % an error can be as far away as it says."""
    means = np.full((6, 2), np.nan)
    means[:3, 0], means[3:, 1] = (0.35, 0.5, 0.65), (0.36, 0.5, 0.64)
    [pair] = compared(_report(means).tables[0], MetricRange(low=0.0, high=1.0), lambda *_: False).comparisons
    assert pair.difference.family_low == pytest.approx(-0.33, abs=0.02)


def test_independent_rows_without_a_common_seed_are_compared_too():
    means = np.array([[0.1, np.nan], [0.11, np.nan], [0.105, np.nan], [np.nan, 0.2], [np.nan, 0.21]])
    [table] = _report(means).tables
    assert table.comparisons == ()
    [pair] = compared(table, is_paired=lambda *_: False).comparisons
    assert pair.difference.mean == pytest.approx(0.1)
    welch = stats.ttest_ind(means[3:, 1], means[:3, 0], equal_var=False)
    p_value = 2 * stats.t.sf(welch.statistic, min(welch.df, (2 - 1) * (1 + 2 / 3)))
    assert pair.difference.p_value == pytest.approx(p_value)


def test_independent_rows_that_are_not_tested_are_not_said_to_lack_common_seeds():
    means = np.array([[0.1, np.nan], [0.11, np.nan], [np.nan, 0.2]])
    table = compared(_report(means).tables[0], is_paired=lambda *_: False)
    each = "two pretrain seeds (independent samples: have two each)"
    assert verdict(table)[0].startswith(f"nothing is tested: no two label spaces share {each}, so the noise")


def test_notes_of_a_table_say_what_transfer_seeds_add_to_differences():
    random = np.random.default_rng(0)
    noise = 0.01 * random.normal(size=(4, 3, 2))

    def caption(shift, transfers):
        plan = StudyPlan(
            spaces=dict(list(SPACES.items())[:2]),
            pretrain_seeds=range(4),
            transfer_seeds=transfers,
            baseline="levels/depth1",
        ).plan()

        def metrics(job):
            i, j, k = (
                job.facets["pretrain_seed"],
                job.facets.get("transfer_seed", 0),
                [*SPACES].index(job.facets["label_space"]),
            )
            return {"val_error": float(0.3 + noise[i, j, k] + shift * k * j)}

        return text_table(compute_report(plan, committed(plan, metrics)).tables[0]).caption

    assert "all runs have one transfer seed: intervals do not cover" in caption(0.0, (0,))
    assert "transfer seed" not in caption(0.0, (0, 1, 2))
    assert re.search(
        r"differences depend on the transfer seed \(p = .*these 3 seeds; .* of 5\.\d\d points", caption(0.1, (0, 1, 2))
    )


def test_sentences_of_a_report_claim_what_the_family_establishes_and_nothing_else():
    """The simulated rates are those of reports: sweep by sweep the same pairs, with and without differences."""
    scenario = Scenario(num_seeds=4, stds=(1.0, 0.3, 2.0, 1.0, 0.5), effects=(0.0, 0.0, -3.0, 6.0, 0.0))
    means = _sweeps(scenario, 60)
    found, names = established(means), list(SPACES)
    assert 0 < found.sum() < found.size
    for sweep in range(means.shape[2]):
        table = _report(means[:, :, sweep]).tables[0]
        told = {frozenset((pair.first, pair.second)): pair.difference.is_established for pair in table.comparisons}
        for (first, second), is_found in zip(pairs_of(5), found[:, sweep], strict=True):
            assert told[frozenset((names[first], names[second]))] == is_found
        claims = [sentence for sentence in verdict(table)[:2] if CLAIM.search(sentence)]
        assert bool(claims) == found[:, sweep].any()


def _null_with_a_lucky_pair():
    """One uncorrected interval excludes 0 (p = 0.02), the family does not."""
    random = np.random.default_rng(5)
    for _ in range(1000):
        means = 0.3 + 0.02 * random.standard_normal((3, 5))
        row = _report(means).tables[0].ranked[0]
        if row.difference and row.difference.high is not None and row.difference.high < 0:
            return means
    raise AssertionError("no such sweep")


def test_interval_of_one_comparison_that_excludes_0_is_no_verdict():
    """In one null sweep of seven some single 95 % interval of 34 label spaces excludes 0."""
    report = _report(_null_with_a_lucky_pair())
    sentences = answers(report)[0].sentences
    assert "(not established, corrected p = " in sentences[0]
    assert any(
        s.startswith("no label space is established to differ from the baseline levels/depth1;") for s in sentences
    )
    assert "no label space can be excluded as the best at 95 %" in sentences
    assert "corrected for 10 comparisons" in " ".join(sentences)


def test_sentences_stars_table_page_and_files_say_the_same():
    scenario = Scenario(num_seeds=5, stds=(1.0,) * 5, effects=(0.0, -5.0, -9.0, -8.0, 1.0))
    report = _report(_sweeps(scenario, 1)[:, :, 0])
    table = report.tables[0]
    found = {(pair.first, pair.second) for pair in table.comparisons if pair.difference.is_established}
    assert 0 < len(found) < len(table.comparisons) == 10
    matrix = pairs_table(table)
    assert matrix is not None
    starred = {
        (row[0], name)
        for row in matrix.rows
        for name, cell in zip(matrix.header[1:], row[1:], strict=True)
        if "*" in cell
    }
    assert starred == found | {(second, first) for first, second in found}
    lines = csv.DictReader(io.StringIO(render_files(report)["comparisons.csv"].decode()))
    assert {(line["first"], line["second"]) for line in lines if float(line["p_family"]) < 0.05} == found
    with_baseline = {first for first, second in found if second == "levels/depth1"}
    sentence = next(s for s in answers(report)[0].sentences if s.startswith("lower than the baseline"))
    assert {name for name in SPACES if f" {name} " in sentence.partition("at 95 %")[2]} == with_baseline
    assert "10 comparisons" in _printed(report)
    assert "half of the error level for the 4 with the baseline" in matrix.caption
    page = render_page(report, StudyPlan(spaces=SPACES).plan(), Learning(curves={}, unreadable=())).decode()
    rows = list(SPACES)
    pairs = json.loads(re.findall(r'"pairs":(\[\[.*?\]\])', page)[0])
    told = {(rows[first], rows[second]) for first, second, _, is_established in pairs if is_established}
    assert told == found
    # What columns mean, with the level of the statistics filled in.
    assert "<dt>corrected 95 % CI, corrected p</dt>" in page
    assert "established below p = 0.05" in page


def test_shares_of_the_five_percent_sum_to_nine_tenths_of_which_the_baseline_has_at_least_half():
    for num_spaces in range(3, 40):
        with_baseline, others = num_spaces - 1, (num_spaces - 1) * (num_spaces - 2) // 2
        mine, theirs = Comparisons(num_with_baseline=with_baseline, num_others=others).shares
        assert with_baseline * mine + others * theirs == pytest.approx(0.9)
        assert with_baseline * mine >= 0.45 - 1e-9
        assert mine >= theirs - 1e-9
    assert Comparisons(num_with_baseline=0, num_others=10).shares == pytest.approx((0.09, 0.09))
    assert Comparisons(num_with_baseline=1, num_others=0).shares == (1.0, 1.0)


def _differences(*seeds):
    baseline = {SeedPair(pretrain=seed, transfer=0): 0.3 for seed in range(len(seeds))}
    values = {SeedPair(pretrain=seed, transfer=0): 0.3 + value for seed, value in enumerate(seeds)}
    return paired_differences([values], baseline)[0]


def test_single_comparison_needs_no_correction():
    found = _differences(-0.02, -0.03, -0.05)
    (one,) = corrected([found])
    assert one is not None
    assert one.p_family == one.p_value
    assert (one.family_low, one.family_high) == pytest.approx((one.low, one.high))


def test_interval_excludes_0_exactly_where_a_difference_is_established():
    found = [_differences(*(np.random.default_rng(seed).normal(-0.02, 0.01, 4))) for seed in range(40)]
    family = [one for one in corrected(found) if one is not None]
    assert len({one.is_established for one in family}) == 2
    for one in family:
        assert one.family_low is not None
        assert one.family_high is not None
        assert one.is_established == (one.family_high < 0 or one.family_low > 0)


@pytest.mark.parametrize("is_paired", [True, False], ids=["pairs", "independent"])
def test_intervals_of_files_follow_from_their_columns(is_paired):
    """Of comparisons and results; they lacked the degrees of freedom, and whether runs were subtracted."""
    report = _report(_sweeps(Scenario(num_seeds=4, stds=(1.0, 0.3, 2.0)), 1)[:, :, 0], transfers=(0, 1))
    report = replace(report, tables=(compared(report.tables[0], is_paired=lambda *_: is_paired),))
    names = ("confidence", "freedom", "std_error", "paired_difference", "ci_low", "ci_high")
    for records, num in ((comparison_records(report), 3), (result_records(report), 2)):
        lines = [line for line in csv.DictReader(io.StringIO(render_csv(records))) if line["std_error"]]
        assert len(lines) == num
        for line in lines:
            assert (line["is_paired"], line["num_pretrain_seeds"]) == (str(int(is_paired)), "4")
            confidence, freedom, error, mean, low, high = (float(line[name]) for name in names)
            assert freedom == 3 if is_paired else 3 < freedom < 6
            half = stats.t.ppf((1 + confidence) / 2, freedom) * error
            assert (low, high) == pytest.approx((mean - half, mean + half))


# ----------------------------------------------------------------------------------------- intervals that cannot be
def test_interval_that_an_error_cannot_have_says_too_few_seeds():
    """Two seeds: one degree of freedom, intervals of hundreds of points."""
    report = _report(np.array([[0.05, 0.02, 0.01], [0.08, 0.03, 0.07]]))
    cells = [row.difference for row in report.tables[0].rows if row.difference]
    assert [(found.family_low, found.family_high) for found in cells] == [(None, None)] * 2
    assert all(
        -1 <= found.low <= found.high <= 1 for found in cells if found.low is not None and found.high is not None
    )
    assert _printed(report).count(TOO_FEW) >= 2


def test_interval_of_a_mean_stays_in_what_a_rate_can_be():
    wide, near_zero = _report(np.array([[0.0, 0.001], [0.75, 0.002]])).tables[0].rows
    assert (wide.summary.low, wide.summary.high) == (0.0, 1.0)
    assert near_zero.summary.low == 0.0
    assert 0.002 < near_zero.summary.high < 0.01
    cells = text_table(_report(np.array([[0.0, 0.001], [0.75, 0.002]])).tables[0])
    column = cells.header.index("95 % CI of the mean [%]")
    assert [row[column] for row in cells.rows] == [TOO_FEW, "[0.00, 0.79]"]


def test_established_intervals_cover_the_true_difference_of_a_candidate_near_0():
    """400 sweeps: 0.95 minus three standard errors. How low a difference can reach is only estimated."""
    random, num_covered = np.random.default_rng(7), 0
    baseline_SN, candidate_SN = (
        mean + std * random.standard_normal((400, 3)) for mean, std in ((0.25, 0.02), (0.005, 0.001))
    )
    for baseline, candidate in zip(baseline_SN, candidate_SN, strict=True):
        rows = [{SeedPair(pretrain=n, transfer=0): v for n, v in enumerate(row)} for row in (baseline, candidate)]
        (whole,) = corrected(paired_differences(rows[1:], rows[0]))
        assert whole is not None
        found = within(whole, MetricRange(low=0.0, high=1.0), float(baseline.mean()))
        assert found.is_established
        assert found.family_low is not None
        assert found.family_high is not None
        num_covered += found.family_low <= 0.005 - 0.25 <= found.family_high
    assert num_covered / 400 >= 0.95 - 3 * 0.011


def _compared(first, second):
    """The one difference of the first cell of two reports, each with its plan."""
    reports, plans = zip(first, second, strict=True)
    (cells,) = compare_sweeps(reports, plans).places.values()
    return cells[0].differences[0]


def _partial(values_SL, **changes):
    """A report, and its plan, of values by (seed, label space); NaN = not committed."""
    num_seeds, num_spaces = values_SL.shape
    plan = StudyPlan(spaces=dict(list(SPACES.items())[:num_spaces]), pretrain_seeds=range(num_seeds), **changes).plan()

    def metrics(job):
        value = values_SL[job.facets["pretrain_seed"], list(SPACES).index(job.facets["label_space"])]
        return None if np.isnan(value) else {"val_error": float(value)}

    return compute_report(plan, committed(plan, metrics)), plan


PARTIAL = np.array([[0.6, 0.01], [0.602, 0.0], [0.598, 0.02], *[[0.05, np.nan]] * 6])
"""The baseline's mean over all of its seeds is far from that over the common ones."""


def test_interval_of_a_partial_sweep_holds_its_difference():
    found = _partial(PARTIAL)[0].tables[0].rows[1].difference
    assert found.is_established
    assert found.mean == pytest.approx(-0.59)
    assert found.family_low < found.mean < found.family_high


def test_compare_with_a_partial_sweep_has_intervals_that_hold_their_differences():
    first, second = (
        _partial(np.stack([row, row], axis=1), sweep=sweep)
        for row, sweep in zip(PARTIAL.T, ("first", "second"), strict=True)
    )
    found = _compared(first, second)
    assert found.is_established
    assert found.family_low < found.mean < found.family_high


def test_compare_does_not_bound_a_metric_whose_second_sweep_lies_outside():
    values = np.array([[0.1, 0.1], [0.4, 0.4]])
    first, second = (_partial(found, sweep=sweep) for found, sweep in ((values, "first"), (1.5 + 2 * values, "second")))
    assert _compared(first, second).high > 1


def test_narrow_interval_is_shown_however_small_the_errors_are():
    """A nearly saturated target with ten seeds: it reaches below an error of 0, and tells that little differs."""
    values = np.zeros((10, 2))
    values[:2, 0] = 0.02, 0.01
    found = _report(values).tables[0].rows[1].difference
    assert not found.is_established
    assert values[:, 0].mean() + found.family_low < 0
    assert found.family_high < 0.01
    assert TOO_FEW not in text_table(_report(values).tables[0]).rows[1]


@pytest.mark.parametrize("common", [(0, 1), (0, 1, 2)])
def test_mean_of_the_subtracted_row_is_over_common_pairs_by_pretrain_seed(common):
    baseline = {SeedPair(pretrain=0, transfer=0): 0.1, SeedPair(pretrain=0, transfer=1): 0.3}
    baseline |= {SeedPair(pretrain=1, transfer=0): 0.8, SeedPair(pretrain=2, transfer=0): 0.5}
    values = {pair: 0.0 for pair in baseline if pair.pretrain in common}
    assert mean_in_common(values, baseline) == pytest.approx({2: 0.5, 3: 0.5}[len(common)])
    assert np.isnan(mean_in_common({}, baseline))


def test_metric_that_is_no_rate_keeps_its_intervals():
    found = _report(np.array([[5.0, 2.0], [8.0, 3.0]]), metric="val_loss").tables[0].rows
    assert found[0].summary.low < 0
    assert found[1].difference.family_low < -10


# ------------------------------------------------------------------------------------------- ties, too few, saturated
def test_equal_label_spaces_have_no_best():
    report = _report(np.full((3, 5), 0.12))
    assert answers(report)[0].sentences[0] == "all 5 label spaces have val_error 12.00 %: nothing differs"
    assert not any("lowest" in sentence or "lower" in sentence for sentence in answers(report)[0].sentences)
    assert text_table(report.tables[0]).best is None
    assert b"lowest mean" not in render_files(report)["curve.svg"]


def test_saturated_target_is_called_so():
    first, *_ = answers(_report(np.zeros((3, 5))))[0].sentences
    assert (
        first
        == "all 5 label spaces have val_error 0.00 %: the target is saturated and shows no difference between them"
    )


@pytest.mark.parametrize(
    ("means", "claim"),
    [
        (
            [[0.05, 0.055], [0.0525, 0.0525], [0.055, 0.05]],
            "no label space is established to differ from the baseline levels/depth1; corrected for 1 comparison",
        ),
        ([[0.0525, 0.052504]], "nothing is tested: no two label spaces share two pretrain seeds"),
    ],
    ids=["over seeds", "one seed"],
)
def test_means_that_only_print_alike_are_tested_as_others(means, claim):
    report = _report(np.array(means))
    tie = "all 2 label spaces print the same mean val_error 5.25 %; none is called the best"
    first, second, *_ = answers(report)[0].sentences
    assert (first, second.startswith(claim)) == (tie, True)
    assert headline(report).partition(": ")[2].startswith(claim[0].upper() + claim[1:])
    assert text_table(report.tables[0]).best is None


def test_lowest_mean_that_others_share_names_them():
    values = np.full((3, 5), 0.2) + 0.001 * np.random.default_rng(0).standard_normal((3, 5))
    values[:, 1:3] = 0.0
    first, *_ = answers(_report(values))[0].sentences
    assert first.startswith("lowest mean: levels/depth2 (G = 8), val_error 0.00")
    assert first.endswith("; the same value: levels/depth3")


def _established_best(num_spaces):
    """The second label space is far lower than all others in five seeds."""
    scenario = Scenario(num_seeds=5, stds=(0.2,) * num_spaces, effects=(0.0, -4.0, *[0.0] * (num_spaces - 2)))
    return _sweeps(scenario, 1)[:, :, 0]


def test_lowest_mean_of_complete_rows_is_called_so_where_an_incomplete_one_is_lower():
    values = _established_best(5)
    values[0, 4], values[1:, 4] = np.nan, 0.01  # a kind of labels of its own, which lacks a seed
    values[0, 2], values[1:, 2] = np.nan, 0.02
    report = _report(values)
    lowest, other, *_ = answers(report)[0].sentences
    assert lowest.startswith("lowest mean among complete rows: levels/depth2")
    assert other.startswith("lowest of random: random/128")  # the only one of its kind
    assert "Lowest mean among complete rows: levels/depth2" in headline(report)
    (panel,) = draw_curve(report).axes
    told = panel.get_legend_handles_labels()[1]
    assert any(text.startswith("lowest mean among complete rows: levels/depth2") for text in told)


def _legend(report):
    (panel,) = draw_curve(report).axes
    return panel.get_legend_handles_labels()[1]


def test_curve_names_the_best_of_the_whole_table_also_where_it_has_no_number_of_classes():
    """The best of a search over labels was left out, and the figure ringed another row than the table."""
    report = _report(np.array([[0.2, 0.052, 0.05], [0.2, 0.05, 0.0452], [0.2, 0.054, 0.0473]]))
    (table,) = report.tables
    *others, best = table.rows
    found = replace(best, label_space="search:best", granularity=None)
    report = replace(report, tables=(replace(table, rows=(*others, found)),))
    assert "lowest mean: search:best, 4.75 %" in _legend(report)
    (panel,) = draw_curve(report).axes
    assert not [line for line in panel.lines if line.get_markersize() > 10]  # no ring
    passed = replace(found, summary=replace(found.summary, mean=0.0521))
    report = replace(report, tables=(replace(table, rows=(*others, passed)),))
    assert {"lowest mean: levels/depth2, 5.20 %", "search:best"} <= set(_legend(report))
    report = replace(report, tables=(replace(table, rows=(found,)),))
    assert [text.get_text() for text in draw_curve(report).axes[0].texts] == [
        "no row with a number of classes: see the table"
    ]


def test_curve_marks_rows_that_lack_runs_and_says_what_its_bars_are():
    values = _established_best(3)
    assert "pale: lacks runs" not in _legend(_report(values))
    values[0, 1:] = np.nan
    (table,) = _report(values).tables
    whole = {field.name: getattr(table, field.name) for field in fields(table)}
    combined = FactorTable(**whole, row_factors=("x",), row_values=tuple((row.label_space,) for row in table.rows))
    for found in (table, combined):
        assert _legend(replace(_report(values), tables=(found,))).count("pale: lacks runs") == 1
    told = "not a confidence interval"
    assert f"bars and band: ± standard deviation over all runs, {told}" in draw_curve(_report(values)).get_supxlabel()
    assert told not in draw_curve(_report(values[-1:])).get_supxlabel()  # a single run has no spread


def test_best_of_those_with_results_is_no_more_than_that_while_others_have_none():
    values = _established_best(4)
    values[:, 3] = np.nan
    assert (
        verdict(_report(values).tables[0])[1] == "levels/depth2 is the best of the 3 label spaces with results at 95 %"
    )
    assert verdict(_report(values[:, :3]).tables[0])[1] == "levels/depth2 is the best at 95 %"
    values[:, 2] = values[:, 1] + 1e-4 * np.arange(5)
    (_, best, *_) = verdict(_report(values).tables[0])
    assert best.startswith("the best at 95 % is among 2 of 3 label spaces with results: levels/depth2")


def test_one_seed_tests_nothing_and_says_so():
    sentences = answers(_report(np.array([[0.3, 0.1, 0.2]])))[0].sentences
    assert "(not tested)" in sentences[0]
    assert any(sentence.startswith("nothing is tested: no two label spaces share two") for sentence in sentences)


def test_baseline_that_shares_one_seed_is_said_to_be_untested_beside_the_pairs_of_the_others():
    means = np.full((4, 3), np.nan)
    means[0, 0] = 0.3
    means[:, 1], means[:, 2] = (0.2, 0.21, 0.205, 0.215), (0.1, 0.112, 0.1, 0.11)
    first, *others = verdict(_report(means).tables[0])
    assert first.startswith("no label space can be tested against the baseline levels/depth1, with fewer than two")
    assert first.endswith("; 1 of 1 pairs of label spaces differ at 95 %; corrected for 1 comparison")
    assert "0 of 0" not in " ".join(others)
    means[:, 2] = 0.215, 0.2, 0.21, 0.205
    told = verdict(_report(means).tables[0])[0]
    assert "; no two label spaces are established to differ; corrected for 1 comparison" in told


def test_label_spaces_that_cannot_be_tested_against_the_baseline_are_counted():
    means = np.array([[0.3, 0.301, 0.2], [0.31, 0.308, np.nan], [0.305, 0.306, np.nan]])
    first = verdict(_report(means).tables[0])[0]
    assert first.startswith("no label space that is tested is established to differ from the baseline levels/depth1;")
    assert "; 1 of 2 label spaces cannot be tested against the baseline levels/depth1, with fewer than two" in first
    means[:, 1] = 0.1, 0.111, 0.1055
    first = verdict(_report(means).tables[0])[0]
    assert first.startswith("lower than the baseline levels/depth1 at 95 %: levels/depth2 -")
    assert "; 1 of 2 label spaces cannot be tested against the baseline" in first


def test_many_combinations_that_are_not_tested_say_why():
    """They were said to share no two pretrain seeds, which they do: each is compared with the baseline alone."""
    table = _report(_sweeps(Scenario(num_seeds=2, stds=(1.0,) * 2), 1)[:, :, 0]).tables[0]
    rows = [replace(table.rows[number % 2], label_space=f"r{number}") for number in range(66)]
    start = "nothing is tested: more than 64 values are compared with the baseline only, and "
    of_one_seed = "nothing is tested: no value shares two pretrain seeds with the baseline r0, so the noise between "
    for first, baseline, said in (
        (rows[0], "", f"{start}there is none (report.baseline)"),
        (replace(rows[0], results=(), summary=None), "r0", f"{start}the baseline r0 has no result"),
        (replace(rows[0], results=rows[0].results[:1]), "r0", f"{of_one_seed}seeds is unknown"),
    ):
        whole = {field.name: getattr(table, field.name) for field in fields(table)}
        whole |= {"rows": (first, *rows[1:]), "baseline": baseline, "row_factors": ("x",), "row_values": ()}
        assert verdict(compared(FactorTable(**whole))) == (said,)


def test_differences_without_spread_are_not_tested():
    sentences = answers(_report(np.array([[0.5, 0.25, 0.125]] * 3)))[0].sentences
    assert any("every difference is the same for all seeds" in sentence for sentence in sentences)


def test_table_has_the_number_of_pretrain_seeds_beside_the_runs():
    table = text_table(
        _report(_sweeps(Scenario(num_seeds=2, stds=(1.0,) * 5), 1)[:, :, 0], transfers=(0, 1, 2)).tables[0]
    )
    place = table.header.index("n")
    assert table.header[place + 1] == "seeds"
    assert {row[place : place + 2] for row in table.rows} == {("6", "2")}


# ------------------------------------------------------------------------------------------------- the second analysis
def test_second_analysis_finds_with_two_seeds_and_names_its_assumption():
    effects = (0.0, -3.0, -6.0, -6.0, 0.0)
    report = _report(_sweeps(Scenario(num_seeds=2, stds=(0.3,) * 5, effects=effects), 1, seed=1)[:, :, 0])
    *_, second, _ = answers(report)[0].sentences
    head = "second analysis, valid only if all label spaces have the same variance over seeds (pooled two-way"
    assert second.startswith(head)
    assert "levels/depth3" in second.partition("would differ from the baseline")[2]
    assert "pooled p" in text_table(report.tables[0]).header
    assert report.tables[0].family.pooled.degrees_of_freedom == 4


def test_second_analysis_that_the_runs_contradict_is_left_out():
    report = _report(_sweeps(Scenario(num_seeds=5, stds=(0.1, 0.1, 0.1, 0.1, 5.0)), 1)[:, :, 0])
    assert any("left out: their variances over seeds differ" in s for s in answers(report)[0].sentences)
    assert {pair.difference.p_pooled for pair in report.tables[0].comparisons} == {None}
    assert "pooled p" not in text_table(report.tables[0]).header


def test_without_a_baseline_all_pairs_share_equally():
    scenario = Scenario(num_seeds=5, stds=(0.2,) * 5, effects=(0.0, -4.0, 0.0, 0.0, 0.0))
    report = _report(_sweeps(scenario, 1)[:, :, 0], baseline="")
    assert verdict(report.tables[0])[0].startswith("4 of 10 pairs of label spaces differ at 95 %; corrected for 10")
    assert verdict(report.tables[0])[1] == "levels/depth2 is the best at 95 %"
