"""From a backbone to a label map: features that survive kills, clusters that refine what they should, clear errors."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from orchestrator.core.contract import Execution, ExecutionContext, JobRequest, Progress
from orchestrator.core.errors import (
    BadDataError,
    CorruptObjectError,
    NumericsError,
    PreemptedError,
    StorageError,
    UserError,
)
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, part_object, read_part, read_record
from orchestrator.storage.digests import Digests
from orchestrator.storage.layout import checkpoints_folder, record_name
from orchestrator.storage.local import LocalStore
from tests.rank_processes import Rank, RankPool, raise_errors
from tests.tiny_training import DATASET, NO_BATCHNORM, TinyTraining
from workloads.data.index import BadSamplePolicy, BadSamples, SampleIndex
from workloads.data.pixels import PixelSpec, Place
from workloads.data.reasons import BadSampleError, Reason
from workloads.data.source import SampleSource
from workloads.data.split_targets import NO_LABEL
from workloads.features.artifact import FeatureTable, FinishedRows
from workloads.jobs.cluster import Group
from workloads.jobs.embed import Embedding
from workloads.labels.label_map import LabelMap, SampleLabels
from workloads.models.build import build_backbone
from workloads.models.spec import ModelSpec
from workloads.run import execute
from workloads.runtime import ranks
from workloads.runtime.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")  # one process has loaded for all what ranks begin with

NUM_TRAIN = 1100
LOOK: dict[str, Any] = {
    "view": "center",
    "resize": None,
    "interpolation": "bilinear",
    "decoder": "pillow",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
    "precision": "fp32",
}
DEPTH1 = {"hierarchy": "depth1"}


class Plane:
    """A store with an indexed data set and a file of weights."""

    def __init__(self, folder: Path, num_train: int = NUM_TRAIN) -> None:
        self.tiny = TinyTraining(LocalStore(folder / "store"), folder)
        tiny, parameters = self.tiny, {**DATASET, "num_train": num_train}
        dataset = tiny.run(tiny.request(JobKind.DATASET, parameters, {})).key
        self.index = tiny.run(tiny.request(JobKind.INDEX, {}, {"dataset": dataset})).key
        self.weights = folder / "weights.safetensors"
        backbone, self.dim = build_backbone(ModelSpec.from_mapping(NO_BATCHNORM), 7)
        if not self.weights.exists():
            save_file(backbone.state_dict(), self.weights)

    @property
    def store(self) -> LocalStore:
        assert isinstance(self.tiny.store, LocalStore)
        return self.tiny.store

    def embed(
        self, split: str = "train", *, attempt: int = 1, changes: Mapping[str, Any] | None = None, every: int = 1
    ) -> JobRequest:
        digest = sha256(self.weights.read_bytes()).hexdigest()
        initial = {"sha256": digest}
        parameters = {"split": split, "model": NO_BATCHNORM, "initial": initial, **LOOK, **(changes or {})}
        uri = self.weights.as_uri()
        execution = Execution(checkpoint_every_steps=every, initial_uri=uri)
        return self.tiny.request(JobKind.EMBED, parameters, {"index": self.index}, execution=execution, attempt=attempt)

    def features(self, request: JobRequest) -> FeatureTable:
        self.tiny.run(request)
        return FeatureTable.open(self.store, request.key, self.tiny.folder / "cache")

    def cluster(self, rule: Mapping[str, Any], *, threads: int = 1, **inputs: str) -> JobRequest:
        parameters = {"within": DEPTH1, "seed": 0, "iterations": 20, "num_init": 1, "library": "scikit-learn", **rule}
        keys = {"index": self.index, "train": self.embed("train").key, "val": self.embed("val").key, **inputs}
        return self.tiny.request(JobKind.CLUSTER, parameters, keys, execution=Execution(num_threads=threads))

    def labels(self, cluster: JobRequest) -> SampleLabels:
        parameters = {"space": {"clusters": dict(cluster.parameters)}}
        request = self.tiny.request(
            JobKind.LABELS, parameters, {"index": cluster.inputs["index"], "clusters": cluster.key}
        )
        found = LabelMap.open(self.store, self.tiny.run(request).key)
        assert isinstance(found, SampleLabels)
        return found

    def open_index(self) -> SampleIndex:
        return SampleIndex.open(self.store, self.index, self.tiny.folder / "cache")

    def superclasses(self, split: str) -> NDArray[np.int64]:
        leaves = np.asarray(self.open_index().split(split).leaves)
        return (leaves // 2).astype(np.int64)  # branching [2, 2]


def attempt_in_process(folder: Path, request: JobRequest, die_at_row: int) -> None:
    """One attempt, killed without warning once so many rows are embedded."""

    def report(progress: Progress) -> None:
        if progress.phase == "embed" and progress.step >= die_at_row:
            os.kill(os.getpid(), signal.SIGKILL)

    TinyTraining(LocalStore(folder / "store"), folder).run(request, report=report)


def embed_in_gang(rank: int, world_size: int, folder: Path, request: JobRequest) -> str:
    """One rank of a gang; which run of rows it was asked to embed first, and how often it listed finished ones.

    Rank 1 takes longer than a collective operation of the gang may.
    """
    tiny, seen = TinyTraining(LocalStore(folder / "store"), folder), list[Progress]()
    scratch = folder / f"scratch{rank}"
    scratch.mkdir()

    def report(progress: Progress) -> None:
        seen.append(progress)
        if rank == 1 and progress.phase == "embed" and progress.step == NUM_TRAIN:
            time.sleep(4.0)

    context = ExecutionContext(
        store=tiny.store,
        scratch=scratch,
        cache=folder / "cache",
        report=report,
        rank=rank,
        world_size=world_size,
        collective_timeout_s=3.0,
    )
    listed = mock.patch.object(FinishedRows, "find", autospec=True, side_effect=FinishedRows.find)
    with mock.patch.object(ranks, "VOTE_EVERY_S", 0.1), listed as find:
        result = execute(request, context)
    steps = [progress.step for progress in seen if progress.phase == "embed"]
    return f"{result.outcome} {list(dict.fromkeys(steps))}, {find.call_count} lists"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Plane:
    return Plane(tmp_path_factory.mktemp("plane"))


@pytest.fixture(scope="module")
def embedded(plane: Plane) -> Plane:
    for split in ("train", "val"):
        plane.tiny.run(plane.embed(split))
    return plane


@pytest.fixture
def killable() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def test_embed_rows_are_what_the_backbone_says_of_the_samples(embedded: Plane) -> None:
    table = embedded.features(embedded.embed())
    assert (table.num_samples, table.dim, len(table.parts)) == (NUM_TRAIN, embedded.dim, 5)
    source = SampleSource(
        embedded.store, embedded.open_index(), "train", cache_dir=embedded.tiny.folder / "cache", image_size=16
    )
    backbone, _ = build_backbone(ModelSpec.from_mapping(NO_BATCHNORM), 7)
    ordinals = np.array([0, 255, 256, 700, NUM_TRAIN - 1])
    pixels = torch.from_numpy(source.images(ordinals)).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        expected = backbone.eval()((pixels - 0.5) / 0.25).numpy()
    assert table.take(ordinals) == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_embed_record_lets_numpy_alone_read_everything(embedded: Plane, tmp_path: Path) -> None:
    request = embedded.embed()
    record = read_record(embedded.store, request.key)
    document = json.loads(read_part(embedded.store, record, "features.json"))
    assert (document["num_samples"], document["dim"], document["split"]) == (NUM_TRAIN, embedded.dim, "train")
    assert document["dataset_digest"] == read_record(embedded.store, embedded.index).summary["dataset_digest"]
    paths = [embedded.tiny.folder / "store" / part_object(record, part["features"]) for part in document["parts"]]
    rows = np.concatenate([np.load(path, mmap_mode="r") for path in paths])
    assert rows.shape == (NUM_TRAIN, embedded.dim)
    assert rows.dtype == np.dtype(np.float16)
    assert np.array_equal(rows, embedded.features(request).take(np.arange(NUM_TRAIN)))


def test_embed_mirrored_view_differs(embedded: Plane) -> None:
    mirrored = embedded.features(embedded.embed("val", changes={"view": "mirrored"}))
    straight = embedded.features(embedded.embed("val"))
    assert not np.array_equal(mirrored.take(np.arange(8)), straight.take(np.arange(8)))


def test_embed_killed_goes_on_from_its_finished_rows_to_the_same_bytes(
    embedded: Plane, tmp_path: Path, killable: Rank
) -> None:
    other = Plane(tmp_path)
    request = other.embed()
    killable.begin(attempt_in_process, tmp_path, request, 700)
    killable.process.join(timeout=90)
    assert killable.process.exitcode == -signal.SIGKILL
    second = other.embed(attempt=2)
    seen: list[Progress] = []
    other.tiny.run(second, report=seen.append)
    record = read_record(other.store, request.key)
    assert record.summary["rows_of_earlier_attempts"] == 512
    assert min(progress.step for progress in seen if progress.phase == "embed") == 768
    everything = np.arange(NUM_TRAIN)
    resumed, whole = other.features(second), embedded.features(embedded.embed())
    assert resumed.take(everything).tobytes() == whole.take(everything).tobytes()


@pytest.mark.ci
def test_embed_by_two_ranks_gives_the_same_bytes(embedded: Plane, tmp_path: Path) -> None:
    other, pool = Plane(tmp_path), RankPool(2)
    try:
        said = raise_errors(pool.run(tmp_path, 2, embed_in_gang, tmp_path, other.embed()))
    finally:
        pool.close()
    # While it waits, the first rank says what all have done: nothing else of a gang is seen. It alone asks the store,
    # at the start and at the commit.
    assert said == ["committed [256, 512, 768, 1100], 2 lists", "already_committed [1024, 1100], 0 lists"]
    everything, whole = np.arange(NUM_TRAIN), embedded.features(embedded.embed())
    assert other.features(other.embed()).take(everything).tobytes() == whole.take(everything).tobytes()


def spoil(plane: Plane, patched: pytest.MonkeyPatch, ordinals: list[int], budget: float) -> None:
    """Let some training samples be undecodable, so many of which the data set allows."""
    index, render = plane.open_index(), PixelSpec.render
    lenient = replace(index, bad_samples=BadSamples(policy=BadSamplePolicy.REPLACE, budget=budget))
    bad = SampleSource(plane.store, index, "train", cache_dir=plane.tiny.folder / "cache", image_size=16)
    contents = set(bad._encoded(np.array(ordinals)))

    def fail(pixels: PixelSpec, encoded: bytes, place: Place, square_HWC: NDArray[np.uint8]) -> None:
        if encoded in contents:
            raise BadSampleError(Reason.UNDECODABLE, "is broken")
        render(pixels, encoded, place, square_HWC)

    patched.setattr(PixelSpec, "render", fail)
    patched.setattr(SampleIndex, "open", lambda *_, **__: lenient)


def test_sample_that_cannot_be_decoded_has_no_features_and_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Plane(tmp_path, num_train=300)
    with monkeypatch.context() as patched:
        spoil(plane, patched, [70], budget=0.1)
        plane.tiny.run(plane.embed("train"))
        plane.tiny.run(plane.embed("val"))
    table = plane.features(plane.embed())
    assert table.missing.tolist() == [70]
    assert not table.take(np.array([70])).any()
    assert table.take(np.array([69, 71])).any(axis=1).all()
    request = plane.cluster({"k": 2})
    plane.tiny.run(request)
    assert np.flatnonzero(plane.labels(request).targets["train"] == NO_LABEL).tolist() == [70]


def damage(store: LocalStore, name: str, at: int = -1) -> None:
    """As a disk does: other bytes, as many as before."""
    content = bytearray(store.get(name))
    content[at] ^= 1
    store.put(name, bytes(content))


def test_damaged_features_are_made_anew_when_what_the_message_names_is_deleted(tmp_path: Path) -> None:
    """Sound ones are kept, and not read: there may be terabytes. The copies on the node are gone."""
    plane = Plane(tmp_path, num_train=600)
    table, record = plane.features(plane.embed()), read_record(plane.store, plane.embed().key)
    damaged = part_object(record, next(name for name in record.parts if "features-000000000256" in name))
    damage(plane.store, damaged)
    shutil.rmtree(plane.tiny.folder / "cache")
    with pytest.raises(CorruptObjectError) as refused:
        plane.features(plane.embed())
    assert str(refused.value).startswith(f"{damaged} in {plane.store.uri} has blake3 ")
    assert f"; delete it and {record_name(record.key)}, then submit again to make it anew" in str(refused.value)
    for name in (damaged, record_name(record.key)):
        plane.store.delete(name)
    with mock.patch.object(LocalStore, "get", autospec=True, side_effect=LocalStore.get) as read:
        plane.tiny.run(plane.embed(attempt=2))
    assert not [call for call in read.call_args_list if "/features-" in call.args[1]]
    again = FeatureTable.open(plane.store, record.key, tmp_path / "cache")
    assert read_record(plane.store, record.key).summary["rows_of_earlier_attempts"] == 600 - 256
    assert again.take(np.arange(600)).tobytes() == table.take(np.arange(600)).tobytes()


def test_damaged_shard_is_made_anew_when_what_the_message_names_is_deleted(tmp_path: Path) -> None:
    plane = Plane(tmp_path, num_train=300)
    split = plane.open_index().split("train")
    shard = split.shards[0]
    damage(plane.store, shard.object_name, at=int(split.offsets[0]) + 20)
    shutil.rmtree(plane.tiny.folder / "cache")
    dataset = read_record(plane.store, plane.index).identity["inputs"]["dataset"]
    with pytest.raises(CorruptObjectError) as refused:
        plane.features(plane.embed())
    assert f"{shard.object_name} in {plane.store.uri} " in str(refused.value)
    assert f"delete it, {record_name(dataset)} and the records of the indexes that name it" in str(refused.value)
    for name in (shard.object_name, record_name(dataset), record_name(plane.index)):
        plane.store.delete(name)
    again = Plane(tmp_path, num_train=300)
    assert again.index == plane.index
    assert len(again.features(again.embed(attempt=2)).missing) == 0


def test_embed_has_one_budget_of_bad_samples_for_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, spent in the first run of rows, which is kept; the third bad sample ends every attempt."""
    plane = Plane(tmp_path, num_train=600)
    spoil(plane, monkeypatch, [10, 20, 300], budget=2 / 600)
    for attempt in (1, 2):
        with pytest.raises(BadDataError, match=r"more than 2 samples that cannot be decoded.*undecodable 3: train-\d+"):
            plane.tiny.run(plane.embed(attempt=attempt))
        assert FinishedRows(plane.store, plane.embed().key).find()[0].stop == 256
    (rows,) = FinishedRows(plane.store, plane.embed().key).find()
    monkeypatch.undo()
    spoil(plane, monkeypatch, [10, 20, 300], budget=1 / 600)
    seen: list[Progress] = []
    with pytest.raises(BadDataError, match=r"more than 1 samples.*undecodable 2: .* could not be decoded"):
        plane.tiny.run(plane.embed(attempt=3), report=seen.append)
    assert [progress.phase for progress in seen] == ["setup"]
    damage(plane.store, f"{rows.folder}/{rows.missing}")
    with pytest.raises(CorruptObjectError, match=f"{rows.missing} in .* is not what was written: .*; delete it and "):
        plane.tiny.run(plane.embed(attempt=4))


def test_embed_does_not_commit_rows_of_all_ranks_that_lack_more_samples_than_the_budget_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Plane(tmp_path, num_train=300)
    spoil(plane, monkeypatch, [10], budget=2 / 300)

    def report(progress: Progress) -> None:
        if progress.step == 300:  # another rank stores rows meanwhile
            rows = np.zeros((300, plane.dim), np.float16)
            FinishedRows(plane.store, plane.embed().key).write(0, rows, np.array([10, 20, 290]))

    with pytest.raises(BadDataError, match="more than 2 samples that cannot be decoded"):
        plane.tiny.run(plane.embed(), report=report)


def test_embed_asked_to_stop_keeps_what_is_done_and_passes_over_damaged_rows(tmp_path: Path) -> None:
    plane = Plane(tmp_path, num_train=600)
    steps: list[int] = []
    with pytest.raises(PreemptedError, match="finished rows"):
        plane.tiny.run(
            plane.embed(), report=lambda progress: steps.append(progress.step), should_stop=lambda: max(steps) >= 512
        )
    folder = f"{checkpoints_folder(plane.embed().key)}/"
    (first,) = plane.store.list_children(folder)  # the second run of rows was complete, but not yet stored
    plane.store.put(f"{folder}{first}/manifest.json", b"{}")
    seen: list[Progress] = []
    plane.tiny.run(plane.embed(attempt=2), report=seen.append)
    assert read_record(plane.store, plane.embed().key).summary["rows_of_earlier_attempts"] == 0
    assert seen[-1].phase == "write"  # what there are of rows is looked at under another limit than a step


def test_commit_without_adopted_objects_is_refused(embedded: Plane) -> None:
    writer = ArtifactWriter(embedded.store, embedded.tiny.request(JobKind.EMBED, {"lost": 1}, {}))
    writer.adopt("rows.npy", "artifacts/embed/x/checkpoints/1-a/rows.npy", size_bytes=3, digests=Digests(sha256="0"))
    with pytest.raises(StorageError, match=r"rows\.npy"):
        writer.commit(now=0.0)


def test_embed_goes_on_from_rows_that_were_cut_otherwise_to_the_same_bytes(embedded: Plane, tmp_path: Path) -> None:
    """As after an attempt of another number of ranks: here one batch each, then all that is left."""
    plane, steps = Plane(tmp_path), list[int]()
    with pytest.raises(PreemptedError):
        plane.tiny.run(
            plane.embed(), report=lambda progress: steps.append(progress.step), should_stop=lambda: max(steps) >= 512
        )
    resumed = plane.features(plane.embed(attempt=2, every=0))
    assert resumed.starts.tolist() == [0, 256]
    everything, whole = np.arange(NUM_TRAIN), embedded.features(embedded.embed())
    assert resumed.take(everything).tobytes() == whole.take(everything).tobytes()


@pytest.mark.parametrize(
    ("num_samples", "world_size", "every", "batches"),
    [
        (50_000, 1, 0, 170),  # 64 MiB of 768 features in float16
        (50_000, 8, 0, 25),
        (50_000, 8, 2, 2),
        (5_000_000, 8, 0, 170),
        (300, 8, 0, 1),
        (0, 8, 0, 1),
    ],
)
def test_embed_has_rows_for_every_rank_of_a_gang(num_samples: int, world_size: int, every: int, batches: int) -> None:
    stub: Any = SimpleNamespace(num_features=768, split=SimpleNamespace(num_samples=num_samples))
    request: Any = SimpleNamespace(key="embed-x-0123456789abcdef", execution=Execution(checkpoint_every_steps=every))
    context: Any = SimpleNamespace(store=None)
    embedding = Embedding(
        request, context, backbone=stub, source=stub, arithmetic=stub, ranks=Ranks(world_size=world_size)
    )
    assert embedding._rows_per_part() == 256 * batches


def test_embed_without_weights_is_refused(plane: Plane) -> None:
    request = plane.embed("val", changes={"initial": None})
    with pytest.raises(UserError, match="random weights"):
        plane.tiny.run(request)


def test_embed_beyond_float16_names_a_sample(plane: Plane) -> None:
    with pytest.raises(NumericsError, match=r"val-000000\.tar:val-\d+ are NaN, infinite or beyond float16"):
        plane.tiny.run(plane.embed("val", changes={"mean": [1e30, 1e30, 1e30]}))


@pytest.mark.parametrize("rule", [{"k": 4}, {"rebalanced": {"min_samples": 40}}], ids=["k", "rebalanced"])
def test_clusters_of_superclasses_refine_them_and_those_of_the_whole_set_do_not(
    embedded: Plane, rule: dict[str, Any]
) -> None:
    def mixes(rule: dict[str, Any], split: str) -> NDArray[np.bool_]:
        request = embedded.cluster(rule)
        embedded.tiny.run(request)
        targets, superclasses = embedded.labels(request).targets[split], embedded.superclasses(split)
        return np.array([len(set(superclasses[targets == target])) > 1 for target in np.unique(targets)])

    for split in ("train", "val"):
        assert not mixes(rule, split).any()
        assert mixes({**rule, "within": None}, split).any()


def test_cluster_ids_are_superclass_times_k_plus_cluster(embedded: Plane) -> None:
    request = embedded.cluster({"k": 4})
    record = read_record(embedded.store, embedded.tiny.run(request).key)
    labels = embedded.labels(request)
    assert labels.num_classes == 8
    assert record.metrics["num_classes"] == 8
    assert labels.class_names[5].endswith("/1")
    assert np.array_equal(labels.targets["train"] // 4, embedded.superclasses("train"))
    assert set(labels.targets["train"].tolist()) == set(range(8))


def test_validation_samples_get_the_nearest_centroid_of_their_own_superclass(embedded: Plane) -> None:
    request = embedded.cluster({"k": 4})
    embedded.tiny.run(request)
    record = read_record(embedded.store, request.key)
    path = embedded.tiny.folder / "store" / part_object(record, "centroids.npy")
    centroids_KD, superclasses = np.load(path), embedded.superclasses("val")
    points = embedded.features(embedded.embed("val")).take(np.arange(len(superclasses))).astype(np.float32)
    distances = ((points[:, None] - centroids_KD[None]) ** 2).sum(axis=2)
    distances[np.arange(8)[None] // 4 != superclasses[:, None]] = np.inf
    assert np.array_equal(embedded.labels(request).targets["val"], distances.argmin(axis=1))


def test_rebalanced_clusters_are_the_finest_that_are_large_enough(embedded: Plane) -> None:
    request = embedded.cluster({"rebalanced": {"min_samples": 40}})
    embedded.tiny.run(request)
    counts = np.bincount(embedded.labels(request).targets["train"])
    groups = read_record(embedded.store, request.key).summary["groups"]
    assert counts.min() >= 40
    assert all(group["num_clusters"] in {1, 2, 8, 32} and group["smallest"] >= 40 for group in groups)
    assert len(counts) == sum(group["num_clusters"] for group in groups) > 2
    coarse = embedded.cluster({"rebalanced": {"min_samples": 500}})
    assert embedded.tiny.run(coarse).metrics["num_classes"] == 2  # nothing that small: superclasses stay whole


def test_label_maps_of_one_and_four_workers_are_the_same_bytes(embedded: Plane, tmp_path: Path) -> None:
    def parts(folder: Path, threads: int) -> dict[str, str]:
        plane = Plane(folder, num_train=300)
        for split in ("train", "val"):
            plane.tiny.run(plane.embed(split))
        request = plane.cluster({"k": 4}, threads=threads)
        plane.tiny.run(request)
        plane.labels(request)
        record = read_record(plane.store, request.key)
        return {name: part.sha256 for name, part in record.parts.items()}

    assert parts(tmp_path / "one", 1) == parts(tmp_path / "four", 4)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"k": 900}, "has 5.. training samples and should have 900 clusters"),
        ({"k": 4, "within": {"hierarchy": "nix"}}, "nix"),
        ({"k": 4, "within": {"random": {"num_classes": 4, "seed": 0}}}, "each class has one target"),
    ],
)
def test_cluster_that_cannot_be_is_refused(embedded: Plane, rule: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        embedded.tiny.run(embedded.cluster(rule))


def test_cluster_of_other_data_is_refused(embedded: Plane) -> None:
    with pytest.raises(UserError, match="wrong samples"):
        embedded.tiny.run(embedded.cluster({"k": 4}, index=embedded.tiny.index))
    with pytest.raises(UserError, match="wrong samples"):
        embedded.tiny.run(embedded.cluster({"k": 4}, train=embedded.embed("val").key))


def test_labels_of_clusters_of_other_data_are_refused(embedded: Plane) -> None:
    request = embedded.cluster({"k": 4})
    embedded.tiny.run(request)
    labels = embedded.tiny.request(
        JobKind.LABELS, {"space": {"clusters": {}}}, {"index": embedded.tiny.index, "clusters": request.key}
    )
    with pytest.raises(UserError, match="other data"):
        embedded.tiny.run(labels)


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = np.zeros((3, 2), dtype=np.float16)
    broken[1, 1] = np.inf
    table = FeatureTable(
        key="embed-x",
        split="train",
        index_key="index-x",
        dataset_digest="",
        dim=2,
        starts=np.array([0]),
        parts=(broken,),
        missing=np.empty(0, dtype=np.int64),
    )
    with pytest.raises(BadDataError, match="not finite at ordinal 1"):
        table.take(np.arange(3))


def test_clusters_of_features_that_do_not_fit_into_memory_are_the_same(embedded: Plane) -> None:
    table, ordinals = embedded.features(embedded.embed()), np.arange(3, NUM_TRAIN, 2)
    rows = np.array([0, 5, 400])
    held, mapped = (Group(table, ordinals, limit).take(rows) for limit in (1 << 30, 0))
    assert held.tobytes() == mapped.tobytes()
    assert np.array_equal(held, table.take(ordinals[rows]))
