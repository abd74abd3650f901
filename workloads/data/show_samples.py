"""A few samples of foreign shards for people: where they lie, what they are called, their images as files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.storage import open_store
from workloads.data.index import Shard
from workloads.data.jobs import streamed
from workloads.data.labels_in_shards import ClassRule, class_names
from workloads.data.read_shards import scan_source
from workloads.data.scan import ShardTable
from workloads.data.targets import Target


def show_samples(
    target: Target, split: str, *, num_samples: int, seed: int, key: str = "", out: Path | None = None
) -> list[dict[str, Any]]:
    """Rows of some samples of one shard, drawn by the seed, or of the one with a key.

    Args:
        target: the shards.
        split: one of its splits.
        num_samples: how many to draw.
        seed: draws the shard and the samples.
        key: a sample's key; shards are read in order until it is found.
        out: folder for the images and ``labels.json``; None = no files.

    Raises:
        UserError: there is no such split.
        NotFoundError: there is no sample with this key.
    """
    if split not in target.splits:
        raise UserError(f"{target.uri} has no split {split!r}; it has {', '.join(target.splits)}")
    found = _find(target, split, key) if key else _draw(target, split, num_samples, seed)
    rows = []
    for shard, table, row in found:
        described, encoded = _describe(target, shard, table, row)
        rows.append(described)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / described["file"]).write_bytes(encoded)
    if out is not None:
        (out / "labels.json").write_text(json.dumps(rows, indent=1))
    return rows


def _table(target: Target, shard: Shard) -> ShardTable:
    names = class_names(target.classes)
    rule = ClassRule(num_classes=len(target.classes), multi_label=target.multi_label, names=names)
    return scan_source(streamed(shard), rule)


def _draw(target: Target, split: str, num_samples: int, seed: int) -> Iterator[tuple[Shard, ShardTable, int]]:
    random = np.random.default_rng(seed)
    shards = target.splits[split]
    shard = shards[int(random.integers(len(shards)))]
    table = _table(target, shard)
    chosen = random.permutation(table.num_samples)[:num_samples]
    yield from ((shard, table, row) for row in sorted(chosen.tolist()))


def _find(target: Target, split: str, key: str) -> Iterator[tuple[Shard, ShardTable, int]]:
    for shard in target.splits[split]:
        table = _table(target, shard)
        for row in range(table.num_samples):
            if _key(table, row) == key:
                yield shard, table, row
                return
    raise NotFoundError(f"split {split!r} of {target.uri} has no usable sample with the key {key!r}")


def _key(table: ShardTable, row: int) -> str:
    end = int(table.key_lengths[: row + 1].sum())
    return table.keys[end - int(table.key_lengths[row]) : end].tobytes().decode(errors="replace")


def _describe(target: Target, shard: Shard, table: ShardTable, row: int) -> tuple[dict[str, Any], bytes]:
    offset, length = int(table.offsets[row]), int(table.lengths[row])
    encoded = open_store(shard.store_uri).get_range(shard.object_name, offset, length)
    with Image.open(BytesIO(encoded)) as image:
        width, height, image_format = image.width, image.height, str(image.format).lower()
    end = int(table.num_leaves[: row + 1].sum())
    leaves = table.leaves[end - int(table.num_leaves[row]) : end].tolist()
    key = _key(table, row)
    described = {
        "shard": shard.name,
        "key": key,
        "row": row,
        "offset_bytes": offset,
        "length_bytes": length,
        "classes": leaves,
        "names": [str(target.classes[leaf].get("name")) for leaf in leaves],
        "width": width,
        "height": height,
        "file": f"{key.replace('/', '_')}.{image_format}",
    }
    return described, encoded
