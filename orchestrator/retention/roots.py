"""What a store must keep: read from plans, journals, inboxes, pins and the identities of the keys in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from orchestrator.core.errors import (
    ControllerError,
    CorruptObjectError,
    NotFoundError,
    StorageError,
    TooLargeError,
)
from orchestrator.core.ids import references_in
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.retention.gc import Trash
from orchestrator.retention.gc_rules import Roots, is_head
from orchestrator.retention.inventory import forgotten_name
from orchestrator.search.log import SearchReader, kept_trials
from orchestrator.state.events import PlanAccepted, decode_event, event_type
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SWEEP_TRANSITIONS
from orchestrator.storage.artifacts import is_committed, read_record
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.journal import Event, Journal, JournalDamagedError, journal_exists, read_snapshots
from orchestrator.storage.layout import (
    artifact_folder,
    inbox_folder,
    is_plan,
    journal_segment,
    search_log_head,
    segment_numbers,
    snapshots_folder,
    sweep_folder,
)
from orchestrator.storage.pins import read_pins
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.storage.request_pool import RequestPool
from orchestrator.storage.seals import parse_sealed, seal
from orchestrator.sweeps.ledger import list_sweeps, read_plan
from orchestrator.sweeps.requests import Submit, read_inbox

_STAYS_ENDED = frozenset(
    event_type(trigger) for (state, trigger), after in SWEEP_TRANSITIONS.items() if state.is_final and after.is_final
)
"""Types of events after which a sweep that has ended is still so. What this program does not know is none of them."""


def split_reference(reference: str) -> tuple[str, bool]:
    """The key of what a pin or an identity names, and whether a pin names a checkpoint of that key."""
    key, slash, _ = reference.partition("/")
    return key, bool(slash)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SweepRoots:
    """What one sweep keeps, as of ``num_segments`` and ``inbox``; nothing if it is forgotten."""

    planned: frozenset[str] = frozenset()
    """Keys of jobs."""
    inputs: frozenset[str] = frozenset()
    """Keys that their identities name."""
    searches: frozenset[str] = frozenset()
    """Keys of search jobs: their trials are not in the journal."""
    live: frozenset[str] = frozenset()
    num_segments: int
    inbox: tuple[str, ...]
    is_forgotten: bool = False


class RootReader:
    """Call it for the roots of this moment; a sweep is read again only if something was written about it, and of the
    journal of one that goes on, and of the logs of searches, only the new segments.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pool = RequestPool.of(store.uri)
        self._sweeps: dict[str, _SweepRoots] = {}
        self._going_on: dict[str, _JournalReader] = {}
        """Of sweeps that have not ended: the others would fill the memory with their plans, and hardly ever change."""
        self._searches: dict[str, SearchReader] = {}
        """By the key of the search job."""
        self._inputs: dict[str, tuple[str, ...]] = {}
        """Keys in the identities of committed keys that no plan has."""
        self._on_alive: Callable[[], None] = lambda: None

    def __call__(self, on_alive: Callable[[], None] = lambda: None) -> Roots:
        """Read the roots. ``on_alive`` is called after each thing that was read: of many it takes minutes.

        Raises:
            ControllerError: a sweep cannot be read, so that what it needs is unknown.
            CorruptObjectError: the same of a pin, or of the record of an artifact that something depends on.
        """
        self._on_alive = on_alive
        pinned = frozenset(reference for pin in read_pins(self._store) for reference in pin.keys)
        self._sweeps = dict(self._read_sweeps())
        kept = {sweep: found for sweep, found in self._sweeps.items() if not found.is_forgotten}
        found = kept.values()
        searches = frozenset[str]().union(*(sweep.searches for sweep in found))
        trials = frozenset[str]().union(*map(self._read_trials, searches))
        planned = trials.union(*(sweep.planned for sweep in found))
        references = pinned.union(*(sweep.inputs for sweep in found))
        lineage = self._follow(references, planned)
        keys = planned | lineage
        self._searches = {key: reader for key, reader in self._searches.items() if key in keys}
        return Roots(
            keys=keys,
            checkpoints=frozenset(reference for reference in pinned if split_reference(reference)[1]),
            live=frozenset[str]().union(*(sweep.live for sweep in found)),
            sweeps=frozenset(kept),
        )

    def _read_sweeps(self) -> Iterator[tuple[str, _SweepRoots]]:
        # Almost no sweep has changed since the last reading, so the questions are the time that it takes.
        with self._pool.batch(self._tell_alive) as batch:
            looks = [(sweep, batch.start(self._look, sweep)) for sweep in list_sweeps(self._store)]
            for sweep, look in looks:
                inbox, known = look()
                found = known or self._read(sweep, inbox)
                self._on_alive()
                yield sweep, found

    def _look(self, sweep: str) -> tuple[tuple[str, ...], _SweepRoots | None]:
        """A sweep's inbox, and what is known of the sweep if nothing was written about it since it was read."""
        # The inbox before the journal: a message leaves the one only after it is in the other.
        inbox = tuple(self._store.list_children(inbox_folder(sweep)))
        known = self._sweeps.get(sweep)
        if known is None or known.inbox != inbox or self._has_segment(sweep, known.num_segments):
            return inbox, None
        return inbox, known

    def _read(self, sweep: str, inbox: tuple[str, ...]) -> _SweepRoots:
        reader = self._going_on.pop(sweep, None)
        if reader is None and not inbox:
            num_segments = _segments_if_forgotten(self._store, sweep, self._on_alive)
            if num_segments is not None:
                return _SweepRoots(num_segments=num_segments, inbox=inbox, is_forgotten=True)
        jobs = list(_submitted_jobs(self._store, sweep))
        reader = reader or _JournalReader(self._store, sweep, self._tell_alive)
        snapshot = reader.refresh()
        if not snapshot.state.is_final:
            self._going_on[sweep] = reader
        jobs += [] if snapshot.plan is None else snapshot.plan.jobs
        jobs += _leaving_jobs(self._store, snapshot)
        return _SweepRoots(
            planned=frozenset(job.key for job in jobs),
            searches=frozenset(job.key for job in jobs if job.kind is JobKind.SEARCH),
            inputs=frozenset(reference for job in jobs for reference in references_in(job.identity)),
            live=frozenset(attempt.key for attempt in snapshot.live_attempts),
            num_segments=reader.num_segments,
            inbox=inbox,
        )

    def _read_trials(self, search: str) -> set[str]:
        """Keys of the trials of a search, by its key: jobs like any other, which no plan names.

        Raises:
            ControllerError: the log of the search is damaged, so that what it needs is unknown.
        """
        # One that failed is not used again.
        reader = self._searches.pop(search, None) or SearchReader(self._store, search, on_alive=self._tell_alive)
        try:
            found = kept_trials(self._store, search, reader)
        except (ValueError, KeyError, TypeError) as error:
            message = f"the log of search {search} is damaged ({error!r}): which trials it needs is unknown; "
            raise ControllerError(message + "repair it, or delete searches/" + search) from error
        self._searches[search] = reader
        self._on_alive()
        return found

    def _follow(self, references: Iterable[str], planned: frozenset[str]) -> set[str]:
        """Keys that references lead to, beyond those planned (whose inputs are among the references already)."""
        reached: set[str] = set()
        trials: set[str] = set()
        waiting = list(references)
        while waiting:
            key, _ = split_reference(waiting.pop())
            if key not in reached and key not in planned:
                reached.add(key)
                waiting += self._inputs_of(key)
                if key.startswith(f"{JobKind.SEARCH.value}-"):
                    # The best one is in no identity. What they read is in that of the search; if that has no record,
                    # their own records say it.
                    found = self._read_trials(key)
                    if key in self._inputs:
                        trials |= found
                    else:
                        waiting += found
        return reached | trials

    def _inputs_of(self, key: str) -> tuple[str, ...]:
        if key not in self._inputs:
            try:
                self._inputs[key] = tuple(references_in(read_record(self._store, key).identity))
            except NotFoundError:
                return ()  # not committed, or in the trash: after a restore the collection reads the roots again
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                message = (
                    f"the record of {key} is damaged ({error!r}): what it was made from is unknown and would be lost; "
                    "run fsck, then delete that record or remove the pin or sweep that needs it"
                )
                raise CorruptObjectError(message) from error
            finally:
                self._on_alive()
        return self._inputs[key]

    def _tell_alive(self) -> None:
        self._on_alive()  # of the call at work

    def _has_segment(self, sweep: str, number: int) -> bool:
        return self._store.exists(journal_segment(sweep, number))


class _JournalReader:
    """A sweep by all of its journal, and later by what is new in it. Stored snapshots are not asked: they only save
    time, and one that is wrong would release what the journal keeps.
    """

    def __init__(self, store: ObjectStore, sweep: str, on_alive: Callable[[], None] = lambda: None) -> None:
        self._store, self._sweep = store, sweep
        self._journal = Journal(store, sweep, on_alive=on_alive)
        self._snapshot: Snapshot | None = None

    @property
    def num_segments(self) -> int:
        """Number of segments that were read."""
        return self._journal.next_sequence

    def refresh(self) -> Snapshot:
        """The sweep after the segments that are there now. Raises ``ControllerError``: see ``read_sweep``."""
        try:
            is_first = self._snapshot is None
            documents = _read_whole(self._store, self._sweep, self._journal) if is_first else self._journal.read_new()
            before = self._snapshot or Snapshot(sweep=self._sweep)
            self._snapshot = apply(before, map(decode_event, documents), self._accepted_plan)
        except (ControllerError, NotFoundError, ValueError, TypeError, KeyError) as error:
            message = (
                f"sweep {self._sweep} cannot be read, so that what it needs is unknown and nothing can be collected: "
                f"{error}; repair its journal, or delete its folder if its results may go"
            )
            raise ControllerError(message) from error
        return self._snapshot

    def _accepted_plan(self, event: PlanAccepted) -> Plan:
        return read_plan(self._store, self._sweep, event.revision, event.documents)


def read_sweep(store: ObjectStore, sweep: str) -> tuple[Snapshot, int]:
    """A sweep's snapshot, and the number of its journal's segments.

    Raises:
        ControllerError: its journal or plan is damaged, or of a newer version.
    """
    reader = _JournalReader(store, sweep)
    return reader.refresh(), reader.num_segments


def _read_whole(store: ObjectStore, sweep: str, journal: Journal) -> list[Event]:
    """The rest of a journal. Raises ``JournalDamagedError`` if segments are missing in it, or at its end."""
    covered = segment_numbers(store.list_children(snapshots_folder(sweep)))  # before the journal
    documents = journal.read_whole()
    if evidence := evidence_of_loss(store, sweep, journal.next_sequence, max(covered, default=0)):
        raise JournalDamagedError(sweep, journal.next_sequence, f"it is missing, and {evidence}")
    return documents


def evidence_of_loss(store: ObjectStore, sweep: str, num_segments: int, covered: int) -> str:
    """What shows that a journal had more segments than can be read; empty if nothing does.

    ``covered`` is the largest number of segments that a stored snapshot covers by its name, as listed before.
    """
    if covered > num_segments and any(stored.next_sequence == covered for stored in read_snapshots(store, sweep)):
        return f"a stored snapshot covers {covered} segments"
    if num_segments < (marked := _segments_when_forgotten(store, sweep) or 0):
        return f"the sweep was forgotten after {marked} segments"
    # A plan is stored while its message is in the inbox, and the message leaves it only after it is in the journal.
    has_plan = not num_segments and any(map(is_plan, store.list_children(f"{sweep_folder(sweep)}/")))
    if has_plan and not store.list_children(inbox_folder(sweep)) and not journal_exists(store, sweep):
        return "the sweep has a plan"
    return ""


def forget(store: ObjectStore, sweep: str, *, now: float) -> None:
    """Mark a finished sweep's results as deletable, unless another root needs them; a new submit undoes this.

    Raises:
        ControllerError: the sweep has not ended, or cannot be read.
    """
    snapshot, num_segments = read_sweep(store, sweep)
    if not snapshot.state.is_final or store.list_children(inbox_folder(sweep)):
        message = f"sweep {sweep} is {snapshot.state}: only a sweep that has ended can be forgotten; cancel it first"
        raise ControllerError(message)
    name = forgotten_name(sweep)
    store.put(name, seal(name, json.dumps({"num_segments": num_segments, "at_s": now}).encode()))


def is_forgotten(store: ObjectStore, sweep: str) -> bool:
    """Whether a sweep was forgotten, and its journal tells of nothing since that opens it again.

    Others write into it, too: a controller tells of nodes, or refuses a late request.
    """
    return _segments_if_forgotten(store, sweep) is not None


def _segments_if_forgotten(store: ObjectStore, sweep: str, on_alive: Callable[[], None] = lambda: None) -> int | None:
    """Number of the segments of a forgotten sweep's journal; none if it is not forgotten."""
    num_segments = _segments_when_forgotten(store, sweep)
    if num_segments is None:
        return None
    try:
        journal = Journal(store, sweep, next_sequence=num_segments, on_alive=on_alive)
        later = _read_whole(store, sweep, journal)
    except (NotFoundError, TooLargeError, ControllerError):
        return None  # the journal is damaged: keep the results
    return journal.next_sequence if all(document.get("type") in _STAYS_ENDED for document in later) else None


def _segments_when_forgotten(store: ObjectStore, sweep: str) -> int | None:
    """Number of the segments of a sweep's journal at that time; none without a mark that can be read."""
    name = forgotten_name(sweep)
    try:
        return int(parse_sealed(name, store.get(name, max_bytes=SMALL_BYTES))["num_segments"])
    except (NotFoundError, ValueError, KeyError, TypeError, TooLargeError):
        return None


def current_plans(store: ObjectStore) -> Iterator[Plan]:
    """The current plan of every sweep that is not forgotten, one in memory at a time."""
    for sweep in list_sweeps(store):
        if not is_forgotten(store, sweep):
            plan = read_sweep(store, sweep)[0].plan
            if plan is not None:
                yield plan


def check_reference(store: ObjectStore, reference: str) -> None:
    """Raise ``NotFoundError`` if there is nothing that a pin of this could keep.

    It keeps a committed artifact; of a job that is not committed, its checkpoints that have a manifest, and the log of
    a search. The next collection restores these from the trash, unless an earlier one has begun to destroy them.
    """
    key, is_checkpoint = split_reference(reference)
    _, *parts = reference.split("/")
    if is_checkpoint and (len(parts) != 2 or parts[0] != "checkpoints" or not parts[1]):
        message = f"{reference!r} is neither a key nor KEY/checkpoints/STEP-NONCE: "
        raise NotFoundError(message + "write KEY alone, or the whole name of a checkpoint")
    if is_committed(store, key) and not is_checkpoint:
        return
    log, folder = search_log_head(reference), f"{artifact_folder(key)}{reference.removeprefix(key)}/"
    visible = chain((stat.name for stat in store.list_objects(folder)), (log,) if store.exists(log) else ())
    hidden = (name for tombstone in Trash(store).read_all() if not tombstone.is_doomed for name in tombstone.heads)
    if not any(name == log or (is_head(name) and name.startswith(folder)) for name in chain(visible, hidden)):
        what = "is no complete checkpoint" if is_checkpoint else "is not committed and has no complete checkpoint"
        message = f"{reference} {what} in {store.uri}: a pin could not keep it; see `orchestrator ls artifacts`"
        raise NotFoundError(message)


def _submitted_jobs(store: ObjectStore, sweep: str) -> Iterator[Job]:
    """Jobs of plans in the inbox, which a controller accepts any moment."""
    for message in read_inbox(store, sweep):
        if isinstance(message, Submit):
            try:
                jobs = Plan.from_json(message.plan).jobs
                for job in jobs:
                    check_name(job.key)
                    list(references_in(job.identity))
            except (ValueError, TypeError, LookupError, AttributeError, StorageError):
                continue  # the controller cannot read it either, and refuses it
            yield from jobs


def _leaving_jobs(store: ObjectStore, snapshot: Snapshot) -> list[Job]:
    """Running jobs of earlier revisions, whose inputs must stay."""
    missing = {attempt.key for attempt in snapshot.leaving.values()}
    found: list[Job] = []
    for revision in range(snapshot.revision - 1, 0, -1):
        if not missing:
            break
        try:
            plan = read_plan(store, snapshot.sweep, revision, snapshot.documents)
        except NotFoundError:
            continue  # revisions may have holes
        found += [job for job in plan.jobs if job.key in missing]
        missing -= {job.key for job in found}
    return found
