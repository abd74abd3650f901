"""Parents of the classes of a label space: the coarser levels of the hierarchy that it comes from.

A level counts where the space refines it: which of its nodes a sample has follows from the sample's class alone.
Which levels there are follows from the definition, the class table and the files, never from a sweep's other entries:
columns of the class table, columns of a taxonomy's own table, and for WordNet every further step upwards.

Parts of the artifact of a ``labels`` job: ``parents.json`` with ``levels``, a list of ``name`` and ``class_names``, and
for the level at position i the array ``parents/<i>.npy``. Artifacts of earlier versions have neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, pairwise, repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from workloads.data.arrays import from_npy_bytes, npy_bytes
from workloads.labels.label_map import NO_LABEL, ClassLabels, LabelMap
from workloads.labels.plugins import named_labels
from workloads.labels.setting import ClassTable, Setting
from workloads.labels.taxonomy import level_names, node_of, taxonomy_rows
from workloads.labels.wordnet import Paths, walked_levels

PARENTS_PART: Final = "parents.json"

Definition = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoarserLevel:
    """A level above a label space of K classes; it has fewer classes than that, and at least two.

    Its ids and names are those of the level's own label space, where that is made of the same leaf classes.
    """

    name: str
    """A column, or ``wordnet<k>``."""
    class_names: tuple[str, ...]
    """Of its classes, by id."""
    parents_KP: NDArray[np.int64]
    """Ids of the parents of each class, ascending, then ``NO_LABEL``; one column unless some class has several."""

    @property
    def is_tree(self) -> bool:
        """Whether each class has one parent."""
        return int(self.parents_KP.shape[1]) == 1


def find_parents(label_map: LabelMap, space: Definition, setting: Setting) -> tuple[CoarserLevel, ...]:
    """The levels above the label map of a definition: steps up WordNet first, then columns in their order.

    There are none for random ids and for labels by sample.

    Raises:
        UserError: a file that the definition names is missing.
        BadDataError: it is not what it should be.
    """
    if not isinstance(label_map, ClassLabels) or len(label_map.targets) != len(setting.classes):
        return ()
    source = _source(space)
    found: dict[str, CoarserLevel] = {}
    for level in (*_wordnet_levels(label_map, space, setting), *_column_levels(label_map, source, setting)):
        found.setdefault(level.name, level)
    return tuple(found.values())


def write_parents(writer: ArtifactWriter, levels: Sequence[CoarserLevel]) -> None:
    """Add the parts that `read_parents` reads."""
    listed = [{"name": level.name, "class_names": level.class_names} for level in levels]
    writer.add(PARENTS_PART, json.dumps({"levels": listed}, indent=1, sort_keys=True).encode())
    for position, level in enumerate(levels):
        writer.add(_part(position), npy_bytes(level.parents_KP))


def read_parents(store: ObjectStore, labels_key: str) -> tuple[CoarserLevel, ...] | None:
    """The levels of a committed label map; None if it is of a version that did not record them.

    Raises:
        NotFoundError: it is not committed.
    """
    record = read_record(store, labels_key)
    if PARENTS_PART not in record.parts:
        return None
    listed = json.loads(read_part(store, record, PARENTS_PART))["levels"]
    return tuple(
        CoarserLevel(
            name=level["name"],
            class_names=tuple(level["class_names"]),
            parents_KP=from_npy_bytes(read_part(store, record, _part(position))),
        )
        for position, level in enumerate(listed)
    )


def _part(position: int) -> str:
    return f"parents/{position}.npy"


def _source(space: Definition) -> Definition:
    """The definition that the classes come from first: the innermost base."""
    while "base" in space:
        space = space["base"]
    return space


# --------------------------------------------------------------------------------------------- columns of a table


def _column_levels(labels: ClassLabels, source: Definition, setting: Setting) -> Iterator[CoarserLevel]:
    own: ClassTable = taxonomy_rows(source["taxonomy"], setting) if "taxonomy" in source else ()
    for rows in (own, setting.classes):
        for column in level_names(rows):
            if any(isinstance(row.get(column), (dict, list)) for row in rows):
                continue
            found = (node_of(row, column) for row in rows)
            nodes = named_labels([[] if node is None else [node] for node in found])
            level = _level(column, nodes.names, _inherited(labels, nodes))
            if level is not None:
                yield level


def _inherited(labels: ClassLabels, coarser: ClassLabels) -> NDArray[np.int64] | None:
    """Parents (K, P) where all leaf classes of a class have the same ones; None if they differ or some has none."""
    targets_CM, above_CP = labels.table_CM, coarser.table_CM.astype(np.int64)
    parents_KP = np.full((labels.num_classes, above_CP.shape[1]), NO_LABEL, dtype=np.int64)
    leaves, columns = np.nonzero(targets_CM != NO_LABEL)
    classes = targets_CM[leaves, columns]
    parents_KP[classes] = above_CP[leaves]
    is_function = np.array_equal(parents_KP[classes], above_CP[leaves])
    return parents_KP if is_function and (parents_KP[:, 0] != NO_LABEL).all() else None


# --------------------------------------------------------------------------------------------------------- WordNet


def _wordnet_levels(labels: ClassLabels, space: Definition, setting: Setting) -> Iterator[CoarserLevel]:
    rule = _source(space).get("wordnet", {})
    if "level" not in rule:
        return
    wordnet, synsets = setting.wordnet(rule["digest"]), setting.synsets(rule["key"])
    walk = partial(walked_levels, wordnet=wordnet, paths=Paths(rule.get("paths", Paths.ALL)), seed=rule.get("seed", 0))
    # Without a base the classes are synsets: the walk goes on from each, also where leaf classes have several.
    on_from_classes = repeat(None) if "base" in space else islice(walk(labels.names), 1, None)
    of_leaves = islice(pairwise(walk(synsets)), rule["level"], None)
    for level, (below, ends), on in zip(count(rule["level"] + 1), of_leaves, on_from_classes, strict=False):
        if ends == below:  # nothing is above any of them
            return
        nodes = named_labels(ends)
        parents_KP = _inherited(labels, nodes) if on is None else _numbered(on, nodes.names)
        found = _level(f"wordnet{level}", nodes.names, parents_KP)
        if found is not None:
            yield found


def _numbered(sets: Sequence[Sequence[str]], names: Sequence[str]) -> NDArray[np.int64]:
    id_of = {name: number for number, name in enumerate(names)}
    rows = [sorted(id_of[name] for name in members) for members in sets]
    return ClassLabels.of_sets(rows, names).targets.reshape(len(rows), -1)


def _level(name: str, names: Sequence[str], parents_KP: NDArray[np.int64] | None) -> CoarserLevel | None:
    """The level without nodes that no class has (those of left-out leaf classes); None if it is not coarser."""
    if parents_KP is None:
        return None
    used = np.setdiff1d(parents_KP, [NO_LABEL])
    if not 1 < len(used) < len(parents_KP):
        return None
    width = int(np.count_nonzero(parents_KP != NO_LABEL, axis=1).max())
    renumbered = np.searchsorted(used, parents_KP[:, :width]).astype(np.int64)
    renumbered[parents_KP[:, :width] == NO_LABEL] = NO_LABEL
    return CoarserLevel(name=name, class_names=tuple(names[node] for node in used.tolist()), parents_KP=renumbered)
