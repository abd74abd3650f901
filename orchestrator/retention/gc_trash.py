"""Tombstones: what was condemned, when, and the content of the records and manifests that were hidden.

Nothing is copied. Condemning a folder deletes its *heads* alone (``record.json``, ``manifest.json``), whose bytes are
in the tombstone first: readers no longer see the folder, and putting the heads back undoes it. The bytes go when
the tombstone is old enough. One object holds the tombstones of a whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.retention.gc_layout import LOCK, TRASH, tombstones_name
from orchestrator.retention.gc_rules import Reason, Unit
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """One condemned unit."""

    unit: str
    reason: Reason
    key: str
    at_s: float
    """When it was condemned, unix seconds."""
    num_bytes: int
    heads: Mapping[str, str] = field(default_factory=dict)
    """Content by object name; whatever is not UTF-8 in a damaged one survives as surrogates."""
    is_doomed: bool = False
    """Its bytes may be going: from now on it is never restored, whoever asks for it."""

    @classmethod
    def of(cls, unit: Unit, heads: Mapping[str, bytes], at_s: float) -> Self:
        """Tombstone of a unit whose heads have been read."""
        texts = {name: content.decode(errors="surrogateescape") for name, content in heads.items()}
        return cls(
            unit=unit.name,
            reason=unit.reason,
            key=unit.key,
            at_s=at_s,
            num_bytes=unit.amount.num_bytes,
            heads=texts,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form; what earlier programs do not know is left out where it says nothing."""
        document = asdict(self)
        if not self.is_doomed:
            del document["is_doomed"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**{**document, "reason": Reason(document["reason"])})

    def contents(self) -> dict[str, bytes]:
        """The heads as they were."""
        return {name: text.encode(errors="surrogateescape") for name, text in self.heads.items()}


class Trash:
    """The tombstones of all runs; new ones go under ``run``, which readers leave empty."""

    def __init__(self, store: ObjectStore, run: str = "") -> None:
        self._store = store
        self._run = run
        self._num_batches = 0

    def names(self) -> list[str]:
        """Names of all batches."""
        return sorted(stat.name for stat in self._store.list_objects(TRASH) if stat.name != LOCK)

    def read(self, name: str) -> list[Tombstone]:
        """The tombstones of a batch; none if it is gone.

        Raises:
            CorruptObjectError: it cannot be read, so that what it hides could not be restored.
        """
        try:
            document = parse_sealed(name, self._store.get(name))
            return [Tombstone.from_json(entry) for entry in document["tombstones"]]
        except NotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            message = f"{name} in {self._store.uri} is damaged ({error!r}): what it hides cannot be restored; delete it"
            raise CorruptObjectError(message) from error

    def read_all(self) -> Iterator[Tombstone]:
        """All tombstones, one batch in memory at a time."""
        for name in self.names():
            yield from self.read(name)

    def bury(self, tombstones: Sequence[Tombstone]) -> str:
        """Make tombstones durable as a new batch; returns its name."""
        name = tombstones_name(self._run, self._num_batches)
        self._num_batches += 1
        self._write(name, tombstones)
        return name

    def doom(self, name: str, units: AbstractSet[str]) -> None:
        """Make it durable that the tombstones of some units are past restoring."""
        found = self.read(name)
        doomed = [replace(entry, is_doomed=True) if entry.unit in units else entry for entry in found]
        if doomed != found:
            self._write(name, doomed)

    def rewrite(self, name: str, kept: Sequence[Tombstone]) -> None:
        """Drop all of a batch's tombstones but these."""
        if kept:
            self._write(name, kept)
        else:
            self._store.delete(name)

    def _write(self, name: str, tombstones: Sequence[Tombstone]) -> None:
        document = {"version": _VERSION, "tombstones": [tombstone.to_json() for tombstone in tombstones]}
        self._store.put(name, seal(name, json.dumps(document, allow_nan=False).encode()))
