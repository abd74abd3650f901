"""Data sets of the library ``datasets``: their images are read in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyarrow import ipc

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import level_problem
from tests.conversions import convert, fill, photo, table_of

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog", "oak"], "_type": "ClassLabel"},
    "kind": {"names": ["animal", "plant"], "_type": "ClassLabel"},
    "noise": {"names": ["a", "b"], "_type": "ClassLabel"},
}


def save(
    folder: Path,
    numbers: range,
    others: Mapping[str, Any] | None = None,
    features: Mapping[str, Any] = FEATURES,
    **options: Any,
) -> None:
    """A split as ``save_to_disk`` writes it; ``others`` are further columns, or in place of these."""
    folder.mkdir(parents=True)
    images = [{"bytes": photo(number), "path": None} for number in numbers]
    labels = [number % 3 for number in numbers]
    columns = {
        "image": pa.array(images, type=pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        "label": pa.array(labels, pa.int64()),
        "kind": pa.array([int(label == 2) for label in labels], pa.int64()),
        "noise": pa.array([number % 2 for number in numbers], pa.int64()),
        **(others or {}),
    }
    table = pa.table(columns)
    name = "data-00000-of-00001.arrow"
    with ipc.new_stream(folder / name, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=4)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


def test_saved_data_set_becomes_shards_of_its_own_bytes_with_its_levels(tmp_path: Path) -> None:
    source = tmp_path / "saved"
    save(source / "train", range(9))
    save(source / "test", range(20, 23))
    (source / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    dataset, found = convert("huggingface", source, tmp_path / "out")
    assert sorted(found) == ["train", "val"]  # published with a test set and no validation set
    assert found["train"]["000000005"] == ((2,), photo(5))
    assert found["val"]["000000001"] == ((0,), photo(21))
    assert dataset.class_counts["train"] == (3, 3, 3)
    assert [(row["name"], row["kind"]) for row in table_of(tmp_path / "out")] == [
        ("cat", "animal"),
        ("dog", "animal"),
        ("oak", "plant"),
    ]  # `noise` does not follow from the class


def test_missing_values_are_no_classes_and_the_rank_class_is_no_number(tmp_path: Path) -> None:
    ranks = {"class": {"names": ["Insecta", "Aves"], "_type": "ClassLabel"}}
    save(tmp_path / "saved", range(3), {"kind": [0, None, 1], "class": [1, 0, 1]}, FEATURES | ranks)
    convert("huggingface", tmp_path / "saved", tmp_path / "out")
    table = table_of(tmp_path / "out")
    assert [(row["class"], row["name"], row["kind"], row["taxonomic_class"]) for row in table] == [
        (0, "cat", "animal", "Aves"),
        (1, "dog", None, "Insecta"),
        (2, "oak", "plant", "Aves"),
    ]
    assert "class 1 ('dog') has no value at level 'kind'" in level_problem(table, "kind")
    texts = FEATURES | {"label": {"dtype": "string", "_type": "Value"}}
    save(tmp_path / "without", range(3), {"label": ["cat", None, "oak"]}, texts)
    with pytest.raises(UserError, match="image 1 has no label"):
        convert("huggingface", tmp_path / "without", tmp_path / "nowhere")


def test_column_of_structures_is_left_alone(tmp_path: Path) -> None:
    """The library writes a list of them as a list, where all other features are mappings."""
    source = tmp_path / "saved"
    save(source, range(3))
    boxes = [{"x": {"dtype": "float32", "_type": "Value"}}]
    (source / "dataset_info.json").write_text(json.dumps({"features": {"boxes": boxes, **FEATURES}}))
    _, found = convert("huggingface", source, tmp_path / "out")
    assert found["train"]["000000001"] == ((1,), photo(1))


def test_two_parts_of_one_split_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "saved"
    for number, name in enumerate(("train", "val", "validation")):
        save(source / name, range(3 * number, 3 * number + 3))
    (source / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "val", "validation"]}))
    with pytest.raises(UserError, match="'val' and 'validation', which are both the split 'val'"):
        convert("huggingface", source, tmp_path / "out")
    _, found = convert("huggingface", source, tmp_path / "out", splits={"train": "train", "val": "validation"})
    assert found["val"]["000000000"] == ((0,), photo(6))


def test_splits_that_number_their_classes_differently_are_refused(tmp_path: Path) -> None:
    """Those of images that were loaded split by split, where one of them lacks a class."""
    source = tmp_path / "saved"
    for name in ("train", "validation"):
        save(source / name, range(9))
    (source / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    info = source / "validation/dataset_info.json"
    features = {**FEATURES, "label": {"names": ["dog", "cat", "oak"], "_type": "ClassLabel"}}
    info.write_text(json.dumps({"features": features}))
    with pytest.raises(UserError, match="numbers the classes of 'label' differently in its splits"):
        convert("huggingface", source, tmp_path / "out")
    # A column that is no level decides nothing, and a split may lack the last classes.
    features = {**FEATURES, "label": {"names": ["cat", "dog", "oak", "elm"], "_type": "ClassLabel"}}
    features["noise"] = {"names": ["b", "a"], "_type": "ClassLabel"}
    info.write_text(json.dumps({"features": features}))
    _, found = convert("huggingface", source, tmp_path / "out")
    assert found["val"]["000000002"][0] == (2,)
    assert [row["name"] for row in table_of(tmp_path / "out")] == ["cat", "dog", "oak", "elm"]


def test_compressed_arrow_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved", range(9), options=ipc.IpcWriteOptions(compression="zstd"))
    with pytest.raises(UserError, match="is compressed, and images are read in place"):
        convert("huggingface", tmp_path / "saved", tmp_path / "out")


def test_split_may_name_no_file_elsewhere(tmp_path: Path) -> None:
    save(tmp_path / "saved", range(9))
    (tmp_path / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    with pytest.raises(UserError, match="is not a data set that save_to_disk has written"):
        convert("huggingface", tmp_path / "saved", tmp_path / "out")


@pytest.mark.parametrize("form", ["saved", "parquet", "imagefolder"])
def test_library_and_converter_agree(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'huggingface' is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source, images = tmp_path / "source", [photo(number) for number in range(6)]
    if form == "imagefolder":
        fill(source, {f"train/{'cat' if n < 3 else 'dog'}/{n}.jpg": image for n, image in enumerate(images)})
    else:
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
        columns = {"image": [{"bytes": image, "path": None} for image in images], "label": [0, 0, 0, 1, 1, 1]}
        made = datasets.Dataset.from_dict(columns, features=features)
        if form == "saved":
            made.save_to_disk(source)
        else:
            source.mkdir()
            made.to_parquet(source / "train-00000-of-00001.parquet")
    _, found = convert("huggingface", source, tmp_path / "out")
    assert sorted(found["train"].values()) == sorted(((int(n > 2),), image) for n, image in enumerate(images))
    assert [row["name"] for row in table_of(tmp_path / "out")] == ["cat", "dog"]
