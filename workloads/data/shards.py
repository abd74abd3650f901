"""Writing ordinary WebDataset shards, the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
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


def shard_name(split: str, number: int) -> str:
    """Basename of a shard, of those of its split."""
    return f"{split}-{number:06d}.tar"


def write_samples(samples: Iterable[ShardSample], path: Path) -> int:
    """Write one shard of ``<key>.png``, ``<key>.cls`` (leaf class as text) and ``<key>.json`` (metadata) members.

    Returns the number of samples.
    """
    return write_shard(((sample.key, _members(sample)) for sample in samples), path)


def write_shard(samples: Iterable[tuple[str, Mapping[str, bytes]]], path: Path) -> int:
    """Write one shard of ``(key, {extension: content})``, contents as they are; returns its number of samples.

    The same samples make the same bytes on every machine; names too long for a plain header get a pax header.
    """
    import webdataset  # imports torch: only the jobs that write shards pay for it

    num_samples = 0
    # Owner, mode and time are fixed: the same request makes the same bytes.
    with (
        path.open("wb") as file,
        webdataset.TarWriter(
            file, user="", group="", mode=_MODE, mtime=0, encoder=False, format="PAX_FORMAT"
        ) as writer,
    ):
        for key, members in samples:
            writer.write({"__key__": key, **members})
            num_samples += 1
    return num_samples


def _members(sample: ShardSample) -> dict[str, bytes]:
    return {
        "png": _png(sample.image),
        "cls": str(sample.leaf).encode(),
        "json": json.dumps(dict(sample.metadata), sort_keys=True).encode(),
    }


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()
