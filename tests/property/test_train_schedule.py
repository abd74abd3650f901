"""Calendar and learning rate are pure functions of the step."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import UserError
from tests.tiny_training import RECIPE
from workloads.data.order import total_steps
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar, LearningRate

EPOCHS = st.floats(0.1, 12, allow_nan=False).map(lambda epochs: round(epochs, 2))
SIZES = st.integers(1, 400)


def _calendar(epochs: float, num_samples: int, batch_size: int, **fields: object) -> Calendar:
    changed = {"epochs": epochs, "batch_size": batch_size, "warmup_epochs": 0.0, **fields}
    return Calendar.of(Recipe.from_mapping({**RECIPE, **changed}), num_samples)


@given(EPOCHS, SIZES, SIZES)
def test_calendar_any_run_ends_epochs_in_order_and_the_last_at_the_end(epochs: float, size: int, batch: int) -> None:
    try:
        calendar = _calendar(epochs, size, batch)
    except UserError:
        assert epochs * size / batch <= 0.5
        return
    ends = [step for step in range(1, calendar.total_steps + 1) if calendar.is_epoch_end(step)]
    assert tuple(ends) == calendar.epoch_ends
    assert ends[-1] == calendar.total_steps
    assert len(ends) <= math.ceil(epochs)
    for number, end in enumerate(ends[:-1], start=1):
        # Epochs much smaller than a batch share steps; otherwise epoch e ends next to sample e * N.
        if len(ends) == math.ceil(epochs):
            assert abs(end * batch - number * size) <= batch / 2
        if batch <= size:
            assert calendar.ended_epoch(end) == number


@given(EPOCHS, SIZES, SIZES, st.integers(1, 5))
def test_calendar_evaluations_are_epoch_ends_and_include_the_last_step(
    epochs: float, size: int, batch: int, every: int
) -> None:
    if epochs * size / batch <= 1:
        return
    calendar = _calendar(epochs, size, batch, eval_every_epochs=every)
    evaluated = [step for step in range(1, calendar.total_steps + 1) if calendar.is_evaluated(step)]
    assert evaluated[-1] == calendar.total_steps
    ends = {total_steps(epoch, size, batch) for epoch in range(every, math.ceil(epochs), every)}
    assert evaluated[:-1] == sorted(end for end in ends if 0 < end < calendar.total_steps)


@given(EPOCHS, SIZES, st.integers(1, 20))
def test_calendar_every_evaluation_has_a_metrics_line(epochs: float, size: int, batch: int) -> None:
    if epochs * size / batch <= 1:
        return
    calendar = _calendar(epochs, size, batch)
    steps = range(1, calendar.total_steps + 1)
    assert all(calendar.has_line(step) for step in steps if calendar.is_evaluated(step))


@pytest.mark.parametrize(("every_steps", "expected"), [(0, [6, 12]), (4, [4, 8, 12])])
def test_calendar_checkpoints_follow_the_cadence_and_skip_the_end(every_steps: int, expected: list[int]) -> None:
    calendar = _calendar(2.5, 96, 16)
    assert [step for step in range(1, 16) if calendar.has_checkpoint(step, every_steps)] == expected


@given(
    st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 50), st.integers(1, 200), st.floats(1e-6, 10.0)
)
def test_learning_rate_any_schedule_rises_to_the_base_and_never_increases_after(
    schedule: str, warmup: int, rest: int, base: float
) -> None:
    name = Recipe.from_mapping({**RECIPE, "schedule": schedule}).schedule
    rate = LearningRate(base=base, schedule=name, warmup_steps=warmup, total_steps=warmup + rest)
    rates = [rate.at(step) for step in range(warmup + rest)]
    assert all(0 < value <= base for value in rates)
    assert all(low < high or high == base for low, high in pairwise(rates[: warmup + 1]))
    assert rates[warmup] == base
    assert all(high >= low for high, low in pairwise(rates[warmup:]))
    assert rate.at(warmup + rest) == pytest.approx(base if schedule == "constant" else 0.0)


def test_learning_rate_warm_up_starts_from_zero() -> None:
    rate = LearningRate.of(Recipe.from_mapping({**RECIPE, "warmup_epochs": 1.0}), _calendar(2.5, 96, 16))
    assert rate.at(0) == pytest.approx(0.05 / 6)
    assert rate.at(5) == pytest.approx(0.05)
