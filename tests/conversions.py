"""Sources on disk, converted and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.storage.dataset_files import DatasetFile, read_class_table
from tests.data_jobs import encoded
from workloads.commands.data import CONVERTERS
from workloads.convert.items import ConvertRequest, WriteRequest
from workloads.convert.write import write_dataset
from workloads.data.scan import ClassRule, scan_shard
from workloads.data.scan_splits import file_chunks


def photo(seed: int) -> bytes:
    return encoded("JPEG", size=(12, 10), seed=seed)


def fill(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def convert(converter: str, source: Path, out: Path, **fields: Any) -> tuple[DatasetFile, dict[str, dict[str, Any]]]:
    """Convert and read back: the description, and by split the leaves (a tuple) and the image of every key."""
    conversion = CONVERTERS[converter](ConvertRequest(source=source, **fields))
    dataset = write_dataset(conversion, WriteRequest(destination_uri=out.as_uri()), lambda _: None)
    return dataset, {split: read_back(dataset, split, out) for split in dataset.splits}


def read_back(dataset: DatasetFile, split: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rule = ClassRule(num_classes=dataset.num_classes, multi_label=dataset.multi_label)
    for entry in dataset.splits[split]:
        path = out / entry.name
        table = scan_shard(file_chunks(path), entry.name, rule)
        assert (table.bad, table.num_samples, table.digests.sha256) == ((), entry.num_samples, entry.sha256)
        content, keys = path.read_bytes(), np.split(table.keys, np.cumsum(table.key_lengths)[:-1])
        leaves = np.split(table.leaves, np.cumsum(table.num_leaves)[:-1])
        for row, key in enumerate(keys):
            image = content[int(table.offsets[row]) :][: int(table.lengths[row])]
            found[key.tobytes().decode()] = (tuple(leaves[row].tolist()), image)
    return found


def table_of(out: Path) -> list[dict[str, Any]]:
    return read_class_table(f"{out.as_uri()}/classes.json")[0]
