"""What the publisher must know of a sweep's journal: its snapshot, and when things first began."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.planning.graph.plan import Plan
from orchestrator.state.events import AttemptLaunched, Event, PlanAccepted, decode_event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.journal import Journal
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.ledger import read_plan

RunIdentity = tuple[str, str]
"""Name and key of a job: what one run on the tracking server stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A sweep at one point of its journal."""

    snapshot: Snapshot
    submitted_at_s: float | None = None
    """First acceptance of a plan."""
    submission: str = ""
    """Id of the message with the latest plan that was accepted."""
    first_launches_s: dict[RunIdentity, float] = field(default_factory=dict)


class TimelineReader:
    """Follows one sweep's journal; every ``read`` opens only the segments written since the one before."""

    def __init__(self, store: ObjectStore, sweep: str) -> None:
        self._store = store
        self._sweep = sweep
        self._timeline = Timeline(snapshot=Snapshot(sweep=sweep))
        self._begin()

    def read(self) -> Timeline:
        """The sweep as its journal tells it at this moment."""
        try:
            events = [decode_event(document) for document in self._journal.read_new()]
            if events:
                self._timeline = self._extended(self._timeline, events)
        except Exception:
            # The journal's reader may have moved past events that are not in the timeline: read all again.
            self._begin()
            raise
        return self._timeline

    def _begin(self) -> None:
        self._journal = Journal(self._store, self._sweep)
        self._timeline = Timeline(snapshot=Snapshot(sweep=self._sweep))

    def _extended(self, timeline: Timeline, events: Iterable[Event]) -> Timeline:
        events = list(events)
        launches, submitted_at_s = dict(timeline.first_launches_s), timeline.submitted_at_s
        submission = timeline.submission
        for event in events:
            if isinstance(event, AttemptLaunched):
                launches.setdefault((event.job, event.key), event.at_s)
            elif isinstance(event, PlanAccepted):
                submission = event.message_id
                submitted_at_s = event.at_s if submitted_at_s is None else submitted_at_s
        return Timeline(
            snapshot=apply(timeline.snapshot, events, self._plan),
            submitted_at_s=submitted_at_s,
            submission=submission,
            first_launches_s=launches,
        )

    def _plan(self, event: PlanAccepted) -> Plan:
        return read_plan(self._store, self._sweep, event.revision, event.documents)
