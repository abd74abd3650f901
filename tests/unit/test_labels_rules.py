"""Label spaces made of other classes, parts of data sets, and label spaces of other packages."""

from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core import plugins
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.plugins import LABEL_SPACES
from orchestrator.storage.artifacts import ArtifactWriter
from tests.data_jobs import DataPlane
from workloads.commands.labels import complete_definition
from workloads.data.index import NO_LEAF, LeafSets, SplitIndex
from workloads.labels.inputs import LabelInputs
from workloads.labels.label_map import ClassLabels, LabelMap, RandomLabels
from workloads.labels.rules import make_label_map

GROUPS = ["plant", "plant", "animal", "animal", "animal", "stone"]
CLASSES = [
    {"class": number, "name": name, "synset": f"n{number:08d}", "group": group}
    for number, (name, group) in enumerate(zip(["oak", "fir", "cat", "dog", "cow", "agate"], GROUPS, strict=True))
]
GROUP = {"hierarchy": "group"}
RANDOM = {"random": {"num_classes": 2, "seed": 0}}


def made(space: dict[str, Any]) -> LabelMap:
    return make_label_map(space, CLASSES, num_train=60)


def targets(space: dict[str, Any]) -> list[Any]:
    label_map = made(space)
    assert isinstance(label_map, ClassLabels)
    found: list[Any] = label_map.targets.tolist()
    return found


def test_labels_modulo_of_a_base_counts_its_classes() -> None:
    assert targets({"modulo": 2, "base": GROUP}) == [0, 0, 1, 1, 1, 0]


def test_labels_listed_groups_keep_or_drop_the_others() -> None:
    groups = [{"name": "trees", "classes": ["oak", 1]}, {"name": "pets", "classes": ["n00000002", "dog"]}]
    kept = made({"merge": {"groups": groups, "others": "keep"}})
    assert kept.class_names == ("trees", "pets", "cow", "agate")
    assert targets({"merge": {"groups": groups, "others": "keep"}}) == [0, 0, 1, 1, 2, 3]
    assert targets({"merge": {"groups": groups, "others": "drop"}}) == [0, 0, 1, 1, -1, -1]


def test_labels_listed_groups_of_a_base_are_its_classes() -> None:
    space = {"merge": {"groups": [{"name": "alive", "classes": ["plant", "animal"]}], "others": "keep"}, "base": GROUP}
    assert targets(space) == [0, 0, 0, 0, 0, 1]
    assert made(space).class_names == ("alive", "stone")


def test_labels_name_no_class_by_a_number_that_another_class_has_as_its_name() -> None:
    names = sorted(str(number) for number in range(12))  # folders are sorted as text: class number 2 is "10"
    classes = [{"class": number, "name": name} for number, name in enumerate(names)]

    def listed(*members: object) -> list[int]:
        label_map = make_label_map({"binary": list(members)}, classes, num_train=60)
        assert isinstance(label_map, ClassLabels)
        return np.flatnonzero(label_map.targets).tolist()

    assert listed(0, 1) == [0, 1]  # the numbers of "0" and "1" are their names
    assert listed("2", "10") == [2, 4]
    with pytest.raises(UserError, match='2 is class number 2, called "10", and another class is called "2"; write "2"'):
        listed(2)
    with pytest.raises(UserError, match='11 is class number 11, called "9"'):
        listed(0, 11)
    classes = [row | {"name": f"{row['name']}.0"} for row in classes]  # as pandas writes numbers beside gaps
    with pytest.raises(UserError, match=r'2 is class number 2, called "10\.0", and another class is called "2\.0"'):
        listed(2)


def test_labels_random_merges_are_balanced_and_seeded() -> None:
    first, again, other = (targets({"merge": {"num_classes": 3, "seed": seed}}) for seed in (0, 0, 1))
    assert first == again != other
    assert np.bincount(first).tolist() == [2, 2, 2]
    assert first == [0, 2, 1, 1, 2, 0]


def test_labels_binary_is_one_for_the_listed_classes() -> None:
    assert targets({"binary": ["cat", 5]}) == [0, 0, 1, 0, 0, 1]
    assert targets({"binary": ["animal"], "base": GROUP}) == [0, 0, 1, 1, 1, 0]


def test_labels_name_of_a_class_is_also_the_group_of_another() -> None:
    rows = [("bird", "animal"), ("robin", "bird"), ("oak", "plant")]
    classes = [{"class": number, "name": name, "kind": kind} for number, (name, kind) in enumerate(rows)]
    label_map = make_label_map({"binary": ["bird"]}, classes, num_train=60)
    assert isinstance(label_map, ClassLabels)
    assert label_map.targets.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        # Classes of the four samples: cat and oak; fir and oak; dog; none.
        ({"binary": ["cat", "dog"]}, [1, 0, 1, -1]),
        ({"binary": ["animal"], "base": GROUP}, [1, 0, 1, -1]),
        ({"binary": ["cat", "dog"], "classes": {"names": ["cat", "oak"]}}, [1, 0, -1, -1]),
        (GROUP, [[0, 1], [0, -1], [1, -1], [-1, -1]]),
    ],
)
def test_labels_of_samples_with_several_classes_are_their_union_or_a_yes_or_no(
    space: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    sets = LeafSets(offsets=np.array([0, 2, 4, 5, 5]), values=np.array([2, 0, 1, 0, 3]))
    split = SplitIndex.in_memory(leaves=np.array([2, 1, 3, NO_LEAF]), leaf_sets=sets)
    plane = DataPlane(folder=tmp_path)
    request = plane.request(JobKind.LABELS, {}, {})
    writer = ArtifactWriter(plane.store, request)
    made(space).write(writer)
    writer.commit(now=0.0)
    for label_map in (made(space), LabelMap.open(plane.store, request.key)):
        bound = label_map.resolve_targets(split)
        assert bound.take(np.arange(4)).tolist() == expected
        assert bound.is_multi_label == isinstance(expected[0], list)


def test_labels_split_makes_random_parts_of_each_class() -> None:
    label_map = made({"split": {"num": 2, "seed": 0, "draw": "balanced"}, "base": GROUP})
    assert label_map.class_names[:3] == ("plant/0", "plant/1", "animal/0")
    leaves = np.repeat(np.arange(6), 10)
    split = SplitIndex.in_memory(leaves=leaves)
    found = label_map.resolve_targets(split).targets_N()
    assert np.array_equal(found // 2, np.array([0, 0, 1, 1, 1, 2])[leaves])
    assert label_map.resolve_targets(split).counts().tolist() == [10, 10, 15, 15, 5, 5]


def test_labels_random_ids_within_a_level() -> None:
    label_map = made({"random": {"num_classes": 5, "seed": 3, "within": GROUP}})
    assert isinstance(label_map, RandomLabels)
    assert label_map.num_classes == 15
    counts = label_map.resolve_targets(SplitIndex.in_memory(leaves=np.repeat(np.arange(6), 10))).counts()
    assert counts.tolist() == [4] * 5 + [6] * 5 + [2] * 5


def test_labels_chosen_classes_leave_the_others_out() -> None:
    assert targets({"modulo": 3, "classes": {"names": ["oak", "dog", "cow"]}}) == [0, -1, -1, 0, 1, -1]
    assert targets({**GROUP, "classes": {"names": ["cat", "agate"]}}) == [-1, -1, 0, -1, -1, 1]
    label_map = made({**GROUP, "classes": {"names": ["cat", "agate"]}})
    assert (label_map.num_classes, label_map.class_names) == (2, ("animal", "stone"))


def test_labels_random_choices_of_classes_are_nested() -> None:
    space = {"merge": {"groups": [{"name": "oak", "classes": ["oak"]}], "others": "keep"}}
    kept = [
        set(np.flatnonzero(np.array(targets({**space, "classes": {"num": number, "seed": 4}})) >= 0).tolist())
        for number in range(2, 7)
    ]
    assert [len(chosen) for chosen in kept] == [2, 3, 4, 5, 6]
    assert all(fewer < more for fewer, more in pairwise(kept))


@pytest.mark.parametrize("space", [RANDOM, {"split": {"num": 3, "seed": 0}, "base": GROUP}])
def test_labels_chosen_classes_of_random_ids_keep_whole_groups(space: dict[str, Any]) -> None:
    label_map = made({**space, "classes": {"names": ["oak", "cat"]}})
    split = SplitIndex.in_memory(leaves=np.repeat(np.arange(6), 12))
    found = label_map.resolve_targets(split).targets_N()
    assert np.array_equal(found >= 0, np.isin(split.leaves, [0, 2]))
    assert set(found.tolist()) - {-1} == set(range(label_map.num_classes))
    assert len(label_map.class_names) == label_map.num_classes


PLANTS = {"merge": {"groups": [{"name": one, "classes": [one]} for one in ("oak", "fir")], "others": "drop"}}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {
                "merge": {
                    "groups": [{"name": "a", "classes": [0, 1]}, {"name": "b", "classes": ["oak"]}],
                    "others": "keep",
                }
            },
            "'oak' is listed twice",
        ),
        ({"merge": {"groups": [{"name": "a", "classes": [0, 1]}], "others": "drop"}}, "a single class is left"),
        (
            {"merge": {"groups": [{"name": "a", "classes": [9]}], "others": "keep"}},
            "no class 9; classes count from 0 to 5",
        ),
        ({"merge": {"groups": [{"name": "a", "classes": ["elm"]}], "others": "keep"}}, "'elm' is not a class of the 6"),
        ({"binary": ["plant"]}, "'plant' names several classes of the 6"),
        ({"binary": [0, 1, 2, 3, 4, 5]}, "6 of 6 classes are listed"),
        ({"merge": {"num_classes": 7, "seed": 0}}, "there are 6 classes to merge"),
        ({"modulo": 4, "base": GROUP}, "use 2 to 3"),
        ({"modulo": 2, "base": RANDOM}, "needs a base in which each class has one target"),
        ({"split": {"num": 21, "seed": 0}, "base": GROUP}, "21 random parts of 3 classes"),
        ({**GROUP, "classes": {"names": ["oak", "fir"]}}, "a single class is left of the label space ('plant')"),
        ({**PLANTS, "classes": {"names": ["cat"]}}, "no class is left of the label space"),
        (
            {"random": {"num_classes": 2, "seed": 0, "within": PLANTS}, "classes": {"names": ["cat", "agate"]}},
            "no class is left of the label space",
        ),
        ({**GROUP, "classes": {"num": 7, "seed": 0}}, "num 7 is not valid; the data set has 6 classes"),
        ({"hierarchy": "group", "modulo": 2}, "exactly one of"),
    ],
)
def test_labels_impossible_rule_is_a_user_error(space: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        made(space)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------ other packages' spaces


class Point:
    """An entry point."""

    group, name, module = LABEL_SPACES, "first-letter", "letters"

    def load(self) -> Any:
        return lambda classes, arguments: [
            None if row["name"] in arguments.get("without", []) else row["name"][0] for row in classes
        ]


class Package:
    version = "1.2"
    entry_points = (Point(),)

    def read_text(self, _: str) -> None:
        """As of a package that is not installed editable."""


def plugin(name: str = "letters==1.2:first-letter", **arguments: Any) -> dict[str, Any]:
    return {"plugin": {"name": name, "arguments": arguments}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "distribution", lambda name: Package() if name == "letters" else missing(name))


def missing(name: str) -> Package:
    raise PackageNotFoundError(name)


def test_labels_plugin_names_the_targets(installed: None) -> None:
    assert made(plugin()).class_names == ("o", "f", "c", "d", "a")
    assert targets(plugin(without=["dog"])) == [0, 1, 2, -1, 2, 3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("letters==1.3:first-letter", "was planned with letters 1.3; 1.2 is installed"),
        ("words==1.0:first-letter", "comes from words, which is not installed"),
        ("letters==1.2:last-letter", "has no label space 'last-letter'"),
    ],
)
def test_labels_plugin_that_is_not_there_is_a_user_error(installed: None, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(plugin(name))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (["a"], "in place of 6 targets"),
        ([1, 2, 3, 4, 5, 6], "failed|not names"),
        ([["a", 1]] * 6, "not names"),
        (None, "in place of"),
    ],
)
def test_labels_plugin_with_a_wrong_result_is_a_user_error(
    installed: None, monkeypatch: pytest.MonkeyPatch, result: Any, message: str
) -> None:
    monkeypatch.setattr(Point, "load", lambda _: lambda _classes, _arguments: result)
    with pytest.raises(UserError, match=message):
        made(plugin())


def test_labels_plugin_keeps_arguments_that_are_called_as_fields_of_other_rules() -> None:
    space = plugin(chain="animal", digest="abc", taxonomy={"chain": 1}, base={"digest": ""})
    assert complete_definition(space, LabelInputs(classes=[], num_train=0)) == space
