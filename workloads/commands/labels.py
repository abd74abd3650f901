"""Questions of the control plane about label spaces: complete definitions, numbers of classes, and descriptions.

A description has sizes of classes, entropy, and relations between the spaces. With an index, samples of the
training split are counted; without one, the leaf classes, each as one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import OrchestratorError
from orchestrator.storage.open import open_store
from workloads.data.builtin import open_builtin
from workloads.data.index import SampleIndex, SplitIndex
from workloads.data.split_targets import NO_LABEL, SplitTargets
from workloads.labels.hierarchy import make_hierarchy
from workloads.labels.inputs import ClassTable, LabelInputs
from workloads.labels.label_map import ClassLabels, LabelMap, RandomLabels
from workloads.labels.rules import make_label_map
from workloads.labels.taxonomy import check_chains, check_table, find_parents, table_digest

_ROWS_AT_ONCE = 1 << 18


def count(request: Mapping[str, Any]) -> dict[str, Any]:
    """The number of classes of each of ``spaces``, or why it does not fit the data set.

    Args:
        request: ``dataset`` (see `class_table`; with ``unlisted`` nobody knows its classes yet, so that none are
            counted, and only digests are filled in), ``num_train``, ``spaces`` and ``files``.
    """
    inputs = label_inputs_of(request)
    answer = _read if request["dataset"].get("unlisted") else _counted
    return {"counted": [answer(space, inputs) for space in request["spaces"]]}


def show(request: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, nesting and entropy of each of ``spaces``; see `describe_spaces`."""
    return describe_spaces(request, label_inputs_of(request))


def table(request: Mapping[str, Any]) -> dict[str, Any]:
    """The class table of ``dataset`` (see `class_table`)."""
    return {"rows": class_table(request["dataset"])}


def hierarchy(request: Mapping[str, Any]) -> dict[str, Any]:
    """Levels for the classes of ``dataset`` (see `class_table`); see `make_hierarchy`."""
    return make_hierarchy(request, class_table(request["dataset"]))


def changes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Where two networks differ on the validation images; see `show_changes`."""
    from workloads.commands.sample_changes import show_changes  # drawing: no other command needs it

    return show_changes(request)


def label_inputs_of(request: Mapping[str, Any]) -> LabelInputs:
    """The data set of a request."""
    classes = class_table(request["dataset"])
    return LabelInputs(classes=classes, num_train=request["num_train"], files=request["files"])


def class_table(dataset: Mapping[str, Any]) -> ClassTable:
    """Of ``{"builtin": parameters}``, or ``{"rows": class table, "num_classes": n}``, where rows may be missing."""
    if "builtin" in dataset:
        return open_builtin(dataset["builtin"]).classes
    rows: ClassTable = dataset["rows"]
    return rows or [{"class": leaf, "name": str(leaf)} for leaf in range(dataset["num_classes"])]


def _counted(space: Mapping[str, Any], inputs: LabelInputs) -> dict[str, Any]:
    try:
        check_chains(space, inputs)
        definition = complete_definition(space, inputs)
        label_map = make_label_map(definition, inputs.classes, num_train=inputs.num_train, files=inputs.files)
    except OrchestratorError as error:
        return {"problem": str(error)}
    several = isinstance(label_map, ClassLabels) and label_map.targets.ndim > 1
    kept = kept_classes(label_map)
    some = {"kept": kept} if kept is not None and len(kept) < len(inputs.classes) else {}
    return {"num_classes": label_map.num_classes, "multi_label": several, "space": definition, **some}


def kept_classes(label_map: LabelMap) -> list[int] | None:
    """Leaf classes that have a target; None where all have one."""
    if isinstance(label_map, ClassLabels):
        has_target_C = (label_map.table_CM != NO_LABEL).any(axis=1)
    elif isinstance(label_map, RandomLabels) and label_map.groups is not None:
        has_target_C = label_map.groups != NO_LABEL
    else:
        return None
    found: list[int] = np.flatnonzero(has_target_C).tolist()
    return found


def _read(space: Mapping[str, Any], inputs: LabelInputs) -> dict[str, Any]:
    """The definition of a label space of classes that nobody knows yet."""
    try:
        check_table(space, inputs)
        return {"space": complete_definition(space, inputs, is_listed=False)}
    except OrchestratorError as error:
        return {"problem": str(error)}


def describe_spaces(request: Mapping[str, Any], inputs: LabelInputs) -> dict[str, Any]:
    """All spaces of a request.

    Args:
        request: ``spaces`` (``{"name", "space"}``; with ``made``, the key of the label map, if only a job can make
            it; with ``files``, where its own files lie), ``targets`` (names of spaces to compare with), ``index``
            (empty, or ``{"store", "key", "cache", "location"}``), ``tree`` (names of spaces from coarse to fine),
            ``plot`` (a file for class sizes, or empty), ``parents`` (whether to list the parents of every class;
            default: no).
        inputs: the data set.

    Raises:
        UserError: a space does not fit the data set.
    """
    split = _train_split(request["index"], inputs)
    maps = {item["name"]: _label_map(item, request["index"], inputs) for item in request["spaces"]}
    is_counted = bool(request["index"])
    split_targets = {
        name: label_map.resolve_targets(split)
        for name, label_map in maps.items()
        if is_counted or not isinstance(label_map, RandomLabels)
    }
    if request["plot"]:
        _plot(split_targets, Path(request["plot"]), "samples" if is_counted else "leaf classes")
    targets = {name: split_targets[name] for name in request["targets"] if name in split_targets}
    described = [_described(name, label_map, split_targets.get(name), targets) for name, label_map in maps.items()]
    if request.get("parents"):
        spaces = [_parents(maps[item["name"]], item["space"], _inputs_of(item, inputs)) for item in request["spaces"]]
        described = [one | {"parents": levels} for one, levels in zip(described, spaces, strict=True)]
    tree = _tree([(maps[name], split_targets[name]) for name in request["tree"] if name in split_targets])
    of_synsets = [item for item in request["spaces"] if item["name"] in request["tree"] and "wordnet" in item["space"]]
    return {
        "counted": "samples" if is_counted else "leaf classes",
        "spaces": described,
        "tree": tree,
        "lemmas": _lemmas(tree, _inputs_of(of_synsets[0], inputs)) if of_synsets else {},
    }


def _label_map(item: Mapping[str, Any], index: Mapping[str, Any], inputs: LabelInputs) -> LabelMap:
    if item.get("made"):
        return LabelMap.open(open_store(index["store"]), item["made"])
    files = _inputs_of(item, inputs).files
    return make_label_map(item["space"], inputs.classes, num_train=inputs.num_train, files=files)


def _inputs_of(item: Mapping[str, Any], inputs: LabelInputs) -> LabelInputs:
    """The data set with the files of one label space: entries of one data set may read several tables."""
    return replace(inputs, files=item["files"]) if "files" in item else inputs


def _train_split(index: Mapping[str, Any], inputs: LabelInputs) -> SplitIndex:
    if not index:
        return SplitIndex.in_memory(leaves=np.arange(len(inputs.classes), dtype=np.int32))
    store = open_store(index["store"])
    return SampleIndex.open(store, index["key"], Path(index["cache"]), index["location"]).split("train")


def _described(
    name: str, label_map: LabelMap, split_targets: SplitTargets | None, targets: Mapping[str, SplitTargets]
) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, "num_classes": label_map.num_classes}
    if split_targets is None:
        return described
    counts = split_targets.counts()
    return described | {
        "multi_label": split_targets.is_multi_label,
        "num_samples": _num_labelled(split_targets),
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "max": int(counts.max()),
        "num_empty": int(np.count_nonzero(counts == 0)),
        "entropy_bits": entropy_bits(counts),
        "nesting": {target: nesting(split_targets, other) for target, other in targets.items() if target != name},
    }


def _parents(label_map: LabelMap, space: Mapping[str, Any], inputs: LabelInputs) -> list[dict[str, Any]]:
    """Each coarser level: its ``class_names``, and the ids of the ``parents`` of each class, a list where of several.

    Raises:
        UserError, BadDataError: see `find_parents`.
    """
    return [
        {
            "level": level.name,
            "num_classes": len(level.class_names),
            "class_names": list(level.class_names),
            "parents": level.parents_KP[:, 0].tolist()
            if level.is_tree
            else [[node for node in row if node != NO_LABEL] for row in level.parents_KP.tolist()],
        }
        for level in find_parents(label_map, space, inputs)
    ]


def _num_labelled(split_targets: SplitTargets) -> int:
    is_labelled = split_targets.is_labelled_N()
    return split_targets.num_samples if is_labelled is None else int(np.count_nonzero(is_labelled))


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Shannon entropy of the distribution over classes, bits; log2(G) if all classes are equal in size."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) if counts.sum() else 0.0


def nesting(fine: SplitTargets, coarse: SplitTargets) -> dict[str, Any]:
    """Whether each class of ``fine`` lies in one class of ``coarse``, and the share of its classes that mix several."""
    pairs = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *_pairs(fine, coarse)]))
    per_class = np.bincount(pairs // coarse.num_classes, minlength=fine.num_classes)
    num_used = int(np.count_nonzero(per_class))
    share = float(np.count_nonzero(per_class > 1)) / num_used if num_used else 0.0
    return {"refines": share == 0.0, "mixing": share}


def _pairs(fine: SplitTargets, coarse: SplitTargets) -> Iterator[NDArray[np.int64]]:
    """``fine id * number of coarse classes + coarse id`` of all pairs that a sample has, without repetitions."""
    for start in range(0, fine.num_samples, _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, fine.num_samples))
        fine_BM1 = fine.take(rows).reshape(len(rows), -1, 1)
        coarse_B1T = coarse.take(rows).reshape(len(rows), 1, -1)
        both = (fine_BM1 != NO_LABEL) & (coarse_B1T != NO_LABEL)
        yield np.unique((fine_BM1 * coarse.num_classes + coarse_B1T)[both])


def _tree(levels: Sequence[tuple[LabelMap, SplitTargets]]) -> list[dict[str, Any]]:
    """Paths of class names from coarse to fine with the samples below each; none if a space has several labels."""
    if not levels or any(split_targets.is_multi_label for _, split_targets in levels):
        return []
    ids_LN = np.stack([split_targets.targets_N() for _, split_targets in levels])
    paths_PL, counts = np.unique(ids_LN.T, axis=0, return_counts=True)
    return [
        {
            "path": [label_map.class_names[target] for (label_map, _), target in zip(levels, path, strict=True)],
            "num": num,
        }
        for path, num in zip(paths_PL.tolist(), counts.tolist(), strict=True)
        if NO_LABEL not in path
    ]


def _lemmas(tree: Sequence[Mapping[str, Any]], inputs: LabelInputs) -> dict[str, str]:
    """First word of each synset of a tree."""
    lemmas = inputs.wordnet("").lemmas
    synsets = dict.fromkeys(name for path in tree for name in path["path"] if name in lemmas)
    return {synset: lemmas[synset].replace("_", " ") for synset in synsets}


def _plot(split_targets: Mapping[str, SplitTargets], file: Path, what: str) -> None:
    """Sizes of the classes of each space, from large to small."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, labels in split_targets.items():
        counts = np.sort(labels.counts())[::-1]
        axes.step(np.arange(1, len(counts) + 1), counts, where="mid", label=f"{name} ({len(counts)})")
    axes.set(xscale="log", yscale="log", xlabel="class, by size", ylabel=f"{what} of the class")
    axes.legend(fontsize="small")
    figure.savefig(file)


def complete_definition(space: Mapping[str, Any], inputs: LabelInputs, *, is_listed: bool = True) -> dict[str, Any]:
    """The definition with every digest, and without what is only checked while planning (``chain``).

    Args:
        space: the definition.
        inputs: the data set.
        is_listed: whether its class table is known, which then must have what the definition names.

    Raises:
        UserError: a file is missing.
    """
    return {name: _filled(name, value, inputs, is_listed=is_listed) for name, value in space.items()}


def _filled(name: str, value: Any, inputs: LabelInputs, *, is_listed: bool) -> Any:  # noqa: ANN401 - JSON
    """One field of a definition. What the arguments of a plug-in are called means nothing here."""
    if name == "base":
        return complete_definition(value, inputs, is_listed=is_listed)
    if name == "random" and "within" in value:
        return {**value, "within": complete_definition(value["within"], inputs, is_listed=is_listed)}
    if name == "taxonomy":
        value = {field: item for field, item in value.items() if field != "chain"}
        return value | ({"digest": value["digest"] or table_digest(inputs)} if "digest" in value else {})
    if name in {"wordnet", "classes"} and "digest" in value:
        if is_listed:
            inputs.synsets(value["key"])  # the nearer cause: without synsets no WordNet helps
        return {**value, "digest": value["digest"] or inputs.wordnet("").digest}
    return value
