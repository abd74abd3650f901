"""Optimisers against plain formulas, parameter by parameter, and their state through a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.errors import CorruptObjectError, UserError
from tests.memory_images import small_network
from tests.tiny_training import RECIPE
from workloads.train.freezing import freeze, train_mode
from workloads.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors, set_learning_rate
from workloads.train.recipe import Recipe

STEPS = 6
RATES = [0.1, 0.08, 0.06, 0.05, 0.02, 0.01]
Array = NDArray[np.float64]
Formula = Callable[[Array, list[Array], Recipe, float], Array]


def recipe_of(**fields: Any) -> Recipe:
    return Recipe.from_mapping({**RECIPE, "weight_decay": 0.05, "lr": RATES[0], **fields})


def gradients(model: nn.Module) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(STEPS)]


def train(recipe: Recipe, model: nn.Module, start: int = 0, stop: int = STEPS, state: Any = None) -> dict[str, Tensor]:
    """Updates with given gradients; returns the optimiser's state."""
    optimizer = build_optimizer(recipe, model)
    if state is not None:
        load_optimizer_tensors(optimizer, model, state)
    for step in range(start, stop):
        for parameter, gradient in zip(model.parameters(), gradients(model)[step], strict=True):
            parameter.grad = gradient.clone() if parameter.requires_grad else None
        set_learning_rate(optimizer, RATES[step])
        optimizer.step()
    return optimizer_tensors(optimizer, model)


def sgd(weight: Array, grads: list[Array], recipe: Recipe, decay: float) -> Array:
    """Sutskever's momentum as PyTorch has it: v = m v + g; w = w - lr v, or lr (g + m v) after Nesterov."""
    velocity: Any = None
    for rate, grad in zip(RATES, grads, strict=True):
        g = grad + decay * weight
        velocity = g if velocity is None else recipe.momentum * velocity + g
        weight = weight - rate * (g + recipe.momentum * velocity if recipe.nesterov else velocity)
    return weight


def adam(weight: Array, grads: list[Array], recipe: Recipe, decay: float) -> Array:
    """arXiv:1412.6980, algorithm 1, with decay in the gradient (adam) or of the weights themselves (adamw)."""
    beta1, beta2 = recipe.betas
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, (rate, grad) in enumerate(zip(RATES, grads, strict=True), start=1):
        if recipe.optimizer == "adamw":
            weight, g = weight * (1 - rate * decay), grad
        else:
            g = grad + decay * weight
        first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
        unbiased, spread = first / (1 - beta1**step), second / (1 - beta2**step)
        weight = weight - rate * unbiased / (np.sqrt(spread) + (recipe.eps or 1e-8))
    return weight


def lamb(weight: Array, grads: list[Array], recipe: Recipe, decay: float) -> Array:
    """arXiv:1904.00962, algorithm 2, with phi(z) = z; without decay there is no trust ratio, as in NVIDIA's code."""
    beta1, beta2 = recipe.betas
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, (rate, grad) in enumerate(zip(RATES, grads, strict=True), start=1):
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad * grad
        unbiased, spread = first / (1 - beta1**step), second / (1 - beta2**step)
        update = unbiased / (np.sqrt(spread) + (recipe.eps or 1e-6)) + decay * weight
        trust = np.linalg.norm(weight) / np.linalg.norm(update) if decay and np.linalg.norm(weight) else 1.0
        weight = weight - rate * trust * update
    return weight


def lars(weight: Array, grads: list[Array], recipe: Recipe, decay: float) -> Array:
    """arXiv:1708.03888, equation 6 and algorithm 1: a local rate 0.001 |w| / (|g| + decay |w|), then momentum."""
    velocity: Any = None
    for rate, grad in zip(RATES, grads, strict=True):
        size = np.linalg.norm(weight)
        local = 0.001 * size / (np.linalg.norm(grad) + decay * size + 1e-8) if decay and size else 1.0
        g = local * (grad + decay * weight)
        velocity = g if velocity is None else recipe.momentum * velocity + g
        weight = weight - rate * (g + recipe.momentum * velocity if recipe.nesterov else velocity)
    return weight


CASES: list[tuple[Formula, dict[str, Any]]] = [
    (sgd, {"optimizer": "sgd"}),
    (sgd, {"optimizer": "sgd", "momentum": 0.0}),
    (sgd, {"optimizer": "sgd", "nesterov": True, "weight_decay_on": "no_bias_norm"}),
    (adam, {"optimizer": "adam"}),
    (adam, {"optimizer": "adam", "eps": 1e-3, "betas": [0.5, 0.6]}),
    (adam, {"optimizer": "adamw", "weight_decay": 0.3}),
    (adam, {"optimizer": "adamw", "weight_decay_on": "no_bias_norm"}),
    (lamb, {"optimizer": "lamb"}),
    (lamb, {"optimizer": "lamb", "eps": 1e-3, "weight_decay_on": "no_bias_norm"}),
    (lars, {"optimizer": "lars"}),
    (lars, {"optimizer": "lars", "nesterov": True, "weight_decay_on": "no_bias_norm"}),
    (lars, {"optimizer": "lars", "momentum": 0.0}),
]
IDS = ["-".join(str(value) for value in fields.values()) for _, fields in CASES]


@pytest.mark.parametrize(("formula", "fields"), CASES, ids=IDS)
def test_optimizer_follows_its_formula(formula: Formula, fields: dict[str, Any]) -> None:
    recipe, model = recipe_of(**fields), small_network()
    before = [parameter.detach().double().numpy().copy() for parameter in model.parameters()]
    train(recipe, model)
    for place, parameter in enumerate(model.parameters()):
        is_spared = recipe.weight_decay_on == "no_bias_norm" and parameter.ndim == 1
        grads = [step[place].double().numpy() for step in gradients(model)]
        expected = formula(before[place], grads, recipe, 0.0 if is_spared else recipe.weight_decay)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("formula", "fields"), CASES, ids=IDS)
def test_optimizer_restored_in_the_middle_goes_on_with_the_same_bits(formula: Formula, fields: dict[str, Any]) -> None:
    recipe, whole = recipe_of(**fields), small_network()
    train(recipe, whole)
    first = small_network()
    saved = {name: tensor.clone() for name, tensor in train(recipe, first, 0, 3).items()}
    second = deepcopy(first)
    train(recipe, second, 3, STEPS, saved)
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("formula", "fields"), CASES, ids=IDS)
def test_optimizer_restored_from_a_state_leaves_it_as_it_is(formula: Formula, fields: dict[str, Any]) -> None:
    """A run may go back to the same state more than once."""
    recipe, model = recipe_of(**fields), small_network()
    saved = {name: tensor.clone() for name, tensor in train(recipe, model, 0, 3).items()}
    before = deepcopy(saved)
    train(recipe, model, 3, STEPS, saved)
    assert saved.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.items())


def test_optimizer_state_of_another_model_is_refused() -> None:
    recipe, model = recipe_of(optimizer="lamb"), small_network()
    state = train(recipe, model, 0, 1)
    assert "group_step/0.weight" in state
    optimizer = build_optimizer(recipe, model)
    for path in ("exp_avg/none.weight", "group_step/0.bias"):
        with pytest.raises(CorruptObjectError, match=path):
            load_optimizer_tensors(optimizer, model, {path: torch.zeros(1)})


def test_optimizer_rewound_to_its_beginning_starts_anew() -> None:
    recipe, model = recipe_of(optimizer="lamb"), small_network()
    optimizer = build_optimizer(recipe, model)
    optimizer.param_groups[0]["step"] = torch.tensor(5.0)
    load_optimizer_tensors(optimizer, model, {})
    assert optimizer_tensors(optimizer, model) == {}


def test_frozen_parameters_stay_and_have_no_state() -> None:
    recipe, model = recipe_of(freeze=["0.*", "1.weight"]), small_network()
    assert freeze(model, recipe.freeze) == ["0.weight", "0.bias", "1.weight"]
    assert [len(group["params"]) for group in build_optimizer(recipe, model).param_groups] == [3]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = train(recipe, model)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"1.bias", "2.weight", "2.bias"}
    assert {name.partition("/")[2] for name in state} == changed


def test_frozen_modules_stay_in_evaluation_mode_and_others_train() -> None:
    backbone = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(3, 2)})
    freeze(model, recipe_of(freeze="backbone").freeze)
    model.eval()
    train_mode(model)
    modes = {name: module.training for name, module in model.named_modules()}
    assert modes == {name: name in ("", "head") for name in modes}
    statistics = deepcopy(backbone[1].state_dict())
    backbone(torch.randn(8, 5))
    assert all(torch.equal(value, statistics[name]) for name, value in backbone[1].state_dict().items())


@pytest.mark.parametrize(
    ("patterns", "message"), [(["stem.*"], "'stem.*' matches no parameter; names look like 0.weight"), (["*"], "all 6")]
)
def test_freeze_of_nothing_or_everything_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        freeze(small_network(), patterns)


@pytest.mark.parametrize(("name", "plain"), [("lamb", "adam"), ("lars", "sgd")])
def test_optimizer_with_a_trust_ratio_updates_as_the_plain_one_without_weight_decay(name: str, plain: str) -> None:
    models = small_network(), small_network()
    for optimizer, model in zip((name, plain), models, strict=True):
        train(recipe_of(optimizer=optimizer, weight_decay=0.0, eps=1e-6), model)
    for scaled, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(scaled, expected)
