"""A controller that serves a store on a Ray cluster until it is killed: ``ADDRESS STORE NAMESPACE``."""

from __future__ import annotations

import secrets
import sys

import ray

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.controller import Controller
from orchestrator.storage.open import open_store
from tests.integration.extra_nodes import UncheckedNodes
from tests.integration.ray_jobs import ENTRY_POINT

CLUSTER = "grown"


def main(address: str, store_uri: str, namespace: str) -> None:
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    settings = RunnerSettings(entry_point=ENTRY_POINT, collectives="gloo", idle_timeout_s=5.0)
    backend = UncheckedNodes(namespace, settings=settings, spare_runners=0)
    controller = Controller(open_store(store_uri), backend, CLUSTER, secrets.token_hex(4))
    while True:
        has_changed = controller.tick()
        backend.observe(())  # as the controller's actor does, also while nothing runs
        if not has_changed:
            backend.wait(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
