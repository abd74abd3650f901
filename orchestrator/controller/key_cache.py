"""What this controller knows about keys: whether they are committed, as last read from the store, and who claims them.

Invariants:

- A key is in ``committed`` only after its record was read and its identity compared.
- An entry is dropped whenever an attempt at the key ends or a client may have deleted its record; it is read again
  before the next decision.
- A claim only saves work. If one is lost, two clusters work on a key and the record decides between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from orchestrator.core.errors import CorruptObjectError, IdentityMismatchError, NotFoundError
from orchestrator.planning.graph.plan import Job
from orchestrator.state.events import JobFailed
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.claims import Claim, Claims
from orchestrator.storage.protocol import ObjectStore


class KeyCache:
    """Remembers which keys the store has, and holds the claims of those worked on."""

    def __init__(self, store: ObjectStore, cluster: str, on_alive: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._on_alive = on_alive
        self._claims = Claims(store, cluster)
        self._absent: set[str] = set()
        self.committed: set[str] = set()
        """Keys whose record was read, identity included."""
        self.unknown: set[str] = set()
        """Keys of ready jobs that the latest looks had no time for: committed or not, nobody knows yet."""

    @property
    def unavailable(self) -> set[str]:
        """Keys on which nothing may start: other clusters work on them, or nobody has looked yet."""
        return self._claims.waited_for() | self.unknown

    def look_up(self, ready: Iterable[Job], clock: Callable[[], float], until_s: float) -> list[JobFailed]:
        """Find out which jobs that are ready have been committed already; each key is looked up once.

        Ten thousand keys take minutes on a distant store: what is not looked up by ``until_s`` goes to ``unknown``.
        Returns the ends of jobs whose record cannot be used.
        """
        refused: list[JobFailed] = []
        for job in ready:
            if job.key in self.committed or job.key in self._absent:
                continue
            now = clock()
            if now > until_s:
                self.unknown.add(job.key)
                continue
            self._on_alive()
            try:
                read_record(self._store, job.key, identity=job.identity)
                self.committed.add(job.key)
                self._claims.forget(job.key)
            except NotFoundError:
                self._absent.add(job.key)
            except (CorruptObjectError, IdentityMismatchError) as error:
                # The same at every look: without an end of the job the sweep would be read again for ever.
                refused.append(JobFailed(at_s=now, job=job.name, reason=str(error)))
        return refused

    def forget(self, key: str) -> None:
        """Look a key up again: an attempt at it has ended, or somebody may have deleted it."""
        self._absent.discard(key)
        self.committed.discard(key)

    def forget_all(self, snapshot: Snapshot) -> None:
        """Look all keys of a (re)submitted sweep up again."""
        for view in snapshot.jobs.values():
            self.forget(view.key)

    def settle(self, key: str) -> None:
        """An attempt has committed the key: nobody needs its claim any more."""
        self._claims.forget(key)
        self.forget(key)

    def claim(self, key: str, sweep: str, now: float) -> Claim | None:
        """Claim a key for a sweep; returns the claim that stands in the way. Raises ``StorageError``."""
        return self._claims.take(key, sweep, now)

    def end_waits(self, now: float) -> None:
        """Look again at keys that others work on, once it is time: they may have committed, or given up."""
        for key in self._claims.end_waits(now):
            self.forget(key)

    def keep_claims(self, snapshots: Sequence[Snapshot], now: float) -> None:
        """Renew the claims of what runs, and let others have what nobody here wants any more."""
        live = {attempt.key: snapshot.sweep for snapshot in snapshots for attempt in snapshot.live_attempts}
        self._claims.keep(live, now)
        idle = set(self._claims.held) - live.keys()
        for key in sorted(idle - (_pending_keys(snapshots) if idle else set())):
            self._claims.release(key)


def _pending_keys(snapshots: Sequence[Snapshot]) -> set[str]:
    running = [snapshot for snapshot in snapshots if snapshot.state is SweepState.RUNNING]
    return {view.key for snapshot in running for view in snapshot.jobs.values() if view.state is JobState.PENDING}
