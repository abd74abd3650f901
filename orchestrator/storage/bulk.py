"""Whole objects into open files of the caller, hashed while they arrive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Protocol, runtime_checkable

from orchestrator.core.errors import CorruptObjectError
from orchestrator.storage.digests import Algorithm, new_hasher
from orchestrator.storage.protocol import ObjectStore

Piece = tuple[int, int]
"""Bytes ``start <= i < end`` of an object."""

_HASH_BYTES = 1024**2
_RANGE_BYTES = 4 * 1024**2
_NUM_RANGES = 4


@runtime_checkable
class Streams(Protocol):
    """A store with its own method to write an object into an open file."""

    def arriving(self, name: str, descriptor: int, size_bytes: int) -> Iterator[Piece]:
        """Write an object from offset 0 on; yield its pieces in order, each once its bytes are in the file."""


def _ignore(_: int) -> None:
    return None


def fetch(
    store: ObjectStore,
    name: str,
    descriptor: int,
    *,
    size_bytes: int,
    algorithm: Algorithm = Algorithm.SHA256,
    arrived: Callable[[int], None] = _ignore,
) -> str:
    """Write an object into a file that is open for reading and writing; returns the digest of what is in the file now.

    The bytes are read back from the page cache and hashed while later ones arrive, so a copy that is damaged on its way
    to the file shows too. ``arrived`` is called with the size of each piece; what it raises ends the transfer.

    Raises:
        NotFoundError: there is no such object.
        CorruptObjectError: the object has not ``size_bytes``.
        OSError: of writing the file (``ENOSPC``, ...).
    """
    pieces = store.arriving(name, descriptor, size_bytes) if isinstance(store, Streams) else None
    digest, buffer = new_hasher(algorithm), memoryview(bytearray(min(_HASH_BYTES, max(size_bytes, 1))))
    with closing(pieces or _by_ranges(store, name, descriptor, size_bytes)) as arriving:  # type: ignore[type-var]
        for start, end in arriving:
            arrived(end - start)
            _hash(digest.update, descriptor, start, end, buffer)
    return digest.hexdigest()


def write_at(descriptor: int, content: bytes | memoryview, position: int) -> None:
    """All of it: one ``pwrite`` may stop early, shortly before the disk is full. Raises ``OSError``."""
    view = memoryview(content)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


def _hash(update: Callable[[memoryview], object], descriptor: int, start: int, end: int, buffer: memoryview) -> None:
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            raise CorruptObjectError(f"a file was cut at {start} bytes while it was written; who shortens it?")
        update(buffer[:count])
        start += count


def _by_ranges(store: ObjectStore, name: str, descriptor: int, size_bytes: int) -> Iterator[Piece]:
    """For any store: parallel ranged reads."""
    found = store.stat(name).size_bytes
    if found != size_bytes:
        raise size_differs(store, name, found, size_bytes)

    def copy(start: int) -> Piece:
        length = min(_RANGE_BYTES, size_bytes - start)
        content = store.get_range(name, start, length)
        if len(content) != length:
            raise size_differs(store, name, start + len(content), size_bytes)
        write_at(descriptor, content, start)
        return start, start + length

    starts = range(0, size_bytes, _RANGE_BYTES)
    if len(starts) <= 1:
        yield from map(copy, starts)
        return
    with (
        ThreadPoolExecutor(_NUM_RANGES, thread_name_prefix="fetch") as pool,
        closing(pool.map(copy, starts)) as copied,  # type: ignore[type-var] # it is a generator
    ):
        yield from copied


def size_differs(store: ObjectStore, name: str, found: int, expected: int) -> CorruptObjectError:
    """The error for an object that has another size than its record says."""
    message = f"{name} in {store.uri} has {found} bytes, its record says {expected}: the store lost or changed it"
    return CorruptObjectError(message)
