"""Statistics of reports against scipy and statsmodels, and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM  # type: ignore[import-untyped]
from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]

from orchestrator.report.statistics.corrections import benjamini_hochberg, holm
from orchestrator.report.statistics.intervals import estimate_arrays
from orchestrator.report.statistics.summaries import (
    SeedPair,
    all_paired_differences,
    paired_difference,
    summarize_runs,
    transfer_seed_effect,
    variance_components,
)

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


def _sweeps_of_shared_transfer_seeds(std, *, num_sweeps, spaces=4, pretrain=3, transfer=3):
    """Rows of sweeps whose transfer seeds shift each label space by ``std``, for all backbones alike."""
    random = np.random.default_rng(0)
    for _ in range(num_sweeps):
        values = random.normal(size=(1, pretrain, transfer)) + random.normal(size=(spaces, pretrain, 1))
        values = values + std * random.normal(size=(spaces, 1, transfer))
        values = values + random.normal(size=(spaces, pretrain, transfer))
        yield [_runs(row) for row in values]


def _effect(rows):
    found = transfer_seed_effect(rows)
    assert found is not None
    return found


def test_effect_of_the_transfer_seed_is_that_of_the_analysis_of_variance():
    """As a mixed model's expected mean squares: its variance without bias, and 5 % of false alarms."""
    num_sweeps = 600
    found = [_effect(rows) for rows in _sweeps_of_shared_transfer_seeds(0.0, num_sweeps=num_sweeps)]
    assert np.mean([effect.p_value < 0.05 for effect in found]) == pytest.approx(0.05, abs=0.03)
    found = [_effect(rows) for rows in _sweeps_of_shared_transfer_seeds(2.0, num_sweeps=num_sweeps)]
    assert np.mean([effect.p_value < 0.05 for effect in found]) > 0.95
    # A difference of two label spaces has twice the variance of one of them.
    assert np.mean([effect.std**2 for effect in found]) == pytest.approx(2 * 2.0**2, rel=0.1)
    assert found[0].std_error == pytest.approx(found[0].std / math.sqrt(3))


def test_effect_of_the_transfer_seed_needs_two_of_everything_and_a_full_grid():
    [rows] = _sweeps_of_shared_transfer_seeds(1.0, num_sweeps=1)
    whole = transfer_seed_effect(rows)
    assert transfer_seed_effect([*rows, dict(list(rows[0].items())[1:])]) == whole  # a row with a gap is left out
    for keeps in (
        lambda pair: pair.transfer == 0,
        lambda pair: pair.pretrain == 0,
        lambda pair: pair.transfer <= pair.pretrain,
    ):
        assert transfer_seed_effect([{pair: row[pair] for pair in row if keeps(pair)} for row in rows]) is None
    assert transfer_seed_effect(rows[:1]) is None
    assert transfer_seed_effect([dict.fromkeys(row, 0.1) for row in rows]) is None


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


@pytest.mark.parametrize("more", [3, 0])
def test_paired_differences_of_equally_many_images_claim_no_certainty(more):
    """They differ by the rounding of what was subtracted."""
    wrong = (30801, 31133, 31007)
    values, baseline = (_runs([[(number + plus) / 50_000] for number in wrong]) for plus in (more, 0))
    (found,), _ = all_paired_differences([baseline, values])
    assert found is not None
    assert found == paired_difference(values, baseline)
    assert (found.low, found.high, found.p_value) == (None, None, None)
    assert found.mean == pytest.approx(more / 50_000)


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
