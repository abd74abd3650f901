"""Reports every object of a store that is missing, short or altered, and repairs those that can be made again.

``check_store`` compares what records and manifests name; ``check_documents`` reads the documents of the control plane,
which carry their own digests. ``check_sweep`` compares them with a sweep's journal.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from orchestrator.core.errors import ControllerError, CorruptObjectError, NotFoundError, OrchestratorError
from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.core.security.json_text import parse_json
from orchestrator.planning.graph.build import build_plan
from orchestrator.retention.inventory import (
    ARTIFACT_DEPTH,
    MANIFEST,
    METRICS,
    RECORD,
    SEARCHES,
    TRASH,
    TRIALS,
    Amount,
    Named,
    named_objects,
    walk_artifacts,
)
from orchestrator.retention.roots import evidence_of_loss
from orchestrator.state.events import Event, PlanAccepted, decode_event
from orchestrator.state.fold import fold
from orchestrator.storage.artifacts import Record
from orchestrator.storage.bounds import PLAN_BYTES, RECORD_BYTES, SEGMENT_BYTES
from orchestrator.storage.journal import JournalDamagedError, parse_segment, parse_snapshot
from orchestrator.storage.layout import (
    journal_folder,
    journal_segment,
    plan_name,
    segment_numbers,
    snapshot_name,
    snapshots_folder,
    spec_name,
)
from orchestrator.storage.pins import PINS
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_nonce, check_seal
from orchestrator.sweepfile.load import load_all
from orchestrator.sweepfile.parse.document import Changes
from orchestrator.sweeps.ledger import DocumentDamagedError, plan_content, read_document, read_plan

_CHUNK_BYTES = 8 * 1024 * 1024
_DOCUMENTS = ("sweeps/", "controllers/", PINS, TRASH, SEARCHES)
_MANY_DOCUMENTS = ("jobs/", METRICS, TRIALS)
_OF_JOURNALS = re.compile(r"^sweeps/[^/]+/(journal/|snapshots/|report/|plan-|provenance-)")
_WITH_NONCE = ("/lease.json", "/claim.json")
_UNDECODABLE = (ControllerError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_DISPENSABLE: Mapping[str, str] = {
    r"sweeps/[^/]+/snapshots/[^/]+": "deleted; the sweep is read from its journal",
    r"sweeps/[^/]+/notified\.json": "deleted; the journal is read again, and nothing is sent twice",
    r"sweeps/[^/]+/tracking/[^/]+": "deleted; the runs are found again on the tracking server",
    r"controllers/[^/]+/lease\.json": "deleted; the next controller starts above every epoch that the journals name",
    r"jobs/[^/]+/claim\.json": "deleted; a cluster that works on the job claims it again",
    r"trash/lock\.json": "deleted; a collection that runs ends, and the next one goes on",
}
"""Objects that can be rebuilt from the rest of the store, by their names, and how they are repaired."""


class Problem(StrEnum):
    """Kinds of damage of an object."""

    MISSING = "missing"
    SHORT = "short"
    """Smaller than it was written: truncated."""
    ALTERED = "altered"
    """Larger, of another sha256, or a record whose identity is not what its key is the address of."""
    UNREADABLE = "unreadable"
    """A record or manifest that cannot be read as one."""


class Depth(StrEnum):
    """How much is read of every object that a record or manifest names."""

    SIZES = "sizes"
    CONTENT = "content"
    """All bytes, compared by sha256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One damaged object."""

    name: str
    problem: Problem
    named_by: str
    """The record or manifest that expects something else; the object itself for a damaged head."""
    detail: str


@dataclass(slots=True)
class Census:
    """Number of checked objects."""

    num_heads: int = 0
    """Records and manifests."""
    checked: Amount = field(default_factory=Amount)


def check_store(store: ObjectStore, depth: Depth = Depth.SIZES, census: Census | None = None) -> Iterator[Finding]:
    """Check every record and every checkpoint's manifest; findings come as they are found.

    What is deleted while this runs (checkpoints that a job replaces, garbage) is no finding. Without a record or
    manifest nothing is expected: half-written attempts and checkpoints are garbage, not damage.
    """
    checker = _Checker(store, depth, census or Census())
    for key, stats in walk_artifacts(store):
        sizes = {stat.name: stat.size_bytes for stat in stats}
        for head in filter(_is_head, sizes):
            findings = list(checker.check(key, head, sizes))
            # If a record or manifest was deleted meanwhile, its objects may be deleted, too.
            if findings and store.exists(head):
                yield from findings


def check_documents(store: ObjectStore, depth: Depth = Depth.SIZES, census: Census | None = None) -> Iterator[Finding]:
    """Check that every stored document outside of artifacts is JSON and fits its own digest.

    Those of which there is one per attempt or checkpoint (attempts, claims, metrics, trials) are read with
    ``Depth.CONTENT`` only. Journals, snapshots, plans and specs are left to ``check_sweep``, logs and
    reports are text for people.
    """
    census = census or Census()
    for folder in _DOCUMENTS if depth is Depth.SIZES else (*_DOCUMENTS, *_MANY_DOCUMENTS):
        for stat in store.list_objects(folder):
            if not stat.name.endswith((".json", ".jsonl")) or _OF_JOURNALS.search(stat.name):
                continue
            census.checked += Amount(num_objects=1, num_bytes=stat.size_bytes)
            finding = _check_document(store, stat.name)
            if finding is not None and store.exists(stat.name):
                yield finding


def _check_document(store: ObjectStore, name: str) -> Finding | None:
    try:
        content = store.get(name, max_bytes=PLAN_BYTES)
        check_seal(name, content)
        documents = (
            [parse_json(line) for line in content.splitlines()] if name.endswith(".jsonl") else [parse_json(content)]
        )
        if not all(isinstance(document, dict) for document in documents):
            raise TypeError("it is no JSON object")
        if name.endswith(_WITH_NONCE):
            check_nonce(name, documents[0])
    except NotFoundError:
        return None
    except (ValueError, TypeError, CorruptObjectError) as error:
        return Finding(name=name, problem=Problem.ALTERED, named_by=name, detail=str(error))
    return None


class _Checker:
    def __init__(self, store: ObjectStore, depth: Depth, census: Census) -> None:
        self._store = store
        self._depth = depth
        self._census = census

    def check(self, key: str, head: str, sizes: Mapping[str, int]) -> Iterator[Finding]:
        """Findings about one record or manifest and all that it names; ``sizes`` is the key's listing."""
        self._census.num_heads += 1
        try:
            content = self._store.get(head, max_bytes=RECORD_BYTES)
            if head.endswith(f"/{RECORD}"):
                yield from _check_identity(key, head, content)
            named = named_objects(head, content)
        except NotFoundError:
            return
        except (ValueError, KeyError, TypeError, CorruptObjectError) as error:
            yield Finding(name=head, problem=Problem.UNREADABLE, named_by=head, detail=str(error))
            return
        for name, expected in named.items():
            self._census.checked += Amount(num_objects=1, num_bytes=expected.size_bytes)
            found = self._compare(name, expected, sizes)
            if found is not None:
                yield Finding(name=name, problem=found[0], named_by=head, detail=found[1])

    def _compare(self, name: str, expected: Named, sizes: Mapping[str, int]) -> tuple[Problem, str] | None:
        size_bytes = sizes[name] if name in sizes else self._size(name)
        if size_bytes is None:
            return Problem.MISSING, f"expected {expected.size_bytes} bytes"
        if size_bytes != expected.size_bytes:
            problem = Problem.SHORT if size_bytes < expected.size_bytes else Problem.ALTERED
            return problem, f"{size_bytes} bytes, expected {expected.size_bytes}"
        if self._depth is Depth.CONTENT and (digest := self._digest(name, size_bytes)) != expected.sha256:
            return Problem.ALTERED, f"sha256 {digest[:16]}..., expected {expected.sha256[:16]}..."
        return None

    def _size(self, name: str) -> int | None:
        """The size of an object that the listing did not have; it may have been written or restored since."""
        try:
            return self._store.stat(name).size_bytes
        except NotFoundError:
            return None

    def _digest(self, name: str, size_bytes: int) -> str:
        digest = sha256()
        for start in range(0, size_bytes, _CHUNK_BYTES):
            with suppress(NotFoundError):  # deleted meanwhile: another digest, so that the head is read again
                digest.update(self._store.get_range(name, start, min(_CHUNK_BYTES, size_bytes - start)))
        return digest.hexdigest()


def _is_head(name: str) -> bool:
    """``artifacts/<kind>/<key>/record.json`` or ``.../checkpoints/<step>-<nonce>/manifest.json``."""
    parts = name.split("/")
    is_manifest = parts[-1] == MANIFEST and len(parts) == ARTIFACT_DEPTH + 3 and parts[ARTIFACT_DEPTH] == "checkpoints"
    return is_manifest or (parts[-1] == RECORD and len(parts) == ARTIFACT_DEPTH + 1)


def _check_identity(key: str, head: str, content: bytes) -> Iterator[Finding]:
    record = Record.from_bytes(content)
    digest = sha256_hex(canonical_json(record.identity))[:16]
    if record.key != key or not key.endswith(digest):
        detail = (
            f"it is the record of {record.key} with an identity of digest {digest}: not what {key} is the address of"
        )
        yield Finding(name=head, problem=Problem.ALTERED, named_by=head, detail=detail)


@dataclass(slots=True)
class SweepFindings:
    """Problems of a sweep, and its revisions as in its journal."""

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
    covered = segment_numbers(store.list_children(snapshots_folder(sweep)))  # before the journal, which only grows
    num_segments = _check_journal(store, sweep, found)
    if evidence := evidence_of_loss(store, sweep, num_segments, max(covered, default=0)):
        found.add(journal_segment(sweep, num_segments), evidence, Problem.MISSING)
    for event in found.accepted:
        found.findings += _check_revision(store, sweep, event)
    if not found.findings:
        _check_fold(store, sweep, found)
    _check_snapshots(store, sweep, found)
    return found


def _check_journal(store: ObjectStore, sweep: str, found: SweepFindings) -> int:
    """Segments behind a damaged one are checked by themselves: what they follow is unknown. The number of segments,
    with those that are missing before the last one.
    """
    is_whole, expected = True, 0
    for sequence in segment_numbers(store.list_children(journal_folder(sweep))):
        if sequence > expected:  # one finding for all that are missing here
            span = f", and all before segment {sequence}" if sequence > expected + 1 else ""
            found.add(journal_segment(sweep, expected), f"the journal has later segments{span}", Problem.MISSING)
            is_whole = False
        expected = sequence + 1
        name = journal_segment(sweep, sequence)
        try:
            segment = parse_segment(sweep, sequence, store.get(name, max_bytes=SEGMENT_BYTES))
            events = [decode_event(event) for event in segment.events]
        except NotFoundError:
            found.add(name, "it was there a moment ago", Problem.MISSING)
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
    return expected


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
    """In journals of earlier versions, which have no digests, intact events may still not follow each other."""
    try:
        fold(sweep, found.events, lambda event: read_plan(store, sweep, event.revision, event.documents))
    except _UNDECODABLE as error:
        found.add(journal_folder(sweep), f"its events cannot follow each other: {error}")


def _check_snapshots(store: ObjectStore, sweep: str, found: SweepFindings) -> None:
    for number in segment_numbers(store.list_children(snapshots_folder(sweep))):
        name = snapshot_name(sweep, number)
        try:
            stored = parse_snapshot(name, store.get(name, max_bytes=PLAN_BYTES))
        except NotFoundError:
            continue  # replaced by a newer one meanwhile
        except (ValueError, KeyError, TypeError, CorruptObjectError) as error:
            found.add(name, error)
            continue
        covered = found.digests[: stored.next_sequence]
        is_known = stored.journal_sha256 and len(covered) == stored.next_sequence
        if is_known and covered[-1] != stored.journal_sha256:
            found.add(name, "it covers another journal than the sweep's")


def repair(store: ObjectStore, finding: Finding, sweep: SweepFindings | None = None) -> str:
    """Repair one object if that is possible; returns what was done, or an empty text.

    Args:
        store: that holds it.
        finding: what is wrong with it.
        sweep: of the sweep that it belongs to; plans are made again from the spec that its journal names.
    """
    for pattern, done in _DISPENSABLE.items():
        if re.fullmatch(pattern, finding.name):
            store.delete(finding.name)
            return done
    for event in sweep.accepted if sweep is not None else ():
        if sweep is not None and finding.name == plan_name(finding.name.split("/")[1], event.revision):
            return _restore_plan(store, finding.name, event, sweep)
    return ""


def _restore_plan(store: ObjectStore, name: str, event: PlanAccepted, sweep: SweepFindings) -> str:
    for content in _planned_again(store, name.split("/")[1], event, sweep):
        if sha256_hex(content) == event.documents.get(name):
            store.delete(name)
            store.put_if_absent(name, content)
            return "restored: planned again from the sweep's spec, with the sha256 that the journal names"
    return ""


def _planned_again(store: ObjectStore, sweep: str, event: PlanAccepted, found: SweepFindings) -> Iterator[bytes]:
    """The plan as each of the sweep's submitters would own it."""
    try:
        text = read_document(store, spec_name(sweep, event.revision), event.documents).decode()
        with tempfile.TemporaryDirectory(prefix="orchestrator-repair-") as folder:
            file = Path(folder, f"{sweep}.yaml")
            file.write_text(text, encoding="utf-8")
            loaded = load_all(str(file), Changes(), code_below=Path.cwd())
    except (OrchestratorError, ValueError):
        return
    document = build_plan(loaded.sweep, store_uri=store.uri).to_json()
    for owner in dict.fromkeys(["", *(accepted.sender for accepted in found.accepted)]):
        yield plan_content({**document, "owner": owner}, event.revision)
