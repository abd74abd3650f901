"""Digests inside stored JSON documents: every reader checks that an object is what was written under its name.

A sealed object is a JSON document, or lines of them, whose first member is ``content_sha256``: the sha256 of the
object's name and of all bytes behind that member. So a changed byte, a cut end, appended bytes and an object that was
put under another's name are all found, at the cost of one hash. Readers that do not know the member ignore it; objects
without it (of earlier versions) are accepted as they are. Documents whose earlier readers accept no further member
carry the digest in their nonce.

Seals find damage. They do not stop a person who may write the store and computes them again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from hashlib import sha256
from operator import eq
from typing import Any

from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.core.security.json_text import parse_json

_FIELD = "content_sha256"
_OPENING = b'{"' + _FIELD.encode() + b'": "'
_CLOSING = b'", '
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_MOST_DAMAGE = 8
"""Bytes of the opening: no other member's name is so similar."""
_SEAL_BYTES = len(_OPENING) + 64 + len(_CLOSING)
_PLAIN_NONCE = re.compile(r"[0-9a-f]{16}")
_DAMAGED = "it is not as it was written: its own sha256 does not match"


def seal(name: str, content: bytes) -> bytes:
    """The same document, or lines, with the digest as the first member of the first object.

    Args:
        name: of the object that will hold the result; under another name it counts as damaged.
        content: JSON that begins with an object of at least one member.
    """
    rest = content[1:]
    return b"".join((_OPENING, _digest(name, rest), _CLOSING, rest))


def check_seal(name: str, content: bytes) -> bool:
    """Whether an object has a seal, which fits; false for one of earlier versions, which have none.

    Raises:
        ValueError: the object was damaged, or was written under another name.
    """
    digest = content[len(_OPENING) : _SEAL_BYTES - len(_CLOSING)]
    # The digest identifies a seal even if its member's name was damaged, and most of the name if both were.
    num_same = sum(map(eq, content, _OPENING))
    if num_same < len(_OPENING) - _MOST_DAMAGE and not _DIGEST.fullmatch(digest):
        return False
    expected = b"".join((_OPENING, _digest(name, memoryview(content)[_SEAL_BYTES:]), _CLOSING))
    if content[:_SEAL_BYTES] != expected:
        raise ValueError(_DAMAGED)
    return True


def parse_sealed(name: str, content: bytes) -> Any:  # noqa: ANN401 - JSON holds anything
    """The document of an object, without its seal.

    Raises:
        ValueError: see ``check_seal`` and ``parse_json``.
    """
    check_seal(name, content)
    document = parse_json(content)
    if isinstance(document, dict):
        document.pop(_FIELD, None)
    return document


def seal_with_nonce(name: str, document: Mapping[str, Any]) -> bytes:
    """A document as JSON, with a fresh ``nonce`` that holds a digest of the object's name and of all other members."""
    return json.dumps({**document, "nonce": _nonce_of(name, document, secrets.token_hex(8))}).encode()


def check_nonce(name: str, document: Mapping[str, Any]) -> None:
    """Check the digest in the member ``nonce``; earlier versions wrote nonces of 16 digits without one.

    Raises:
        ValueError: the object was damaged, or was written under another name.
    """
    nonce = str(document.get("nonce"))
    if not _PLAIN_NONCE.fullmatch(nonce) and nonce != _nonce_of(name, document, nonce.partition("-")[0]):
        raise ValueError(_DAMAGED)


def _nonce_of(name: str, document: Mapping[str, Any], random: str) -> str:
    return f"{random}-{sha256_hex(canonical_json([name, {**document, 'nonce': random}]))}"


def _digest(name: str, rest: bytes | memoryview) -> bytes:
    digest = sha256(name.encode() + b"\n")
    digest.update(rest)
    return digest.hexdigest().encode()
