"""Label spaces and the maps that they become."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.contract import JobKind
from orchestrator.errors import BadDataError, UserError
from orchestrator.storage.artifacts import ArtifactWriter, read_record
from tests.data_jobs import DIGITS, TREE, DataPlane, encoded, tar_of
from workloads.data.index import SampleIndex
from workloads.labels.label_map import ClassLabels, LabelMap, RandomLabels, SampleLabels
from workloads.labels.spaces import make_label_map

CLASSES = [
    {"class": 0, "name": "oak", "order": "plant", "leaf": "oak"},
    {"class": 1, "name": "cat", "order": "animal", "leaf": "cat"},
    {"class": 2, "name": "fir", "order": "plant", "leaf": "fir"},
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> DataPlane:
    return DataPlane(folder=tmp_path_factory.mktemp("plane"))


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
    leaves = index.split("val").leaves
    assert label_map.num_classes == len(label_map.class_names) == num_classes
    assert np.array_equal(label_map.bind("val", leaves), leaves // leaves_per_node)
    assert label_map.bind("val", leaves).dtype == np.int64


def test_labels_level_ids_count_nodes_by_first_appearance() -> None:
    label_map = make_label_map({"hierarchy": "order"}, CLASSES, num_train=3)
    assert label_map.class_names == ("plant", "animal")
    assert label_map.bind("train", np.array([0, 1, 2, 1], dtype=np.int32)).tolist() == [0, 1, 0, 1]


def test_labels_modulo_takes_the_leaf_modulo_the_divisor(plane: DataPlane) -> None:
    digits = plane.builtin(DIGITS)
    leaves = digits.split("train").leaves
    assert np.array_equal(plane.labels(digits, {"modulo": 5}).bind("train", leaves), leaves % 5)


@pytest.mark.parametrize("num_classes", [2, 7, 128, 600])
def test_labels_random_ids_are_balanced_in_each_split(plane: DataPlane, index: SampleIndex, num_classes: int) -> None:
    label_map = plane.labels(index, {"random": {"num_classes": num_classes, "seed": 0}})
    for split in index.splits.values():
        counts = np.bincount(label_map.bind(split.name, split.leaves), minlength=num_classes)
        assert counts.max() - counts.min() <= 1


def test_labels_random_seed_and_split_name_different_permutations() -> None:
    leaves = np.zeros(500, dtype=np.int32)
    first, again, other = (RandomLabels(num_classes=10, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.bind("train", leaves), again.bind("train", leaves))
    assert np.mean(first.bind("train", leaves) == other.bind("train", leaves)) < 0.3
    assert np.mean(first.bind("train", leaves) == first.bind("val", leaves)) < 0.3


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
        ({"clusters": 3}, "exactly one of hierarchy, modulo, random"),
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
        ([*CLASSES[:2], {"class": 2, "name": "fir"}], "class 2 has no value at level 'order'"),
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
        RandomLabels(num_classes=3, seed=4),
    ],
)
def test_labels_written_map_opens_as_the_same_map(tmp_path: Path, label_map: LabelMap) -> None:
    plane = DataPlane(folder=tmp_path)
    request = plane.request(JobKind.LABELS, {}, {})
    writer = ArtifactWriter(plane.store, request)
    label_map.write(writer)
    writer.commit(now=0.0)
    opened = LabelMap.open(plane.store, request.key)
    leaves = np.array([0, 1, 2], dtype=np.int32)
    assert (opened.num_classes, opened.class_names) == (label_map.num_classes, label_map.class_names)
    assert np.array_equal(opened.bind("train", leaves), label_map.bind("train", leaves))


@pytest.mark.parametrize(
    "label_map",
    [
        ClassLabels(num_classes=2, names=("a", "b"), targets=np.array([0, 1])),
        SampleLabels(num_classes=2, targets={"train": np.array([0, 1])}),
    ],
)
def test_labels_of_another_data_set_are_refused(label_map: LabelMap) -> None:
    with pytest.raises(BadDataError, match="another data set"):
        label_map.bind("train", np.array([0, 1, 2], dtype=np.int32))


def test_labels_foreign_level_column_is_a_label_space(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    members = [member for leaf in range(4) for member in ((f"{leaf}.png", encoded()), (f"{leaf}.cls", b"%d" % leaf))]
    index = plane.index(plane.foreign({"train-0.tar": tar_of(members)}, num_classes=4))
    label_map = plane.labels(index, {"hierarchy": "level"})
    assert label_map.bind("train", index.split("train").leaves).tolist() == [0, 0, 1, 1]
    assert read_record(plane.store, index.key).metrics["num_val"] == 0
