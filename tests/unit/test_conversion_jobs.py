"""Data sets that jobs of a sweep convert from a source."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import BadDataError, SpecError, UserError
from orchestrator.services.preview import make_preview
from orchestrator.storage.artifacts import read_part
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.datasets import WRITER_VERSION
from orchestrator.sweepfile.survey import ask_listing
from tests.conversions import fill, photo
from tests.shared_writing import Written, shard_digests
from workloads.convert.items import ConvertRequest, WriteRequest
from workloads.convert.listing import CONVERTERS, describe_conversion, list_source
from workloads.convert.write import VERSION, write_dataset

NUM_IMAGES = 24


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Images of three classes under two parents; a kilobyte each, so that shards of a MiB need padding."""
    files = {f"{split}/p{n % 2}/c{n % 4}/i{n}.jpg": photo(n) for split in ("train", "val") for n in range(NUM_IMAGES)}
    return fill(tmp_path / "photos", files)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data plane lists sources without a process of its own, which the first test shows to be the same."""
    monkeypatch.setattr("orchestrator.sweepfile.survey.ask_listing", _listed)


def _listed(arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(describe_conversion(list_source(arguments))))
    return found


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "node")


def entry(source: Path, **fields: Any) -> dict[str, Any]:
    jobs = {"jobs": fields.pop("jobs")} if "jobs" in fields else {}
    return {"convert": {"format": "imagefolder", "source": str(source), **fields}, **jobs}


def test_source_is_listed_by_a_process_of_its_own(source: Path) -> None:
    arguments = {"format": "imagefolder", "source": str(source)}
    assert ask_listing(arguments) == _listed(arguments)
    with pytest.raises(UserError, match="the source cannot be listed: /nowhere does not exist"):
        ask_listing({**arguments, "source": "/nowhere"})


def test_plan_and_listing_say_which_files_are_left_out(source: Path, written: Written) -> None:
    before = written.plan(entry(source))
    fill(source, {"train/p0/c0/x.tif": b"?", "val/p0/c0/x.txt": b"?"})
    plan = written.plan(entry(source))
    assert [job.key for job in plan.jobs] == [job.key for job in before.jobs]
    sweep, _ = load_sweep(str(written.folder / "sweep.yaml"))
    (told,) = make_preview(sweep, plan, fleet=None).notes
    (note,) = written.run(plan.by_name()["dataset/mine/listing"]).summary["notes"]
    assert told == f"mine: {note}"
    assert note.startswith("left out of the source: 2 files (.tif 1, .txt 1); images are named .png, ")


def test_spec_and_data_plane_agree_on_the_version_of_shards() -> None:
    assert WRITER_VERSION == VERSION


def test_conversion_has_the_shards_of_the_command_whatever_the_number_of_jobs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workloads.convert.listing.ShardLayout", _small_layout)
    conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
    request = WriteRequest(destination_uri=(tmp_path / "out").as_uri(), shard_bytes=20_000)
    dataset = write_dataset(conversion, request, lambda _: None)
    expected = {shard.name: shard.sha256 for shards in dataset.splits.values() for shard in shards}
    assert len(expected) > 4
    keys = []
    for jobs in (1, 3):
        written = Written(tmp_path / str(jobs))
        plan = written.plan(entry(source, jobs=jobs))
        records = written.run_all(plan)
        assert shard_digests(records["dataset/mine"]) == expected
        assert records["index/mine"].summary["dataset_digest"] == dataset.digest
        keys.append({job.name: job.key for job in plan.jobs if "/part" not in job.name})
    assert keys[0] == keys[1]


def _small_layout(**fields: Any) -> WriteRequest:
    assert fields["shuffle_seed"] == 0
    return WriteRequest(destination_uri="", shard_bytes=20_000)


def test_conversion_plans_levels_and_sizes_from_its_listing(source: Path, written: Written) -> None:
    plan = written.plan(entry(source, jobs=2)).by_name()
    assert [name for name in plan if name.startswith(("dataset/", "index/"))] == [
        "dataset/mine/listing",
        "dataset/mine/part0",
        "dataset/mine/part1",
        "dataset/mine",
        "index/mine",
    ]
    assert plan["labels/all/leaf"].facets["granularity"] == 4
    assert plan["index/mine"].execution.data_location["num_samples"] == {"train": NUM_IMAGES, "val": NUM_IMAGES}
    assert str(source) not in json.dumps([job.identity for job in plan.values()])


def test_conversion_of_a_source_that_moved_has_the_same_keys_and_shards(source: Path, written: Written) -> None:
    before = written.plan(entry(source, jobs=2))
    written.run(before.by_name()["dataset/mine/listing"])
    shutil.move(source, source.with_name("elsewhere"))
    after = written.plan(entry(source.with_name("elsewhere"), jobs=2))
    assert [job.key for job in before.jobs] == [job.key for job in after.jobs]
    for name in ("dataset/mine/part0", "dataset/mine/part1", "dataset/mine", "index/mine"):
        record = written.run(after.by_name()[name])
    assert record.metrics["num_train"] == NUM_IMAGES


@pytest.mark.parametrize(
    ("before", "after"),
    [("file", "file"), ("file", "folder"), ("file", "root"), ("folder", "file"), ("root", "file")],
)
def test_conversion_of_a_table_that_moved_with_its_images_finds_them(
    tmp_path: Path, written: Written, before: str, after: str
) -> None:
    """A source that is a file holds no images: they lie in its folder, or in ``root``. All have one listing."""
    rows = "".join(f"i{n}.jpg,c{n % 2}\n" for n in range(8)).encode()
    images = {f"i{n}.jpg": photo(n) for n in range(8)}

    def entry_of(form: str, images: Path) -> dict[str, Any]:
        table = tmp_path / "lists" if form == "root" else images
        fill(table, {"train.csv": b"path,label\n" + rows})
        root = {"root": str(images)} if form == "root" else {}
        return entry(table if form == "folder" else table / "train.csv", format="csv", val_fraction=0.5, **root)

    here, there = fill(tmp_path / "here", images), tmp_path / "there"
    planned = written.plan(entry_of(before, here))
    record = written.run(planned.by_name()["dataset/mine/listing"])
    stored = json.loads(read_part(written.store, record, "listing.json"))
    place = {"file": [str(here)], "folder": ["source", "."], "root": ["root", "."]}[before]  # as earlier versions read
    assert [split["containers"] for split in stored["splits"].values()] == [[place]] * 2
    shutil.move(here, there)
    moved = written.plan(entry_of(after, there))
    assert [job.key for job in planned.jobs] == [job.key for job in moved.jobs]
    written.run(moved.by_name()["dataset/mine"])


def test_conversion_of_a_source_that_changed_since_is_refused(source: Path, written: Written) -> None:
    plan = written.plan(entry(source)).by_name()
    fill(source, {"train/p0/c0/new.jpg": photo(99)})
    with pytest.raises(BadDataError, match=r"has the listing .*submit the sweep again"):
        written.run(plan["dataset/mine/listing"])


def test_conversion_names_the_image_that_is_gone(source: Path, written: Written) -> None:
    plan = written.plan(entry(source)).by_name()
    written.run(plan["dataset/mine/listing"])
    (source / "train/p0/c0/i0.jpg").unlink()
    with pytest.raises(UserError, match=r"i0\.jpg cannot be read"):
        written.run(plan["dataset/mine"])


def test_conversion_keeps_all_labels_of_a_sample(tmp_path: Path, written: Written) -> None:
    for split in ("train", "val"):
        rows = ["path,label", *(f"{split}{n}.jpg,{labels}" for n, labels in enumerate(["a b", "b", "c", "a"]))]
        images = {f"{split}{n}.jpg": photo(n) for n in range(4)}
        fill(tmp_path / "lists", {**images, f"{split}.csv": "\n".join(rows).encode()})
    wanted = {"convert": {"format": "csv", "source": str(tmp_path / "lists"), "separator": " "}}
    plan = written.plan(wanted)
    written.run_all(plan)
    sets = written.open(plan).split("train").leaf_sets
    assert sets is not None
    assert sorted(set(sets.values.tolist())) == [0, 1, 2]
    assert len(sets.values) == 5


def test_conversion_whose_listing_is_declared_is_planned_without_its_source(source: Path, written: Written) -> None:
    listed = written.plan(entry(source)).by_name()["dataset/mine/listing"].identity["parameters"]["listing"]
    declared = {"num_train": NUM_IMAGES, "num_val": NUM_IMAGES, "num_classes": 4, "levels": {"depth1": 2, "depth2": 4}}
    keys = [job.key for job in written.plan(entry(source)).jobs]
    shutil.move(source, source.with_name("elsewhere"))
    plan = written.plan({**entry(source, listing=listed), **declared})
    assert [job.key for job in plan.jobs] == keys
    shutil.move(source.with_name("elsewhere"), source)
    written.run(plan.by_name()["dataset/mine/listing"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_train": 25}, "num_samples is declared as"),
        ({"num_classes": 5}, "num_classes is declared as 5, but the source has 4"),
        ({"levels": {"depth1": 3}}, "levels is declared as"),
    ],
)
def test_conversion_that_is_not_as_declared_is_refused_before_anything_is_written(
    source: Path, written: Written, change: dict[str, Any], message: str
) -> None:
    listed = written.plan(entry(source)).by_name()["dataset/mine/listing"].identity["parameters"]["listing"]
    declared = {"num_train": NUM_IMAGES, "num_val": NUM_IMAGES, "num_classes": 4, "levels": {"depth1": 2}}
    plan = written.plan({**entry(source, listing=listed), **declared, **change}).by_name()
    with pytest.raises(BadDataError, match=message):
        written.run(plan["dataset/mine/listing"])


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({}, {"source": "s3://lab/photos"}, "converters read files, and this is not a path"),
        (
            {},
            {"source": "/nowhere/at/all"},
            r"sweep.yaml:4:\d+: .*/nowhere/at/all does not exist",
        ),
        ({}, {"format": "imagfolder"}, "not one of the allowed values; did you mean 'imagefolder'"),
        ({}, {"path_column": "file"}, "it has no effect here: only csv and parquet name paths"),
        ({}, {"labels": "x"}, "only imagenet1k keeps labels apart"),
        ({}, {"listing": "a" * 64}, "so declare num_train, num_val, num_classes, levels"),
        ({"num_train": 7}, {}, "7 is declared, but the source has 24; remove the line"),
        ({"levels": {"depth9": 7}}, {}, "'depth9' is not a level of the source"),
        ({"levels": {"depth1": 7}}, {}, "7 is declared, but the source has 2"),
        ({"jobs": 0}, {}, "it must be at least 1"),
        ({"budget": 0}, {}, "unknown key 'budget'"),
    ],
)
def test_conversion_that_cannot_be_is_refused_where_it_stands(
    source: Path, written: Written, change: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    wanted = entry(source)
    with pytest.raises(SpecError, match=message):
        written.plan({"convert": {**wanted["convert"], **fields}, **change})


def test_conversion_with_two_images_of_one_key_is_refused(source: Path, written: Written) -> None:
    fill(source, {"train/p0/c0/i0.png": photo(1)})
    with pytest.raises(SpecError, match="would both have the key"):
        written.plan(entry(source))


def test_conversion_counts_bad_samples_as_its_policy_says(source: Path, written: Written) -> None:
    (source / "train/p0/c0/i0.jpg").write_bytes(b"no image")
    plan = written.plan({**entry(source), "bad_samples": {"policy": "replace", "budget": 0.1}})
    records = written.run_all(plan)
    assert records["index/mine"].metrics["num_bad_train"] == 1
    assert written.open(plan).split("train").num_samples == NUM_IMAGES - 1
