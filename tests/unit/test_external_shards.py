"""Data sets that others wrote: from the sweep.yaml over the plan to an opened index."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core.contract import Execution, ExecutionContext
from orchestrator.core.errors import BadDataError, CorruptObjectError, SpecError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.data_checks import lenient_mixtures
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.dataset_files import dataset_digest, read_dataset_file
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from tests.builders import request_of
from tests.data_jobs import Member, encoded, tar_of
from workloads.commands.data import index as index_command
from workloads.data.index import NO_LEAF, BadSamplePolicy, SampleIndex, store_of
from workloads.data.scan_splits import scan_splits
from workloads.jobs.index import run_index

IMAGES = [encoded("JPEG", size=(20, 16), seed=seed) for seed in range(3)]
CLASSES = [{"class": leaf, "name": f"c{leaf}", "group": f"g{leaf // 2}"} for leaf in range(4)]
SWEEP = """
version: 1
name: outside
datasets: {photos: DATASET}
labels: {levels: {dataset: photos, hierarchy: [group]}}
pretrain:
  model: {name: test_vit, image_size: 16}
  labels: [levels/*]
  recipe: {epochs: 1, batch_size: 2, lr: 0.1, loss: LOSS}
transfer: [{name: top, target: levels/group, protocol: probe, recipe: {base: default-probe, batch_size: 2, loss: LOSS}}]
"""


class Outside:
    """A folder of shards, and a store of a sweep that reads them."""

    def __init__(self, folder: Path) -> None:
        self.shards, self.store, self.folder = folder / "shards", LocalStore(folder / "store"), folder
        self.shards.mkdir()
        (self.shards / "classes.json").write_text(json.dumps(CLASSES))
        for shard in range(3):
            self.write("train", shard, [(f"t{shard}{row}", (shard + row) % 4) for row in range(4)])
        self.write("val", 0, [(f"v{row}", row) for row in range(4)])

    def write(self, split: str, shard: int, samples: list[tuple[str, int]]) -> None:
        members: list[Member] = []
        for number, (key, leaf) in enumerate(samples):
            members += [(f"{key}.jpg", IMAGES[number % 3]), (f"{key}.cls", str(leaf).encode())]
        (self.shards / f"{split}-{shard:03d}.tar").write_bytes(tar_of(members))

    @property
    def entry(self) -> dict[str, Any]:
        uri = self.shards.as_uri()
        shards = {"train": f"{uri}/train-{{000..002}}.tar", "val": [f"{uri}/val-000.tar"]}
        return {"shards": shards, "classes": f"{uri}/classes.json", "num_train": 12, "num_val": 4}

    def plan(self, entry: Mapping[str, Any]) -> Plan:
        path = self.folder / "sweep.yaml"
        loss = "sigmoid" if entry.get("multi_label") else "softmax"
        path.write_text(SWEEP.replace("DATASET", json.dumps(entry)).replace("LOSS", loss))
        return build_plan(load_sweep(str(path))[0], store_uri=self.store.uri)

    def key(self, entry: Mapping[str, Any]) -> str:
        return self.job(entry).key

    def job(self, entry: Mapping[str, Any], name: str = "index/photos") -> Job:
        return self.plan(entry).by_name()[name]

    def run(self, job: Job) -> Record:
        request = request_of(job, self.store.uri, sweep="outside")
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        run_index(request, ExecutionContext(store=self.store, scratch=scratch, cache=self.folder / "cache"))
        return read_record(self.store, job.key)

    def open(self, job: Job) -> SampleIndex:
        return SampleIndex.open(self.store, job.key, self.folder / "cache", location=job.execution.data_location)


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


def describe(outside: Outside) -> dict[str, Any]:
    """`data index --write`."""
    target = {"place": str(outside.shards), "splits": {}, "classes": str(outside.shards / "classes.json")}
    wanted = {"policy": "fail", "budget": 0.0, "write": True, "num_processes": 1}
    return index_command({"target": {**target, "num_classes": 0, "multi_label": False}, **wanted})


def test_external_data_set_has_no_dataset_job_and_levels_from_its_class_table(outside: Outside) -> None:
    plan = outside.plan(outside.entry)
    assert [job.name for job in plan.jobs][:2] == ["index/photos", "labels/levels/group"]
    assert plan.by_name()["labels/levels/group"].facets["granularity"] == 2
    assert not [job for job in plan.jobs if job.kind is JobKind.DATASET]


def test_external_index_finds_every_sample_in_its_own_store(outside: Outside) -> None:
    job = outside.job(outside.entry)
    record = outside.run(job)
    index = outside.open(job)
    train = index.split("train")
    assert record.metrics == {"num_train": 12, "num_val": 4, "num_classes": 4}
    assert train.shard_sizes == (4, 4, 4)
    assert train.place(5) == "train-001.tar:t11"
    assert train.leaves.tolist() == [(shard + row) % 4 for shard in range(3) for row in range(4)]
    for ordinal in range(12):
        shard = train.shards[int(train.shard_of(np.array([ordinal]))[0])]
        start, length = int(train.offsets[ordinal]), int(train.lengths[ordinal])
        content = store_of(shard, outside.store).get_range(shard.object_name, start, length)
        assert content == IMAGES[ordinal % 4 % 3]


def test_external_columns_are_mapped_and_shared(outside: Outside) -> None:
    job = outside.job(outside.entry)
    outside.run(job)
    assert isinstance(outside.open(job).split("train").offsets, np.memmap)


def test_external_every_job_that_reads_the_index_knows_where_shards_lie(outside: Outside) -> None:
    for job in outside.plan(outside.entry).jobs:
        assert job.execution.data_location["splits"]["val"] == [f"{outside.shards.as_uri()}/val-000.tar"]
        assert outside.shards.as_uri() not in json.dumps(job.identity)


def test_external_key_is_that_of_the_content_wherever_it_lies(outside: Outside, tmp_path: Path) -> None:
    before = outside.key(outside.entry)
    moved = outside.shards.rename(tmp_path / "moved")
    for path in moved.iterdir():
        path.write_bytes(path.read_bytes())  # another inode and time
    outside.shards = moved
    assert outside.key(outside.entry) == before
    outside.write("train", 2, [("other", 1)])
    assert outside.key(outside.entry) != before


def test_external_key_follows_class_table_splits_and_policy(outside: Outside) -> None:
    entry = outside.entry
    one_more = {**entry, "shards": {**entry["shards"], "test": entry["shards"]["val"]}}
    swapped = {**entry, "shards": {"train": entry["shards"]["val"], "val": entry["shards"]["train"]}}
    lenient = {**entry, "bad_samples": {"policy": "replace"}}
    keys = [outside.key(changed) for changed in (entry, one_more, swapped, lenient)]
    (outside.shards / "classes.json").write_text(
        json.dumps([{**row, "group": "g"} for row in CLASSES[:2]] + CLASSES[2:])
    )
    assert len({*keys, outside.key(entry)}) == 5


def test_external_with_a_digest_is_identified_by_it_alone(outside: Outside) -> None:
    digest = outside.run(outside.job(outside.entry)).summary["dataset_digest"]
    entry = {**outside.entry, "digest": digest}
    key = outside.key(entry)
    assert outside.job(entry).identity["parameters"]["digest"] == digest
    assert outside.run(outside.job(entry)).summary["dataset_digest"] == digest
    renamed = outside.shards.rename(outside.folder / "elsewhere")
    outside.shards = renamed
    assert outside.key({**outside.entry, "digest": digest}) == key
    assert (
        outside.open(outside.job({**outside.entry, "digest": digest})).split("train").shards[0].store_uri
        == renamed.as_uri()
    )


def test_external_other_content_than_its_digest_is_refused(outside: Outside) -> None:
    job = outside.job({**outside.entry, "digest": "0" * 64})
    with pytest.raises(BadDataError, match="was declared with 0000"):
        outside.run(job)


def test_external_shards_changed_after_planning_are_refused(outside: Outside) -> None:
    job = outside.job(outside.entry)
    outside.write("train", 1, [("new", 0)])
    with pytest.raises(BadDataError, match="changed since the sweep was planned"):
        outside.run(job)


def test_external_shard_replaced_during_the_scan_before_its_turn_is_refused(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and version are the same before and after it is read, but not those of the plan."""
    job = outside.job(outside.entry)

    def replaced_first(*arguments: Any, **options: Any) -> Any:
        outside.write("train", 2, [(f"new{row}", row) for row in range(4)])
        return scan_splits(*arguments, **options)

    monkeypatch.setattr("workloads.jobs.index.scan_splits", replaced_first)
    with pytest.raises(BadDataError, match="changed since the sweep was planned"):
        outside.run(job)


def test_external_class_table_changed_after_planning_is_refused(outside: Outside) -> None:
    job = outside.job(outside.entry)
    (outside.shards / "classes.json").write_text(json.dumps(CLASSES[:3]))
    with pytest.raises(BadDataError, match=r"class table .* changed"):
        outside.run(job)


def test_external_described_folder_needs_no_numbers(outside: Outside) -> None:
    found = describe(outside)
    job = outside.job({"from": outside.shards.as_uri()})
    record = outside.run(job)
    assert found["digest"] == job.identity["parameters"]["digest"] == record.summary["dataset_digest"]
    assert outside.open(job).split("val").num_samples == 4
    assert found["entry"] == {"from": outside.shards.as_uri()}


def test_external_described_shard_that_changed_is_corrupt(outside: Outside) -> None:
    describe(outside)
    job = outside.job({"from": outside.shards.as_uri()})
    path = outside.shards / "train-001.tar"
    content = bytearray(path.read_bytes())
    content[-1] = 1  # in the padding: the scan finds the same samples
    path.write_bytes(content)
    with pytest.raises(CorruptObjectError, match=r"train-001\.tar has sha256"):
        outside.run(job)


def test_external_altered_description_is_refused(outside: Outside) -> None:
    describe(outside)
    path = outside.shards / "dataset.json"
    path.write_text(path.read_text().replace("train-001", "train-009"))
    with pytest.raises(SpecError, match=r"datasets\.photos\.from: .* do not have its digest"):
        outside.plan({"from": outside.shards.as_uri()})


def damaged(outside: Outside) -> dict[str, Any]:
    """One truncated image and one class out of range among 12 samples, and a key that is there already."""
    members: list[Member] = [("bad.jpg", IMAGES[0][:-20]), ("bad.cls", b"0"), ("far.jpg", IMAGES[1]), ("far.cls", b"9")]
    members += [("ok.jpg", IMAGES[2]), ("ok.cls", b"3"), ("t00.jpg", IMAGES[2]), ("t00.cls", b"3")]
    (outside.shards / "train-002.tar").write_bytes(tar_of(members))
    return outside.entry


def test_external_bad_samples_are_left_out_counted_and_named(outside: Outside) -> None:
    job = outside.job({**damaged(outside), "bad_samples": {"policy": "replace", "budget": 0.3}})
    record = outside.run(job)
    index = outside.open(job)
    train, found = index.split("train"), record.summary["bad_samples"]["train"]
    assert {reason: row["count"] for reason, row in found.items()} == {
        "truncated": 1,
        "class_out_of_range": 1,
        "duplicate_key": 1,
    }
    assert found["truncated"]["first"][0].startswith("train-002.tar:bad ")
    assert "train-000.tar" in found["duplicate_key"]["first"][0]
    assert record.metrics["num_train"] == 9
    assert record.metrics["num_bad_train"] == 3
    assert train.shard_sizes == (4, 4, 1)
    assert [train.key(row) for row in (0, 7, 8)] == ["t00", "t13", "ok"]
    assert train.leaves.tolist() == [0, 1, 2, 3, 1, 2, 3, 0, 3]
    assert record.summary["samples_per_class"]["train"] == {"min": 2, "median": 2.0, "max": 3, "empty": 0}
    assert index.bad_samples.policy is BadSamplePolicy.REPLACE


def test_external_bad_samples_over_the_budget_fail_with_their_names(outside: Outside) -> None:
    job = outside.job({**damaged(outside), "bad_samples": {"policy": "replace", "budget": 0.2}})
    with pytest.raises(BadDataError, match=r"3 samples of split 'train' .* 25\.00%.*train-002\.tar:bad"):
        outside.run(job)


def test_external_bad_sample_fails_by_default(outside: Outside) -> None:
    with pytest.raises(
        BadDataError, match=r"train-002\.tar:bad is not a readable image.*policy: replace, budget: \.\.\."
    ):
        outside.run(outside.job(damaged(outside)))


@pytest.mark.parametrize(("key", "number", "found"), [("num_train", 13, 12), ("num_train", 11, 12), ("num_val", 5, 4)])
def test_external_other_numbers_than_declared_are_refused(outside: Outside, key: str, number: int, found: int) -> None:
    job = outside.job({**outside.entry, key: number})
    assert job.key == outside.key(outside.entry)
    with pytest.raises(BadDataError, match=rf"{key} declares {number} samples, but .* hold {found};"):
        outside.run(job)


@pytest.mark.parametrize(("number", "is_accepted"), [(8, False), (9, True), (12, True), (13, False)])
def test_external_declared_numbers_may_count_bad_samples_or_not(
    outside: Outside, number: int, is_accepted: bool
) -> None:
    entry = {**damaged(outside), "num_train": number, "bad_samples": {"policy": "replace", "budget": 0.3}}
    if is_accepted:
        assert outside.run(outside.job(entry)).metrics["num_train"] == 9
        return
    with pytest.raises(BadDataError, match=f"declares {number} samples, but .* hold 9 and 3 bad ones"):
        outside.run(outside.job(entry))


def test_external_entry_printed_without_val_is_refused_with_its_line_and_the_remedy(outside: Outside) -> None:
    target = {"place": f"{outside.shards}/train-{{000..002}}.tar", "splits": {}, "num_classes": 4, "classes": ""}
    wanted = {"policy": "fail", "budget": 0.0, "write": False, "num_processes": 1}
    entry = index_command({"target": {**target, "multi_label": False}, **wanted})["entry"]
    entry = {**entry, "num_classes": None, "classes": outside.entry["classes"]}
    with pytest.raises(SpecError, match=r"sweep\.yaml:4:\d+.* no validation samples.*--split train=\S+ --split val="):
        outside.plan(entry)
    with_val = {**entry, "shards": {**entry["shards"], "val": outside.entry["shards"]["val"]}}
    with pytest.raises(BadDataError, match=r"of all splits together.*train, val"):
        outside.run(outside.job(with_val))


def test_external_multi_label_samples_keep_their_sets(outside: Outside) -> None:
    members: list[Member] = []
    for key, labels in (("a", [2, 0]), ("b", []), ("c", [1])):
        members += [(f"{key}.jpg", IMAGES[0]), (f"{key}.json", json.dumps({"labels": labels}).encode())]
    for shard in range(3):
        (outside.shards / f"train-{shard:03d}.tar").write_bytes(
            tar_of([(f"{shard}{name}", content) for name, content in members])
        )
    job = outside.job({**outside.entry, "multi_label": True, "num_train": 9})
    outside.run(job)
    train = outside.open(job).split("train")
    assert train.leaf_sets is not None
    assert train.leaf_sets.offsets.tolist() == [0, 2, 2, 3, 5, 5, 6, 8, 8, 9]
    assert train.leaf_sets.values.tolist() == [2, 0, 1] * 3
    assert train.leaves.tolist() == [2, NO_LEAF, 1] * 3


def test_external_index_job_of_an_older_plan_says_to_plan_again(outside: Outside) -> None:
    job = outside.job(outside.entry)
    with pytest.raises(UserError, match="plan the sweep again"):
        outside.run(replace(job, execution=Execution()))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_train": None}, "'num_train' is missing"),
    ({"classes": ""}, "neither 'classes'"),
    ({"num_classes": 7}, "7 is declared, but the data set has 4"),
    ({"from": "file:///x"}, "either 'from' or 'shards'"),
    ({"shards": {"val": "file:///x/y.tar"}}, "no 'train'"),
    ({"shards": {"train": ["SHARD"]}, "num_val": None}, "datasets.photos: it has no validation samples"),
    (
        {"shards": {"train": "FOLDER/", "val": "FOLDER/val-{000..000}.tar"}},
        "datasets.photos.shards.val: val-000.tar in FOLDER is a shard of split 'train', too",
    ),
    ({"shards": {"train": "pipe:cat /etc/passwd"}}, "datasets.photos.shards.train: data set 'pipe:cat"),
    ({"shards": {"train": "s3://user:secret@bucket/a.tar"}}, "user or password"),
    ({"shards": {"train": "file:///x/train-{000..001.tar"}}, "braces that do not match"),
    ({"shards": {"train": "file:///x/train-{0..99999999}.tar"}}, "more than 1000000 names"),
    ({"digest": "abc"}, "datasets.photos.digest"),
    ({"shard": {}}, "did you mean 'shards'"),
    ({"bad_samples": {"policy": "skip"}}, "datasets.photos.bad_samples.policy"),
]


@pytest.mark.parametrize("val", ["FOLDER/./train-001.tar", "FOLDER//train-001.tar", "LINK/train-001.tar", "COPY"])
def test_external_shard_of_train_in_another_split_is_refused_however_it_is_named(outside: Outside, val: str) -> None:
    folder = outside.shards.as_uri()
    (outside.folder / "link").symlink_to(outside.shards)
    (outside.folder / "other.tar").write_bytes((outside.shards / "train-001.tar").read_bytes())
    places = {
        "FOLDER": folder,
        "LINK": (outside.folder / "link").as_uri(),
        "COPY": f"{outside.folder.as_uri()}/other.tar",
    }
    for name, place in places.items():
        val = val.replace(name, place)
    with pytest.raises(SpecError, match=r"shards\.val: (train-001|other)\.tar in \S+ is a shard of split 'train', too"):
        outside.plan({**outside.entry, "shards": {**outside.entry["shards"], "val": val}})


def test_external_description_with_a_shard_of_train_in_another_split_is_refused(outside: Outside) -> None:
    target = {"place": str(outside.shards), "splits": {}, "num_classes": 4, "classes": "", "multi_label": False}
    index_command({"target": target, "policy": "fail", "budget": 0.0, "write": True, "num_processes": 1})
    described = read_dataset_file(outside.shards.as_uri())
    splits = {**described.splits, "val": (replace(described.splits["train"][1], name="val-000.tar"),)}
    changed = replace(described, splits=splits, digest=dataset_digest(splits))
    (outside.shards / "dataset.json").write_bytes(changed.to_bytes())
    with pytest.raises(SpecError, match=r"from: val-000\.tar of split 'val' is train-001\.tar of split 'train', too"):
        outside.plan({"from": outside.shards.as_uri()})


def test_external_mixture_that_trains_on_a_shard_of_another_split_is_refused(outside: Outside) -> None:
    other = {**outside.entry, "shards": {"train": outside.entry["shards"]["val"]}, "num_train": 4}
    entries = f"a: {json.dumps(outside.entry)}, b: {json.dumps(other)}, photos: {{mixture: [a, b]}}"
    path = outside.folder / "sweep.yaml"
    path.write_text(SWEEP.replace("photos: DATASET", entries).replace("LOSS", "softmax"))
    with pytest.raises(
        SpecError, match=r"photos\.mixture: split 'val': val-000\.tar in \S+ is a shard of split 'train'"
    ):
        load_sweep(str(path))


def test_external_mixture_warns_of_a_data_set_whose_own_policy_is_stricter(outside: Outside) -> None:
    folder, lenient = outside.shards.as_uri(), {"policy": "replace", "budget": 0.5}
    strict = {"shards": {"train": f"{folder}/train-000.tar"}, "classes": f"{folder}/classes.json", "num_train": 4}
    other = {**strict, "shards": {"train": f"{folder}/train-001.tar"}, "bad_samples": lenient}
    held_out = {**strict, "shards": {"train": f"{folder}/train-002.tar", "val": f"{folder}/val-000.tar"}, "num_val": 4}

    def warnings(**entries: dict[str, Any]) -> list[str]:
        named = ", ".join(f"{name}: {json.dumps(entry)}" for name, entry in entries.items())
        path = outside.folder / "sweep.yaml"
        mixture = f"{named}, photos: {{mixture: [{', '.join(entries)}]}}"
        path.write_text(SWEEP.replace("photos: DATASET", mixture).replace("LOSS", "softmax"))
        return list(lenient_mixtures(load_sweep(str(path))[0]))

    (warning,) = warnings(a=strict, b=other, c={**held_out, "bad_samples": {"policy": "replace", "budget": 0.1}})
    assert "images of a, c that cannot be decoded are replaced up to the budget 0.5" in warning
    assert warnings(b=other, c={**held_out, "bad_samples": lenient}) == []


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_external_wrong_entry_is_refused_with_its_place(
    outside: Outside, change: Mapping[str, Any], message: str
) -> None:
    folder = outside.shards.as_uri()
    text = json.dumps({**outside.entry, **change}).replace("SHARD", f"{folder}/train-000.tar").replace("FOLDER", folder)
    entry = {key: value for key, value in json.loads(text).items() if value is not None}
    with pytest.raises(SpecError) as caught:
        outside.plan(entry)
    assert message.replace("FOLDER", folder) in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("missing", ["shard", "classes", "folder"])
def test_external_missing_object_is_refused_at_load(outside: Outside, missing: str) -> None:
    entry = outside.entry
    if missing == "folder":
        entry = {"from": (outside.folder / "nowhere").as_uri()}
    else:
        (outside.shards / {"shard": "train-001.tar", "classes": "classes.json"}[missing]).unlink()
    with pytest.raises(
        SpecError, match={"shard": r"1 of 3 shards .*train-001", "classes": "classes"}.get(missing, "from")
    ):
        outside.plan(entry)


def test_external_folder_of_shards_is_listed(outside: Outside) -> None:
    val = (outside.shards / "val-000.tar").rename(outside.folder / "val-000.tar").as_uri()
    entry = {**outside.entry, "shards": {"train": f"{outside.shards.as_uri()}/", "val": val}}
    job = outside.job(entry)
    outside.run(job)
    assert outside.open(job).split("train").num_samples == 12
    with pytest.raises(UserError, match="no samples in split 'test'"):
        outside.open(job).split("test")


def test_external_shards_of_two_folders_are_read_where_they_lie(outside: Outside) -> None:
    elsewhere = outside.folder / "elsewhere"
    elsewhere.mkdir()
    (outside.shards / "train-001.tar").rename(elsewhere / "train-001.tar")
    val = (outside.shards / "val-000.tar").rename(outside.folder / "val-000.tar").as_uri()
    train_folders = [f"{folder.as_uri()}/" for folder in (outside.shards, elsewhere)]
    entry = {**outside.entry, "shards": {"train": train_folders, "val": val}}
    job = outside.job(entry)
    outside.run(job)
    train = outside.open(job).split("train")
    assert [shard.store_uri for shard in train.shards] == [
        folder.as_uri() for folder in (outside.shards, elsewhere, outside.shards)
    ]
    for shard in train.shards:
        assert store_of(shard, outside.store).stat(shard.object_name).size_bytes == shard.size_bytes


def test_external_shards_of_one_name_in_two_folders_are_refused(outside: Outside) -> None:
    elsewhere = outside.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train-001.tar").write_bytes((outside.shards / "train-001.tar").read_bytes())
    folders = [f"{folder.as_uri()}/" for folder in (outside.shards, elsewhere)]
    with pytest.raises(SpecError, match=r"shards\.train: .*both have a shard train-001\.tar"):
        outside.plan({**outside.entry, "shards": {"train": folders}})
