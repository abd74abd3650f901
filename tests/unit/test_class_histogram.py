"""The histogram of leaf classes that an index holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_part
from tests.data_jobs import DataPlane, encoded, tar_of
from workloads.data.index import counts_part
from workloads.runtime.npy import from_npy_bytes

IMAGE = encoded()
REPLACE = {"policy": "replace", "budget": 0.5}


@pytest.fixture
def plane(tmp_path: Path) -> DataPlane:
    return DataPlane(folder=tmp_path)


def shard_of(name: str, labels: Sequence[Sequence[int]]) -> bytes:
    """Samples with any number of classes each; a class of -1 makes a sample bad."""
    members = []
    for row, classes in enumerate(labels):
        content = json.dumps({"labels": list(classes)}).encode()
        members += [(f"{name}{row}.png", IMAGE), (f"{name}{row}.json", content)]
    return tar_of(members)


def dataset(plane: DataPlane, shards: dict[str, bytes], names: Sequence[str]) -> str:
    request = plane.request(JobKind.DATASET, {"names": list(names), "shards": sorted(shards)}, {})
    writer = ArtifactWriter(plane.store, request)
    for name, content in shards.items():
        writer.add(name, content)
    writer.add("classes.json", json.dumps([{"class": c, "name": name} for c, name in enumerate(names)]).encode())
    writer.commit(now=0.0)
    return request.key


def counts(plane: DataPlane, record: Record, split: str) -> list[int]:
    found: list[int] = from_npy_bytes(read_part(plane.store, record, counts_part(split))).tolist()
    return found


def test_histogram_counts_good_samples_of_every_class_by_split(plane: DataPlane) -> None:
    shards = {
        "train-0.tar": shard_of("a", [[0], [2], [2]]),
        "train-1.tar": shard_of("b", [[2], [7], [0]]),
        "val-0.tar": shard_of("c", [[1]]),
    }
    key = dataset(plane, shards, "wxyz")
    record = plane.run(JobKind.INDEX, {"bad_samples": REPLACE}, {"dataset": key})
    assert counts(plane, record, "train") == [2, 0, 3, 0]
    assert counts(plane, record, "val") == [0, 1, 0, 0]
    assert record.metrics["num_bad_train"] == 1


def test_histogram_of_samples_with_several_classes_counts_them_in_each(plane: DataPlane) -> None:
    key = dataset(plane, {"train-0.tar": shard_of("a", [[0, 2], [], [2], [1, 2]])}, "xyz")
    record = plane.run(JobKind.INDEX, {"multi_label": True}, {"dataset": key})
    assert counts(plane, record, "train") == [1, 1, 3]


@pytest.mark.parametrize("multi_label", [False, True])
def test_histogram_of_a_mixture_is_of_the_joined_classes(plane: DataPlane, *, multi_label: bool) -> None:
    first = {"train-0.tar": shard_of("a", [[0], [1], [1]]), "val-0.tar": shard_of("v", [[1]])}
    second = {"train-0.tar": shard_of("b", [[0], [1], [0, 1] if multi_label else [1]])}
    parts = [
        plane.run(JobKind.INDEX, {"multi_label": multi_label}, {"dataset": dataset(plane, shards, names)}).key
        for shards, names in ((first, ("cat", "oak")), (second, ("oak", "dog")))
    ]
    inputs = {f"part{number}": key for number, key in enumerate(parts)}
    record = plane.run(JobKind.INDEX, {"mixture": {"weights": None}}, inputs)
    assert counts(plane, record, "train") == ([1, 4, 2] if multi_label else [1, 3, 2])
    assert counts(plane, record, "val") == [0, 1, 0]
    assert int(np.sum(counts(plane, record, "train"))) == 6 + multi_label
