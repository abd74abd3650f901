"""Parents of classes: which levels lie above a label space, what its artifact says of them, and what training reads."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.core.contract import ExecutionContext
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, read_part
from tests.data_jobs import TREE, DataPlane, plane
from tests.tiny_training import RECIPE
from tests.unit import test_wordnet
from tests.unit.test_wordnet import ENTITY, FAMOUS, OAK, PLANT, THING, TOOL
from workloads.commands.labels import describe_spaces
from workloads.data.index import SampleIndex
from workloads.labels.inputs import ClassTable, LabelInputs
from workloads.labels.label_map import ClassLabels, LabelMap, SampleLabels
from workloads.labels.rules import make_label_map
from workloads.labels.taxonomy import CoarserLevel, find_parents, read_parents, write_parents
from workloads.runtime.npy import from_npy_bytes
from workloads.runtime.streams import Stage
from workloads.train.evaluate import eval_levels
from workloads.train.samples import LabelledSamples
from workloads.train.task import JobContext

__all__ = ["plane"]

Space = dict[str, Any]

LEAVES: Space = {"hierarchy": "depth3"}
TABLE = [
    {"class": 0, "name": "oak", "group": "plant", "size": 3, "other": "x", "note": ["tall"]},
    {"class": 1, "name": "fir", "group": "plant", "size": 3, "other": None, "note": []},
    {"class": 2, "name": "cat", "group": "animal", "size": 1, "other": "x", "note": []},
    {"class": 3, "name": "dog", "group": "animal", "size": 1, "other": "y", "note": []},
    {"class": 4, "name": "cow", "group": "animal", "size": 3, "other": "y", "note": []},
]
PLANTS, PETS = {"name": "plants", "classes": [0, 1]}, {"name": "pets", "classes": [2, 3]}
MERGED: Space = {"merge": {"groups": [PLANTS, PETS], "others": "keep"}}
GROWN, ELM, HAMMER = test_wordnet.TREE, "n00000008", "n00000009"
NET = f"""{test_wordnet.NET}
00000008 20 n 01 elm 0 001 @ 00000005 n 0000 | another tree
00000009 06 n 01 hammer 0 001 @ 00000004 n 0000 | another tool"""
SYNSETS = [OAK, ELM, PLANT, TOOL, HAMMER, GROWN, FAMOUS]
LOW: Space = {"merge": {"groups": [{"name": "low", "classes": [PLANT, TOOL]}], "others": "keep"}}


def nouns(level: int, paths: str = "all", **modifiers: Any) -> Space:
    return {"wordnet": {"level": level, "paths": paths, "key": "synset", "digest": "", "seed": 5}, **modifiers}


def synset_rows(synsets: list[str]) -> ClassTable:
    return [{"class": number, "name": synset, "synset": synset} for number, synset in enumerate(synsets)]


def setting_of(classes: ClassTable, folder: Path, net: str = NET) -> LabelInputs:
    (folder / "data.noun").write_text(net)
    return LabelInputs(classes=classes, num_train=0, files={"wordnet": str(folder)})


def levels_of(space: Space, inputs: LabelInputs) -> dict[str, CoarserLevel]:
    label_map = make_label_map(space, inputs.classes, num_train=0, files=inputs.files)
    return {level.name: level for level in find_parents(label_map, space, inputs)}


def named(space: Space, inputs: LabelInputs) -> dict[str, dict[str, set[str]]]:
    """Level -> class -> its parents, by name."""
    label_map = make_label_map(space, inputs.classes, num_train=0, files=inputs.files)
    return {
        name: {
            child: {level.class_names[node] for node in row if node >= 0}
            for child, row in zip(label_map.class_names, level.parents_KP.tolist(), strict=True)
        }
        for name, level in levels_of(space, inputs).items()
    }


# ------------------------------------------------------------------------------------------------ columns of a table


def test_parents_of_leaf_classes_are_the_columns_with_fewer_nodes() -> None:
    found = levels_of({"merge": {"groups": [], "others": "keep"}}, LabelInputs(classes=TABLE, num_train=0))
    assert list(found) == ["group", "size"]  # not `other`, which some class lacks
    assert found["group"].class_names == ("plant", "animal")
    assert found["group"].parents_KP.tolist() == [[0], [0], [1], [1], [1]]
    assert found["size"].class_names == ("3", "1")


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (MERGED, {"group": [0, 1, 1], "size": [0, 1, 0]}),
        ({"merge": {"groups": [{"name": "a", "classes": [0, 2]}], "others": "keep"}}, {}),  # mixes groups and sizes
        ({**MERGED, "merge": {**MERGED["merge"], "others": "drop"}}, {}),  # as coarse as the groups
        ({"merge": {"groups": [], "others": "keep"}, "classes": {"names": [1, 2, 3]}}, {"group": [0, 1, 1]}),
        ({"hierarchy": "group"}, {}),
    ],
)
def test_parents_are_there_only_where_the_space_refines_a_level(space: Space, expected: dict[str, list[int]]) -> None:
    rows = [{name: value for name, value in row.items() if name != "other"} for row in TABLE]
    if "classes" in space:
        rows = [{name: value for name, value in row.items() if name != "size"} for row in rows]
    found = levels_of(space, LabelInputs(classes=rows, num_train=0))
    assert {name: level.parents_KP[:, 0].tolist() for name, level in found.items()} == expected


def test_parents_of_a_taxonomy_are_the_levels_of_its_own_table(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("name,genus,family\noak,quercus,beeches\nfir,abies,pines\ncat,felis,cats\ndog,canis,dogs\n")
    rule = {"digest": "", "key": "name", "class_key": "name"}
    inputs = LabelInputs(classes=TABLE[:4], num_train=0, files={"table": str(table)})
    found = named({"taxonomy": {"level": "genus", **rule}}, inputs)
    assert list(found) == ["group", "size"]  # here families are no fewer than genera
    table.write_text(table.read_text().replace("dogs", "cats"))
    assert list(named({"taxonomy": {"level": "genus", **rule}}, inputs)) == ["family", "group", "size"]
    merge = {"merge": {"groups": [{"name": "a", "classes": ["felis", "canis"]}], "others": "keep"}}
    assert named({**merge, "base": {"taxonomy": {"level": "genus", **rule}}}, inputs) == {
        "group": {"a": {"animal"}, "quercus": {"plant"}, "abies": {"plant"}},
        "size": {"a": {"1"}, "quercus": {"3"}, "abies": {"3"}},
    }


# ----------------------------------------------------------------------------------------------------------- WordNet


def test_parents_of_synsets_are_all_that_walks_upwards_lead_to(tmp_path: Path) -> None:
    inputs = setting_of(synset_rows(SYNSETS), tmp_path)
    found = named(nouns(0), inputs)
    assert list(found) == ["wordnet1", "wordnet2", "wordnet3", "wordnet4"]  # at level 5 nothing has changed
    assert found["wordnet1"] == {
        OAK: {GROWN},
        ELM: {GROWN},
        PLANT: {THING},
        TOOL: {THING},
        HAMMER: {TOOL},
        GROWN: {PLANT, TOOL},
        FAMOUS: {FAMOUS},
    }
    # At level 1 a leaf class has several targets, each with parents of its own.
    assert named(nouns(1), inputs)["wordnet3"] == {
        GROWN: {THING},
        THING: {ENTITY},
        PLANT: {ENTITY},
        TOOL: {ENTITY},
        FAMOUS: {FAMOUS},
    }


def test_parents_of_merged_synsets_are_those_of_their_members(tmp_path: Path) -> None:
    inputs = setting_of(synset_rows(SYNSETS), tmp_path)
    found = named({**LOW, "base": nouns(0)}, inputs)
    assert found["wordnet1"]["low"] == {THING}
    assert found["wordnet1"][GROWN] == {PLANT, TOOL}
    mixed = {"merge": {"groups": [{"name": "mixed", "classes": [OAK, TOOL]}], "others": "keep"}}
    assert "wordnet1" not in named({**mixed, "base": nouns(0)}, inputs)


@st.composite
def nets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A ``data.noun`` in which hypernyms have smaller numbers, and the synsets of leaf classes."""
    num = draw(st.integers(4, 12))
    lines = []
    for number in range(1, num + 1):
        above = draw(st.lists(st.integers(1, number - 1), max_size=3, unique=True)) if number > 1 else []
        pointers = "".join(f" @ {parent:08d} n 0000" for parent in above)
        lines.append(f"{number:08d} 03 n 01 word 0 {len(above):03d}{pointers} | gloss")
    leaves = draw(st.lists(st.integers(1, num), min_size=3, unique=True))
    return "\n".join(lines), [f"n{leaf:08d}" for leaf in leaves]


@settings(max_examples=150, deadline=None)
@given(
    net=nets(),
    paths=st.sampled_from(["all", "first", "random"]),
    fine=st.integers(0, 2),
    steps=st.integers(1, 3),
    num_kept=st.integers(2, 12),
)
def test_parents_folded_give_the_targets_of_the_coarser_space(
    net: tuple[str, list[str]], paths: str, fine: int, steps: int, num_kept: int
) -> None:
    text, synsets = net
    modifiers = {"classes": {"names": synsets[-num_kept:]}}
    with tempfile.TemporaryDirectory() as folder:
        inputs = setting_of(synset_rows(synsets), Path(folder), text)
        made = partial(make_label_map, classes=inputs.classes, num_train=0, files=inputs.files)
        try:
            below, above = (made(nouns(level, paths, **modifiers)) for level in (fine, fine + steps))
        except UserError:  # a single class is left at such a level
            assume(False)
        found = levels_of(nouns(fine, paths, **modifiers), inputs).get(f"wordnet{fine + steps}")
        last, whole = (made(nouns(level, paths)).class_names for level in (fine + steps - 1, fine + steps))
    assert isinstance(below, ClassLabels)
    assert isinstance(above, ClassLabels)
    if found is None:  # not coarser, or the same as the level below it
        assert above.num_classes >= below.num_classes or last == whole
        return
    assert found.class_names == above.class_names
    for targets, expected in zip(below.table_CM.tolist(), above.table_CM.tolist(), strict=True):
        parents = {node for target in targets if target >= 0 for node in found.parents_KP[target].tolist()}
        assert parents - {-1} == set(expected) - {-1}


# ------------------------------------------------------------------------------------------ the artifact, and training


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    return plane.builtin(TREE)


@pytest.mark.parametrize("space", [{"hierarchy": "depth2"}, {"random": {"num_classes": 5, "seed": 0}}])
def test_labels_artifact_counts_samples_per_class(plane: DataPlane, index: SampleIndex, space: Space) -> None:
    record = plane.run(JobKind.LABELS, {"space": space}, {"index": index.key})
    label_map = LabelMap.open(plane.store, record.key)
    for name, split in index.splits.items():
        counts_K = from_npy_bytes(read_part(plane.store, record, f"counts/{name}.npy"))
        expected = np.bincount(label_map.resolve_targets(split).targets_N(), minlength=label_map.num_classes)
        assert counts_K.dtype == np.int64
        assert np.array_equal(counts_K, expected)


def test_labels_artifact_holds_parents_for_each_level(plane: DataPlane, index: SampleIndex) -> None:
    levels = read_parents(plane.store, plane.run(JobKind.LABELS, {"space": LEAVES}, {"index": index.key}).key)
    assert levels is not None
    assert [(level.name, level.class_names) for level in levels] == [
        ("depth1", ("0", "1")),
        ("depth2", ("0.0", "0.1", "1.0", "1.1")),
    ]
    assert levels[1].parents_KP.tolist() == [[leaf // 3] for leaf in range(12)]
    assert levels[1].parents_KP.dtype == np.int64
    random = plane.run(JobKind.LABELS, {"space": {"random": {"num_classes": 5, "seed": 0}}}, {"index": index.key})
    assert read_parents(plane.store, random.key) == ()


def opened(plane: DataPlane, index: SampleIndex, labels_key: str) -> LabelledSamples:
    parameters = {"model": {"name": "resnet18", "image_size": 16}, "recipe": RECIPE, "seed": 0}
    request = plane.request(JobKind.PRETRAIN, parameters, {"index": index.key, "labels": labels_key})
    context = ExecutionContext(store=plane.store, scratch=plane.folder, cache=plane.cache)
    return LabelledSamples.open(JobContext.of(request, context, Stage.PRETRAIN))


def written(plane: DataPlane, index: SampleIndex, parents: list[CoarserLevel] | None) -> str:
    """The key of a label map of the leaf classes, with these parents or as of a version that recorded none."""
    request = plane.request(JobKind.LABELS, {"parents": None if parents is None else len(parents)}, {})
    writer = ArtifactWriter(plane.store, request)
    make_label_map(LEAVES, index.classes, num_train=600).write(writer)
    if parents is not None:
        write_parents(writer, parents)
    writer.commit(now=0.0)
    return request.key


def test_training_folds_predictions_up_the_parents_of_the_artifact(plane: DataPlane, index: SampleIndex) -> None:
    odd = CoarserLevel(name="odd", class_names=("even", "odd"), parents_KP=np.arange(12)[:, None] % 2)
    (level,) = opened(plane, index, written(plane, index, [odd])).levels
    assert (level.name, level.coarser_K.tolist()) == ("odd", [0, 1] * 6)


def test_training_on_an_artifact_without_parents_uses_the_class_table(plane: DataPlane, index: SampleIndex) -> None:
    key = written(plane, index, None)
    assert read_parents(plane.store, key) is None
    recorded = plane.run(JobKind.LABELS, {"space": LEAVES}, {"index": index.key}).key
    opened_levels = [opened(plane, index, labels).levels for labels in (key, recorded)]
    old, new = ([(level.name, level.coarser_K.tolist()) for level in levels] for levels in opened_levels)
    assert [name for name, _ in old] == ["depth1", "depth2"]
    assert old == new


def test_training_folds_up_wordnet_and_merges_where_every_class_has_one_parent(tmp_path: Path) -> None:
    inputs = setting_of(synset_rows(SYNSETS), tmp_path)

    def names(space: Space) -> list[str]:
        label_map = make_label_map(space, inputs.classes, num_train=0, files=inputs.files)
        found = find_parents(label_map, space, inputs)
        return [level.name for level in eval_levels(label_map, inputs.classes, found)]

    assert names(nouns(0, "first")) == ["wordnet1", "wordnet2", "wordnet3", "wordnet4"]
    assert names(nouns(0)) == ["wordnet3", "wordnet4"]  # below them the tree has two parents
    assert names(nouns(1)) == []  # the tree has two targets
    assert names({**LOW, "base": nouns(0, "first")})[0] == "wordnet1"


def test_training_on_labels_by_sample_has_no_levels() -> None:
    by_sample = SampleLabels(num_classes=2, targets={"train": np.zeros(3, dtype=np.int64)})
    assert find_parents(by_sample, {"clusters": {}}, LabelInputs(classes=TABLE, num_train=0)) == ()
    assert eval_levels(by_sample, TABLE, None) == eval_levels(by_sample, TABLE, ()) == ()


def test_labels_show_lists_parents_when_asked(tmp_path: Path) -> None:
    inputs = setting_of(synset_rows(SYNSETS), tmp_path)
    asked = {"spaces": [{"name": "nouns/0", "space": nouns(0)}], "targets": [], "tree": [], "index": {}, "plot": ""}
    (plain,) = describe_spaces(asked, inputs)["spaces"]
    assert "parents" not in plain
    (shown,) = describe_spaces(asked | {"parents": True}, inputs)["spaces"]
    first = shown["parents"][0]
    assert (first["level"], first["num_classes"]) == ("wordnet1", 5)
    assert [{first["class_names"][node] for node in parents} for parents in first["parents"]] == [
        {GROWN},
        {GROWN},
        {THING},
        {THING},
        {TOOL},
        {PLANT, TOOL},
        {FAMOUS},
    ]
    asked["spaces"] = [{"name": "low", "space": {**LOW, "base": nouns(0, "first")}}]
    (shown,) = describe_spaces(asked | {"parents": True}, inputs)["spaces"]
    assert [type(node) for node in shown["parents"][0]["parents"]] == [int] * 6  # one parent each
