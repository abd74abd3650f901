"""What the dataset job writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.contract import ExecutionContext
from orchestrator.core.errors import PreemptedError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import is_committed, part_object, read_part
from tests.data_jobs import DIGITS, TREE, DataPlane
from workloads.data import synthetic
from workloads.jobs.dataset import run_dataset


def test_shards_webdataset_pipeline_reads_images_and_classes(tmp_path: Path) -> None:
    import webdataset

    plane = DataPlane(folder=tmp_path)
    record = plane.run(JobKind.DATASET, TREE)
    urls = [str(plane.store.root / part_object(record, name)) for name in record.parts if name.startswith("train-")]
    pipeline = webdataset.WebDataset(sorted(urls), shardshuffle=False).decode("pil").to_tuple("png", "cls", "json")
    read = list(pipeline)
    params = synthetic.SyntheticParameters.from_mapping(
        {name: value for name, value in TREE.items() if name not in {"builtin", "version"}}
    )
    expected = list(synthetic.render_split(params, "train"))
    assert [leaf for _, leaf, _ in read] == [sample.leaf for sample in expected]
    assert all(
        np.array_equal(np.asarray(image), sample.image_HWC)
        for (image, _, _), sample in zip(read, expected, strict=True)
    )
    assert {metadata["subset"] for _, _, metadata in read} == {"normal"}


def test_shards_same_request_twice_have_the_same_bytes(tmp_path: Path) -> None:
    first = DataPlane(folder=tmp_path / "a").run(JobKind.DATASET, TREE)
    second = DataPlane(folder=tmp_path / "b").run(JobKind.DATASET, TREE)
    assert {name: part.sha256 for name, part in first.parts.items()} == {
        name: part.sha256 for name, part in second.parts.items()
    }
    assert sorted(first.parts) == ["classes.json", "train-000000.tar", "train-000001.tar", "val-000000.tar"]


def test_shards_digits_hold_every_scan_once_and_a_fifth_of_each_class_in_val(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.builtin(DIGITS)
    train, val = index.split("train"), index.split("val")
    keys = [split.key(ordinal) for split in (train, val) for ordinal in range(split.num_samples)]
    assert len(keys) == len(set(keys)) == 1797
    in_val = np.bincount(val.leaves) / (np.bincount(val.leaves) + np.bincount(train.leaves))
    assert np.all(np.abs(in_val - 0.2) < 0.01)
    assert [row["digit"] for row in index.classes] == [str(digit) for digit in range(10)]
    assert index.subset_names == ()
    assert np.all(val.subset_ids == -1)


def test_shards_digits_other_seed_splits_otherwise(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    splits = [plane.builtin({**DIGITS, "seed": seed}).split("val") for seed in (0, 1)]
    keys = [{split.key(row) for row in range(split.num_samples)} for split in splits]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"builtin": "mnist"}, "built-in are synthetic-hierarchy, digits"),
        ({"version": 99}, "planned as version 99"),
        ({"num_trian": 8}, "num_trian: no such parameter"),
        ({"patch_size": 5}, "must divide image_size"),
    ],
)
def test_shards_wrong_parameter_is_a_user_error(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataPlane(folder=tmp_path).run(JobKind.DATASET, {**TREE, **change})


@pytest.mark.parametrize("val_fraction", [0.0, 1.0, "half"])
def test_shards_digits_impossible_fraction_is_a_user_error(tmp_path: Path, val_fraction: object) -> None:
    with pytest.raises(UserError, match="data set digits"):
        DataPlane(folder=tmp_path).run(JobKind.DATASET, {**DIGITS, "val_fraction": val_fraction})


def test_shards_asked_to_stop_commit_nothing(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    request = plane.request(JobKind.DATASET, TREE, {})
    context = ExecutionContext(store=plane.store, scratch=tmp_path, cache=plane.cache, should_stop=lambda: True)
    with pytest.raises(PreemptedError, match="dataset/job"):
        run_dataset(request, context)
    assert not is_committed(plane.store, request.key)


def test_shards_class_table_names_every_level(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    record = plane.run(JobKind.DATASET, TREE)
    rows = json.loads(read_part(plane.store, record, "classes.json"))
    assert rows[5] == {"class": 5, "name": "0.1.2", "depth1": "0", "depth2": "0.1", "depth3": "0.1.2"}
