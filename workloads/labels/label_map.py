"""The artifact of a ``labels`` job: what turns the samples of a data set into targets, applied when batches are made.

Forms: *by class* (targets of each leaf class), *by sample* (a table by ordinal for each split) and *by rule* (random
ids: their bits follow from (seed, split, ordinal), so they do not depend on shards, workers or machines, and no table
is stored). Parts: ``label_map.json`` and the arrays as ``.npy``; the job adds counts and parents (``taxonomy``).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError, UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_part, read_record
from workloads.data.index import SplitIndex
from workloads.data.split_targets import (
    NO_LABEL,
    LargestTargets,
    LeafSetTargets,
    LeafTargets,
    SplitTargets,
    TableTargets,
)
from workloads.data.subset import ranks_in_classes
from workloads.runtime.npy import from_npy_bytes, npy_bytes
from workloads.runtime.streams import Purpose, Stage, integers_below, random_words, seed_sequence, stable_order

LABEL_MAP_PART: Final = "label_map.json"
_BY_CLASS_PART: Final = "targets.npy"
_BY_SAMPLE_FOLDER: Final = "targets"
_GROUPS_PART: Final = "groups.npy"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelMap(ABC):
    """A label space of ``num_classes`` targets; `resolve_targets` gives those of a split."""

    num_classes: int

    @staticmethod
    def open(store: ObjectStore, labels_key: str) -> LabelMap:
        """Open a committed label map. Raises ``NotFoundError`` if it is not committed."""
        record = read_record(store, labels_key)
        document: dict[str, Any] = json.loads(read_part(store, record, LABEL_MAP_PART))
        forms: Mapping[str, type[LabelMap]] = {
            "by_class": ClassLabels,
            "by_sample": SampleLabels,
            "by_rule": RandomLabels,
        }
        return forms[document["form"]].read(store, record, document)

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """One name per target id."""

    @abstractmethod
    def resolve_targets(self, split: SplitIndex) -> SplitTargets:
        """The targets of a split's samples.

        Raises:
            BadDataError: the split is one of another data set.
            UserError: the label space cannot label multi-label samples.
        """

    @abstractmethod
    def write(self, writer: ArtifactWriter) -> None:
        """Add the parts that `open` reads."""

    @classmethod
    @abstractmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> LabelMap:
        """Inverse of `write`; ``document`` is the content of ``label_map.json``."""


class Several(StrEnum):
    """What a sample of several leaf classes has."""

    UNION = "union"
    """All targets of its classes."""
    LARGEST = "largest"
    """The largest of them: for questions that any class answers with yes (1) or no (0)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassLabels(LabelMap):
    """By class: ``targets`` [C] holds the target of each leaf class, or [C, M] all of them, padded with ``NO_LABEL``.

    A class without target is not part of the label space, and its samples are not part of the data.
    """

    targets: NDArray[np.int64]
    names: tuple[str, ...]
    several: Several = Several.UNION

    @classmethod
    def of_sets(cls, sets: Sequence[Sequence[int]], names: Sequence[str]) -> Self:
        """From the targets of each class; one column if no class has several."""
        width = max(1, *map(len, sets))
        targets = np.full((len(sets), width), NO_LABEL, dtype=np.int64)
        for leaf, members in enumerate(sets):
            targets[leaf, : len(members)] = sorted(members)
        return cls(num_classes=len(names), names=tuple(names), targets=targets[:, 0] if width == 1 else targets)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def table_CM(self) -> NDArray[np.int32]:  # noqa: N802 - a shape
        """Targets (C, M) of each class, ascending, then ``NO_LABEL``."""
        return self.targets.reshape(len(self.targets), -1).astype(np.int32)

    def resolve_targets(self, split: SplitIndex) -> SplitTargets:
        sets = split.leaf_sets
        leaves = split.leaves if sets is None else sets.values
        if len(leaves) and int(leaves.max()) >= len(self.targets):
            message = f"split {split.name!r} has the leaf class {int(leaves.max())}, "
            message += f"but this label map knows {len(self.targets)} classes: it belongs to another data set"
            raise BadDataError(message)
        if sets is None:
            return LeafTargets(split.leaves, self.table_CM, num_classes=self.num_classes)
        bound = LeafSetTargets(sets, self.table_CM, num_classes=self.num_classes)
        return LargestTargets(bound) if self.several is Several.LARGEST else bound

    def write(self, writer: ArtifactWriter) -> None:
        several = {} if self.several is Several.UNION else {"several": self.several.value}
        write_document(writer, "by_class", num_classes=self.num_classes, class_names=self.names, **several)
        writer.add(_BY_CLASS_PART, npy_bytes(self.targets))

    @classmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> ClassLabels:
        targets = from_npy_bytes(read_part(store, record, _BY_CLASS_PART))
        return cls(
            num_classes=document["num_classes"],
            names=tuple(document["class_names"]),
            targets=targets,
            several=Several(document.get("several", Several.UNION)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleLabels(LabelMap):
    """By sample: ``targets`` holds for each split the targets [N] by ordinal."""

    targets: Mapping[str, NDArray[np.int64]]
    names: tuple[str, ...] = field(default=())

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names or numbered(self.num_classes)

    def resolve_targets(self, split: SplitIndex) -> SplitTargets:
        known = {name: len(targets) for name, targets in self.targets.items()}
        if known.get(split.name) != split.num_samples:
            message = f"split {split.name!r} has {split.num_samples} samples, but this label map holds targets for "
            raise BadDataError(f"{message}{known}: it belongs to another data set")
        return TableTargets(self.targets[split.name], num_classes=self.num_classes)

    def write(self, writer: ArtifactWriter) -> None:
        splits = sorted(self.targets)
        write_document(writer, "by_sample", num_classes=self.num_classes, class_names=self.class_names, splits=splits)
        for split in splits:
            writer.add(f"{_BY_SAMPLE_FOLDER}/{split}.npy", npy_bytes(self.targets[split]))

    @classmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> SampleLabels:
        targets = {
            split: from_npy_bytes(read_part(store, record, f"{_BY_SAMPLE_FOLDER}/{split}.npy"))
            for split in document["splits"]
        }
        return cls(num_classes=document["num_classes"], names=tuple(document["class_names"]), targets=targets)


def write_document(writer: ArtifactWriter, form: str, **fields: object) -> None:
    """Add ``label_map.json``."""
    writer.add(LABEL_MAP_PART, json.dumps({"form": form, **fields}, indent=1, sort_keys=True).encode())


def numbered(num_classes: int) -> tuple[str, ...]:
    """Names of classes that have none."""
    return tuple(str(target) for target in range(num_classes))


class Draw(StrEnum):
    """How ids are drawn."""

    BALANCED = "balanced"
    """A permutation modulo the number of ids: classes differ by one sample at most."""
    INDEPENDENT = "independent"
    """Each sample on its own, as by a keyed hash: sizes scatter, and small classes may stay empty."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomLabels(LabelMap):
    """By rule: sample i of a split has a random id, keyed by (seed, split).

    Over the whole split, ``num_classes`` = N gives every sample a class of its own. Within groups of classes, ids are
    ``group * num_ids + id``: group g of a leaf class is ``groups[leaf]``, or -1 for a class that is left out.
    """

    seed: int
    draw: Draw = Draw.BALANCED
    groups: NDArray[np.int64] | None = None
    num_ids: int = 0
    """Ids per group; unused without groups."""
    names: tuple[str, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names or numbered(self.num_classes)

    def resolve_targets(self, split: SplitIndex) -> SplitTargets:
        stream = seed_sequence(self.seed, Stage.LABELS, Purpose.RANDOM_IDS, *split.name.encode())
        words_N = random_words(stream, split.num_samples)
        if self.groups is not None:
            return TableTargets(self._within_groups(split, words_N), num_classes=self.num_classes)
        if self.draw is Draw.INDEPENDENT:
            ids_N = integers_below(words_N, self.num_classes)
        else:
            ids_N = stable_order(words_N)
            ids_N %= self.num_classes
        return TableTargets(ids_N.astype(np.int32), num_classes=self.num_classes)

    def _within_groups(self, split: SplitIndex, words_N: NDArray[np.uint64]) -> NDArray[np.int32]:
        if split.leaf_sets is not None:
            message = f"samples of split {split.name!r} have several classes, so random ids within classes are not "
            raise UserError(message + "defined; leave `within` and `classes` out to draw them over the whole set")
        groups_N = self._groups_of(split)
        if self.draw is Draw.INDEPENDENT:
            ids_N = integers_below(words_N, self.num_ids)
        else:
            ids_N = ranks_in_classes(groups_N, words_N)[0] % np.int64(self.num_ids)
        return np.where(groups_N < 0, -1, groups_N * self.num_ids + ids_N).astype(np.int32)

    def _groups_of(self, split: SplitIndex) -> NDArray[np.int64]:
        assert self.groups is not None  # noqa: S101 - for the type checker
        groups_N: NDArray[np.int64] = self.groups[split.leaves]
        return groups_N

    def write(self, writer: ArtifactWriter) -> None:
        fields: dict[str, object] = {}
        if self.groups is not None:
            fields = {"num_ids": self.num_ids, "class_names": self.names}
            writer.add(_GROUPS_PART, npy_bytes(self.groups))
        if self.draw is not Draw.BALANCED:
            fields["draw"] = self.draw.value
        write_document(writer, "by_rule", num_classes=self.num_classes, rule="random", seed=self.seed, **fields)

    @classmethod
    def read(cls, store: ObjectStore, record: Record, document: Mapping[str, Any]) -> RandomLabels:
        groups = from_npy_bytes(read_part(store, record, _GROUPS_PART)) if "num_ids" in document else None
        return cls(
            num_classes=document["num_classes"],
            seed=document["seed"],
            draw=Draw(document.get("draw", Draw.BALANCED)),
            groups=groups,
            num_ids=document.get("num_ids", 0),
            names=tuple(document.get("class_names", ())),
        )
