import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.report.inputs import MetricSegment, supersede
from orchestrator.report.statistics.summaries import SeedPair, paired_difference, relative_improvement, summarize

FRACTIONS = st.floats(min_value=0.0, max_value=1.0)
PAIRS = st.builds(SeedPair, pretrain=st.integers(0, 3), transfer=st.integers(0, 3))
RESULTS = st.dictionaries(PAIRS, FRACTIONS, min_size=1, max_size=12)


@given(st.lists(FRACTIONS, min_size=2, max_size=20), FRACTIONS)
def test_summarize_shifted_values_shift_the_mean_and_keep_the_std(values, shift):
    summary, shifted = summarize(values), summarize([value + shift for value in values])
    assert shifted.mean == pytest.approx(summary.mean + shift, abs=1e-9)
    assert shifted.std == pytest.approx(summary.std, abs=1e-9)


@given(st.lists(FRACTIONS, min_size=1, max_size=20))
def test_summarize_order_of_values_does_not_matter(values):
    forward, backward = summarize(values), summarize(values[::-1])
    assert min(values) - 1e-12 <= forward.mean <= max(values) + 1e-12
    assert backward.mean == pytest.approx(forward.mean)


@given(FRACTIONS, st.floats(min_value=1e-3, max_value=1.0))
def test_relative_improvement_inverts_to_the_value(value, baseline):
    improvement = relative_improvement(value, baseline)
    assert improvement is not None
    assert improvement <= 1
    assert (1 - improvement) * baseline == pytest.approx(value, abs=1e-12)


@given(RESULTS, RESULTS)
def test_paired_difference_exchanged_sides_are_mirrored(values, baseline):
    there, back = paired_difference(values, baseline), paired_difference(baseline, values)
    if there is None or back is None:
        assert there is back is None
        assert not values.keys() & baseline.keys()
        return
    assert back.mean == pytest.approx(-there.mean, abs=1e-12)
    if there.low is not None and there.high is not None:
        assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-9)
        assert there.low <= there.mean <= there.high


@given(RESULTS, st.floats(min_value=0.5, max_value=0.98))
def test_paired_difference_more_confidence_is_never_narrower(values, confidence):
    baseline = dict.fromkeys(values, 0.5)
    narrow = paired_difference(values, baseline, confidence=confidence)
    wide = paired_difference(values, baseline, confidence=confidence + 0.01)
    assert narrow is not None
    assert wide is not None
    if narrow.low is not None and narrow.high is not None and wide.low is not None and wide.high is not None:
        assert wide.high - wide.low >= narrow.high - narrow.low
        assert math.isfinite(wide.low)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5), st.integers())
def test_supersede_any_resumes_leave_every_step_once_from_its_last_attempt(attempts, choice):
    segments, ends = [], [0]
    truth: dict[int, int] = {}
    for attempt, lengths in enumerate(attempts, start=1):
        step = ends[choice % len(ends)]  # a checkpoint that some earlier attempt wrote
        truth = {known: owner for known, owner in truth.items() if known <= step}
        ends = [end for end in ends if end <= step]
        for length in lengths:
            name = f"{attempt}/{step}"
            segments.append(MetricSegment(name=name, attempt=attempt, from_step=step, valid_to_step=step + length))
            truth |= dict.fromkeys(range(step + 1, step + length + 1), attempt)
            step += length
            ends.append(step)
    counted = [
        (step, segment.attempt)
        for segment in supersede(segments)
        for step in range(segment.from_step + 1, segment.valid_to_step + 1)
    ]
    assert counted == sorted(truth.items())
