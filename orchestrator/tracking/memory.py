"""What the publisher remembers of one tracking server: which run stands for which job, and how far it is published.

It is a cache of facts that can be found again: runs by their tags, and repeated metrics are dropped by the server.
Losing it, or crashing before it is written, costs time and never a duplicate.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from orchestrator.errors import NotFoundError
from orchestrator.ids import sha256_hex
from orchestrator.storage.layout import tracking_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.facts import RunStatus
from orchestrator.tracking.timeline import RunIdentity

MEMORY_VERSION = 1


@dataclass(slots=True, kw_only=True)
class RunMemory:
    """How far one run is published."""

    job: str
    key: str
    run_id: str
    status: RunStatus | None = None
    """As last published."""
    fingerprint: str = ""
    """Of the facts last published."""
    described: bool = False
    """Whether the run has all its parameters."""
    segments: dict[str, int] = field(default_factory=dict)
    """Last published step by metric segment."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        status = document["status"]
        return cls(**{**document, "status": None if status is None else RunStatus(status)})


@dataclass(slots=True, kw_only=True)
class Memory:
    """All runs of a sweep on one server."""

    runs: list[RunMemory] = field(default_factory=list)
    """At most one per (job, key); the sweep's own has the job ``facts.SWEEP_JOB``."""
    discarded: list[str] = field(default_factory=list)
    """Runs that showed steps which were superseded afterwards: replaced, and never adopted again."""
    attached: dict[str, str] = field(default_factory=dict)
    """Sha256 of the report files on the sweep's run."""

    def by_identity(self) -> dict[RunIdentity, RunMemory]:
        """Runs by name and key of their job."""
        return {(run.job, run.key): run for run in self.runs}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        runs = [RunMemory.from_json(run) for run in document["runs"]]
        return cls(runs=runs, discarded=list(document["discarded"]), attached=dict(document["attached"]))


class MemoryFile:
    """The memory's object in the store. Only its latest reader may write: whoever is behind loses and reads again."""

    def __init__(self, store: ObjectStore, sweep: str, tracking_uri: str) -> None:
        # Only a hash of the URI is stored: it may hold a password.
        self._name = tracking_name(sweep, sha256_hex(tracking_uri.encode())[:16])
        self._store = store
        self._etag: str | None = None

    def load(self) -> Memory:
        """The memory as stored; empty if there is none."""
        try:
            content, stat = self._store.get_with_stat(self._name)
        except NotFoundError:
            self._etag = None
            return Memory()
        self._etag = stat.etag
        return Memory.from_json(json.loads(content)["memory"])

    def save(self, memory: Memory) -> None:
        """Store the memory.

        Raises:
            PreconditionFailedError: another publisher wrote it since this one read or wrote it.
        """
        document = {"version": MEMORY_VERSION, "nonce": secrets.token_hex(8), "memory": memory.to_json()}
        content = json.dumps(document, indent=1, sort_keys=True).encode()
        if self._etag is None:
            self._etag = self._store.put_if_absent(self._name, content).etag
        else:
            self._etag = self._store.put_if_match(self._name, content, self._etag).etag
