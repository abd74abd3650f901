"""Content addresses: canonical JSON, keys and ids.

A key is ``<kind>-<readable>-<16 hex of sha256(canonical identity)>``. Canonical JSON is RFC 8785 (package ``rfc8785``),
which has one encoding per value on every machine; it refuses NaN, infinities and integers beyond 2**53 - 1, and here
also anything that is not plain JSON.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import rfc8785

JsonScalar: TypeAlias = str | int | float | bool | None
Json: TypeAlias = "JsonScalar | Sequence[Json] | Mapping[str, Json]"

_UNREADABLE = re.compile(r"[^a-z0-9]+")
_MAX_READABLE = 48


def canonical_json(value: object) -> bytes:
    """Encode plain JSON values canonically.

    Raises:
        ValueError: the value holds something without a stable encoding (NaN, an object, a huge integer, ...).
    """
    try:
        return rfc8785.dumps(_plain(value, "$"))
    except rfc8785.CanonicalizationError as error:
        message = f"identity cannot be encoded stably: {error}; use strings, finite numbers, lists and mappings"
        raise ValueError(message) from error


def sha256_hex(content: bytes) -> str:
    """Sha256 of some bytes in lower-case hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def make_key(kind: str, readable: str, identity: Mapping[str, object]) -> str:
    """Content address of a job; ``readable`` may be any text made of identity fields and is made safe here."""
    digest = sha256_hex(canonical_json(identity))[:16]
    slug = _UNREADABLE.sub("-", readable.lower()).strip("-")[:_MAX_READABLE].strip("-")
    return "-".join(part for part in (kind, slug, digest) if part)


def _plain(value: object, path: str) -> rfc8785._impl._Value:
    """Copy a value into the exact types that RFC 8785 knows; refuse the rest with its path."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_text(key, path): _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{position}]") for position, item in enumerate(value)]
    message = f"identity field {path} is a {type(value).__name__}, which has no canonical JSON form"
    raise ValueError(message)


def _text(key: object, path: str) -> str:
    if isinstance(key, str):
        return key
    message = f"identity field {path} has the key {key!r}; keys must be text"
    raise ValueError(message)
