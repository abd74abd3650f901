"""The lease of a cluster's controller: one integer, the epoch, that every new controller raises by one.

The epoch decides between two controllers; the expiry only shows clients that no controller renews it any more.
Invariants:

- An epoch is given out once: every write is conditional on what was read before it.
- A controller that finds another epoch or holder in the lease ends; a lease is never taken again with the same epoch.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self

from orchestrator.core.clocks import is_time
from orchestrator.core.errors import ControllerError, NotFoundError, PreconditionFailedError, TooLargeError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.layout import lease_name
from orchestrator.storage.protocol import ObjectStat, ObjectStore
from orchestrator.storage.request_pool import RequestPool
from orchestrator.storage.seals import check_nonce, seal_with_nonce

LEASE_DURATION_S = 15.0
RENEW_EVERY_S = 5.0
_MAX_TRIES = 20
_POLL_S = 0.2


class LeaseLostError(ControllerError):
    """Another controller of this cluster has started: this one must stop."""


class StaleLeaseError(LeaseLostError):
    """A journal names a later epoch than the lease: another controller has started, or an old lease was restored."""

    def __init__(self, sweep: str, epoch: int, own_epoch: int) -> None:
        super().__init__(sweep, epoch, own_epoch)
        self.epoch = epoch

    def __str__(self) -> str:
        sweep, epoch, own_epoch = self.args
        return (
            f"a controller of epoch {epoch} has adopted sweep {sweep!r}, and the lease gave {own_epoch} to this one: "
            "another controller has started since, or an old copy of the lease was put back into the store"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """Content of ``lease.json``; the nonce makes every write another content, and holds its digest."""

    cluster: str
    epoch: int
    holder: str
    expires_at_s: float
    nonce: str = ""

    def may_be_held(self) -> bool:
        """Whether its controller may still run, by the clock of this host: the lease has not expired, and its holder is
        no ended process of this host. See ``find_renewal`` for a host with another clock.
        """
        return not self.has_ended() and time.time() < self.expires_at_s

    def has_ended(self) -> bool:
        """Whether its holder is an ended process of this host."""
        host, _, process = self.holder.rpartition("-")[0].rpartition("-")
        return host == socket.gethostname() and process.isdecimal() and not _is_running(int(process))

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> Self:
        """Inverse of ``to_bytes``. Raises ``ValueError`` or ``TypeError`` if it is no lease, or was altered."""
        document = parse_json(content)
        state = cls(**document)
        numbers: tuple[object, ...] = state.epoch, state.expires_at_s
        if not isinstance(numbers[0], int) or not isinstance(numbers[1], int | float):
            raise TypeError(f"epoch {state.epoch!r} or expiry {state.expires_at_s!r} is not a number")
        check_nonce(name, document)
        return state

    def to_bytes(self, name: str) -> bytes:
        """JSON document of the object of this name."""
        return seal_with_nonce(name, asdict(self))


def new_holder() -> str:
    """A name for one incarnation of a controller: host, pid and a nonce."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _is_running(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def read_lease(store: ObjectStore, cluster: str) -> LeaseState | None:
    """The present lease; ``None`` if the cluster never had a controller. Raises ``ControllerError``."""
    found = _find(store, lease_name(cluster))
    return None if found is None else found[0]


def is_served(store: ObjectStore, cluster: str) -> bool:
    """Whether a controller renews the lease of a cluster; an empty name is that of none. Raises ``ControllerError``."""
    lease = read_lease(store, cluster) if cluster else None
    return lease is not None and time.time() < lease.expires_at_s


def find_renewal(store: ObjectStore, cluster: str) -> LeaseState | None:
    """The lease of a cluster as soon as its controller has renewed it; None if that does not happen in the time for
    which a lease is given, or if its holder is an ended process of this host.

    So whether a controller runs does not depend on the clocks of two hosts. Waits for up to ``LEASE_DURATION_S``.
    Raises ``ControllerError`` as ``read_lease``.
    """
    first, until_s = read_lease(store, cluster), time.monotonic() + LEASE_DURATION_S
    while (lease := read_lease(store, cluster)) is not None and not lease.has_ended():
        if lease != first:
            return lease
        if time.monotonic() > until_s:
            return None
        time.sleep(_POLL_S)
    return None


def _find(store: ObjectStore, name: str) -> tuple[LeaseState, ObjectStat] | None:
    """A lease and its etag. Raises ``ControllerError`` for one that cannot be read: its epoch must not be guessed."""
    try:
        content, stat = store.get_with_stat(name, max_bytes=SMALL_BYTES)
        return LeaseState.from_bytes(name, content), stat
    except NotFoundError:
        return None
    except (ValueError, TypeError, TooLargeError) as error:
        message = (
            f"{name} in {store.uri} cannot be read ({error}): it was damaged or altered, and without its epoch no "
            "controller of this cluster may start; restore it from a copy of the store. Without a copy, end all of the "
            "cluster's processes (runners too: they obey the highest epoch only), then delete it"
        )
        raise ControllerError(message) from error


class Lease:
    """The lease of one controller on its cluster."""

    def __init__(self, store: ObjectStore, cluster: str, holder: str, now: Callable[[], float]) -> None:
        self._store = store
        self._name = lease_name(cluster)
        self._cluster = cluster
        self._holder = holder
        self._now = now
        self._pool = RequestPool.of(store.uri)
        self._renew_at_s = 0.0
        self.epoch = 0
        """0 until acquired."""

    def acquire(self, above: int = 0) -> int:
        """Start a new epoch, whoever has the last one; it is higher than ``above``, the latest epoch in journals.

        Raises:
            LeaseLostError: others kept starting at the same time.
        """
        for _ in range(_MAX_TRIES):
            found = self._read()
            epoch = max(above, 0 if found is None else found[0].epoch) + 1
            try:
                self._write(epoch, found[1].etag if found else None)
            except PreconditionFailedError:
                continue  # another controller took this epoch: take the next one
            self.epoch = epoch
            return epoch
        message = f"{_MAX_TRIES} other controllers of cluster {self._cluster} started meanwhile; start only one"
        raise LeaseLostError(message)

    def keep(self, on_alive: Callable[[], None] = lambda: None) -> None:
        """Renew the lease if due. ``on_alive`` is called again and again while the store does not answer.

        Raises:
            LeaseLostError: a controller with a higher epoch holds it.
        """
        if is_time(self._renew_at_s, self._now(), RENEW_EVERY_S):
            self.verify(on_alive)

    def verify(self, on_alive: Callable[[], None] = lambda: None) -> None:
        """Renew the lease now. ``on_alive`` and what is raised: as for ``keep``."""
        self._pool.ask(on_alive, self._renew)

    def _renew(self) -> None:
        state, stat = self._read() or (None, None)
        if state is None or stat is None or state.epoch != self.epoch or state.holder != self._holder:
            raise LeaseLostError(self._refusal(state))
        try:
            self._write(self.epoch, stat.etag)
        except PreconditionFailedError as error:
            raise LeaseLostError(self._refusal(None)) from error

    def _read(self) -> tuple[LeaseState, ObjectStat] | None:
        return _find(self._store, self._name)

    def _write(self, epoch: int, etag: str | None) -> None:
        now_s = self._now()
        state = LeaseState(
            cluster=self._cluster,
            epoch=epoch,
            holder=self._holder,
            expires_at_s=now_s + LEASE_DURATION_S,
        )
        content = state.to_bytes(self._name)
        if etag is None:
            self._store.put_if_absent(self._name, content)
        else:
            self._store.put_if_match(self._name, content, etag)
        self._renew_at_s = now_s + RENEW_EVERY_S

    def _refusal(self, found: LeaseState | None) -> str:
        other = "another controller" if found is None else f"{found.holder} (epoch {found.epoch})"
        return (
            f"{self._holder} (epoch {self.epoch}) no longer controls cluster {self._cluster}: {other} has taken over; "
            "this controller stops, its attempts go on under the new one"
        )
