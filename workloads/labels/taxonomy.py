"""Levels of a taxonomy, and the parents of the classes of a label space on them.

Levels are columns of a class table (the data set's own, a taxonomy's file, or the parts of folder names), and for
WordNet every further step upwards. Invariants:

- The levels follow from the definition, the class table and the files, never from a sweep's other entries.
- A level counts if the space refines it: a sample's node at the level follows only from the sample's class.
- Parts of the artifact of a ``labels`` job: ``parents.json`` with ``levels``, a list of ``name`` and ``class_names``,
  and for the level at position i the array ``parents/<i>.npy``. Artifacts of earlier versions have neither.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain, count, islice, pairwise, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError, NotFoundError, UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from orchestrator.storage.dataset_files import NOT_LEVELS, TAXONOMIC_CLASS, level_problem, node_of
from orchestrator.storage.files import read_regular
from orchestrator.storage.open import check_allowed, open_store, split_object_uri
from workloads.data.split_targets import NO_LABEL
from workloads.labels.inputs import TABLE_FILE, ClassTable, LabelInputs, named_labels
from workloads.labels.label_map import ClassLabels, LabelMap
from workloads.labels.wordnet import Paths, walked_levels
from workloads.runtime.npy import from_npy_bytes, npy_bytes

_LIST_KEYS: Final = ("categories", "classes", "rows")
_SHOWN: Final = 5

Row = Mapping[str, Any]
PARENTS_PART: Final = "parents.json"
Definition = Mapping[str, Any]


def level_names(classes: ClassTable) -> list[str]:
    """Columns of the class table that are levels of the hierarchy, in its order; classes may lack some."""
    return [column for column in dict.fromkeys(chain.from_iterable(classes)) if column not in NOT_LEVELS]


def level_labels(level: str, classes: ClassTable) -> ClassLabels:
    """Target ids count the level's nodes in the order in which the leaf classes meet them; nodes are known by name.

    Raises:
        UserError: there is no such level, a class has no value there, or it has a single node.
    """
    if level not in level_names(classes):
        known = ", ".join(sorted(level_names(classes)))
        raise UserError(f"the data set has no level {level!r}; its levels are {known}")
    nodes = _nodes(level, classes)
    names = tuple(dict.fromkeys(nodes))
    if len(names) < 2:
        raise UserError(f"level {level!r} has the single class {names[0]!r}; there is nothing to tell apart")
    target_of = {name: target for target, name in enumerate(names)}
    targets = np.array([target_of[node] for node in nodes], dtype=np.int64)
    return ClassLabels(num_classes=len(names), names=names, targets=targets)


def taxonomy_labels(definition: Mapping[str, Any], inputs: LabelInputs) -> ClassLabels:
    """A level of a taxonomy that the class table does not hold.

    Args:
        definition: ``level``; and either ``digest``, ``key`` and ``class_key`` (a file whose column ``key`` has the
            texts of the class table's column ``class_key``), or ``folders`` and ``separator`` (levels in class names).
        inputs: the data set, and where the file lies.

    Raises:
        UserError: classes are missing from the table.
        BadDataError: the file is not a table.
    """
    return level_labels(definition["level"], taxonomy_rows(definition, inputs))


def check_chains(space: Mapping[str, Any], inputs: LabelInputs) -> None:
    """Check the ``chain`` of a taxonomy: levels that must each be a function of the next finer one.

    Raises:
        UserError: one is not; violations are listed.
    """
    definition = space.get("taxonomy", {})
    if "chain" in definition:
        check_nested(taxonomy_rows(definition, inputs), definition["chain"])


def check_table(space: Mapping[str, Any], inputs: LabelInputs) -> None:
    """Check the table of a taxonomy of classes that nobody knows yet: its columns, and the ``chain`` of its rows.

    Rows without a value at some level may be of other classes.

    Raises:
        UserError: it has no such column, or a level is not a function of the next finer one.
    """
    definition = space.get("taxonomy", {})
    if "digest" not in definition:
        return
    uri, chain = inputs.files[TABLE_FILE], definition.get("chain", ())
    rows, _ = read_table(uri)
    for column in (definition["key"], definition["level"]):
        if not any(column in row for row in rows):
            raise UserError(f"{uri} has no column {column!r}; its columns are {', '.join(rows[0])}")
    complete = [row for row in rows if all(node_of(row, level) is not None for level in chain)]
    check_nested(complete, chain)


def table_digest(inputs: LabelInputs) -> str:
    """Sha256 of the class table that a taxonomy is read from."""
    return read_table(inputs.files[TABLE_FILE])[1]


def taxonomy_rows(definition: Mapping[str, Any], inputs: LabelInputs) -> list[dict[str, Any]]:
    """The class table that a taxonomy brings along, row c for leaf class c; see `taxonomy_labels`."""
    if "folders" in definition:
        return folder_rows(inputs.classes, definition["folders"], definition["separator"])
    return _joined(definition, inputs)


def folder_rows(classes: ClassTable, levels: Sequence[str], separator: str) -> list[dict[str, Any]]:
    """Levels from the parts of class names such as ``Plantae/Rosales/Rosa`` or ``00042_Plantae_Rosales_Rosa``.

    Raises:
        UserError: a name has another number of parts.
    """
    rows = []
    for row in classes:
        parts = str(row["name"]).split(separator)
        if len(parts) != len(levels):
            message = f"the class name {row['name']!r} has {len(parts)} parts between {separator!r}, but "
            raise UserError(message + f"{len(levels)} levels are named ({', '.join(levels)}); name each part")
        rows.append({"class": row["class"], "name": row["name"], **dict(zip(levels, parts, strict=True))})
    return rows


def violations(rows: Sequence[Row], coarse: str, fine: str) -> list[str]:
    """Nodes of the finer level that lie below several nodes of the coarser one, each with those."""
    parents: dict[str, dict[str, None]] = {}
    for row in rows:
        parents.setdefault(str(node_of(row, fine)), {})[str(node_of(row, coarse))] = None
    return [f"{node} ({', '.join(above)})" for node, above in parents.items() if len(above) > 1]


def check_nested(rows: Sequence[Row], chain: Sequence[str]) -> None:
    """Raises ``UserError`` that lists violations: each level of the chain must be a function of the next finer one.

    Every class must have a value at every level.
    """
    sizes = {level: len(set(_nodes(level, rows))) for level in chain}
    ordered = sorted(chain, key=sizes.__getitem__)
    for coarse, fine in pairwise(ordered):
        found = violations(rows, coarse, fine)
        if found:
            shown = "; ".join(found[:_SHOWN]) + ("; ..." if len(found) > _SHOWN else "")
            message = f"level {coarse!r} is not a function of {fine!r}: {len(found)} of its nodes lie below several: "
            raise UserError(f"{message}{shown}; correct the table, or set nested: false to use such levels anyway")


def _nodes(level: str, rows: Sequence[Row]) -> list[str]:
    """The node of each class. Raises ``UserError`` that names those without."""
    if problem := level_problem(rows, level):
        raise UserError(problem)
    return [str(node_of(row, level)) for row in rows]


def read_table(uri: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of a CSV, JSON or Parquet file at a path or URI, and the sha256 of the file.

    JSON is a list of rows, or an object that holds one as ``categories`` (iNaturalist), ``classes`` or ``rows``. A
    column ``class`` that holds text is the taxonomic class, and is called so; ``species`` is added as the binomial
    where there are only genus and epithet.

    Raises:
        UserError: there is no such file.
        BadDataError: it is not a table.
    """
    content = _content(uri)
    digest = sha256(content).hexdigest()
    if digest not in _parsed:  # a sweep asks for many levels of one table
        _parsed.clear()
        _parsed[digest] = _rows_of(content, uri)
    return _parsed[digest], digest


_parsed: dict[str, list[dict[str, Any]]] = {}


def _rows_of(content: bytes, uri: str) -> list[dict[str, Any]]:
    try:
        rows = _parse(content, uri.rpartition(".")[2].lower())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadDataError(f"{uri} is not a table of classes (csv, json or parquet with a header): {error}") from error
    if not rows:
        raise BadDataError(f"{uri} has no rows; it must have one per class")
    # One name of the column for the whole table: numbers among the names of classes are names, too.
    has_names = any(isinstance(row.get("class"), str) and not row["class"].isdigit() for row in rows)
    return [_completed(row, has_names=has_names) for row in rows]


def _joined(definition: Mapping[str, Any], inputs: LabelInputs) -> list[dict[str, Any]]:
    """The table's rows in the order of the leaf classes."""
    uri, key, class_key = inputs.files[TABLE_FILE], definition["key"], definition["class_key"]
    rows, digest = read_table(uri)
    if definition["digest"] not in {"", digest}:
        raise UserError(f"{uri} has changed since the sweep was planned (sha256 {digest[:12]}...); plan it again")
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if key not in row:
            raise UserError(f"{uri} has no column {key!r}; its columns are {', '.join(row)}; name one as key")
        node = node_of(row, key)
        if node in found:
            raise UserError(
                f"{uri} has {row[key]!r} twice in column {key!r}; choose a key that differs between classes"
            )
        if node is not None:
            found[node] = row
    if problem := level_problem(inputs.classes, class_key):
        raise UserError(f"classes are found in {uri} by column {class_key!r}: {problem}, or use another class_key")
    wanted = [str(row[class_key]) for row in inputs.classes]
    missing = [name for name in wanted if name not in found]
    if missing:
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        message = f"{uri} lacks {len(missing)} classes of the data set: {shown}; "
        raise UserError(message + f"column {key!r} must hold what {class_key!r} of the class table holds")
    repeated = [name for name, number in Counter(wanted).items() if number > 1]
    if repeated and class_key == "name":  # a coarser column repeats on purpose
        shown = ", ".join(map(repr, repeated[:_SHOWN])) + (", ..." if len(repeated) > _SHOWN else "")
        message = f"several classes of the data set have the name {shown}, and would get one row of {uri}; "
        raise UserError(message + "join them by a column that tells them apart (class_key: synset, key: synset)")
    return [{**found[name], "class": leaf, "name": name} for leaf, name in enumerate(wanted)]


def _content(uri: str) -> bytes:
    try:
        if "://" not in uri:
            check_allowed(Path(uri).absolute().as_uri())
            return read_regular(Path(uri))
        folder, name = split_object_uri(uri)
        return open_store(folder).get(name)
    except (OSError, NotFoundError) as error:
        raise UserError(f"the class table {uri} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse(content: bytes, suffix: str) -> list[dict[str, Any]]:
    if suffix == "csv":
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        return [_within_header(row, reader.line_num) for row in reader]
    if suffix == "parquet":
        import pandas as pd

        frame = pd.read_parquet(io.BytesIO(content))
        return [{str(column): value for column, value in row.items()} for row in frame.to_dict("records")]
    document = json.loads(content)
    if isinstance(document, dict):
        key = next((key for key in _LIST_KEYS if key in document), _LIST_KEYS[0])
        document = document[key]
    return [dict(row) for row in document]


def _within_header(row: dict[str, Any], line: int) -> dict[str, Any]:
    if None in row:  # what csv calls cells beyond the last column
        raise ValueError(f"line {line} has more cells than the header")
    return row


def _completed(row: dict[str, Any], *, has_names: bool) -> dict[str, Any]:
    if has_names:
        row = {(TAXONOMIC_CLASS if column == "class" else column): value for column, value in row.items()}
    genus, epithet = node_of(row, "genus"), node_of(row, "specific_epithet")
    return row if "species" in row or genus is None or epithet is None else {**row, "species": f"{genus} {epithet}"}


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


def find_parents(label_map: LabelMap, space: Definition, inputs: LabelInputs) -> tuple[CoarserLevel, ...]:
    """The levels above the label map of a definition: steps up WordNet first, then columns in their order.

    There are none for random ids and for labels by sample.

    Raises:
        UserError: a file that the definition names is missing.
        BadDataError: it is not what it should be.
    """
    if not isinstance(label_map, ClassLabels) or len(label_map.targets) != len(inputs.classes):
        return ()
    source = _source(space)
    found: dict[str, CoarserLevel] = {}
    for level in (*_wordnet_levels(label_map, space, inputs), *_column_levels(label_map, source, inputs)):
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


def _column_levels(labels: ClassLabels, source: Definition, inputs: LabelInputs) -> Iterator[CoarserLevel]:
    own: ClassTable = taxonomy_rows(source["taxonomy"], inputs) if "taxonomy" in source else ()
    for rows in (own, inputs.classes):
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


def _wordnet_levels(labels: ClassLabels, space: Definition, inputs: LabelInputs) -> Iterator[CoarserLevel]:
    rule = _source(space).get("wordnet", {})
    if "level" not in rule:
        return
    wordnet, synsets = inputs.wordnet(rule["digest"]), inputs.synsets(rule["key"])
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
