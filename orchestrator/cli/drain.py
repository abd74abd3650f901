"""``orchestrator drain``: bring a whole cluster to rest, for an upgrade or maintenance, and let it work again."""

from __future__ import annotations

import time
from dataclasses import asdict

from orchestrator.cli.exits import ExitCode
from orchestrator.cli.orders import WAIT_S, Sending
from orchestrator.cli.output import DocumentForm, print_document, stderr_console
from orchestrator.services.settings import Settings
from orchestrator.services.sources import open_existing_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import Drain, Running, current_user, drain, end_drain, read_drain
from orchestrator.sweeps.lease import read_lease

_POLL_S = 0.1


def begin(cluster: str, running: Running, reason: str, sending: Sending) -> ExitCode:
    """Ask for rest; says whether the cluster rests already."""
    store, name = _place(cluster, sending)
    sender = current_user() if sending.sender is None else sending.sender
    drain(store, name, running=running, reason=reason, sender=sender)
    return _show(_wait(store, name), name, store, sending)


def end(cluster: str, sending: Sending) -> ExitCode:
    """Let a cluster work again."""
    store, name = _place(cluster, sending)
    was_drained = read_drain(store, name) is not None
    end_drain(store, name)
    if sending.form is not DocumentForm.TABLE:
        print_document({"cluster": name, "was_drained": was_drained, "drain": None}, sending.form)
    told = "works again: what waits starts within a second of its controller's next look" if was_drained else "works"
    stderr_console().print(f"Cluster {name} {told}.", markup=False, soft_wrap=True)
    return ExitCode.OK


def show(cluster: str, sending: Sending) -> ExitCode:
    """Say whether a cluster is drained."""
    store, name = _place(cluster, sending)
    return _show(read_drain(store, name), name, store, sending)


def _place(cluster: str, sending: Sending) -> tuple[ObjectStore, str]:
    return open_existing_store(sending.store), cluster or Settings().cluster


def _wait(store: ObjectStore, cluster: str) -> Drain | None:
    """The drain once nothing runs any more, or after a few seconds."""
    deadline_s = time.monotonic() + WAIT_S
    wish = read_drain(store, cluster)
    while (
        wish is not None and wish.drained_at_s is None and time.monotonic() < deadline_s and _is_served(store, cluster)
    ):
        time.sleep(_POLL_S)
        wish = read_drain(store, cluster)
    return wish


def _is_served(store: ObjectStore, cluster: str) -> bool:
    lease = read_lease(store, cluster)
    return lease is not None and lease.expires_at_s > time.time()


def _show(wish: Drain | None, cluster: str, store: ObjectStore, sending: Sending) -> ExitCode:
    if sending.form is not DocumentForm.TABLE:
        print_document({"cluster": cluster, "drain": None if wish is None else asdict(wish)}, sending.form)
    stderr_console().print(f"Cluster {cluster} {_told(wish, cluster, store)}.", markup=False, soft_wrap=True)
    return ExitCode.OK


def _told(wish: Drain | None, cluster: str, store: ObjectStore) -> str:
    if wish is None:
        return "is not drained"
    back = "let it work again with: orchestrator drain --end"
    if wish.drained_at_s is not None:
        return f"rests: nothing runs, and nothing starts; {back}"
    how = "ends" if wish.running is Running.FINISH else "has written a checkpoint"
    if _is_served(store, cluster):
        return f"comes to rest: nothing starts, and it rests once what runs {how}; ask again with --show; {back}"
    return f"has no running controller; the next one starts nothing; {back}"
