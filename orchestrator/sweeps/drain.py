"""Draining a whole cluster, for an upgrade or for maintenance, without harm to its sweeps.

One object per cluster marks the drain. While it exists, the controller starts nothing, lets running attempts end or
write a checkpoint, and writes into it when nothing runs any more. It outlives controllers, so that an upgraded one also
starts nothing until the drain is ended.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from orchestrator.core.errors import ControllerError, NotFoundError, PreconditionFailedError, TooLargeError
from orchestrator.state.codec import decode_value
from orchestrator.state.events import Running
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.layout import drain_name
from orchestrator.storage.protocol import ObjectStat, ObjectStore
from orchestrator.storage.seals import parse_sealed, seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Content of ``drain.json``."""

    cluster: str
    running: Running
    reason: str = ""
    sender: str = ""
    drained_at_s: float | None = None
    """When the last attempt had ended, unix seconds; None = some attempt runs."""
    nonce: str = ""


def drain(
    store: ObjectStore, cluster: str, *, running: Running = Running.FINISH, reason: str = "", sender: str = ""
) -> None:
    """Drain a cluster. Works while no controller runs; a repeated call replaces the earlier request."""
    request = Drain(cluster=cluster, running=running, reason=reason, sender=sender, nonce=secrets.token_hex(8))
    store.put(drain_name(cluster), _encode(request))


def end_drain(store: ObjectStore, cluster: str) -> None:
    """End a cluster's drain; no effect if it is not drained."""
    store.delete(drain_name(cluster))


def read_drain(store: ObjectStore, cluster: str) -> Drain | None:
    """The drain of a cluster; ``None`` if it is not drained.

    Raises:
        ControllerError: the object is of a newer version, or damaged.
    """
    found = _read(store, cluster)
    return found[0] if found else None


def note_drained(store: ObjectStore, cluster: str, now: float) -> None:
    """Record that no attempt runs any more; no effect on a drain that it finds changed or ended meanwhile."""
    with suppress(PreconditionFailedError, NotFoundError, ControllerError):
        found = _read(store, cluster)
        if found is not None and found[0].drained_at_s is None:
            request, stat = found
            store.put_if_match(drain_name(cluster), _encode(replace(request, drained_at_s=now)), stat.etag)


def _encode(request: Drain) -> bytes:
    return seal(drain_name(request.cluster), json.dumps(asdict(request)).encode())


def _read(store: ObjectStore, cluster: str) -> tuple[Drain, ObjectStat] | None:
    try:
        content, stat = store.get_with_stat(drain_name(cluster), max_bytes=SMALL_BYTES)
        return decode_value(Drain, parse_sealed(drain_name(cluster), content)), stat
    except NotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError, TooLargeError) as error:
        message = (
            f"{drain_name(cluster)} in {store.uri} cannot be read ({error!r}), so whether cluster {cluster} may work "
            "is unknown and nothing is started; drain it again, or end the drain"
        )
        raise ControllerError(message) from error
