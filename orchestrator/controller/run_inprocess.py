"""A whole sweep inside one process: no cluster, no actors, the same controller, journal and artifacts."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator.backends.inprocess import InprocessBackend
from orchestrator.backends.protocol import Backend
from orchestrator.controller.controller import Controller
from orchestrator.core.contract import ENTRY_POINT
from orchestrator.core.errors import ControllerError
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import submit
from orchestrator.sweeps.lease import LEASE_DURATION_S, find_renewal, new_holder, read_lease
from orchestrator.sweeps.ledger import SweepLedger
from orchestrator.sweeps.requests import Ownership

_IDLE_WAIT_S = 0.02
_LOG = logging.getLogger(__name__)


def run_sweep_inprocess(
    store: ObjectStore,
    plan: Plan,
    spec_text: str = "",
    *,
    directory: Path | None = None,
    entry_point: str = ENTRY_POINT,
    backend: Backend | None = None,
    on_change: Callable[[Snapshot], None] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Submit a plan and run it to its end here; returns the final snapshot.

    Takes the sweep over from a cluster without a running controller: one whose lease looks expired is watched for up to
    ``LEASE_DURATION_S``, since the clocks may differ. Other sweeps of the store are left alone.
    ``directory`` keeps the cache (default: temporary); ``on_change`` sees a snapshot after every tick that changed
    something; ``provenance`` is as of ``client.submit``.

    Raises:
        ControllerError: the plan was refused, or the controller of another cluster runs the sweep.
        LeaseLostError: another in-process run of this sweep started.
    """
    cluster = f"inprocess-{plan.sweep}"  # a name shared with other sweeps would adopt, and so run, these too
    owner = SweepLedger(store, plan.sweep).refresh().cluster
    with ExitStack() as stack:
        folder = directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orchestrator-")))
        chosen = backend or InprocessBackend(store, folder, entry_point=entry_point)
        controller = Controller(store, chosen, cluster, new_holder(), max_live_attempts=1)
        is_foreign = owner not in {"", cluster}
        ownership = Ownership.KEEP if is_foreign and _is_served(store, owner) else Ownership.TAKE
        message_id = submit(store, plan, spec_text, cluster, ownership=ownership, provenance=provenance)
        controller.wake(plan.sweep)
        return drive(controller, store, plan.sweep, message_id, on_change=on_change)


def drive(
    controller: Controller,
    store: ObjectStore,
    sweep: str,
    message_id: str,
    *,
    on_change: Callable[[Snapshot], None] | None = None,
) -> Snapshot:
    """Tick until a message is settled and its sweep has ended. Raises ``ControllerError`` if it was refused."""
    ledger = SweepLedger(store, sweep)
    while True:
        if not controller.tick():
            time.sleep(_IDLE_WAIT_S)  # only a backoff or another process can be pending
            continue
        snapshot = ledger.refresh()
        if on_change is not None:
            on_change(snapshot)
        if message_id in snapshot.refusals:
            raise ControllerError(snapshot.refusals[message_id])
        if message_id in snapshot.handled and snapshot.state.is_final:
            return snapshot


def _is_served(store: ObjectStore, cluster: str) -> bool:
    """Whether a controller of a cluster runs, or may run."""
    lease = read_lease(store, cluster)
    if lease is None or lease.may_be_held():
        return lease is not None
    _LOG.warning("waits for up to %g s, to see whether the controller of cluster %s runs", LEASE_DURATION_S, cluster)
    return find_renewal(store, cluster) is not None
