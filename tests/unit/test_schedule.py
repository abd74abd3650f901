"""Learning rates against plain formulas written for one schedule each."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import UserError
from tests.tiny_training import RECIPE
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar, LearningRate

SAMPLES, BATCH = 1000, 30  # 33.33 steps an epoch: half epochs end at 17, 33, 50, 67, 83, 100, ...
HALF_EPOCH_ENDS = [17, 33, 50, 67, 83, 100, 117, 133, 150, 167, 183, 200]


def rates(num_samples: int = SAMPLES, **fields: Any) -> list[float]:
    recipe = Recipe.from_mapping({**RECIPE, "warmup_epochs": 0, "batch_size": BATCH, "epochs": 6, "lr": 0.8, **fields})
    calendar = Calendar.of(recipe, num_samples)
    rate = LearningRate.of(recipe, calendar)
    return [rate.at(step) for step in range(calendar.total_steps)]


def test_exponential_by_half_epoch_multiplies_at_the_end_of_every_half_epoch() -> None:
    found = rates(schedule="exponential", decay_rate=0.97, decay_every_epochs=0.5, lr_every="half_epoch")
    expected, value = [], 0.8
    for start, end in pairwise([0, *HALF_EPOCH_ENDS]):
        expected += [value] * (end - start)
        value *= 0.97
    assert found == pytest.approx(expected, rel=1e-12)


def test_exponential_by_step_falls_smoothly_through_the_same_values() -> None:
    found = rates(schedule="exponential", decay_rate=0.97, decay_every_epochs=0.5)
    assert found == pytest.approx([0.8 * 0.97 ** (step * BATCH / SAMPLES / 0.5) for step in range(200)], rel=1e-12)


def test_step_multiplies_at_the_milestones() -> None:
    found = rates(schedule="step", decay_rate=0.1, milestones=[2, 3.5])  # steps 67 and 117
    assert found == pytest.approx([0.8] * 67 + [0.08] * 50 + [0.008] * 83, rel=1e-12)


def test_step_milestones_count_from_the_start_of_training_with_warm_up_as_well() -> None:
    found = rates(schedule="step", decay_rate=0.1, milestones=[2], warmup_steps=10)
    assert found[:10] == pytest.approx([0.08 * step for step in range(1, 11)])
    assert found[10:] == pytest.approx([0.8] * 57 + [0.08] * 133)


def test_linear_rests_for_constant_epochs_and_ends_at_the_final_rate() -> None:
    found = rates(schedule="linear", constant_epochs=3, lr_final=0.2, epochs=6)
    expected = [0.8] * 100 + [0.8 + (0.2 - 0.8) * step / 100 for step in range(100)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_cosine_follows_warm_up_rest_and_half_a_period() -> None:
    found = rates(schedule="cosine", warmup_epochs=1, constant_epochs=1, lr_final=0.1)
    warm, rest = 33, 67
    expected = [0.8 * (step + 1) / warm for step in range(warm)] + [0.8] * (rest - warm)
    expected += [0.1 + 0.7 * (1 + math.cos(math.pi * (step - rest) / (200 - rest))) / 2 for step in range(rest, 200)]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_by_epoch_holds_the_value_that_the_decay_by_step_has_at_its_start(schedule: str) -> None:
    by_step, by_epoch = rates(schedule=schedule), rates(schedule=schedule, lr_every="epoch")
    ends = [0, *HALF_EPOCH_ENDS[1::2]]
    expected = [by_step[start] for start, end in pairwise(ends) for _ in range(end - start)]
    assert by_epoch == pytest.approx(expected, rel=1e-12)


def test_decay_by_epoch_is_never_above_the_peak_after_a_warm_up_that_ends_within_an_epoch() -> None:
    found = rates(schedule="cosine", lr_every="epoch", warmup_steps=40)
    assert found[40:67] == [0.8] * 27
    assert found[67] < 0.8


@given(
    schedule=st.sampled_from(["linear", "cosine", "exponential"]),
    lr_every=st.sampled_from(["half_epoch", "epoch"]),
    num_samples=st.integers(1, 3000),
    batch_size=st.integers(10, 400),
    epochs=st.integers(1, 8),
    warmup_steps=st.integers(0, 10),
)
def test_held_rate_changes_only_where_a_period_ends_and_never_rises(
    schedule: str, lr_every: str, num_samples: int, batch_size: int, epochs: int, warmup_steps: int
) -> None:
    period = 0.5 if lr_every == "half_epoch" else 1.0
    fields = {"schedule": schedule, "lr_every": lr_every, "epochs": epochs, "batch_size": batch_size}
    try:
        found = rates(num_samples, warmup_steps=warmup_steps, decay_rate=0.5, **fields)
    except UserError:
        return
    ends = {math.floor(period * number * num_samples / batch_size + 0.5) for number in range(1, 17)}
    after = list(enumerate(found))[warmup_steps:]
    assert all(high >= low for (_, high), (_, low) in pairwise(after))
    assert {step for (_, before), (step, now) in pairwise(after) if now != before} <= ends


def test_warm_up_longer_than_the_training_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"take 201 steps, but 6 epochs of 1000 .* are 200"):
        rates(warmup_steps=201)


def test_half_an_epoch_of_warm_up_and_half_of_rest_fit_into_one_epoch_of_one_step() -> None:
    assert rates(30, epochs=1, warmup_epochs=0.5, constant_epochs=0.5, schedule="linear") == [0.8]


def test_epochs_that_share_a_step_keep_their_numbers() -> None:
    """The second step was taken for the end of the second epoch, although it ends the fourth and the fifth."""
    calendar = Calendar.of(Recipe.from_mapping({**RECIPE, "batch_size": 8192, "epochs": 9}), 4000)
    assert calendar.epoch_ends == (1, 2, 3, 4)
    assert [calendar.ended_epoch(step) for step in (1, 2, 3)] == [2, 4, 6]
    ends = {every: [step for step in (1, 2, 3) if calendar.is_epoch_end(step, every)] for every in (1, 2, 5, 7)}
    assert ends == {1: [1, 2, 3], 2: [1, 2, 3], 5: [2], 7: [3]}


@pytest.mark.parametrize(("every", "expected"), [(1, [33, 67, 100, 133, 167]), (2, [67, 133]), (4, [133])])
def test_checkpoints_by_epochs_follow_their_cadence(every: int, expected: list[int]) -> None:
    calendar = Calendar.of(Recipe.from_mapping({**RECIPE, "batch_size": BATCH, "epochs": 6}), SAMPLES)
    assert [step for step in range(1, 201) if calendar.has_checkpoint(step, 0, every)] == expected
