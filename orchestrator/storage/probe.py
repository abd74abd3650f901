"""Checks once, before anything depends on it, that a store meets the requirements."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Barrier
from typing import Final

from orchestrator.core.errors import PreconditionFailedError, StorageError, UnsupportedStoreError
from orchestrator.storage.layout import probe_name
from orchestrator.storage.protocol import ObjectStat, ObjectStore

_NUM_WRITERS: Final = 4
_TIMEOUT_S: Final = 60.0
_HARM: Final = "so two controllers could both believe they own a sweep; use a server with atomic conditions"


def probe_store(store: ObjectStore) -> None:
    """Write, read, overwrite under a condition and delete small objects, also with four writers at the same moment.

    Raises:
        UnsupportedStoreError: the store ignores conditions, or checks them separately from the write, so that two
            controllers could both believe they own a sweep.
        StorageError: the bucket, the credentials, the permissions or the clock are wrong, or the server does not
            answer.
    """
    with _temporary_object(store) as name:
        first = store.put_if_absent(name, b"first")
        _expect_refusal(store, lambda: store.put_if_absent(name, b"second"), "If-None-Match: *")
        second = store.put_if_match(name, b"third", first.etag)
        _expect_refusal(store, lambda: store.put_if_match(name, b"fourth", first.etag), "If-Match")
        if store.get_with_stat(name) != (b"third", second):
            raise UnsupportedStoreError(f"{store.uri} does not return what was written last; it cannot hold a journal")
    with _temporary_object(store) as name:
        _race_writers(store, name)


@contextmanager
def _temporary_object(store: ObjectStore) -> Iterator[str]:
    name = probe_name(secrets.token_hex(8))
    try:
        yield name
    except UnsupportedStoreError:
        with suppress(StorageError):
            store.delete(name)
        raise
    store.delete(name)  # if the store does not answer, garbage collection removes the rest


def _race_writers(store: ObjectStore, name: str) -> None:
    """Writers one after the other would not detect a server that checks a condition separately from the write."""
    _expect_one_winner(store, name, store.put_if_absent, "If-None-Match: *")
    etag = store.stat(name).etag
    _expect_one_winner(store, name, lambda name, content: store.put_if_match(name, content, etag), "If-Match")


def _expect_one_winner(
    store: ObjectStore, name: str, write: Callable[[str, bytes], ObjectStat], condition: str
) -> None:
    barrier = Barrier(_NUM_WRITERS)

    def has_won(content: bytes) -> bool:
        barrier.wait(_TIMEOUT_S)
        try:
            write(name, content)
        except PreconditionFailedError:
            return False
        return True

    contents = [f"{condition} {writer}".encode() for writer in range(_NUM_WRITERS)]
    with ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="probe") as pool:
        won = [content for content, is_winner in zip(contents, pool.map(has_won, contents), strict=True) if is_winner]
    if len(won) != 1:
        message = f"{store.uri} let {len(won)} of {_NUM_WRITERS} writers through that wrote at once with {condition}, "
        raise UnsupportedStoreError(message + _HARM)
    if store.get(name) != won[0]:
        raise UnsupportedStoreError(f"{store.uri} does not hold what the winner of {condition} wrote, {_HARM}")


def _expect_refusal(store: ObjectStore, write: Callable[[], object], condition: str) -> None:
    try:
        write()
    except PreconditionFailedError:
        return
    message = f"{store.uri} ignores {condition} on writes, so two writers would overwrite each other unnoticed; "
    raise UnsupportedStoreError(message + "use a server that obeys conditional writes")
