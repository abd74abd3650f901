"""A controller in its own process, to be stopped and woken.

``python -m tests.chaos.zombie STORE CLUSTER NAMESPACE LEASE_S``: its Ray is that of ``RAY_ADDRESS``. Ray ends an actor
that somebody replaces, so a controller that sleeps past its lease and goes on must not be one. Exits with `LEASE_LOST`
once it has learnt that another has taken over.
"""

from __future__ import annotations

import os
import sys

from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.controller import Controller
from orchestrator.core.errors import OrchestratorError
from orchestrator.stack.attach import attach_cluster
from orchestrator.storage.open import open_store
from orchestrator.sweeps import lease
from orchestrator.sweeps.lease import LeaseLostError, new_holder
from tests.chaos.chain_jobs import ENTRY_POINT

LEASE_LOST = 33


def serve(store_uri: str, cluster: str, namespace: str, lease_s: str) -> int:
    """Tick until somebody else does."""
    lease.LEASE_DURATION_S, lease.RENEW_EVERY_S = float(lease_s), float(lease_s) / 3
    attach_cluster(os.environ["RAY_ADDRESS"], namespace)
    backend = RayBackend(namespace, settings=RunnerSettings(entry_point=ENTRY_POINT), spare_runners=0)
    controller = Controller(open_store(store_uri), backend, cluster, new_holder())
    while True:
        try:
            controller.tick()
        except LeaseLostError as error:
            sys.stderr.write(f"{error}\n")
            return LEASE_LOST
        except OrchestratorError as error:
            sys.stderr.write(f"{error!r}\n")
        backend.wait(0.1)


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
