"""Scanning many shards, in order, by several processes; each is streamed from its store and never kept as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.core.errors import BadDataError
from orchestrator.core.units import MIB
from orchestrator.storage import ObjectStore, open_store
from workloads.data.images import ImageCheck
from workloads.data.labels_in_shards import ClassRule
from workloads.data.pool import owned_pool
from workloads.data.scan import ShardTable, scan_shard

CHUNK_BYTES: Final = 8 * MIB
_MIN_POOL_BYTES: Final = 64 * MIB
"""Below this a pool's start (0.3 s per process) costs more than it saves."""
_QUEUED_PER_PROCESS: Final = 2


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
            if len(pending) >= _QUEUED_PER_PROCESS * num_processes:
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
        raise BadDataError(message + f"{table.size_bytes} read); index the data set again when nobody writes it")
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
