"""Checks of a sweep's recipes and models: what trains without an error, but not as the file suggests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

from orchestrator.core.plugins import is_reference
from orchestrator.sweepfile.values import ResolvedSweep

_NORMALIZATION: Final = ("mean", "std")
_LIKE_WITHOUT_DECAY: Final = {"lamb": "adam", "lars": "sgd"}
"""timm gives no trust ratio to parameters without weight decay; what is left of the optimiser then."""


def other_normalizations(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of transfers whose pixels are normalised in another way than in the pretraining.

    A recipe with an optimiser has a mean and a deviation of its own, 0.5 where it does not say: those of image probes,
    fine-tuning, and SGD on cached features. Recipes without an optimiser inherit those of the pretraining.
    """
    alike: dict[tuple[str, str, str], list[str]] = {}
    for transfer in sweep.transfer:
        for block, cell in product(transfer.pretrains, transfer.cells):
            mine, trained = cell.recipe, sweep.pretrain(block).recipe
            if "lr" not in mine or all(mine.get(name) == trained.get(name) for name in _NORMALIZATION):
                continue
            # Another size by itself is often meant.
            names = [*_NORMALIZATION, *(["resize"] if mine.get("resize") != trained.get("resize") else [])]
            alike.setdefault((block, _fields(mine, names), _fields(trained, names)), []).append(transfer.name)
    for (block, mine_told, trained_told), transfers in alike.items():
        pretraining = f"the pretraining {block}" if block else "the pretraining"
        yield (
            f"{', '.join(dict.fromkeys(transfers))}: images are prepared with {mine_told}, those of {pretraining} with "
            f"{trained_told}; a recipe with an optimiser does not inherit these fields: unless this is meant, write "
            f"{trained_told} into the recipe of the transfer"
        )


def missing_trust_ratios(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of recipes whose optimiser has a trust ratio that never takes effect."""
    recipes = [(f"pretrain.{block.name}" if block.name else "pretrain", block.recipe) for block in sweep.pretrains]
    recipes += [(transfer.name, recipe) for transfer in sweep.transfer for recipe in transfer.recipes]
    alike: dict[str, list[str]] = {}
    for place, recipe in recipes:
        if recipe.get("optimizer") in _LIKE_WITHOUT_DECAY and not recipe.get("weight_decay"):
            alike.setdefault(recipe["optimizer"], []).append(place)
    for optimizer, places in alike.items():
        yield (
            f"{', '.join(dict.fromkeys(places))}: `optimizer: {optimizer}` with `weight_decay: 0` has no trust ratio "
            f"and updates as `optimizer: {_LIKE_WITHOUT_DECAY[optimizer]}` does; unless this is meant, write a weight "
            "decay above 0 into the recipe"
        )


def weights_not_loaded(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of models whose name has the tag of pretrained weights, which their backbones do not start from."""
    alike: dict[str, list[str]] = {}
    for block in sweep.pretrains:
        name, is_random = block.model.name, not block.initial and block.initial_from is None
        if is_random and not is_reference(name) and "." in name:
            alike.setdefault(name, []).append(f"pretrain.{block.name}" if block.name else "pretrain")
    for name, places in alike.items():
        architecture, _, tag = name.partition(".")
        yield (
            f"{', '.join(places)}: the name of the model `{name}` loads no weights, and the backbone starts at random; "
            f"to start from them, write `name: {architecture}` and `init: {{timm: {tag}}}`"
        )


def _fields(recipe: Mapping[str, Any], names: list[str]) -> str:
    """Lines of a recipe."""
    lines = [f"`{name}: {json.dumps(recipe.get(name))}`" for name in names]
    return f"{', '.join(lines[:-1])} and {lines[-1]}"
