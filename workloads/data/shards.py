"""Writing ordinary WebDataset shards, the same bytes every time; finished ones are durable before the artifact is.

Finished shards are shared by all attempts and part jobs. Each is in a checkpoint folder of the whole
data set's job (``<number>-<nonce>/``) that its ``manifest.json`` commits. The record of the data set names these very
objects, so nothing is written twice, and garbage collection keeps them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.digests import file_digests
from orchestrator.storage.layout import checkpoints_folder
from workloads.runtime.manifest import MANIFEST, Entry, decode_manifest, encode_manifest

SAMPLES_PER_SHARD = 512
_MODE = 0o444
_NUM_THREADS: Final = 16
"""Manifests that are read at once: it is waiting, not work."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A shard that is there; ``folder`` holds it under ``name``."""

    number: int
    name: str
    folder: str
    entry: Entry

    def adopt(self, writer: ArtifactWriter) -> None:
        """Make it a part of the artifact."""
        object_name = f"{self.folder}/{self.name}"
        writer.adopt(self.name, object_name, size_bytes=self.entry.size_bytes, digests=self.entry.digests)


class FinishedShards:
    """The finished shards of one data set.

    Args:
        store: the sweep's.
        key: of the whole data set.
        names: of all its shards, by number.
    """

    def __init__(self, store: ObjectStore, key: str, names: Sequence[str]) -> None:
        self._store, self._root, self._names = store, checkpoints_folder(key), names

    def find(self, numbers: Collection[int]) -> dict[int, FinishedShard]:
        """Those of some shards that are there, by number: with a sound manifest, and of their size. None is read."""
        wanted = frozenset(numbers)
        folders: dict[int, list[str]] = {}
        for child in self._store.list_children(f"{self._root}/"):
            number = child.partition("-")[0]
            if number.isdigit() and int(number) in wanted:
                folders.setdefault(int(number), []).append(child)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            found = pool.map(lambda item: self._first_whole(*item), folders.items())
            return {shard.number: shard for shard in found if shard is not None}

    def write(self, number: int, path: Path) -> FinishedShard:
        """Store a shard; it is found from now on."""
        name, folder = self._names[number], f"{self._root}/{number:012d}-{secrets.token_hex(8)}"
        digests = file_digests(path)
        entry = Entry(size_bytes=path.stat().st_size, sha256=digests.sha256, blake3=digests.blake3)
        self._store.put_file(f"{folder}/{name}", path)
        # Last, because it says that the shard is whole.
        self._store.put(f"{folder}/{MANIFEST}", encode_manifest(number, {name: entry}))
        return FinishedShard(number=number, name=name, folder=folder, entry=entry)

    def _first_whole(self, number: int, children: Sequence[str]) -> FinishedShard | None:
        found = (self._open(number, f"{self._root}/{child}") for child in sorted(children))
        return next((shard for shard in found if shard is not None), None)

    def _open(self, number: int, folder: str) -> FinishedShard | None:
        name = self._names[number]
        try:
            entry = decode_manifest(self._store.get(f"{folder}/{MANIFEST}"))[name]
            is_whole = self._store.stat(f"{folder}/{name}").size_bytes == entry.size_bytes
        except (NotFoundError, CorruptObjectError, KeyError):
            return None
        return FinishedShard(number=number, name=name, folder=folder, entry=entry) if is_whole else None
