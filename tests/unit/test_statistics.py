import math

import pytest
from scipy import stats

from orchestrator.report.statistics.summaries import SeedPair, paired_difference, relative_improvement, summarize

PAIRS = [SeedPair(pretrain=seed, transfer=0) for seed in range(4)]


def test_summarize_known_numbers_match_scipy():
    values = [0.071, 0.068, 0.080, 0.075]
    summary = summarize(values)
    assert summary.mean == pytest.approx(stats.describe(values).mean)
    assert summary.std == pytest.approx(math.sqrt(stats.describe(values, ddof=1).variance))
    assert summary.num_values == 4


def test_summarize_single_value_has_no_std():
    assert summarize([0.5]).std is None


def test_summarize_no_values_is_refused():
    with pytest.raises(ValueError, match="no values"):
        summarize([])


def test_relative_improvement_paper_table_is_reproduced():
    # Error 5.25 % for the baseline of 11 classes, 4.79 % for 1103 classes: "8.76 %".
    assert relative_improvement(4.79, 5.25) == pytest.approx(0.0876, abs=5e-5)


def test_relative_improvement_higher_error_is_negative():
    assert relative_improvement(0.3, 0.2) == pytest.approx(-0.5)


def test_relative_improvement_perfect_baseline_has_none():
    assert relative_improvement(0.1, 0.0) is None


def test_paired_difference_one_transfer_seed_matches_scipy():
    values = dict(zip(PAIRS, [0.070, 0.081, 0.066, 0.075], strict=True))
    baseline = dict(zip(PAIRS, [0.26, 0.28, 0.265, 0.271], strict=True))
    found = paired_difference(values, baseline)
    assert found is not None
    expected = stats.ttest_rel(list(values.values()), list(baseline.values())).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(sum(values.values()) / 4 - sum(baseline.values()) / 4)


def test_paired_difference_transfer_seeds_do_not_count_as_independent():
    backbones = {0: 0.10, 1: 0.12, 2: 0.17}
    one = {SeedPair(pretrain=seed, transfer=0): value for seed, value in backbones.items()}
    many = {SeedPair(pretrain=seed, transfer=k): value for seed, value in backbones.items() for k in range(5)}
    single = paired_difference(one, dict.fromkeys(one, 0.2))
    repeated = paired_difference(many, dict.fromkeys(many, 0.2))
    assert single is not None
    assert repeated is not None
    assert (single.num_pairs, repeated.num_pairs) == (3, 15)
    assert (repeated.low, repeated.high) == pytest.approx((single.low, single.high))


def test_paired_difference_only_common_seeds_count():
    values = {PAIRS[0]: 0.1, PAIRS[1]: 0.2, PAIRS[2]: 0.9}
    found = paired_difference(values, {PAIRS[0]: 0.2, PAIRS[1]: 0.3, PAIRS[3]: 0.0})
    assert found is not None
    assert found.num_pairs == 2
    assert found.mean == pytest.approx(-0.1)


def test_paired_difference_single_pair_has_no_interval():
    found = paired_difference({PAIRS[0]: 0.1}, {PAIRS[0]: 0.3})
    assert found is not None
    assert (found.low, found.high) == (None, None)


def test_paired_difference_no_common_pair_has_none():
    assert paired_difference({PAIRS[0]: 0.1}, {PAIRS[1]: 0.3}) is None
