"""The manifest of a checkpoint: JSON that names every part with size and sha256, and has its own digest.

Its last field is the sha256 of the document without it, and a document is valid only if it is byte for byte the output
of this module. So every altered manifest is refused, also if the change does not alter its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

from orchestrator.core.errors import CorruptObjectError
from orchestrator.storage import ObjectStore
from orchestrator.storage.digests import Digests, digests_of

MANIFEST: Final = "manifest.json"
"""Its name in the folder of a checkpoint."""
VERSION = 3
_READ_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a part must be."""

    size_bytes: int
    sha256: str
    blake3: str = ""
    """Empty in manifests of version 2."""

    @classmethod
    def of(cls, content: bytes | memoryview) -> Entry:
        """The entry of some bytes."""
        found = digests_of(content)
        return cls(size_bytes=len(content), sha256=found.sha256, blake3=found.blake3)

    def to_json(self) -> dict[str, Any]:
        """Without ``blake3`` where there is none, as it was written then."""
        return {name: value for name, value in asdict(self).items() if name != "blake3" or value}

    @property
    def digests(self) -> Digests:
        """What the part's bytes must hash to."""
        return Digests(sha256=self.sha256, blake3=self.blake3)


def write_folder(store: ObjectStore, folder: str, step: int, contents: Mapping[str, bytes]) -> dict[str, Entry]:
    """Write objects by name, in order, and their manifest; returns what it says of them."""
    entries = {name: Entry.of(content) for name, content in contents.items()}
    for name, content in contents.items():
        store.put(f"{folder}/{name}", content)
    # Last, because it says that the others are complete.
    store.put(f"{folder}/{MANIFEST}", encode_manifest(step, entries))
    return entries


def encode_manifest(step: int, objects: Mapping[str, Entry], *, version: int = VERSION) -> bytes:
    """The manifest of a checkpoint whose parts are ``objects``."""
    body = {"version": version, "step": step, "objects": {part: entry.to_json() for part, entry in objects.items()}}
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
        unaltered = encode_manifest(document["step"], objects, version=version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptObjectError(f"the manifest is none: {error!r}") from error
    if version not in _READ_VERSIONS:
        raise CorruptObjectError(f"the manifest has version {version!r}, this program reads {VERSION}")
    if content != unaltered:
        raise CorruptObjectError("the manifest is not as it was written: its own sha256 does not match")
    return objects


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()
