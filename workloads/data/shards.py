"""Writing ordinary WebDataset shards, the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SAMPLES_PER_SHARD = 512
_MODE = 0o444


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSample:
    """One image, uint8 [H, W] or [H, W, 3], with its leaf class; ``metadata`` is plain JSON.

    ``metadata["subset"]``, if present, names the part of the split that the sample is evaluated apart with.
    """

    key: str
    image: NDArray[np.uint8]
    leaf: int
    metadata: Mapping[str, Any]


def write_shards(samples: Iterable[ShardSample], split: str, folder: Path) -> Iterator[Path]:
    """Write ``<split>-<number>.tar`` files of up to `SAMPLES_PER_SHARD` samples, yielding each once it is complete.

    Members of a sample: ``<key>.png``, ``<key>.cls`` (leaf class as text) and ``<key>.json`` (metadata).
    """
    remaining = iter(samples)
    number = 0
    while batch := list(islice(remaining, SAMPLES_PER_SHARD)):
        path = folder / f"{split}-{number:06d}.tar"
        _write_shard(batch, path)
        yield path
        number += 1


def _write_shard(samples: list[ShardSample], path: Path) -> None:
    import webdataset  # imports torch: only the jobs that write shards pay for it

    # Owner, mode and time are fixed: the same request makes the same bytes.
    with (
        path.open("wb") as file,
        webdataset.TarWriter(file, user="", group="", mode=_MODE, mtime=0, encoder=False) as writer,
    ):
        for sample in samples:
            writer.write(_members(sample))


def _members(sample: ShardSample) -> dict[str, str | bytes]:
    return {
        "__key__": sample.key,
        "png": _png(sample.image),
        "cls": str(sample.leaf).encode(),
        "json": json.dumps(dict(sample.metadata), sort_keys=True).encode(),
    }


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()
