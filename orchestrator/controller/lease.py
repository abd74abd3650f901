"""The lease of a cluster's controller: one integer, the epoch, that every new controller raises by one.

The epoch decides between two controllers; the expiry only tells clients that nobody is renewing any more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from orchestrator.errors import ControllerError, NotFoundError, PreconditionFailedError
from orchestrator.security.json_text import parse_json
from orchestrator.storage.layout import lease_name
from orchestrator.storage.protocol import ObjectStat, ObjectStore

LEASE_DURATION_S = 15.0
RENEW_EVERY_S = 5.0
_MAX_TRIES = 20


class LeaseLostError(ControllerError):
    """Another controller of this cluster has started: this one must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """Content of ``lease.json``; the nonce makes every write another content."""

    cluster: str
    epoch: int
    holder: str
    expires_at_s: float
    nonce: str

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Inverse of ``to_bytes``."""
        return cls(**parse_json(content))

    def to_bytes(self) -> bytes:
        """JSON document."""
        return json.dumps(asdict(self)).encode()


def read_lease(store: ObjectStore, cluster: str) -> LeaseState | None:
    """The lease as it stands; ``None`` if the cluster never had a controller."""
    try:
        return LeaseState.from_bytes(store.get(lease_name(cluster)))
    except NotFoundError:
        return None


class Lease:
    """One controller's hold on its cluster."""

    def __init__(self, store: ObjectStore, cluster: str, holder: str, now: Callable[[], float]) -> None:
        self._store = store
        self._name = lease_name(cluster)
        self._cluster = cluster
        self._holder = holder
        self._now = now
        self._renew_at_s = 0.0
        self.epoch = 0
        """0 until acquired."""

    def acquire(self) -> int:
        """Start a new epoch, whoever held the last one.

        Raises:
            LeaseLostError: others kept starting at the same time.
        """
        for _ in range(_MAX_TRIES):
            found = self._read()
            epoch = 1 if found is None else found[0].epoch + 1
            try:
                self._write(epoch, found[1].etag if found else None)
            except PreconditionFailedError:
                continue  # another controller took this epoch: take the next one
            self.epoch = epoch
            return epoch
        message = f"{_MAX_TRIES} other controllers of cluster {self._cluster} started meanwhile; start only one"
        raise LeaseLostError(message)

    def keep(self) -> None:
        """Renew the lease when it is time.

        Raises:
            LeaseLostError: a controller with a higher epoch holds it.
        """
        if self._now() >= self._renew_at_s:
            self.verify()

    def verify(self) -> None:
        """Renew the lease now. Raises ``LeaseLostError`` as ``keep`` does."""
        state, stat = self._read() or (None, None)
        if state is None or stat is None or state.epoch != self.epoch or state.holder != self._holder:
            raise LeaseLostError(self._refusal(state))
        try:
            self._write(self.epoch, stat.etag)
        except PreconditionFailedError as error:
            raise LeaseLostError(self._refusal(None)) from error

    def _read(self) -> tuple[LeaseState, ObjectStat] | None:
        try:
            content, stat = self._store.get_with_stat(self._name)
        except NotFoundError:
            return None
        return LeaseState.from_bytes(content), stat

    def _write(self, epoch: int, etag: str | None) -> None:
        now_s = self._now()
        state = LeaseState(
            cluster=self._cluster,
            epoch=epoch,
            holder=self._holder,
            expires_at_s=now_s + LEASE_DURATION_S,
            nonce=secrets.token_hex(8),
        )
        if etag is None:
            self._store.put_if_absent(self._name, state.to_bytes())
        else:
            self._store.put_if_match(self._name, state.to_bytes(), etag)
        self._renew_at_s = now_s + RENEW_EVERY_S

    def _refusal(self, found: LeaseState | None) -> str:
        other = "another controller" if found is None else f"{found.holder} (epoch {found.epoch})"
        return (
            f"{self._holder} (epoch {self.epoch}) no longer controls cluster {self._cluster}: {other} has taken over; "
            "this controller stops, its attempts go on under the new one"
        )
