"""Asking a store, once and before anything depends on it, whether it keeps its promises."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from orchestrator.errors import PreconditionFailedError, UnsupportedStoreError
from orchestrator.storage.layout import probe_name
from orchestrator.storage.protocol import ObjectStore


def probe_store(store: ObjectStore) -> None:
    """Write, read, overwrite under a condition and delete one small object.

    Raises:
        UnsupportedStoreError: the store ignores conditions, so two controllers could both believe they own a sweep.
        StorageError: the bucket, the credentials, the permissions or the clock are wrong, or nobody answers.
    """
    name = probe_name(secrets.token_hex(8))
    first = store.put_if_absent(name, b"first")
    try:
        _expect_refusal(store, lambda: store.put_if_absent(name, b"second"), "If-None-Match: *")
        second = store.put_if_match(name, b"third", first.etag)
        _expect_refusal(store, lambda: store.put_if_match(name, b"fourth", first.etag), "If-Match")
        if store.get_with_stat(name) != (b"third", second):
            raise UnsupportedStoreError(f"{store.uri} does not return what was written last; it cannot hold a journal")
    finally:
        store.delete(name)


def _expect_refusal(store: ObjectStore, write: Callable[[], object], condition: str) -> None:
    try:
        write()
    except PreconditionFailedError:
        return
    message = f"{store.uri} ignores {condition} on writes, so two writers would overwrite each other unnoticed; "
    raise UnsupportedStoreError(message + "use a server that obeys conditional writes")
