"""Random ids for samples: a rule, so that no table is stored.

The bits of a sample follow from (seed, split, ordinal), so ids depend on no shard, worker or machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_part
from workloads.data.arrays import from_npy_bytes, npy_bytes
from workloads.data.index import SplitIndex
from workloads.data.streams import Purpose, Stage, random_words, seed_sequence, stable_order
from workloads.data.subset import ranks_in_classes
from workloads.labels.bound import BoundLabels, TableLabels
from workloads.labels.label_map import LabelMap, numbered, write_document

_GROUPS_PART: Final = "groups.npy"


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

    def bind(self, split: SplitIndex) -> BoundLabels:
        stream = seed_sequence(self.seed, Stage.LABELS, Purpose.RANDOM_IDS, *split.name.encode())
        words_N = random_words(stream, split.num_samples)
        if self.groups is not None:
            return TableLabels(self._within_groups(split, words_N), num_classes=self.num_classes)
        if self.draw is Draw.INDEPENDENT:
            ids_N = _below(words_N, self.num_classes)
        else:
            ids_N = stable_order(words_N)
            ids_N %= self.num_classes
        return TableLabels(ids_N.astype(np.int32), num_classes=self.num_classes)

    def _within_groups(self, split: SplitIndex, words_N: NDArray[np.uint64]) -> NDArray[np.int32]:
        if split.leaf_sets is not None:
            message = f"samples of split {split.name!r} have several classes, so random ids within classes are not "
            raise UserError(message + "defined; leave `within` out to draw them over the whole set")
        groups_N = self._groups_of(split)
        if self.draw is Draw.INDEPENDENT:
            ids_N = _below(words_N, self.num_ids)
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


def _below(words: NDArray[np.uint64], limit: int) -> NDArray[np.int64]:
    """Integers in [0, limit) from the upper half of each word; the bias is below limit / 2**32."""
    return ((words >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)
