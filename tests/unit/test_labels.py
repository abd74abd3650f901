"""Label spaces and the maps that they become."""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core.contract import Execution, ExecutionContext
from orchestrator.core.errors import BadDataError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, read_record
from tests.data_jobs import DIGITS, TREE, DataPlane, encoded, plane, tar_of
from workloads.data.index import LeafSets, SampleIndex, SplitIndex
from workloads.data.split_targets import SplitTargets
from workloads.jobs.labels import run_labels
from workloads.labels.label_map import ClassLabels, Draw, LabelMap, RandomLabels, SampleLabels
from workloads.labels.rules import make_label_map
from workloads.runtime.npy import npy_bytes

__all__ = ["plane"]

CLASSES = [
    {"class": 0, "name": "oak", "order": "plant", "leaf": "oak"},
    {"class": 1, "name": "cat", "order": "animal", "leaf": "cat"},
    {"class": 2, "name": "fir", "order": "plant", "leaf": "fir"},
]

ALL_THREE = np.arange(3)
KNOWN_IDS = [[2, 2, 0, 1, 1, 0, 1, 0], [2, 1, 0, 0, 2, 0, 2, 1], [1, 0, 2, 2, 0, 3, 1, 3]]


def split_of(leaves: list[int], name: str = "train", leaf_sets: list[list[int]] | None = None) -> SplitIndex:
    sets = None
    if leaf_sets is not None:
        offsets = np.cumsum([0, *map(len, leaf_sets)])
        sets = LeafSets(offsets=offsets, values=np.array([leaf for one in leaf_sets for leaf in one], dtype=np.int32))
    return SplitIndex.in_memory(leaves=np.array(leaves, dtype=np.int32), name=name, leaf_sets=sets)


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    return plane.builtin(TREE)


@pytest.mark.parametrize(
    ("level", "num_classes", "leaves_per_node"), [("depth1", 2, 6), ("depth2", 4, 3), ("depth3", 12, 1)]
)
def test_labels_level_groups_the_leaves_below_each_node(
    plane: DataPlane, index: SampleIndex, level: str, num_classes: int, leaves_per_node: int
) -> None:
    label_map = plane.labels(index, {"hierarchy": level})
    split = index.split("val")
    assert label_map.num_classes == len(label_map.class_names) == num_classes
    assert np.array_equal(label_map.resolve_targets(split).targets_N(), split.leaves // leaves_per_node)
    assert label_map.resolve_targets(split).targets_N().dtype == np.int64


def test_labels_level_ids_count_nodes_by_first_appearance() -> None:
    label_map = make_label_map({"hierarchy": "order"}, CLASSES, num_train=3)
    assert label_map.class_names == ("plant", "animal")
    assert label_map.resolve_targets(split_of([0, 1, 2, 1])).targets_N().tolist() == [0, 1, 0, 1]


def test_labels_modulo_takes_the_leaf_modulo_the_divisor(plane: DataPlane) -> None:
    digits = plane.builtin(DIGITS)
    split = digits.split("train")
    assert np.array_equal(plane.labels(digits, {"modulo": 5}).resolve_targets(split).targets_N(), split.leaves % 5)


@pytest.mark.parametrize("num_classes", [2, 7, 128, 600])
def test_labels_random_ids_are_balanced_in_each_split(plane: DataPlane, index: SampleIndex, num_classes: int) -> None:
    label_map = plane.labels(index, {"random": {"num_classes": num_classes, "seed": 0}})
    for split in index.splits.values():
        counts = label_map.resolve_targets(split).counts()
        assert counts.max() - counts.min() <= 1


def test_labels_random_seed_and_split_name_different_permutations() -> None:
    train, val = (split_of([0] * 500, name=name) for name in ("train", "val"))
    first, again, other = (
        RandomLabels(num_classes=10, seed=seed).resolve_targets(train).targets_N() for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert np.mean(first == other) < 0.3
    assert np.mean(first == RandomLabels(num_classes=10, seed=0).resolve_targets(val).targets_N()) < 0.3


def test_labels_that_nobody_could_count_must_be_as_declared(plane: DataPlane, index: SampleIndex) -> None:
    table = plane.folder / "table.json"
    table.write_text(json.dumps([{"name": row["name"], "half": row["class"] // 6} for row in index.classes]))
    space = {"taxonomy": {"level": "half", "digest": "", "key": "name", "class_key": "name"}}
    request = plane.request(JobKind.LABELS, {"space": space}, {"index": index.key})
    context = ExecutionContext(store=plane.store, scratch=plane.folder, cache=plane.cache)

    def run(declared: int) -> None:
        execution = Execution(label_files={"table": str(table)}, declared_classes=declared)
        run_labels(replace(request, execution=execution), context)

    with pytest.raises(UserError, match="names no digest of its file"):
        run(2)
    run(0)  # a plan of an earlier version
    space["taxonomy"]["digest"] = sha256(table.read_bytes()).hexdigest()
    with pytest.raises(UserError, match="declared as 3, but the label space has 2 classes"):
        run(3)


def test_labels_record_counts_classes_and_their_samples(plane: DataPlane, index: SampleIndex) -> None:
    record = plane.run(JobKind.LABELS, {"space": {"hierarchy": "depth2"}}, {"index": index.key})
    assert record.metrics == {"num_classes": 4}
    assert record.summary["samples_per_class"] == {
        "train": {"min": 150, "median": 150.0, "max": 150},
        "val": {"min": 18, "median": 18.0, "max": 18},
    }


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"hierarchy": "depth9"}, "no level 'depth9'; its levels are depth1, depth2, depth3"),
        ({"hierarchy": "name"}, "no level 'name'"),
        ({"modulo": 1}, "modulo: 1 is not valid"),
        ({"modulo": 13}, "use 2 to 12"),
        ({"random": {"num_classes": 601, "seed": 0}}, "600 training samples"),
        ({"random": {"num_classes": 1, "seed": 0}}, "num_classes 1 is not valid"),
        ({"clusters": 3}, "exactly one of binary, hierarchy, merge"),
        ({"modulo": 2, "hierarchy": "depth1"}, "exactly one of"),
    ],
)
def test_labels_impossible_space_is_a_user_error(
    plane: DataPlane, index: SampleIndex, space: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plane.labels(index, space)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**row, "order": "being"} for row in CLASSES], "single class 'being'"),
        ([*CLASSES[:2], {"class": 2, "name": "fir"}], r"class 2 \('fir'\) has no value at level 'order'"),
    ],
)
def test_labels_unusable_level_is_a_user_error(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_label_map({"hierarchy": "order"}, rows, num_train=3)


@pytest.mark.parametrize(
    "label_map",
    [
        ClassLabels(num_classes=2, names=("a", "b"), targets=np.array([0, 1, 0])),
        SampleLabels(num_classes=3, targets={"train": np.array([2, 0, 1]), "val": np.array([1])}),
        ClassLabels.of_sets([[0], [1, 0], []], ["a", "b"]),
        RandomLabels(num_classes=3, seed=4),
        RandomLabels(num_classes=3, seed=4, draw=Draw.INDEPENDENT),
        RandomLabels(num_classes=4, seed=4, groups=np.array([0, 1, -1]), num_ids=2, names=("a/0", "a/1", "b/0", "b/1")),
    ],
)
def test_labels_written_map_opens_as_the_same_map(tmp_path: Path, label_map: LabelMap) -> None:
    plane = DataPlane(folder=tmp_path)
    request = plane.request(JobKind.LABELS, {}, {})
    writer = ArtifactWriter(plane.store, request)
    label_map.write(writer)
    writer.commit(now=0.0)
    opened = LabelMap.open(plane.store, request.key)
    split = split_of([0, 1, 2])
    assert (opened.num_classes, opened.class_names) == (label_map.num_classes, label_map.class_names)
    assert np.array_equal(
        opened.resolve_targets(split).take(ALL_THREE), label_map.resolve_targets(split).take(ALL_THREE)
    )


@pytest.mark.parametrize(
    "label_map",
    [
        ClassLabels(num_classes=2, names=("a", "b"), targets=np.array([0, 1])),
        SampleLabels(num_classes=2, targets={"train": np.array([0, 1])}),
    ],
)
def test_labels_of_another_data_set_are_refused(label_map: LabelMap) -> None:
    with pytest.raises(BadDataError, match="another data set"):
        label_map.resolve_targets(split_of([0, 1, 2]))


def test_labels_of_clusters_count_the_splits_that_have_features(tmp_path: Path) -> None:
    """Data may have a third split, of which nothing is embedded."""
    plane = DataPlane(folder=tmp_path)
    names = ("train", "val", "test")
    shards = {f"{name}-0.tar": tar_of([(f"{name}.png", encoded()), (f"{name}.cls", b"0")]) for name in names}
    index = plane.index(plane.foreign(shards))
    writer = ArtifactWriter(plane.store, cluster := plane.request(JobKind.CLUSTER, {}, {"index": index.key}))
    digest = read_record(plane.store, index.key).summary["dataset_digest"]
    found = {"num_classes": 2, "class_names": ["0", "1"], "dataset_digest": digest}
    writer.add("clusters.json", json.dumps(found).encode())
    for split, target in (("train", 1), ("val", 0)):
        writer.add(f"targets/{split}.npy", npy_bytes(np.array([target])))
    writer.commit(now=0.0)
    inputs = {"index": index.key, "clusters": cluster.key}
    record = plane.run(JobKind.LABELS, {"space": {"clusters": {}}}, inputs)
    assert sorted(name for name in record.parts if name.startswith("counts/")) == ["counts/train.npy", "counts/val.npy"]
    assert LabelMap.open(plane.store, record.key).resolve_targets(index.split("val")).targets_N().tolist() == [0]


def test_labels_foreign_level_column_is_a_label_space(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    members = [member for leaf in range(4) for member in ((f"{leaf}.png", encoded()), (f"{leaf}.cls", b"%d" % leaf))]
    index = plane.index(plane.foreign({"train-0.tar": tar_of(members)}, num_classes=4))
    label_map = plane.labels(index, {"hierarchy": "level"})
    assert label_map.resolve_targets(index.split("train")).targets_N().tolist() == [0, 0, 1, 1]
    assert read_record(plane.store, index.key).metrics["num_val"] == 0


SETS = ClassLabels.of_sets([[3, 0], [1], [], [0, 2, 3]], ["a", "b", "c", "d"])


def test_labels_class_with_several_targets_gives_padded_rows() -> None:
    bound = SETS.resolve_targets(split_of([1, 0, 3, 2, 0]))
    assert (bound.is_multi_label, bound.max_targets, bound.num_classes) == (True, 3, 4)
    expected = [[1, -1, -1], [0, 3, -1], [0, 2, 3], [-1, -1, -1], [0, 3, -1]]
    assert bound.take(np.arange(5)).tolist() == expected
    assert bound.take(np.array([2, 0])).tolist() == [expected[2], expected[0]]
    assert bound.counts().tolist() == [3, 1, 1, 3]
    is_labelled_N = bound.is_labelled_N()
    assert is_labelled_N is not None
    assert is_labelled_N.tolist() == [True, True, True, False, True]
    with pytest.raises(UserError, match="several labels"):
        bound.targets_N()


def test_labels_sample_with_several_leaves_has_the_union_of_their_targets() -> None:
    leaf_sets = [[0, 3], [], [1, 0], [2], [3, 1]]
    bound = SETS.resolve_targets(split_of([0, -1, 1, 2, 3], leaf_sets=leaf_sets))
    rows = [
        sorted({target for leaf in leaves for target in (SETS.targets[leaf]) if target >= 0}) for leaves in leaf_sets
    ]
    assert bound.is_multi_label
    assert bound.max_targets == 4
    assert bound.take(np.arange(5)).tolist() == [row + [-1] * (4 - len(row)) for row in rows]
    assert bound.take(np.array([3, 4, 0])).tolist() == [
        row + [-1] * (4 - len(row)) for row in (rows[3], rows[4], rows[0])
    ]
    assert bound.counts().tolist() == [sum(target in row for row in rows) for target in range(4)]


def test_labels_multi_label_samples_stay_multi_label_in_a_space_of_single_targets() -> None:
    label_map = ClassLabels(num_classes=2, names=("a", "b"), targets=np.array([0, 1, 0]))
    bound = label_map.resolve_targets(split_of([0, 1], leaf_sets=[[0, 2], [1, 2]]))
    assert bound.is_multi_label
    assert bound.take(np.arange(2)).tolist() == [[0, -1], [0, 1]]


@pytest.mark.parametrize("draw", Draw)
def test_labels_random_ids_within_groups_stay_within_them(draw: Draw) -> None:
    groups = np.array([0, 1, -1, 0])
    leaves = np.random.default_rng(0).integers(0, 4, 900)
    label_map = RandomLabels(num_classes=6, seed=1, draw=draw, groups=groups, num_ids=3, names=tuple("abcdef"))
    targets = label_map.resolve_targets(split_of(leaves.tolist())).targets_N()
    assert np.array_equal(targets // 3, np.where(groups[leaves] < 0, -1, groups[leaves]))
    counts = label_map.resolve_targets(split_of(leaves.tolist())).counts().reshape(2, 3)
    spread = counts.max(axis=1) - counts.min(axis=1)
    assert spread.max() <= 1 if draw is Draw.BALANCED else 1 < spread.max() < 60


def test_labels_independent_random_ids_leave_classes_empty_where_balanced_ones_do_not() -> None:
    split = split_of([0] * 2000)
    balanced, independent = (
        RandomLabels(num_classes=2000, seed=0, draw=draw).resolve_targets(split).counts() for draw in Draw
    )
    assert balanced.tolist() == [1] * 2000
    assert 0.3 < np.mean(independent == 0) < 0.44  # 1/e


def test_labels_random_ids_never_change() -> None:
    split = split_of([0, 0, 1, 1, 0, 1, 0, 1])
    groups = np.array([0, 1])
    maps = [
        RandomLabels(num_classes=3, seed=5),
        RandomLabels(num_classes=3, seed=5, draw=Draw.INDEPENDENT),
        RandomLabels(num_classes=4, seed=5, groups=groups, num_ids=2),
    ]
    assert [label_map.resolve_targets(split).targets_N().tolist() for label_map in maps] == KNOWN_IDS


def test_labels_bound_table_serves_tests() -> None:
    bound = SplitTargets.of(np.array([1, 0, 1]), 2)
    assert bound.take(np.array([2, 1])).tolist() == [1, 0]
    assert (bound.num_samples, bound.is_multi_label, bound.is_labelled_N()) == (3, False, None)
