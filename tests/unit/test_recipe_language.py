"""Recipes in a sweep.yaml: what is resolved, dropped, refused and left out of identities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import SpecError
from orchestrator.core.hyper_parameters import (
    AVERAGES,
    BUILT_IN_AUGMENTATIONS,
    LOSSES,
    OPTIMIZERS,
    PARAMETERS,
    RELATIONS,
    SCHEDULES,
)
from orchestrator.core.plugins import OBJECTIVES, InstalledPlugins
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.plugin_uses import PluginSources, PluginUses
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import (
    KnnSpec,
    RecipeResolver,
    RecipeSpec,
    check_labels_of,
    check_recipe_on,
    ignored_fields,
    num_steps,
)
from orchestrator.sweepfile.values import Dataset, LabelSpace
from workloads.data.augment import Augment
from workloads.data.decode import DecoderName, Interpolation
from workloads.data.order import total_steps
from workloads.runtime.enums import HeadInit, Precision
from workloads.train import objective, optim, schedule
from workloads.train.learner import AverageName
from workloads.train.recipe import Recipe

BOOK: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"epochs": 4, "batch_size": 32, "lr": 0.1, "momentum": 0.8, "nesterov": True, "warmup_steps": 10},
    "plain": {"epochs": 9, "batch_size": 32, "lr": 0.1},
    "dropped": {"epochs": 9, "batch_size": 32, "lr": 0.1, "dropout": 0.1, "norm_group": 8},
    "steps": {"epochs": 9, "batch_size": 32, "lr": 0.1, "schedule": "step", "milestones": [3, 6], "decay_rate": 0.2},
}
ALWAYS = {name for name, one in PARAMETERS.items() if one.always}
MINIMAL: Mapping[str, Any] = {"epochs": 4, "batch_size": 32, "lr": 0.1}
PLUGINS = PluginSources(installed={OBJECTIVES: {"focal": "focal-losses==1.2:focal"}})


def resolve(text: str, protocol: str = "") -> Mapping[str, Any]:
    tree = parse_tree(text, "sweep.yaml")
    complaints = Complaints(tree)
    resolved = RecipeResolver(BOOK, PluginUses(PLUGINS, complaints), tree, complaints).resolve(
        ("recipe",), tree.value["recipe"], protocol
    )
    complaints.raise_any()
    return resolved


def test_recipe_minimal_resolves_to_the_fields_of_every_identity_alone() -> None:
    assert resolve("recipe: {epochs: 4, batch_size: 32, lr: 0.1}").keys() == {
        name for name, one in PARAMETERS.items() if one.always
    }


def test_recipe_new_field_at_its_default_changes_no_identity() -> None:
    plain = resolve("recipe: {epochs: 4, batch_size: 32, lr: 0.1}")
    assert resolve("recipe: {epochs: 4, batch_size: 32, lr: 0.1, loss: softmax, dropout: 0, tf32: false}") == plain
    assert resolve("recipe: {epochs: 4, batch_size: 32, lr: 0.1, dropout: 0.1}") == {**plain, "dropout": 0.1}


@pytest.mark.parametrize("weights", [None, [1.0, 2.0]])
def test_recipe_data_groups_are_refused_on_a_mixture_with_weights(weights: list[float] | None) -> None:
    dataset = Dataset(
        name="both",
        readable="mixture2",
        parameters={"mixture": {"weights": weights}},
        levels={},
        num_classes=2,
        num_train=640,
    )
    complaints = Complaints(parse_tree("recipe: {data_groups: 2}", "sweep.yaml"))
    check_recipe_on(("recipe",), {"epochs": 1, "batch_size": 64, "data_groups": 2}, dataset, complaints)
    if weights is None:
        complaints.raise_any()
        return
    with pytest.raises(SpecError, match=r"recipe\.data_groups: 'both' is a mixture with weights"):
        complaints.raise_any()


def test_recipe_schema_and_data_plane_have_the_same_fields_and_defaults() -> None:
    assert set(RecipeSpec.model_fields) == {field.name for field in fields(Recipe)}
    spec = RecipeSpec.model_validate(MINIMAL)
    assert Recipe.from_mapping(spec.resolved()) == Recipe.from_mapping(spec.model_dump())


def test_recipe_every_registered_name_has_a_builder() -> None:
    assert optim.OPTIMIZER_BUILDERS.keys() == OPTIMIZERS.keys()
    assert schedule.SCHEDULE_FUNCTIONS.keys() == SCHEDULES.keys()
    assert objective.OBJECTIVES.keys() == set(LOSSES)
    assert (set(AverageName), set(Augment)) == (set(AVERAGES), set(BUILT_IN_AUGMENTATIONS))
    kinds = {"precision": Precision, "head_init": HeadInit, "decoder": DecoderName, "interpolation": Interpolation}
    assert {name: set(kind) for name, kind in kinds.items()} == {name: {*PARAMETERS[name].options} for name in kinds}


def test_recipe_relations_of_the_language_name_earlier_fields() -> None:
    order = list(PARAMETERS)
    for relation in RELATIONS:
        assert not relation.refusal or all(order.index(one) < order.index(relation.name) for one in relation.others)


CHANGED: dict[str, Any] = {
    "optimizer": "lamb",
    "eps": 1e-7,
    "weight_decay_on": "no_bias_norm",
    "schedule": "exponential",
    "decay_rate": 0.97,
    "decay_every_epochs": 0.5,
    "lr_every": "half_epoch",
    "warmup_steps": 3,
    "loss": "sigmoid",
    "head_bias": -10.0,
    "head_init": "zeros",
    "mixup": 0.2,
    "average": "ema",
    "freeze": ["backbone.stem.*"],
    "on_numerics": {"rewind": 3},
    "precision": "bf16",
    "augment": "random_resized_crop_flip",
    "crop_scale": [0.2, 1.0],
    "milestones": [1.0, 2.0],
    "tf32": True,
    "resize": 256,
}


@pytest.mark.parametrize("name", CHANGED)
def test_recipe_field_changed_reaches_the_data_plane(name: str) -> None:
    schedule = {"schedule": "step"} if name == "milestones" else {}
    spec = RecipeSpec.model_validate({**MINIMAL, **schedule, name: CHANGED[name]})
    plain = Recipe.from_mapping(RecipeSpec.model_validate(MINIMAL).resolved())
    assert getattr(Recipe.from_mapping(spec.resolved()), name) != getattr(plain, name)


def test_recipe_base_whose_optimizer_is_overridden_loses_what_that_ignores() -> None:
    resolved = resolve("recipe: {base: sgd, optimizer: adamw}")
    assert (resolved["momentum"], resolved["nesterov"], resolved["lr"]) == (0.9, False, 0.1)
    assert resolve("recipe: {base: steps, schedule: cosine}").keys() == {
        name for name, one in PARAMETERS.items() if one.always
    }


def test_recipe_warmup_that_overrides_a_base_displaces_the_other_kind() -> None:
    resolved = resolve("recipe: {base: sgd, warmup_epochs: 1}")
    assert resolved["warmup_epochs"] == 1.0
    assert "warmup_steps" not in resolved


@pytest.mark.parametrize("given", ["freeze: backbone", "drop_path: 0.1", "norm_group: 8"])
def test_recipe_field_of_a_network_that_trains_serves_fine_tuning(given: str) -> None:
    text = f"recipe: {{epochs: 4, batch_size: 32, lr: 0.1, {given}}}"
    assert resolve(text, "finetune") == resolve(text)


def test_recipe_base_of_a_network_that_trains_serves_a_probe_without_what_that_ignores() -> None:
    plain = resolve("recipe: {base: plain, lr: 0.2}", "probe")
    assert resolve("recipe: {base: dropped, lr: 0.2}", "probe") == {**plain, "dropout": 0.1}


def test_recipe_dropout_is_a_probe_s_own_on_images_and_left_out_on_cached_features() -> None:
    text = "recipe: {epochs: 4, batch_size: 32, lr: 0.1, dropout: 0.1}"
    assert resolve(text, "probe")["dropout"] == 0.1
    of_base = "recipe: {base: dropped, features: cached, solver: sgd}"
    assert "dropout" not in resolve(of_base, "probe")


def test_recipe_installed_objective_enters_the_identity_with_its_version() -> None:
    resolved = resolve("recipe: {epochs: 4, batch_size: 32, lr: 0.1, loss: focal}")
    assert resolved["loss"] == "focal-losses==1.2:focal"


def test_plugins_of_a_group_are_named_with_distribution_and_version() -> None:
    scripts = InstalledPlugins("console_scripts")
    name, _, entry = scripts["pytest"].partition("==")
    assert name == "pytest"
    assert entry == f"{pytest.__version__}:pytest"
    assert len(scripts) == len(list(scripts))
    assert "pytest" not in InstalledPlugins("no_such_group")


def dataset(num_train: int, *, multi_label: bool = False) -> Dataset:
    return Dataset(
        name="tree",
        readable="tree",
        parameters={},
        levels={"depth1": 2},
        num_classes=8,
        num_train=num_train,
        multi_label=multi_label,
    )


def space(num_classes: int, rule: Mapping[str, Any]) -> LabelSpace:
    return LabelSpace(
        name="levels/depth1", entry="levels", level="depth1", dataset="tree", space=rule, num_classes=num_classes
    )


@pytest.mark.parametrize(
    ("num_classes", "rule", "multi_label", "loss", "message"),
    [
        (1, {"hierarchy": "depth1"}, False, "softmax", "has a single class: there is nothing to tell apart"),
        (2, {"hierarchy": "depth1"}, True, "softmax", "recipe.loss: samples of 'levels/depth1' have several classes"),
        (2, {"hierarchy": "depth1"}, True, "sigmoid", ""),
        (2, {"hierarchy": "depth1"}, True, "votes", ""),
        (1, {"hierarchy": "depth1"}, False, "votes", "has a single class"),
        (2, {"modulo": 2}, True, "softmax", "recipe.loss: samples of 'levels/depth1' have several classes"),
        (2, {"wordnet": {"level": 1, "paths": "first"}}, True, "softmax", "have several classes"),
        (2, {"wordnet": {"contains": "n00004258"}}, True, "softmax", ""),
        (2, {"binary": [1]}, True, "softmax", ""),
        (2, {"random": {"num_classes": 2}}, True, "softmax", ""),
        (2, {"hierarchy": "depth1"}, False, "softmax", ""),
    ],
)
def test_label_space_that_a_recipe_cannot_learn_is_refused_at_plan_time(
    num_classes: int, rule: Mapping[str, Any], multi_label: bool, loss: str, message: str
) -> None:
    complaints = Complaints(parse_tree("recipe: {}", "sweep.yaml"))
    spec = KnnSpec() if loss == "votes" else RecipeSpec.model_validate({**MINIMAL, "loss": loss})
    recipe = spec.resolved()
    check_labels_of(("recipe",), recipe, space(num_classes, rule), dataset(64, multi_label=multi_label), complaints)
    if not message:
        complaints.raise_any()
        return
    with pytest.raises(SpecError, match=message):
        complaints.raise_any()


@given(st.floats(0.01, 300).map(lambda epochs: round(epochs, 2)), st.integers(1, 2**40), st.integers(1, 2**20))
def test_steps_at_plan_time_are_those_of_the_data_plane(epochs: float, num_samples: int, batch_size: int) -> None:
    assert num_steps(epochs, num_samples, batch_size) == total_steps(epochs, num_samples, batch_size)


def test_ignored_fields_are_fields() -> None:
    for changes in ({}, {"optimizer": "adam", "schedule": "constant"}, {"augment": "random_resized_crop", "mixup": 1}):
        spec = RecipeSpec.model_validate({**MINIMAL, **changes})
        assert ignored_fields(spec).keys() <= set(RecipeSpec.model_fields)
