"""Statistics of reports against scipy and statsmodels, and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM  # type: ignore[import-untyped]
from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]

from orchestrator.report.bootstrap import probabilities_best
from orchestrator.report.corrections import benjamini_hochberg, holm
from orchestrator.report.intervals import estimate_arrays
from orchestrator.report.statistics import SeedPair, paired_difference, summarize_runs
from orchestrator.report.variance import variance_components

GROUPS = [[0.071, 0.075, 0.068], [0.080, 0.083, 0.079], [0.066, 0.065, 0.071], [0.075, 0.078, 0.074]]
UNBALANCED = [[0.071, 0.075, 0.068], [0.080], [0.066, 0.065], [0.075, 0.078, 0.074, 0.079]]
P_VALUES = [0.01, 0.04, 0.03, 0.005, 0.9, 0.03]


def _runs(groups):
    return {
        SeedPair(pretrain=pretrain, transfer=transfer): value
        for pretrain, group in enumerate(groups)
        for transfer, value in enumerate(group)
    }


def test_interval_of_the_mean_is_scipys_over_the_pretrain_seeds():
    summary = summarize_runs(_runs(GROUPS))
    means = [float(np.mean(group)) for group in GROUPS]
    low, high = stats.t.interval(0.95, len(means) - 1, loc=np.mean(means), scale=stats.sem(means))
    assert (summary.low, summary.high) == pytest.approx((low, high))
    assert summary.std == pytest.approx(np.std(np.concatenate(GROUPS), ddof=1))
    assert (summary.num_values, summary.num_pretrain_seeds) == (12, 4)


@pytest.mark.parametrize("groups", [[[0.1]], [[0.1, 0.2, 0.3]], [[0.1], [0.1], [0.1]]])
def test_interval_of_one_pretrain_seed_or_without_spread_is_not_invented(groups):
    summary = summarize_runs(_runs(groups))
    assert (summary.low, summary.high) == (None, None)


def test_summary_of_one_run_has_neither_std_nor_components():
    summary = summarize_runs(_runs([[0.1]]))
    assert (summary.num_values, summary.std) == (1, None)
    assert summary.components is not None
    assert (summary.components.pretrain_std, summary.components.transfer_std) == (None, None)


def test_variance_components_of_balanced_runs_are_those_of_reml():
    values, labels = np.concatenate(GROUPS), np.repeat(np.arange(4), 3)
    fitted = MixedLM(1000 * values, np.ones((12, 1)), groups=labels).fit(reml=True)  # scaled: its optimiser likes 1
    found = variance_components(GROUPS)
    assert found.is_balanced
    assert found.pretrain_std == pytest.approx(math.sqrt(fitted.cov_re[0, 0]) / 1000, rel=1e-3)
    assert found.transfer_std == pytest.approx(math.sqrt(fitted.scale) / 1000, rel=1e-3)


def test_variance_components_of_unbalanced_runs_are_unbiased():
    """Over many draws of an unbalanced design; the estimator may be negative in a draw, so the truth is made large."""
    random, sizes = np.random.default_rng(0), (1, 2, 3, 6)
    pretrain, transfer = [], []
    for _ in range(2000):
        effects = random.normal(0.0, 3.0, size=len(sizes))
        found = variance_components(
            [list(effect + random.normal(0.0, 0.5, size=size)) for effect, size in zip(effects, sizes, strict=True)]
        )
        assert found.pretrain_std is not None
        assert found.transfer_std is not None
        pretrain.append(found.pretrain_std**2)
        transfer.append(found.transfer_std**2)
    assert np.mean(pretrain) == pytest.approx(9.0, abs=4 * float(np.std(pretrain)) / math.sqrt(2000))
    assert np.mean(transfer) == pytest.approx(0.25, abs=4 * float(np.std(transfer)) / math.sqrt(2000))
    assert not variance_components(UNBALANCED).is_balanced


def test_variance_components_of_backbones_alike_are_zero_between_pretrain_seeds():
    found = variance_components([[0.1, 0.2], [0.2, 0.1], [0.1, 0.2]])
    assert found.pretrain_std == 0
    assert found.transfer_std == pytest.approx(np.std([0.1, 0.2], ddof=1))


def test_paired_difference_p_value_is_scipys():
    values, baseline = _runs([[0.070], [0.081], [0.066]]), _runs([[0.072], [0.088], [0.067]])
    found = paired_difference(values, baseline)
    assert found is not None
    expected = stats.ttest_rel(list(values.values()), list(baseline.values()))
    assert found.p_value == pytest.approx(expected.pvalue)


def test_paired_difference_without_spread_claims_no_certainty():
    found = paired_difference(_runs([[0.1], [0.2]]), _runs([[0.3], [0.4]]))
    assert found is not None
    assert found.mean == pytest.approx(-0.2)
    assert (found.low, found.high, found.p_value) == (None, None, None)


def test_holm_and_benjamini_hochberg_are_those_of_statsmodels():
    assert holm(P_VALUES) == pytest.approx(multipletests(P_VALUES, method="holm")[1])
    assert benjamini_hochberg(P_VALUES) == pytest.approx(multipletests(P_VALUES, method="fdr_bh")[1])
    assert holm([]) == benjamini_hochberg([]) == []


@pytest.mark.parametrize(("num_pretrain", "num_transfer"), [(2, 3), (3, 1), (5, 3)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["transfers vary", "both vary", "backbones vary"])
def test_interval_of_nested_runs_covers_the_truth_as_often_as_it_says(num_pretrain, num_transfer, share):
    """20,000 sweeps at once, a column each: 95 % within 93-97 %, whichever seed makes the spread."""
    columns, random = 20_000, np.random.default_rng(num_pretrain)
    backbones = random.normal(0.0, math.sqrt(share), size=(num_pretrain, 1, columns))
    runs = backbones + random.normal(0.0, math.sqrt(1 - share), size=(num_pretrain, num_transfer, columns))
    groups = [seed for seed in range(num_pretrain) for _ in range(num_transfer)]
    found = estimate_arrays(runs.reshape(-1, columns) + 5.0, groups)
    assert 0.93 <= np.mean((found.low <= 5.0) & (found.high >= 5.0)) <= 0.97


def test_interval_of_an_incomplete_sweep_covers_the_truth_nearly_as_often():
    columns, random = 20_000, np.random.default_rng(1)
    runs = random.normal(0, 1, (4, 1, columns)) + random.normal(0, 1, (4, 3, columns))
    runs = runs.reshape(-1, columns)
    runs[[1, 2, 5, 10]] = np.nan  # what is still missing
    found = estimate_arrays(runs, [seed for seed in range(4) for _ in range(3)])
    assert 0.93 <= np.mean((found.low <= 0) & (found.high >= 0)) <= 0.97


def test_interval_that_ignored_the_nesting_would_not_cover():
    """Why transfers of one backbone are one observation: taken for six, two backbones seem far too certain."""
    columns, random = 20_000, np.random.default_rng(2)
    runs = random.normal(0, 1, (2, 1, columns)) + random.normal(0, 0.3, (2, 3, columns))
    naive = estimate_arrays(runs.reshape(-1, columns), range(6))
    assert np.mean((naive.low <= 0) & (naive.high >= 0)) < 0.8


def test_p_values_without_a_difference_are_uniform():
    columns, random = 20_000, np.random.default_rng(3)
    found = estimate_arrays(random.normal(0, 1, (9, columns)), [seed for seed in range(3) for _ in range(3)])
    assert np.mean(found.p_value < 0.05) == pytest.approx(0.05, abs=0.006)
    assert stats.kstest(found.p_value, "uniform").pvalue > 1e-3


def test_holm_bounds_the_chance_of_any_false_finding():
    """Ten levels against one baseline, none of them different."""
    sweeps, random = 4000, np.random.default_rng(4)
    runs = random.normal(0, 1, (4, 11, sweeps))
    differences = (runs[:, 1:] - runs[:, :1]).reshape(4, -1)
    p_values = estimate_arrays(differences, range(4)).p_value.reshape(10, sweeps)
    false = np.mean([min(holm(list(family))) < 0.05 for family in p_values.T])
    uncorrected = np.mean(p_values.min(axis=0) < 0.05)
    assert false <= 0.06
    assert uncorrected > 0.15


def test_bootstrap_clear_winner_is_certain_and_twins_share():
    clear = [_runs([[0.1, 0.12], [0.11, 0.13]]), _runs([[0.3, 0.32], [0.31, 0.33]])]
    assert probabilities_best(clear) == [1.0, 0.0]
    twin = _runs([[0.1, 0.12], [0.11, 0.13]])
    assert probabilities_best([twin, dict(twin), clear[1]]) == [0.5, 0.5, 0.0]


def test_bootstrap_is_the_exact_share_of_all_resamples():
    """Two backbones with one transfer each: (0,0), (0,1), (1,0), (1,1) are equally likely."""
    first, second = _runs([[0.10], [0.30]]), _runs([[0.15], [0.20]])
    # Means of the first in these draws: 0.10, 0.20, 0.20, 0.30; of the second 0.15, 0.175, 0.175, 0.20.
    found = probabilities_best([first, second])
    assert found is not None
    assert found[0] == pytest.approx(0.25, abs=0.02)
    assert sum(found) == pytest.approx(1.0)


def test_bootstrap_is_paired_over_label_spaces():
    """Seeds move both label spaces together: the one that is better in every seed always wins."""
    better, worse = _runs([[0.10], [0.40], [0.70]]), _runs([[0.11], [0.41], [0.71]])
    assert probabilities_best([better, worse]) == [1.0, 0.0]


def test_bootstrap_resamples_transfer_seeds_within_one_backbone():
    found = probabilities_best([_runs([[0.1, 0.3]]), _runs([[0.2, 0.2]])])
    assert found is not None
    # Of the pairs drawn, (0.1, 0.1) wins, a mixed one ties, (0.3, 0.3) loses: 1/4 + half of 1/2.
    assert found[0] == pytest.approx(0.5, abs=0.02)
    assert min(found) > 0


def _simulated_sweep(random, num_pretrain, truth):
    """Three transfers per backbone; pretrain seeds move all label spaces together and each one by itself."""
    shape = (num_pretrain, 3, len(truth))
    shared, own = random.normal(0, 1, (num_pretrain, 1, 1)), random.normal(0, 0.7, (num_pretrain, 1, len(truth)))
    return truth + shared + own + random.normal(0, 0.7, shape)


@pytest.mark.parametrize(("num_pretrain", "at_least"), [(2, 0.75), (5, 0.88), (10, 0.93)])
def test_bootstrap_that_is_sure_of_a_level_is_mostly_right(num_pretrain, at_least):
    """Five label spaces that differ about as much as seeds do: how often is the sure choice the truth?"""
    random, right = np.random.default_rng(num_pretrain), []
    for _ in range(300):
        truth = random.normal(0, 1, 5)
        runs = _simulated_sweep(random, num_pretrain, truth)
        spaces = [_runs(runs[:, :, space].tolist()) for space in range(5)]
        found = probabilities_best(spaces, num_resamples=300)
        assert found is not None
        if max(found) >= 0.95:
            right.append(int(np.argmax(found)) == int(np.argmin(truth)))
    assert len(right) > 60
    assert np.mean(right) >= at_least


def test_bootstrap_of_a_single_pair_of_seeds_says_nothing():
    assert probabilities_best([_runs([[0.1]]), _runs([[0.2]])]) is None


def test_bootstrap_of_equal_input_is_equal():
    runs = [_runs(GROUPS), _runs([[value + 0.001 for value in group[::-1]] for group in GROUPS])]
    assert probabilities_best(runs) == probabilities_best(runs)
    assert probabilities_best(runs, seed=1) != probabilities_best(runs)


def test_bootstrap_candidate_with_missing_runs_still_takes_part():
    lacking = {SeedPair(pretrain=0, transfer=0): 0.05}
    found = probabilities_best([lacking, _runs([[0.1], [0.1]])])
    assert found is not None
    # It cannot win where its only backbone is not drawn: a quarter of the resamples.
    assert found[0] == pytest.approx(0.75, abs=0.02)
