"""The pooled two-way analysis against scipy, statsmodels and the published tables of Dunnett's t."""

from itertools import combinations

import numpy as np
import pytest
import statsmodels.formula.api as smf  # type: ignore[import-untyped]
from pandas import DataFrame
from scipy import stats

from orchestrator.report.statistics.corrections import (
    complete,
    p_all_pairs,
    p_equal_variances,
    p_many_to_one,
    residuals,
    two_way,
)
from orchestrator.report.statistics.summaries import SeedPair
from tests.null_sweeps import TABLE_5, Scenario, established, pooled_established

T = [0.2, 1.0, 2.0, 3.0, 4.5, 7.0]

# Dunnett: New Tables for Multiple Comparisons with a Control, Biometrics 20 (1964), two-sided 5 % points for 1 to 9
# treatments beside the control, printed with two decimals.
DUNNETT = {
    5: (2.57, 3.03, 3.29, 3.48, 3.62, 3.73, 3.82, 3.90, 3.97),
    10: (2.23, 2.57, 2.76, 2.89, 2.99, 3.07, 3.14, 3.19, 3.24),
    20: (2.09, 2.38, 2.54, 2.65, 2.73, 2.80, 2.86, 2.90, 2.95),
    60: (2.00, 2.27, 2.41, 2.51, 2.58, 2.64, 2.69, 2.73, 2.77),
}


@pytest.mark.parametrize("freedom", DUNNETT)
def test_many_to_one_has_the_published_points_of_dunnett(freedom):
    for num_others, point in enumerate(DUNNETT[freedom], start=1):
        below, above = p_many_to_one([point + 0.0055, point - 0.0055], num_others, freedom)
        assert below <= 0.05 <= above


def test_many_to_one_of_unblocked_data_is_scipys_dunnett():
    random = np.random.default_rng(0)
    control, groups = random.normal(0, 1, 6), [random.normal(shift, 1, 6) for shift in (0.0, 0.8, 1.6, 2.4)]
    expected = stats.dunnett(*groups, control=control, rng=np.random.default_rng(0))
    everything = [control, *groups]
    variance = np.mean([np.var(group, ddof=1) for group in everything])
    t = [(np.mean(group) - np.mean(control)) / np.sqrt(variance * 2 / 6) for group in groups]
    assert t == pytest.approx(list(expected.statistic))
    assert list(p_many_to_one(t, 4, 25)) == pytest.approx(list(expected.pvalue), abs=1e-3)


@pytest.mark.parametrize(("num_spaces", "freedom"), [(2, 1), (3, 1), (3, 2), (5, 4), (7, 60), (34, 33), (34, 300)])
def test_all_pairs_is_scipys_studentized_range(num_spaces, freedom):
    expected = stats.studentized_range.sf(np.sqrt(2) * np.array(T), num_spaces, freedom)
    assert p_all_pairs(T, num_spaces, freedom) == pytest.approx(expected, abs=1e-4)


def test_one_comparison_is_students_t():
    expected = 2 * stats.t.sf(T, 7)
    assert p_many_to_one(T, 1, 7) == pytest.approx(expected, abs=1e-4)
    assert p_all_pairs(T, 2, 7) == pytest.approx(expected, abs=1e-4)


def _means(num_seeds=4, num_spaces=5):
    random = np.random.default_rng(3)
    shape = (num_seeds, num_spaces)
    return random.normal(0, 3, (num_seeds, 1)) + random.normal(0, 0.5, shape) + 0.4 * np.arange(num_spaces)


def test_fit_is_the_two_way_model_of_statsmodels_with_fixed_and_with_random_seeds():
    means = _means()
    table = DataFrame(
        [(seed, f"s{space}", means[seed, space]) for seed in range(4) for space in range(5)],
        columns=["seed", "space", "y"],
    )
    fixed = smf.ols("y ~ C(space) + C(seed)", table).fit()
    mixed = smf.mixedlm("y ~ C(space)", table, groups="seed").fit(reml=True)
    found = two_way(means)
    assert found is not None
    assert (found.degrees_of_freedom, found.num_label_spaces, found.num_pretrain_seeds) == (fixed.df_resid, 5, 4)
    assert found.residual_std == pytest.approx(np.sqrt(fixed.mse_resid))
    assert found.std_error == pytest.approx(fixed.bse["C(space)[T.s1]"])
    assert found.std_error == pytest.approx(mixed.bse["C(space)[T.s1]"], rel=1e-3)


def _runs(means, transfers=(0,)):
    return {SeedPair(pretrain=seed, transfer=k): float(value) for seed, value in enumerate(means) for k in transfers}


def test_label_spaces_without_all_runs_are_not_in_the_analysis():
    means = _means()
    values = [_runs(means[:, space], (0, 1)) for space in range(5)]
    del values[2][SeedPair(pretrain=3, transfer=1)]
    chosen, found = complete(values)
    assert chosen == [0, 1, 3, 4]
    assert found == pytest.approx(means[:, chosen])


def test_seeds_with_unequal_numbers_of_transfers_have_no_common_variance():
    values = [{**_runs([0.1, 0.2]), SeedPair(pretrain=0, transfer=1): 0.3} for _ in range(3)]
    assert complete(values)[0] == []


@pytest.mark.parametrize("means", [np.ones((1, 3)), np.ones((3, 1)), np.full((3, 4), 0.2), np.empty((2, 0))])
def test_fit_of_too_little_or_without_spread_is_none(means):
    assert two_way(means) is None


@pytest.mark.parametrize(("num_seeds", "num_spaces"), [(2, 5), (5, 7)])
def test_check_of_equal_variances_errs_as_often_as_it_says(num_seeds, num_spaces):
    random = np.random.default_rng(7)
    shares = residuals(random.normal(0, 2, (num_seeds, num_spaces, 20_000)))[1]
    assert np.mean(p_equal_variances(shares, num_seeds, num_spaces) < 0.05) == pytest.approx(0.05, abs=0.012)


def test_check_finds_one_noisy_label_space():
    means = _means(5, 7)
    means[:, 3] += [9.0, -7.0, 3.0, -8.0, 5.0]
    found = two_way(means)
    assert found is not None
    assert found.is_contradicted


def test_pooled_analysis_finds_the_effects_of_table_5_with_two_seeds_and_paired_tests_do_not():
    """The paper's own design, with equal variances: what pooling buys, and what it assumes."""
    scenario = Scenario(num_seeds=2, stds=(0.05,) * 34, effects=tuple(mean for mean, _ in TABLE_5))
    means = scenario.draw(np.random.default_rng(0), 200)
    best = list(combinations(range(34), 2)).index((0, 4))  # the baseline and 1,103 classes
    assert np.mean(pooled_established(means, is_checked=False)[best]) > 0.95
    assert np.mean(established(means)[best]) < 0.05
