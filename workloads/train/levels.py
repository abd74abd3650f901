"""The coarser levels of the hierarchy that a label space comes from: for accuracy per level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workloads.labels.label_map import ClassLabels, LabelMap
from workloads.labels.parents import CoarserLevel, find_parents
from workloads.labels.setting import Setting
from workloads.train.evaluate import EvalLevel


def eval_levels(
    label_map: LabelMap, classes: Sequence[Mapping[str, Any]], parents: Sequence[CoarserLevel] | None
) -> tuple[EvalLevel, ...]:
    """The levels up which the predictions of a label space can be folded: those in which every class has one parent.

    None for label spaces in which a leaf class has several targets.

    Args:
        label_map: the label space.
        classes: rows in the order of leaf classes.
        parents: what the artifact of the label map says; None if it is of a version that did not record parents: then
            levels are the columns of the class table.
    """
    if not isinstance(label_map, ClassLabels) or label_map.table_CM.shape[1] != 1:
        return ()
    if parents is None:
        parents = find_parents(label_map, {}, Setting(classes=classes, num_train=0))
    return tuple(EvalLevel(name=level.name, coarser_K=level.parents_KP[:, 0]) for level in parents if level.is_tree)
