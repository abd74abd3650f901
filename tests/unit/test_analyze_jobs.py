"""Jobs that analyse features: what the planner makes of them, and what the handler commits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from orchestrator.core.contract import JobResult
from orchestrator.core.errors import PreemptedError, SpecError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.plugins import MEASURES
from orchestrator.planning.estimate.volumes import Volumes
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import read_part, read_record
from orchestrator.storage.dataset_files import level_counts
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.analyze import _level_problem
from orchestrator.sweepfile.load import load_sweep
from orchestrator.sweepfile.values import Dataset, LabelSpace
from tests.sweep_fields import plan_of
from tests.tiny_training import NO_BATCHNORM, TinyTraining
from workloads.data.index import SampleIndex
from workloads.data.loader import EvalLoader
from workloads.data.pixels import PixelSpec
from workloads.data.source import SampleSource
from workloads.data.split_targets import SplitTargets
from workloads.features.artifact import FeatureTable
from workloads.models.build import build_backbone
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors

# ------------------------------------------------------------------------------------------------------------ planning


def analyses(*overrides: str) -> dict[str, Job]:
    return {job.name: job for job in plan_of(*overrides).jobs if job.kind is JobKind.ANALYZE}


def test_analysis_reads_the_features_of_cached_probes() -> None:
    with_it, without = plan_of("analyze.0.from_checkpoints=[3]"), plan_of("analyze=[]")
    new = {job.key for job in with_it.jobs} - {job.key for job in without.jobs}
    assert {key.partition("-")[0] for key in new} == {"analyze", "embed"}
    embeds = [job.name for job in with_it.jobs if job.key in new and job.kind is JobKind.EMBED]
    # Of blocks that no transfer reads.
    assert embeds == ["embed/second/levels/depth1/seed0/tree/val", "embed/third/levels/depth1/seed0/tree/val"]


def test_analysis_of_several_epochs_is_a_job_for_each_backbone_and_epoch() -> None:
    found = analyses("analyze.0.from_checkpoints=[1, 3]")
    names = ["analyze/look/fifth/levels/depth1/seed0/epoch1", "analyze/look/fifth/levels/depth1/seed0/epoch3"]
    assert list(found)[:2] == names
    assert found[names[0]].facets["checkpoint"] == "epoch1"
    assert {"index", "labels", "classes", "train", "val"} == found[names[0]].identity["inputs"].keys()
    assert all(Volumes(plan_of()).of(job).work.operations > 0 for job in analyses().values())


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("", r"analyze\[0\]: samples of data set 'photos' have several classes; name a label space with one for each"),
        ("of: under/leaf, ", r"analyze\[0\]\.of: samples have several classes in 'under/leaf'"),
        ("of: below, ", ""),
    ],
)
def test_analysis_of_samples_with_several_classes_needs_a_label_space_with_one_for_each(of: str, message: str) -> None:
    photos = ("datasets.photos.multi_label=true", "pretrain.first.recipe.loss=sigmoid")
    look = f"analyze=[{{name: look, pretrain: [fifth], dataset: photos, {of}measures: [collapse]}}]"
    if not message:
        assert list(analyses(*photos, look)) == ["analyze/look/fifth/levels/depth1/seed0"]
        return
    with pytest.raises(SpecError, match=message):
        analyses(*photos, look)


TABLE = (
    {"class": 0, "top": "a", "mid": "x", "one": "all", "part": "p"},
    {"class": 1, "top": "a", "mid": "y", "one": "all"},
    {"class": 2, "top": "b", "mid": "z", "one": "all", "part": "q"},
)


@pytest.mark.parametrize(
    ("level", "message", "fields"),
    [
        ("top", "", {}),
        ("mid", "", {}),
        ("mid", "", {"num_labelled": 20}),  # of samples that are left out there may be whole nodes
        ("mid", "'mid' has 3 nodes and 'two' 2 classes, so some lie in several nodes", {"num_labelled": None}),
        ("top", "", {"num_labelled": None}),
        ("top", "samples of data set 'photos' have several classes, and so no node of 'top'", {"multi_label": True}),
        ("one", "'one' has a single node, which all classes share", {}),
        ("part", "class 1 has no value at level 'part'; complete the class table", {}),
        ("name", "'name' is not a level of data set 'photos': ", {}),
    ],
)
def test_level_that_no_classes_lie_in_is_refused_before_anything_is_trained(
    level: str, message: str, fields: dict[str, Any]
) -> None:
    of = None
    if "num_labelled" in fields:
        of = LabelSpace(name="two", entry="two", level="", dataset="photos", space={}, num_classes=2, **fields)
    dataset = Dataset(
        name="photos",
        readable="",
        parameters={},
        levels=level_counts(TABLE),
        num_classes=3,
        num_train=30,
        class_table=TABLE,
        multi_label="multi_label" in fields,
    )
    found = _level_problem(level, dataset, of)
    assert found.startswith(message)
    assert bool(found) == bool(message)


def test_sparsity_of_layers_reads_the_backbone_and_embeds_nothing_more() -> None:
    name, overrides = "analyze/layers/third/levels/depth1/seed0", ("analyze.2.measures=[sparsity]",)
    with_layers, without = plan_of(), plan_of(*overrides)
    changed = {job.name for job in with_layers.jobs} ^ {job.name for job in without.jobs}
    assert not changed
    job, plain = with_layers.by_name()[name], without.by_name()[name]
    assert job.identity["inputs"].keys() - plain.identity["inputs"].keys() == {"backbone"}
    assert plain.identity["parameters"] == {"split": "val", "measures": {"sparsity": {}}}
    embed = with_layers.by_name()["embed/third/levels/depth1/seed0/tree/val"].identity["parameters"]
    assert embed.items() <= job.identity["parameters"].items()  # seen as the features are, by the same weights
    macs_less = Volumes(without).of(plain).work.operations
    assert Volumes(with_layers).of(job).work.operations > macs_less
    (kept,) = (
        job.identity["parameters"]["checkpoint"]
        for job in plan_of("analyze.2.pretrain=[fifth]", "analyze.2.from_checkpoints=[1]").jobs
        if job.name.startswith("analyze/layers")
    )
    assert kept == 1


def test_similarity_compares_what_differs_in_the_named_factors_alone() -> None:
    narrow = analyses("analyze.1.pretrain=[first]", "analyze.1.between=[labels]", "analyze.1.labels=[levels/*]")
    by_seed = {name: len(job.identity["inputs"]) - 1 for name, job in narrow.items() if "alike" in name}
    assert by_seed == {"analyze/alike/first/seed0": 2, "analyze/alike/first/seed1": 2}
    wide = analyses("analyze.1.pretrain=[first]", "analyze.1.between=[labels, seeds]", "analyze.1.labels=[levels/*]")
    assert {name: len(job.identity["inputs"]) - 1 for name, job in wide.items() if "alike" in name} == {
        "analyze/alike/first": 4
    }
    seeds = analyses("analyze.1.pretrain=[first]", "analyze.1.between=[seeds]", "analyze.1.labels=[levels/*]")
    by_space = {name: job.facets.get("label_space") for name, job in seeds.items() if "alike" in name}
    assert sorted(map(str, by_space.values())) == ["levels/depth1", "levels/depth2"]  # a row and a matrix of their own
    assert not any("pretrain_seed" in seeds[name].facets for name in by_space)


@pytest.mark.parametrize(("name", "num_jobs"), [("neurons-cifar10", 336), ("neurons-cifar100", 102)])
def test_shipped_sweep_is_planned_without_its_images(name: str, num_jobs: int) -> None:
    plan = build_plan(load_sweep(name)[0], store_uri="file:///store")
    assert sum(job.kind is JobKind.ANALYZE for job in plan.jobs) == num_jobs


# ------------------------------------------------------------------------------------------------------------- handler

LOOK = {"view": "center", "resize": None, "interpolation": "bilinear", "decoder": "pillow", "mean": None, "std": None}
NETWORK = {**LOOK, "model": NO_BATCHNORM, "precision": "fp32"}


class Backbones:
    """Two backbones with the features of both splits."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "store")
        self.tiny = TinyTraining(self.store, folder)
        self.labels = self.tiny.labels({"hierarchy": "depth1"})
        requests = [
            self.tiny.training(space={"hierarchy": "depth1"}, recipe={"epochs": 1}, seed=seed) for seed in (0, 1)
        ]
        self.keys = [self.tiny.run(request).key for request in requests]
        self.features = [self._features(key) for key in self.keys]

    def _features(self, backbone: str) -> dict[str, str]:
        inputs = {"index": self.tiny.index, "backbone": backbone}
        return {
            split: self.tiny.run(self.tiny.request(JobKind.EMBED, {**NETWORK, "split": split}, inputs)).key
            for split in ("train", "val")
        }

    def analyze(
        self, measures: Mapping[str, Any], inputs: Mapping[str, str], split: str = "val", **how: Any
    ) -> JobResult:
        parameters = {"split": split, "measures": measures, **(NETWORK if "backbone" in inputs else {})}
        request = self.tiny.request(JobKind.ANALYZE, parameters, {"index": self.tiny.index, **inputs})
        return self.tiny.run(request, **how)

    def document(self, key: str) -> Any:
        return json.loads(read_part(self.store, read_record(self.store, key), "measures.json"))

    def arrays(self, key: str) -> Any:
        return np.load(BytesIO(read_part(self.store, read_record(self.store, key), "arrays.npz")))


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Backbones:
    return Backbones(tmp_path_factory.mktemp("analyze"))


ALL = {
    "collapse": {},
    "distances": {"levels": None},
    "clp": {"reduce": "none", "seeds": [0, 1], "samples": 80, "raw_pixels": True},
    "rank": {},
    "purity": {"top": 5},
    "sparsity": {},
    "embedding": {"method": "pca", "samples": 20, "seed": 0},
}


def test_analysis_commits_numbers_matrices_and_pictures(backbones: Backbones) -> None:
    result = backbones.analyze(ALL, {"labels": backbones.labels, **backbones.features[0]})
    found = dict(result.metrics)
    assert found["distance_self"] < found["distance_other"]
    assert {
        "nc1",
        "original_nc1",
        "msdr",
        "clp_chance_accuracy",
        "clp_raw_accuracy",
        "rankme",
        "active_share",
    } <= found.keys()
    assert {"distance_depth1", "distance_root", "purity_depth1", "purity_class"} <= found.keys()
    # Of 2 x 2 leaf classes the pairs of one trained class are those that share depth1.
    assert found["distance_same"] == pytest.approx(found["distance_depth1"])
    document, arrays = backbones.document(result.key), backbones.arrays(result.key)
    assert document["measures"]["rank"].keys() == {"rankme", "stable_rank"}
    assert len(document["pictures"]["embedding"]["points"]) == 20
    assert arrays["distances"].shape == (4, 4)
    table = FeatureTable.open(backbones.store, backbones.features[0]["val"], backbones.tiny.folder / "cache")
    features = table.take(np.arange(table.num_samples)).astype(np.float64)
    squared = ((features[:, None] - features[None]) ** 2).sum(-1)
    assert np.diag(arrays["distances"]).mean() < squared.mean() < arrays["distances"].max()


def test_sparsity_by_layer_is_that_of_the_backbone_on_so_many_samples(backbones: Backbones) -> None:
    key, inputs = backbones.keys[0], {"val": backbones.features[0]["val"]}
    few, all_ = (
        backbones.analyze({"sparsity": {"samples": samples}}, {**inputs, "backbone": key}) for samples in (5, 1000)
    )
    picture = backbones.document(all_.key)["pictures"]["layers"]
    # The network by itself, on all 48 images at once.
    record = read_record(backbones.store, key)
    network = build_backbone(ModelSpec.from_mapping(NO_BATCHNORM), 0)[0].eval()
    network.load_state_dict(decode_tensors(read_part(backbones.store, record, "backbone.safetensors")))
    context, hidden = SimpleNamespace(store=backbones.store, cache=backbones.tiny.folder / "cache"), []
    index = SampleIndex.open(context.store, backbones.tiny.index, context.cache, {})
    with closing(
        SampleSource(context.store, index, "val", cache_dir=context.cache, pixels=PixelSpec(image_size=16))
    ) as source:
        labels = SplitTargets.of(np.zeros(48, np.int8), 1)
        images = torch.cat([batch.images_BCHW for batch in EvalLoader(source, labels, batch_size=48)])
    for block in network.get_submodule("blocks").children():
        block.get_submodule("mlp.fc2").register_forward_pre_hook(lambda _, given: hidden.append(given[0]))
    with torch.inference_mode():
        network((images / 255 - 0.5) / 0.25)
    assert picture["names"] == [f"blocks.{number}.mlp.act" for number in range(len(hidden))]
    shares = [float((units > 0).double().mean()) for units in hidden]
    assert picture["values"] == pytest.approx(shares, rel=1e-3)
    assert all_.metrics["layers_active_share"] == pytest.approx(np.mean(shares), rel=1e-3)
    fewer = backbones.arrays(few.key)["active_by_layer"]
    assert fewer == pytest.approx(shares, rel=0.3)
    assert fewer != pytest.approx(shares, rel=1e-3)


def test_analysis_of_given_classes_without_trained_ones_leaves_out_what_needs_these(backbones: Backbones) -> None:
    classes = backbones.tiny.labels({"modulo": 2})
    measures = {"collapse": {}, "distances": {"levels": None}}
    result = backbones.analyze(measures, {"classes": classes, "val": backbones.features[0]["val"]})
    assert {"original_nc1", "distance_self"} <= result.metrics.keys()
    assert {"nc1", "msdr", "distance_depth1"}.isdisjoint(result.metrics)


def test_similarity_of_a_backbone_and_itself_is_one(backbones: Backbones) -> None:
    first, second = (features["val"] for features in backbones.features)
    result = backbones.analyze({"cka": {}}, {"features0": first, "features1": second, "features2": first})
    values = np.array(backbones.document(result.key)["pictures"]["cka"]["values"])
    assert values[0, 2] == pytest.approx(1)
    assert values[0, 1] == values[1, 0] == pytest.approx(values[1, 2])
    assert values[0, 1] < 0.999


def test_analysis_that_is_asked_to_stop_says_so(backbones: Backbones) -> None:
    with pytest.raises(PreemptedError, match="starts over"):
        backbones.analyze({"rank": {}}, {"val": backbones.features[0]["val"]}, should_stop=lambda: True)


def test_features_of_another_split_are_refused(backbones: Backbones) -> None:
    with pytest.raises(UserError, match="not of 'val'"):
        backbones.analyze({"rank": {}}, {"val": backbones.features[0]["train"]})


def test_level_that_classes_do_not_lie_in_is_refused(backbones: Backbones) -> None:
    inputs = {"classes": backbones.tiny.labels({"modulo": 2}), "val": backbones.features[0]["val"]}
    with pytest.raises(UserError, match=r"several nodes of 'depth1'.*there are none"):
        backbones.analyze({"distances": {"levels": ["depth1"]}}, inputs)


def fake_package(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    point = SimpleNamespace(group=MEASURES, name="mine", module="mine", load=lambda: function)
    package = SimpleNamespace(version="1", entry_points=[point], read_text=lambda _: None)
    monkeypatch.setattr("orchestrator.core.plugins.distribution", lambda name: package)


def test_measures_start_no_more_threads_than_their_job_has(
    backbones: Backbones, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(*_: Any) -> Mapping[str, float]:
        return {"most": float(max(pool["num_threads"] for pool in threadpool_info() if "openblas" in pool["prefix"]))}

    fake_package(monkeypatch, mine)
    measures = {"plugin": {"name": "pkg==1:mine", "arguments": {}}}
    with threadpool_limits(limits=2):
        assert backbones.analyze(measures, {"val": backbones.features[0]["val"]}).metrics == {"mine_most": 1}


def test_measure_of_another_package_gets_features_targets_and_hierarchy(
    backbones: Backbones, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(features: Any, targets: Any, hierarchy: Any, arguments: Any) -> Mapping[str, float]:
        assert targets.keys() == {"classes", "trained"}
        assert "depth1" in hierarchy
        return {"mean": float(sum(chunk.sum() for chunk in features)) * arguments["factor"]}

    fake_package(monkeypatch, mine)
    measures = {"plugin": {"name": "pkg==1:mine", "arguments": {"factor": 0}}}
    inputs = {"labels": backbones.labels, "val": backbones.features[0]["val"]}
    assert backbones.analyze(measures, inputs).metrics == {"mine_mean": 0}
    fake_package(monkeypatch, lambda *_: {"mean": float("nan")})
    with pytest.raises(UserError, match="in place of finite numbers"):
        backbones.analyze({"plugin": {"name": "pkg==1:mine", "arguments": {}}}, inputs)
