"""Pins: artifacts that stay whatever becomes of the sweeps that made them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from orchestrator.core.errors import CorruptObjectError, NotFoundError, PreconditionFailedError, StorageError
from orchestrator.retention.gc_layout import PINS, pin_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Content of ``pins/<name>.json``."""

    name: str
    keys: tuple[str, ...]
    """Keys, or checkpoints as ``<key>/checkpoints/<step>-<nonce>``."""
    created_at_s: float


def add_pin(store: ObjectStore, pin: Pin) -> None:
    """Write a pin. Raises ``StorageError`` if another one has this name."""
    name = pin_name(pin.name)
    try:
        store.put_if_absent(name, seal(name, json.dumps(asdict(pin)).encode()))
    except PreconditionFailedError as error:
        message = f"there is a pin {pin.name!r} in {store.uri} already: unpin it first, or choose another name"
        raise StorageError(message) from error


def remove_pin(store: ObjectStore, name: str) -> None:
    """Delete a pin. Raises ``NotFoundError``."""
    if not store.exists(pin_name(name)):
        known = ", ".join(pin.name for pin in read_pins(store)) or "none"
        message = f"no pin {name!r} in {store.uri}; pins there: {known}"
        raise NotFoundError(message)
    store.delete(pin_name(name))


def read_pins(store: ObjectStore) -> Iterator[Pin]:
    """All pins. Raises ``CorruptObjectError`` for one that cannot be read: what it protects is unknown."""
    for name in store.list_children(PINS):
        with suppress(NotFoundError):  # removed meanwhile
            yield _decode(f"{PINS}{name}", store.get(f"{PINS}{name}"))


def split_reference(reference: str) -> tuple[str, bool]:
    """The key of a reference, and whether it names a checkpoint of that key."""
    key, slash, _ = reference.partition("/")
    return key, bool(slash)


def checkpoints_among(references: Collection[str]) -> set[str]:
    """References that name a checkpoint."""
    return {reference for reference in references if split_reference(reference)[1]}


def _decode(name: str, content: bytes) -> Pin:
    try:
        document = parse_sealed(name, content)
        return Pin(**{**document, "keys": tuple(document["keys"])})
    except (ValueError, KeyError, TypeError) as error:
        message = f"{name} is no pin ({error!r}): what it protects is unknown; delete it, or write it anew"
        raise CorruptObjectError(message) from error
