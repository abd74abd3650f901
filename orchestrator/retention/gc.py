"""Garbage collection: hide objects that no root reaches, and destroy those that were hidden for long enough.

A *tombstone* records which folder was condemned, when, and the content of the hidden records and manifests. Nothing is
copied: condemning a folder deletes only its *heads* (``record.json``, ``manifest.json``), after their bytes were
written into the tombstone, so writing the heads again undoes it. One object holds the tombstones of a whole batch.
Invariants, which make it safe while sweeps run:

- Visible folders are hidden before they are destroyed, and roots are read again after the hiding: a sweep that asked
  for a key in the meantime gets it back. A sweep that asks later does not find it.
- Bytes are destroyed only if no root reaches them in a reading *after* they were hidden. A sweep that asks for the key
  after that reading also looks for its record after it, finds none, and makes the artifact again, under other names.
  What the roots reach in the trash is restored, and the roots are read again: only then is it known what that was made
  from. A pin of what is in the trash, which nobody would make again, takes the lock of a collection.
- All decisions use only the store, so an interrupted collection is continued by the next one.
- One collection at a time, by a lease, so that a dead one does not block the next for long. One that is suspended for
  longer than its lease checks it again before every deletion. The single request during which it was suspended is
  harmless: a folder that it hides late is restored, because the next collection keeps the tombstones of needed folders
  for another trash grace; a folder that it destroys late was already marked as not restorable.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from types import TracebackType
from typing import Any, Self

from orchestrator.core.errors import (
    CorruptObjectError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TooLargeError,
)
from orchestrator.core.security.json_text import parse_json
from orchestrator.retention.gc_rules import (
    FOLLOWS_RECORD,
    GcAction,
    Graces,
    HasLeftovers,
    Reason,
    Roots,
    Tally,
    Unit,
    classify,
    classify_logs,
    classify_metrics,
    classify_search,
    leftover,
    survey,
)
from orchestrator.retention.inventory import (
    LOCK,
    PROBES,
    TRASH,
    last_part,
    named_objects,
    tombstones_name,
    whole_artifact,
)
from orchestrator.storage.bounds import RECORD_BYTES
from orchestrator.storage.layout import is_probe, is_tombstones, record_name, search_log_head
from orchestrator.storage.protocol import ObjectStat, ObjectStore
from orchestrator.storage.request_pool import RequestPool
from orchestrator.storage.seals import parse_sealed, seal
from orchestrator.storage.trials import is_whole

LOCK_DURATION_S = 300.0
_LONGEST_WAIT_S = 2 * LOCK_DURATION_S
"""A lock that lasts longer was written by a clock that was wrong. Should it belong to a live collection after all, that
one stops at its next renewal, as one does that was suspended: at once if its clock is right again, else within
``_RENEW_AFTER_S`` and one request.
"""
_RENEW_AFTER_S = 60.0
_VERSION = 1
_BATCH_UNITS = 256
"""Folders, and objects by which they are found, between two readings of the roots. Bounds memory, the work that a crash
repeats, and the time for which something that a sweep requests meanwhile is hidden.
"""


class CollectionBusyError(StorageError):
    """Another garbage collection works on this store, or has died and its lock has not expired yet."""


class CollectionLock:
    """Held inside a ``with`` block; call ``keep`` at least every few minutes. A pin of what is in the trash takes it,
    too: no collection destroys that meanwhile.

    Raises:
        CollectionBusyError: on entering, and from ``keep`` if another collection took the expired lock.
    """

    def __init__(self, store: ObjectStore, holder: str, now: Callable[[], float]) -> None:
        self._store = store
        self._holder = f"{holder}-{secrets.token_hex(4)}"
        self._now = now
        self._etag = ""
        self._renew_at_s = 0.0
        self.deserted_at_s = 0.0
        """When the lock was last taken from a collection that did not release it: it died, or it is suspended and may
        still send one request. 0: that has not happened.
        """

    def __enter__(self) -> Self:
        found = self._read()
        if found is None:
            self._write(None, LOCK_DURATION_S)
            return self
        document, etag = found
        wait_s = document["expires_at_s"] - self._now()
        if 0 < wait_s <= _LONGEST_WAIT_S:
            who = f"{document['holder']} collects garbage in {self._store.uri} or pins what is in its trash"
            message = f"{who}, or died while it did: two at once could undo each other's work; try again after its end"
            message += f", or in {wait_s:.0f} s if it is dead"
            raise CollectionBusyError(message)
        is_deserted = document["expires_at_s"] > 0
        self.deserted_at_s = self._now() if is_deserted else document.get("deserted_at_s", 0.0)
        self._write(etag, LOCK_DURATION_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Exception):
            try:
                self._write(self._etag, 0.0)
            except StorageError:
                if kind is None:
                    raise

    def keep(self) -> None:
        """Renew the lock if due, and at once if our clock was set back: others take a lock that lasts too long."""
        if not 0 < self._renew_at_s - self._now() <= _RENEW_AFTER_S:
            self._write(self._etag, LOCK_DURATION_S)

    def _read(self) -> tuple[dict[str, Any], str] | None:
        try:
            content, stat = self._store.get_with_stat(LOCK)
        except NotFoundError:
            return None
        with suppress(ValueError, TypeError, LookupError):
            document = parse_json(content)
            if document["expires_at_s"] + document.get("deserted_at_s", 0.0) >= 0.0:
                return document, stat.etag
        # Damaged: as of a holder that has died. One that lives ends at its next renewal.
        return {"expires_at_s": self._now()}, stat.etag

    def _write(self, etag: str | None, duration_s: float) -> None:
        now_s = self._now()
        document = {
            "holder": self._holder,
            "expires_at_s": now_s + duration_s if duration_s else 0.0,
            "deserted_at_s": self.deserted_at_s,
            "nonce": secrets.token_hex(8),
        }
        content = json.dumps(document).encode()
        try:
            if etag is None:
                stat = self._store.put_if_absent(LOCK, content)
            else:
                stat = self._store.put_if_match(LOCK, content, etag)
        except PreconditionFailedError as error:
            message = f"another collection or pin took the lock of {self._store.uri} first: this one stops; try again"
            raise CollectionBusyError(message) from error
        self._etag = stat.etag
        self._renew_at_s = now_s + _RENEW_AFTER_S


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
    """Its bytes may be deleted already: from now on it is never restored."""

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
        """Plain JSON form; fields that earlier programs do not know are left out at their default."""
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
        return sorted(stat.name for stat in self._store.list_objects(TRASH) if is_tombstones(stat.name))

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

    def add_batch(self, tombstones: Sequence[Tombstone]) -> str:
        """Make tombstones durable as a new batch; returns its name."""
        name = tombstones_name(self._run, self._num_batches)
        self._num_batches += 1
        self._write(name, tombstones)
        return name

    def forbid_restoring(self, name: str, units: AbstractSet[str]) -> None:
        """Store that some units may not be restored any more."""
        found = self.read(name)
        marked = [replace(entry, is_doomed=True) if entry.unit in units else entry for entry in found]
        if marked != found:
            self._write(name, marked)

    def rewrite(self, name: str, kept: Sequence[Tombstone]) -> None:
        """Drop all of a batch's tombstones but these."""
        if kept:
            self._write(name, kept)
        else:
            self._store.delete(name)

    def _write(self, name: str, tombstones: Sequence[Tombstone]) -> None:
        document = {"version": _VERSION, "tombstones": [tombstone.to_json() for tombstone in tombstones]}
        self._store.put(name, seal(name, json.dumps(document, allow_nan=False).encode()))


class Collector:
    """One garbage collection of one store. ``roots`` reads them anew at every call, and calls what it is given while
    it reads; ``now`` is in unix seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        roots: Callable[[Callable[[], None]], Roots],
        *,
        graces: Graces | None = None,
        now: Callable[[], float] = time.time,
        holder: str = "gc",
    ) -> None:
        self._store = store
        self._roots = roots
        self._graces = graces or Graces()
        self._now = now
        self._pool = RequestPool.of(store.uri)
        self._started_s = now()
        self._lock = CollectionLock(store, holder, now)
        # The nonce: a batch of another run must never be overwritten, it may be all that is left of a record.
        self._trash = Trash(store, f"{int(self._started_s):012d}-{secrets.token_hex(4)}")
        self._condemned_at_s: dict[str, float] = {}
        self._condemned_for: dict[str, Reason] = {}
        self._batches_of: dict[str, list[str]] = defaultdict(list)
        """Names of the batches with tombstones of a unit."""
        self._hidden: dict[str, str] = {}
        """Keys by those units in the trash that tell what else is needed: artifacts with records, logs of searches."""
        self._tally = Tally()

    def preview(self) -> Tally:
        """What ``collect`` would do now; writes nothing."""
        self._remember_all()
        hidden: set[str] = set()
        roots = self._roots(lambda: None)  # there is no lock to keep
        for unit in chain.from_iterable(survey(self._store, roots, lambda: None)):
            action = self._due(unit) if unit.behind in hidden else self._due_now(unit)
            self._count(action, unit)
            if action is GcAction.HIDE:
                hidden.add(unit.name)
        for _, stat in self._leftovers():
            self._tally.add(GcAction.DESTROY, leftover(stat))
        return self._tally

    def collect(self) -> Tally:
        """Do it.

        Raises:
            CollectionBusyError: another collection is at work.
            CorruptObjectError: the trash cannot be read.
        """
        with self._lock:
            # A restored record may reach artifacts that are in the trash themselves.
            num_restored = -1
            while num_restored < len(self._tally.restored):
                num_restored = len(self._tally.restored)
                self._settle(self._trash.names())
            self._remember_all()
            # One after the other: the decision about a key's metrics depends on that about its record.
            for garbage in survey(self._store, self._roots(self._lock.keep), self._lock.keep):
                for batch in _batches(garbage):
                    self._lock.keep()
                    self._act(batch)
            for delete, stat in self._leftovers():
                self._lock.keep()
                delete(stat.name)
                self._tally.add(GcAction.DESTROY, leftover(stat))
            self._settle(self._trash.names(), finish=True)
        return self._tally

    # ------------------------------------------------------------------------------------------------------- decisions
    def _remember_all(self) -> None:
        for name in self._trash.names():
            self._remember(name, self._trash.read(name))

    def _remember(self, batch: str, tombstones: Iterable[Tombstone]) -> None:
        for tombstone in tombstones:
            self._batches_of[tombstone.unit].append(batch)
            latest = max(tombstone.at_s, self._condemned_at_s.get(tombstone.unit, 0.0))
            self._condemned_at_s[tombstone.unit] = latest
            self._condemned_for[tombstone.unit] = tombstone.reason
            if {record_name(tombstone.key), search_log_head(tombstone.key)} & tombstone.heads.keys():
                self._hidden[tombstone.unit] = tombstone.key

    def _count(self, action: GcAction, unit: Unit) -> None:
        # Without its record an artifact looks like the rest of a job that was never committed.
        is_hidden = action in {GcAction.WAIT_IN_TRASH, GcAction.DESTROY}
        reason = self._condemned_for.get(unit.name, unit.reason) if is_hidden else unit.reason
        self._tally.add(action, replace(unit, reason=reason))

    def _due(self, unit: Unit) -> GcAction:
        if unit.newest_at_s > self._started_s - self._graces.age_s:
            return GcAction.WAIT_FOR_GRACE
        at_s = self._condemned_at_s.get(unit.name, 0.0)
        # Visible again, or with objects younger than its tombstone: it was written again, and its time starts anew.
        if at_s <= unit.newest_at_s or unit.heads:
            return GcAction.HIDE
        at_s = max(at_s, self._condemned_at_s.get(unit.behind, 0.0))
        return GcAction.DESTROY if at_s + self._graces.trash_s <= self._started_s else GcAction.WAIT_IN_TRASH

    def _act(self, batch: Sequence[Unit]) -> None:
        due: dict[GcAction, list[Unit]] = defaultdict(list)
        for unit in batch:
            due[self._due_now(unit)].append(unit)
        for action in (GcAction.WAIT_FOR_GRACE, GcAction.WAIT_IN_TRASH):
            for unit in due[action]:
                self._count(action, unit)
        if due[GcAction.HIDE]:
            self._hide(due[GcAction.HIDE])
        if due[GcAction.DESTROY]:
            self._destroy(due[GcAction.DESTROY])

    def _due_now(self, unit: Unit) -> GcAction:
        # Metrics go after the record of their key: readers of the record expect them.
        record_is_gone = not unit.veil or not self._store.exists(unit.veil)
        return self._due(unit) if record_is_gone else GcAction.WAIT_FOR_GRACE

    # --------------------------------------------------------------------------------------------------------- effects
    def _hide(self, units: Sequence[Unit]) -> None:
        # Their time in the trash begins now: a large collection takes hours.
        tombstones = []
        with self._pool.batch(self._lock.keep) as batch:
            for unit, read in [(unit, batch.start(self._read, unit.heads)) for unit in units]:
                # What cannot be read cannot be restored: it stays, and fsck reports it.
                with suppress(CorruptObjectError, TooLargeError):
                    tombstones.append(Tombstone.of(unit, read(), self._now()))
        hidden = {tombstone.unit for tombstone in tombstones}
        if not hidden:
            return
        # The tombstones are durable before anything disappears: a crash in between hides nothing.
        name = self._trash.add_batch(tombstones)
        roots = self._roots(self._lock.keep)
        for tombstone in tombstones:
            if tombstone.heads and not self._is_wanted(tombstone, roots):
                for head in tombstone.heads:
                    # If another collection took the lock of a suspended one, it has handled the same units.
                    self._lock.keep()
                    self._store.delete(head)
        # The roots are read once more: units that a sweep requested meanwhile are restored. A crash before this line
        # leaves that to the next collection.
        spared = self._settle([name])
        self._remember(name, (tombstone for tombstone in tombstones if tombstone.unit not in spared))
        for unit in units:
            if unit.name in hidden - spared:
                self._tally.add(GcAction.HIDE, unit)

    def _destroy(self, units: Sequence[Unit]) -> None:
        # The names to delete are fixed before the roots are read: what is written later is not ours (invariant 2).
        with self._pool.batch(self._lock.keep) as batch:
            lists = [(unit, batch.start(self._list_around, unit)) for unit in units]
            listed = [(unit, stats()) for unit, stats in lists]
        roots = self._roots_with_inputs()
        due = [(found, stats) for unit, stats in listed if (found := self._find(unit, stats, roots)) is not None]
        due = [(unit, stats) for unit, stats in due if self._due_now(unit) is GcAction.DESTROY]
        # Durable before any byte is deleted: if this collection is suspended, no later one restores the rest.
        self._forbid_restoring({unit.name for unit, _ in due})
        for unit, stats in due:
            if self._is_committed_since(unit, stats):
                continue
            for stat in stats:
                if stat.name.startswith(unit.name):
                    self._lock.keep()
                    self._store.delete(stat.name)
            self._count(GcAction.DESTROY, unit)

    def _roots_with_inputs(self) -> Roots:
        """The roots, read again after what they reach was restored: from a record or a search's log that is in the
        trash, they cannot tell what else must stay.
        """
        num_restored = -1
        while num_restored < len(self._tally.restored):
            num_restored = len(self._tally.restored)
            roots = self._roots(self._lock.keep)
            reached = [unit for unit, key in self._hidden.items() if key in roots.keys]
            if batches := sorted({batch for unit in reached for batch in self._batches_of[unit]}):
                for unit in self._settle(batches):
                    self._hidden.pop(unit, None)
        return roots

    def _forbid_restoring(self, units: AbstractSet[str]) -> None:
        for batch in sorted({batch for unit in units for batch in self._batches_of[unit]}):
            self._lock.keep()
            self._trash.forbid_restoring(batch, units)

    def _settle(self, batches: Iterable[str], *, finish: bool = False) -> set[str]:
        """Restore needed units, and drop finished tombstones; returns the restored units."""
        spared: set[str] = set()
        roots = self._roots(self._lock.keep)
        for name in batches:
            self._lock.keep()
            tombstones = self._trash.read(name)
            kept = []
            for tombstone in tombstones:
                if not self._is_wanted(tombstone, roots):
                    if not finish or not self._is_gone(tombstone):
                        kept.append(tombstone)
                    continue
                spared.add(tombstone.unit)
                if not tombstone.is_doomed:
                    self._restore(tombstone)
                    # A suspended collection may still delete the head: then the next one restores it.
                    if tombstone.heads and self._started_s < self._lock.deserted_at_s + self._graces.trash_s:
                        kept.append(tombstone)
            # Only now: a crash before this line restores once more, which changes nothing.
            if len(kept) < len(tombstones):
                self._trash.rewrite(name, kept)
        return spared

    def _restore(self, tombstone: Tombstone) -> None:
        """Restore the heads whose objects all exist; the rest of an interrupted destruction is garbage again."""
        if not tombstone.heads:
            return
        # A search's log lies where it is, all else that has heads in the folder of its key's artifact.
        folder = tombstone.unit if tombstone.reason in FOLLOWS_RECORD else whole_artifact(tombstone.key)
        sizes = {stat.name: stat.size_bytes for stat in self._store.list_objects(folder)}
        for head, content in tombstone.contents().items():
            if head in sizes or not _is_complete(tombstone.key, head, content, sizes):
                continue
            with suppress(PreconditionFailedError):  # written again since: the new one stays
                self._store.put_if_absent(head, content)
                self._tally.restored.append(tombstone.unit)

    # ---------------------------------------------------------------------------------------------------------- looking
    def _is_wanted(self, tombstone: Tombstone, roots: Roots) -> bool:
        """Whether a unit would not be garbage, were its heads where they were."""
        if tombstone.reason is Reason.FORGOTTEN_LOGS:
            return last_part(tombstone.unit) in roots.sweeps
        if tombstone.key not in roots.keys and tombstone.key not in roots.live:
            return False
        if tombstone.unit == whole_artifact(tombstone.key) or tombstone.reason in FOLLOWS_RECORD:
            return True
        stats = list(self._store.list_objects(whole_artifact(tombstone.key)))
        hidden = set(tombstone.heads) - {stat.name for stat in stats}
        stats += [ObjectStat(name=name, size_bytes=0, etag="") for name in hidden]
        found = classify(self._store, tombstone.key, stats, roots)
        return tombstone.unit not in {unit.name for unit in found}

    def _is_gone(self, tombstone: Tombstone) -> bool:
        """Whether a unit that was condemned long enough ago has nothing left."""
        return self._is_due(tombstone) and not any(True for _ in self._store.list_objects(tombstone.unit))

    def _is_due(self, tombstone: Tombstone) -> bool:
        return tombstone.at_s + self._graces.trash_s <= self._started_s

    def _is_committed_since(self, unit: Unit, stats: Sequence[ObjectStat]) -> bool:
        """Whether an attempt that seemed dead has committed; then its parts are checked in a later collection."""
        record = record_name(unit.key) if unit.key else ""
        return bool(record) and all(stat.name != record for stat in stats) and self._store.exists(record)

    def _list_around(self, unit: Unit) -> list[ObjectStat]:
        """A unit's objects, and the objects of its key on which the decision depends."""
        is_inside = unit.name.startswith(whole_artifact(unit.key)) if unit.key else False
        return list(self._store.list_objects(whole_artifact(unit.key) if is_inside else unit.name))

    def _find(self, unit: Unit, stats: Sequence[ObjectStat], roots: Roots) -> Unit | None:
        """The unit as it is now, if it is still garbage."""
        if not stats:
            return None
        if unit.reason is Reason.UNREFERENCED_METRICS:
            found = classify_metrics(unit.key, unit.name, stats, roots)
        elif unit.reason is Reason.UNREFERENCED_SEARCH:
            found = classify_search(unit.key, unit.name, stats, roots)
        elif unit.reason is Reason.FORGOTTEN_LOGS:
            found = classify_logs(last_part(unit.name), unit.name, stats, roots)
        else:
            found = classify(self._store, unit.key, stats, roots)
        return next((again for again in found if again.name == unit.name), None)

    def _read(self, heads: Iterable[str]) -> dict[str, bytes]:
        contents = {}
        for head in heads:
            with suppress(NotFoundError):
                contents[head] = self._store.get(head, max_bytes=RECORD_BYTES)
        return contents

    def _leftovers(self) -> Iterator[tuple[Callable[[str], None], ObjectStat]]:
        """Old temporary objects of dead writers, each with the function that deletes it."""
        limit_s = self._started_s - self._graces.age_s
        probes = (stat for stat in self._store.list_objects(PROBES) if is_probe(stat.name))
        found: list[tuple[Callable[[str], None], Iterator[ObjectStat]]] = [(self._store.delete, probes)]
        if isinstance(self._store, HasLeftovers):
            found.append((self._store.delete_leftover, self._store.leftovers(until_s=limit_s)))
        for delete, stats in found:
            yield from ((delete, stat) for stat in stats if stat.modified_at_s <= limit_s)


def _is_complete(key: str, head: str, content: bytes, sizes: Mapping[str, int]) -> bool:
    try:
        if head == search_log_head(key):
            return is_whole(key, content, sizes.keys())
        return all(sizes.get(name) == named.size_bytes for name, named in named_objects(head, content).items())
    except ValueError:
        return False


def _batches(garbage: Iterable[Unit]) -> Iterator[list[Unit]]:
    batch: list[Unit] = []
    size = 0
    for unit in garbage:
        batch.append(unit)
        size += 1 + len(unit.heads)
        if size >= _BATCH_UNITS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
