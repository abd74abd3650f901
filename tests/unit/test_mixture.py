"""Mixtures of data sets: joined classes, joined indexes, and what a sweep.yaml may say of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.errors import BadDataError, SpecError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.dataset_files import join_class_tables
from orchestrator.sweepfile.labels import LabelSources
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.sweep import SweepSpec, resolve_sweep
from tests.data_jobs import DataPlane, encoded, tar_of
from workloads.commands.labels import table
from workloads.data.index import MixtureShares, SampleIndex
from workloads.data.loader import EvalLoader, SampleSource

FIRST = [
    {"class": 0, "name": "cat", "group": "animal", "own": 1},
    {"class": 1, "name": "oak", "group": "plant", "own": 2},
]
SECOND = [{"class": 0, "name": "oak", "group": "plant"}, {"class": 1, "name": "dog", "group": "animal"}]


def test_mixture_joins_classes_by_name_and_keeps_common_levels() -> None:
    rows, numbers = join_class_tables([FIRST, SECOND])
    assert [row["name"] for row in rows] == ["cat", "oak", "dog"]
    assert rows[2] == {"class": 2, "name": "dog", "group": "animal"}
    assert numbers == [[0, 1], [1, 2]]
    assert "own" not in rows[0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([{"class": 0, "name": "oak", "group": "stone"}], "class 'oak' is 'plant' at level 'group' in one data set"),
        ([{"class": 0}], "lacks one"),
        ([{"class": 0, "name": "a"}, {"class": 1, "name": "a"}], "repeats one"),
    ],
)
def test_mixture_of_class_tables_that_disagree_is_bad_data(second: list[dict[str, object]], message: str) -> None:
    with pytest.raises(BadDataError, match=message):
        join_class_tables([FIRST, second])


# --------------------------------------------------------------------------------------------------- the joint index


def shard_of(name: str, leaves: list[int]) -> bytes:
    members = []
    for row, leaf in enumerate(leaves):
        members += [(f"{name}{row}.png", encoded(seed=len(name) * 10 + row)), (f"{name}{row}.cls", str(leaf).encode())]
    return tar_of(members)


@pytest.fixture
def plane(tmp_path: Path) -> DataPlane:
    return DataPlane(folder=tmp_path)


def dataset(plane: DataPlane, shards: dict[str, bytes], names: list[str]) -> SampleIndex:
    request = plane.request(JobKind.DATASET, {"names": names}, {})
    writer = ArtifactWriter(plane.store, request)
    for name, content in shards.items():
        writer.add(name, content)
    rows = [{"class": leaf, "name": name, "level": name[0]} for leaf, name in enumerate(names)]
    writer.add("classes.json", json.dumps(rows).encode())
    writer.commit(now=0.0)
    return plane.index(request.key)


@pytest.fixture
def parts(plane: DataPlane) -> list[SampleIndex]:
    """Classes in another order; the second data set has a split more."""
    first = {"train-0.tar": shard_of("a", [0, 1, 1]), "train-1.tar": shard_of("aa", [0])}
    second = {"train-0.tar": shard_of("b", [2, 0]), "val-0.tar": shard_of("v", [1])}
    return [dataset(plane, first, ["cat", "oak"]), dataset(plane, second, ["oak", "ant", "cat"])]


def mixed(plane: DataPlane, parts: list[SampleIndex], weights: list[float] | None = None) -> SampleIndex:
    inputs = {f"part{number}": part.key for number, part in enumerate(parts)}
    record = plane.run(JobKind.INDEX, {"mixture": {"weights": weights}}, inputs)
    return SampleIndex.open(plane.store, record.key, plane.cache)


def test_mixture_index_is_its_components_one_after_the_other(plane: DataPlane, parts: list[SampleIndex]) -> None:
    index = mixed(plane, parts)
    train = index.split("train")
    assert (index.num_classes, train.shard_sizes, train.shares) == (3, (3, 1, 2), None)
    assert [row["name"] for row in index.classes] == ["cat", "oak", "ant"]
    assert train.leaves.tolist() == [0, 1, 1, 0, 0, 1]
    assert [train.key(ordinal) for ordinal in range(6)] == ["a0", "a1", "a2", "aa0", "b0", "b1"]
    assert index.split("val").leaves.tolist() == [2]


def test_mixture_images_are_those_of_the_components(plane: DataPlane, parts: list[SampleIndex]) -> None:
    def images(index: SampleIndex) -> np.ndarray:
        source = SampleSource(plane.store, index, "train", cache_dir=plane.cache, image_size=16)
        labels = plane.labels(index, {"modulo": 2}).resolve_targets(source.split)
        return np.concatenate([batch.images_BCHW.numpy() for batch in EvalLoader(source, labels, batch_size=4)])

    assert np.array_equal(images(mixed(plane, parts)), np.concatenate([images(part) for part in parts]))


def test_mixture_that_trains_on_a_shard_of_another_split_is_bad_data(plane: DataPlane) -> None:
    held_out = shard_of("v", [1, 0])
    first = dataset(plane, {"train-0.tar": shard_of("a", [0, 1]), "val-0.tar": held_out}, ["cat", "oak"])
    second = dataset(plane, {"train-7.tar": held_out}, ["oak", "cat"])
    with pytest.raises(BadDataError, match=r"val-0\.tar of split 'val' is train-7\.tar of split 'train', too"):
        mixed(plane, [first, second])


def test_mixture_whose_samples_repeat_says_so(plane: DataPlane, caplog: pytest.LogCaptureFixture) -> None:
    common = shard_of("a", [0, 1])
    first = dataset(plane, {"train-0.tar": common, "train-1.tar": shard_of("b", [1])}, ["cat", "oak"])
    second = dataset(plane, {"train-0.tar": common}, ["oak", "cat"])
    assert mixed(plane, [first, second]).split("train").num_samples == 5
    assert "1 shards of split 'train' are in several data sets of the mixture, the first is train-0.tar" in caplog.text


def test_mixture_weights_stand_in_the_index(plane: DataPlane, parts: list[SampleIndex]) -> None:
    index = mixed(plane, parts, [1, 3])
    assert index.split("train").shares == MixtureShares(weights=(1, 3), num_shards=(2, 1))
    with pytest.raises(UserError, match="has 1 weights"):
        mixed(plane, parts, [1])


# ------------------------------------------------------------------------------------------------------ the language

HEAD = """\
version: 1
name: mixed
datasets:
  a: {builtin: synthetic-hierarchy, branching: [2, 2, 3], num_train: 600, num_val: 72, image_size: 16, patch_size: 4}
  b: {builtin: synthetic-hierarchy, branching: [2, 2, 4], num_train: 320, num_val: 64, image_size: 16, patch_size: 4}
"""
TAIL = """
labels:
  levels: {dataset: both, hierarchy: [depth1, depth3]}
pretrain:
  model: {name: fasternet_t0, image_size: 16, kwargs: {patch_size: 4, embed_dim: 32, depths: [1], feature_dim: 64}}
  labels: ["*"]
  recipe: {epochs: 1, batch_size: 32, lr: 0.1}
"""
SOURCES = LabelSources(read_table=lambda dataset: table({"dataset": {"builtin": dataset.parameters}})["rows"])


def planned(entry: str, sources: LabelSources | None = SOURCES) -> dict[str, tuple[str, ...]]:
    tree = parse_tree(HEAD + f"  both: {entry}" + TAIL, "sweep.yaml")
    sweep = resolve_sweep(validate(SweepSpec, tree.value, tree), tree, {}, labels=sources)
    plan = build_plan(sweep, store_uri="file:///store")
    assert [sweep.labels[f"levels/{level}"].num_classes for level in ("depth1", "depth3")] == [2, 16]
    assert sweep.datasets["both"].num_train == 920
    return {job.name: job.needs for job in plan.jobs if job.kind in {JobKind.INDEX, JobKind.LABELS}}


def test_mixture_index_needs_the_indexes_of_its_components() -> None:
    needs = planned("{mixture: [a, b], weights: [1, 3]}")
    assert needs["index/both"] == ("index/a", "index/b")
    assert needs["labels/levels/depth1"] == ("index/both",)
    assert list(needs)[:3] == ["index/a", "index/b", "index/both"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{mixture: [a, c]}", "sweep.yaml:6:23: datasets.both.mixture[1]: 'c' is not a data set that can be mixed"),
        ("{mixture: [a, a]}", "'a' is given twice"),
        ("{mixture: [a, both]}", "'both' is not a data set that can be mixed"),
        ("{mixture: [a]}", "at least 2 items"),
        ("{mixture: [a, b], weights: [1]}", "1 weights for 2 data sets"),
        ("{mixture: [a, b], weights: [1, 0]}", "greater than 0"),
        ("{mixture: [a, b], weights: [1, 20000]}", "datasets.both.weights: the weights [1.0, 20000.0] of a mixture"),
        ("{mixture: [a, b], weight: [1, 1]}", "unknown key 'weight'"),
    ],
)
def test_mixture_that_does_not_fit_is_refused(entry: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        planned(entry)
    assert message in str(caught.value)


def test_mixture_of_built_in_data_needs_the_data_plane() -> None:
    with pytest.raises(SpecError, match="only known where the data plane can be asked"):
        planned("{mixture: [a, b]}", None)
