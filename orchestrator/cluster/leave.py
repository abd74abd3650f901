"""``python -m orchestrator.cluster.leave``: this node leaves its Ray cluster, and waits until its attempts have left.

Used when a node ends with some seconds' notice: the preStop hook of a pod, the SIGTERM trap of an allocation, the
watcher of a cloud's preemption notices, a person before maintenance. The node is drained in Ray; the controller sees
that, asks the attempts on it for a checkpoint and starts them elsewhere; a drained node that holds nothing ends itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from orchestrator.backends.ray.draining import ControlStore, DrainError, RayNode, UnreachableError
from orchestrator.core.errors import OrchestratorError
from orchestrator.stack.ports import check_answers

_POLL_S = 0.5
_LEAST_S = 1.0
_GONE_S = 20.0
"""A head is gone if nothing has listened at its address for so long: GPUs of a deleted cluster must not wait longer."""
_LOG = logging.getLogger(__name__)


class Waiting(StrEnum):
    """Whether to return before the node is free."""

    UNTIL_GONE = "until_gone"
    NOT = "not"


class _NoListenerError(UnreachableError):
    """Nothing listens at the head's address."""


class _UnlistedError(DrainError):
    """The head does not list the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A request that a node leaves."""

    reason: str
    seconds_left: float
    address: str = ""
    """Of the head, host:port; empty = what this node's Ray was started with."""
    node: str = ""
    """Beginning of Ray's id of the node; empty = the one on this machine."""
    label: str = ""
    """``key=value`` that the node has; tells nodes of one machine apart."""
    waiting: Waiting = Waiting.UNTIL_GONE


def leave(
    request: Leave, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Drain a node; returns True once it holds nothing and has ended, False if it had not ended in time.

    A head at whose address nothing has listened for 20 s is not waited for. Without waiting, returns True once the
    node is drained.

    Raises:
        DrainError: the node is not found, is the head, or Ray did not answer in all of the time, or is gone.
    """
    ends_s = clock() + max(_LEAST_S, request.seconds_left)
    head = _Head(_address(request.address), clock)
    store, node = _drain(request, head, ends_s, sleep)
    if request.waiting is Waiting.NOT:
        return True
    while clock() < ends_s and not head.is_gone:
        if _is_gone(head, store, node.node_id):
            return True
        sleep(_POLL_S)
    return False


class _Head:
    """The head's address, and for how long nothing has listened there."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self.address = address
        self.clock = clock
        self._absent_since_s: float | None = None

    def check(self) -> None:
        """Raise ``_NoListenerError`` if certainly nothing listens there; Ray itself would take 40 s to find out."""
        try:
            check_answers(self.address, _LEAST_S)
        except OSError as error:
            # A name without an address is what a service of Kubernetes leaves whose pod was deleted.
            is_unknown = isinstance(error, socket.gaierror) and error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}
            if is_unknown or isinstance(error, ConnectionRefusedError):
                if self._absent_since_s is None:
                    self._absent_since_s = self.clock()
                raise _NoListenerError(f"nothing listens at {self.address}, the head's address ({error})") from error
        self._absent_since_s = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing has listened for so long that nobody waits for it any more."""
        return self._absent_since_s is not None and self.clock() >= self._absent_since_s + _GONE_S


def _drain(request: Leave, head: _Head, ends_s: float, sleep: Callable[[float], None]) -> tuple[ControlStore, RayNode]:
    """Drain the node. A head that does not answer is asked again: the notice comes only once.

    One that has just come back may not list the node yet.
    """
    node = None
    for number in count():
        try:
            head.check()
            store = ControlStore(head.address)
            node = node or _choose(store.nodes(), request.node, request.label)  # once drained, it may be gone already
            store.drain(node.node_id, request.reason, max(_LEAST_S, ends_s - head.clock()))
            return store, node
        except (UnreachableError, _UnlistedError) as error:
            if head.is_gone or head.clock() >= ends_s or (isinstance(error, _UnlistedError) and not number):
                raise
            if not number:
                _LOG.warning("%s; asking again", error)
        sleep(_POLL_S)
    raise AssertionError


def _is_gone(head: _Head, store: ControlStore, node_id: str) -> bool:
    try:
        head.check()
        return all(one.node_id != node_id for one in store.nodes())
    except DrainError:
        return False  # a busy head; the node's own end is what counts


def _address(address: str) -> str:
    if address:
        return address
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError, OSError) as error:
        raise DrainError(f"no Ray runs on this machine ({error}); start it, or name the head with --address") from error
    if not found:
        raise DrainError("no Ray runs on this machine; start it, or name the head with --address HOST:PORT")
    return str(found)


def _choose(nodes: Iterable[RayNode], prefix: str, label: str = "") -> RayNode:
    every = list(nodes)
    if label:
        key, _, value = label.partition("=")
        found = [one for one in every if one.labels.get(key) == value]
    elif prefix:
        found = [one for one in every if one.node_id.startswith(prefix)]
    else:
        found = [one for one in every if one.host == socket.gethostname() or one.address in _own_addresses()]
    if len(found) != 1:
        kind = DrainError if found else _UnlistedError
        where = f"have {label}" if label else f"are called {prefix}..." if prefix else "are on this machine"
        names = ", ".join(f"{one.node_id[:12]} on {one.host}" for one in every)
        raise kind(f"{len(found)} nodes {where}, one is needed; name it with --node. There are: {names}")
    if found[0].is_head:
        raise DrainError(
            "this is the head, which all others need; bring the cluster to rest instead: orchestrator drain"
        )
    return found[0]


def _own_addresses() -> set[str]:
    from ray.util import get_node_ip_address

    return {str(get_node_ip_address())}  # type: ignore[no-untyped-call]


def main() -> int:
    """The command line; returns 0 = the node is free, 1 = it was not free in time, 2 = it was not drained."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.cluster.leave", description="Leave the Ray cluster.")
    parser.add_argument("--deadline", type=float, default=110.0, help="seconds until the node is ended anyway")
    parser.add_argument("--reason", default="the node is taken back")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", ""), help="head of the cluster, host:port")
    parser.add_argument("--node", default="", help="beginning of Ray's id of the node; default: this machine's")
    parser.add_argument("--label", default="", help="key=value that the node has, where a machine has several nodes")
    parser.add_argument("--no-wait", action="store_true", help="come back once the node is drained")
    given = parser.parse_args()
    waiting = Waiting.NOT if given.no_wait else Waiting.UNTIL_GONE
    request = Leave(
        reason=given.reason,
        seconds_left=given.deadline,
        address=given.address,
        node=given.node,
        label=given.label,
        waiting=waiting,
    )
    try:
        return 0 if leave(request) else 1
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
