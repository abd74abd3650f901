"""The artifact of an ``embed`` job: features of every sample of a split, by ordinal.

Parts: ``features.json`` and, for runs of rows, ``features-<start>-<stop>.npy`` (float16, memory-mapped from the node's
cache) with ``missing-<start>-<stop>.npy`` (ordinals that could not be decoded, whose features are 0). Finished rows are
durable before the artifact is: an attempt that died leaves them to the next.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError, CorruptObjectError, NotFoundError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Record, part_object, read_part, read_record, remedy_of
from orchestrator.storage.digests import digest_of
from orchestrator.storage.layout import checkpoints_folder
from workloads.data.cache import ObjectCache
from workloads.runtime.manifest import MANIFEST, Entry, decode_manifest, write_folder
from workloads.runtime.npy import from_npy_bytes, npy_bytes

FEATURES_PART: Final = "features.json"
_EMPTY_BYTES: Final = len(npy_bytes(np.empty(0, dtype=np.int64)))
_NUM_THREADS: Final = 16
"""Small objects that are read at once: it is waiting, not work."""
Item = TypeVar("Item")
Found = TypeVar("Found")
_FEATURES: Final = re.compile(r"features-(\d{12})-(\d{12})\.npy")


def _nothing() -> None:
    return None


def _read_all(read: Callable[[Item], Found], items: Iterable[Item], tick: Callable[[], None]) -> list[Found]:
    """What ``read`` makes of each, in order; ``tick`` is called for each that is there, by the caller's thread."""
    found = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for one in pool.map(read, items):
            found.append(one)
            tick()
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureTable:
    """Features (num_samples, dim) of a split; ``parts`` are runs of its rows, from ``starts``."""

    key: str
    split: str
    index_key: str
    dataset_digest: str
    """Of the data set's shards; empty where its index has none."""
    dim: int
    starts: NDArray[np.int64]
    parts: tuple[NDArray[np.float16], ...]
    missing: NDArray[np.int64]
    """Ordinals without features, ascending."""

    @classmethod
    def open(cls, store: ObjectStore, key: str, cache_dir: Path, tick: Callable[[], None] = _nothing) -> Self:
        """Open a committed artifact; its arrays are memory-mapped. ``tick`` is called for each part that is there.

        Raises:
            NotFoundError: it is not committed.
            CorruptObjectError: a part is not what the record says.
        """
        record, cache = read_record(store, key), ObjectCache(store, cache_dir)
        document: dict[str, Any] = json.loads(read_part(store, record, FEATURES_PART))
        names = [part["missing"] for part in document["parts"]]
        missing = _read_all(lambda name: from_npy_bytes(read_part(store, record, name)), names, tick)
        mapped = []
        for part in document["parts"]:
            mapped.append(_mapped(cache, record, part["features"]))
            tick()
        return cls(
            key=key,
            split=document["split"],
            index_key=document["index"],
            dataset_digest=document["dataset_digest"],
            dim=document["dim"],
            starts=np.array([part["start"] for part in document["parts"]], dtype=np.int64),
            parts=tuple(mapped),
            missing=np.concatenate(missing) if missing else np.empty(0, dtype=np.int64),
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return sum(map(len, self.parts))

    def take(self, ordinals_B: NDArray[np.int64]) -> NDArray[np.float16]:
        """Features (B, dim) of samples, by ascending ordinals.

        Raises:
            BadDataError: one is NaN or infinite; the first is named.
        """
        taken_BD = np.empty((len(ordinals_B), self.dim), dtype=np.float16)
        bounds = np.searchsorted(ordinals_B, np.append(self.starts, self.num_samples))
        for number, part in enumerate(self.parts):
            chosen = slice(int(bounds[number]), int(bounds[number + 1]))
            if chosen.stop > chosen.start:
                taken_BD[chosen] = part[ordinals_B[chosen] - self.starts[number]]
        is_finite = np.isfinite(taken_BD).all(axis=1)
        if not is_finite.all():
            first = int(ordinals_B[np.argmin(is_finite)])
            message = f"features {self.key} of split {self.split!r} are not finite at ordinal {first}: nothing can be "
            raise BadDataError(message + "made of them; delete the artifact and embed again, in fp32 if it was fp16")
        return taken_BD


def _mapped(cache: ObjectCache, record: Record, part: str) -> NDArray[np.float16]:
    stored = record.parts[part]
    path = cache.path(part_object(record, part), size_bytes=stored.size_bytes, digests=stored.digests)
    features_PD: NDArray[np.float16] = np.load(path, mmap_mode="r", allow_pickle=False)
    return features_PD


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Finished rows ``start <= i < stop``; ``objects`` by name are what ``folder`` holds."""

    start: int
    stop: int
    folder: str
    objects: dict[str, Entry]

    @property
    def features(self) -> str:
        """Name of the features (stop - start, D) float16."""
        return f"features-{self.start:012d}-{self.stop:012d}.npy"

    @property
    def missing(self) -> str:
        """Name of the ordinals that could not be decoded: their features are 0."""
        return f"missing-{self.start:012d}-{self.stop:012d}.npy"

    def adopt(self, writer: ArtifactWriter) -> None:
        """Make them parts of the artifact."""
        for name, entry in self.objects.items():
            writer.adopt(name, f"{self.folder}/{name}", size_bytes=entry.size_bytes, digests=entry.digests)


class FinishedRows:
    """The finished rows of one job, by whichever attempt."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._root = store, checkpoints_folder(key)

    def find(self, tick: Callable[[], None] = _nothing) -> list[RowRange]:
        """Complete and disjoint ones, by ``start``: those with a sound manifest, whose objects have their sizes.

        There may be thousands: sizes are taken from one listing, and manifests are read side by side. ``tick`` is
        called for each that was looked at.

        Their rows are not read. So rows of the right size that are damaged are found; whoever opens the artifact
        refuses them, and says what to delete (``remedy_of``).
        """
        sizes = {stat.name: stat.size_bytes for stat in self._store.list_objects(f"{self._root}/")}
        folders = [name.removesuffix(f"/{MANIFEST}") for name in sizes if name.endswith(f"/{MANIFEST}")]
        opened = _read_all(lambda folder: self._open(folder, sizes), folders, tick)
        found = [rows for rows in opened if rows is not None]
        disjoint: list[RowRange] = []
        for rows in sorted(found, key=lambda rows: (rows.start, -rows.stop, rows.folder)):
            if not disjoint or rows.start >= disjoint[-1].stop:
                disjoint.append(rows)
        return disjoint

    def missing(self, finished: Iterable[RowRange], tick: Callable[[], None] = _nothing) -> NDArray[np.int64]:
        """Ordinals in some of them that could not be decoded; where there are none, nothing is read.

        ``tick`` is called for each that was read.

        Raises:
            CorruptObjectError: they are not what was written.
        """
        lacking = [rows for rows in finished if rows.objects[rows.missing].size_bytes > _EMPTY_BYTES]
        return np.concatenate([np.empty(0, dtype=np.int64), *_read_all(self._read_missing, lacking, tick)])

    def write(self, start: int, features_PD: NDArray[np.float16], missing: NDArray[np.int64]) -> RowRange:
        """Store rows; they are found from now on."""
        stop = start + len(features_PD)
        rows = RowRange(start=start, stop=stop, folder=f"{self._root}/{stop:012d}-{secrets.token_hex(8)}", objects={})
        contents = {rows.features: npy_bytes(features_PD), rows.missing: npy_bytes(missing)}
        return replace(rows, objects=write_folder(self._store, rows.folder, stop, contents))

    def _read_missing(self, rows: RowRange) -> NDArray[np.int64]:
        name, digests = f"{rows.folder}/{rows.missing}", rows.objects[rows.missing].digests
        content = self._store.get(name)
        if not digests.match(digest_of(content, digests.algorithm)):
            message = f"{name} in {self._store.uri} is not what was written: the store lost or changed it"
            raise CorruptObjectError(f"{message}; {remedy_of(name)}")
        return from_npy_bytes(content)

    def _open(self, folder: str, sizes: Mapping[str, int]) -> RowRange | None:
        try:
            objects = decode_manifest(self._store.get(f"{folder}/{MANIFEST}"))
        except (NotFoundError, CorruptObjectError):
            return None
        named = next((match for part in objects if (match := _FEATURES.fullmatch(part))), None)
        if named is None or any(sizes.get(f"{folder}/{part}") != entry.size_bytes for part, entry in objects.items()):
            return None
        return RowRange(start=int(named[1]), stop=int(named[2]), folder=folder, objects=objects)


def unfinished(finished: Sequence[RowRange], num_samples: int, rows_per_part: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are still to do, none longer than ``rows_per_part``."""
    edges = [0, *(edge for rows in finished for edge in (rows.start, rows.stop)), num_samples]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        for first in range(start, stop, rows_per_part):
            yield first, min(first + rows_per_part, stop)
