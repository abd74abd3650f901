"""What can be killed of a live control plane, found by asking it; used by the tests beside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.controller.connect import CONTROLLER_NAME
from orchestrator.core.errors import NotFoundError
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import load_snapshot, read_progress
from orchestrator.sweeps.lease import LEASE_DURATION_S
from tests.chaos.ray_nodes import ROOT


def start_zombie(
    ray: Any, store: ObjectStore, cluster: str, namespace: str, log: Path, *, lease_s: float = LEASE_DURATION_S
) -> subprocess.Popen[bytes]:
    """A controller that is no actor, with a lease of this length."""
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
    command = [sys.executable, "-m", "tests.chaos.zombie", store.uri, cluster, namespace, str(lease_s)]
    with log.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)


def find_snapshot(store: ObjectStore, sweep: str) -> Snapshot | None:
    """A sweep as its journal tells it; ``None`` before there is one."""
    with suppress(NotFoundError):
        return load_snapshot(store, sweep)
    return None


def has_ended(store: ObjectStore, sweep: str) -> bool:
    """Whether a sweep is over."""
    found = find_snapshot(store, sweep)
    return found is not None and found.state.is_final


def running_pids(store: ObjectStore, sweep: str, is_wanted: Callable[[str], bool], past_step: int = 0) -> list[int]:
    """Processes that train the wanted jobs right now and have got past a step, as their progress tells."""
    found = find_snapshot(store, sweep)
    if found is None:
        return []
    live = {attempt.attempt_id for attempt in found.live_attempts}
    return [
        int(line.progress.metrics["pid"])
        for job, line in read_progress(store, sweep).items()
        if is_wanted(job)
        and line.attempt_id in live
        and line.progress.step > past_step
        and "pid" in line.progress.metrics
    ]


def controller_pid(ray: Any, namespace: str) -> int:
    """Process of the controller's actor."""
    handle = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
    return int(ray.get(handle.ping.remote(), timeout=120)["pid"])


def kill(pid: int) -> None:
    """SIGKILL; a process that has just ended by itself will do, too."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
