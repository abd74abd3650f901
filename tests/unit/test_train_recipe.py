"""Recipes are complete and checked before anything is built."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.errors import UserError
from orchestrator.sweepfile.recipe import RecipeSpec
from tests.tiny_training import RECIPE
from workloads.train.recipe import Recipe, tell_recipe


def test_recipe_from_resolved_mapping_has_typed_fields() -> None:
    recipe = Recipe.from_mapping(RECIPE)
    assert recipe.optimizer == "sgd"
    assert (recipe.betas, recipe.mean) == ((0.9, 0.999), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("optimizer", "lion"),
        ("schedule", "warm"),
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
        ("eps", 0.0),
        ("weight_decay_on", "some"),
        ("warmup_steps", 5),  # beside warmup_epochs
        ("constant_epochs", 2.5),
        ("lr_final", 0.06),
        ("lr_every", "day"),
        ("decay_rate", 1.5),
        ("decay_every_epochs", 0),
        ("milestones", [2, 1]),
        ("dropout", 1.0),
        ("drop_path", -0.1),
        ("mixup", -1.0),
        ("mix_prob", 0.0),
        ("cutmix_share", 1.0),
        ("average", "mean"),
        ("average_decay", 1.0),
        ("average_start_epoch", 2.5),
        ("freeze", "head"),
        ("freeze", [1]),
        ("on_numerics", {"rewind": 0}),
        ("on_numerics", {"retry": 1}),
        ("grad_spike", 0.5),
        ("head_init", "ones"),
        ("resize", 0),
        ("crop_scale", [0.5, 0.1]),
        ("crop_ratio", [0, 1]),
        ("color_jitter", 2.0),
        ("decoder", "magick"),
        ("interpolation", "nearest"),
    ],
)
def test_recipe_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"recipe\.{name} is "):
        Recipe.from_mapping({**RECIPE, name: value})


def test_recipe_typed_values_of_choices_and_lists() -> None:
    fields = {"freeze": "backbone", "on_numerics": {"rewind": 3}, "milestones": [1, 2], "schedule": "step"}
    recipe = Recipe.from_mapping({**RECIPE, **fields})
    assert (recipe.freeze, recipe.rewind_steps, recipe.milestones) == (("backbone.*",), 3, (1.0, 2.0))
    assert Recipe.from_mapping({**RECIPE, "freeze": "none", "on_numerics": "stop"}) == Recipe.from_mapping(RECIPE)


def test_recipe_of_a_stored_plan_may_name_an_option_that_was_removed() -> None:
    assert Recipe.from_mapping({**RECIPE, "decoder": "nvjpeg"}).decoder == "nvjpeg"


def test_recipe_steps_without_milestones_are_refused() -> None:
    with pytest.raises(UserError, match=r"recipe\.milestones is \(\); it must be given with schedule: step"):
        Recipe.from_mapping({**RECIPE, "schedule": "step"})


def test_recipe_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(UserError, match="nesterov"):
        Recipe.from_mapping({**RECIPE, "nesterov": True, "momentum": 0.0})


def test_recipe_unresolved_mapping_names_the_fields() -> None:
    mapping = {name: value for name, value in RECIPE.items() if name != "lr"}
    with pytest.raises(UserError, match=r"missing \['lr'\], unknown \['rate'\]"):
        Recipe.from_mapping({**mapping, "rate": 1})


def test_recipe_text_tells_what_is_not_at_its_default() -> None:
    plain = Recipe.from_mapping(RecipeSpec.model_validate({"epochs": 2, "batch_size": 64, "lr": 1e-3}).resolved())
    assert tell_recipe(plain) == "epochs=2 batch_size=64 optimizer=sgd lr=0.001 schedule=cosine"
    changed = replace(plain, optimizer="adamw", betas=(0.9, 0.95), mixup=0.2, norm_group=32)
    assert tell_recipe(changed) == (
        "epochs=2 batch_size=64 optimizer=adamw lr=0.001 schedule=cosine mixup=0.2 betas=[0.9, 0.95] norm_group=32"
    )
