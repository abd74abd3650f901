"""From the definition of a label space to its label map; pure except for the files that a definition names.

Some spaces are made of the classes of another one: merged, modulo a number, split in two, or parts of data sets.
The base is any space in which a class of the data set has at most one target; by default its leaf classes.

A new rule is an entry of ``_RULES`` here, a field in ``orchestrator.sweepfile.labels``, which says how a sweep writes
it, and a short name in ``_SHORT`` of ``orchestrator.planning.graph.identity``. Other packages bring rules without that:
an entry point of the group ``pretraining_orchestrator.label_spaces`` names a function ``(classes, arguments) ->
targets``. ``classes`` is the class table, ``arguments`` is what the sweep gives (a mapping, or an instance of the
pydantic model that annotates it). The result holds for each leaf class the name of its target, a list of several, or
None for a class that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.core.plugins import LABEL_SPACES
from orchestrator.storage.dataset_files import LEAF_LEVEL
from workloads.data.split_targets import NO_LABEL
from workloads.labels.inputs import ClassTable, LabelInputs, class_numbers, named_labels
from workloads.labels.label_map import ClassLabels, Draw, LabelMap, RandomLabels, Several
from workloads.labels.taxonomy import level_labels, level_names, taxonomy_labels
from workloads.labels.wordnet import Paths, level_of
from workloads.runtime.plugin_arguments import open_plugin, takes_arguments
from workloads.runtime.streams import Purpose, Stage, permutation, seed_sequence

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
    return _make(space, LabelInputs(classes=classes, num_train=num_train, files=files or {}))


def _make(space: Definition, inputs: LabelInputs) -> LabelMap:
    rules = space.keys() - _MODIFIERS
    if len(rules) != 1 or not rules <= _RULES.keys():
        raise UserError(f"label space {dict(space)!r} is unknown; it needs exactly one of {', '.join(sorted(_RULES))}")
    (rule,) = rules
    label_map = _RULES[rule](space[rule], space, inputs)
    if "classes" in space:
        label_map = restrict(label_map, chosen_classes(space["classes"], inputs))
    if not label_map.num_classes:
        raise UserError("no class is left of the label space: no leaf class that is part of it has a target")
    return label_map


def _base(rule: str, space: Definition, inputs: LabelInputs) -> ClassLabels:
    if "base" not in space:
        return leaf_labels(inputs.classes)
    return one_target_each(_make(space["base"], inputs), rule)


def _named(space: Definition, inputs: LabelInputs) -> ClassTable | None:
    """The class table, where a rule names leaf classes."""
    return None if "base" in space else inputs.classes


def _hierarchy(level: str, _: Definition, inputs: LabelInputs) -> LabelMap:
    is_column = level in level_names(inputs.classes)
    return leaf_level(inputs.classes) if level == LEAF_LEVEL and not is_column else level_labels(level, inputs.classes)


def _modulo(divisor: int, space: Definition, inputs: LabelInputs) -> LabelMap:
    return modulo(divisor, _base("modulo", space, inputs))


def _binary(members: list[object], space: Definition, inputs: LabelInputs) -> LabelMap:
    return binary(members, _base("binary", space, inputs), _named(space, inputs))


def _merge(definition: Definition, space: Definition, inputs: LabelInputs) -> LabelMap:
    base = _base("merge", space, inputs)
    if "groups" in definition:
        return merge(definition["groups"], definition["others"], base, _named(space, inputs))
    return merge_randomly(definition["num_classes"], definition["seed"], base)


def _split(definition: Definition, space: Definition, inputs: LabelInputs) -> LabelMap:
    """Each class of the base in ``num`` random parts."""
    return _within(definition, definition["num"], _base("split", space, inputs), inputs)


def _random(definition: Definition, _: Definition, inputs: LabelInputs) -> LabelMap:
    num_classes = definition["num_classes"]
    if "within" in definition:
        return _within(definition, num_classes, one_target_each(_make(definition["within"], inputs), "random"), inputs)
    if num_classes < 2 or 0 < inputs.num_train < num_classes:
        message = f"random: num_classes {num_classes} is not valid; the data set has {inputs.num_train} training "
        raise UserError(f"{message}samples, use 2 to {inputs.num_train}")
    draw = Draw(definition.get("draw", Draw.BALANCED))
    return RandomLabels(num_classes=num_classes, seed=definition["seed"], draw=draw)


def _within(definition: Definition, num_ids: int, base: ClassLabels, inputs: LabelInputs) -> RandomLabels:
    num_classes = num_ids * base.num_classes
    if num_ids < 2 or 0 < inputs.num_train < num_classes:
        message = f"{num_ids} random parts of {base.num_classes} classes are not valid; use 2 or more, and at most one "
        raise UserError(f"{message}per training sample (there are {inputs.num_train})")
    names = tuple(f"{name}/{number}" for name in base.names for number in range(num_ids))
    draw = Draw(definition.get("draw", Draw.BALANCED))
    return RandomLabels(
        num_classes=num_classes, seed=definition["seed"], draw=draw, groups=base.targets, num_ids=num_ids, names=names
    )


def _wordnet(definition: Definition, _: Definition, inputs: LabelInputs) -> LabelMap:
    wordnet, synsets = inputs.wordnet(definition["digest"]), inputs.synsets(definition["key"])
    if "contains" in definition:
        is_below = wordnet.below(definition["contains"], synsets)
        if len(set(is_below)) < 2:
            every = "every" if is_below[0] else "no"
            raise UserError(
                f"{every} class has {definition['contains']} above it; choose a synset above some of the classes"
            )
        labels = ClassLabels.of_sets(
            [[int(found)] for found in is_below], [f"not {definition['contains']}", definition["contains"]]
        )
        return replace(labels, several=Several.LARGEST)  # on any path of any of a sample's classes
    paths, seed = Paths(definition.get("paths", Paths.ALL)), definition.get("seed", 0)
    return named_labels(level_of(synsets, definition["level"], wordnet, paths=paths, seed=seed))


def _taxonomy(definition: Definition, _: Definition, inputs: LabelInputs) -> LabelMap:
    return taxonomy_labels(definition, inputs)


def _plugin(definition: Definition, _: Definition, inputs: LabelInputs) -> LabelMap:
    """The space of ``{"name": "<distribution>==<version>:<entry point>", "arguments": {...}}``."""
    make, arguments = open_plugin(definition["name"], LABEL_SPACES, definition["arguments"])
    try:
        given = (arguments,) if takes_arguments(make, LABEL_SPACES) else ()
        found = make(list(inputs.classes), *given)
    except Exception as error:
        raise UserError(f"the label space {definition['name']} failed: {error!r}") from error
    return _plugin_labels(found, definition["name"], len(inputs.classes))


def _plugin_labels(found: Any, name: str, num_classes: int) -> ClassLabels:  # noqa: ANN401 - foreign values
    if not isinstance(found, Sequence) or len(found) != num_classes:
        raise UserError(f"the label space {name} gave {type(found).__name__} in place of {num_classes} targets")
    rows = [[] if row is None else list(row) if isinstance(row, (list, tuple)) else [row] for row in found]
    if not all(isinstance(target, str) for row in rows for target in row):
        raise UserError(f"the label space {name} gave targets that are not names; use text, lists of text or None")
    return named_labels(rows)


_RULES: Mapping[str, Callable[[Any, Definition, LabelInputs], LabelMap]] = {
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


def leaf_labels(classes: ClassTable) -> ClassLabels:
    """Every leaf class as its own target."""
    names = tuple(str(row.get("name", row["class"])) for row in classes)
    return ClassLabels(num_classes=len(names), names=names, targets=np.arange(len(names)))


def leaf_level(classes: ClassTable) -> ClassLabels:
    """The level `LEAF_LEVEL` of any data set. Raises ``UserError``: there is a single class."""
    if len(classes) < 2:
        raise UserError(f"level {LEAF_LEVEL!r} has a single class; there is nothing to tell apart")
    return leaf_labels(classes)


def modulo(divisor: int, base: ClassLabels) -> ClassLabels:
    """The target is the class modulo the divisor."""
    if not 2 <= divisor <= base.num_classes:
        message = f"modulo: {divisor} is not valid; the data set has {base.num_classes} classes, "
        raise UserError(message + f"use 2 to {base.num_classes}")
    names = tuple(str(target) for target in range(divisor))
    return _mapped(base, np.arange(base.num_classes) % divisor, names)


def merge_randomly(num_classes: int, seed: int, base: ClassLabels) -> ClassLabels:
    """Classes merged at random into ``num_classes`` groups whose sizes differ by one class at most."""
    if not 2 <= num_classes <= base.num_classes:
        message = f"merge: num_classes {num_classes} is not valid; there are {base.num_classes} classes to merge, "
        raise UserError(message + f"use 2 to {base.num_classes}")
    stream = seed_sequence(seed, Stage.LABELS, Purpose.MERGED_CLASSES)
    targets = permutation(stream, base.num_classes) % num_classes
    return _mapped(base, targets, tuple(f"merged{target}" for target in range(num_classes)))


def merge(
    groups: Sequence[Mapping[str, Any]], others: str, base: ClassLabels, classes: ClassTable | None
) -> ClassLabels:
    """Classes merged as listed.

    Args:
        groups: ``{"name": ..., "classes": [...]}``, in the order of their targets.
        base: the space whose classes are merged.
        others: what becomes of unlisted classes: ``keep`` (each its own target) or ``drop`` (not part of the data).
        classes: the class table, if the base is its leaf classes.

    Raises:
        UserError: a class is unknown or listed twice, or a single class is left.
    """
    targets = np.full(base.num_classes, NO_LABEL)
    for target, group in enumerate(groups):
        members = class_numbers(group["classes"], base.names, classes)
        taken = [member for member in members if targets[member] != NO_LABEL]
        if taken or len(set(members)) < len(members):
            twice = base.names[taken[0] if taken else members[0]]
            raise UserError(f"merge: class {twice!r} is listed twice; a class belongs to one group")
        targets[members] = target
    names = [str(group["name"]) for group in groups]
    if others == "keep":
        rest = np.flatnonzero(targets == NO_LABEL)
        targets[rest] = len(names) + np.arange(len(rest))
        names += [base.names[number] for number in rest.tolist()]
    if len(names) < 2:
        raise UserError("merge: a single class is left; list two groups, or keep the others")
    return _mapped(base, targets, tuple(names))


def binary(members: Sequence[object], base: ClassLabels, classes: ClassTable | None) -> ClassLabels:
    """1 for samples of a listed class, 0 for all others. Raises ``UserError``: unknown classes, or no others."""
    chosen = class_numbers(members, base.names, classes)
    if not 0 < len(set(chosen)) < base.num_classes:
        raise UserError(f"binary: {len(set(chosen))} of {base.num_classes} classes are listed; list some, not all")
    listed = _mapped(base, np.isin(np.arange(base.num_classes), chosen).astype(np.int64), ("others", "listed"))
    return replace(listed, several=Several.LARGEST)


def one_target_each(base: LabelMap, rule: str) -> ClassLabels:
    """A space as the base of another one. Raises ``UserError`` if classes have several targets, or it is random."""
    if not isinstance(base, ClassLabels) or base.targets.ndim > 1:
        raise UserError(f"{rule} needs a base in which each class has one target: a level, modulo, merge or binary")
    return base


# --------------------------------------------------------------------------------------------- parts of a data set


def chosen_classes(definition: Mapping[str, Any], inputs: LabelInputs) -> NDArray[np.bool_]:
    """Which leaf classes ``{"names"}``, ``{"under"}`` or ``{"num", "seed"}`` keeps.

    Raises:
        UserError: a class or synset is unknown, or nothing is kept.
    """
    num_classes = len(inputs.classes)
    is_kept = np.zeros(num_classes, dtype=np.bool_)
    if "names" in definition:
        names = [str(row.get("name", row["class"])) for row in inputs.classes]
        is_kept[class_numbers(definition["names"], names, inputs.classes)] = True
    elif "under" in definition:
        synsets = inputs.synsets(definition["key"])
        is_kept[:] = inputs.wordnet(definition["digest"]).below(definition["under"], synsets)
    else:
        number = definition["num"]
        if not 1 <= number <= num_classes:
            raise UserError(f"classes: num {number} is not valid; the data set has {num_classes} classes")
        stream = seed_sequence(definition["seed"], Stage.LABELS, Purpose.CHOSEN_CLASSES)
        is_kept[np.argsort(permutation(stream, num_classes))[:number]] = True  # nested: more classes hold fewer
    if not is_kept.any():
        raise UserError(f"no class of the data set is kept by classes: {dict(definition)}")
    return is_kept


def restrict(label_map: LabelMap, is_kept: NDArray[np.bool_]) -> LabelMap:
    """The same space without the targets of the other leaf classes; targets that nobody has any more are dropped.

    Raises:
        UserError: a single target is left.
    """
    if isinstance(label_map, RandomLabels):
        return _restrict_random(label_map, is_kept)
    if not isinstance(label_map, ClassLabels):
        raise UserError("classes: cannot be taken of labels that are stored by sample")
    table = label_map.table_CM.astype(np.int64)
    table[~is_kept] = NO_LABEL
    left = np.setdiff1d(table, [NO_LABEL])
    if len(left) == 1:
        raise UserError(f"a single class is left of the label space ({label_map.names[left[0]]!r}): nothing to learn")
    renumbered = np.full(label_map.num_classes + 1, NO_LABEL)  # the last one is NO_LABEL's
    renumbered[left] = np.arange(len(left))
    sets = [[target for target in row if target != NO_LABEL] for row in renumbered[table].tolist()]
    restricted = ClassLabels.of_sets(sets, [label_map.names[target] for target in left.tolist()])
    return replace(restricted, several=label_map.several)


def _restrict_random(label_map: RandomLabels, is_kept: NDArray[np.bool_]) -> RandomLabels:
    if label_map.groups is None:
        groups = np.where(is_kept, 0, NO_LABEL)
        return replace(label_map, groups=groups, num_ids=label_map.num_classes, names=label_map.class_names)
    used = np.unique(label_map.groups[is_kept & (label_map.groups != NO_LABEL)])
    renumbered = np.full(int(label_map.groups.max()) + 2, NO_LABEL)
    renumbered[used] = np.arange(len(used))
    k = label_map.num_ids
    names = tuple(label_map.class_names[group * k + number] for group in used.tolist() for number in range(k))
    groups = np.where(is_kept, renumbered[label_map.groups], NO_LABEL)
    return replace(label_map, num_classes=len(names), groups=groups, names=names)


def _mapped(base: ClassLabels, targets: NDArray[np.int64], names: tuple[str, ...]) -> ClassLabels:
    """The base's classes replaced by other targets."""
    padded = np.append(targets, NO_LABEL)
    return ClassLabels(num_classes=len(names), names=names, targets=padded[base.targets])
