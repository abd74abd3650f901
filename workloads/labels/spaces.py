"""From the definition of a label space to its label map; pure but for the files that a definition names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.core.errors import UserError
from workloads.labels.coarsen import (
    LEAF_LEVEL,
    binary,
    chosen_classes,
    leaf_labels,
    leaf_level,
    merge,
    merge_randomly,
    modulo,
    one_target_each,
    restrict,
)
from workloads.labels.label_map import ClassLabels, LabelMap, Several
from workloads.labels.plugins import named_labels, plugin_labels
from workloads.labels.random_ids import Draw, RandomLabels
from workloads.labels.setting import ClassTable, Setting
from workloads.labels.taxonomy import level_labels, level_names, taxonomy_labels
from workloads.labels.wordnet import Paths, level_of

__all__ = ["ClassTable", "level_names", "make_label_map"]

Definition = Mapping[str, Any]
_MODIFIERS = frozenset({"base", "classes"})


def make_label_map(
    space: Definition, classes: ClassTable, *, num_train: int, files: Mapping[str, str] | None = None
) -> LabelMap:
    """The label map of a definition.

    Args:
        space: exactly one rule, e.g. ``{"hierarchy": level}``, ``{"random": {"num_classes", "seed"}}`` or
            ``{"modulo": C}``; with ``base``, the definition of the space that the rule starts from, and ``classes``,
            the leaf classes that are part of it.
        classes: row c describes leaf class c.
        num_train: training samples, the most classes that random ids can have; 0 = unknown.
        files: where the files lie that the definition names by digest.

    Raises:
        UserError: the definition is none of these, or does not fit the data set.
    """
    return _make(space, Setting(classes=classes, num_train=num_train, files=files or {}))


def _make(space: Definition, setting: Setting) -> LabelMap:
    rules = space.keys() - _MODIFIERS
    if len(rules) != 1 or not rules <= _RULES.keys():
        raise UserError(f"label space {dict(space)!r} is unknown; it needs exactly one of {', '.join(sorted(_RULES))}")
    (rule,) = rules
    label_map = _RULES[rule](space[rule], space, setting)
    return restrict(label_map, chosen_classes(space["classes"], setting)) if "classes" in space else label_map


def _base(rule: str, space: Definition, setting: Setting) -> ClassLabels:
    if "base" not in space:
        return leaf_labels(setting.classes)
    return one_target_each(_make(space["base"], setting), rule)


def _named(space: Definition, setting: Setting) -> ClassTable | None:
    """The class table, where a rule names leaf classes."""
    return None if "base" in space else setting.classes


def _hierarchy(level: str, _: Definition, setting: Setting) -> LabelMap:
    is_column = level in level_names(setting.classes)
    return (
        leaf_level(setting.classes) if level == LEAF_LEVEL and not is_column else level_labels(level, setting.classes)
    )


def _modulo(divisor: int, space: Definition, setting: Setting) -> LabelMap:
    return modulo(divisor, _base("modulo", space, setting))


def _binary(members: list[object], space: Definition, setting: Setting) -> LabelMap:
    return binary(members, _base("binary", space, setting), _named(space, setting))


def _merge(definition: Definition, space: Definition, setting: Setting) -> LabelMap:
    base = _base("merge", space, setting)
    if "groups" in definition:
        return merge(definition["groups"], definition["others"], base, _named(space, setting))
    return merge_randomly(definition["num_classes"], definition["seed"], base)


def _split(definition: Definition, space: Definition, setting: Setting) -> LabelMap:
    """Each class of the base in ``num`` random parts."""
    return _within(definition, definition["num"], _base("split", space, setting), setting)


def _random(definition: Definition, _: Definition, setting: Setting) -> LabelMap:
    num_classes = definition["num_classes"]
    if "within" in definition:
        return _within(
            definition, num_classes, one_target_each(_make(definition["within"], setting), "random"), setting
        )
    if num_classes < 2 or 0 < setting.num_train < num_classes:
        message = f"random: num_classes {num_classes} is not valid; the data set has {setting.num_train} training "
        raise UserError(f"{message}samples, use 2 to {setting.num_train}")
    draw = Draw(definition.get("draw", Draw.BALANCED))
    return RandomLabels(num_classes=num_classes, seed=definition["seed"], draw=draw)


def _within(definition: Definition, num_ids: int, base: ClassLabels, setting: Setting) -> RandomLabels:
    num_classes = num_ids * base.num_classes
    if num_ids < 2 or 0 < setting.num_train < num_classes:
        message = f"{num_ids} random parts of {base.num_classes} classes are not valid; use 2 or more, and at most one "
        raise UserError(f"{message}per training sample (there are {setting.num_train})")
    names = tuple(f"{name}/{number}" for name in base.names for number in range(num_ids))
    draw = Draw(definition.get("draw", Draw.BALANCED))
    return RandomLabels(
        num_classes=num_classes, seed=definition["seed"], draw=draw, groups=base.targets, num_ids=num_ids, names=names
    )


def _wordnet(definition: Definition, _: Definition, setting: Setting) -> LabelMap:
    wordnet, synsets = setting.wordnet(definition["digest"]), setting.synsets(definition["key"])
    if "contains" in definition:
        is_below = wordnet.below(definition["contains"], synsets)
        if len(set(is_below)) < 2:
            every = "every" if is_below[0] else "no"
            raise UserError(
                f"{every} class has {definition['contains']} above it; choose a synset that tells them apart"
            )
        labels = ClassLabels.of_sets(
            [[int(found)] for found in is_below], [f"not {definition['contains']}", definition["contains"]]
        )
        return replace(labels, several=Several.LARGEST)  # on any path of any of a sample's classes
    paths, seed = Paths(definition.get("paths", Paths.ALL)), definition.get("seed", 0)
    return named_labels(level_of(synsets, definition["level"], wordnet, paths=paths, seed=seed))


def _taxonomy(definition: Definition, _: Definition, setting: Setting) -> LabelMap:
    return taxonomy_labels(definition, setting)


def _plugin(definition: Definition, _: Definition, setting: Setting) -> LabelMap:
    return plugin_labels(definition, setting.classes)


_RULES: Mapping[str, Callable[[Any, Definition, Setting], LabelMap]] = {
    "binary": _binary,
    "hierarchy": _hierarchy,
    "merge": _merge,
    "modulo": _modulo,
    "plugin": _plugin,
    "random": _random,
    "split": _split,
    "taxonomy": _taxonomy,
    "wordnet": _wordnet,
}
