"""What ``fsck`` says of one sweep: its journal's chain, and everything that the journal holds a digest of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.core.errors import ControllerError, CorruptObjectError, NotFoundError
from orchestrator.retention.fsck import Finding, Problem
from orchestrator.state.events import Event, PlanAccepted, decode_event
from orchestrator.state.fold import fold
from orchestrator.storage.bounds import PLAN_BYTES, SEGMENT_BYTES
from orchestrator.storage.journal import JournalDamagedError, parse_segment
from orchestrator.storage.layout import journal_folder, journal_segment, plan_name, snapshots_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.snapshots import parse_snapshot
from orchestrator.sweeps.ledger import DocumentDamagedError, read_document, read_plan

_UNDECODABLE = (ControllerError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(slots=True)
class SweepFindings:
    """What is wrong with a sweep, and what its journal tells of its revisions."""

    findings: list[Finding] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Of all segments before the first damaged one."""
    digests: list[str] = field(default_factory=list)
    """Sha256 of the same segments."""

    @property
    def accepted(self) -> list[PlanAccepted]:
        """The revisions, oldest first."""
        return [event for event in self.events if isinstance(event, PlanAccepted)]

    def add(self, name: str, detail: object, problem: Problem = Problem.ALTERED) -> None:
        """Note a damaged object."""
        self.findings.append(Finding(name=name, problem=problem, named_by=name, detail=str(detail)))


def check_sweep(store: ObjectStore, sweep: str) -> SweepFindings:
    """Read a sweep's journal, plans, specs, provenances and snapshots, and compare all digests."""
    found = SweepFindings()
    _check_journal(store, sweep, found)
    for event in found.accepted:
        found.findings += _check_revision(store, sweep, event)
    if not found.findings:
        _check_fold(store, sweep, found)
    _check_snapshots(store, sweep, found)
    return found


def _check_journal(store: ObjectStore, sweep: str, found: SweepFindings) -> None:
    """Segments behind a damaged one are checked by themselves: what they follow is unknown."""
    is_whole = True
    for sequence in range(len(store.list_children(journal_folder(sweep)))):
        name = journal_segment(sweep, sequence)
        try:
            segment = parse_segment(sweep, sequence, store.get(name, max_bytes=SEGMENT_BYTES))
            events = [decode_event(event) for event in segment.events]
        except NotFoundError:
            found.add(name, "the journal has later segments", Problem.MISSING)
            is_whole = False
        except (CorruptObjectError, *_UNDECODABLE) as error:
            found.add(name, error.args[-1] if isinstance(error, JournalDamagedError) else error)
            is_whole = False
        else:
            if is_whole and segment.previous_sha256 and found.digests and segment.previous_sha256 != found.digests[-1]:
                found.add(name, "the segment before it is another one than its header names")
                is_whole = False
            if is_whole:
                found.events += events
                found.digests.append(segment.sha256)


def _check_revision(store: ObjectStore, sweep: str, event: PlanAccepted) -> Iterator[Finding]:
    plan = plan_name(sweep, event.revision)
    for name in sorted({plan, *event.documents}):
        try:
            if name == plan:
                read_plan(store, sweep, event.revision, event.documents)
            else:
                read_document(store, name, event.documents)
        except NotFoundError:
            yield Finding(name=name, problem=Problem.MISSING, named_by=name, detail="the journal names it")
        except DocumentDamagedError as error:
            yield Finding(name=name, problem=Problem.ALTERED, named_by=name, detail=str(error.args[1]))


def _check_fold(store: ObjectStore, sweep: str, found: SweepFindings) -> None:
    """Events can each be whole and not follow each other, in journals of earlier versions, which have no digests."""
    try:
        fold(sweep, found.events, lambda event: read_plan(store, sweep, event.revision, event.documents))
    except _UNDECODABLE as error:
        found.add(journal_folder(sweep), f"its events cannot follow each other: {error}")


def _check_snapshots(store: ObjectStore, sweep: str, found: SweepFindings) -> None:
    for child in store.list_children(snapshots_folder(sweep)):
        name = f"{snapshots_folder(sweep)}{child}"
        try:
            stored = parse_snapshot(name, store.get(name, max_bytes=PLAN_BYTES))
        except NotFoundError:
            continue  # a newer one has taken its place meanwhile
        except (ValueError, KeyError, TypeError, CorruptObjectError) as error:
            found.add(name, error)
            continue
        covered = found.digests[: stored.next_sequence]
        is_known = stored.journal_sha256 and len(covered) == stored.next_sequence
        if is_known and covered[-1] != stored.journal_sha256:
            found.add(name, "it covers another journal than the sweep's")
