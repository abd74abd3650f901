"""Writing an index: columns grow shard by shard in files, so that memory does not grow with the data set.

What stays in memory is 8 bytes per sample, to find keys that occur in two shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from orchestrator.core.errors import BadDataError
from orchestrator.core.units import printable
from orchestrator.storage.digests import Digests
from workloads.data.index import NO_LEAF, NO_SUBSET, BadSamplePolicy, BadSamples, Column
from workloads.data.reasons import NUM_NAMED, OF_ARCHIVES, BadCount, BadSample, Reason
from workloads.data.scan import ClassRule, ShardTable

_MAX_UINT32 = 2**32 - 1
_REMAPPED_ROWS = 1 << 20
_NUM_SHARDS_COMPARED = 8
_REMEDY = "repair or remove them, or `bad_samples: {policy: replace, budget: ...}` leaves them out"


def subset_dtype(num_subsets: int) -> type[np.int16 | np.int32]:
    """Type of a column of subset ids: of 2 bytes, as always, unless there are more subsets than these can count."""
    return np.int16 if num_subsets <= np.iinfo(np.int16).max else np.int32


class ColumnFile:
    """A ``.npy`` file of one dimension that grows at its end."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self.path = path
        self._dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._num_rows = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("w+b")
        self._write_header()

    def append(self, values: NDArray[Any]) -> None:
        """Add rows."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self._num_rows += len(values)

    def close(self) -> None:
        """Write the final header."""
        if not self._file.closed:
            self._file.seek(0)
            self._write_header()
            self._file.close()

    def _write_header(self) -> None:
        # numpy pads headers so that the first dimension may grow to 21 digits in place.
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._num_rows,)}
        write_array_header_1_0(self._file, header)


@dataclass(slots=True, kw_only=True)
class ScannedShard:
    """A shard of a split as far as the index tells it."""

    name: str
    size_bytes: int
    digests: Digests
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _BrokenShard:
    """A shard that could not be read to its end."""

    found: BadSample
    size_bytes: int
    num_unread_bytes: int
    is_shortened: bool
    """See `ShardTable`."""


@dataclass(slots=True, kw_only=True)
class SplitColumns:
    """The columns of one split while shards are added in ordinal order.

    Args:
        folder: where its files are made.
        rule: the data set's classes.
        policy: what bad samples do.
    """

    name: str
    folder: Path
    rule: ClassRule
    policy: BadSamples
    shards: list[ScannedShard] = field(default_factory=list)
    bad: BadCount = field(default_factory=BadCount)
    class_counts: NDArray[np.int64] = field(init=False)
    subset_numbers: dict[str, int] = field(default_factory=dict)
    """Names of subsets, numbered in the order in which they were met."""
    class_shards: NDArray[np.int64] = field(init=False)
    """Shards that hold each class."""
    warnings: list[str] = field(default_factory=list)
    """Of its shards; the first few."""
    _files: dict[Column, ColumnFile] = field(init=False)
    _hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    _broken: dict[str, _BrokenShard] = field(default_factory=dict)
    _first_shards: dict[bytes, str] = field(default_factory=dict)
    """The shard of each key of the first few shards."""

    def __post_init__(self) -> None:
        self.class_counts = np.zeros(self.rule.num_classes, dtype=np.int64)
        self.class_shards = np.zeros(self.rule.num_classes, dtype=np.int64)
        self._files = {column: ColumnFile(self.path(column), dtype) for column, dtype in self._dtypes()}

    @property
    def num_samples(self) -> int:
        """Samples added so far, without bad ones."""
        return sum(shard.num_samples for shard in self.shards)

    def path(self, column: Column) -> Path:
        """File of a column."""
        return self.folder / f"{column.value}.npy"

    def add(self, table: ShardTable) -> None:
        """Add a shard. Raises ``BadDataError`` for bad samples, if the policy says so."""
        if table.bad and self.policy.policy is BadSamplePolicy.FAIL:
            raise BadDataError(_refusal(table.bad, self.name))
        self._refuse_early_repeats(table)
        self.bad.add(found for found in table.bad if found.reason not in OF_ARCHIVES)
        for found in (found for found in table.bad if found.reason in OF_ARCHIVES):
            self._broken[table.name] = _BrokenShard(
                found=found,
                size_bytes=table.size_bytes,
                num_unread_bytes=table.num_unread_bytes,
                is_shortened=table.is_shortened,
            )
        firsts, has_leaf = np.cumsum(table.num_leaves) - table.num_leaves, table.num_leaves > 0
        leaves = np.full(table.num_samples, NO_LEAF, dtype=np.int32)
        leaves[has_leaf] = table.leaves[firsts[has_leaf]]
        columns: dict[Column, NDArray[Any]] = {
            Column.OFFSET: table.offsets,
            Column.LENGTH: table.lengths,
            Column.CHECK: table.checks,
            Column.LEAF: leaves,
            Column.SUBSET: self._subset_ids(table),
            Column.KEY: table.keys,
            Column.KEY_OFFSET: table.key_lengths,
            Column.LEAF_SET: table.leaves,
            Column.LEAF_SET_OFFSET: table.num_leaves,
        }
        for column, file in self._files.items():
            file.append(columns[column])
        self._hashes.append(table.key_hashes)
        self.class_counts += np.bincount(table.leaves, minlength=self.rule.num_classes)
        self.class_shards[np.unique(table.leaves)] += 1
        self.warnings += table.warnings[: NUM_NAMED - len(self.warnings)]
        self.shards.append(
            ScannedShard(
                name=table.name, size_bytes=table.size_bytes, digests=table.digests, num_samples=table.num_samples
            )
        )

    def finish(self, subset_names: Sequence[str]) -> tuple[Column, ...]:
        """Complete the files; returns the columns there are.

        Args:
            subset_names: of the whole data set, sorted: what the final ids count.

        Raises:
            BadDataError: two shards have the same key and the policy refuses it, or bad samples exceed the budget.
        """
        for file in self._files.values():
            file.close()
        self._drop_repeats()
        self._count_lost()
        self._check_budget()
        self._accumulate(Column.KEY_OFFSET)
        if Column.LEAF_SET in self._files:
            self._accumulate(Column.LEAF_SET_OFFSET)
        if not subset_names:
            self._files.pop(Column.SUBSET)
        else:
            self._remap_subsets(subset_names)
        return tuple(self._files)

    def _dtypes(self) -> list[tuple[Column, type[np.generic]]]:
        always: list[tuple[Column, type[np.generic]]] = [
            (Column.OFFSET, np.int64),
            (Column.LENGTH, np.int32),
            (Column.CHECK, np.uint32),
            (Column.LEAF, np.int32),
            (Column.SUBSET, np.int32),  # until all names are known
            (Column.KEY, np.uint8),
            (Column.KEY_OFFSET, np.int32),
        ]
        sets: list[tuple[Column, type[np.generic]]] = [(Column.LEAF_SET, np.int32), (Column.LEAF_SET_OFFSET, np.int32)]
        return always + sets if self.rule.multi_label else always

    def _subset_ids(self, table: ShardTable) -> NDArray[np.int32]:
        numbers = self.subset_numbers
        found = [numbers.setdefault(name, len(numbers)) for name in table.subset_names]
        return np.array([*found, NO_SUBSET], dtype=np.int32)[table.subsets]

    def _count_lost(self) -> None:
        """Count broken shards by the samples that they probably held: the budget is a share of the split.

        Nobody knows how many these are. Their unread bytes count as many as the same bytes of the split hold. A shard
        that is cut off or compressed was longer, so it counts as at least as long as the median of the whole shards.
        """
        broken = self._broken.values()
        num_read = self.num_samples + self.bad.total
        read_bytes = sum(shard.size_bytes for shard in self.shards) - sum(shard.num_unread_bytes for shard in broken)
        whole = sorted(shard.size_bytes for shard in self.shards if shard.name not in self._broken)
        usual_bytes = whole[len(whole) // 2] if whole else 0
        for shard in broken:
            missing_bytes = max(0, usual_bytes - shard.size_bytes) if shard.is_shortened else 0
            # Where nothing was read, nothing says how large samples are; but then all of the split is bad anyway.
            share = (shard.num_unread_bytes + missing_bytes) / read_bytes if read_bytes else 0.0
            num_lost = max(1, round(share * num_read))
            told = f"; by its size it counts as {num_lost} bad samples" if num_lost > 1 else ""
            self.bad.add([replace(shard.found, num_samples=num_lost, message=shard.found.message + told)])

    def _check_budget(self) -> None:
        share = self.bad.total / max(1, self.num_samples + self.bad.total)
        if share > self.policy.budget:
            message = f"{self.bad.total} samples of split {self.name!r} cannot be used, {share:.2%} of it; the budget "
            message += f"is {self.policy.budget:.2%} ({self.bad.describe()}); repair the shards or raise the budget"
            raise BadDataError(message)

    def _accumulate(self, column: Column) -> None:
        """Replace lengths [N] by offsets [N + 1]; of 4 bytes where they suffice."""
        path = self.path(column)
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
        total = int(lengths.sum(dtype=np.int64))
        dtype = np.uint32 if column is Column.KEY_OFFSET and total <= _MAX_UINT32 else np.int64
        offsets = np.zeros(len(lengths) + 1, dtype=dtype)
        np.cumsum(lengths, out=offsets[1:], dtype=dtype)
        path.unlink()  # lengths stays mapped
        np.save(path, offsets, allow_pickle=False)

    def _remap_subsets(self, subset_names: Sequence[str]) -> None:
        """Rewrite the numbers of this scan as those of the whole data set, in as many bytes as these need."""
        dtype = subset_dtype(len(subset_names))
        numbers = {name: number for number, name in enumerate(subset_names)}
        final = np.array([*map(numbers.__getitem__, self.subset_numbers), NO_SUBSET], dtype=dtype)
        path = self.path(Column.SUBSET)
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        path.unlink()  # ids stay mapped
        file = ColumnFile(path, dtype)
        for start in range(0, len(ids), _REMAPPED_ROWS):
            file.append(final[ids[start : start + _REMAPPED_ROWS]])
        file.close()

    # -------------------------------------------------------------------------------------- keys in two shards

    def _refuse_early_repeats(self, table: ShardTable) -> None:
        """Look at the first few shards: where keys begin anew in each, a scan of hours would end with a refusal."""
        if self.policy.policy is not BadSamplePolicy.FAIL or len(self.shards) >= _NUM_SHARDS_COMPARED:
            self._first_shards.clear()
            return
        ends = np.cumsum(table.key_lengths).tolist()
        keys = [table.keys[first:end].tobytes() for first, end in pairwise([0, *ends])]
        first_shards = [(key, self._first_shards[key]) for key in keys if key in self._first_shards]
        if first_shards:
            raise BadDataError(_refusal([_repeat(table.name, first, key) for key, first in first_shards], self.name))
        self._first_shards.update(dict.fromkeys(keys, table.name))

    def _drop_repeats(self) -> None:
        """Keys are unique within a shard by construction; here across the shards of the split."""
        repeats = self._repeats()
        if not repeats:
            return
        ends = np.cumsum([shard.num_samples for shard in self.shards])
        shards = np.searchsorted(ends, [(row, first) for row, first, _ in repeats], side="right").tolist()
        bad = [
            _repeat(self.shards[own].name, self.shards[other].name, key)
            for (own, other), (_, _, key) in zip(shards, repeats, strict=True)
        ]
        if self.policy.policy is BadSamplePolicy.FAIL:
            raise BadDataError(_refusal(bad, self.name))
        self.bad.add(bad)
        self._keep(np.setdiff1d(np.arange(self.num_samples), [row for row, _, _ in repeats]))

    def _repeats(self) -> list[tuple[int, int, bytes]]:
        """(row, first row with the key, key) of every repetition, in row order."""
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *self._hashes])
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])
        suspects = np.unique(order[np.concatenate([same, same + 1])])
        if not suspects.size:
            return []
        keys = dict(self._keys(suspects))
        first_row: dict[bytes, int] = {}
        firsts = ((row, first_row.setdefault(key, row), key) for row, key in keys.items())
        return [(row, first, key) for row, first, key in firsts if row != first]

    def _keys(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
        lengths = np.load(self.path(Column.KEY_OFFSET), mmap_mode="r", allow_pickle=False)
        ends = np.cumsum(lengths, dtype=np.int64)
        blob = np.load(self.path(Column.KEY), mmap_mode="r", allow_pickle=False)
        for row in rows.tolist():
            yield row, blob[ends[row] - lengths[row] : ends[row]].tobytes()

    def _keep(self, rows: NDArray[np.int64]) -> None:
        """Rewrite every column without the other rows; rare, so it may take memory."""
        sizes = np.array([shard.num_samples for shard in self.shards])
        owners = np.repeat(np.arange(len(sizes)), sizes)[rows]
        key_lengths = np.load(self.path(Column.KEY_OFFSET), allow_pickle=False)
        lengths = {Column.KEY: key_lengths}
        if self.rule.multi_label:
            lengths[Column.LEAF_SET] = np.load(self.path(Column.LEAF_SET_OFFSET), allow_pickle=False)
        kept = np.zeros(len(key_lengths), dtype=np.bool_)
        kept[rows] = True
        for column in self._files:
            values = np.load(self.path(column), allow_pickle=False)
            mask = np.repeat(kept, lengths[column]) if column in lengths else kept
            if column is Column.LEAF_SET or (column is Column.LEAF and not self.rule.multi_label):
                self.class_counts -= np.bincount(values[~mask], minlength=self.rule.num_classes)
            np.save(self.path(column), values[mask], allow_pickle=False)
        for number, shard in enumerate(self.shards):
            shard.num_samples = int(np.count_nonzero(owners == number))


def _repeat(shard: str, first_shard: str, key: bytes) -> BadSample:
    return BadSample(
        place=f"{shard}:{key.decode(errors='surrogateescape')}",
        reason=Reason.DUPLICATE_KEY,
        message=f"has the key of a sample in {first_shard}; keys must be unique",
    )


def _refusal(bad: Sequence[BadSample], split: str) -> str:
    message = str(bad[0])
    if len(bad) > 1:
        message += f"; {len(bad) - 1} more in the same scan of split {split!r}: "
        message += ", ".join(printable(sample.place) for sample in bad[1:6]) + (", ..." if len(bad) > 6 else "")
    return f"{message}; {_REMEDY}"
