"""From the definition of a label space to its label map; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.errors import UserError
from workloads.labels.label_map import ClassLabels, LabelMap, RandomLabels

ClassTable = Sequence[Mapping[str, Any]]
_NOT_LEVELS = frozenset({"class", "name"})


def make_label_map(space: Mapping[str, Any], classes: ClassTable, *, num_train: int) -> LabelMap:
    """The label map of ``{"hierarchy": level}``, ``{"random": {"num_classes", "seed"}}`` or ``{"modulo": C}``.

    Args:
        space: the definition; exactly one of the three.
        classes: row c describes leaf class c.
        num_train: training samples, the most classes that random ids can have.

    Raises:
        UserError: the definition is none of the three, or does not fit the data set.
    """
    if len(space) != 1 or not space.keys() <= _SPACES.keys():
        raise UserError(f"label space {dict(space)!r} is unknown; it needs exactly one of {', '.join(sorted(_SPACES))}")
    ((name, definition),) = space.items()
    return _SPACES[name](definition, classes, num_train)


def level_names(classes: ClassTable) -> list[str]:
    """Columns of the class table that are levels of the hierarchy, in its order."""
    return [column for column in (classes[0] if classes else {}) if column not in _NOT_LEVELS]


def _hierarchy(level: str, classes: ClassTable, _: int) -> LabelMap:
    """Target ids count the level's nodes in the order in which the leaf classes meet them."""
    if level not in level_names(classes):
        raise UserError(
            f"the data set has no level {level!r}; its levels are {', '.join(sorted(level_names(classes)))}"
        )
    nodes = [row.get(level) for row in classes]
    if None in nodes:
        raise UserError(f"class {nodes.index(None)} has no value at level {level!r}; complete the class table")
    names = tuple(dict.fromkeys(str(node) for node in nodes))
    if len(names) < 2:
        raise UserError(f"level {level!r} has the single class {names[0]!r}; there is nothing to tell apart")
    target_of = {name: target for target, name in enumerate(names)}
    targets = np.array([target_of[str(node)] for node in nodes], dtype=np.int64)
    return ClassLabels(num_classes=len(names), names=names, targets=targets)


def _modulo(divisor: int, classes: ClassTable, _: int) -> LabelMap:
    """The target is the leaf class modulo the divisor."""
    if not 2 <= divisor <= len(classes):
        raise UserError(
            f"modulo: {divisor} is not valid; the data set has {len(classes)} classes, use 2 to {len(classes)}"
        )
    names = tuple(str(target) for target in range(divisor))
    targets = np.arange(len(classes), dtype=np.int64) % divisor
    return ClassLabels(num_classes=divisor, names=names, targets=targets)


def _random(definition: Mapping[str, int], _: ClassTable, num_train: int) -> LabelMap:
    num_classes = definition["num_classes"]
    if not 2 <= num_classes <= num_train:
        message = f"random: num_classes {num_classes} is not valid; the data set has {num_train} training samples, "
        raise UserError(message + f"use 2 to {num_train}")
    return RandomLabels(num_classes=num_classes, seed=definition["seed"])


_SPACES: Mapping[str, Callable[[Any, ClassTable, int], LabelMap]] = {
    "hierarchy": _hierarchy,
    "modulo": _modulo,
    "random": _random,
}
