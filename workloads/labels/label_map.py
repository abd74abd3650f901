"""The artifact of a ``labels`` job: what turns the samples of a data set into targets, applied when batches are made.

Three forms: *by class* (an array leaf class -> target), *by sample* (a table by ordinal for each split) and *by rule*
(random ids). Parts: ``label_map.json`` and the arrays as ``.npy``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BadDataError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_part, read_record
from workloads.data.arrays import from_npy_bytes, npy_bytes
from workloads.data.streams import Purpose, Stage, permutation, seed_sequence

LABEL_MAP_PART: Final = "label_map.json"
_BY_CLASS_PART: Final = "targets.npy"
_BY_SAMPLE_FOLDER: Final = "targets"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelMap(ABC):
    """A label space of ``num_classes`` targets, bound to a split by `bind`."""

    num_classes: int

    @staticmethod
    def open(store: ObjectStore, labels_key: str) -> LabelMap:
        """Open a committed label map. Raises ``NotFoundError`` if it is not committed."""
        record = read_record(store, labels_key)
        document: dict[str, Any] = json.loads(read_part(store, record, LABEL_MAP_PART))
        return _FORMS[document["form"]].read(store, record, document)

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """One name per target id."""

    @abstractmethod
    def bind(self, split: str, leaves: NDArray[np.int32]) -> NDArray[np.int64]:
        """Targets [N] of all samples of a split by ordinal, from their leaf classes [N]."""

    @abstractmethod
    def write(self, writer: ArtifactWriter) -> None:
        """Add the parts that `open` reads."""

    @classmethod
    @abstractmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> LabelMap:
        """Inverse of `write`; ``document`` is the content of ``label_map.json``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassLabels(LabelMap):
    """By class: ``targets`` [number of leaf classes] holds the target of each leaf class."""

    targets: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names

    def bind(self, split: str, leaves: NDArray[np.int32]) -> NDArray[np.int64]:
        if len(leaves) and int(leaves.max()) >= len(self.targets):
            message = f"split {split!r} has the leaf class {int(leaves.max())}, "
            message += f"but this label map knows {len(self.targets)} classes: it belongs to another data set"
            raise BadDataError(message)
        return self.targets[leaves]

    def write(self, writer: ArtifactWriter) -> None:
        _write_document(writer, "by_class", num_classes=self.num_classes, class_names=self.names)
        writer.add(_BY_CLASS_PART, npy_bytes(self.targets))

    @classmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> ClassLabels:
        targets = from_npy_bytes(read_part(store, record, _BY_CLASS_PART))
        return cls(num_classes=document["num_classes"], names=tuple(document["class_names"]), targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleLabels(LabelMap):
    """By sample: ``targets`` holds for each split the targets [N] by ordinal."""

    targets: Mapping[str, NDArray[np.int64]]
    names: tuple[str, ...] = field(default=())

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names or _numbered(self.num_classes)

    def bind(self, split: str, leaves: NDArray[np.int32]) -> NDArray[np.int64]:
        known = {name: len(targets) for name, targets in self.targets.items()}
        if known.get(split) != len(leaves):
            message = f"split {split!r} has {len(leaves)} samples, but this label map holds targets for {known}: "
            raise BadDataError(message + "it belongs to another data set")
        return self.targets[split]

    def write(self, writer: ArtifactWriter) -> None:
        splits = sorted(self.targets)
        _write_document(writer, "by_sample", num_classes=self.num_classes, class_names=self.class_names, splits=splits)
        for split in splits:
            writer.add(f"{_BY_SAMPLE_FOLDER}/{split}.npy", npy_bytes(self.targets[split]))

    @classmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> SampleLabels:
        targets = {
            split: from_npy_bytes(read_part(store, record, f"{_BY_SAMPLE_FOLDER}/{split}.npy"))
            for split in document["splits"]
        }
        return cls(num_classes=document["num_classes"], names=tuple(document["class_names"]), targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomLabels(LabelMap):
    """By rule: sample i of a split has the target ``permutation[i] % num_classes``, keyed by (seed, split).

    Classes differ by one sample at most in size; ``num_classes`` = N gives every sample a class of its own.
    """

    seed: int

    @property
    def class_names(self) -> tuple[str, ...]:
        return _numbered(self.num_classes)

    def bind(self, split: str, leaves: NDArray[np.int32]) -> NDArray[np.int64]:
        stream = seed_sequence(self.seed, Stage.LABELS, Purpose.RANDOM_IDS, *split.encode())
        return permutation(stream, len(leaves)) % self.num_classes

    def write(self, writer: ArtifactWriter) -> None:
        _write_document(writer, "by_rule", num_classes=self.num_classes, rule="random", seed=self.seed)

    @classmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> RandomLabels:  # noqa: ARG003 - a rule has no arrays
        return cls(num_classes=document["num_classes"], seed=document["seed"])


_FORMS: Final[Mapping[str, type[LabelMap]]] = {
    "by_class": ClassLabels,
    "by_sample": SampleLabels,
    "by_rule": RandomLabels,
}


def _write_document(writer: ArtifactWriter, form: str, **fields: object) -> None:
    writer.add(LABEL_MAP_PART, json.dumps({"form": form, **fields}, indent=1, sort_keys=True).encode())


def _numbered(num_classes: int) -> tuple[str, ...]:
    return tuple(str(target) for target in range(num_classes))
