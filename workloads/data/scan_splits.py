"""Scanning a whole data set: every split's shards into columns, with its digest and its bad samples.

Several processes scan the shards; each is streamed from its store and never kept as a whole. Results come in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from orchestrator.core.errors import BadDataError, CorruptObjectError
from orchestrator.core.units import MIB
from orchestrator.storage import ObjectStore, open_store
from orchestrator.storage.artifacts import remedy_of
from orchestrator.storage.dataset_files import ClassRows, ShardEntry, dataset_digest
from workloads.data.images import ImageCheck
from workloads.data.index import BadSamples, Column, Shard
from workloads.data.index_writer import SplitColumns
from workloads.data.reasons import BadCount
from workloads.data.scan import ClassRule, ShardTable, scan_shard
from workloads.runtime.processes import owned_pool

_SINGLE_ROWS = 16
_MANY_SUBSETS = 1000

Tick = Callable[[int, int], None]
"""Called with (shards scanned, shards in all); may raise to stop."""
CHUNK_BYTES: Final = 8 * MIB
_MIN_POOL_BYTES: Final = 64 * MIB
"""Below this a pool's start (0.3 s per process) costs more than it saves."""
_QUEUED_PER_PROCESS: Final = 2


def most_queued(num_processes: int) -> int:
    """How many sources are taken at most before the table of the first of them is made; see `scan_sources`."""
    return max(1, _QUEUED_PER_PROCESS * num_processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """What to scan."""

    splits: Mapping[str, Sequence[Shard]]
    """Shards in name order; ``sha256`` is empty where it is not known, ``num_samples`` is ignored."""
    sources: Iterable[ShardSource]
    """The same shards in the same order."""
    classes: ClassRows
    rule: ClassRule
    policy: BadSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedSplit:
    """Finished columns of a split."""

    folder: Path
    columns: tuple[Column, ...]
    shards: tuple[Shard, ...]
    num_samples: int
    bad: BadCount
    class_counts: tuple[int, ...]
    """Samples of each leaf class; a sample with several labels counts in each."""
    class_shards: tuple[int, ...]
    """Shards that hold each leaf class."""
    warnings: tuple[str, ...] = ()

    def path(self, column: Column) -> Path:
        """File of a column."""
        return self.folder / f"{column.value}.npy"

    def class_sizes(self) -> dict[str, float]:
        """Smallest, median and largest class, and classes without samples."""
        counts = np.array(self.class_counts)
        empty = int((counts == 0).sum())
        return {"min": int(counts.min()), "median": float(np.median(counts)), "max": int(counts.max()), "empty": empty}

    def class_spread(self) -> dict[str, Any]:
        """Over how many shards classes are spread: rows of [shards of a class, such classes, their samples].

        From 16 shards on, classes of nearly as many (within a fifth) share a row, so that there are some 60 rows at
        most.
        """
        counts, shards = np.array(self.class_counts), np.array(self.class_shards)
        held = (counts > 0) & (shards > 0)
        counts, shards = counts[held], shards[held]
        fine = np.where(shards <= _SINGLE_ROWS, shards, _SINGLE_ROWS + np.floor(4 * np.log2(shards / _SINGLE_ROWS)))
        rows = [
            [round(float(shards[same].mean()), 2), int(same.sum()), int(counts[same].sum())]
            for same in (fine == step for step in np.unique(fine))
        ]
        return {"num_shards": len(self.shards), "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedSplits:
    """All splits of a data set."""

    splits: Mapping[str, ScannedSplit]
    subset_names: tuple[str, ...]

    @property
    def digest(self) -> str:
        """See `dataset_digest`."""
        return dataset_digest(self.entries)

    @property
    def entries(self) -> dict[str, tuple[ShardEntry, ...]]:
        """Shards as ``dataset.json`` names them."""
        return {name: tuple(map(_entry, split.shards)) for name, split in self.splits.items()}

    def counts(self) -> dict[str, float]:
        """``num_<split>`` and, where there are any, ``num_bad_<split>``."""
        sizes = {f"num_{name}": float(split.num_samples) for name, split in self.splits.items()}
        bad = {f"num_bad_{name}": float(split.bad.total) for name, split in self.splits.items() if split.bad.total}
        return sizes | bad

    def notes(self) -> dict[str, Any]:
        """What planning and people should know: how classes are spread over the shards, and warnings if there are any.

        Of one shard there is nothing to say.
        """
        spread = {name: split.class_spread() for name, split in self.splits.items() if len(split.shards) > 1}
        warnings = [warning for split in self.splits.values() for warning in split.warnings]
        if len(self.subset_names) > _MANY_SUBSETS:
            message = f"samples name {len(self.subset_names)} values of subset, such as {self.subset_names[0]!r}: each "
            warnings.append(
                message + "is a metric of every evaluation; leave it out where it names no part to evaluate"
            )
        return {"class_spread": spread, **({"warnings": warnings} if warnings else {})}


def scan_splits(
    plan: SplitPlan, folder: Path, *, num_processes: int, tick: Tick, check: ImageCheck = ImageCheck.HEADER
) -> ScannedSplits:
    """Scan everything once.

    Args:
        plan: what to scan.
        folder: where column files are made.
        num_processes: how many shards are scanned at once.
        tick: called after each shard.
        check: how closely images are looked at.

    Raises:
        BadDataError: samples are bad beyond what the policy allows, or a shard changed while it was read.
        CorruptObjectError: a shard is not the one that its record names.
    """
    columns = {
        name: SplitColumns(name=name, folder=folder / name, rule=plan.rule, policy=plan.policy) for name in plan.splits
    }
    expected = [(name, shard) for name, shards in plan.splits.items() for shard in shards]
    total_bytes = sum(shard.size_bytes for _, shard in expected)
    tables = scan_sources(plan.sources, plan.rule, num_processes=num_processes, total_bytes=total_bytes, check=check)
    for number, ((split, shard), table) in enumerate(zip(expected, tables, strict=True), start=1):
        found = table.digests.sha256
        if shard.sha256 not in {"", found}:
            message = f"{shard.name} has sha256 {found[:12]}..., recorded was {shard.sha256[:12]}...: the store "
            raise CorruptObjectError(f"{message}lost or changed it; {remedy_of(shard.object_name)}")
        columns[split].add(table)
        tick(number, len(expected))
    subset_names = tuple(sorted({subset for split in columns.values() for subset in split.subset_numbers}))
    finished = {name: _finish(split, plan.splits[name], subset_names) for name, split in columns.items()}
    return ScannedSplits(splits=finished, subset_names=subset_names)


def _finish(split: SplitColumns, planned: Sequence[Shard], subset_names: tuple[str, ...]) -> ScannedSplit:
    columns = split.finish(subset_names)
    shards = tuple(
        replace(
            shard,
            size_bytes=found.size_bytes,
            sha256=found.digests.sha256,
            blake3=found.digests.blake3,
            num_samples=found.num_samples,
        )
        for shard, found in zip(planned, split.shards, strict=True)
    )
    return ScannedSplit(
        folder=split.folder,
        columns=columns,
        shards=shards,
        num_samples=split.num_samples,
        bad=split.bad,
        class_counts=tuple(split.class_counts.tolist()),
        class_shards=tuple(split.class_shards.tolist()),
        warnings=tuple(split.warnings),
    )


def _entry(shard: Shard) -> ShardEntry:
    return ShardEntry(name=shard.name, size_bytes=shard.size_bytes, sha256=shard.sha256, num_samples=shard.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """A shard to scan: a local copy, or an object that is streamed."""

    name: str
    size_bytes: int
    path: Path | None = None
    store_uri: str = ""
    object_name: str = ""


def scan_sources(
    sources: Iterable[ShardSource],
    rule: ClassRule,
    *,
    num_processes: int,
    total_bytes: int,
    check: ImageCheck = ImageCheck.HEADER,
) -> Iterator[ShardTable]:
    """Tables of the shards in the order of ``sources``; a process holds one chunk and one table at a time.

    Args:
        sources: taken one by one, few ahead of their tables.
        rule: the data set's classes.
        num_processes: how many shards are scanned at once.
        total_bytes: of all sources; decides whether processes are worth their start.
        check: how closely images are looked at.

    Raises:
        BadDataError: a shard changed while it was read.
        StorageError: a shard cannot be read.
    """
    if num_processes < 2 or total_bytes < _MIN_POOL_BYTES:
        yield from (scan_source(source, rule, check) for source in sources)
        return
    with owned_pool(num_processes) as pool:
        pending: deque[Future[ShardTable]] = deque()
        for source in sources:
            pending.append(pool.submit(scan_source, source, rule, check))
            if len(pending) >= most_queued(num_processes):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def scan_source(source: ShardSource, rule: ClassRule, check: ImageCheck = ImageCheck.HEADER) -> ShardTable:
    """Scan one shard; see `scan_sources`."""
    if source.path is not None:
        return scan_shard(file_chunks(source.path), source.name, rule, check)
    store = open_store(source.store_uri)
    before = store.stat(source.object_name)
    table = scan_shard(object_chunks(store, source.object_name, before.size_bytes), source.name, rule, check)
    after = store.stat(source.object_name)
    if (before.etag, before.size_bytes) != (after.etag, table.size_bytes):
        message = f"{source.name} in {source.store_uri} changed while it was read ({before.size_bytes} bytes before, "
        raise BadDataError(message + f"{table.size_bytes} read); index the data set again when it is not being written")
    return table


def file_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def object_chunks(store: ObjectStore, name: str, size_bytes: int) -> Iterator[bytes]:
    """An object's bytes by ranged reads, one ahead of what is being used. Closing the iterator ends it."""
    starts = range(0, size_bytes, CHUNK_BYTES)
    with ExitStack() as stack:
        ahead = stack.enter_context(ThreadPoolExecutor(1))
        pending: deque[Future[bytes]] = deque()
        for start in starts:
            pending.append(ahead.submit(store.get_range, name, start, min(CHUNK_BYTES, size_bytes - start)))
            if len(pending) > 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
