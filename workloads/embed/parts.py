"""Finished rows of a features artifact, durable before the artifact is: what an attempt that died leaves to the next.

Rows ``start <= i < stop`` lie in a checkpoint folder of the job (``<stop>-<nonce>/``) that its ``manifest.json``
commits. The artifact's record names these very objects, so nothing is written twice.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.layout import checkpoints_folder
from workloads.checkpoint.manifest import Entry, decode_manifest, encode_manifest
from workloads.data.arrays import npy_bytes

_MANIFEST: Final = "manifest.json"
_FEATURES: Final = re.compile(r"features-(\d{12})-(\d{12})\.npy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
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

    def find(self) -> list[Rows]:
        """Complete and disjoint ones, by ``start``. Damaged ones are passed over."""
        found = [rows for name in self._store.list_children(f"{self._root}/") if (rows := self._open(name))]
        disjoint: list[Rows] = []
        for rows in sorted(found, key=lambda rows: (rows.start, -rows.stop, rows.folder)):
            if not disjoint or rows.start >= disjoint[-1].stop:
                disjoint.append(rows)
        return disjoint

    def write(self, start: int, features_PD: NDArray[np.float16], missing: NDArray[np.int64]) -> Rows:
        """Store rows; they are found from now on."""
        stop = start + len(features_PD)
        rows = Rows(start=start, stop=stop, folder=f"{self._root}/{stop:012d}-{secrets.token_hex(8)}", objects={})
        for name, content in ((rows.features, npy_bytes(features_PD)), (rows.missing, npy_bytes(missing))):
            self._store.put(f"{rows.folder}/{name}", content)
            rows.objects[name] = Entry.of(content)
        # Last, because it says that the others are complete.
        self._store.put(f"{rows.folder}/{_MANIFEST}", encode_manifest(stop, rows.objects))
        return rows

    def _open(self, name: str) -> Rows | None:
        folder = f"{self._root}/{name}"
        try:
            objects = decode_manifest(self._store.get(f"{folder}/{_MANIFEST}"))
            stats = {part: self._store.stat(f"{folder}/{part}").size_bytes for part in objects}
        except (NotFoundError, CorruptObjectError):
            return None
        named = next((match for part in objects if (match := _FEATURES.fullmatch(part))), None)
        if named is None or any(stats[part] != entry.size_bytes for part, entry in objects.items()):
            return None
        return Rows(start=int(named[1]), stop=int(named[2]), folder=folder, objects=objects)


def unfinished(finished: Sequence[Rows], num_samples: int, rows_per_part: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are still to do, none longer than ``rows_per_part``."""
    edges = [0, *(edge for rows in finished for edge in (rows.start, rows.stop)), num_samples]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        for first in range(start, stop, rows_per_part):
            yield first, min(first + rows_per_part, stop)
