"""Limits on what each user's sweeps use at once on a cluster: one object, which clients write and the controller reads.

They limit starts: running attempts are never ended because of them. ``scheduling.launching`` enforces it, with the rule
of ``scheduling.budgets``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from orchestrator.core.errors import ControllerError, NotFoundError, PreconditionFailedError, TooLargeError
from orchestrator.scheduling.budgets import ANYBODY, Cap, UnreadCap
from orchestrator.state.codec import decode_value
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.layout import quotas_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal

__all__ = ["ANYBODY", "UNREAD", "Cap", "Quotas", "change_quotas", "read_quotas", "write_quotas"]

Quotas: TypeAlias = Mapping[str, Cap]
"""Limits by user; ``*`` (``ANYBODY``) is for all users without their own."""
UNREAD: Quotas = {ANYBODY: UnreadCap()}
"""What a controller enforces that has not read any limits yet: it starts nothing that these may forbid."""
_TRIES = 20
"""Number of tries; a try fails if another client writes in the milliseconds between a read and a write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quotas:
    """Content of ``quotas.json``."""

    users: Quotas = field(default_factory=dict)


def write_quotas(store: ObjectStore, cluster: str, users: Quotas) -> None:
    """Set the limits of all users, in place of all earlier ones; ``*`` is for users without their own.

    Works while no controller runs.

    Raises:
        ControllerError: a bound is negative, or no number.
    """
    store.put(quotas_name(cluster), _encoded(cluster, users))


def change_quotas(store: ObjectStore, cluster: str, change: Callable[[Quotas], Quotas]) -> Quotas:
    """Change the present limits; concurrent changes are not lost. Returns the new limits.

    Args:
        store: of the cluster.
        cluster: its name.
        change: maps all limits to all new limits; called again after a concurrent change. If it raises, nothing
            changes.

    Raises:
        ControllerError: as ``read_quotas`` and ``write_quotas``; or there were too many concurrent changes.
    """
    name = quotas_name(cluster)
    for _ in range(_TRIES):
        try:
            # Without a nonce: equal bytes are equal limits, whoever wrote them.
            content, stat = store.get_with_stat(name, max_bytes=SMALL_BYTES)
        except NotFoundError:
            content, stat = b"{}", None
        except TooLargeError as error:
            raise _unreadable(store, cluster, error) from error
        users = change(_decoded(store, cluster, content))
        try:
            if stat is None:
                store.put_if_absent(name, _encoded(cluster, users))
            else:
                store.put_if_match(name, _encoded(cluster, users), stat.etag)
        except (PreconditionFailedError, NotFoundError):
            continue
        return users
    message = (
        f"{name} in {store.uri} was changed by others {_TRIES} times in a row; nothing was changed here, try again"
    )
    raise ControllerError(message)


def read_quotas(store: ObjectStore, cluster: str) -> Quotas:
    """Limits by user; empty without any.

    Raises:
        ControllerError: the object is of a newer version, or damaged.
    """
    try:
        content = store.get(quotas_name(cluster), max_bytes=SMALL_BYTES)
    except NotFoundError:
        return {}
    except TooLargeError as error:
        raise _unreadable(store, cluster, error) from error
    return _decoded(store, cluster, content)


def _encoded(cluster: str, users: Quotas) -> bytes:
    for user, cap in users.items():
        if any(bound is not None and not 0 <= bound < math.inf for bound in (cap.max_gpus, cap.max_concurrent)):
            message = f"the quota of {user} is {cap}: bounds are 0 or more, or left out"
            raise ControllerError(message)
    return seal(quotas_name(cluster), json.dumps(asdict(_Quotas(users=users))).encode())


def _decoded(store: ObjectStore, cluster: str, content: bytes) -> Quotas:
    try:
        return _checked(decode_value(_Quotas, parse_sealed(quotas_name(cluster), content)).users)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _unreadable(store, cluster, error) from error


def _unreadable(store: ObjectStore, cluster: str, error: Exception) -> ControllerError:
    return ControllerError(
        f"{quotas_name(cluster)} in {store.uri} cannot be read ({error!r}); a controller keeps to the bounds that it "
        "has read before, and starts no job of a user's sweep if it has read none; write it anew: orchestrator quota "
        "clear --all, then set them"
    )


def _checked(users: Quotas) -> Quotas:
    """The limits unchanged. Raises ``TypeError`` for a limit that is not a number: rounds of decisions would fail."""
    for user, cap in users.items():
        for bound in (cap.max_gpus, cap.max_concurrent):
            if bound is not None and not isinstance(bound, int | float):
                raise TypeError(f"a bound of {user} is {bound!r}")
    return users
