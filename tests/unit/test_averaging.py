"""Averages of weights: equal to plain formulas, exact through checkpoints, and out of the way of training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.errors import CorruptObjectError
from tests.memory_images import small_network
from tests.tiny_training import RECIPE
from workloads.train.freezing import freeze
from workloads.train.learner import WeightAverage, build_average
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar

STEPS = 12
SAMPLES, BATCH = 24, 8  # 3 steps an epoch


def average_of(model: nn.Module, **fields: Any) -> WeightAverage:
    recipe = Recipe.from_mapping({**RECIPE, "epochs": 4, "batch_size": BATCH, **fields})
    average = build_average(recipe, model, Calendar.of(recipe, SAMPLES))
    assert average is not None
    return average


def advance(model: nn.Module, step: int) -> None:
    """Stand-in for update number ``step``: moves weights, BatchNorm statistics and their counter."""
    generator = torch.Generator().manual_seed(step)
    model.train()
    model(torch.randn(8, 5, generator=generator))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator))


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.double().clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def history(average: WeightAverage, model: nn.Module, start: int = 0, stop: int = STEPS) -> list[dict[str, Tensor]]:
    """Runs steps; returns the weights after each number of steps from ``start`` on."""
    found = [floats(model)]
    for step in range(start, stop):
        advance(model, step)
        average.update(step + 1)
        found.append(floats(model))
    return found


def averaged(average: WeightAverage, model: nn.Module) -> dict[str, Tensor]:
    with average.applied():
        return floats(model)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_recipe_without_average_has_none() -> None:
    recipe = Recipe.from_mapping(RECIPE)
    assert build_average(recipe, small_network(), Calendar.of(recipe, SAMPLES)) is None


@pytest.mark.parametrize(("start_epoch", "start_step"), [(0, 0), (1, 3), (2.5, 8)])
def test_ema_follows_its_formula_from_its_start(start_epoch: float, start_step: int) -> None:
    model = small_network()
    average = average_of(model, average="ema", average_decay=0.8, average_start_epoch=start_epoch)
    weights = history(average, model)
    expected = weights[start_step]
    for later in weights[start_step + 1 :]:
        expected = {name: 0.8 * value + 0.2 * later[name] for name, value in expected.items()}
    assert_close(averaged(average, model), expected)


@pytest.mark.parametrize(("start_epoch", "first"), [(0, 1), (1, 3), (3, 9)])
def test_polyak_is_the_mean_of_the_weights_from_its_start(start_epoch: float, first: int) -> None:
    model = small_network()
    average = average_of(model, average="polyak", average_start_epoch=start_epoch)
    weights = history(average, model)[first:]
    expected = {name: torch.stack([one[name] for one in weights]).mean(0) for name in weights[0]}
    assert_close(averaged(average, model), expected)


def test_average_before_its_start_is_the_weights() -> None:
    model = small_network()
    average = average_of(model, average="ema", average_start_epoch=3)
    history(average, model, stop=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with average.applied():
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_average_applied_gives_back_the_same_bits_also_after_an_error() -> None:
    model = small_network()
    average = average_of(model, average="ema", average_decay=0.5)
    history(average, model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inside = averaged(average, model)

    def fail() -> None:
        with average.applied():
            assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        fail()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = averaged(average, model)
    assert all(torch.equal(value, inside[name]) for name, value in again.items())


@pytest.mark.parametrize("kind", ["ema", "polyak"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 7])
def test_average_restored_at_any_step_goes_on_with_the_same_bits(kind: str, at: int) -> None:
    fields = {"average": kind, "average_start_epoch": 1}
    whole = small_network()
    average = average_of(whole, **fields)
    history(average, whole)
    model = small_network()
    first = average_of(model, **fields)
    history(first, model, stop=at)
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second_model = deepcopy(model)
    second = average_of(second_model, **fields)
    second.load_tensors(saved)
    history(second, second_model, at)
    assert all(torch.equal(tensor, average.tensors()[name]) for name, tensor in second.tensors().items())


def test_average_holds_trained_parameters_and_batchnorm_moments_only() -> None:
    model = small_network()
    freeze(model, ["0.*"])
    names = set(average_of(model, average="ema").tensors())
    assert names == {"1.weight", "1.bias", "1.running_mean", "1.running_var", "2.weight", "2.bias"}


def test_average_of_another_model_is_refused() -> None:
    average = average_of(small_network(), average="ema")
    tensors = average.tensors()
    for wrong in ({**tensors, "2.bias": torch.zeros(9)}, {name: tensors[name] for name in list(tensors)[1:]}):
        with pytest.raises(CorruptObjectError, match="differ in name or shape"):
            average.load_tensors(wrong)
