"""Pins: what is kept although nothing needs it, by name. Collections and jobs that delete checkpoints read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

from orchestrator.core.errors import CorruptObjectError, NotFoundError, PreconditionFailedError, StorageError
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal

PINS: Final = "pins/"


def pin_name(pin: str) -> str:
    """The object of a pin."""
    return f"{PINS}{pin}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Content of ``pins/<name>.json``."""

    name: str
    keys: tuple[str, ...]
    """Keys, or checkpoints as ``<key>/checkpoints/<step>-<nonce>``."""
    created_at_s: float


def add_pin(store: ObjectStore, pin: Pin) -> None:
    """Write a pin. Raises ``StorageError`` if another one has this name, or if no pin may have it."""
    if "/" in pin.name:
        message = f"the name {pin.name!r} of a pin has a '/': use letters, digits and ._=@+,#~- (no leading dot)"
        raise StorageError(message)
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


def read_pins(store: ObjectStore, *, on_damaged: Callable[[CorruptObjectError], None] | None = None) -> Iterator[Pin]:
    """All pins.

    Args:
        store: the store.
        on_damaged: called with the error of each pin that cannot be read. Without it, such a pin raises
            ``CorruptObjectError``: what it protects is unknown.
    """
    # Earlier versions made pins whose names have a "/": they are no children of the folder. Only among its children is
    # what is no object (a link out of the store), which cannot be read.
    children = {f"{PINS}{child}" for child in store.list_children(PINS)}
    for name in sorted(children | {stat.name for stat in store.list_objects(PINS)}):
        try:
            pin = _decode(name, store.get(name))
        except NotFoundError:  # removed meanwhile, or a folder
            continue
        except CorruptObjectError as error:
            if on_damaged is None:
                raise
            on_damaged(error)
            continue
        yield pin


def _decode(name: str, content: bytes) -> Pin:
    try:
        document = parse_sealed(name, content)
        return Pin(**{**document, "keys": tuple(document["keys"])})
    except (ValueError, KeyError, TypeError) as error:
        message = f"{name} is not a pin ({error!r}): what it protects is unknown; delete it, or write it anew"
        raise CorruptObjectError(message) from error
