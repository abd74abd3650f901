"""The shipped recipes: their values and learning rates, against numbers computed by hand from the papers' text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.sweepfile.load import shipped_recipes
from orchestrator.sweepfile.recipe import RecipeSpec, ignored_fields, missing_fields, schema_of
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar, LearningRate

INAT, IN21K, IN1K, SMALL = 500_000, 12_743_321, 1_281_167, 4096

# recipe: (training samples, steps in all, {update number: learning rate}).
# Steps are samples x epochs / batch, rounded: iNat 500,000 x 90 / 4096 = 10,986.33, of which 7 epochs = 854.49 warm up.
RATES: dict[str, tuple[int, int, dict[int, float]]] = {
    "resnet-inat-90ep": (
        INAT,
        10_986,  # decay over 10,986 - 854 = 10,132 steps
        {
            0: 1.6 / 854,
            426: 0.8,  # 427 / 854 of the warm-up
            853: 1.6,
            854: 1.6,
            3387: 1.3656854,  # a quarter: 1.6 (1 + cos 45 deg) / 2
            5920: 0.8,
            10_985: 3.8456466e-8,  # 1.6 (1 - cos(pi / 10,132)) / 2
        },
    ),
    # 500,000 x 90 / 1024 = 43,945.31; 7 epochs = 3,417.97; decay over 40,527
    "resnet-inat-90ep-finetune": (
        INAT,
        43_945,
        {0: 0.4 / 3418, 1708: 0.2, 3417: 0.4, 3418: 0.4, 16_927: 0.3, 30_436: 0.1},
    ),
    # 1,281,167 x 90 / 4096 = 28,150.64; 7 epochs = 2,189.49; decay over 25,962
    "resnet-in1k-90ep": (IN1K, 28_151, {0: 7.3092736e-4, 2188: 1.6, 2189: 1.6, 10_843: 1.2, 15_170: 0.8}),
    # 1,281,167 x 90 / 1024 = 112,602.57; 7 epochs = 8,757.98; decay over 103,845; a fifth: 0.4 (1 + cos 36 deg) / 2
    "resnet-in1k-90ep-finetune": (
        IN1K,
        112_603,
        {0: 4.5672528e-5, 8757: 0.4, 8758: 0.4, 29_527: 0.3618034, 43_373: 0.3, 77_988: 0.1},
    ),
    # 12,743,321 x 90 / 4096 = 280,004.61; decay over 270,005
    "vit-in21k-90ep": (
        IN21K,
        280_005,
        {
            0: 1e-7,
            4999: 5e-4,
            9999: 1e-3,
            10_000: 1e-3,
            145_002: 5.0500183e-4,  # 1e-5 + 9.9e-4 x 135,003 / 270,005
            280_004: 1.00036666e-5,  # 1e-5 + 9.9e-4 / 270,005
        },
    ),
    "vit-binary-finetune-90ep-b4096": (
        IN21K,
        280_005,
        {0: 1e-7, 9999: 1e-3, 10_000: 1e-3, 145_002: 5.0500183e-4, 280_004: 1.00036666e-5},
    ),
    # 12,743,321 x 90 / 1024 = 1,120,018.45; decay over 1,110,018
    "vit-binary-finetune-90ep-b1024": (
        IN21K,
        1_120_018,
        {0: 2.5e-8, 9999: 2.5e-4, 10_000: 2.5e-4, 380_006: 1.7e-4, 565_009: 1.3e-4, 1_120_017: 1.0000216e-5},
    ),
    # 12,743,321 x 90 / 512 = 2,240,036.89; decay over 2,230,037
    "vit-binary-finetune-90ep-b512": (
        IN21K,
        2_240_037,
        {0: 1.25e-8, 9999: 1.25e-4, 10_000: 1.25e-4, 1_125_018: 6.7500026e-5, 2_240_036: 1.00000516e-5},
    ),
    # 12,743,321 x 10 / 4096 = 31,111.62; 3 epochs = 9,333.49; decay over 21,779
    "vit-binary-finetune-10ep-b4096": (
        IN21K,
        31_112,
        {0: 1e-3, 9332: 1e-3, 9333: 1e-3, 9334: 9.99954543e-4, 20_222: 5.0502273e-4, 31_111: 1.00454566e-5},
    ),
    # 12,743,321 x 10 / 512 = 248,892.99; 3 epochs = 74,667.90; decay over 174,225
    "vit-binary-finetune-10ep-b512": (
        IN21K,
        248_893,
        {0: 1.25e-4, 74_668: 1.25e-4, 132_743: 8.6666667e-5, 248_892: 1.00006601e-5},
    ),
    # 12,743,321 x 20 / 4096 = 62,223.25; decay over 52,223
    "vit-binary-probe-20ep-b4096": (
        IN21K,
        62_223,
        {0: 1e-7, 9999: 1e-3, 10_000: 1e-3, 36_111: 5.0500948e-4, 62_222: 1.00189572e-5},
    ),
    # 12,743,321 x 20 / 512 = 497,785.98; decay over 487,786
    "vit-binary-probe-20ep-b512": (
        IN21K,
        497_786,
        {0: 1.25e-8, 9999: 1.25e-4, 253_893: 6.75e-5, 497_785: 1.00002358e-5},
    ),
    # 1,281,167 x 8 / 512 = 20,018.23; decay over 19,518
    "vit-in1k-finetune": (
        IN1K,
        20_018,
        {0: 1.2e-4, 249: 0.03, 499: 0.06, 500: 0.06, 7006: 0.045, 10_259: 0.03, 20_017: 3.8861573e-10},
    ),
    # Half epochs end at 1,251.14, 2,502.28, ..., 20 epochs at 50,045.59, the last half begins at 98,840.03.
    "linear-probe-40ep": (
        IN1K,
        100_091,
        {0: 0.9, 1250: 0.9, 1251: 0.873, 2501: 0.873, 2502: 0.84681, 50_046: 0.26614106, 100_090: 0.081135238},
    ),
    "linear-probe-20ep": (
        IN1K,
        50_046,
        {0: 0.9, 1250: 0.9, 1251: 0.873, 2502: 0.84681, 25_023: 0.48941491, 48_793: 0.28285796, 50_045: 0.27437223},
    ),
    # decay over 28,151 - 10,000 = 18,151; a seventh: 3e-3 (1 + cos(pi / 7)) / 2
    "vit-in1k-90ep": (
        IN1K,
        28_151,
        {0: 3e-7, 4999: 1.5e-3, 9999: 3e-3, 10_000: 3e-3, 12_593: 2.85145330e-3, 28_150: 2.2467766e-11},
    ),
    "default-finetune": (SMALL, 128, {0: 1e-3 / 16, 15: 1e-3, 16: 1e-3, 72: 5e-4}),  # 32 steps an epoch
    "default-probe": (SMALL, 160, {0: 0.5, 80: 0.25}),  # 16 steps an epoch
    "cached-probe-sgd": (SMALL, 160, {0: 0.5, 80: 0.25}),
}
RATES["linear-probe-40ep-augmented"] = RATES["linear-probe-40ep"]
NOT_STEPPED = {"cached-probe", "default-knn"}
"""Recipes without an optimiser."""


def recipe_of(fields: Mapping[str, Any]) -> Recipe:
    """Shipped fields as a job gets them."""
    return Recipe.from_mapping(schema_of(fields).model_validate(fields).resolved())


def test_shipped_recipes_all_have_rates_computed_by_hand() -> None:
    assert {*RATES, *NOT_STEPPED} == set(shipped_recipes())


@pytest.mark.parametrize("name", RATES)
def test_shipped_recipe_learning_rate_at_key_steps_is_that_of_the_text(name: str) -> None:
    num_samples, steps, rates = RATES[name]
    recipe = recipe_of(shipped_recipes()[name])
    calendar = Calendar.of(recipe, num_samples)
    rate = LearningRate.of(recipe, calendar)
    found = {step: rate.at(step) for step in rates}
    print(name, found)  # noqa: T201 - `pytest -s` shows the rates of a recipe
    assert calendar.total_steps == steps
    assert found == {step: pytest.approx(value, rel=2e-7, abs=1e-16) for step, value in rates.items()}


RESNET = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-5, "epochs": 90, "warmup_epochs": 7}
RESNET |= {"schedule": "cosine", "augment": "random_crop_flip", "resize": 256, "norm_group": 64, "loss": "softmax"}
VIT = {"optimizer": "adamw", "betas": (0.9, 0.999), "weight_decay": 0.03, "schedule": "linear", "lr_final": 1e-5}
VIT |= {"loss": "sigmoid", "head_bias": -10.0, "mean": (0.5, 0.5, 0.5)}
LONG = {"epochs": 90, "warmup_steps": 10_000, "dropout": 0.1, "augment": "random_crop_flip"}
SHORT = {"epochs": 10, "warmup_steps": 0, "warmup_epochs": 0, "constant_epochs": 3, "dropout": 0.1}
PROBE = {"epochs": 20, "warmup_steps": 10_000, "augment": "random_crop_flip", "dropout": 0.1}
LINEAR = {"optimizer": "sgd", "nesterov": True, "momentum": 0.9, "weight_decay": 1e-6, "batch_size": 512, "lr": 0.9}
LINEAR |= {"schedule": "exponential", "decay_rate": 0.97, "decay_every_epochs": 0.5, "lr_every": "half_epoch"}
VALUES: dict[str, dict[str, Any]] = {
    "resnet-inat-90ep": {**RESNET, "batch_size": 4096, "lr": 1.6},
    "resnet-inat-90ep-finetune": {**RESNET, "batch_size": 1024, "lr": 0.4},
    "resnet-in1k-90ep": {**RESNET, "batch_size": 4096, "lr": 1.6},
    "resnet-in1k-90ep-finetune": {**RESNET, "batch_size": 1024, "lr": 0.4},
    "vit-in21k-90ep": {**VIT, **LONG, "batch_size": 4096, "lr": 1e-3},
    "vit-binary-finetune-90ep-b4096": {**VIT, **LONG, "batch_size": 4096, "lr": 1e-3},
    "vit-binary-finetune-90ep-b1024": {**VIT, **LONG, "batch_size": 1024, "lr": 2.5e-4},
    "vit-binary-finetune-90ep-b512": {**VIT, **LONG, "batch_size": 512, "lr": 1.25e-4},
    "vit-binary-finetune-10ep-b4096": {**VIT, **SHORT, "batch_size": 4096, "lr": 1e-3},
    "vit-binary-finetune-10ep-b512": {**VIT, **SHORT, "batch_size": 512, "lr": 1.25e-4},
    "vit-binary-probe-20ep-b4096": {**VIT, **PROBE, "batch_size": 4096, "lr": 1e-3},
    "vit-binary-probe-20ep-b512": {**VIT, **PROBE, "batch_size": 512, "lr": 1.25e-4},
    "vit-in1k-finetune": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0, "batch_size": 512, "dropout": 0}
    | {"grad_clip": 1.0, "warmup_steps": 500, "schedule": "cosine", "epochs": 8, "loss": "softmax"},
    "linear-probe-40ep": {**LINEAR, "epochs": 40, "augment": "none"},
    "linear-probe-20ep": {**LINEAR, "epochs": 20},
    "linear-probe-40ep-augmented": {**LINEAR, "epochs": 40, "augment": "random_crop_flip", "resize": 256},
    "vit-in1k-90ep": {"optimizer": "adamw", "betas": (0.9, 0.999), "weight_decay": 0.3, "batch_size": 4096, "lr": 3e-3}
    | {"schedule": "cosine", "warmup_steps": 10_000, "grad_clip": 1.0, "dropout": 0.1, "average": "none", "epochs": 90},
}


@pytest.mark.parametrize("name", VALUES)
def test_shipped_recipe_values_are_those_of_the_text(name: str) -> None:
    recipe = recipe_of(shipped_recipes()[name])
    assert {field: getattr(recipe, field) for field in VALUES[name]} == VALUES[name]


@pytest.mark.parametrize("name", RATES)
def test_shipped_recipe_says_nothing_that_is_ignored_and_all_that_is_needed(name: str) -> None:
    fields = shipped_recipes()[name]
    spec = schema_of(fields).model_validate(fields)
    assert isinstance(spec, RecipeSpec)
    assert fields.keys() & ignored_fields(spec).keys() == set()
    assert missing_fields(spec) == {}


@pytest.mark.parametrize("name", VALUES)
def test_shipped_recipe_of_a_paper_names_its_source(name: str) -> None:
    text = Path(f"workloads/sweeps/recipes/{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert "Pretraining Label Granularity" in text
    assert "[unstated]" in text


def test_cosine_of_the_resnets_is_flat_at_both_ends() -> None:
    recipe = recipe_of(shipped_recipes()["resnet-inat-90ep"])
    rate = LearningRate.of(recipe, Calendar.of(recipe, INAT))
    slope = math.pi / 10_132 / 2 * 1.6  # steepest, in the middle
    assert rate.at(854) - rate.at(855) < slope / 1000
    assert rate.at(5919) - rate.at(5920) == pytest.approx(slope, rel=1e-3)


def test_recipe_page_names_every_field_and_every_shipped_recipe() -> None:
    page = Path("docs/recipes.md").read_text(encoding="utf-8")
    missing = [name for name in RecipeSpec.model_fields if f"`{name}`" not in page and f"`{name}:" not in page]
    assert missing == []
    # Variants that differ in the batch are listed by their ending.
    assert [name for name in RATES if name not in page and f"`-b{name.rpartition('-b')[2]}`" not in page] == []
