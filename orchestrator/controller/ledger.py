"""One sweep in the store, read as a snapshot and written as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from orchestrator.errors import PreconditionFailedError
from orchestrator.plan.graph import Plan
from orchestrator.state.events import Event, SweepAdopted, decode_event, encode_event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.journal import Journal, JournalFencedError
from orchestrator.storage.layout import journal_segment, plan_name, spec_name
from orchestrator.storage.protocol import ObjectStore


def read_plan(store: ObjectStore, sweep: str, revision: int) -> Plan:
    """A revision's plan. Raises ``NotFoundError``."""
    return Plan.from_json(json.loads(store.get(plan_name(sweep, revision))))


class SweepLedger:
    """Follows a sweep's journal. Readers only ``refresh``; a controller names itself as ``holder`` and appends."""

    def __init__(self, store: ObjectStore, sweep: str, *, holder: str = "") -> None:
        self._store = store
        self._journal = Journal(store, sweep, holder=holder)
        self._plans: dict[int, Plan] = {}
        self.snapshot = Snapshot(sweep=sweep)
        """State after all events read or appended."""
        self._adoption: SweepAdopted | None = None

    @property
    def sweep(self) -> str:
        """Name of the sweep."""
        return self.snapshot.sweep

    def refresh(self) -> Snapshot:
        """Read the segments that are new since the last call; one ``exists`` if there are none."""
        events = [decode_event(document) for document in self._journal.read_new()]
        if events:
            self.snapshot = apply(self.snapshot, events, self._plan)
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
        segment = [*([self._adoption] if self._adoption else []), *events]
        # Folded first: events that cannot follow must never reach the journal, where every reader would trip over them.
        snapshot = apply(self.snapshot, segment, self._plan)
        self._journal.append([encode_event(event) for event in segment])
        self._adoption = None
        self.snapshot = snapshot
        return snapshot

    def add_revision(self, document: dict[str, object], spec_text: str) -> int:
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

    def _claim(self, revision: int, document: dict[str, object]) -> bool:
        content = json.dumps({**document, "revision": revision}, sort_keys=True).encode()
        try:
            self._store.put_if_absent(plan_name(self.sweep, revision), content)
        except PreconditionFailedError:
            return False
        return True

    def _plan(self, revision: int) -> Plan:
        if revision not in self._plans:
            self._plans[revision] = read_plan(self._store, self.sweep, revision)
        return self._plans[revision]
