"""What this controller knows about keys: whether they are committed, as last read from the store, and who claims them.

Invariants:

- A key is in ``committed`` only after its record was read and its identity compared.
- An entry is dropped whenever an attempt at the key ends or a client may have deleted its record; it is read again
  before the next decision.
- A claim only saves work. If one is lost, two clusters work on a key and the record decides between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.core.errors import CorruptObjectError, IdentityMismatchError, NotFoundError
from orchestrator.planning.graph.plan import Job
from orchestrator.state.events import JobFailed
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.claims import Claim, Claims
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.request_pool import RequestPool


@dataclass(slots=True)
class KeyLookup:
    """Result of looking up keys, by sweep."""

    refused: dict[str, list[JobFailed]] = field(default_factory=dict)
    """Ends of jobs whose record cannot be used."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """Why a sweep's keys are not known: the store did not answer, or the sweep's plan is damaged."""


class KeyCache:
    """Remembers which keys the store has, and holds the claims of those worked on."""

    MOST_SPARE = 100_000
    """Keys that no active sweep needs, before they are dropped: a controller lives for months."""

    def __init__(
        self, store: ObjectStore, cluster: str, pool: RequestPool, on_alive: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self.pool = pool
        self._on_alive = on_alive
        self._claims = Claims(store, cluster, pool, on_alive)
        self._num_needed = 0
        self._absent: set[str] = set()
        self.committed: set[str] = set()
        """Keys whose record was read, identity included."""
        self.unknown: set[str] = set()
        """Keys of ready jobs that have not been looked up yet for lack of time."""

    @property
    def unavailable(self) -> set[str]:
        """Keys at which no attempt may start: other clusters work on them, or they have not been looked up yet."""
        return self._claims.waited_for() | self.unknown

    def look_up(self, ready: Iterable[tuple[str, Job]], clock: Callable[[], float], until_s: float) -> KeyLookup:
        """Find out which jobs that are ready, given with their sweeps, have been committed already; each key is looked
        up once.

        A hundred thousand keys take minutes on a distant store: what is not looked up by ``until_s`` goes to
        ``unknown``.
        """
        lookup, together = KeyLookup(), self.pool.num_threads
        unknown = [(sweep, job) for sweep, job in ready if not self._is_known(job.key)]
        for start in range(0, len(unknown), together):
            some = unknown[start : start + together]
            wanted = [(sweep, job) for sweep, job in some if sweep not in lookup.errors and not self._is_known(job.key)]
            if clock() > until_s:
                self.unknown |= {job.key for _, job in wanted}
                continue
            with self.pool.batch(self._on_alive) as batch:
                started = [(sweep, job, batch.start(self._has_record, job)) for sweep, job in wanted]
                for sweep, job, answer in started:
                    if sweep not in lookup.errors:
                        self._note(lookup, sweep, job, answer, clock())
        return lookup

    def shrink(self, snapshots: Sequence[Snapshot]) -> None:
        """Drop what no active sweep needs, once there is much of it."""
        if len(self.committed) + len(self._absent) <= self._num_needed + self.MOST_SPARE:
            return
        needed = {view.key for snapshot in snapshots for view in snapshot.jobs.values()}
        self._num_needed = len(needed)
        self.committed &= needed
        self._absent &= needed

    def _is_known(self, key: str) -> bool:
        return key in self.committed or key in self._absent

    def _has_record(self, job: Job) -> bool:
        try:
            read_record(self._store, job.key, identity=job.identity)
        except NotFoundError:
            return False
        return True

    def _note(self, lookup: KeyLookup, sweep: str, job: Job, answer: Callable[[], bool], now: float) -> None:
        try:
            is_committed = answer()
        except (CorruptObjectError, IdentityMismatchError) as error:
            # Every lookup gives this error: unless the job fails, the sweep would be read again for ever.
            lookup.refused.setdefault(sweep, []).append(JobFailed(at_s=now, job=job.name, reason=str(error)))
        except Exception as error:  # noqa: BLE001 - raised again where the sweep is guarded
            lookup.errors[sweep] = error
        else:
            (self.committed if is_committed else self._absent).add(job.key)
            if is_committed:
                self._claims.forget(job.key)

    def forget(self, key: str) -> None:
        """Look a key up again: an attempt at it has ended, or a client may have deleted it."""
        self._absent.discard(key)
        self.committed.discard(key)

    def forget_all(self, snapshot: Snapshot) -> None:
        """Look all keys of a (re)submitted sweep up again."""
        for view in snapshot.jobs.values():
            self.forget(view.key)

    def settle(self, key: str) -> None:
        """An attempt has committed the key: drop its claim."""
        self._claims.forget(key)
        self.forget(key)

    def claim(self, key: str, sweep: str, now: float) -> Claim | None:
        """Claim a key for a sweep; returns another cluster's claim if there is one. Raises ``StorageError``."""
        return self._claims.take(key, sweep, now)

    def end_waits(self, now: float) -> None:
        """Look up keys again that other clusters work on, if due: they may be committed, or no longer claimed."""
        for key in self._claims.end_waits(now):
            self.forget(key)

    def keep_claims(self, snapshots: Sequence[Snapshot], now: float, *, ended: Collection[str] = ()) -> None:
        """Renew the claims of running jobs, and release those that no sweep here needs any more.

        ``ended``: attempts that run no more, although a journal that cannot be written now has them as running.
        """
        live = {
            attempt.key: snapshot.sweep
            for snapshot in snapshots
            for attempt in snapshot.live_attempts
            if attempt.attempt_id not in ended
        }
        self._claims.keep(live, now)
        idle = set(self._claims.held) - live.keys()
        self._claims.release(*sorted(idle - (_pending_keys(snapshots) if idle else set())))


def _pending_keys(snapshots: Sequence[Snapshot]) -> set[str]:
    running = [snapshot for snapshot in snapshots if snapshot.state is SweepState.RUNNING]
    return {view.key for snapshot in running for view in snapshot.jobs.values() if view.state is JobState.PENDING}
