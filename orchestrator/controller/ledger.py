"""One sweep in the store, read as a snapshot and written as events."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from orchestrator.controller.told import without_secrets
from orchestrator.errors import ControllerError, NotFoundError, PreconditionFailedError, StorageError, TooLargeError
from orchestrator.plan.graph import Plan
from orchestrator.plan.sharing import load_shared
from orchestrator.security.json_text import parse_json
from orchestrator.state.events import Event, SweepAdopted, decode_event, encode_event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.stored import decode_snapshot, encode_snapshot
from orchestrator.storage.bounds import PLAN_BYTES
from orchestrator.storage.journal import Journal, JournalDamagedError, JournalFencedError
from orchestrator.storage.layout import journal_segment, plan_name, spec_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.snapshots import read_snapshots, write_snapshot

SNAPSHOT_EVERY = 128
"""Segments between stored snapshots: 128 small objects are read in 0.1 s from a local store, in 2 s from S3."""
_JOBS_PER_SEGMENT = 50
"""Large sweeps: 50 jobs take as long to write as one segment, so that snapshots stay a small part of the work."""
_UNUSABLE = (ControllerError, NotFoundError, TooLargeError, ValueError, TypeError, KeyError)
_LOG = logging.getLogger(__name__)


def _snapshot_distance(snapshot: Snapshot) -> int:
    """Segments after which another snapshot is worth its cost."""
    return max(SNAPSHOT_EVERY, len(snapshot.jobs) // _JOBS_PER_SEGMENT)


def read_plan(
    store: ObjectStore, sweep: str, revision: int, *, loads: Callable[[str], dict[str, Any]] = parse_json
) -> Plan:
    """A revision's plan. Raises ``NotFoundError`` and ``TooLargeError``."""
    return Plan.from_json(loads(store.get(plan_name(sweep, revision), max_bytes=PLAN_BYTES).decode()))


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
        self.snapshot = Snapshot(sweep=sweep)
        """State after all events read or appended."""
        self._adoption: SweepAdopted | None = None
        self._unfolded: list[Event] = []
        """Read, and to be folded once the plan that they need is read, too."""
        self._is_resumed = False
        self._snapshot_sequence = 0
        """Segments that the latest stored snapshot covers, as far as this object knows."""

    @property
    def sweep(self) -> str:
        """Name of the sweep."""
        return self.snapshot.sweep

    def refresh(self) -> Snapshot:
        """Read the segments that are new since the last call (one ``exists`` if there are none); the first call starts
        from a stored snapshot.
        """
        if not self._is_resumed:
            self._resume()
            self._is_resumed = True
        try:
            self._unfolded += [decode_event(document) for document in self._journal.read_new()]
            if self._unfolded:
                self.snapshot = apply(self.snapshot, self._unfolded, self._plan)
                self._unfolded = []
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            before = self._journal.next_sequence
            message = f"an event before segment {before} cannot follow: {error!r}"
            raise JournalDamagedError(self.sweep, before - 1, message) from error
        return self.snapshot

    def adopt(self, adoption: SweepAdopted) -> None:
        """Put this event before the next ones appended: it fences whoever wrote before."""
        self._adoption = adoption

    @property
    def is_fencing(self) -> bool:
        """Whether the adoption is on record, so that no earlier writer can append any more."""
        return self._adoption is None

    def check_fence(self) -> None:
        """Raise ``JournalFencedError`` if another controller has appended; a sweep that is silent would not notice."""
        if self._store.exists(journal_segment(self.sweep, self._journal.next_sequence)):
            message = f"sweep {self.sweep} has a segment {self._journal.next_sequence} of another controller"
            raise JournalFencedError(message)

    def append(self, events: Sequence[Event]) -> Snapshot:
        """Durably append events, then fold them in.

        Raises:
            JournalFencedError: another controller owns the sweep now.
            StorageError: it is unknown whether the events are in the journal; read it again in a new ledger.
        """
        segment = [*([self._adoption] if self._adoption else []), *map(without_secrets, events)]
        # Folded first: events that cannot follow must never reach the journal, where every reader would trip over them.
        snapshot = apply(self.snapshot, segment, self._plan)
        self._journal.append([encode_event(event) for event in segment])
        self._adoption = None
        self.snapshot = snapshot
        if self._journal.next_sequence - self._snapshot_sequence >= _snapshot_distance(snapshot):
            self._store_snapshot()
        return snapshot

    def add_revision(self, document: Mapping[str, object], spec_text: str) -> int:
        """Store a plan and its spec under the next free revision, which counts once ``PlanAccepted`` names it.

        Revisions may have holes: a plan that was stored by a controller that died before it accepted it stays unused
        (or is met again here, if it is the very same).
        """
        revision = self.snapshot.revision + 1
        while not self._claim(revision, document):
            revision += 1
        # A spec left by a dead controller for the very same plan differs in comments or spelling only.
        with suppress(PreconditionFailedError):
            self._store.put_if_absent(spec_name(self.sweep, revision), spec_text.encode())
        return revision

    def know_plan(self, revision: int, plan: Plan) -> None:
        """What a revision that was just added says: reading it would hold a large plan in memory twice."""
        self._plans[revision] = replace(plan, revision=revision)

    def _resume(self) -> None:
        """Start from the newest stored snapshot that can be used; without one, from the journal's beginning."""
        for next_sequence, document in read_snapshots(self._store, self.sweep):
            try:
                revision = int(document["revision"])
                snapshot = decode_snapshot(document, self._plan(revision) if revision else None)
            except _UNUSABLE as error:
                _LOG.warning("a snapshot of sweep %s is passed over: %r", self.sweep, error)
                continue
            self.snapshot, self._snapshot_sequence = snapshot, next_sequence
            self._journal.next_sequence = next_sequence
            return

    def _store_snapshot(self) -> None:
        """After the segments that it covers, all of which are durable; a failure costs later readers time only."""
        self._snapshot_sequence = self._journal.next_sequence
        try:
            write_snapshot(self._store, self.sweep, self._snapshot_sequence, encode_snapshot(self.snapshot))
        except StorageError as error:
            _LOG.warning("no snapshot of sweep %s was stored: %s", self.sweep, error)

    def _claim(self, revision: int, document: Mapping[str, object]) -> bool:
        content = json.dumps({**document, "revision": revision}, sort_keys=True).encode()
        try:
            self._store.put_if_absent(plan_name(self.sweep, revision), content)
        except PreconditionFailedError:
            return False
        return True

    def _plan(self, revision: int) -> Plan:
        if revision not in self._plans:
            # A controller keeps many plans for long, a reader one for a moment: sharing takes 0.1 ms per job.
            loads = load_shared if self._is_writer else parse_json
            try:
                self._plans[revision] = read_plan(self._store, self.sweep, revision, loads=loads)
            except (TypeError, KeyError, ValueError) as error:
                if self._is_writer:
                    raise
                message = (
                    f"plan {revision} of sweep {self.sweep!r} cannot be read ({error!r}): it was written by another "
                    "version of pretraining-orchestrator, or altered; look at it with the version that wrote it"
                )
                raise ControllerError(message) from error
        return self._plans[revision]
