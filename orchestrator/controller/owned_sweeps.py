"""The sweeps that one controller owns, and what happens when one of them cannot be read or written.

Invariants:

- A sweep is owned when our adoption is the latest one in its journal; then no earlier writer can append any more.
- After an append whose outcome is unknown, the state in memory is dropped and the journal read again. After a failed
  read the state in memory is still valid.
- A sweep that cannot be served keeps its live attempts, their resources and their keys: see ``shelved``.
- Of a sweep that ended long ago, or has ended and cannot be served, only its condensed snapshot is kept; whatever is
  to be written to its journal, the journal is read again before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from orchestrator.core.clocks import is_time
from orchestrator.core.errors import OUTAGES, OrchestratorError, StorageError
from orchestrator.metrics.sweeps import SHOWN_AFTER_END_S
from orchestrator.state.events import Event, SweepAdopted
from orchestrator.state.failure_policy import Deaths, count_deaths
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.journal import JournalFencedError, journal_exists
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.request_pool import Batch, RequestPool
from orchestrator.sweeps.inbox_polling import InboxPolling
from orchestrator.sweeps.lease import LeaseLostError, StaleLeaseError
from orchestrator.sweeps.ledger import SweepLedger, list_sweeps
from orchestrator.sweeps.progress import ProgressBoard
from orchestrator.sweeps.requests import Message, Ownership, Submit, Superseded, Unreadable, read_inbox

RETRY_EVERY_S = 1.0
MAX_RETRY_EVERY_S = 60.0
BLIND_S = 120.0
"""After it has tried to read each sweep once, a new controller launches nothing, and ends no attempt that it does not
know, for so long while it cannot read all sweeps from the store."""
READ_TOGETHER = 4
"""Sweeps whose journals are read side by side, and so are in memory at once."""
_LOG = logging.getLogger(__name__)
# A journal or plan that was altered by hand fails to decode in these ways; one such sweep must not stop the others.
# Errors that altered objects of one sweep can cause; the other sweeps are served meanwhile.
SWEEP_FAULTS = (OrchestratorError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSweep:
    """One sweep that this controller owns."""

    ledger: SweepLedger
    board: ProgressBoard

    @property
    def snapshot(self) -> Snapshot:
        """The sweep's snapshot."""
        return self.ledger.snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingSweep:
    """One that ended long ago, or cannot be read now, without its plan's jobs: there may be thousands."""

    snapshot: Snapshot
    """Condensed."""
    deaths: Deaths
    """Of all its attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identification:
    """The controller's name and epoch, as in its adoptions."""

    cluster: str
    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delay:
    """The latest wait of a sweep that failed."""

    until_s: float
    length_s: float


class OwnedSweeps:
    """Sweeps by name: those adopted, and finished ones that may be reopened.

    ``on_alive`` is called again and again while sweeps are read and written: many of them take long, and so does a
    single request to a store that throttles or does not answer.
    """

    def __init__(
        self,
        store: ObjectStore,
        me: Identification,
        now: Callable[[], float],
        on_alive: Callable[[], None] = lambda: None,
        pool: RequestPool | None = None,
    ) -> None:
        self._store = store
        self._me = me
        self._now = now
        self._on_alive = on_alive
        self._pool = pool or RequestPool(1)
        # Only the controller's own thread renews its lease: it does so while it waits for the threads of the pool.
        self._on_read = on_alive if self._pool.num_threads == 1 else lambda: None
        self.looks = InboxPolling()
        self._sweeps: dict[str, OwnedSweep] = {}
        self._resting: dict[str, RestingSweep] = {}
        self._retry_at_s: dict[str, float] = {}
        self._delays: dict[str, _Delay] = {}
        self._in_doubt: set[str] = set()
        """Sweeps with an append of ours whose outcome is unknown."""
        self._ignored: dict[str, set[str]] = {}
        """Messages for other clusters by sweep, until we own the sweep."""
        self._shelved: dict[str, Snapshot] = {}
        """Last known snapshots of sweeps that must be read again: their attempts continue."""
        self._troubled: set[str] = set()
        """Owned sweeps that the store did not answer for in this round: nothing more is tried for them."""
        self._contested: dict[str, OwnedSweep] = {}
        """Sweeps to whose journal another writer has appended."""
        self._half_read: dict[str, SweepLedger] = {}
        """Sweeps whose journal was read until the store did not answer."""
        self._unseen: set[str] = set()
        """Sweeps that were never read because the store did not answer: what runs for them is unknown."""
        self._started_at_s = now()
        """When each sweep had been tried to be read once."""
        self._loaded: list[OwnedSweep] = []
        self.fenced: list[OwnedSweep] = []
        """Sweeps that another controller took, until this controller has released their attempts."""
        self.num_appends = 0

    def active(self) -> list[OwnedSweep]:
        """Unfinished sweeps with a plan, oldest submission first."""
        found = [
            owned_sweep
            for sweep, owned_sweep in self._sweeps.items()
            if sweep not in self._troubled and _is_active(owned_sweep.snapshot)
        ]
        return sorted(found, key=lambda owned_sweep: (owned_sweep.snapshot.accepted_at_s, owned_sweep.snapshot.sweep))

    def shelved(self) -> list[Snapshot]:
        """Last snapshots of sweeps that cannot be served now: their attempts are live and hold resources and keys."""
        troubled = {sweep: self._sweeps[sweep].snapshot for sweep in self._troubled if sweep in self._sweeps}
        found = self._shelved | {sweep: snapshot for sweep, snapshot in troubled.items() if _is_active(snapshot)}
        return [found[sweep] for sweep in sorted(found)]

    @property
    def has_unfinished(self) -> bool:
        """Whether a sweep has not ended, was never read, or cannot be served and has live attempts."""
        return bool(self.active() or self._unseen) or any(snapshot.live_attempts for snapshot in self.shelved())

    @property
    def is_blind(self) -> bool:
        """Whether unknown attempts may run; limited in time, because an unreadable sweep must not block the others."""
        return bool(self._unseen) and self._now() < self._started_at_s + BLIND_S

    @property
    def is_contested(self) -> bool:
        """Whether another writer appends to this controller's journals: it should check that it still has its lease."""
        return bool(self._contested or self.fenced)

    def all(self) -> list[OwnedSweep]:
        """All of them but those that ended long ago."""
        return list(self._sweeps.values())

    def snapshots(self) -> list[Snapshot]:
        """Of all of them; of those that ended long ago the condensed ones. May be called by any thread."""
        return [*(one.snapshot for one in self.all()), *(one.snapshot for one in list(self._resting.values()))]

    def former_deaths(self) -> list[Deaths]:
        """Of the attempts of the sweeps that ended long ago."""
        return [one.deaths for one in self._resting.values()]

    def get(self, sweep: str) -> OwnedSweep | None:
        """One of those of ``all``."""
        return self._sweeps.get(sweep)

    def read_again(self, sweep: str) -> OwnedSweep | None:
        """One of them, from its journal if it ended long ago; ``None`` if that fails. Use outside of ``guard``."""
        if sweep in self._resting and sweep not in self._retry_at_s:
            with self.guard(sweep):
                self._load(sweep)
        return self._sweeps.get(sweep)

    def let_rest(self) -> None:
        """Drop the jobs of sweeps that ended long ago: a message to one of them reads it again."""
        for owned_sweep in self.all():
            self._let_rest(owned_sweep)

    def _let_rest(self, owned_sweep: OwnedSweep) -> None:
        snapshot, now = owned_sweep.snapshot, self._now()
        # For as long as metrics count by its jobs, and until its last progress is written.
        is_old = snapshot.state.is_final and now - (snapshot.finished_at_s or 0.0) > SHOWN_AFTER_END_S
        if is_old and not owned_sweep.board.is_due(now):
            self._rest(snapshot)
            del self._sweeps[snapshot.sweep]
            self._loaded = [one for one in self._loaded if one is not owned_sweep]

    def _rest(self, snapshot: Snapshot) -> None:
        deaths = count_deaths([snapshot], self._now())
        self._resting[snapshot.sweep] = RestingSweep(snapshot=snapshot.condensed(), deaths=deaths)

    def take_loaded(self) -> list[OwnedSweep]:
        """Sweeps read from their journals since the last call, without those that ended long ago: their runners were
        released, or are by now ended by the backend as nobody's.
        """
        loaded, self._loaded = self._loaded, []
        return loaded

    def adopt_all(self) -> None:
        """Take every sweep of this cluster; unfinished ones get an adoption at once, which fences dead writers."""
        for sweep in self._pool.ask(self._on_alive, list_sweeps, self._store):
            self._retry_at_s[sweep] = self._now()
        self.reload()
        # Only now: a store that does not answer takes a minute for each read, which would use up the blind time.
        self._started_at_s = self._now()

    def reload(self) -> None:
        """A new round: read again the sweeps whose journal may hold more, or other, than this controller knows."""
        self._troubled.clear()
        self._started_at_s = min(self._started_at_s, self._now())  # the clock may have been put back
        due = [sweep for sweep, at_s in self._retry_at_s.items() if is_time(at_s, self._now(), MAX_RETRY_EVERY_S)]
        self._load_again(due)

    def reload_early(self, sweeps: Collection[str]) -> None:
        """Of these sweeps, which got a message, read those at once that are set aside: it may be what repairs them."""
        # Who writes to a contested one is found out first: this controller may have been replaced.
        self._load_again([sweep for sweep in sweeps if sweep in self._retry_at_s and sweep not in self._contested])

    def _load_again(self, sweeps: Sequence[str]) -> None:
        for start in range(0, len(sweeps), READ_TOGETHER):
            self._load_together(sweeps[start : start + READ_TOGETHER])

    def _load_together(self, sweeps: Sequence[str]) -> None:
        """Read some sweeps side by side, and hold those that are ours in the given order."""
        with self._pool.batch(self._on_alive) as batch:
            reads = [(sweep, self._start_read(batch, sweep)) for sweep in sweeps]
            for sweep, read in reads:
                del self._retry_at_s[sweep]
                with self.guard(sweep):
                    owned_sweep = self._load(sweep, read)
                    self._shelved.pop(sweep, None)  # it is owned again, or another cluster's
                    if owned_sweep is not None:
                        self._let_rest(owned_sweep)  # at once: all sweeps that ever ended would not fit into memory

    def check_fences(self, sweeps: Collection[str]) -> None:
        """Of these sweeps, and of those with messages to other clusters, drop those that another cluster has taken."""
        wanted = [one for one in self.active() if one.snapshot.sweep in sweeps or self._ignored.get(one.snapshot.sweep)]
        with self._pool.batch(self._on_alive) as batch:
            checks = [(owned_sweep, batch.start(owned_sweep.ledger.check_fence)) for owned_sweep in wanted]
            for owned_sweep, check in checks:
                with self.guard(owned_sweep.snapshot.sweep):
                    check()

    def append(self, owned_sweep: OwnedSweep, events: Sequence[Event]) -> None:
        """Journal some events of a sweep; use inside ``guard``."""
        self._finish_append(owned_sweep, partial(self._pool.ask, self._on_alive, owned_sweep.ledger.append, events))

    def append_each(self, news: Sequence[tuple[OwnedSweep, Sequence[Event]]]) -> set[str]:
        """Journal events of several sweeps side by side, each sweep once; use outside of ``guard``. Sweeps whose events
        are durable.
        """
        durable: set[str] = set()
        with self._pool.batch(self._on_alive) as batch:
            writes = [(owned_sweep, batch.start(owned_sweep.ledger.append, events)) for owned_sweep, events in news]
            for owned_sweep, write in writes:
                with self.guard(owned_sweep.snapshot.sweep):
                    self._finish_append(owned_sweep, write)
                    durable.add(owned_sweep.snapshot.sweep)
        return durable

    def _finish_append(self, owned_sweep: OwnedSweep, write: Callable[[], object]) -> None:
        sweep = owned_sweep.snapshot.sweep
        try:
            write()
        except StorageError:
            self._in_doubt.add(sweep)
            raise
        self._in_doubt.discard(sweep)
        self.num_appends += 1

    @contextmanager
    def guard(self, sweep: str) -> Iterator[None]:
        """Contain errors of one sweep: it is read again, and dropped if another cluster has taken it.

        After a failed append it is unknown whether the events are in the journal, so the state in memory is set
        aside; after a read that failed because the store did not answer it is still valid. A sweep that keeps failing
        is read less and less often.
        """
        try:
            yield
        except LeaseLostError:
            raise  # not an error of the sweep: this controller has ended
        except JournalFencedError as error:
            _LOG.warning("sweep %s has another writer: %s", sweep, error)
            self._contest(sweep)
        except OUTAGES as error:
            if sweep in self._sweeps and sweep not in self._in_doubt:
                _LOG.warning("sweep %s is served a moment later: %s", sweep, error)
                self._troubled.add(sweep)
            else:
                self._shelve(sweep, error)
        except SWEEP_FAULTS as error:
            self._shelve(sweep, error)

    def _contest(self, sweep: str) -> None:
        """Another writer appended: another cluster that took the sweep, or a suspended and replaced controller of
        this cluster, which has not seen our adoption yet. Reading the journal shows which.
        """
        owned_sweep = self._sweeps.pop(sweep, None)
        if owned_sweep is not None:
            self._contested[sweep] = owned_sweep
            self._keep(owned_sweep.snapshot)
        self._retry_at_s[sweep] = self._now()

    def _shelve(self, sweep: str, error: Exception) -> None:
        delay = self._next_delay(sweep, error)
        # Our own errors say what is wrong and what to do; other errors need their traceback.
        trace = None if isinstance(error, OrchestratorError) else error
        _LOG.error("sweep %s is set aside and read again in %g s: %s", sweep, delay.length_s, error, exc_info=trace)
        owned_sweep = self._sweeps.pop(sweep, None)
        if owned_sweep is not None:
            self._keep(owned_sweep.snapshot)
        self._delays[sweep] = delay
        self._retry_at_s[sweep] = delay.until_s

    def _keep(self, snapshot: Snapshot) -> None:
        """Keep what others need of a sweep until it is read again: what runs for it, and its exclusions of nodes."""
        if _is_active(snapshot):
            self._shelved[snapshot.sweep] = snapshot
        elif snapshot.state.is_final:
            self._rest(snapshot)

    def _next_delay(self, sweep: str, error: Exception) -> _Delay:
        length_s, previous = RETRY_EVERY_S, self._delays.get(sweep)
        if previous and not is_time(previous.until_s + MAX_RETRY_EVERY_S, self._now(), 2 * MAX_RETRY_EVERY_S):
            # Failed again before it was fine for a while.
            factor = 1 if isinstance(error, OUTAGES) else 2
            length_s = min(factor * previous.length_s, MAX_RETRY_EVERY_S)
        return _Delay(until_s=self._now() + length_s, length_s=length_s)

    def messages(self, lists: Mapping[str, Callable[[], list[str]]]) -> Iterator[tuple[OwnedSweep, Message]]:
        """Messages for this controller, by what each sweep's inbox holds. Those for others are noted and not read
        again.
        """
        for sweep, names in lists.items():
            if sweep in self._retry_at_s:
                continue  # first its journal must be read
            with self.guard(sweep):
                yield from self._messages_of(sweep, names())

    def _messages_of(self, sweep: str, names: Sequence[str]) -> Iterator[tuple[OwnedSweep, Message]]:
        ids = {name.removesuffix(".json") for name in names}
        self._ignored[sweep] = self._ignored.get(sweep, set()) & ids
        for message in self._each(read_inbox(self._store, sweep, skip=self._ignored[sweep], names=names)):
            if self._is_held_up(sweep):
                return  # settling the message before this one failed, and messages count in their order
            owned_sweep = self._addressee(sweep, message)
            if owned_sweep is None:
                self._ignored.setdefault(sweep, set()).add(message.message_id)
                continue
            if isinstance(message, Submit) and message.cluster != self._me.cluster:
                message = self._refusal(owned_sweep, message)  # noqa: PLW2901 - in its place
            if isinstance(message, Submit):
                for earlier in self._overtaken(sweep, message):
                    yield owned_sweep, earlier
                    if self._is_held_up(sweep) or self._sweeps.get(sweep) is not owned_sweep:
                        return
            yield owned_sweep, message
        if not self._is_held_up(sweep):
            self.looks.done(sweep, ids, self._now())

    def _each(self, messages: Iterator[Message]) -> Iterator[Message]:
        """These messages, each read when it is wanted: one may hold a large plan."""
        while (message := self._pool.ask(self._on_alive, next, messages, None)) is not None:
            yield message

    def _is_held_up(self, sweep: str) -> bool:
        return sweep in self._retry_at_s or sweep in self._troubled

    def _overtaken(self, sweep: str, submit: Submit) -> Iterator[Message]:
        """Messages that were sent before a submit and are still in the inbox, for another controller.

        They are handled first: a late cancel would end the submitted sweep.
        """
        for message in self._each(read_inbox(self._store, sweep)):
            if message.message_id >= submit.message_id:
                return
            if isinstance(message, Submit) and message.cluster != self._me.cluster:
                reason = (
                    f"the later submit {submit.message_id} gave the sweep to cluster {submit.cluster}; submit again"
                )
                message = Superseded(message_id=message.message_id, reason=reason)  # noqa: PLW2901 - in its place
            yield message

    def _refusal(self, owned_sweep: OwnedSweep, submit: Submit) -> Superseded:
        """In place of a submit to another cluster of a sweep that has become ours since its sender looked."""
        snapshot, mine = owned_sweep.snapshot, self._me.cluster
        reason = (
            f"sweep {snapshot.sweep} is {snapshot.state} on cluster {mine}, and this was submitted to cluster "
            f"{submit.cluster}: submit it to {mine}, cancel the sweep first, or take it over explicitly"
        )
        return Superseded(message_id=submit.message_id, reason=reason)

    def _addressee(self, sweep: str, message: Message) -> OwnedSweep | None:
        has_journal = partial(self._pool.ask, self._on_alive, journal_exists, self._store, sweep)
        if isinstance(message, Unreadable) and sweep not in self._sweeps and not has_journal():
            text = "message %s to the new sweep %s is damaged (%s): submit the sweep again"
            _LOG.error(text, message.message_id, sweep, message.reason)
        if not isinstance(message, Submit):
            return self._load(sweep) if sweep in self._resting else self._sweeps.get(sweep)
        if message.cluster == self._me.cluster:
            return self._sweeps.get(sweep) or self._load(sweep, submit=message)
        owned_sweep = self._sweeps.get(sweep)
        if owned_sweep and (message.ownership is Ownership.TAKE or not _is_active(owned_sweep.snapshot)):
            return None  # its new owner fences this controller by adopting it
        return owned_sweep

    def _load(
        self, sweep: str, read: Callable[[], SweepLedger] | None = None, *, submit: Submit | None = None
    ) -> OwnedSweep | None:
        """Read a sweep and hold it if it is ours, or becomes ours by ``submit``. ``read``: of ``_start_read``."""
        ledger = self._read(sweep) if read is None else read()
        self._resting.pop(sweep, None)
        snapshot = ledger.snapshot
        is_free = submit is not None and (submit.ownership is Ownership.TAKE or not _is_active(snapshot))
        contested = self._contested.pop(sweep, None)
        if snapshot.cluster != self._me.cluster and not is_free:
            self.fenced += [contested] if contested else []
            return None
        me = self._me
        if snapshot.cluster == me.cluster and snapshot.epoch >= me.epoch and snapshot.holder != me.holder:
            raise StaleLeaseError(sweep, snapshot.epoch, me.epoch)
        is_ours = (snapshot.cluster, snapshot.epoch, snapshot.holder) == (me.cluster, me.epoch, me.holder)
        # Our recorded adoption fences other writers; only a pending append of our own needs a new adoption.
        needs_adoption = not is_ours or sweep in self._in_doubt or contested is not None
        if needs_adoption:
            ledger.adopt(SweepAdopted(at_s=self._now(), cluster=me.cluster, epoch=me.epoch, holder=me.holder))
        board = ProgressBoard(self._store, sweep, replaces=submit is not None or _is_active(snapshot))
        owned_sweep = OwnedSweep(ledger=ledger, board=board)
        self._sweeps[sweep] = owned_sweep
        self._loaded.append(owned_sweep)
        self._ignored.pop(sweep, None)
        self.looks.want(sweep)
        if needs_adoption and _is_active(snapshot):
            self.append(owned_sweep, [])
        return owned_sweep

    def _read(self, sweep: str) -> SweepLedger:
        with self._pool.batch(self._on_alive) as batch:
            return self._start_read(batch, sweep)()

    def _start_read(self, batch: Batch, sweep: str) -> Callable[[], SweepLedger]:
        """Start to read a sweep; what is returned gives its ledger after all of its journal. A store that fails
        half-way need not start over.
        """
        ledger = self._half_read.pop(sweep, None) or SweepLedger(
            self._store, sweep, holder=self._me.holder, on_alive=self._on_read
        )
        return partial(self._finish_read, ledger, batch.start(ledger.refresh))

    def _finish_read(self, ledger: SweepLedger, refresh: Callable[[], Snapshot]) -> SweepLedger:
        sweep = ledger.sweep
        try:
            refresh()
        except OUTAGES:
            self._half_read[sweep] = ledger
            resting = self._resting.keys() - self._in_doubt - self._contested.keys()
            self._unseen |= {sweep} - self._shelved.keys() - resting
            raise
        self._unseen.discard(sweep)
        return ledger


def _is_active(snapshot: Snapshot) -> bool:
    return snapshot.state.is_live
