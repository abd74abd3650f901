"""Content addresses: canonical JSON, keys and ids.

A key is ``<kind>-<readable>-<16 hex of sha256(canonical identity)>``. Canonical JSON is RFC 8785, which has one
encoding per value on every machine; it refuses NaN, infinities and integers beyond 2**53 - 1, and here also anything
that is not plain JSON.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.core.canonical import encode

_UNREADABLE = re.compile(r"[^a-z0-9]+")
_MAX_READABLE = 48
_KEY = re.compile(r"[a-z_]+(?:-[a-z0-9]+)*-[0-9a-f]{16}")


def canonical_json(value: object) -> bytes:
    """Encode plain JSON values canonically.

    Raises:
        ValueError: the value holds something without a stable encoding (NaN, an object, a huge integer, ...).
    """
    try:
        return encode(value)
    except ValueError as error:
        message = f"identity cannot be encoded stably: {error}; use strings, finite numbers, lists and mappings"
        raise ValueError(message) from error


def sha256_hex(content: bytes) -> str:
    """Sha256 of some bytes in lower-case hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def make_key(kind: str, readable: str, identity: Mapping[str, object]) -> str:
    """Content address of a job; ``readable`` may be any text made of identity fields and is made safe here."""
    return key_of_canonical(kind, readable, canonical_json(identity))


def is_key(text: str) -> bool:
    """Whether a text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def key_of_canonical(kind: str, readable: str, encoded: bytes) -> str:
    """As ``make_key``, of an identity that is encoded canonically already."""
    digest = sha256_hex(encoded)[:16]
    slug = _UNREADABLE.sub("-", readable.lower()).strip("-")[:_MAX_READABLE].strip("-")
    return "-".join(part for part in (kind, slug, digest) if part)


def references_in(identity: Mapping[str, Any]) -> Iterator[str]:
    """The keys that an identity names: as inputs, and as the source of initial weights."""
    yield from (value for value in identity.get("inputs", {}).values() if isinstance(value, str))
    # Not an input of the job, since no job of the sweep makes it: it existed before.
    parameters = identity.get("parameters", {})
    for one in (parameters, _trial_parameters(parameters)):
        initial = one.get("initial")
        if isinstance(initial, Mapping) and isinstance(source := initial.get("artifact"), str):
            yield source


def _trial_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """For a search, the parameters that its trials share and the keys that they read; empty for all other jobs."""
    trial = parameters.get("trial")
    found = trial.get("parameters") if isinstance(trial, Mapping) else None
    return found if isinstance(found, Mapping) else {}
