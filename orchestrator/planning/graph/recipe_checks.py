"""Checks of a sweep's recipes, models, levels and searches: what runs without an error, but not as the file suggests.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain, product
from typing import Any, Final

from orchestrator.core.plugins import is_reference
from orchestrator.storage.dataset_files import node_of
from orchestrator.sweepfile.known_models import shipped_models
from orchestrator.sweepfile.values import Dataset, LabelSpace, Pretrain, ResolvedSweep

_NORMALIZATION: Final = ("mean", "std")
_LIKE_WITHOUT_DECAY: Final = {"lamb": "adam", "lars": "sgd"}
"""timm gives no trust ratio to parameters without weight decay; what is left of the optimiser then."""


def doubtful_settings(sweep: ResolvedSweep) -> Iterator[str]:
    """All warnings of this module."""
    checks = (
        other_normalizations,
        missing_trust_ratios,
        weights_not_loaded,
        selections_on_seen_images,
        unused_fractions,
        unguided_searches,
        repeated_levels,
        unread_settings,
    )
    return chain.from_iterable(check(sweep) for check in checks)


def other_normalizations(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of transfers whose pixels are normalised in another way than in the pretraining.

    A recipe with an optimiser has a mean and a deviation of its own, 0.5 where it does not say: those of image probes,
    fine-tuning, and SGD on cached features. Recipes without an optimiser inherit those of the pretraining.
    """
    alike: dict[tuple[str, str, str], list[str]] = {}
    recipes = {block.name: block.recipe for block in sweep.pretrains}
    for transfer in sweep.transfer:
        for block, cell in product(transfer.pretrains, transfer.cells):
            mine, trained = cell.recipe, recipes[block]
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
    recipes = [(_place_of(block), block.recipe) for block in sweep.pretrains]
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
            alike.setdefault(name, []).append(_place_of(block))
    for name, places in alike.items():
        architecture, _, tag = name.partition(".")
        yield (
            f"{', '.join(places)}: the name of the model `{name}` loads no weights, and the backbone starts at random; "
            f"to start from them, write `name: {architecture}` and `init: {{timm: {tag}}}`"
        )


def selections_on_seen_images(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of searches that choose among backbones by images on which these are pretrained."""
    blocks = {block.name: block for block in sweep.pretrains}
    for transfer in sweep.transfer:
        if transfer.select_on != "train" or not transfer.searches_backbones:
            continue
        target = sweep.labels[transfer.target].dataset
        spaces = {name for block in transfer.pretrains for name in blocks[block].labels if transfer.measures(name)}
        pretrained = {part for name in spaces for part in _images(sweep, sweep.labels[name].dataset)}
        if pretrained & _images(sweep, target):
            yield (
                f"{transfer.name}: its search chooses among backbones by a tenth of the training images of `{target}`, "
                "on which they are pretrained: it favours those that memorise images; to choose by images that none "
                "has seen, search on a target of another data set, or write `select_on: val`, by which the numbers of "
                "the report are optimistic"
            )


def unused_fractions(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of searches for backbones whose transfers use less of the labels than the searches do."""
    for transfer in sweep.transfer:
        if transfer.searches_backbones and (least := min(transfer.fractions, default=1.0)) < 1:
            yield (
                f"{transfer.name}: its search does not read `fractions`: one backbone serves all of them, chosen with "
                f"all labels; for the best one at few labels write `subset: {{fraction: {least:g}}}` in place of "
                "`fractions`, in a transfer of its own"
            )


def unguided_searches(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of searches by Optuna that draw all of their trials at random."""
    for transfer in sweep.transfer:
        search = transfer.search
        if search is None or search.trials is None or "optuna" not in search.algorithm:
            continue
        startup, trials = search.algorithm["optuna"]["startup_trials"], search.trials
        at_once = search.num_at_a_time(trials)
        if startup + at_once > trials:
            fewer = f", or `startup_trials` to {trials - at_once} or less" if trials > at_once else ""
            yield (
                f"{transfer.name}: its search draws all of its {trials} trials at random: Optuna proposes none before "
                f"`startup_trials: {startup}` have ended, and {at_once} run at a time; set `trials` to "
                f"{startup + at_once} or more{fewer}"
            )


def repeated_levels(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of levels with the same classes, for each of which backbones are trained."""
    numbers: dict[Hashable, int] = {}
    known = {
        name: (numbers.setdefault(classes, len(numbers)), json.dumps(space.space, sort_keys=True))
        for name, space in sweep.labels.items()
        if (classes := _classes_of(space, sweep.datasets[space.dataset])) is not None
    }
    alike: dict[str, list[str]] = {}
    for block in sweep.pretrains:
        found: dict[int, dict[str, str]] = {}
        for name in block.labels:
            if name in known:
                number, definition = known[name]
                found.setdefault(number, {}).setdefault(definition, name)  # equal definitions have equal keys
        for same in found.values():
            if len(same) > 1:
                alike.setdefault(", ".join(same.values()), []).append(_place_of(block))
    for names, places in alike.items():
        yield (
            f"{', '.join(places)}: {names} have the same classes: the same backbones are trained once for each, and "
            "comparing them says nothing; pretrain on one of them"
        )


def unread_settings(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of fields that are in a file, or even in a key, and change no result."""
    owners = [(_place_of(block), block.subset_seed, block.subset) for block in sweep.pretrains]
    owners += [
        (transfer.name, transfer.subset_seed, transfer.subset) for transfer in sweep.transfer if not transfer.fractions
    ]
    if places := [place for place, seed, subset in owners if seed and not subset]:
        yield (
            f"{', '.join(places)}: `subset.seed` chooses no samples where `subset` limits nothing: all are trained on; "
            "remove it, or add `fraction`, `max_per_class` or `num_samples`"
        )
    for transfer in sweep.transfer:
        if transfer.search is not None and transfer.search.over == "labels" and transfer.search.seed:
            yield f"{transfer.name}: `search.seed` draws nothing over labels, of which all are tried; remove it"
    for name, cells in _blocks_of_unread_groups(sweep).items():
        yield (
            f"{', '.join(cells)}: `norm_group` is not read by `{name}`, which has no BatchNorm: blocks that differ by "
            "it alone train the same backbones again; keep one of them"
        )


def _blocks_of_unread_groups(sweep: ResolvedSweep) -> Mapping[str, list[str]]:
    """By network without BatchNorm, blocks that are equal but for their norm groups."""
    alike: dict[tuple[str, str], dict[int | None, str]] = {}
    for block in sweep.pretrains:
        model = shipped_models().find(block.model.name)
        if model is None or model.has_batchnorm is not False or any("norm" in name for name in block.model.kwargs):
            continue
        recipe = {name: value for name, value in block.recipe.items() if name != "norm_group"}
        others = (block.model, recipe, block.subset, block.initial, block.initial_from)
        alike.setdefault((model.name, repr(others)), {}).setdefault(block.recipe.get("norm_group"), _place_of(block))
    found: dict[str, list[str]] = {}
    for (name, _), places in alike.items():
        if len(places) > 1:
            found.setdefault(name, []).extend(places.values())
    return found


def _classes_of(space: LabelSpace, dataset: Dataset) -> Hashable | None:
    """What is equal for label spaces that put the same samples together; None for all but levels of a known tree."""
    level = space.space.get("hierarchy")
    if level is None:
        return None
    rest = json.dumps({name: value for name, value in space.space.items() if name != "hierarchy"}, sort_keys=True)
    number = dataset.levels.get(level, dataset.num_classes)
    if number == dataset.num_classes:  # each leaf class is a class of the level
        return (dataset.name, rest)
    if dataset.class_table:
        seen: dict[str | None, int] = {}
        return (dataset.name, rest, *(seen.setdefault(node_of(row, level), len(seen)) for row in dataset.class_table))
    # Levels of generated trees lie within each other.
    return (dataset.name, rest, number) if "branching" in dataset.parameters else None


def _images(sweep: ResolvedSweep, dataset: str) -> set[str]:
    """A data set and those that it mixes, by name."""
    return {dataset, *sweep.datasets[dataset].components}


def _place_of(block: Pretrain) -> str:
    return f"pretrain.{block.name}" if block.name else "pretrain"


def _fields(recipe: Mapping[str, Any], names: list[str]) -> str:
    """Lines of a recipe."""
    lines = [f"`{name}: {json.dumps(recipe.get(name))}`" for name in names]
    return f"{', '.join(lines[:-1])} and {lines[-1]}"
