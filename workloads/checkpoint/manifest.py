"""The manifest of a checkpoint: JSON that names every part with size and sha256, and vouches for itself.

Its last field is the sha256 of the document without it, and a document counts only if it is byte for byte what this
module writes. So no altered manifest is taken for one, not even where the change would alter no meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from orchestrator.errors import CorruptObjectError

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a part must be."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes | memoryview) -> Entry:
        """The entry of some bytes."""
        return cls(size_bytes=len(content), sha256=sha256(content).hexdigest())


def encode_manifest(step: int, objects: Mapping[str, Entry]) -> bytes:
    """The manifest of a checkpoint whose parts are ``objects``."""
    body = {"version": VERSION, "step": step, "objects": {part: asdict(entry) for part, entry in objects.items()}}
    return _encode({**body, "sha256": sha256(_encode(body)).hexdigest()})


def decode_manifest(content: bytes) -> dict[str, Entry]:
    """The parts that a manifest names.

    Raises:
        CorruptObjectError: this is no manifest, one of another version, or one that was altered.
    """
    try:
        document = json.loads(content)
        version = document["version"]
        objects = {part: Entry(**entry) for part, entry in document["objects"].items()}
        unaltered = encode_manifest(document["step"], objects)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptObjectError(f"the manifest is none: {error!r}") from error
    if version != VERSION:
        raise CorruptObjectError(f"the manifest has version {version!r}, this program reads {VERSION}")
    if content != unaltered:
        raise CorruptObjectError("the manifest is not as it was written: its own sha256 does not match")
    return objects


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()
