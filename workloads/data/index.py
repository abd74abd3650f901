"""The index of a data set: for each sample its place in the shards and its leaf classes, as memory-mapped columns.

The *ordinal* of a sample is its row of the index: shards ordered by basename, samples by their row in the shard; so
shard and row follow from the ordinal and are stored nowhere. Parts of the artifact: ``index.json`` (shards by split,
subset names, bad samples), ``classes.json`` and ``<split>/<column>.npy``. Columns are opened when first asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError, UserError
from orchestrator.core.units import printable
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import Record, part_object, read_part, read_record
from orchestrator.storage.digests import Digests
from orchestrator.storage.listing import folder_shards
from orchestrator.storage.open import find_objects
from workloads.data.cache.objects import ObjectCache, opened_store

INDEX_PART: Final = "index.json"
CLASSES_PART: Final = "classes.json"
NO_SUBSET: Final = -1
NO_LEAF: Final = -1
"""In ``leaves``: a multi-label sample without any label."""

OpenColumn = Callable[[str], NDArray[Any]]


class Column(StrEnum):
    """Columns of a split; the names of their files."""

    OFFSET = "offset"
    LENGTH = "length"
    LEAF = "leaf"
    SUBSET = "subset"
    """Only where samples name subsets."""
    KEY = "key"
    """Bytes of all keys, one after the other."""
    KEY_OFFSET = "key_offset"
    LEAF_SET = "leaf_set"
    """Only in multi-label data: the labels of all samples, one after the other."""
    LEAF_SET_OFFSET = "leaf_set_offset"
    CHECK = "check"
    """Of the image's bytes, see ``check_of``; absent in indexes that were made before it was recorded."""


class BadSamplePolicy(StrEnum):
    """What a sample that cannot be used does to a job."""

    FAIL = "fail"
    REPLACE = "replace"
    """It is counted by reason and left out of the index; one that only fails to decode is replaced in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSamples:
    """A data set's policy; ``budget`` is the fraction of a split's samples in [0, 1] above which jobs fail anyway."""

    policy: BadSamplePolicy = BadSamplePolicy.FAIL
    budget: float = 0.0

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BadSamples:
        """From ``{"policy": ..., "budget": ...}``; an empty document is the default."""
        return cls(policy=BadSamplePolicy(document.get("policy", "fail")), budget=float(document.get("budget", 0.0)))

    def allowed(self, num_samples: int) -> int:
        """How many of some samples may be bad: the most whose share is within the budget.

        Shares are compared, because the product of a budget and a number may be rounded to less than a whole sample:
        0.0003 of 10,000 are 3.
        """
        nearest = round(self.budget * num_samples)
        return nearest if nearest / max(1, num_samples) <= self.budget else nearest - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar, by its object's name in a store."""

    name: str
    object_name: str
    size_bytes: int
    sha256: str
    num_samples: int
    store_uri: str = ""
    """The store that holds it; empty: the sweep's own."""
    blake3: str = ""
    """Empty in indexes that were made before it was recorded."""

    @property
    def digests(self) -> Digests:
        """What its bytes must hash to."""
        return Digests(sha256=self.sha256, blake3=self.blake3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeafSets:
    """Leaf classes of multi-label samples: sample i has ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: NDArray[np.int64]
    """[N + 1]."""
    values: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShares:
    """How the components of a weighted mixture share the positions of training."""

    weights: tuple[float, ...]
    num_shards: tuple[int, ...]
    """Shards of each component, which follow one another."""


class SplitIndex:
    """Columns of one split, by ordinal; N samples in S shards.

    Args:
        index_key: the artifact it is a part of.
        name: the split.
        shards: in ordinal order.
        subset_names: what ``subset_ids`` count; the same for all splits.
        columns: names of the columns that there are.
        open_column: how to get one; called once per column, when it is first used.
        shares: of a weighted mixture.
    """

    def __init__(
        self,
        *,
        index_key: str,
        name: str,
        shards: tuple[Shard, ...],
        subset_names: tuple[str, ...],
        columns: Sequence[str],
        open_column: OpenColumn,
        shares: MixtureShares | None = None,
    ) -> None:
        self.shares = shares
        self.index_key, self.name, self.shards, self.subset_names = index_key, name, shards, subset_names
        self._columns, self._open_column = frozenset(columns), open_column
        sizes = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self.first_ordinals: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """[S + 1]: shard s holds the ordinals ``first_ordinals[s] <= i < first_ordinals[s + 1]``."""

    def __getstate__(self) -> dict[str, Any]:
        """All but the columns that are open, which another process maps into its own memory."""
        opened = {name for name, value in vars(type(self)).items() if isinstance(value, cached_property)}
        return {name: value for name, value in vars(self).items() if name not in opened}

    @classmethod
    def in_memory(
        cls,
        *,
        leaves: NDArray[Any],
        name: str = "train",
        shard_sizes: Sequence[int] = (),
        keys: Sequence[str] = (),
        leaf_sets: LeafSets | None = None,
    ) -> SplitIndex:
        """An index that no artifact holds; all samples in one shard unless ``shard_sizes`` says otherwise."""
        sizes = shard_sizes or (len(leaves),)
        shards = tuple(
            Shard(name=f"{name}-{number:06d}.tar", object_name="", size_bytes=0, sha256="", num_samples=size)
            for number, size in enumerate(sizes)
        )
        encoded = [key.encode(errors="surrogateescape") for key in keys or map(str, range(len(leaves)))]
        zeros = np.zeros(len(leaves), dtype=np.int64)
        columns: dict[str, NDArray[Any]] = {
            Column.OFFSET: zeros,
            Column.LENGTH: zeros,
            Column.LEAF: leaves.astype(np.int32),
            Column.KEY: np.frombuffer(b"".join(encoded), dtype=np.uint8),
            Column.KEY_OFFSET: np.concatenate([[0], np.cumsum([len(key) for key in encoded])]).astype(np.int64),
        }
        if leaf_sets is not None:
            columns |= {Column.LEAF_SET: leaf_sets.values, Column.LEAF_SET_OFFSET: leaf_sets.offsets}
        return cls(
            index_key="",
            name=name,
            shards=shards,
            subset_names=(),
            columns=tuple(columns),
            open_column=columns.__getitem__,
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.first_ordinals[-1])

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Samples per shard."""
        return tuple(shard.num_samples for shard in self.shards)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First byte [N] of each image within its shard."""
        return self._open_column(Column.OFFSET)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Bytes [N] of each image."""
        return self._open_column(Column.LENGTH)

    @cached_property
    def leaves(self) -> NDArray[np.int32]:
        """Leaf class [N]; in multi-label data the first label, or -1 without any."""
        return self._open_column(Column.LEAF)

    @cached_property
    def subset_ids(self) -> NDArray[np.integer[Any]]:
        """Index [N] into ``subset_names``; -1 = in none."""
        if Column.SUBSET in self._columns:
            return self._open_column(Column.SUBSET)
        return np.broadcast_to(np.int16(NO_SUBSET), (self.num_samples,))  # one number, whatever N is

    @cached_property
    def checks(self) -> NDArray[np.uint32] | None:
        """`check_of` [N] of each image; None in older indexes."""
        return self._open_column(Column.CHECK) if Column.CHECK in self._columns else None

    @cached_property
    def leaf_sets(self) -> LeafSets | None:
        """All labels of each sample; None in data whose samples have one each."""
        if Column.LEAF_SET not in self._columns:
            return None
        values = self._open_column(Column.LEAF_SET)
        return LeafSets(offsets=self._open_column(Column.LEAF_SET_OFFSET), values=values)

    def shard_of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index into ``shards`` of each sample."""
        return np.searchsorted(self.first_ordinals, ordinals, side="right") - 1

    def key(self, ordinal: int) -> str:
        """The sample's key in its shard."""
        first, end = (int(offset) for offset in self.key_offsets[ordinal : ordinal + 2])
        return self.key_bytes[first:end].tobytes().decode(errors="surrogateescape")

    def place(self, ordinal: int) -> str:
        """``shard:key``, as errors name a sample."""
        shard = int(np.searchsorted(self.first_ordinals, ordinal, side="right")) - 1
        return printable(f"{self.shards[shard].name}:{self.key(ordinal)}")

    @cached_property
    def key_bytes(self) -> NDArray[np.uint8]:
        """All keys, one after the other."""
        return self._open_column(Column.KEY)

    @cached_property
    def key_offsets(self) -> NDArray[Any]:
        """[N + 1]: key i is ``key_bytes[key_offsets[i]:key_offsets[i + 1]]``."""
        return self._open_column(Column.KEY_OFFSET)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleIndex:
    """An opened index artifact."""

    key: str
    classes: tuple[Mapping[str, Any], ...]
    """Class table: row c describes leaf class c with ``class``, ``name`` and one column per level."""
    subset_names: tuple[str, ...]
    splits: Mapping[str, SplitIndex]
    bad_samples: BadSamples = field(default_factory=BadSamples)

    @classmethod
    def open(
        cls, store: ObjectStore, index_key: str, cache_dir: Path, location: Mapping[str, Any] | None = None
    ) -> SampleIndex:
        """Open a committed index; its columns are memory-mapped from the node's cache.

        Args:
            store: the sweep's own.
            index_key: of the artifact.
            cache_dir: the node's cache folder.
            location: where an external data set lies now (``Execution.data_location``); by default where it was
                when it was indexed.

        Raises:
            NotFoundError: the index is not committed.
            CorruptObjectError: a part is not what the record says.
            BadDataError: ``location`` lacks a shard of the index, or declares another number of samples.
        """
        record = read_record(store, index_key)
        document = json.loads(read_part(store, record, INDEX_PART))
        check_declared_counts(location or {}, counts_of_splits(document["splits"]))
        splits = {
            name: _open_split(ObjectCache(store, cache_dir), record, document, name, location or {})
            for name in document["splits"]
        }
        return cls(
            key=index_key,
            classes=tuple(json.loads(read_part(store, record, CLASSES_PART))),
            subset_names=tuple(document["subset_names"]),
            splits=splits,
            bad_samples=BadSamples.from_json(document["bad_samples"]),
        )

    @property
    def num_classes(self) -> int:
        """Number of leaf classes."""
        return len(self.classes)

    def split(self, name: str) -> SplitIndex:
        """The columns of a split. Raises ``UserError`` if the data set has none of this name."""
        if name not in self.splits:
            raise UserError(f"data set of {self.key} has no samples in split {name!r}; it has {sorted(self.splits)}")
        return self.splits[name]


def store_of(shard: Shard, default: ObjectStore) -> ObjectStore:
    """The store that holds a shard; ``default`` is the sweep's own."""
    return opened_store(shard.store_uri) if shard.store_uri else default


def column_part(split: str, column: str) -> str:
    """Part name of a column."""
    return f"{split}/{column}.npy"


def counts_part(split: str) -> str:
    """Part name of the class histogram: samples [C] of each leaf class; one with several counts in each of them."""
    return f"counts/{split}.npy"


def _open_split(
    cache: ObjectCache, record: Record, document: Mapping[str, Any], name: str, location: Mapping[str, Any]
) -> SplitIndex:
    split = document["splits"][name]
    return SplitIndex(
        index_key=record.key,
        name=name,
        shards=tuple(_placed(split, name, location)),
        subset_names=tuple(document["subset_names"]),
        columns=split["columns"],
        open_column=partial(_open_column, cache, record, name),
        shares=_shares(document, split),
    )


def _shares(document: Mapping[str, Any], split: Mapping[str, Any]) -> MixtureShares | None:
    weights = document.get("mixture", {}).get("weights")
    return MixtureShares(weights=tuple(weights), num_shards=tuple(split["num_shards"])) if weights else None


def _placed(split: Mapping[str, Any], name: str, location: Mapping[str, Any]) -> list[Shard]:
    """The shards of a split at their present places; in a mixture, each where its component lies now."""
    shards = [Shard(**shard) for shard in split["shards"]]
    components: Sequence[Mapping[str, Any]] | None = location.get("components")
    if components is None:
        return _moved(shards, _patterns(location, name))
    ends = np.cumsum(split["num_shards"]).tolist()
    places = zip(components, ends, split["num_shards"], strict=True)
    return [
        shard
        for component, end, number in places
        for shard in _moved(shards[end - number : end], _patterns(component, name))
    ]


def _patterns(location: Mapping[str, Any], split: str) -> Sequence[str]:
    if "dataset" in location:
        return (f"{location['dataset'].rstrip('/')}/",)
    patterns: Sequence[str] = location.get("splits", {}).get(split, ())
    return patterns


def _moved(shards: Sequence[Shard], patterns: Sequence[str]) -> list[Shard]:
    """The shards at their present places; content is checked against their sha256 when they are read."""
    if not patterns:
        return list(shards)
    folders = [pattern for pattern in patterns if pattern.endswith("/")]
    places = find_objects(pattern for pattern in patterns if not pattern.endswith("/"))
    for folder in folders:
        # A listing only where there is a choice: one folder has them all, or reading says what it lacks.
        there = folder_shards(folder.rstrip("/")) if len(patterns) > 1 else [shard.name for shard in shards]
        places |= {name: (folder, name) for name in there}
    if missing := [shard.name for shard in shards if shard.name not in places]:
        raise BadDataError(f"{missing[:3]} of the indexed shards are not among {list(patterns)[:3]}; index them again")
    return [
        replace(shard, store_uri=places[shard.name][0].rstrip("/"), object_name=places[shard.name][1])
        for shard in shards
    ]


def _open_column(cache: ObjectCache, record: Record, split: str, name: str) -> NDArray[Any]:
    part = column_part(split, name)
    stored = record.parts[part]
    path = cache.path(part_object(record, part), size_bytes=stored.size_bytes, digests=stored.digests)
    column: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return column


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCount:
    """Samples of a split."""

    good: int
    bad: int = 0
    """Left out of the index."""


def counts_of_splits(splits: Mapping[str, Mapping[str, Any]]) -> dict[str, SplitCount]:
    """Of the ``splits`` of an ``index.json``."""
    return {
        name: SplitCount(
            good=sum(shard["num_samples"] for shard in split["shards"]),
            bad=sum(reason["count"] for reason in split.get("bad", {}).values()),
        )
        for name, split in splits.items()
    }


def check_declared_counts(location: Mapping[str, Any], found: Mapping[str, SplitCount]) -> None:
    """Compare what ``location["num_samples"]`` declares with what there is.

    Samples that were left out as bad may be among those that were declared, or not: whoever counts files counts them.

    Raises:
        BadDataError: a split has another number of samples.
    """
    for name, number in location.get("num_samples", {}).items():
        split = found.get(name)
        if split is None or number is None or split.good <= number <= split.good + split.bad:
            continue
        bad = f" and {split.bad} bad ones" if split.bad else ""
        message = f"num_{name} declares {number} samples, but the shards of split {name!r} hold {split.good}"
        raise BadDataError(f"{message}{bad}; correct num_{name}, or the URIs if they name other shards than meant")
