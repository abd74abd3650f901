"""The pure rules of searches: spaces, draws, and who goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import UserError
from orchestrator.search.asha import AshaRule, Ladder, cutoff_of
from orchestrator.search.samplers import Answered, Dimension, InOrder, OptunaSampler, RandomSampler, Space, mark_of

ENDS = st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)).filter(lambda pair: pair[1] > 1.01 * pair[0])
UNIT = st.floats(0, math.nextafter(1, 0))


@pytest.mark.parametrize(
    ("grace", "reduction", "epochs", "rungs"),
    [(1, 3, 9, (1, 3)), (1, 3, 10, (1, 3, 9)), (2, 2, 16, (2, 4, 8)), (5, 3, 5, ()), (1, 4, 1.5, (1,)), (9, 3, 4, ())],
)
def test_rungs_are_powers_before_the_end(grace, reduction, epochs, rungs):
    assert AshaRule(grace_epochs=grace, reduction=reduction, max_epochs=epochs).rungs == rungs


def goes_on(ladder: Ladder, trial: int, epoch: float, value: float) -> bool:
    verdict = ladder.judge(trial, epoch, value)
    assert verdict is not None
    return verdict.goes_on


def test_ladder_stops_what_is_worse_than_the_best_share_and_spares_the_first():
    ladder = Ladder((1.0, 3.0), 2.0)
    assert [goes_on(ladder, trial, 1.0, value) for trial, value in enumerate([0.5, 0.6, 0.4, 0.55])] == [
        True,
        False,
        True,
        False,
    ]
    assert ladder.judge(0, 2.0, 0.1) is None, "there is no rung"
    assert goes_on(ladder, 0, 3.0, 0.9), "the first at its rung"
    assert ladder.judge(0, 3.0, 0.0) is None, "a rung is judged once"
    assert ladder.judge(1, 1.5, 0.0) is None


def test_ladder_takes_a_trial_that_is_no_number_for_the_worst():
    ladder = Ladder((1.0,), 2.0)
    for trial in range(3):
        ladder.judge(trial, 1.0, 0.5)
    assert not goes_on(ladder, 3, 1.0, math.nan)
    assert cutoff_of([math.inf, math.inf, math.inf], 2.0) == math.inf


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=60), st.sampled_from([1.5, 2.0, 3.0, 4.0]))
def test_ladder_says_the_same_of_the_same_story(story, reduction):
    """Trials that go on step to the next epoch each time; a rebuilt ladder agrees with the first one."""
    ladders = [Ladder((1.0, 2.0, 4.0, 8.0), reduction) for _ in range(2)]
    epochs: Counter[int] = Counter()
    for trial, value in story:
        epochs[trial] += 1
        first, second = (ladder.judge(trial, float(epochs[trial]), value) for ladder in ladders)
        assert first == second
    assert ladders[0].values == ladders[1].values


@given(ENDS, UNIT, st.sampled_from(["uniform", "log"]))
def test_dimension_stays_within_its_ends(ends, unit, scale):
    dimension = Dimension.from_json("lr", {scale: [*ends]})
    assert ends[0] <= dimension.at(unit) <= ends[1]
    assert dimension.ends == pytest.approx(ends, rel=1e-5)


@given(st.integers(1, 50), st.integers(1, 50), UNIT, st.sampled_from(["integer", "log_integer"]))
def test_whole_dimension_gives_whole_numbers_and_reaches_both_ends(low, width, unit, scale):
    dimension = Dimension.from_json("batch_size", {scale: [low, low + width]})
    assert low <= dimension.at(unit) <= low + width
    assert isinstance(dimension.at(unit), int)
    assert dimension.ends == (low, low + width)


def test_random_sampler_is_a_function_of_the_trial_and_repeats_nothing():
    space = Space.from_json({"lr": {"log": [0.01, 1.0]}, "momentum": {"values": [0.0, 0.9]}})
    sampler = RandomSampler(space, 7)
    tried: list[Mapping[str, Any]] = []
    for number in range(8):
        tried.append(sampler.ask(number, tried, ()))
    assert RandomSampler(space, 7).ask(5, tried[:5], [Answered(params=tried[0], value=0.1)]) == tried[5]
    assert RandomSampler(space, 8).ask(0, [], ()) != tried[0]
    assert len({mark_of(params) for params in tried}) == 8


def test_random_sampler_finds_every_combination_of_a_small_space_and_then_says_so():
    space = Space.from_json({"a": {"values": [1, 2]}, "b": {"values": [True, None, "x"]}})
    tried: list[Mapping[str, Any]] = []
    for number in range(6):
        tried.append(RandomSampler(space, 0).ask(number, tried, ()))
    assert len({mark_of(params) for params in tried}) == 6
    with pytest.raises(UserError, match="all 6 combinations"):
        RandomSampler(space, 0).ask(6, tried, ())


@pytest.mark.parametrize("scale", ["integer", "log_integer"])
def test_last_value_of_a_range_of_integers_is_found_where_draws_miss_it(scale, monkeypatch):
    monkeypatch.setattr("orchestrator.search.samplers._REDRAWS", 0)
    space = Space.from_json({"batch_size": {scale: [1, 4]}, "optimizer": {"values": ["lamb"]}})
    tried = [{"batch_size": number, "optimizer": "lamb"} for number in (1, 2, 3)]
    last = RandomSampler(space, 5).ask(3, tried, ())
    assert last == {"batch_size": 4, "optimizer": "lamb"}
    with pytest.raises(UserError, match="all 4 combinations"):
        RandomSampler(space, 5).ask(4, [*tried, last], ())


def test_in_order_gives_each_value_once():
    space = Space.from_json({"label_space": {"values": ["a", "b"]}})
    assert [InOrder(space).ask(0, [], ()), InOrder(space).ask(1, [{"label_space": "a"}], ())] == [
        {"label_space": "a"},
        {"label_space": "b"},
    ]


def test_optuna_sampler_follows_what_was_answered_and_is_repeatable():
    pytest.importorskip("optuna")
    space = Space.from_json(
        {"lr": {"uniform": [0.0, 1.0]}, "batch_size": {"log_integer": [8, 64]}, "n": {"values": [[1], None]}}
    )
    params = [RandomSampler(space, 3).ask(number, (), ()) for number in range(20)]
    answered = [Answered(params=one, value=abs(one["lr"] - 0.7)) for one in params] + [
        Answered(params={**params[0], "lr": 0.0}, value=None)
    ]
    asked = [OptunaSampler(space, 0, 5).ask(20 + n, params, answered) for n in range(8)]
    assert asked == [OptunaSampler(space, 0, 5).ask(20 + n, params, answered) for n in range(8)]
    assert sum(abs(one["lr"] - 0.7) < 0.25 for one in asked) >= 5
    assert all(one["n"] in [[1], None] and isinstance(one["batch_size"], int) for one in asked)


def test_optuna_that_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"pretraining-orchestrator\[optuna\]"):
        OptunaSampler(Space.from_json({"a": {"values": [1, 2]}}), 0, 5)
