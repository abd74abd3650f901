"""Claims: which sweep, on which cluster, works on a job that several of them want.

A claim is ``jobs/<key>/claim.json``. It expires by the clock of its reader. Its holder renews it after half its time,
and others wait ``SKEW_TOLERANCE_S`` longer. An attempt at the job has a number, which is taken once, for ever.

Invariants:
- A claim is changed only by conditional writes, each with a nonce, so that no content is written twice, and a lost
  acknowledgement differs from a lost race.
- A claim only saves work: when it expires, two clusters may work on one key, and the record decides between them.
- A live claim is safe while clocks differ by less than ``CLAIM_DURATION_S / 2 + SKEW_TOLERANCE_S``, six minutes.
- A claim that would last longer than any that such a clock writes is nobody's: the clock was wrong, by days perhaps.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Self

from orchestrator.core.clocks import is_time
from orchestrator.core.errors import NotFoundError, PreconditionFailedError, StorageError, TooLargeError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.layout import attempt_name, attempts_folder, claim_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.request_pool import RequestPool
from orchestrator.storage.seals import check_nonce, seal, seal_with_nonce

CLAIM_DURATION_S = 600.0
SKEW_TOLERANCE_S = 60.0
_LONGEST_S = CLAIM_DURATION_S + CLAIM_DURATION_S / 2 + SKEW_TOLERANCE_S
"""What is left at most of a claim by a clock that is ahead as far as is tolerated."""
FIRST_POLL_S, LAST_POLL_S = 5.0, 60.0
"""Pauses between two polls of another cluster's claim: the first one, doubled up to the last."""
_RENEWALS_PER_CALL = 32
"""Time that a new controller spends at once on claims of running attempts."""
_TRIES = 3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Content of ``claim.json``. ``sweep`` is charged for the work; 0 seconds as expiry = released."""

    cluster: str
    sweep: str
    expires_at_s: float
    nonce: str = ""
    """Created when it is written; contains the digest of the other fields."""

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> Self:
        """Inverse of ``to_bytes``; an unreadable or altered claim counts as expired."""
        try:
            document = parse_json(content)
            claim = cls(**document)
            check_nonce(name, document)
        except (ValueError, TypeError):
            return cls(cluster="", sweep="", expires_at_s=0.0)
        return claim

    def to_bytes(self, name: str) -> bytes:
        """JSON document of the object of this name."""
        return seal_with_nonce(name, asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldClaim:
    claim: Claim
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    until_s: float
    pause_s: float
    is_over: bool = False


class Claims:
    """The claims of one cluster's controller. A fresh claim of its own costs no request.

    ``take`` may be called for several keys at a time, by several threads. ``on_alive`` is called again and again while
    claims are renewed or released, and what it raises is raised.
    """

    def __init__(
        self,
        store: ObjectStore,
        cluster: str,
        pool: RequestPool | None = None,
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._pool = pool or RequestPool(1)
        self._on_alive = on_alive
        self._cluster = cluster
        self._held: dict[str, _HeldClaim] = {}
        self._waits: dict[str, _Wait] = {}
        self._contested: dict[str, float] = {}
        """Until when not to read again claims of others on keys at which our own attempt runs."""

    @property
    def held(self) -> Collection[str]:
        """Keys whose claims are ours, as far as known."""
        return self._held.keys()

    def take(self, key: str, sweep: str, now: float) -> Claim | None:
        """Claim a key for a sweep of ours; returns the other's claim if there is one, or None if the key is ours now.

        Raises:
            StorageError: the store does not answer; it is unknown whether the claim is ours; call it again.
        """
        held = self._held.get(key)
        if held is not None and held.claim.sweep == sweep and _is_fresh(held.claim, now):
            return None
        obstacle = self._write(key, sweep, now)
        earlier = self._waits.pop(key, None)
        if obstacle is not None:
            pause_s = FIRST_POLL_S if earlier is None else min(2 * earlier.pause_s, LAST_POLL_S)
            self._waits[key] = _Wait(until_s=now + pause_s, pause_s=pause_s)
        return obstacle

    def waited_for(self) -> set[str]:
        """Keys that others work on, as last read."""
        return {key for key, wait in self._waits.items() if not wait.is_over}

    def end_waits(self, now: float) -> list[str]:
        """Keys that are due to be looked up again, first the record and then the claim; each is returned once."""
        over = [
            key for key, wait in self._waits.items() if not wait.is_over and is_time(wait.until_s, now, LAST_POLL_S)
        ]
        for key in over:
            self._waits[key] = replace(self._waits[key], is_over=True)
        return over

    def keep(self, live: Mapping[str, str], now: float) -> None:
        """Renew the claims of keys with a live attempt, given with the sweep that it belongs to. Raises nothing itself.

        A claim that cannot be renewed expires, and then the work may be done twice.
        """
        stale = [key for key in live if not self._is_kept(key, now)]
        with self._pool.batch(self._on_alive) as batch:
            writes = {key: batch.start(self._write, key, live[key], now) for key in stale[:_RENEWALS_PER_CALL]}
            for key, write in writes.items():
                try:
                    obstacle = write()
                except StorageError as error:
                    _LOG.warning("the claim of %s is not renewed now: %s", key, error)
                    return
                if obstacle is not None:
                    _LOG.warning("sweep %s of cluster %s works on %s too", obstacle.sweep, obstacle.cluster, key)
                    self._contested[key] = now + CLAIM_DURATION_S / 2

    def release(self, *keys: str) -> None:
        """Release the claims of keys. Raises nothing itself: a claim that stays expires."""
        with self._pool.batch(self._on_alive) as batch:
            for done in [batch.start(self._release, key) for key in keys]:
                done()

    def _release(self, key: str) -> None:
        held = self._held.get(key)
        self.forget(key)
        if held is None:
            return
        name, released = claim_name(key), Claim(cluster=self._cluster, sweep="", expires_at_s=0.0)
        try:
            self._store.put_if_match(name, released.to_bytes(name), held.etag)
        except PreconditionFailedError:
            return  # it had expired, and another cluster took it
        except StorageError as error:
            _LOG.warning("the claim of %s is not released, others wait until it runs out: %s", key, error)

    def forget(self, key: str) -> None:
        """The key is committed: drop the claim, which may expire."""
        for memory in (self._held, self._waits, self._contested):
            memory.pop(key, None)

    def _is_kept(self, key: str, now: float) -> bool:
        held = self._held.get(key)
        is_contested = not is_time(self._contested.get(key, 0.0), now, CLAIM_DURATION_S / 2)
        return is_contested or (held is not None and _is_fresh(held.claim, now))

    def _write(self, key: str, sweep: str, now: float) -> Claim | None:
        """Write our claim if that is allowed; returns the other's claim if there is one."""
        held = self._held.pop(key, None)  # from here on, the remembered claim may be wrong
        found, etag = self._read(key) if key in self._waits else (None, held.etag if held else "")
        expires_at_s = now + CLAIM_DURATION_S
        claim = Claim(cluster=self._cluster, sweep=sweep, expires_at_s=expires_at_s)
        for _ in range(_TRIES):
            if found is not None and not _may_replace(found, claim, now):
                return found
            try:
                self._held[key] = _HeldClaim(claim=claim, etag=self._put(key, claim, etag))
            except PreconditionFailedError:
                found, etag = self._read(key)
            else:
                return None
        return found or claim  # others write first every time: treat the claim as theirs

    def _put(self, key: str, claim: Claim, etag: str) -> str:
        name = claim_name(key)
        content = claim.to_bytes(name)
        stat = self._store.put_if_match(name, content, etag) if etag else self._store.put_if_absent(name, content)
        return stat.etag

    def _read(self, key: str) -> tuple[Claim | None, str]:
        name = claim_name(key)
        try:
            content, stat = self._store.get_with_stat(name, max_bytes=SMALL_BYTES)
        except NotFoundError:
            return None, ""
        except TooLargeError:
            content, stat = b"", self._store.stat(name)
        return Claim.from_bytes(name, content), stat.etag


def take_attempt_number(store: ObjectStore, key: str, document: Mapping[str, object], *, has_run: bool = True) -> int:
    """Take the next attempt number of a key, over all sweeps and clusters, and return it; numbers start at 1.

    Args:
        store: where the number is taken, by a conditional write.
        key: of the job.
        document: who takes it; written with a nonce.
        has_run: False = no attempt is known of: the first number is tried before those that are taken are listed.
    """
    if not has_run and _take_number(store, key, 1, document):
        return 1
    taken = store.list_children(attempts_folder(key))
    number = 1 + max((int(name.removesuffix(".json")) for name in taken), default=0)
    while not _take_number(store, key, number, document):
        number += 1
    return number


def _take_number(store: ObjectStore, key: str, number: int, document: Mapping[str, object]) -> bool:
    name = attempt_name(key, number)
    content = json.dumps({**document, "nonce": secrets.token_hex(8)}).encode()
    try:
        store.put_if_absent(name, seal(name, content))
    except PreconditionFailedError:
        return False
    return True


def _may_replace(found: Claim, claim: Claim, now: float) -> bool:
    """A sweep has one owner, by its journal: a claim under its name is its own, whichever cluster wrote it."""
    is_ours = found.cluster == claim.cluster or found.sweep == claim.sweep
    left_s = found.expires_at_s - now
    return is_ours or left_s <= -SKEW_TOLERANCE_S or left_s > _LONGEST_S


def _is_fresh(claim: Claim, now: float) -> bool:
    """Not so if our own clock was set back since it was written: others may take it for nobody's."""
    return CLAIM_DURATION_S / 2 < claim.expires_at_s - now <= CLAIM_DURATION_S + SKEW_TOLERANCE_S
