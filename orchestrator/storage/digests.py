"""Digests of bytes: sha256, which every other tool knows, and BLAKE3, which is faster.

Measured on one core with SHA instructions: 0.55 s/GB for sha256, 0.22 s/GB for BLAKE3 (https://github.com/BLAKE3-team/
BLAKE3-specs). Writers record both; readers check BLAKE3 where a record has it. Both are cryptographic: they find
damage and replaced files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import blake3

_CHUNK_BYTES = 1024**2


class Algorithm(StrEnum):
    """Size of a digest."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"


class Hasher(Protocol):
    """A running digest."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Of the bytes taken so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Of the same bytes; hexadecimal. ``blake3`` is empty where nobody recorded it."""

    sha256: str
    blake3: str = ""

    @property
    def algorithm(self) -> Algorithm:
        """The digest with which bytes are checked: BLAKE3 if there is one."""
        return Algorithm.BLAKE3 if self.blake3 else Algorithm.SHA256

    def match(self, found: str) -> bool:
        """Whether a digest by ``algorithm`` is the right one."""
        return found == self.expected

    @property
    def expected(self) -> str:
        """The digest by ``algorithm``."""
        return self.blake3 or self.sha256


class DoubleHasher:
    """Both digests in one pass."""

    def __init__(self) -> None:
        self._sha256 = sha256()
        self._blake3 = blake3.blake3()

    def update(self, content: bytes | memoryview) -> None:
        """Take more bytes."""
        self._sha256.update(content)
        self._blake3.update(content)

    def digests(self) -> Digests:
        """Of the bytes taken so far."""
        return Digests(sha256=self._sha256.hexdigest(), blake3=self._blake3.hexdigest())


def new_hasher(algorithm: Algorithm) -> Hasher:
    """A new digest."""
    hasher: Hasher = blake3.blake3() if algorithm is Algorithm.BLAKE3 else sha256()
    return hasher


def digests_of(content: bytes | memoryview) -> Digests:
    """Both digests of some bytes."""
    hasher, view = DoubleHasher(), memoryview(content).cast("B")
    for start in range(0, len(view), _CHUNK_BYTES):  # each chunk is hashed twice while the processor's cache has it
        hasher.update(view[start : start + _CHUNK_BYTES])
    return hasher.digests()


def file_digests(path: Path) -> Digests:
    """Both digests of a file. Raises ``OSError``."""
    hasher, buffer = DoubleHasher(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.digests()


def digest_of(content: bytes | memoryview, algorithm: Algorithm) -> str:
    """One digest of some bytes."""
    hasher = new_hasher(algorithm)
    hasher.update(content)
    return hasher.hexdigest()


def descriptor_digest(path: Path | int, algorithm: Algorithm) -> str:
    """One digest of a file, by its path, or by its descriptor, which stays open. Raises ``OSError``."""
    hasher, buffer = new_hasher(algorithm), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0, closefd=isinstance(path, Path)) as file:
        file.seek(0)
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()
