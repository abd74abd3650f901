"""One sweep in the store, read as a snapshot and written as events.

Everything is checked as it is read: segments by their seals and their chain, plans and specs by their digests in the
journal. Plans of earlier versions, without digests, are checked by their keys: each must match its job's identity,
because otherwise a changed recipe would be committed under the key of another one. Invariants:

- Events are folded before they are appended: none that cannot follow ever reaches the journal.
- ``snapshot`` is the state of the durable journal. After a failed append it is unknown: read it in a new ledger.
- A revision's plan, spec and provenance are in the store before the event that names them, and never change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.core.errors import (
    ControllerError,
    CorruptObjectError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)
from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.core.job_kinds import DATA_KINDS
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.redaction import redacted
from orchestrator.metrics.machine import describe_machine
from orchestrator.planning.graph.identity import has_its_key
from orchestrator.planning.graph.plan import Plan, load_shared
from orchestrator.state.events import Event, PlanAccepted, SweepAdopted, SweepFinished, decode_event, encode_event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot, decode_snapshot, encode_snapshot
from orchestrator.storage.bounds import PLAN_BYTES
from orchestrator.storage.journal import (
    Journal,
    JournalDamagedError,
    JournalFencedError,
    read_snapshots,
    write_snapshot,
)
from orchestrator.storage.layout import journal_segment, plan_name, provenance_name, spec_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import seal

SNAPSHOT_EVERY = 128
"""Segments between stored snapshots: 128 small objects are read in 0.1 s from a local store, in 2 s from S3. Another
one is stored when the sweep ends."""
_JOBS_PER_SEGMENT = 50
"""Large sweeps: 50 jobs take as long to write as one segment, so that snapshots stay a small part of the work."""
PROVENANCE_VERSION = 1
START_A_CONTROLLER = (
    "submit the sweep again (`orchestrator submit FILE -y`), or run `orchestrator serve` on the cluster's head"
)
"""What messages advise where no controller serves a sweep; a stack alone (``orchestrator up``) starts none."""
_PROSE = ("message", "reason", "traceback")
"""Fields of events with free text; all others are names and numbers, which must not change."""
_SEED = "seed"
_UNUSABLE = (ControllerError, NotFoundError, ValueError, TypeError, KeyError)
_LOG = logging.getLogger(__name__)


def _snapshot_distance(snapshot: Snapshot) -> int:
    """Number of segments after which another snapshot is stored."""
    return max(SNAPSHOT_EVERY, len(snapshot.jobs) // _JOBS_PER_SEGMENT)


class DocumentDamagedError(ControllerError):
    """A plan, spec or provenance does not match its digest in the sweep's journal."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        name, reason = self.args
        return (
            f"{name} cannot be used ({reason}): it was damaged or altered, or another version of "
            "pretraining-orchestrator wrote it; run `orchestrator fsck --repair`, or restore it from a copy of the "
            "store; without either, submit the sweep under another name: its results are kept"
        )


def read_document(store: ObjectStore, name: str, documents: Mapping[str, str], *, max_bytes: int = PLAN_BYTES) -> bytes:
    """The plan, spec or provenance of this name, compared with ``documents``: sha256 by name, of the sweep's journal.

    Raises:
        NotFoundError: there is none.
        DocumentDamagedError: it has another digest, or is larger than the limit.
    """
    try:
        content = store.get(name, max_bytes=max_bytes)
    except CorruptObjectError as error:
        raise DocumentDamagedError(name, str(error)) from error
    if name in documents and sha256_hex(content) != documents[name]:
        raise DocumentDamagedError(name, "its sha256 is not the one in the sweep's journal")
    return content


def read_plan(
    store: ObjectStore,
    sweep: str,
    revision: int,
    documents: Mapping[str, str],
    *,
    loads: Callable[[str], dict[str, Any]] = parse_json,
) -> Plan:
    """A revision's plan; ``documents`` as for ``read_document``.

    Raises:
        NotFoundError: there is no such revision.
        DocumentDamagedError: it was changed, or cannot be read.
    """
    name = plan_name(sweep, revision)
    content = read_document(store, name, documents)
    try:
        plan = Plan.from_json(loads(content.decode()))
        problem = "" if name in documents else misaddressed(plan)
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise DocumentDamagedError(name, repr(error)) from error
    if problem:
        raise DocumentDamagedError(name, problem)
    # It may name the store by the path of another machine, or the store that this one is a copy of.
    return plan if plan.store_uri == store.uri else replace(plan, store_uri=store.uri)


def misaddressed(plan: Plan) -> str:
    """A message about the first job whose key does not match its identity; empty if all match. Raises ``ValueError``
    for an identity that has no canonical form.
    """
    wrong = next((job for job in plan.jobs if not has_its_key(job.key, job.identity)), None)
    return "" if wrong is None else f"the key {wrong.key} of job {wrong.name} does not belong to its identity"


class SweepLedger:
    """Follows a sweep's journal. Readers only ``refresh``; a controller names itself as ``holder`` and appends.

    ``on_alive`` is called after each segment that was read: thousands of them take minutes.
    """

    def __init__(
        self, store: ObjectStore, sweep: str, *, holder: str = "", on_alive: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._is_writer = bool(holder)
        self._journal = Journal(store, sweep, holder=holder, on_alive=on_alive)
        self._plans: dict[int, Plan] = {}
        """By revision; of those before the current one none is kept, a sweep may be submitted often."""
        self.snapshot = Snapshot(sweep=sweep)
        """State after all events read or appended."""
        self._adoption: SweepAdopted | None = None
        self._undecoded: list[Any] = []
        self._unfolded: list[Event] = []
        """Read, and to be folded once the plan that they need is read, too."""
        self._is_resumed = False
        self._is_whole = False
        """Whether the journal was read to its end once, and no segment before that was missing."""
        self._snapshot_sequence = 0
        """Segments that the latest stored snapshot covers, as far as this object knows."""

    @property
    def sweep(self) -> str:
        """Name of the sweep."""
        return self.snapshot.sweep

    @property
    def next_sequence(self) -> int:
        """Number of the first segment that ``snapshot`` does not have."""
        return self._journal.next_sequence

    def refresh(self) -> Snapshot:
        """Read the segments that are new since the last call (one ``exists`` if there are none); the first call starts
        from a stored snapshot, and lists the journal behind it.

        Raises:
            JournalDamagedError: a segment is damaged, or, at the first call, missing: before others, or as the last one
                that the stored snapshot covers. A writer that took the journal to end there would append in its place,
                and make the loss final.
        """
        if not self._is_resumed:
            self._resume()
            self._is_resumed = True
        try:
            self._undecoded += self._journal.read_new() if self._is_whole else self._journal.read_whole()
            self._is_whole = True
            self._unfolded += [decode_event(document) for document in self._undecoded]
            self._undecoded = []
            if self._unfolded:
                self.snapshot = apply(self.snapshot, self._unfolded, self._accepted_plan)
                self._unfolded = []
                self._drop_former_plans()
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            before = self._journal.next_sequence
            message = f"an event before segment {before} cannot follow: {error!r}"
            raise JournalDamagedError(self.sweep, before - 1, message) from error
        return self.snapshot

    def adopt(self, adoption: SweepAdopted) -> None:
        """Put this event before the next appended ones: it fences earlier writers."""
        self._adoption = adoption

    def check_fence(self) -> None:
        """Raise ``JournalFencedError`` if another controller has appended; for sweeps without new events."""
        if self._store.exists(journal_segment(self.sweep, self._journal.next_sequence)):
            message = f"sweep {self.sweep} has a segment {self._journal.next_sequence} of another controller"
            raise JournalFencedError(message)

    def append(self, events: Sequence[Event]) -> Snapshot:
        """Durably append events, then fold them in.

        Raises:
            JournalFencedError: another controller owns the sweep now.
            StorageError: it is unknown whether the events are in the journal; read it again in a new ledger.
        """
        segment = [*([self._adoption] if self._adoption else []), *map(redact_event, events)]
        # Folded first: events that cannot follow must never reach the journal, where every reader would fail.
        snapshot = apply(self.snapshot, segment, self._accepted_plan)
        self._journal.append([encode_event(event) for event in segment])
        self._adoption = None
        self.snapshot = snapshot
        self._drop_former_plans()
        # Of an ended sweep, every later controller and reader begins there: its journal may never reach the distance.
        has_ended = any(isinstance(event, SweepFinished) for event in events)
        if has_ended or self._journal.next_sequence - self._snapshot_sequence >= _snapshot_distance(snapshot):
            self._store_snapshot()
        return snapshot

    def add_revision(self, document: Mapping[str, object], spec_text: str) -> tuple[int, dict[str, str]]:
        """Store a plan and its spec under the next free revision, which counts once ``PlanAccepted`` names it, and
        return that revision with the sha256 of both objects by their names.

        Revisions may have holes: a plan that was stored by a controller that died before it accepted it stays unused
        (or is met again here, if it is the very same).
        """
        revision = self.snapshot.revision + 1
        while (plan := self._claim(revision, document)) is None:
            revision += 1
        name = spec_name(self.sweep, revision)
        # A spec left by a dead controller for the very same plan differs in comments or spelling only.
        return revision, {**plan, **store_once(self._store, name, spec_text.encode())}

    def know_plan(self, revision: int, plan: Plan) -> None:
        """Pass the plan of a new revision: reading it would keep a large plan in memory twice."""
        self._plans[revision] = replace(plan, revision=revision)

    def _resume(self) -> None:
        """Start from the newest stored snapshot that can be used; without one, from the journal's beginning."""
        for stored in read_snapshots(self._store, self.sweep):
            try:
                revision, documents = int(stored.document["revision"]), stored.document.get("documents", {})
                snapshot = decode_snapshot(stored.document, self._plan(revision, documents) if revision else None)
            except _UNUSABLE as error:
                _LOG.warning("a snapshot of sweep %s is passed over: %r", self.sweep, error)
                continue
            self.snapshot, self._snapshot_sequence = snapshot, stored.next_sequence
            self._journal.next_sequence, self._journal.last_sha256 = stored.next_sequence, stored.journal_sha256
            return

    def _store_snapshot(self) -> None:
        """After the segments that it covers, all of which are durable; a failure costs later readers time only."""
        self._snapshot_sequence = self._journal.next_sequence
        try:
            write_snapshot(
                self._store,
                self.sweep,
                self._snapshot_sequence,
                encode_snapshot(self.snapshot),
                journal_sha256=self._journal.last_sha256,
            )
        except StorageError as error:
            _LOG.warning("no snapshot of sweep %s was stored: %s", self.sweep, error)

    def _claim(self, revision: int, document: Mapping[str, object]) -> dict[str, str] | None:
        """The digest of a plan by its name; ``None`` if another plan has taken the revision."""
        name, content = plan_name(self.sweep, revision), plan_content(document, revision)
        try:
            self._store.put_if_absent(name, content)
        except PreconditionFailedError:
            return None
        return {name: sha256_hex(content)}

    def _accepted_plan(self, event: PlanAccepted) -> Plan:
        return self._plan(event.revision, event.documents)

    def _plan(self, revision: int, documents: Mapping[str, str]) -> Plan:
        if revision not in self._plans:
            # A controller keeps many plans for long, a reader one for a moment: sharing takes 0.1 ms per job.
            loads = load_shared if self._is_writer else parse_json
            self._plans[revision] = read_plan(self._store, self.sweep, revision, documents, loads=loads)
        return self._plans[revision]

    def _drop_former_plans(self) -> None:
        current = self.snapshot.revision
        self._plans = {revision: plan for revision, plan in self._plans.items() if revision >= current}


def store_once(store: ObjectStore, name: str, content: bytes) -> dict[str, str]:
    """Write an object unless it is there already; the sha256 of what is there then, by its name."""
    try:
        store.put_if_absent(name, content)
    except PreconditionFailedError:
        content = store.get(name, max_bytes=PLAN_BYTES)
    return {name: sha256_hex(content)}


def plan_content(document: Mapping[str, object], revision: int) -> bytes:
    """The bytes in which a revision's plan is stored."""
    return json.dumps({**document, "revision": revision}, sort_keys=True).encode()


# ------------------------------------------------------------------------------------------------------ what is written
def redact_event(event: Event) -> Event:
    """The event with its text redacted: the last filter before it is stored, shown and published.

    Runners redact the secrets that they know; a controller may know others, and its own messages quote errors.
    """
    prose = {name: text for name in _PROSE if (text := getattr(event, name, ""))}
    cleaned: dict[str, Any] = {name: clean for name, text in prose.items() if (clean := redacted(text)) != text}
    return replace(event, **cleaned) if cleaned else event


def write_provenance(
    store: ObjectStore, plan: Plan, revision: int, *, now: float, submission: Mapping[str, Any]
) -> dict[str, str]:
    """Store what a revision was made from and return its sha256 by its name; one that a dead controller left stays.

    It explains and decides nothing. What the client knows (commit, changes, packages, machine) comes with its message
    as ``submission``; the rest follows from the plan. What each attempt ran on stands in the record of its artifact.
    """
    document = {
        **describe_plan(plan),
        "version": PROVENANCE_VERSION,
        "sweep": plan.sweep,
        "revision": revision,
        "message_id": submission["message_id"],
        "sender": submission["sender"],
        "accepted_at_s": now,
        "accepted_on": describe_machine(),
        "spec": spec_name(plan.sweep, revision),
        "spec_sha256": submission["spec_sha256"],
        "plan": plan_name(plan.sweep, revision),
        "submitted_from": submission["submitted_from"],
    }
    name = provenance_name(plan.sweep, revision)
    return store_once(store, name, seal(name, json.dumps(document, indent=1).encode()))


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Seeds, data and code versions of a plan, and one digest of all its keys. Pure."""
    return {
        "keys_sha256": keys_digest(plan),
        "num_jobs": len(plan.jobs),
        "code_versions": {job.kind.value: job.identity.get("code_version") for job in plan.jobs},
        "seeds": _seeds(plan),
        "datasets": {
            job.name: {"key": job.key, **job.identity.get("parameters", {})}
            for job in plan.jobs
            if job.kind in DATA_KINDS
        },
    }


def keys_digest(plan: Plan) -> str:
    """Sha256 over names and keys: two plans with the same digest have the same results under the same names."""
    return sha256_hex(canonical_json({job.name: job.key for job in plan.jobs}))


def _seeds(plan: Plan) -> Mapping[str, list[int]]:
    """All seeds in facets and parameters, by kind of job or facet."""
    found: dict[str, set[int]] = {}
    for job in plan.jobs:
        facets = {name: value for name, value in job.facets.items() if name.endswith(_SEED)}
        parameters = job.identity.get("parameters", {})
        numbers = {**facets, **({job.kind.value: parameters[_SEED]} if _SEED in parameters else {})}
        for name, value in numbers.items():
            if isinstance(value, int):
                found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in sorted(found.items())}


# -------------------------------------------------------------------------------------------------------- what is there
def list_sweeps(store: ObjectStore) -> list[str]:
    """Names of all sweeps in the store, sorted; and of other things there that have a name as an object may have."""
    return store.list_children("sweeps/")


def check_exists(store: ObjectStore, sweep: str) -> None:
    """Raise ``NotFoundError`` for a sweep that the store does not know."""
    sweeps = list_sweeps(store)
    if sweep not in sweeps:
        known = ", ".join(sweeps) or "none"
        message = f"no sweep {sweep!r} in {store.uri}; sweeps there: {known}"
        raise NotFoundError(message)


def load_snapshot(store: ObjectStore, sweep: str) -> Snapshot:
    """A sweep's snapshot, from its plan and journal alone. Raises ``NotFoundError`` for an unknown sweep.

    To follow a sweep, keep one ``SweepLedger(store, sweep)`` and call ``refresh`` on it: it reads only what is new.
    """
    check_exists(store, sweep)
    return SweepLedger(store, sweep).refresh()


def load_plan(store: ObjectStore, sweep: str) -> Plan:
    """The current revision's plan. Raises ``NotFoundError`` if there is none (yet)."""
    return accepted_plan(load_snapshot(store, sweep))


def accepted_plan(snapshot: Snapshot) -> Plan:
    """The plan of a snapshot. Raises ``NotFoundError`` if there is none (yet)."""
    if snapshot.plan is None:
        message = f"no controller has accepted a plan of sweep {snapshot.sweep!r} yet; wait, or {START_A_CONTROLLER}"
        raise NotFoundError(message)
    return snapshot.plan
