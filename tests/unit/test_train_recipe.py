"""Recipes are complete and checked before anything is built."""

from typing import Any

import pytest

from orchestrator.errors import UserError
from tests.tiny_training import RECIPE
from workloads.train.recipe import OptimizerName, Recipe


def test_recipe_from_resolved_mapping_has_typed_fields() -> None:
    recipe = Recipe.from_mapping(RECIPE)
    assert recipe.optimizer is OptimizerName.SGD
    assert (recipe.betas, recipe.mean) == ((0.9, 0.999), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("optimizer", "lion"),
        ("schedule", "step"),
        ("augment", "mixup"),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("warmup_epochs", 99.0),
        ("label_smoothing", 1.0),
        ("grad_clip", -1.0),
        ("precision", "fp8"),
        ("shuffle_block_shards", 0),
        ("mean", [0.5]),
        ("std", [1.0, 0.0, 1.0]),
        ("eval_every_epochs", 0),
    ],
)
def test_recipe_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"recipe\.{name} is "):
        Recipe.from_mapping({**RECIPE, name: value})


def test_recipe_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(UserError, match="nesterov"):
        Recipe.from_mapping({**RECIPE, "nesterov": True, "momentum": 0.0})


def test_recipe_unresolved_mapping_names_the_fields() -> None:
    mapping = {name: value for name, value in RECIPE.items() if name != "lr"}
    with pytest.raises(UserError, match=r"missing \['lr'\], unknown \['rate'\]"):
        Recipe.from_mapping({**mapping, "rate": 1})
