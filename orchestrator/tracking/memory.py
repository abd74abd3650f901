"""The publisher's memory of one tracking server: which run belongs to which job, and how far it is published.

It is a cache of facts that can be found again: runs by their tags, and repeated metrics are dropped by the server.
Losing it, or crashing before it is written, costs time and never a duplicate.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from orchestrator.core.errors import NotFoundError
from orchestrator.core.ids import sha256_hex
from orchestrator.storage.layout import tracking_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal
from orchestrator.tracking.facts import RunIdentity, RunStatus

MEMORY_VERSION = 2
_IF_SET = frozenset({"sending", "doubtful"})
"""Fields of a run that are stored only if they have a value: earlier versions, which do not know them, read a memory
that has one as they read a damaged one.
"""
_BESIDE = frozenset({"analyses"})
"""Fields of a run that are stored beside the memory, which earlier versions pass over."""
_LOG = logging.getLogger(__name__)


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
    said: dict[str, int] = field(default_factory=dict)
    """Last published step by number of the attempt that made it: segments of an attempt follow each other. Of a trial:
    number of its published points, by its start."""
    sending: dict[str, int] = field(default_factory=dict)
    """As ``said``, of a write that may have been cut off: the run may show these steps, too."""
    doubtful: bool = False
    """Whether the run was found on the server, not FINISHED, and not written since: nobody knows what it shows."""
    analyses: dict[str, str] = field(default_factory=dict)
    """Of a backbone: names by key of the analyses whose metrics the run may show."""

    @property
    def shown(self) -> dict[str, int]:
        """Last step that the run may show, by attempt."""
        attempts = self.said.keys() | self.sending.keys()
        return {attempt: max(self.said.get(attempt, 0), self.sending.get(attempt, 0)) for attempt in attempts}

    def has_ended_as(self, status: str) -> bool:
        """Whether the run was published to its end, with this status."""
        return self.status is not None and self.status.is_final and self.status == status

    def unsent(self) -> Self:
        """The same run, of which everything is to be sent once more; the server drops values that it has."""
        return replace(self, status=None, fingerprint="", described=False, said={}, sending=self.shown)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form; as earlier versions read it, unless a write was cut off or the run is doubtful."""
        stored = (name for name in self.__slots__ if name not in _BESIDE)
        return {name: value for name in stored if (value := getattr(self, name)) or name not in _IF_SET}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        status = document["status"]
        return cls(**{**document, "status": None if status is None else RunStatus(status)})


@dataclass(slots=True, kw_only=True)
class Memory:
    """All runs of a sweep on one server."""

    runs: list[RunMemory] = field(default_factory=list)
    """At most one per (job, key); the sweep's own has the job ``facts.SWEEP_JOB``."""
    experiment_id: str = ""
    """Where they are; empty before the first one."""
    experiment: str = ""
    """What the plan called that experiment when it was chosen; empty where an earlier version has chosen it."""
    discarded: list[str] = field(default_factory=list)
    """Runs that showed steps which were superseded afterwards: replaced, and never adopted again."""
    num_deleted: int = 0
    """How many of them, from the first on, are deleted."""
    attached: dict[str, str] = field(default_factory=dict)
    """Sha256 of the files on the sweep's run."""
    registered: str = ""
    """Key of the backbone that is in the model registry, or `-` if there was none to put there."""
    registered_for: str = ""
    """Id of the submit whose plan was looked at for it: a later one may have a better backbone. With the time of the
    sweep's end if the backbone was damaged."""
    submission: str = ""
    """Id of the submit whose origin the sweep's run tells."""

    @property
    def condemned(self) -> list[str]:
        """Runs that are to be deleted still."""
        return self.discarded[self.num_deleted :]

    def by_identity(self) -> dict[RunIdentity, RunMemory]:
        """Runs by name and key of their job."""
        return {(run.job, run.key): run for run in self.runs}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, without ``experiment``."""
        document = {name: getattr(self, name) for name in self.__slots__ if name != "experiment"}
        # Not ``asdict``, which copies deeply: this is written every few seconds, for thousands of runs.
        return {**document, "runs": [run.to_json() for run in self.runs]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**{**document, "runs": [RunMemory.from_json(run) for run in document["runs"]]})


class MemoryFile:
    """The memory's object in the store. Only its latest reader may write: whoever is behind loses and reads again."""

    def __init__(self, store: ObjectStore, sweep: str, tracking_uri: str) -> None:
        # Only a hash of the URI is stored: it may hold a password.
        self._name = tracking_name(sweep, sha256_hex(tracking_uri.encode())[:16])
        self._store = store
        self.etag: str | None = None
        """Of the memory as it was last read or written here; None without one."""
        self._memory: Memory | None = None
        """As stored under ``etag``."""

    def load(self) -> Memory:
        """The memory as stored; empty if there is none. Whoever changes it must ``save`` or ``forget`` it."""
        try:
            if self._memory is None or self._store.stat(self._name).etag != self.etag:
                content, stat = self._store.get_with_stat(self._name)
                self._memory, self.etag = _parse(self._name, content), stat.etag
        except NotFoundError:
            self._memory, self.etag = Memory(), None
        return self._memory

    def forget(self) -> None:
        """Read anew the next time: the memory was changed, and the changes were not stored."""
        self._memory = None

    def save(self, memory: Memory) -> None:
        """Store the memory.

        Raises:
            PreconditionFailedError: another publisher wrote it since this one read or wrote it.
        """
        document = {"version": MEMORY_VERSION, "nonce": secrets.token_hex(8), "memory": memory.to_json()}
        # Beside the memory: earlier versions pass over what they do not know here, and refuse it in there.
        document |= {"experiment": memory.experiment} if memory.experiment else {}
        analyses = {run.run_id: run.analyses for run in memory.runs if run.analyses}
        document |= {"analyses": analyses} if analyses else {}
        # Without indentation: with it, Python's encoder takes ten times as long.
        content = seal(self._name, json.dumps(document, sort_keys=True).encode())
        self._memory = None
        if self.etag is None:
            self.etag = self._store.put_if_absent(self._name, content).etag
        else:
            self.etag = self._store.put_if_match(self._name, content, self.etag).etag
        self._memory = memory


def _parse(name: str, content: bytes) -> Memory:
    """Of another version, or damaged, nothing is used: everything is found again on the server."""
    try:
        document = parse_sealed(name, content)
        if document["version"] != MEMORY_VERSION:
            return Memory()
        memory = Memory.from_json(document["memory"])
        memory.experiment = str(document.get("experiment", ""))
        for run in memory.runs:
            run.analyses = dict(document.get("analyses", {}).get(run.run_id, {}))
        return memory
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        _LOG.warning("%s is damaged (%s): what it held is found again on the tracking server", name, error)
        return Memory()
