"""The coarser levels of a data set's class table, as seen from a label space: for accuracy per level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workloads.labels.label_map import NO_LABEL, ClassLabels, LabelMap
from workloads.train.evaluate import EvalLevel

_NO_LEVEL: Final = frozenset({"class", "name"})


def eval_levels(label_map: LabelMap, classes: Sequence[Mapping[str, Any]]) -> tuple[EvalLevel, ...]:
    """The columns of a class table up which the predictions of a label space can be folded.

    A column counts if every class of the label space lies in one of its nodes, and if it is coarser than the label
    space: it has fewer nodes, and more than one. ``classes`` are rows in the order of leaf classes.
    """
    if not isinstance(label_map, ClassLabels) or not classes or label_map.table_CM.shape[1] != 1:
        return ()
    targets_C = label_map.table_CM[:, 0].astype(np.int64)
    if len(targets_C) != len(classes):
        return ()
    names = [name for name in classes[0] if name not in _NO_LEVEL]
    folded = ((name, _folded(targets_C, [row.get(name) for row in classes], label_map.num_classes)) for name in names)
    return tuple(EvalLevel(name=name, coarser_K=coarser_K) for name, coarser_K in folded if coarser_K is not None)


def _folded(targets_C: NDArray[np.int64], values: Sequence[Any], num_classes: int) -> NDArray[np.int64] | None:
    """The node of each class of the label space; None if there is none for some, or the column is not coarser."""
    nodes: dict[Any, int] = {}
    coarser_K = np.full(num_classes, NO_LABEL, dtype=np.int64)
    for target, value in zip(targets_C.tolist(), values, strict=True):
        if target == NO_LABEL:
            continue
        if isinstance(value, (dict, list)) or value is None:
            return None
        node = nodes.setdefault(value, len(nodes))
        if coarser_K[target] not in (NO_LABEL, node):
            return None
        coarser_K[target] = node
    return coarser_K if 1 < len(nodes) < num_classes and (coarser_K != NO_LABEL).all() else None
